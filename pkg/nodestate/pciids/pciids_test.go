// SPDX-License-Identifier: Apache-2.0

package pciids_test

import (
	"compress/gzip"
	"os"
	"path/filepath"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate/pciids"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// database has the forms of lines that the real one has, and some that it should not have.
const database = `#
#	List of PCI ID's
#
8086  Intel Corporation
	1521  I350 Gigabit Network Connection
		8086 0001  Ethernet Server Adapter I350-T4
15B3  Mellanox Technologies
	a2dc  MT43244 BlueField-3 integrated ConnectX-7 network controller

	101e
x
	a2dc  of no vendor
C 02  Network controller
	00  Ethernet controller
`

func write(t *testing.T, name string) (root string) {
	t.Helper()
	root = t.TempDir()
	path := filepath.Join(root, "usr", "share", name)
	must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o755))
	file, err := os.Create(path)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, file.Close()) }()
	if filepath.Ext(name) != ".gz" {
		_, err = file.WriteString(database)
		must.Succeed(t, err)
		return root
	}

	packed := gzip.NewWriter(file)
	_, err = packed.Write([]byte(database))
	must.Succeed(t, err)
	must.Succeed(t, packed.Close())
	return root
}

func TestAddNames(t *testing.T) {
	for _, name := range []string{
		"misc/pci.ids", "hwdata/pci.ids", "misc/pci.ids.gz", "hwdata/pci.ids.gz",
	} {
		t.Run(name, func(t *testing.T) {
			state := &nodestate.State{Functions: []nodestate.Function{
				{Vendor: "8086", Device: "1521"}, {Vendor: "15b3", Device: "a2dc"},
				{Vendor: "15b3", Device: "101e"}, {Vendor: "abcd", Device: "a2dc"}, {},
			}}
			pciids.AddNames(state, write(t, name))

			bluefield := "MT43244 BlueField-3 integrated ConnectX-7 network controller"
			for i, want := range [][2]string{
				{"Intel Corporation", "I350 Gigabit Network Connection"},
				{"Mellanox Technologies", bluefield}, {"Mellanox Technologies", ""}, {}, {},
			} {
				f := state.Functions[i]
				if got := [2]string{f.VendorName, f.DeviceName}; got != want {
					t.Errorf("%s:%s is %q, want %q", f.Vendor, f.Device, got, want)
				}
			}
		})
	}
}

// TestWithoutDatabase checks that names are left out where there is no database, or something else.
func TestWithoutDatabase(t *testing.T) {
	root := write(t, "misc/pci.ids")
	must.Succeed(t, os.Rename(filepath.Join(root, "usr/share/misc/pci.ids"),
		filepath.Join(root, "usr/share/misc/pci.ids.gz"))) // not packed
	for _, root := range []string{t.TempDir(), root} {
		state := &nodestate.State{Functions: []nodestate.Function{{Vendor: "8086", Device: "1521"}}}
		pciids.AddNames(state, root)
		if f := state.Functions[0]; f.VendorName != "" || f.DeviceName != "" {
			t.Errorf("%s: %+v", root, f)
		}
	}
}
