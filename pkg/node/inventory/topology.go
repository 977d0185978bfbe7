// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/vpd"
)

// These are the PCI ids of a Data Direct function (drivers/infiniband/hw/mlx5/data_direct.c).
const (
	nvidia           = "15b3"
	dataDirectDevice = "2100"
)

// mostListed bounds how many NUMA nodes and how many root complexes of a Function are listed,
// because a device in a ResourceSlice has at most 48 values of attributes
// (ResourceSliceMaxAttributeValuesPerDevice of Kubernetes' resource.k8s.io/v1), and a pool's devices
// have up to 32 attributes. With more, none is listed but the Function's own.
const mostListed = 8

// findDataDirect sets the root complexes of Data Direct functions for each PF of NVIDIA. A PF and a
// Data Direct function belong together if both have the same card in their Vital Product Data, as
// rdma_topo of rdma-core matches them. Where there is no Data Direct function, nothing is read. A
// card that has not answered yet belongs to nothing, and may belong to any of them.
func (s *scanner) findDataDirect() {
	roots := map[string][]string{} // by card
	awaited := false
	for address, h := range s.known {
		if !h.dataDirect {
			continue
		}
		if id := s.cardOf(address, h); id != "" && h.PCIeRoot != "" {
			roots[id] = append(roots[id], h.PCIeRoot)
		}
		awaited = awaited || s.cards.awaited(address)
	}

	for address, h := range s.known {
		h.DataDirectRoots, h.DataDirectAwaited = nil, false
		if len(roots) == 0 && !awaited || h.Class != function.Network || h.Vendor != nvidia ||
			h.physfn != "" {
			continue
		}

		id := s.cardOf(address, h)
		h.DataDirectAwaited = awaited || s.cards.awaited(address)
		if all := slices.Clone(roots[id]); len(all) <= mostListed {
			slices.Sort(all)
			h.DataDirectRoots = slices.Compact(all)
		}
	}
}

// cardOf returns the card that a device belongs to, or "" if that is not known yet. It reports the
// error of a device that failed to answer at each scan, until it answers.
func (s *scanner) cardOf(address pci.Address, h *hardware) string {
	dir := s.sysfs.PCI(address)
	id, err := s.cards.of(address, question{instance: h.instance}, func() (string, error) {
		return s.readCard(dir)
	})
	s.report(dir, reasonVPD, err)
	return id
}

// readCard reads the card that a device belongs to, or "" if its Vital Product Data do not say it.
func readCard(device sysfs.Dir) (string, error) {
	file, err := os.Open(string(device.Dir("vpd")))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer file.Close()

	id, err := vpd.Card(file)
	if err != nil {
		return "", fmt.Errorf("vpd: %w", err)
	}
	return id, nil
}

// isDataDirect reports whether a PCI device is a Data Direct function, which is no network function
// whatever its class.
func isDataDirect(device sysfs.Dir) (bool, error) {
	vendor, err := read(device, "vendor", parseID)
	if err != nil {
		return false, fmt.Errorf("vendor: %w", err)
	}
	if vendor != nvidia {
		return false, nil
	}

	id, err := read(device, "device", parseID)
	if err != nil {
		return false, fmt.Errorf("device: %w", err)
	}
	return id == dataDirectDevice, nil
}
