// SPDX-License-Identifier: Apache-2.0

package sysfs_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// tree makes files and, where the text begins with "-> ", symbolic links.
func tree(t *testing.T, entries map[string]string) sysfs.Root {
	t.Helper()
	root := t.TempDir()
	for name, text := range entries {
		path := filepath.Join(root, name)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if target, isLink := strings.CutPrefix(text, "-> "); isLink {
			err = errors.Join(err, os.Symlink(target, path))
		} else {
			err = errors.Join(err, os.WriteFile(path, []byte(text), 0o644))
		}

		if err != nil {
			t.Fatal(err)
		}
	}

	return sysfs.Root(root)
}

func TestAttribute(t *testing.T) {
	dir := tree(t, map[string]string{
		"vendor": "0x15b3\n", "model": "Card of a board\x00", "long": strings.Repeat("x", 5000),
		"binary": "\xff\xfe", "n": "12\n",
		"negative": "-1\n",
	}).Dir()

	for name, want := range map[string]string{"vendor": "0x15b3", "model": "Card of a board"} {
		if got, err := dir.Attribute(name); got != want || err != nil {
			t.Errorf("%s is %q, %v, want %q", name, got, err, want)
		}
	}

	for _, name := range []string{"long", "binary"} {
		if got, err := dir.Attribute(name); err == nil {
			t.Errorf("%s is %q", name, got)
		}
	}

	if _, err := dir.Attribute("none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v", err)
	}
	if n, err := dir.Number("n"); n != 12 || err != nil {
		t.Errorf("n is %d, %v", n, err)
	}

	for _, name := range []string{"negative", "vendor", "none"} {
		if n, err := dir.Number(name); err == nil {
			t.Errorf("%s is %d", name, n)
		}
	}
}

func TestWrite(t *testing.T) {
	dir := tree(t, map[string]string{"sriov_numvfs": "16\n"}).Dir()
	if err := dir.Write("sriov_numvfs", "4"); err != nil {
		t.Fatal(err)
	}
	if n, err := dir.Number("sriov_numvfs"); n != 4 || err != nil {
		t.Errorf("it is %d, %v", n, err)
	}
	if err := dir.Write("none", "4"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v", err)
	}
}

func TestVFs(t *testing.T) {
	root := tree(t, map[string]string{
		"bus/pci/devices/0000:3b:00.0/virtfn1":  "-> ../0000:3b:00.3",
		"bus/pci/devices/0000:3b:00.0/virtfn0":  "-> ../0000:3b:00.2",
		"bus/pci/devices/0000:3b:00.0/virtfn10": "-> ../0000:3b:01.4",
		"bus/pci/devices/0000:3b:00.0/virtfn07": "-> ../0000:3b:01.7",
		"bus/pci/devices/0000:3b:00.0/driver":   "-> ../../drivers/mlx5_core",
		"bus/pci/devices/0000:3b:00.1/virtfn0":  "-> ../nonsense",
		"bus/pci/devices/0000:3b:00.2/physfn":   "-> ../0000:3b:00.0",
	})

	vfs, err := root.PCI("0000:3b:00.0").VFs()
	if want := []sysfs.VF{
		{0, "0000:3b:00.2"}, {1, "0000:3b:00.3"}, {10, "0000:3b:01.4"},
	}; err != nil || !slices.Equal(vfs, want) {
		t.Errorf("VFs %v, %v, want %v", vfs, err, want)
	}

	if vfs, err := root.PCI("0000:3b:00.1").VFs(); err == nil ||
		!strings.Contains(err.Error(), "0000:3b:00.1/virtfn0") {
		t.Errorf("VFs %v, %v", vfs, err)
	}
	if vfs, err := root.PCI("0000:3b:00.7").VFs(); len(vfs) > 0 || err != nil {
		t.Errorf("VFs %v, %v", vfs, err)
	}
	if pf, err := root.PCI("0000:3b:00.2").Link("physfn"); pf != "0000:3b:00.0" || err != nil {
		t.Errorf("PF %q, %v", pf, err)
	}
}

func TestNetdevs(t *testing.T) {
	root := tree(t, map[string]string{
		"bus/pci/devices/0000:00:01.0/net/eth0/mtu":          "1500\n",
		"bus/pci/devices/0000:00:02.0/driver":                "-> ../../drivers/virtio-pci",
		"bus/pci/devices/0000:00:02.0/virtio3/net/eth2/mtu":  "1500\n",
		"bus/pci/devices/0000:00:03.0/driver":                "-> ../../drivers/e1000",
		"bus/pci/devices/0000:00:03.0/virtio4/net/eth3/mtu":  "1500\n",
		"bus/pci/devices/0000:00:04.0/driver":                "-> ../../drivers/virtio-pci",
		"bus/pci/devices/0000:00:04.0/virtio5/block/vda/dev": "1:1\n",
	})

	if err := os.MkdirAll(string(root.PCI("0000:00:05.0").Dir("net")), 0o755); err != nil {
		t.Fatal(err)
	}

	for address, want := range map[string]struct {
		dir   string
		names []string
	}{
		"0000:00:01.0": {"net", []string{"eth0"}},
		"0000:00:02.0": {"virtio3/net", []string{"eth2"}},
		"0000:00:03.0": {},
		"0000:00:04.0": {},
		"0000:00:05.0": {"net", nil}, // the netdev is in another network namespace
		"0000:00:06.0": {},
	} {
		device := root.Dir(sysfs.PCIDevices, address)
		dir, names, err := device.Netdevs()
		wantDir := sysfs.Dir("")
		if want.dir != "" {
			wantDir = device.Dir(want.dir)
		}
		if dir != wantDir || !slices.Equal(names, want.names) || err != nil {
			t.Errorf("%s: %q in %q, %v, want %q in %q", address, names, dir, err,
				want.names, wantDir)
		}
	}
}

func TestNames(t *testing.T) {
	root := tree(t, map[string]string{"b": "", "a": "", "file": "x"})
	names, err := root.Dir().Sorted()
	if err != nil || !slices.Equal(names, []string{"a", "b", "file"}) {
		t.Errorf("names %q, %v", names, err)
	}
	if names, exists, err := root.Dir("none").Names(); len(names) > 0 || exists || err != nil {
		t.Errorf("names %q, %t, %v", names, exists, err)
	}
	if _, exists, err := root.Dir("file").Names(); exists || err == nil {
		t.Errorf("a file is a directory: %t, %v", exists, err)
	}
	if root.Dir().Has("none") || !root.Dir().Has("a") || !root.Dir("a").Exists() {
		t.Error("what is there is not, or the other way round")
	}
}

func FuzzVFIndex(f *testing.F) {
	for _, name := range []string{"virtfn7", "virtfn07", "virtfn-1", "virtfn", "driver"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if index, ok := sysfs.VFIndex(name); ok &&
			(index < 0 || "virtfn"+strconv.Itoa(index) != name) {
			t.Errorf("%q is VF %d", name, index)
		}
	})
}
