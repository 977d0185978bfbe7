package dra

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// Attributes of devices. Unqualified names belong to the driver's domain; those with a domain are agreed on elsewhere:
// k8s.cni.cncf.io is what Multus looks for. None of them changes when a pod takes the netdev.
const (
	AttributeKind       resourceapi.QualifiedName = "kind"   // "VF" or "SF"
	AttributePool       resourceapi.QualifiedName = "pool"   // name of the DevicePool
	AttributePF         resourceapi.QualifiedName = "pf"     // PCI address of the PF
	AttributePFName     resourceapi.QualifiedName = "pfName" // netdev name of the PF
	AttributeIndex      resourceapi.QualifiedName = "index"  // VF index or sfnum
	AttributeVendor     resourceapi.QualifiedName = "vendor" // PCI vendor id in hex
	AttributeDevice     resourceapi.QualifiedName = "device" // PCI device id in hex
	AttributeMultusID   resourceapi.QualifiedName = "k8s.cni.cncf.io/deviceID"
	AttributeMultusName resourceapi.QualifiedName = "k8s.cni.cncf.io/resourceName"
)

// devicesPerSlice is the API's limit for slices whose devices have taints or consume counters
// (ResourceSliceMaxDevicesWithAdvancedFeatures in k8s.io/api/resource/v1). It is used for every slice, so that the
// first taint does not move devices to other slices.
const devicesPerSlice = 64

// What the Functions of a PF share in pools with maxAllocated (KEP-4815): a set of counters for each DRA pool, from which
// each device consumes one while it is allocated.
const (
	counterSetPF     = "pf"
	counterFunctions = "functions"
)

// resources turns the node's pools into what the driver publishes: one DRA pool for each PF and DevicePool, VFs before
// SFs, each in the slice that its index says. SFs that do not exist yet are devices like the others. The same input
// gives the same output, and a Function that comes or goes changes one slice, unless it is the first or last of its
// slice.
func resources(node string, pools []pool.Pool, problems func(function.Function) []health.Problem) resourceslice.DriverResources {
	out := resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{}}
	for _, p := range pools {
		if p.Spec.Publish != v1alpha1.PublishDRA {
			continue
		}
		for pf, functions := range byPF(p.Functions) {
			id := claim.PoolID{Node: node, PF: pf, DevicePool: p.Name}
			out.Pools[id.String()] = resourceslice.Pool{Slices: slices.Concat(counters(p), chunks(p, functions, problems))}
		}
	}
	return out
}

// counters is the slice that says how much of the pool may be allocated at once, none where all may. A slice has devices
// or counters. It comes first, as its index does not depend on how many devices there are.
func counters(p pool.Pool) []resourceslice.Slice {
	if p.Spec.MaxAllocated == nil {
		return nil
	}
	return []resourceslice.Slice{{SharedCounters: []resourceapi.CounterSet{{
		Name: counterSetPF, Counters: functionCounter(int64(*p.Spec.MaxAllocated)),
	}}}}
}

func functionCounter(n int64) map[string]resourceapi.Counter {
	return map[string]resourceapi.Counter{counterFunctions: {Value: *resource.NewQuantity(n, resource.DecimalSI)}}
}

// chunk is what decides about a Function's slice: nothing that other Functions have a part in.
type chunk struct {
	kind   function.Kind
	number int
}

func chunkOf(f function.Function) chunk { return chunk{f.Kind, f.Index / devicesPerSlice} }

func chunks(p pool.Pool, functions []function.Function, problems func(function.Function) []health.Problem) []resourceslice.Slice {
	slices.SortFunc(functions, func(a, b function.Function) int {
		return cmp.Or(-cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Index, b.Index))
	})
	var out []resourceslice.Slice
	for i, f := range functions {
		if i == 0 || chunkOf(f) != chunkOf(functions[i-1]) {
			out = append(out, resourceslice.Slice{})
		}
		last := &out[len(out)-1]
		last.Devices = append(last.Devices, device(p, f, problems(f)))
	}
	return out
}

func device(p pool.Pool, f function.Function, problems []health.Problem) resourceapi.Device {
	d := resourceapi.Device{
		Name: f.ID.DeviceName(),
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			AttributeKind:     {StringValue: ptr.To(string(f.Kind))},
			AttributePool:     {StringValue: ptr.To(p.Name)},
			AttributePF:       {StringValue: ptr.To(string(f.PF))},
			AttributeIndex:    {IntValue: ptr.To(int64(f.Index))},
			AttributeVendor:   {StringValue: ptr.To(f.Vendor)},
			AttributeDevice:   {StringValue: ptr.To(f.Device)},
			AttributeMultusID: {StringValue: ptr.To(f.ID.String())},
			deviceattribute.StandardDeviceAttributePCIBusID: {StringValue: ptr.To(string(f.ID.Address))},
		},
	}
	// The API refuses the whole slice for a longer value. Multus does not find the devices of such a DevicePool.
	if name := v1alpha1.GroupName + "/" + p.Name; len(name) <= resourceapi.DeviceAttributeMaxValueLength {
		d.Attributes[AttributeMultusName] = resourceapi.DeviceAttribute{StringValue: ptr.To(name)}
	}
	// Absent is not a value: devices without a PCIe root or NUMA node must not match each other by it.
	if f.PFName != "" {
		d.Attributes[AttributePFName] = resourceapi.DeviceAttribute{StringValue: ptr.To(f.PFName)}
	}
	if f.PCIeRoot != "" {
		d.Attributes[deviceattribute.StandardDeviceAttributePCIeRoot] = resourceapi.DeviceAttribute{StringValue: ptr.To(f.PCIeRoot)}
	}
	if f.NUMANode >= 0 {
		d.Attributes[deviceattribute.StandardDeviceAttributeNUMANode] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(f.NUMANode))}
	}
	if p.Spec.Provision == v1alpha1.ProvisionBeforeBind {
		d.BindingConditions = []string{v1alpha1.ConditionProvisioned}
		d.BindingFailureConditions = []string{v1alpha1.ConditionProvisionFailed}
	}
	if p.Spec.MaxAllocated != nil {
		d.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: counterSetPF, Counters: functionCounter(1)}}
	}
	for _, problem := range problems {
		d.Taints = append(d.Taints, resourceapi.DeviceTaint{Key: problem.Taint, Effect: resourceapi.DeviceTaintEffectNoSchedule})
	}
	return d
}

func byPF(functions []function.Function) map[pci.Address][]function.Function {
	out := map[pci.Address][]function.Function{}
	for _, f := range functions {
		out[f.PF] = append(out[f.PF], f)
	}
	return out
}
