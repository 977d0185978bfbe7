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

// relaxedTimeout is how long the allocator searches for a solution without one of the limits, to
// find the one to blame.
const relaxedTimeout = 100 * time.Millisecond

// why returns why the allocator found no solution.
func (s *Scheduler) why(
	ctx context.Context, node *nodeState, claims []*resourceapi.ResourceClaim,
) []Reason {
	if reasons := s.survey(ctx, node, claims).impossible(); len(reasons) > 0 {
		return reasons
	}
	return []Reason{s.conflict(ctx, node, claims)}
}

// conflict says which limit is to blame where each request alone could be served: the one without
// which all could be.
func (s *Scheduler) conflict(
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

	if s.fits(ctx, node, claims, s.uncounted(node)) {
		return Reason{Code: Conflict, Message: "each device alone can be had; together they need " +
			"more than is left of the counters that they share"}
	}

	return Reason{Code: Conflict, Message: "each device alone can be had, and not all of them: " +
		"they need the same devices, capacity or counters"}
}

// fits says whether the allocator finds devices for the claims in a short time.
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

// uncounted returns the slices that the node can reach, with devices that consume no counters.
func (s *Scheduler) uncounted(node *nodeState) []*resourceapi.ResourceSlice {
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

// tooFew returns a reason for each request that could not be served if it were the only one.
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

// short returns why the alternative could not be served if it were the only one, or nil.
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
		Causes: append(s.unusable(), s.causes(a)...), Message: fmt.Sprintf(
			"%s of DeviceClass %s, and can have %d of the node's %d devices", needs, a.class.Name,
			free, len(a.candidates))}
}

// unusable returns what is wrong with pools.
func (s *survey) unusable() []Cause {
	var causes []Cause
	for _, p := range s.pools {
		switch {
		case !p.complete():
			causes = append(causes, Cause{Code: PoolIncomplete, Message: fmt.Sprintf(
				"pool %s is incomplete: %d of %d ResourceSlices of generation %d are there; its "+
					"driver is writing them, or has stopped",
				p, len(p.slices), p.want, p.generation)})
		case p.invalid != "":
			causes = append(causes,
				Cause{Code: PoolInvalid,
					Message: fmt.Sprintf("pool %s is invalid: %s", p, p.invalid)})
		}
	}

	return causes
}

// obstacle is what stands in the way of some devices, in the same way.
type obstacle struct {
	code     Code
	selector int
	detail   string
}

// causes returns what stands in the way of devices, the most frequent of a kind first.
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
			Cause{Code: o.code, Devices: len(with[o]), Message: s.tell(a, o, with[o])})
	}

	return causes
}

// tell says what an obstacle is.
func (s *survey) tell(a *alternative, o obstacle, those []candidate) string {
	is, do := "are", "do"
	if len(those) == 1 {
		is, do = "is", "does"
	}

	switch o.code {
	case Selector:
		return fmt.Sprintf("%d %s not match the selector %s", len(those),
			do, a.selectors[o.selector].tell(those))
	case InUse:
		return fmt.Sprintf("%d %s in use by ResourceClaims %s", len(those),
			is, some(s.owners(those)))
	case CountersShort:
		return fmt.Sprintf("%d %s short of counter %s", len(those), is, o.detail)
	case DeviceTainted:
		return fmt.Sprintf("%d %s tainted %s, which the request does not tolerate", len(those),
			is, o.detail)
	}

	return fmt.Sprintf("%d %s short of capacity: %s", len(those), is, o.detail)
}

// owners returns the claims that have the devices, sorted.
func (s *survey) owners(those []candidate) []string {
	var names []string
	for _, c := range those {
		for _, owner := range s.devices.owners[c.id] {
			names = append(names, owner.String())
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// taken returns what stands in the way of devices that match requests of the claim.
func (s *survey) taken(claim *resourceapi.ResourceClaim) []Cause {
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

	return append(s.unusable(), causes...)
}

// tell shows the selector, and which of its attributes and capacities devices lack.
func (s selector) tell(those []candidate) string {
	text := s.expression
	if s.of != "" {
		text += " of " + s.of
	}

	lacking := map[string]int{}
	for _, name := range reads(s.expression) {
		for _, c := range those {
			if !name.isOn(c) {
				lacking[name.String()]++
			}
		}
	}

	var notes []string
	for _, name := range slices.Sorted(maps.Keys(lacking)) {
		if lacking[name] == len(those) {
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
