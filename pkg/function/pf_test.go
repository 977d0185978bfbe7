// SPDX-License-Identifier: Apache-2.0

package function_test

import (
	"slices"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

func TestPFOf(t *testing.T) {
	type pf struct {
		address                pci.Address
		offset, stride, number int
	}
	pfs := []pf{
		{"", 2, 2, 1},
		{"0000:3b:00.0", 2, 2, 8},
		{"0000:3b:00.1", 3, 2, 2}, // its VFs follow VF 0 of the PF before
		{"0000:5e:00.0", 0, 0, 0},
	}
	address := func(p pf) pci.Address { return p.address }
	vfIndex := func(p pf, vf pci.Address) (index, distance int, ok bool) {
		index, distance, ok = pci.VFIndex(p.address, vf, p.offset, p.stride)
		return index, distance, ok && index < p.number
	}

	tests := map[string]struct {
		id       function.ID
		pf, name string
	}{
		"PF":                      {function.ID{Address: "0000:3b:00.0"}, "0000:3b:00.0", ""},
		"VF before the next PF's": {function.ID{Address: "0000:3b:00.2"}, "0000:3b:00.0", "vf0"},
		"VF of the nearest PF":    {function.ID{Address: "0000:3b:00.4"}, "0000:3b:00.1", "vf0"},
		"VF behind the last of the nearest PF": {
			function.ID{Address: "0000:3b:01.0"}, "0000:3b:00.0", "vf3",
		},
		"SF": {
			function.SubfunctionID("0000:5e:00.0", 88), "0000:5e:00.0", "sf88",
		},
		"SF of a VF":            {function.SubfunctionID("0000:3b:00.2", 88), "", ""},
		"VF between the VFs":    {function.ID{Address: "0000:3b:00.5"}, "", ""},
		"PF without VFs":        {function.ID{Address: "0000:5e:00.1"}, "", ""},
		"device of another bus": {function.ID{Address: "0000:5f:00.0"}, "", ""},
	}
	for what, test := range tests {
		t.Run(what, func(t *testing.T) {
			reversed := slices.Clone(pfs)
			slices.Reverse(reversed)
			for _, pfs := range [][]pf{pfs, reversed} {
				pf, name, ok := function.PFOf(pfs, test.id, address, vfIndex)
				if string(pf.address) != test.pf || name != test.name || ok != (test.pf != "") {
					t.Errorf("%s is %q of PF %q (%t), want %q of %q", test.id, name, pf.address,
						ok, test.name, test.pf)
				}
			}
		})
	}
}
