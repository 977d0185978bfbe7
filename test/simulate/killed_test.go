// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// TestKilledBeforeUnderMounts covers a simulation that was killed while others had mounted its
// directories: they see the next one's devices in them.
func TestKilledBeforeUnderMounts(t *testing.T) {
	root, host, xpu := t.TempDir(), netns.New(t), netns.New(t)
	config := Config{Root: root, HostNS: host.Path(), XPUNS: xpu.Path(),
		Cards: []Card{{PFs: 1, VFs: 2}}}
	killed, err := New(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}

	killed.stop()
	killed.workers.Wait()

	inode := func(dir string) uint64 {
		var stat unix.Stat_t
		if err := unix.Stat(filepath.Join(root, dir), &stat); err != nil {
			t.Fatal(err)
		}
		return stat.Ino
	}

	before := map[string]uint64{}
	for _, dir := range []string{"sys", "sys/devices", "sys/bus/pci/drivers"} {
		before[dir] = inode(dir)
	}

	h, err := New(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()

	for dir, want := range before {
		if got := inode(dir); got != want {
			t.Errorf("%s is another directory now", dir)
		}
	}

	if _, err := os.Stat(filepath.Join(h.SysRoot(), "bus/pci/devices", "0000:3b:01.1", "net",
		"enp59s0f0v1")); err != nil {
		t.Error(err)
	}
}
