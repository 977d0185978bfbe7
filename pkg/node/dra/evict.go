// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devicemodel"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// Losses has Kubernetes delete the pods that lost a Function for good, by the effect NoExecute of
// the taint lost, if the DevicePool says so (spec.evictLostAfter).
//
// Kubernetes deletes pods only because of devices that are in a ResourceSlice. So a device that is
// gone is published again, as it was, until its pod is gone.
type Losses struct {
	Journal *journal.Journal
	// LostFor returns for how long it has been known that a pod lost the Function.
	LostFor func(function.ID) (known time.Duration, lost bool)
	// Exists reports whether the kernel has the Function.
	Exists func(function.ID) bool

	// devices are the last devices of the Functions that claims have.
	devices map[deviceName]resourceapi.Device
}

// deviceName is a name in the results of allocations.
type deviceName struct{ pool, device string }

// mark adds the effect to the devices of Functions that are lost for good. It returns after which
// time the next one will be, 0 if there is none.
func (l *Losses) mark(
	resources resourceslice.DriverResources, pools []pool.Pool,
) (next time.Duration) {
	if l == nil {
		return 0
	}

	held := map[deviceName]resourceapi.Device{}
	for _, a := range l.Journal.All() {
		name := deviceName{a.Claim.Pool, a.Claim.Device}
		if name.device == "" || a.Claim.Share != "" {
			continue
		}

		slice, i := locate(resources, name)
		device, known := l.devices[name]
		if slice != nil {
			device, known = slice.Devices[i], true
		}
		if known {
			held[name] = device
		} else {
			device = unseen(a)
		}

		wait, evicts := l.evicts(a, pools)
		switch {
		case !evicts:
		case wait > 0:
			if next == 0 || wait < next {
				next = wait
			}
		case slice != nil:
			slice.Devices[i] = evicting(device)
		default:
			add(resources, name.pool, evicting(device))
		}
	}

	l.devices = held
	return next
}

// evicts reports whether the pod of a Function is to be deleted, and in which time. A pod waits for
// a Function that exists, because what is missing for it to come back may only be silent.
func (l *Losses) evicts(a journal.Attachment, pools []pool.Pool) (wait time.Duration, evicts bool) {
	known, lost := l.LostFor(a.Function)
	if !lost || !a.Interface.Userspace && l.Exists(a.Function) {
		return 0, false
	}

	id, err := claim.ParsePoolID(a.Claim.Pool)
	i := slices.IndexFunc(pools, func(p pool.Pool) bool { return p.Name == id.DevicePool })
	if err != nil || i < 0 || pools[i].Spec.EvictLostAfter == nil ||
		devicemodel.Shared(pools[i].Spec) {
		return 0, false
	}

	return max(0, pools[i].Spec.EvictLostAfter.Duration-known), true
}

// locate returns the slice that has a device, and the device's index; nil if no slice has it.
func locate(
	resources resourceslice.DriverResources, name deviceName,
) (slice *resourceslice.Slice, index int) {
	inPool := resources.Pools[name.pool].Slices
	for s := range inPool {
		for i, d := range inPool[s].Devices {
			if d.Name == name.device {
				return &inPool[s], i
			}
		}
	}
	return nil, 0
}

// unseen returns the device of a Function that was gone before this process published it, with what
// the journal knows of it.
func unseen(a journal.Attachment) resourceapi.Device {
	kind := function.VF
	switch _, isSF := a.Function.SFNum(); {
	case isSF:
		kind = function.SF
	case a.PF == a.Function.Address:
		kind = function.PF
	}
	id, _ := claim.ParsePoolID(a.Claim.Pool) // evicts has parsed it
	f := function.Function{
		ID: a.Function, PF: a.PF, PFName: a.PFName, Kind: kind, Index: a.VFIndex, NUMANode: -1,
		RDMAUnknown: true,
	}
	return resourceapi.Device{
		Name: a.Claim.Device, Attributes: devicemodel.Attributes(pool.Pool{Name: id.DevicePool}, f),
	}
}

// evicting returns a device whose taint lost has the effect NoExecute.
func evicting(d resourceapi.Device) resourceapi.Device {
	d.Taints = slices.DeleteFunc(slices.Clone(d.Taints), func(t resourceapi.DeviceTaint) bool {
		return t.Key == v1alpha1.TaintLost
	})
	d.Taints = append(d.Taints, resourceapi.DeviceTaint{
		Key: v1alpha1.TaintLost, Effect: resourceapi.DeviceTaintEffectNoExecute,
	})
	return d
}

// add adds a device to a pool, which may be gone with its card. It consumes no counters, because the
// counters of the pool are of the Functions that exist.
func add(resources resourceslice.DriverResources, name string, d resourceapi.Device) {
	d.ConsumesCounters = nil
	p := resources.Pools[name]
	i := slices.IndexFunc(p.Slices, func(s resourceslice.Slice) bool {
		return len(s.SharedCounters) == 0 &&
			len(s.Devices) < resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	})
	if i < 0 {
		p.Slices = append(p.Slices, resourceslice.Slice{})
		i = len(p.Slices) - 1
	}
	p.Slices[i].Devices = append(p.Slices[i].Devices, d)
	resources.Pools[name] = p
}
