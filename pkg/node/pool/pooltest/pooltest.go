// SPDX-License-Identifier: Apache-2.0

// Package pooltest makes Functions and pools for tests.
package pooltest

import (
	"fmt"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// VF returns the VF with the index, of the PF on the bus of domain 0000.
func VF(bus, index int) function.Function {
	routingID := index + 2
	return function.Function{
		ID: function.ID{
			Address: pci.Address(fmt.Sprintf("0000:%02x:%02x.%d", bus+routingID/256, routingID/8%32,
				routingID%8)),
		},
		Kind: function.VF, PF: pci.Address(fmt.Sprintf("0000:%02x:00.0", bus)),
		PFName: fmt.Sprintf("ens%df0", bus),
		Index:  index, Vendor: "15b3", Device: "101e", PCIeRoot: "pci0000:3a", NUMANode: 1,
		LinkUp: true,
	}
}

// VFs returns the first VFs of the PF on the bus.
func VFs(bus, count int) []function.Function {
	var vfs []function.Function
	for index := range count {
		vfs = append(vfs, VF(bus, index))
	}
	return vfs
}

// SF returns the SF with the sfnum, of the PF on the bus.
func SF(bus, sfnum int) function.Function {
	f := VF(bus, sfnum)
	f.ID, f.Kind = function.SubfunctionID(f.PF, uint32(sfnum)), function.SF
	return f
}

// DRA returns a pool that is published in ResourceSlices.
func DRA(name string, functions ...function.Function) pool.Pool {
	return pool.Pool{Name: name, Spec: v1alpha1.DevicePoolSpec{Publish: v1alpha1.PublishDRA},
		Functions: functions}
}
