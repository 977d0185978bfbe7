// SPDX-License-Identifier: Apache-2.0

// Package pciids finds the names of PCI devices in the database that distributions install:
// https://pci-ids.ucw.cz, pci.ids(5). Its ids mean the same on every machine, so the names of a
// node's devices come from the machine on which people look at them.
package pciids

import (
	"bufio"
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// paths are where distributions have the database: Debian, and Fedora.
var paths = [...]string{
	"usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids",
	"usr/share/misc/pci.ids.gz", "usr/share/hwdata/pci.ids.gz",
}

// maxSize bounds what is read of a database, in bytes. In 2026 it has 1.6 MB.
const maxSize = 16 << 20

// id is a vendor, or a device of a vendor.
type id struct{ vendor, device string }

// AddNames adds the names of vendors and devices to the Functions, from the database below a root.
// Names that are not found stay empty, as do all without a database.
func AddNames(state *nodestate.State, root string) {
	wanted := map[id]string{}
	for _, f := range state.Functions {
		wanted[id{vendor: f.Vendor}], wanted[id{f.Vendor, f.Device}] = "", ""
	}
	delete(wanted, id{})

	for _, path := range paths {
		file, err := os.Open(filepath.Join(root, path))
		if err != nil {
			continue
		}
		find(file, strings.HasSuffix(path, ".gz"), wanted)
		_ = file.Close() // it was only read
		break
	}

	for i := range state.Functions {
		f := &state.Functions[i]
		f.VendorName, f.DeviceName = wanted[id{vendor: f.Vendor}], wanted[id{f.Vendor, f.Device}]
	}
}

// find fills in the names of the wanted ids.
func find(database io.Reader, isPacked bool, wanted map[id]string) {
	if isPacked {
		unpacked, err := gzip.NewReader(database)
		if err != nil {
			return
		}
		database = unpacked
	}

	// A line is "15b3  Mellanox Technologies", or with a tab before it a device of the vendor above.
	// Other lines are comments, subsystems with two tabs, and classes that begin with C.
	vendor := ""
	lines := bufio.NewScanner(io.LimitReader(database, maxSize))
	for lines.Scan() {
		line, isDevice := strings.CutPrefix(lines.Text(), "\t")
		number, name, isEntry := strings.Cut(line, "  ")
		number = strings.ToLower(number)
		key := id{vendor: number}
		if isDevice {
			key = id{vendor, number}
		} else if line != "" && line[0] != '#' {
			vendor = number
		}
		if _, isWanted := wanted[key]; isWanted && isEntry && len(number) == len("15b3") {
			wanted[key] = name
		}
	}
}
