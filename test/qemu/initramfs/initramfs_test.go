// SPDX-License-Identifier: Apache-2.0

package initramfs_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/test/qemu/initramfs"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

func TestWriteTo(t *testing.T) {
	a := initramfs.New()
	a.File("/etc/a/b", []byte("hello"), 0o644)
	var out bytes.Buffer
	n, err := a.WriteTo(&out)
	if err != nil || n != int64(out.Len()) {
		t.Fatalf("wrote %d of %d bytes: %v", n, out.Len(), err)
	}
	if out.Len()%4 != 0 {
		t.Errorf("%d bytes, want a multiple of 4", out.Len())
	}

	got := out.String()
	// The fields of the header are mode, owner, group, links, time, size of the content, devices,
	// and size of the name with its NUL.
	for _, part := range []string{
		"000081A4" + "00000000" + "00000000" + "00000001" + "00000000" + "00000005" +
			strings.Repeat("00000000", 4) + "00000008" + "00000000" + "etc/a/b\x00" +
			"\x00\x00hello\x00\x00\x00",
		"etc\x00", "etc/a\x00", "dev/console\x00", "lib64\x00", "usr/lib64\x00",
	} {
		if !strings.Contains(got, part) {
			t.Errorf("no %q", part)
		}
	}

	if !strings.HasSuffix(strings.TrimRight(got, "\x00"), "TRAILER!!!") {
		t.Error("does not end with its trailer")
	}
}

func TestModules(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{
		"modules.builtin": "kernel/net/core/built-in.ko\n",
		"modules.dep": "net/8021q.ko.xz: net/garp.ko.xz net/stp.ko.xz\nnet/garp.ko.xz: " +
			"net/stp.ko.xz\n" +
			"net/stp.ko.xz:\nx-y.ko:\n",
		"net/8021q.ko.xz":  "8021q",
		"net/garp.ko.xz":   "garp",
		"net/stp.ko.xz":    "stp",
		"x-y.ko":           "x",
		"net/unused.ko.xz": "unused",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}

	a := initramfs.New()
	order, err := a.Modules(dir, "garp", "8021q", "built_in", "x_y")
	if err != nil {
		t.Fatal(err)
	}

	want := []plan.Module{
		{File: "stp.ko.xz"}, {File: "garp.ko.xz"}, {File: "8021q.ko.xz"}, {File: "x-y.ko"},
	}
	if diff := cmp.Diff(want, order); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
	if _, err := a.Modules(dir, "absent"); err == nil || !strings.Contains(err.Error(), "absent") {
		t.Errorf("error %v, want one that names the module", err)
	}
}

func TestProgramWithoutItsLibraries(t *testing.T) {
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := initramfs.New().Program("/usr/bin/static", own, t.TempDir()); err != nil {
		t.Errorf("a static program: %v", err)
	}
	if err := initramfs.New().Program("/usr/bin/true", "/bin/true", t.TempDir()); err == nil ||
		!strings.Contains(err.Error(), "/bin/true needs /usr/lib") {
		t.Errorf("error %v, want one that names the program and its library", err)
	}
}
