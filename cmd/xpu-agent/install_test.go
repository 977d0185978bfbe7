// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/opiproject/xpu-device-plugin/cni"
)

func TestInstall(t *testing.T) {
	from, to := filepath.Join(t.TempDir(), "xpu-cni"), t.TempDir()
	for _, content := range []string{"first", "second"} {
		if err := os.WriteFile(from, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := install(from, to); err != nil {
			t.Fatal(err)
		}

		got, err := os.ReadFile(filepath.Join(to, "xpu-cni"))
		if err != nil || string(got) != content {
			t.Fatalf("installed %q, %v; want %q", got, err, content)
		}
	}

	if info, err := os.Stat(filepath.Join(to, "xpu-cni")); err != nil ||
		info.Mode().Perm() != 0o755 {
		t.Errorf("mode %v, %v; want 0755", info.Mode(), err)
	}
	if err := install(from+"-missing", to); err == nil {
		t.Error("install of a file that is not there: no error")
	}
	if err := os.Mkdir(filepath.Join(to, "in-the-way"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(from, filepath.Join(filepath.Dir(from), "in-the-way")); err != nil {
		t.Fatal(err)
	}
	if err := install(filepath.Join(filepath.Dir(from), "in-the-way"), to); err == nil {
		t.Error("install over a directory: no error")
	}

	entries, err := os.ReadDir(to)
	if err != nil || len(entries) != 2 {
		t.Errorf("%v, %v are in the directory; want the binary and what was in the way, and no "+
			"temporary file", entries, err)
	}
}

// TestInstallPaths: the plugin reads the agent's paths from a file of the node, because network
// configurations come from tenants.
func TestInstallPaths(t *testing.T) {
	file := cni.PathsFile(filepath.Join(t.TempDir(), "xpu-cni"))
	want := cni.Paths{Socket: "/run/other/cni.sock", SpoolDir: "/var/lib/other"}
	if err := installPaths(want, file); err != nil {
		t.Fatal(err)
	}
	if got, err := cni.ReadPaths(file); err != nil || got != want {
		t.Errorf("the plugin reads %v, %v; want %v", got, err, want)
	}

	for range 2 {
		if err := installPaths(cni.DefaultPaths(), file); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("with the defaults the file stays: %v", err)
		}
	}

	if err := installPaths(cni.Paths{Socket: "cni.sock", SpoolDir: "/var/lib/other"},
		file); err == nil {
		t.Error("a relative path: no error")
	}
}
