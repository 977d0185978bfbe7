package dra

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/resourceslice"

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

// devicesPerSlice is the API's limit for slices whose devices have taints or consume counters. It is used for every slice,
// so that the first taint does not move devices to other slices.
const devicesPerSlice = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures

// What the Functions of a PF share in pools with maxAllocated (KEP-4815): a set of counters for each DRA pool, from which
// each device consumes one while it is allocated.
const (
	counterSetPF     = "pf"
	counterFunctions = "functions"
)

// resources turns the node's pools into what the driver publishes: one DRA pool for each PF and DevicePool, VFs before
// SFs, each in the slice that its index says, so that a Function that comes or goes changes one slice, unless it is the
// only one of its slice. SFs that do not exist yet are devices like the others.
func resources(node string, pools []pool.Pool, problems func(function.Function) []health.Problem) resourceslice.DriverResources {
	out := resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{}}
	for _, p := range pools {
		if p.Spec.Publish != v1alpha1.PublishDRA {
			continue
		}
		byPF := map[pci.Address][]function.Function{}
		for _, f := range p.Functions {
			byPF[f.PF] = append(byPF[f.PF], f)
		}
		for pf, functions := range byPF {
			id := claim.PoolID{Node: node, PF: pf, DevicePool: p.Name}
			out.Pools[id.String()] = resourceslice.Pool{Slices: slicesOf(p, functions, problems)}
		}
	}
	return out
}

// slicesOf are the slices of the pool's Functions of one PF. A slice has devices or counters. That of the counters, which
// say how many devices may be allocated at once, comes first, as its index does not depend on how many devices there are.
func slicesOf(p pool.Pool, functions []function.Function, problems func(function.Function) []health.Problem) []resourceslice.Slice {
	var out []resourceslice.Slice
	if p.Spec.MaxAllocated != nil {
		out = append(out, resourceslice.Slice{SharedCounters: []resourceapi.CounterSet{{
			Name: counterSetPF, Counters: functionCounter(int64(*p.Spec.MaxAllocated)),
		}}})
	}
	slices.SortFunc(functions, func(a, b function.Function) int {
		return cmp.Or(-cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Index, b.Index))
	})
	sameSlice := func(a, b function.Function) bool {
		return a.Kind == b.Kind && a.Index/devicesPerSlice == b.Index/devicesPerSlice
	}
	for i, f := range functions {
		if i == 0 || !sameSlice(f, functions[i-1]) {
			out = append(out, resourceslice.Slice{})
		}
		last := &out[len(out)-1]
		last.Devices = append(last.Devices, device(p, f, problems(f)))
	}
	return out
}

func functionCounter(n int64) map[string]resourceapi.Counter {
	return map[string]resourceapi.Counter{counterFunctions: {Value: *resource.NewQuantity(n, resource.DecimalSI)}}
}

func device(p pool.Pool, f function.Function, problems []health.Problem) resourceapi.Device {
	d := resourceapi.Device{
		Name: f.ID.DeviceName(),
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			AttributeKind:     {StringValue: new(string(f.Kind))},
			AttributePool:     {StringValue: new(p.Name)},
			AttributePF:       {StringValue: new(string(f.PF))},
			AttributeIndex:    {IntValue: new(int64(f.Index))},
			AttributeVendor:   {StringValue: new(f.Vendor)},
			AttributeDevice:   {StringValue: new(f.Device)},
			AttributeMultusID: {StringValue: new(f.ID.String())},
			deviceattribute.StandardDeviceAttributePCIBusID: {StringValue: new(string(f.ID.Address))},
		},
	}
	// Absent is not a value: devices without a PCIe root or NUMA node must not match each other by it.
	for name, value := range map[resourceapi.QualifiedName]string{
		AttributeMultusName: v1alpha1.GroupName + "/" + p.Name,
		AttributePFName:     f.PFName,
		deviceattribute.StandardDeviceAttributePCIeRoot: f.PCIeRoot,
	} {
		// The API refuses the whole slice for a longer value. Multus does not find the devices of such a DevicePool.
		if value != "" && len(value) <= resourceapi.DeviceAttributeMaxValueLength {
			d.Attributes[name] = resourceapi.DeviceAttribute{StringValue: new(value)}
		}
	}
	if f.NUMANode >= 0 {
		numa := resourceapi.DeviceAttribute{IntValue: new(int64(f.NUMANode))}
		d.Attributes[deviceattribute.StandardDeviceAttributeNUMANode] = numa
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
