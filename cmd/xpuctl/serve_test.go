// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestServeLeavesFilesAlone checks that an existing file is neither overwritten nor removed.
func TestServeLeavesFilesAlone(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	file, link, target := in("file"), in("link"), in("none")
	must.Succeed(t, os.WriteFile(file, []byte("mine"), 0o644))
	must.Succeed(t, os.Symlink(target, link))

	for _, path := range []string{file, link} {
		_, err := (serveOptions{kubeconfig: path}).writeKubeconfig([]byte("admin"))
		if err == nil ||
			!strings.Contains(err.Error(), "--write-kubeconfig: "+path+" exists already") {
			t.Errorf("%s: error %v", path, err)
		}
	}

	content, err := os.ReadFile(file)
	must.Succeed(t, err)
	if _, err := os.Lstat(target); err == nil || string(content) != "mine" {
		t.Errorf("the file has %q, the link's target: %v", content, err)
	}
}

// TestServeKubeconfig checks that only the owner can read the file, and that it is removed at the
// end unless another one has replaced it.
func TestServeKubeconfig(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	remove, err := (serveOptions{kubeconfig: path}).writeKubeconfig([]byte("admin"))
	must.Succeed(t, err)
	info, err := os.Stat(path)
	must.Succeed(t, err)
	if content, _ := os.ReadFile(path); string(content) != "admin" || info.Mode() != 0o600 {
		t.Errorf("file with %q, mode %s", content, info.Mode())
	}

	other := path + ".other"
	must.Succeed(t, os.WriteFile(other, []byte("theirs"), 0o600))
	must.Succeed(t, os.Rename(path, path+".ours"))
	must.Succeed(t, os.Rename(other, path))
	must.Succeed(t, remove())
	if content, _ := os.ReadFile(path); string(content) != "theirs" {
		t.Errorf("removed what is not its own: %q", content)
	}

	must.Succeed(t, os.Rename(path+".ours", path))
	must.Succeed(t, remove())
	if _, err := os.Lstat(path); err == nil {
		t.Error("the file is there still")
	}

	must.Succeed(t, remove()) // it was removed before
}
