// SPDX-License-Identifier: Apache-2.0

package debian_test

import (
	"archive/tar"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/debian"
)

func TestUnpackWithoutKeys(t *testing.T) {
	cache := t.TempDir()
	missing := filepath.Join(t.TempDir(), "absent.gpg")
	release := debian.Release{
		Mirror: "http://mirror.invalid/debian", Suite: "trixie", Keyring: missing,
	}
	_, err := release.Unpack(t.Context(), cache, "qemu-system-x86")
	for _, part := range []string{"qemu-system-x86", missing, "debian-archive-keyring"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v, want one with %q", err, part)
		}
	}

	left, err := os.ReadDir(cache)
	if err != nil || len(left) > 0 {
		t.Errorf("left in the cache: %v, %v", left, err)
	}
}

func TestKernel(t *testing.T) {
	root := debian.Root(t.TempDir())
	if _, err := root.Kernel(); err == nil || !strings.Contains(err.Error(), "want one file") {
		t.Errorf("without a kernel: %v", err)
	}
	if err := os.MkdirAll(root.Path("/boot"), 0o755); err != nil {
		t.Fatal(err)
	}

	for _, release := range []string{"6.12.1-amd64", "6.12.2-amd64"} {
		if err := os.WriteFile(root.Path("/boot/vmlinuz-"+release), nil, 0o644); err != nil {
			t.Fatal(err)
		}

		got, err := root.Kernel()
		switch release {
		case "6.12.1-amd64":
			if err != nil || got != release {
				t.Errorf("one kernel: %q, %v; want %s", got, err, release)
			}
		default:
			if err == nil {
				t.Errorf("two kernels: %q; want an error", got)
			}
		}
	}
}

func TestCommand(t *testing.T) {
	got := strings.Join(debian.Root("/r").Command("/usr/bin/x", "-a"), " ")
	const libraries = "/r/usr/lib/x86_64-linux-gnu"
	if want := libraries + "/ld-linux-x86-64.so.2 --library-path " + libraries +
		" /r/usr/bin/x -a"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestExtract checks that the files of one folder are extracted, once, by a script in place of xz.
func TestExtract(t *testing.T) {
	root := debian.Root(t.TempDir())
	loader := root.Command("")[0]
	must.Succeed(t, os.MkdirAll(filepath.Dir(loader), 0o755))
	// --library-path <directory> <xz> --decompress --stdout <archive>
	must.Succeed(t, os.WriteFile(loader, []byte("#!/bin/sh\nexec cat $6\n"), 0o755))
	writeTar(t, root.Path("/src.tar.xz"), "src/a/early", "src/b/Makefile", "src/b/sub/deep",
		"src/b/x.c", "src/c/late")

	dir, err := root.Extract(t.Context(), "/src.tar.xz", "src/b")
	must.Succeed(t, err)
	found, err := filepath.Glob(filepath.Join(dir, "*"))
	must.Succeed(t, err)
	if want := []string{filepath.Join(dir, "Makefile"), filepath.Join(dir, "x.c")}; !slices.Equal(found,
		want) {
		t.Errorf("extracted %q, want %q", found, want)
	}
	if content, err := os.ReadFile(filepath.Join(dir, "x.c")); string(content) != "src/b/x.c" {
		t.Errorf("x.c is %q, %v", content, err)
	}

	_, err = root.Extract(t.Context(), "/src.tar.xz", "src/absent")
	wantError(t, err, "src/absent", "no such folder")
	must.Succeed(t, os.Remove(root.Path("/src.tar.xz")))
	_, err = root.Extract(t.Context(), "/src.tar.xz", "src/a")
	wantError(t, err, "src.tar.xz", "No such file")

	again, err := root.Extract(t.Context(), "/src.tar.xz", "src/b")
	if err != nil || again != dir {
		t.Errorf("the second time: %s, %v", again, err)
	}
	if left, err := filepath.Glob(root.Path("/extract-*")); len(left) > 0 {
		t.Errorf("left %q, %v", left, err)
	}
}

// writeTar writes an archive of files that have their names as content.
func writeTar(t *testing.T, path string, names ...string) {
	t.Helper()
	file, err := os.Create(path)
	must.Succeed(t, err)
	defer file.Close()

	archive := tar.NewWriter(file)
	for _, name := range names {
		must.Succeed(t, archive.WriteHeader(&tar.Header{Name: name, Size: int64(len(name)), Mode: 0o644}))
		_, err := archive.Write([]byte(name))
		must.Succeed(t, err)
	}
	must.Succeed(t, archive.Close())
}

func wantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("error %v, want one with %q", err, part)
		}
	}
}
