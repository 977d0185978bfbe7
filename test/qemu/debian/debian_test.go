// SPDX-License-Identifier: Apache-2.0

package debian_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

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
