// SPDX-License-Identifier: Apache-2.0

package generate

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devicemodel"
	nodepool "github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

const (
	sriovPool  = "fast" // name of the DevicePool
	defaultPFs = 2
	defaultVFs = 64
	// firstVFOffset and vfStride are values of SR-IOV capabilities of ConnectX cards.
	firstVFOffset, vfStride = 2, 1
	linkSpeed               = 100_000 // Mbit/s
)

// sriovs returns the shapes of hosts with SR-IOV, as xpu-agent publishes them with each device
// model.
func sriovs() []Shape {
	classes := []*resourceapi.DeviceClass{class(v1alpha1.GroupName,
		`device.driver == "`+v1alpha1.GroupName+`" && device.attributes["`+v1alpha1.GroupName+
			`"].pool == "`+sriovPool+`"`)}
	shape := func(name, description string, model v1alpha1.DeviceModel) Shape {
		return Shape{Name: name, Description: description, Classes: classes, sized: true,
			allocatable: isPartOfPF(model), pools: func(node string, _ int, o Options) []pool {
				return sriovPools(node,
					v1alpha1.DevicePoolSpec{Publish: v1alpha1.PublishDRA, Model: model}, o)
			}}
	}

	return []Shape{
		shape("sriov", "VFs as devices, as xpu-agent publishes a DevicePool",
			v1alpha1.ModelFunctions),
		shape("sriov-counters", "VFs and whole PFs as devices with shared counters, as of a "+
			"DevicePool with model: Counters", v1alpha1.ModelCounters),
		shape("sriov-ports", "PFs that claims share, with ports and bandwidth, as of a "+
			"DevicePool with model: Ports", v1alpha1.ModelPorts),
	}
}

// isPartOfPF selects all devices except whole PFs whose VFs are devices too.
func isPartOfPF(model v1alpha1.DeviceModel) func(resourceapi.Device) bool {
	return func(d resourceapi.Device) bool {
		kind := d.Attributes["kind"].StringValue
		return model != v1alpha1.ModelCounters || kind == nil || *kind != string(function.PF)
	}
}

// sriovPools returns the pools that the agent of a host publishes.
func sriovPools(node string, spec v1alpha1.DevicePoolSpec, o Options) []pool {
	p := nodepool.Pool{Name: sriovPool, Spec: spec, PFs: map[pci.Address]function.Function{}}
	for pf := range cmp.Or(o.PFs, defaultPFs) {
		made := vfs(pf, cmp.Or(o.VFs, defaultVFs))
		p.PFs[made[0].PF] = pfOf(made)
		p.Functions = append(p.Functions, made...)
	}

	healthy := func(function.Function) []function.Problem { return nil }
	ahead := func(function.ID, string) bool { return false }
	published := devicemodel.Resources(node, []nodepool.Pool{p}, healthy, ahead)
	var pools []pool
	for _, name := range slices.Sorted(maps.Keys(published.Pools)) {
		made := pool{driver: v1alpha1.GroupName, name: name}
		for _, slice := range published.Pools[name].Slices {
			made.counters = append(made.counters, slice.SharedCounters...)
			if len(slice.Devices) > 0 {
				made.slices = append(made.slices, slice.Devices)
			}
		}
		pools = append(pools, made)
	}

	return pools
}

// vfs returns the VFs of a PF. Cards have two PFs, and alternate between two NUMA nodes.
func vfs(pf, count int) []function.Function {
	card, port := pf/2, pf%2
	numa := card % 2
	root := 0x16 + 0x80*numa + 0x10*(card/2) // first bus of the root complex
	bus, slot := root+2, 4*card+1
	vfs := make([]function.Function, count)
	for i := range vfs {
		vfs[i] = function.Function{
			ID: function.ID{Address: routedAddress(bus,
				port+firstVFOffset+port*(count-1)+i*vfStride)},
			Kind: function.VF, PF: routedAddress(bus, port), PFName: fmt.Sprintf("ens%df%d", slot,
				port),
			Index: i, Vendor: "15b3", Device: "101e", PCIeRoot: fmt.Sprintf("pci0000:%02x", root),
			NUMANode: numa, LinkUp: true,
		}
	}

	return vfs
}

// pfOf returns the PF of the VFs.
func pfOf(vfs []function.Function) function.Function {
	pf := vfs[0]
	pf.ID, pf.Kind, pf.Index, pf.Device = function.ID{Address: pf.PF}, function.PF, -1, "a2dc"
	pf.NumVFs, pf.LinkSpeed = len(vfs), linkSpeed
	return pf
}

// routedAddress returns the PCI address of a routing ID relative to a bus. VFs that do not fit on
// their PF's bus are on the next ones.
func routedAddress(bus, routingID int) pci.Address {
	return pci.Address(fmt.Sprintf("0000:%02x:%02x.%d", bus+routingID/256, routingID/8%32,
		routingID%8))
}
