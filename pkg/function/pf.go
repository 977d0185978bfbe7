// SPDX-License-Identifier: Apache-2.0

package function

import (
	"fmt"
	"math"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// VFName returns the name of a VF within its PF, such as "vf3". It is the end of the
// phys_port_name of the VF's representor (net/devlink/port.c in the kernel).
func VFName(index int) string { return fmt.Sprintf("vf%d", index) }

// PFOf returns the PF that a Function belongs to, and the Function's name within the PF: "vf3",
// "sf88", or "" for the PF itself. ok is false if the Function belongs to none of the PFs.
//
// The function address returns the PCI address of a PF, "" if it is unknown. The function vfIndex
// finds a VF of a PF like [pci.VFIndex].
func PFOf[PF any](
	pfs []PF, f ID, address func(PF) pci.Address,
	vfIndex func(pf PF, vf pci.Address) (index, distance int, ok bool),
) (pf PF, name string, ok bool) {
	for _, candidate := range pfs {
		if address(candidate) == f.Address {
			return candidate, f.Subfunction, true
		}
	}

	if f.Subfunction != "" {
		return pf, "", false // only PFs have SFs
	}

	// The VFs of several PFs may interleave, with different remainders by the stride. A VF belongs
	// to the PF whose first VF is the nearest below it, however many VFs each PF has.
	nearest := math.MaxInt
	for _, candidate := range pfs {
		index, distance, isVF := vfIndex(candidate, f.Address)
		if isVF && distance < nearest {
			pf, name, ok, nearest = candidate, VFName(index), true, distance
		}
	}

	return pf, name, ok
}
