// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devicemodel"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// Losses has Kubernetes delete the pods that lost a Function, by the effect NoExecute of the taint
// lost, if the DevicePool says so (spec.evictLostAfter).
//
// An eviction needs proof, for the time that the DevicePool says. Either this process has seen
// without interruption that the kernel does not have the PCI device; for an SF this is the device of
// the PF, on which the SF is made again. Or a program of the pod had the device itself, and another
// device is in its place. Any other pod of a device that is there waits, because what it misses,
// such as the Port, may come back, and so does a pod of which anything is unknown.
//
// Kubernetes deletes pods only because of devices that are in a ResourceSlice. So a device that is
// gone is published again, until its pod is gone. A process that never published the device does
// not know its attributes, and publishes nothing: a selector that misses an attribute ends the
// scheduling of every pod that it is asked for. All fields must be set.
type Losses struct {
	// Node is the name of this node.
	Node    string
	Journal *journal.Journal
	// MissingFor returns for how long this process has seen without interruption that the kernel
	// does not have the PCI device. missing is false if that is not known.
	MissingFor func(pci.Address) (known time.Duration, missing bool)
	// Replaced returns for how long this process has seen that the pod has lost its Function, if it
	// is certain that another device is in place of the one that a program of the pod had.
	Replaced func(journal.Attachment) (lost time.Duration, replaced bool)

	// held has the Functions that claims have, as they were when pods had them.
	held map[deviceName]function.Function
}

// deviceName is a name in the results of allocations.
type deviceName struct{ pool, device string }

// mark adds the devices whose pods are to be deleted. The resources must have been reduced to the
// features already. mark returns after which time the next pod will be deleted, 0 if none will.
func (l *Losses) mark(
	resources resourceslice.DriverResources, pools []pool.Pool, features devicemodel.Features,
) (next time.Duration) {
	if l == nil {
		return 0
	}

	attachments := l.Journal.All()
	before, offered, bonds := l.held, l.offered(pools), workingBonds(attachments)
	l.held = map[deviceName]function.Function{}
	for _, a := range attachments {
		p, applies := l.poolOf(a, pools)
		if !applies {
			continue
		}

		name := deviceName{a.Claim.Pool, a.Claim.Device}
		f, known := before[name]
		if now, exists := offered[name]; exists && a.State == journal.Attached {
			if !known || complete(p, now, f) {
				f, known = now, true
			}
		}
		if known {
			l.held[name] = f
		}

		wait, evicts := l.evicts(a, p, bonds)
		published := find(resources, name)
		switch {
		case !evicts || published == nil && !known:
		case wait > 0:
			if next == 0 || wait < next {
				next = wait
			}
		case published != nil:
			features.Evict(published)
		default:
			if device, kept := features.Lost(p, f); kept {
				add(resources, name.pool, device)
			}
		}
	}

	return next
}

// poolOf returns the pool of a claim's Function, if its pods may be deleted.
func (l *Losses) poolOf(a journal.Attachment, pools []pool.Pool) (p pool.Pool, applies bool) {
	if a.Claim.Device == "" || a.Claim.Share != "" {
		return pool.Pool{}, false
	}

	id, err := claim.ParsePoolID(a.Claim.Pool)
	i := slices.IndexFunc(pools, func(p pool.Pool) bool { return p.Name == id.DevicePool })
	if err != nil || id.Node != l.Node || i < 0 {
		return pool.Pool{}, false
	}
	return pools[i], pools[i].Spec.EvictLostAfter != nil && !devicemodel.Shared(pools[i].Spec)
}

// offered returns the Functions of the node that are devices of pools whose pods may be deleted.
func (l *Losses) offered(pools []pool.Pool) map[deviceName]function.Function {
	found := map[deviceName]function.Function{}
	for _, p := range pools {
		if p.Spec.EvictLostAfter == nil {
			continue
		}
		for _, f := range devicemodel.Devices(p) {
			id := claim.PoolID{Node: l.Node, PF: f.PF, DevicePool: p.Name}
			found[deviceName{id.String(), f.ID.DeviceName()}] = f
		}
	}
	return found
}

// complete reports whether a Function has no fewer attributes than before. A card that goes may show
// fewer at its end.
func complete(p pool.Pool, now, before function.Function) bool {
	return len(devicemodel.Attributes(p, now)) >= len(devicemodel.Attributes(p, before))
}

// evicts reports whether the pod of a Function is to be deleted, and in which time. A pod waits if its
// bond is one of the working ones.
func (l *Losses) evicts(
	a journal.Attachment, p pool.Pool, working map[bond]bool,
) (wait time.Duration, evicts bool) {
	if b, bonded := bondOf(a); a.State != journal.Lost || bonded && working[b] {
		return 0, false
	}

	// An SF has the address of its PF.
	known, evicts := l.MissingFor(a.Function.Address)
	if !evicts {
		known, evicts = l.Replaced(a)
	}
	return max(0, p.Spec.EvictLostAfter.Duration-known), evicts
}

// bond is a bond in a sandbox.
type bond struct{ sandbox, name string }

// bondOf returns the bond of which a Function is a port, if there is one.
func bondOf(a journal.Attachment) (b bond, bonded bool) {
	if a.Interface.Bond == nil {
		return bond{}, false
	}
	return bond{a.Sandbox, a.Interface.Bond.Name}, true
}

// workingBonds returns the bonds that have a port that is not lost, by which their pods may work.
func workingBonds(attachments []journal.Attachment) map[bond]bool {
	working := map[bond]bool{}
	for _, a := range attachments {
		if b, bonded := bondOf(a); bonded && a.State != journal.Lost {
			working[b] = true
		}
	}
	return working
}

// find returns the device of the name, or nil if it is not published.
func find(resources resourceslice.DriverResources, name deviceName) *resourceapi.Device {
	for _, s := range resources.Pools[name.pool].Slices {
		for i := range s.Devices {
			if s.Devices[i].Name == name.device {
				return &s.Devices[i]
			}
		}
	}
	return nil
}

// add adds a device to a pool, which may be gone with its card.
func add(resources resourceslice.DriverResources, name string, d resourceapi.Device) {
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
