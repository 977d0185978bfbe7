// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// v1 creates the directories of a machine with version 1. Unlike in the real file system, no files
// appear in new groups; the end-to-end test of the devcluster command uses the real one.
func v1(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for _, controller := range []string{"cpu", "memory", "unified"} {
		if err := os.Mkdir(filepath.Join(root, controller), 0o755); err != nil {
			t.Fatal(err)
		}
	}

	if err := os.Symlink("cpu", filepath.Join(root, "cpuacct")); err != nil {
		t.Fatal(err)
	}

	return root
}

func groups(t *testing.T, root string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(root, "*/devcluster-*/*"))
	if err != nil {
		t.Fatal(err)
	}

	for i := range found {
		if found[i], err = filepath.Rel(root, found[i]); err != nil {
			t.Fatal(err)
		}
	}

	return found
}

func TestVersion1(t *testing.T) {
	root := v1(t)
	a, other := New(root, "a"), New(root, "a-b")
	for range 2 {
		if err := errors.Join(a.Create("node1"), a.Create("node2"),
			other.Create("node1")); err != nil {
			t.Fatal(err)
		}
	}

	if err := os.MkdirAll(filepath.Join(root, "cpu", a.Node("node1"), "kubepods/pod1"),
		0o755); err != nil {
		t.Fatal(err)
	}
	if err := a.Remove("node1", time.Second); err != nil {
		t.Fatal(err)
	}

	want := []string{"cpu/devcluster-a/node2", "cpu/devcluster-a-b/node1",
		"cpuacct/devcluster-a/node2", "cpuacct/devcluster-a-b/node1",
		"memory/devcluster-a/node2", "memory/devcluster-a-b/node1", "unified/devcluster-a/node2",
		"unified/devcluster-a-b/node1"}
	if diff := cmp.Diff(want, groups(t, root)); diff != "" {
		t.Errorf("after Remove (-want +got):\n%s", diff)
	}

	for range 2 {
		if err := a.RemoveAll(time.Second); err != nil {
			t.Fatal(err)
		}
	}

	want = []string{"cpu/devcluster-a-b/node1", "cpuacct/devcluster-a-b/node1",
		"memory/devcluster-a-b/node1", "unified/devcluster-a-b/node1"}
	if diff := cmp.Diff(want, groups(t, root)); diff != "" {
		t.Errorf("after RemoveAll (-want +got):\n%s", diff)
	}
}

func TestVersion2Delegates(t *testing.T) {
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, "cgroup.controllers"), []byte("memory\n"),
		0o644); err != nil {
		t.Fatal(err)
	}

	a := New(root, "a")
	if err := os.Mkdir(filepath.Join(root, "devcluster-a"), 0o755); err != nil {
		t.Fatal(err)
	}

	for _, dir := range []string{"", "devcluster-a"} {
		if err := os.WriteFile(filepath.Join(root, dir, "cgroup.subtree_control"),
			nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}

	if err := a.Create("node1"); err != nil {
		t.Fatal(err)
	}

	for _, dir := range []string{"", "devcluster-a"} {
		content, err := os.ReadFile(filepath.Join(root, dir, "cgroup.subtree_control"))
		if err != nil || string(content) != "+memory" {
			t.Errorf("%q: subtree_control is %q, %v", dir, content, err)
		}
	}
}

func TestRemoveGivesUp(t *testing.T) {
	root := v1(t)
	a := New(root, "a")
	if err := a.Create("node1"); err != nil {
		t.Fatal(err)
	}
	// rmdir fails on a directory with a file, like on a group in use.
	if err := os.WriteFile(filepath.Join(root, "cpu", a.Node("node1"), "busy"), nil,
		0o644); err != nil {
		t.Fatal(err)
	}
	if err := a.RemoveAll(time.Millisecond); err == nil {
		t.Error("a group in use was removed")
	}
}
