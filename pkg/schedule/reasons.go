// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/structured"
)

// relaxedTimeout bounds a search without one of the limits, which shows whether this limit is the
// reason.
const relaxedTimeout = 100 * time.Millisecond

// explain returns why the allocator found no solution.
func (s *Scheduler) explain(
	ctx context.Context, node *nodeState, claims []*resourceapi.ResourceClaim,
) []Reason {
	if reasons := s.survey(ctx, node, claims).impossible(); len(reasons) > 0 {
		return reasons
	}
	return []Reason{s.conflictReasons(ctx, node, claims)}
}

// conflictReasons returns why the claims cannot be satisfied together although each request alone
// can. It relaxes one limit after the other, and names the first without which a solution exists.
func (s *Scheduler) conflictReasons(
	ctx context.Context, node *nodeState, claims []*resourceapi.ResourceClaim,
) Reason {
	for i, claim := range claims {
		for j, constraint := range claim.Spec.Devices.Constraints {
			relaxed := slices.Clone(claims)
			relaxed[i] = claim.DeepCopy()
			relaxed[i].Spec.Devices.Constraints = slices.Delete(relaxed[i].Spec.Devices.Constraints,
				j, j+1)
			if s.fits(ctx, node, relaxed, s.devices.slices) {
				return Reason{Code: ConstraintImpossible, Claim: claim.Name,
					Message: "each device alone can be had, and without " +
						describe([]resourceapi.DeviceConstraint{constraint}) + " all could be"}
			}
		}
	}

	if s.fits(ctx, node, claims, s.slicesWithoutCounters(node)) {
		return Reason{Code: Conflict, Message: "each device alone can be had; together they need " +
			"more than is left of the counters that they share"}
	}

	return Reason{Code: Conflict, Message: "each device alone can be had, and not all of them: " +
		"they need the same devices, capacity or counters"}
}

// fits reports whether the allocator finds devices for the claims within relaxedTimeout.
func (s *Scheduler) fits(
	ctx context.Context, node *nodeState, claims []*resourceapi.ResourceClaim,
	from []*resourceapi.ResourceSlice,
) bool {
	ctx, cancel := context.WithTimeout(ctx, relaxedTimeout)
	defer cancel()

	allocator, err := structured.NewAllocator(ctx, s.features.Allocator, s.devices.allocated,
		s.classes, from, s.cel)
	if err != nil {
		return false
	}

	allocations, err := allocator.Allocate(ctx, node.Node, claims)
	return err == nil && allocations != nil
}

// slicesWithoutCounters returns the slices that the node can reach, with devices that consume no
// counters.
func (s *Scheduler) slicesWithoutCounters(node *nodeState) []*resourceapi.ResourceSlice {
	var all []*resourceapi.ResourceSlice
	for _, p := range s.devices.reachable(node) {
		for _, slice := range p.slices {
			slice = slice.DeepCopy()
			for i := range slice.Spec.Devices {
				slice.Spec.Devices[i].ConsumesCounters = nil
			}
			all = append(all, slice)
		}
	}

	return all
}

// tooFew returns a reason for each request that could not be satisfied even alone.
func (s *survey) tooFew() []Reason {
	if len(s.pools) == 0 {
		return []Reason{
			{Code: NoDevices, Message: "the node has no devices: no ResourceSlice is for it"},
		}
	}

	var reasons []Reason
	for _, r := range s.requests {
		var short []Reason
		for _, a := range r.alternatives {
			if reason := s.short(r.claim, a); reason != nil {
				short = append(short, *reason)
			}
		}

		if len(short) == len(r.alternatives) {
			reasons = append(reasons, short...)
		}
	}

	return reasons
}

// short returns why the alternative could not be satisfied even alone, or nil.
func (s *survey) short(claim *resourceapi.ResourceClaim, a *alternative) *Reason {
	match, free := 0, 0
	for _, c := range a.candidates {
		if c.verdict != Selector && !c.ignored {
			match++
		}
		if c.verdict == "" {
			free++
		}
	}

	wanted, needs := a.wanted, fmt.Sprintf("needs %d", a.wanted)
	if a.all {
		wanted, needs = max(match, 1), "needs all that match"
	}
	if free >= wanted {
		return nil
	}

	return &Reason{Code: TooFewDevices, Claim: claim.Name, Request: a.reference,
		Causes: append(s.unusablePools(), s.causes(a)...), Message: fmt.Sprintf(
			"%s of DeviceClass %s, and can have %d of the node's %d devices", needs, a.class.Name,
			free, len(a.candidates))}
}

// unusablePools returns what is wrong with pools.
func (s *survey) unusablePools() []Cause {
	var causes []Cause
	for _, p := range s.pools {
		switch {
		case !p.complete():
			causes = append(causes, Cause{Code: PoolIncomplete, Message: fmt.Sprintf(
				"pool %s is incomplete: %d of %d ResourceSlices of generation %d are there; its "+
					"driver is writing them, or has stopped",
				p, len(p.slices), p.expectedSlices, p.generation)})
		case p.invalid != "":
			causes = append(causes,
				Cause{Code: PoolInvalid,
					Message: fmt.Sprintf("pool %s is invalid: %s", p, p.invalid)})
		}
	}

	return causes
}

// obstacle is a reason why some devices cannot be used.
type obstacle struct {
	code     Code
	selector int
	detail   string
}

// causes returns why devices cannot be used, the most frequent first.
func (s *survey) causes(a *alternative) []Cause {
	with := map[obstacle][]candidate{}
	for _, c := range a.candidates {
		if c.verdict != "" {
			o := obstacle{c.verdict, c.selector, c.detail}
			with[o] = append(with[o], c)
		}
	}

	order := []Code{Selector, InUse, CountersShort, DeviceTainted, CapacityShort}
	var causes []Cause
	for _, o := range slices.SortedFunc(maps.Keys(with), func(a, b obstacle) int {
		return cmp.Or(
			cmp.Compare(slices.Index(order, a.code), slices.Index(order, b.code)),
			cmp.Compare(a.selector, b.selector),
			cmp.Compare(len(with[b]), len(with[a])), cmp.Compare(a.detail, b.detail))
	}) {
		causes = append(causes,
			Cause{Code: o.code, Devices: len(with[o]), Message: s.message(a, o, with[o])})
	}

	return causes
}

// message describes an obstacle and how many devices it affects.
func (s *survey) message(a *alternative, o obstacle, found []candidate) string {
	is, do := "are", "do"
	if len(found) == 1 {
		is, do = "is", "does"
	}

	switch o.code {
	case Selector:
		return fmt.Sprintf("%d %s not match the selector %s", len(found),
			do, a.selectors[o.selector].message(found))
	case InUse:
		return fmt.Sprintf("%d %s in use by ResourceClaims %s", len(found),
			is, some(s.owners(found)))
	case CountersShort:
		return fmt.Sprintf("%d %s short of counter %s", len(found), is, o.detail)
	case DeviceTainted:
		return fmt.Sprintf("%d %s tainted %s, which the request does not tolerate", len(found),
			is, o.detail)
	}

	return fmt.Sprintf("%d %s short of capacity: %s", len(found), is, o.detail)
}

// owners returns the claims that use the devices, sorted.
func (s *survey) owners(found []candidate) []string {
	var names []string
	for _, c := range found {
		for _, owner := range s.devices.owners[c.id] {
			names = append(names, owner.String())
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// inUseCauses returns why devices that match requests of the claim cannot be used.
func (s *survey) inUseCauses(claim *resourceapi.ResourceClaim) []Cause {
	var causes []Cause
	for _, r := range s.requests {
		if r.claim != claim {
			continue
		}
		for _, a := range r.alternatives {
			for _, cause := range s.causes(a) {
				if cause.Code != Selector && !slices.Contains(causes, cause) {
					causes = append(causes, cause)
				}
			}
		}
	}

	return append(s.unusablePools(), causes...)
}

// message describes the selector, and the attributes and capacities in it that devices lack.
func (s selector) message(found []candidate) string {
	text := s.expression
	if s.of != "" {
		text += " of " + s.of
	}

	lacking := map[string]int{}
	for _, name := range reads(s.expression) {
		for _, c := range found {
			if !name.isOn(c) {
				lacking[name.String()]++
			}
		}
	}

	var notes []string
	for _, name := range slices.Sorted(maps.Keys(lacking)) {
		if lacking[name] == len(found) {
			notes = append(notes, "none has "+name)
		} else {
			notes = append(notes, fmt.Sprintf("%d lack %s", lacking[name], name))
		}
	}

	if len(notes) == 0 {
		return text
	}

	return text + " (" + strings.Join(notes, ", ") + ")"
}
