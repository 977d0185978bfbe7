// SPDX-License-Identifier: Apache-2.0

package sysfs_test

import (
	"errors"
	"io/fs"
	"path/filepath"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// TestInode: the kernel keeps the number of a device, and gives another one to a device that is made
// anew at the same path.
func TestInode(t *testing.T) {
	ns := netns.New(t)
	device := sysfs.Dir(filepath.Join(ns.Sysfs(t), "class/net/v0"))
	seen := map[uint64]bool{}
	for range 3 {
		netns.Connect(t, ns, "v0", ns, "v1")
		inode, err := device.Inode()
		must.Succeed(t, err)
		if again, err := device.Inode(); again != inode || err != nil {
			t.Errorf("inodes %d and %d of one device, %v", inode, again, err)
		}
		if seen[inode] {
			t.Errorf("inode %d of an earlier device", inode)
		}

		seen[inode] = true
		link, err := ns.Handle().LinkByName("v0")
		must.Succeed(t, err)
		must.Succeed(t, ns.Handle().LinkDel(link))
		if _, err := device.Inode(); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("error %v for a device that is gone", err)
		}
	}
}
