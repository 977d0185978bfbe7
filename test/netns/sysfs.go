// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Sysfs mounts a sysfs that shows the netdevs of the namespace, until the test ends, and returns
// its path.
func (n *Namespace) Sysfs(t testing.TB) string {
	t.Helper()
	path := t.TempDir()
	if err := n.Do(func() error { return unix.Mount("sysfs", path, "sysfs", 0, "") }); err != nil {
		t.Fatalf("sysfs of network namespace %s: %v", n.path, err)
	}

	t.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", filepath.Base(path), err)
		}
	})

	return path
}
