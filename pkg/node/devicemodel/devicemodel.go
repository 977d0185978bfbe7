// SPDX-License-Identifier: Apache-2.0

// Package devicemodel describes the Functions of a node's pools as devices of DRA: their slices,
// attributes, counters, binding conditions and taints.
package devicemodel

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
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// devicesPerSlice is the API's limit for slices whose devices have taints or consume counters. It
// applies to all slices, because a taint must not move devices to other slices.
const devicesPerSlice = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures

// The one counter in DRA pools with maxAllocated or model: Counters (KEP-4815). Each device
// consumes 1 of it while it is allocated, and a PF consumes all of it.
const (
	counterSetPF     = "pf"
	counterFunctions = "functions"
)

// Resources returns the resources that the driver publishes for the node's pools: one DRA pool for
// each PF and DevicePool. SFs that do not exist yet are devices like the others. problems returns
// the problems that keep a Function from pods. ahead reports whether the xPU serves a Port of the
// Function in the network although no pod has the Function.
func Resources(
	node string, pools []pool.Pool, problems func(function.Function) []function.Problem,
	ahead func(f function.ID, network string) bool,
) resourceslice.DriverResources {
	mustWait := func(p pool.Pool, f function.Function) bool {
		return p.Spec.Provision == v1alpha1.ProvisionBeforeBind ||
			p.Spec.Provision == v1alpha1.ProvisionAhead && !ahead(f.ID, p.Spec.Network)
	}

	out := resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{}}
	for _, p := range pools {
		if p.Spec.Publish != v1alpha1.PublishDRA {
			continue
		}
		for pf, functions := range p.ByPF() {
			id := claim.PoolID{Node: node, PF: pf, DevicePool: p.Name}
			toDevice := func(f function.Function) resourceapi.Device {
				return device(p, f, problems(f), mustWait(p, f))
			}

			if Shared(p.Spec) {
				out.Pools[id.String()] = resourceslice.Pool{
					Slices: shared(p, p.PFs[pf], functions, problems),
				}
				continue
			}

			out.Pools[id.String()] = resourceslice.Pool{Slices: slicesOf(p, functions, toDevice)}
		}
	}

	return out
}

// Devices returns the Functions that are devices of a DRA pool: the VFs and SFs, and the PFs if the
// model says so.
func Devices(p pool.Pool) []function.Function {
	var out []function.Function
	for pf, functions := range p.ByPF() {
		if Shared(p.Spec) {
			if f, exists := p.PFs[pf]; exists {
				out = append(out, f)
			}
			continue
		}

		if f, whole := wholePF(p, functions); whole {
			out = append(out, f)
		}
		out = append(out, functions...)
	}

	return out
}

// Find returns the Function that the pool offers as the named device.
func Find(p pool.Pool, device string) (function.Function, bool) {
	devices := Devices(p)
	i := slices.IndexFunc(devices, func(f function.Function) bool {
		return f.ID.DeviceName() == device
	})
	if i < 0 {
		return function.Function{}, false
	}
	return devices[i], true
}

// Shared reports whether claims share the PFs of a DevicePool.
func Shared(spec v1alpha1.DevicePoolSpec) bool { return spec.Model == v1alpha1.ModelPorts }

// Problems returns the problems of one of [Devices]. A PF that claims share has the problems that
// all of its VFs have.
func Problems(
	p pool.Pool, f function.Function, problems func(function.Function) []function.Problem,
) []function.Problem {
	if !Shared(p.Spec) {
		return problems(f)
	}
	common, _ := ofAll(p.Spec, onlyVFs(p.ByPF()[f.PF]), problems)
	return common
}

// slicesOf returns the slices for the pool's Functions of one PF, in the order of [pool.Pool.ByPF]:
// counters, VFs, SFs, and the PF in the last slice. A Function's index determines its slice, so a
// change of one Function changes one slice only, unless the Function is alone in the slice.
// Counters come first, so that their index never changes. In a slice, the devices for which no pod
// has to wait come first, and the PF comes last, because the scheduler takes the first suitable
// device.
func slicesOf(
	p pool.Pool, functions []function.Function, toDevice func(function.Function) resourceapi.Device,
) []resourceslice.Slice {
	var out []resourceslice.Slice
	total := allocatable(p, functions)
	if counted(p) {
		out = append(out, resourceslice.Slice{SharedCounters: []resourceapi.CounterSet{{
			Name: counterSetPF, Counters: functionCounter(total),
		}}})
	}

	sameSlice := func(a, b function.Function) bool {
		return a.Kind == b.Kind && a.Index/devicesPerSlice == b.Index/devicesPerSlice
	}
	for i, f := range functions {
		if i == 0 || !sameSlice(f, functions[i-1]) {
			out = append(out, resourceslice.Slice{})
		}
		last := &out[len(out)-1]
		last.Devices = append(last.Devices, toDevice(f))
	}

	if pf, whole := wholePF(p, functions); whole {
		d := toDevice(pf)
		d.ConsumesCounters = []resourceapi.DeviceCounterConsumption{
			{CounterSet: counterSetPF, Counters: functionCounter(total)},
		}
		if last := &out[len(out)-1]; len(last.Devices) < devicesPerSlice {
			last.Devices = append(last.Devices, d)
		} else {
			out = append(out, resourceslice.Slice{Devices: []resourceapi.Device{d}})
		}
	}

	for _, slice := range out {
		slices.SortStableFunc(slice.Devices, func(a, b resourceapi.Device) int {
			return cmp.Compare(len(a.BindingConditions), len(b.BindingConditions))
		})
	}

	return out
}

// counted reports whether the pool's devices consume counters.
func counted(p pool.Pool) bool {
	return p.Spec.MaxAllocated != nil || p.Spec.Model == v1alpha1.ModelCounters
}

// allocatable returns how many of a PF's Functions may be allocated at the same time.
func allocatable(p pool.Pool, functions []function.Function) int64 {
	n := int64(len(functions))
	if p.Spec.MaxAllocated != nil {
		return int64(*p.Spec.MaxAllocated)
	}
	return n
}

// wholePF returns the PF of the Functions if it is a device too. The pool must have all VFs of the
// PF, so that its counters keep the PF from a pod while another pod has one of the VFs. The node
// must not need the PF itself.
func wholePF(p pool.Pool, functions []function.Function) (function.Function, bool) {
	pf, exists := p.PFs[functions[0].PF]
	vfs := 0
	for _, f := range functions {
		if f.Kind == function.VF {
			vfs++
		}
	}

	return pf, p.Spec.Model == v1alpha1.ModelCounters && exists && vfs == pf.NumVFs &&
		!pf.DefaultRoute
}

func functionCounter(n int64) map[string]resourceapi.Counter {
	return map[string]resourceapi.Counter{
		counterFunctions: {Value: *resource.NewQuantity(n, resource.DecimalSI)},
	}
}

// device returns the device of a Function. mustWait makes the scheduler wait until the xPU serves a
// pod's Port.
func device(
	p pool.Pool, f function.Function, problems []function.Problem, mustWait bool,
) resourceapi.Device {
	d := resourceapi.Device{Name: f.ID.DeviceName(), Attributes: Attributes(p, f)}
	if mustWait {
		d.BindingConditions = []string{v1alpha1.ConditionProvisioned}
		d.BindingFailureConditions = []string{v1alpha1.ConditionProvisionFailed}
	}

	if counted(p) {
		d.ConsumesCounters = []resourceapi.DeviceCounterConsumption{
			{CounterSet: counterSetPF, Counters: functionCounter(1)},
		}
	}

	for _, problem := range problems {
		d.Taints = append(d.Taints, resourceapi.DeviceTaint{
			Key: problem.Taint, Effect: effect(p.Spec, problem),
		})
	}

	return d
}

// effect returns the effect of the taint for a problem of a device.
func effect(
	spec v1alpha1.DevicePoolSpec, problem function.Problem,
) resourceapi.DeviceTaintEffect {
	if !KeepsPodsAway(spec, problem) {
		return resourceapi.DeviceTaintEffectNone
	}
	return resourceapi.DeviceTaintEffectNoSchedule
}

// KeepsPodsAway reports whether a problem of a Function of a pool keeps new pods away.
func KeepsPodsAway(spec v1alpha1.DevicePoolSpec, problem function.Problem) bool {
	return problem.Taint != v1alpha1.TaintLinkDown || spec.LinkDown != v1alpha1.LinkDownNone
}

// Attributes returns the attributes of the device of a Function. Unqualified names belong to the
// driver's domain. Multus reads the attributes of k8s.cni.cncf.io. No attribute changes when a pod
// takes the netdev, when the pool's driver is bound for a pod, or when an SF is made or deleted.
// Only rdmaDevice may change, after a pod whose claim asked for a driver, because the kernel may
// give the RDMA device another name when the Function's own driver is bound again.
func Attributes(
	p pool.Pool, f function.Function,
) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	out := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
	if f.Kind != function.PF {
		out["index"] = resourceapi.DeviceAttribute{IntValue: new(int64(f.Index))}
	}

	addNUMANodes(out, f, p.Spec.ListNUMANodes)
	addPCIeRoots(out, f, p.Spec.DataDirect)
	if f.LinkSpeed > 0 {
		out["linkSpeed"] = resourceapi.DeviceAttribute{IntValue: new(int64(f.LinkSpeed))}
	}

	rdmaDevice := ""
	// An SF that is made for a pod has RDMA devices only while it exists.
	if known := !f.RDMAUnknown && !f.Potential && !p.Makes(f.ID); known {
		out["rdma"] = resourceapi.DeviceAttribute{BoolValue: new(f.RDMA)}
		// The name may be another one after each pod for which the pool's driver is bound.
		if len(f.RDMADevices) > 0 && p.Spec.Driver == "" {
			rdmaDevice = f.RDMADevices[0]
		}
	}

	texts := map[resourceapi.QualifiedName]string{
		"kind":                         string(f.Kind),
		"pool":                         p.Name,
		"pf":                           string(f.PF), // PCI address
		"pfName":                       f.PFName,
		"vendor":                       f.Vendor, // PCI ids in hex
		"device":                       f.Device,
		"rdmaDevice":                   rdmaDevice,
		"switchID":                     f.SwitchID,
		"k8s.cni.cncf.io/resourceName": v1alpha1.GroupName + "/" + p.Name,
		deviceattribute.StandardDeviceAttributePCIBusID: string(f.ID.Address),
	}

	if !Shared(p.Spec) { // the device of a shared PF is not the pod's VF
		texts["k8s.cni.cncf.io/deviceID"] = f.ID.String()
	}

	for name, value := range texts {
		// Unknown values are left out, because devices without a PCIe root or PF name must not
		// match each other by it. Values that are too long are left out because the API refuses
		// them. An example is the resource name of a DevicePool with a long name.
		if value != "" && len(value) <= resourceapi.DeviceAttributeMaxValueLength {
			out[name] = resourceapi.DeviceAttribute{StringValue: new(value)}
		}
	}

	addOwn(out, p.Spec.Attributes)
	return out
}

// addNUMANodes adds the NUMA node of a Function, and those near it if the pool wants a list. A list
// is for several values only (KEP-5491), because a selector that compares an attribute with a value
// is false for a list.
func addNUMANodes(
	to map[resourceapi.QualifiedName]resourceapi.DeviceAttribute, f function.Function, list bool,
) {
	switch {
	case list && len(f.NUMANodes) > 1:
		var values []int64
		for _, node := range f.NUMANodes {
			values = append(values, int64(node))
		}
		to[deviceattribute.StandardDeviceAttributeNUMANode] = resourceapi.DeviceAttribute{
			IntValues: values,
		}
	case f.NUMANode >= 0:
		to[deviceattribute.StandardDeviceAttributeNUMANode] = resourceapi.DeviceAttribute{
			IntValue: new(int64(f.NUMANode)),
		}
	}
}

// addPCIeRoots adds the root complex of a Function, and those of the Data Direct functions of its
// NIC if the pool says that its Functions use them.
func addPCIeRoots(
	to map[resourceapi.QualifiedName]resourceapi.DeviceAttribute, f function.Function,
	dataDirect bool,
) {
	var roots []string
	if f.PCIeRoot != "" {
		roots = append(roots, f.PCIeRoot)
	}
	for _, root := range f.DataDirectRoots {
		if dataDirect && !slices.Contains(roots, root) {
			roots = append(roots, root)
		}
	}

	switch len(roots) {
	case 0: // Unknown values are left out: see Attributes.
	case 1:
		to[deviceattribute.StandardDeviceAttributePCIeRoot] = resourceapi.DeviceAttribute{
			StringValue: &roots[0],
		}
	default:
		to[deviceattribute.StandardDeviceAttributePCIeRoot] = resourceapi.DeviceAttribute{
			StringValues: roots,
		}
	}
}

// addOwn adds the attributes that the administrator gave the pool. None replaces another attribute.
func addOwn(
	to map[resourceapi.QualifiedName]resourceapi.DeviceAttribute, own []v1alpha1.PoolAttribute,
) {
	for _, a := range own {
		name := resourceapi.QualifiedName(a.Name)
		if _, taken := to[name]; !taken {
			to[name] = resourceapi.DeviceAttribute{
				StringValue: a.String, IntValue: a.Int, BoolValue: a.Bool,
			}
		}
	}
}
