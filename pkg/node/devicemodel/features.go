// SPDX-License-Identifier: Apache-2.0

package devicemodel

import (
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// Features are the features of ResourceSlices that a cluster supports. An API server silently drops
// the fields of feature gates that are off. The gates are named in Kubernetes' pkg/features; all
// but DRAListTypeAttributes are on by default from Kubernetes 1.36 on.
type Features struct {
	Taints            bool // DRADeviceTaints
	BindingConditions bool // DRADeviceBindingConditions
	Counters          bool // DRAPartitionableDevices
	SharedCapacity    bool // DRAConsumableCapacity
	Lists             bool // DRAListTypeAttributes (KEP-5491)
	// EffectNone is the effect None of taints. An API server before 1.35 refuses it, and the whole
	// slice with it.
	EffectNone bool

	// CountersHarm says why Counters is false although the feature gate is on: see the function
	// [CountersHarm].
	CountersHarm string
	// ListsHarm says the same of Lists, which is false too if the version of the API server is not
	// known: see the function [ListsHarm].
	ListsHarm string
}

// AllFeatures returns the features of a cluster that drops nothing.
func AllFeatures() Features {
	f := DefaultFeatures()
	f.Lists, f.EffectNone = true, true
	return f
}

// DefaultFeatures returns the features that a cluster has by default, from Kubernetes 1.36 on, if it
// does not tell. It lacks Lists and EffectNone, which must be seen stored.
func DefaultFeatures() Features {
	return Features{Taints: true, BindingConditions: true, Counters: true, SharedCapacity: true}
}

// Missing returns the sorted names of the feature gates that are off, or that cannot be used, of
// those that are on by default from Kubernetes 1.36 on.
func (f Features) Missing() []string {
	var missing []string
	for gate, on := range map[string]bool{
		v1alpha1.FeatureTaints: f.Taints, v1alpha1.FeatureBindingConditions: f.BindingConditions,
		v1alpha1.FeatureCounters: f.Counters, v1alpha1.FeatureSharedCapacity: f.SharedCapacity,
	} {
		if !on {
			missing = append(missing, gate)
		}
	}

	slices.Sort(missing)
	return missing
}

// Fallbacks returns what a node's pool gets in place of what its spec asks for.
func (f Features) Fallbacks(p pool.Pool) (list []v1alpha1.Fallback) {
	spec := p.Spec
	if spec.Publish != v1alpha1.PublishDRA {
		return nil
	}

	// harm says why a feature gate that is on is not used
	add := func(feature, message string, harm ...string) {
		fallback := v1alpha1.Fallback{Feature: feature, Message: message}
		if why := strings.Join(harm, ""); why != "" {
			fallback.Message, fallback.GateOn = message+": "+why, true
		}
		list = append(list, fallback)
	}
	if !f.BindingConditions && spec.Provision == v1alpha1.ProvisionBeforeBind {
		add(v1alpha1.FeatureBindingConditions,
			"provision BeforeBind works as OnPrepare: the API server drops binding conditions")
	}

	if !f.BindingConditions && spec.Provision == v1alpha1.ProvisionAhead {
		add(v1alpha1.FeatureBindingConditions, "a pod that gets a Function whose Port is not "+
			"made yet is bound at once and waits on the node")
	}

	switch {
	case f.Counters:
	case spec.MaxAllocated != nil:
		add(v1alpha1.FeatureCounters, "of each PF only the first Functions are offered, as many "+
			"as may be allocated: they are not counted", f.CountersHarm)
	case spec.Model == v1alpha1.ModelCounters:
		add(v1alpha1.FeatureCounters,
			"model Counters works as Functions: no claim gets a PF as a whole", f.CountersHarm)
	}

	if !f.Taints && spec.EvictLostAfter != nil {
		add(v1alpha1.FeatureTaints,
			"pods that lost a Function are not deleted: the API server drops taints")
	}
	const harm = "devices without a link have no taint"
	switch {
	case spec.LinkDown != v1alpha1.LinkDownNone:
	case !f.Taints:
		add(v1alpha1.FeatureTaints, harm+": the API server drops taints")
	case !f.EffectNone:
		add(v1alpha1.FeatureTaintEffectNone, harm, "Kubernetes takes the effect None from 1.35 on")
	}

	if !f.SharedCapacity && spec.Model == v1alpha1.ModelPorts {
		add(v1alpha1.FeatureSharedCapacity,
			"model Ports offers nothing: claims would get the PF as a whole")
	}

	if !f.Lists {
		for _, message := range withoutLists(p) {
			add(v1alpha1.FeatureLists, message, f.ListsHarm)
		}
	}

	return list
}

// withoutLists returns what a pool loses in a cluster without lists. It loses nothing if none of its
// Functions has several values of an attribute.
func withoutLists(p pool.Pool) (lost []string) {
	secondRoot := func(f function.Function) bool { return len(f.DataDirectRoots) > 0 }
	if p.Spec.DataDirect && slices.ContainsFunc(p.Functions, secondRoot) {
		lost = append(lost, "pcieRoot has no root complex of Data Direct, so no GPU beside the NIC "+
			"matches by it")
	}

	severalNodes := func(f function.Function) bool { return len(f.NUMANodes) > 1 }
	if p.Spec.ListNUMANodes && slices.ContainsFunc(p.Functions, severalNodes) {
		lost = append(lost, "numaNode is the device's own NUMA node, without the others of its socket")
	}
	return lost
}

// Awaits reports whether the devices of a pool would have the attribute pcieRoot without root complexes
// that are to be known soon; see [function.Function].
func (f Features) Awaits(pools []pool.Pool) bool {
	awaited := func(f function.Function) bool { return f.DataDirectAwaited }
	return f.Lists && slices.ContainsFunc(pools, func(p pool.Pool) bool {
		return p.Spec.Publish == v1alpha1.PublishDRA && p.Spec.DataDirect &&
			slices.ContainsFunc(p.Functions, awaited)
	})
}

// Reduce removes from the slices all fields that the cluster would drop, and devices that would be
// misleading without these fields. The slices and their order stay.
//
//   - Without taints, devices with problems are not offered.
//   - Without the effect None, devices lack the taints that only inform.
//   - Without binding conditions, pods are bound before the xPU is ready, and the agent's Prepare
//     waits for the xPU.
//   - Without counters, only the first devices of a PF are offered, as many as may be allocated,
//     and a PF with VFs is not offered.
//   - Without shared capacity, PFs that claims share are not offered.
//   - Without lists, an attribute with several values has the first one, which is the Function's
//     own.
func (f Features) Reduce(resources resourceslice.DriverResources) resourceslice.DriverResources {
	if f == AllFeatures() {
		return resources
	}
	out := resourceslice.DriverResources{Pools: maps.Clone(resources.Pools)}
	for name, p := range out.Pools {
		out.Pools[name] = f.reducePool(p)
	}
	return out
}

func (f Features) reducePool(p resourceslice.Pool) resourceslice.Pool {
	left, limited := limit(p)
	out := p
	out.Slices = nil
	for _, slice := range p.Slices {
		if len(slice.SharedCounters) > 0 && !f.Counters {
			continue
		}

		devices := slice.Devices
		slice.Devices = nil
		for _, d := range devices {
			if limited && !f.Counters {
				// devices that are not offered now count too, because a pod may have them
				if left--; left < 0 || isPF(d) {
					continue
				}
			}

			if d = f.withoutNone(d); !f.keeps(d) {
				continue
			}

			slice.Devices = append(slice.Devices, f.reduce(d))
		}

		out.Slices = append(out.Slices, slice)
	}

	return out
}

// limit returns how many devices of a pool may be allocated, if the pool counts them.
func limit(p resourceslice.Pool) (most int64, limited bool) {
	for _, slice := range p.Slices {
		for _, set := range slice.SharedCounters {
			value := set.Counters[counterFunctions].Value
			return value.Value(), true
		}
	}
	return 0, false
}

// isPF reports whether a device is a PF that has VFs, which counts as all of them.
func isPF(d resourceapi.Device) bool {
	kind := d.Attributes["kind"].StringValue
	return kind != nil && *kind == string(function.PF)
}

// Lost returns the device of a Function that is gone, by which Kubernetes deletes the Function's pod.
// It consumes no counters, because the counters of a pool are of the Functions that exist. kept is
// false if the cluster drops taints, because new pods would get the device.
func (f Features) Lost(p pool.Pool, lost function.Function) (d resourceapi.Device, kept bool) {
	if !f.Taints {
		return resourceapi.Device{}, false
	}

	d = resourceapi.Device{Name: lost.ID.DeviceName(), Attributes: Attributes(p, lost)}
	f.Evict(&d)
	return f.reduce(d), true
}

// Evict gives a device the taint by which Kubernetes deletes its pods, in place of its other taints
// of that key. It does nothing if the cluster drops taints.
func (f Features) Evict(d *resourceapi.Device) {
	if !f.Taints {
		return
	}

	others := slices.DeleteFunc(slices.Clone(d.Taints), func(t resourceapi.DeviceTaint) bool {
		return t.Key == v1alpha1.TaintLost
	})
	d.Taints = append(others, resourceapi.DeviceTaint{
		Key: v1alpha1.TaintLost, Effect: resourceapi.DeviceTaintEffectNoExecute,
	})
}

// withoutNone returns a device without the taints that only inform, if the cluster does not take
// them. They keep no pod away, so the device stays.
func (f Features) withoutNone(d resourceapi.Device) resourceapi.Device {
	if f.Taints && f.EffectNone {
		return d
	}
	d.Taints = slices.DeleteFunc(slices.Clone(d.Taints), func(t resourceapi.DeviceTaint) bool {
		return t.Effect == resourceapi.DeviceTaintEffectNone
	})
	return d
}

// keeps reports whether a device can be offered without the missing features.
func (f Features) keeps(d resourceapi.Device) bool {
	shared := d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations
	return (f.Taints || len(d.Taints) == 0) && (f.SharedCapacity || !shared)
}

// reduce returns a device without the fields that the API server would drop.
func (f Features) reduce(d resourceapi.Device) resourceapi.Device {
	if !f.Taints {
		d.Taints = nil
	}

	if !f.BindingConditions {
		d.BindingConditions, d.BindingFailureConditions = nil, nil
	}

	if !f.Counters {
		d.ConsumesCounters = nil
	}

	if !f.Lists {
		d.Attributes = firstValues(d.Attributes)
	}
	return d
}

// firstValues returns attributes with the first value of each list.
func firstValues(
	all map[resourceapi.QualifiedName]resourceapi.DeviceAttribute,
) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	out := maps.Clone(all)
	for name, a := range all {
		switch {
		case len(a.IntValues) > 0:
			out[name] = resourceapi.DeviceAttribute{IntValue: &a.IntValues[0]}
		case len(a.StringValues) > 0:
			out[name] = resourceapi.DeviceAttribute{StringValue: &a.StringValues[0]}
		}
	}
	return out
}
