// SPDX-License-Identifier: Apache-2.0

// Package cgroup creates and removes the control groups of a node's kubelet, under version 1,
// version 2, or both at once.
package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Tree represents the control groups of one cluster: a group with the same name in every hierarchy.
type Tree struct {
	root string // mount point, /sys/fs/cgroup
	name string
}

// New returns the tree of a cluster. root is /sys/fs/cgroup.
func New(root, cluster string) Tree { return Tree{root: root, name: "devcluster-" + cluster} }

// Node returns the path of a node's group within each hierarchy, which is the kubelet's cgroupRoot.
func (t Tree) Node(node string) string { return "/" + t.name + "/" + node }

// Create creates a node's groups.
func (t Tree) Create(node string) error {
	hierarchies, err := t.hierarchies()
	if err != nil {
		return err
	}

	for _, h := range hierarchies {
		if err := os.MkdirAll(filepath.Join(h, t.Node(node)), 0o755); err != nil {
			return fmt.Errorf("cgroup: %w", err)
		}
	}

	if Unified(t.root) {
		return t.delegate()
	}

	return nil
}

// Remove removes a node's groups, whose processes must have ended. It waits up to limit for the
// kernel to release them.
func (t Tree) Remove(node string, limit time.Duration) error {
	return t.remove(t.Node(node), limit)
}

// RemoveAll removes the groups of the whole cluster.
func (t Tree) RemoveAll(limit time.Duration) error { return t.remove("/"+t.name, limit) }

func (t Tree) remove(group string, limit time.Duration) error {
	hierarchies, err := t.hierarchies()
	if err != nil {
		return err
	}

	deadline := time.Now().Add(limit)
	for _, h := range hierarchies {
		for {
			err := removeTree(filepath.Join(h, group))
			if err == nil {
				break
			}
			// A killed process leaves its group a moment after it can no longer be signalled;
			// version 1 has no event for that.
			if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
				return fmt.Errorf("cgroup: %w", err)
			}

			time.Sleep(10 * time.Millisecond)
		}
	}

	return nil
}

// hierarchies lists the directories in which groups are created: the one of version 2, or one for
// each set of controllers of version 1 (including the hybrid "unified").
func (t Tree) hierarchies() ([]string, error) {
	if Unified(t.root) {
		return []string{t.root}, nil
	}

	entries, err := os.ReadDir(t.root)
	if err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}

	var dirs []string
	for _, e := range entries {
		// Symbolic links (cpu -> cpu,cpuacct) name a hierarchy a second time.
		if e.IsDir() {
			dirs = append(dirs, filepath.Join(t.root, e.Name()))
		}
	}

	if len(dirs) == 0 {
		return nil, fmt.Errorf("cgroup: nothing is mounted on %s", t.root)
	}

	return dirs, nil
}

// Unified reports whether root is a version 2 hierarchy.
func Unified(root string) bool {
	_, err := os.Stat(filepath.Join(root, "cgroup.controllers"))
	return err == nil
}

// delegate enables every available controller for the groups below the root and below the cluster's
// group, as version 2 requires.
func (t Tree) delegate() error {
	controllers, err := os.ReadFile(filepath.Join(t.root, "cgroup.controllers"))
	if err != nil {
		return fmt.Errorf("cgroup: %w", err)
	}

	for _, group := range []string{"", t.name} {
		for _, c := range strings.Fields(string(controllers)) {
			control := filepath.Join(t.root, group, "cgroup.subtree_control")
			if err := os.WriteFile(control, []byte("+"+c), 0); err != nil {
				return fmt.Errorf("cgroup: controller %s: %w", c, err)
			}
		}
	}

	return nil
}

// removeTree removes a group after its children. A missing group counts as removed.
func removeTree(group string) error {
	entries, err := os.ReadDir(group)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}

	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(group, e.Name())); err != nil {
				return err
			}
		}
	}

	if err := unix.Rmdir(group); err != nil && !errors.Is(err, unix.ENOENT) {
		return &fs.PathError{Op: "rmdir", Path: group, Err: err}
	}

	return nil
}
