// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestMissingFor: a device is missing only for as long as each look found the others and not it.
func TestMissingFor(t *testing.T) {
	const vf0, pf0, never = "0000:3b:01.0", "0000:3b:00.0", "0000:99:00.0"
	synctest.Test(t, func(t *testing.T) {
		root := t.TempDir()
		host().write(t, root)
		inv := New(Options{SysRoot: root, HostNetdevs: func() (hostuse.Netdevs, error) {
			return nil, nil
		}})
		bus, away := filepath.Join(root, "bus/pci/devices"), filepath.Join(root, "away")
		want := func(when string, address pci.Address, want time.Duration, wantMissing bool) {
			t.Helper()
			got, missing := inv.MissingFor(address)
			if got != want || missing != wantMissing {
				t.Errorf("%s: %s is missing %t for %s, want %t for %s", when, address, missing, got,
					wantMissing, want)
			}
		}
		scan := func() {
			t.Helper()
			time.Sleep(time.Minute)
			_ = inv.scan()
		}
		unplug := func() { must.Succeed(t, os.Remove(filepath.Join(bus, vf0))) }

		scan()
		unplug()
		scan()
		time.Sleep(time.Minute)
		want("unplugged", vf0, time.Minute, true)
		want("unplugged", pf0, 0, false)
		want("never seen", never, 2*time.Minute, true) // since the first scan

		// It is back for a moment, which only a scan sees.
		host().write(t, root)
		scan()
		unplug()
		scan()
		want("unplugged again", vf0, 0, true)

		// The entry of a device that cannot be read is there.
		must.Succeed(t, os.Symlink("nowhere", filepath.Join(bus, vf0)))
		scan()
		want("unreadable", vf0, 0, false)
		unplug()
		scan()

		// The bus cannot be read, or is another one.
		must.Succeed(t, os.Rename(bus, away))
		scan()
		want("without a bus", vf0, 0, false)
		if got := len(inv.Snapshot()); got != 2 {
			t.Errorf("%d Functions without a bus, want those that were known", got)
		}
		must.Succeed(t, os.Mkdir(bus, 0o755))
		scan()
		want("with an empty bus", vf0, 0, false)
		must.Succeed(t, os.Remove(bus))
		must.Succeed(t, os.Rename(away, bus))
		scan()
		time.Sleep(time.Minute)
		want("with the bus again", vf0, time.Minute, true)

		// A look that fails between two scans is an interruption too.
		must.Succeed(t, os.Rename(bus, away))
		want("without a bus between scans", vf0, 0, false)
		must.Succeed(t, os.Rename(away, bus))
		want("with the bus once more", vf0, 0, true)
	})
}

// TestGoneOnlyByProof: a Function is gone only if the kernel shows other devices, and not because
// something cannot be read.
func TestGoneOnlyByProof(t *testing.T) {
	vf0 := function.ID{Address: "0000:3b:01.0"}
	sf := function.SubfunctionID("0000:3b:00.0", 7)
	hide := func(name string) func(*testing.T, string) {
		return func(t *testing.T, root string) {
			must.Succeed(t, os.RemoveAll(filepath.Join(root, name)))
		}
	}
	for name, test := range map[string]struct {
		id     function.ID
		change func(*testing.T, string)
		gone   bool
	}{
		"VF":                {vf0, hide("bus/pci/devices/0000:3b:01.0"), true},
		"VF, no bus":        {vf0, hide("bus/pci"), false},
		"VF, no sysfs":      {vf0, hide("."), false},
		"SF, no bus of SFs": {sf, func(*testing.T, string) {}, true},
		"SF, no bus":        {sf, hide("bus/pci"), false},
		"SF, another cannot be read": {sf, func(t *testing.T, root string) {
			dir := filepath.Join(root, "bus/auxiliary/devices")
			must.Succeed(t, os.MkdirAll(filepath.Join(dir, "mlx5_core.sf.4"), 0o755))
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			root := filepath.Join(t.TempDir(), "sys")
			host().write(t, root)
			test.change(t, root)
			inv := New(Options{SysRoot: root})
			_, netdev := inv.Netdev(test.id)
			_, driver := inv.Driver(test.id)
			_, inode := inv.Inode(test.id)
			for what, err := range map[string]error{
				"netdev": netdev, "driver": driver, "inode": inode,
			} {
				if err == nil || errors.Is(err, fs.ErrNotExist) != test.gone {
					t.Errorf("%s: error %v, want one that says gone: %t", what, err, test.gone)
				}
			}
		})
	}
}
