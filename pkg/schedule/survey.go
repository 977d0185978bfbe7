// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// survey rates each device that a node can reach for each request. The allocator answers only that
// no combination of devices fits. The survey finds out, by the allocator's rules, why each single
// device cannot be used.
type survey struct {
	devices  *devices
	pools    []*pool // that the node can reach, sorted by driver and name
	claims   []*resourceapi.ResourceClaim
	broken   bool // a selector has an error; the allocator reports it if it matters
	requests []*surveyedRequest
}

// surveyedRequest is one request of a claim.
type surveyedRequest struct {
	claim        *resourceapi.ResourceClaim
	name         string
	alternatives []*alternative // one, or one for each entry of firstAvailable
}

// alternative is one way to satisfy a request.
type alternative struct {
	reference  string // REQUEST, or REQUEST/SUBREQUEST
	class      *resourceapi.DeviceClass
	selectors  []selector
	wanted     int // how many devices; 0 for all that match
	all        bool
	admin      bool
	tolerate   []resourceapi.DeviceToleration
	capacity   *resourceapi.CapacityRequirements
	derived    []resourceapi.DeviceDerivedAttribute
	candidates []candidate
}

// selector is a CEL selector of a class or a request.
type selector struct {
	of         string // the class, for example "DeviceClass nic"; "" for the request itself
	expression string
}

// candidate is a device as rated for an alternative.
type candidate struct {
	*resourceapi.Device
	id       structured.DeviceID
	verdict  Code // why the device cannot be used; "" if it can
	selector int  // index of the selector that is false, if the verdict is Selector
	detail   string
	ignored  bool                                   // a request for all devices skips it
	lists    bool                                   // the scheduler compares lists by their elements
	derived  map[string]resourceapi.DeviceAttribute // attributes that the request derives
}

func (c candidate) isShared() bool { return ptr.Deref(c.AllowMultipleAllocations, false) }

// free returns the devices that the alternative can use if no other request takes them.
func (a *alternative) free() []candidate {
	return slices.DeleteFunc(slices.Clone(a.candidates), func(c candidate) bool {
		return c.verdict != ""
	})
}

// survey rates all devices of a node for claims without an allocation.
func (s *Scheduler) survey(
	ctx context.Context, node *nodeState, claims []*resourceapi.ResourceClaim,
) *survey {
	found := &survey{devices: s.devices, pools: s.devices.reachable(node), claims: claims}
	left := map[*pool]map[string]map[string]resource.Quantity{}
	for _, p := range found.pools {
		left[p] = s.devices.remainingCounters(p)
	}

	for _, claim := range claims {
		for i := range claim.Spec.Devices.Requests {
			r := &surveyedRequest{claim: claim, name: claim.Spec.Devices.Requests[i].Name,
				alternatives: s.alternatives(&claim.Spec.Devices.Requests[i])}
			for _, a := range r.alternatives {
				for _, p := range found.pools {
					if !p.complete() || p.invalid != "" {
						continue
					}
					found.broken = !s.addCandidates(ctx, node, a, p, left[p]) || found.broken
				}
			}

			found.requests = append(found.requests, r)
		}
	}

	return found
}

func (s *Scheduler) alternatives(request *resourceapi.DeviceRequest) []*alternative {
	if e := request.Exactly; e != nil {
		a := &alternative{reference: request.Name, class: s.classes[e.DeviceClassName],
			wanted: int(e.Count), tolerate: e.Tolerations,
			all:   e.AllocationMode == resourceapi.DeviceAllocationModeAll,
			admin: ptr.Deref(e.AdminAccess, false), capacity: e.Capacity,
			derived: e.DerivedAttributes}
		a.selectors = selectors(a.class, e.Selectors)
		return []*alternative{a}
	}

	var all []*alternative
	for _, sub := range request.FirstAvailable {
		a := &alternative{reference: resourceclaim.CreateSubRequestRef(request.Name, sub.Name),
			class:  s.classes[sub.DeviceClassName],
			wanted: int(sub.Count), all: sub.AllocationMode == resourceapi.DeviceAllocationModeAll,
			tolerate: sub.Tolerations, capacity: sub.Capacity, derived: sub.DerivedAttributes}
		a.selectors = selectors(a.class, sub.Selectors)
		all = append(all, a)
	}

	return all
}

func selectors(class *resourceapi.DeviceClass, own []resourceapi.DeviceSelector) []selector {
	var all []selector
	for _, s := range class.Spec.Selectors {
		all = append(all, selector{"DeviceClass " + class.Name, s.CEL.Expression})
	}
	for _, s := range own {
		all = append(all, selector{"", s.CEL.Expression})
	}
	return all
}

// reachable returns the pools that have a device for the node, and incomplete ones that might have
// one.
func (d *devices) reachable(node *nodeState) []*pool {
	var found []*pool
	for _, p := range slices.Concat(d.onNode[node.Name], d.shared) {
		if slices.Contains(found, p) {
			continue
		}
		if slices.ContainsFunc(p.slices, func(s *resourceapi.ResourceSlice) bool {
			return reaches(node, s)
		}) {
			p.check()
			found = append(found, p)
		}
	}

	slices.SortFunc(found, func(a, b *pool) int {
		return cmp.Or(cmp.Compare(a.driver, b.driver), cmp.Compare(a.name, b.name))
	})

	return found
}

// reaches reports whether the node can reach a device of the slice.
func reaches(node *nodeState, slice *resourceapi.ResourceSlice) bool {
	spec := &slice.Spec
	if !ptr.Deref(spec.PerDeviceNodeSelection, false) {
		return matchesNode(node, spec.NodeName, spec.AllNodes, spec.NodeSelector)
	}
	return slices.ContainsFunc(spec.Devices, func(d resourceapi.Device) bool {
		return matchesNode(node, d.NodeName, d.AllNodes, d.NodeSelector)
	})
}

func matchesNode(node *nodeState, name *string, all *bool, terms *corev1.NodeSelector) bool {
	switch {
	case ptr.Deref(name, "") != "":
		return *name == node.Name
	case ptr.Deref(all, false):
		return true
	case terms != nil:
		selector, err := nodeaffinity.NewNodeSelector(terms)
		return err == nil && selector.Match(node.Node)
	}
	return false
}

// addCandidates rates the pool's devices and adds them to the candidates. It returns false if a
// selector or a derived attribute has an error.
func (s *Scheduler) addCandidates(
	ctx context.Context, node *nodeState, a *alternative, p *pool,
	left map[string]map[string]resource.Quantity,
) bool {
	sound := true
	for _, slice := range p.slices {
		if !reaches(node, slice) {
			continue
		}

		perDevice := ptr.Deref(slice.Spec.PerDeviceNodeSelection, false)
		for i := range slice.Spec.Devices {
			device := &slice.Spec.Devices[i]
			if perDevice &&
				!matchesNode(node, device.NodeName, device.AllNodes, device.NodeSelector) {
				continue
			}

			c := candidate{
				Device: device, id: structured.MakeDeviceID(p.driver, p.name, device.Name),
				lists: s.features.Allocator.ListTypeAttributes,
			}
			i, err := s.failingSelector(ctx, a, p.driver, device)
			switch {
			case err != nil:
				sound = false
			case i >= 0:
				c.verdict, c.selector = Selector, i
			default:
				s.setVerdict(ctx, a, p, &c, left)
				derives := false
				c.derived, derives = s.derive(ctx, a.derived, p.driver, device)
				sound = sound && derives
			}

			a.candidates = append(a.candidates, c)
		}
	}

	return sound
}

// failingSelector returns the index of the selector that is false for the device, or -1.
func (s *Scheduler) failingSelector(
	ctx context.Context, a *alternative, driver string, device *resourceapi.Device,
) (int, error) {
	input := cel.Device{Driver: driver, AllowMultipleAllocations: device.AllowMultipleAllocations,
		Attributes: device.Attributes, Capacity: device.Capacity}
	for i, selector := range a.selectors {
		compiled := s.cel.GetOrCompile(selector.expression)
		if compiled.Error != nil {
			return 0, compiled.Error
		}
		if matches, _, err := compiled.DeviceMatches(ctx, input); err != nil || !matches {
			return i, err
		}
	}

	return -1, nil
}

// setVerdict sets why a device that the selectors match cannot be used, if it cannot. It checks in
// the allocator's order.
func (s *Scheduler) setVerdict(
	ctx context.Context, a *alternative, p *pool, c *candidate,
	left map[string]map[string]resource.Quantity,
) {
	consumable := s.features.Allocator.ConsumableCapacity
	if consumable && a.all && !s.hasCapacity(ctx, a, p, c, structured.AllocatedState{}) {
		c.verdict, c.detail, c.ignored = CapacityShort, s.capacityLeft(a, c), true
		return
	}

	shared := c.isShared() && consumable
	if !a.admin && s.devices.allocated.AllocatedDevices.Has(c.id) {
		c.verdict = InUse
		return
	}

	if !shared || !s.devices.isAllocated(c.id) {
		if c.detail = shortage(c.Device, left); c.detail != "" {
			c.verdict = CountersShort
			return
		}
	}

	if taint := untolerated(c.Device, a.tolerate); taint != "" &&
		s.features.Allocator.DeviceTaints {
		c.verdict, c.detail = DeviceTainted, taint
		return
	}

	if consumable && !s.hasCapacity(ctx, a, p, c, s.devices.allocated) {
		c.verdict, c.detail = CapacityShort, s.capacityLeft(a, c)
	}
}

// shortage describes a counter that has too little left for the device, or returns "".
func shortage(device *resourceapi.Device, left map[string]map[string]resource.Quantity) string {
	for _, consumed := range device.ConsumesCounters {
		for _, name := range slices.Sorted(maps.Keys(consumed.Counters)) {
			needed, has := consumed.Counters[name].Value, left[consumed.CounterSet][name]
			if needed.Cmp(has) > 0 {
				return fmt.Sprintf("%s of counter set %s, of which %s is left and %s needed",
					name, consumed.CounterSet, has.String(), needed.String())
			}
		}
	}
	return ""
}

// untolerated returns a taint of the device that the request does not tolerate, or "".
func untolerated(device *resourceapi.Device, tolerations []resourceapi.DeviceToleration) string {
	for _, taint := range device.Taints {
		if taint.Effect == resourceapi.DeviceTaintEffectNone {
			continue
		}

		if slices.ContainsFunc(tolerations, func(t resourceapi.DeviceToleration) bool {
			return resourceclaim.ToleratesTaint(t, taint)
		}) {
			continue
		}

		if taint.Value == "" {
			return fmt.Sprintf("%s:%s", taint.Key, taint.Effect)
		}

		return fmt.Sprintf("%s=%s:%s", taint.Key, taint.Value, taint.Effect)
	}
	return ""
}

// hasCapacity asks the allocator whether the device has the capacity that the request wants, given
// the state of allocations. It offers this device alone, without selectors, counters and taints, so
// that the allocator can refuse for no other reason.
func (s *Scheduler) hasCapacity(
	ctx context.Context, a *alternative, p *pool, c *candidate, taken structured.AllocatedState,
) bool {
	if a.capacity == nil && !c.isShared() {
		return true
	}

	const any = "any"
	everywhere := true
	var adminAccess *bool
	if a.admin {
		adminAccess = &a.admin
	}

	device := *c.Device
	device.ConsumesCounters, device.Taints = nil, nil
	device.NodeName, device.NodeSelector, device.AllNodes = nil, nil, nil
	slice := &resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{
		Driver: p.driver, Pool: resourceapi.ResourcePool{Name: p.name, ResourceSliceCount: 1},
		AllNodes: &everywhere,
		Devices:  []resourceapi.Device{device},
	}}

	claim := &resourceapi.ResourceClaim{}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: any,
		Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: any, AllocationMode: resourceapi.DeviceAllocationModeExactCount,
			Count:       1,
			Capacity:    a.capacity,
			AdminAccess: adminAccess,
		}}}

	class := &resourceapi.DeviceClass{}
	class.Name = any
	allocator, err := structured.NewAllocator(ctx, s.features.Allocator, taken, classes{any: class},
		[]*resourceapi.ResourceSlice{slice}, s.cel)
	if err != nil {
		return false
	}

	allocations, err := allocator.Allocate(ctx, &corev1.Node{}, []*resourceapi.ResourceClaim{claim})
	return err == nil && allocations != nil
}

// capacityLeft describes how much the device has left of the capacity that the request wants.
func (s *Scheduler) capacityLeft(a *alternative, c *candidate) string {
	names := slices.Sorted(maps.Keys(c.Capacity))
	if a.capacity != nil {
		names = slices.Sorted(maps.Keys(a.capacity.Requests))
	}

	var parts []string
	for _, name := range names {
		has, known := c.Capacity[name]
		if !known {
			parts = append(parts, fmt.Sprintf("no %s", name))
			continue
		}

		left := has.Value.DeepCopy()
		if consumed := s.devices.allocated.AggregatedCapacity[c.id][name]; consumed != nil {
			left.Sub(*consumed)
		}

		part := fmt.Sprintf("%s %s left of %s", left.String(), name, has.Value.String())
		if a.capacity != nil {
			asked := a.capacity.Requests[name]
			part = fmt.Sprintf("%s, %s asked", part, asked.String())
		}

		parts = append(parts, part)
	}

	return strings.Join(parts, "; ")
}
