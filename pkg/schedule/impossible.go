// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

// The allocator tries one combination of devices after the other. Where no combination fits, it
// tries all: for 5 VFs of different PFs where there are 4 PFs with 32 VFs each, that takes more
// than half a minute.
//
// The functions here prove that no combination fits by counting. They match the slots of a claim
// with devices, or with values of an attribute, and compute a maximum bipartite matching. If the
// matching leaves a slot unmatched, the claim is impossible. Shared counters and capacities are
// ignored, so a claim may be impossible for reasons that are not found here.

// mostChoices bounds how many choices of alternatives and values are examined. A claim with more
// choices is not called impossible.
const mostChoices = 4096

// slot stands for one device that a claim needs.
type slot struct {
	request, reference string // name of the request, and REQUEST/SUBREQUEST of a chosen alternative
	candidates         []candidate
}

// slotChoices yields the slots of a claim for each choice of alternatives.
func (s *survey) slotChoices(claim *resourceapi.ResourceClaim) iter.Seq[[]slot] {
	var requests []*surveyedRequest
	for _, r := range s.requests {
		if r.claim == claim {
			requests = append(requests, r)
		}
	}

	return func(yield func([]slot) bool) {
		var choose func(slots []slot, rest []*surveyedRequest) bool
		choose = func(slots []slot, rest []*surveyedRequest) bool {
			if len(rest) == 0 {
				return yield(slots)
			}

			for _, a := range rest[0].alternatives {
				if !choose(slices.Concat(slots, a.slots(rest[0].name)), rest[1:]) {
					return false
				}
			}

			return true
		}

		choose(nil, requests)
	}
}

// slots returns a slot for each device that the alternative needs.
func (a *alternative) slots(request string) []slot {
	free := a.free()
	if a.all {
		return nil // all matching devices are taken, so there is no choice
	}
	return slices.Repeat([]slot{{request, a.reference, free}}, a.wanted)
}

// impossible returns why the claims cannot be satisfied together. It returns nothing if only a
// search can tell.
func (s *survey) impossible() []Reason {
	if s.broken {
		return nil
	}
	if reasons := s.tooFew(); len(reasons) > 0 {
		return reasons
	}

	for _, claim := range s.claims {
		if reason := s.claimImpossible(claim); reason != nil {
			return []Reason{*reason}
		}
	}

	return nil
}

// claimImpossible returns why a claim cannot be satisfied, whichever alternatives are chosen. It
// returns nil if it might be satisfied.
func (s *survey) claimImpossible(claim *resourceapi.ResourceClaim) *Reason {
	var first *Reason
	choices := 0
	for slots := range s.slotChoices(claim) {
		choices++
		reason := slotsImpossible(claim, slots)
		if reason == nil || choices > mostChoices {
			return nil
		}
		if first == nil {
			first = reason
		}
	}

	if first != nil {
		first.Causes = s.inUseCauses(claim)
	}

	return first
}

func slotsImpossible(claim *resourceapi.ResourceClaim, slots []slot) *Reason {
	if got := maxMatching(slots, byDevice); got < len(slots) {
		return &Reason{Code: Conflict, Claim: claim.Name, Message: fmt.Sprintf(
			"the requests of the claim need %d devices together, and %d that match can be had",
			len(slots), got)}
	}

	constraints := claim.Spec.Devices.Constraints
	for i := range constraints {
		if message := violated(&constraints[i], slots); message != "" {
			return &Reason{Code: ConstraintImpossible, Claim: claim.Name, Message: message}
		}
	}

	choices := 0
	if len(constraints) > 1 && !satisfiable(constraints, slots, &choices) {
		return &Reason{Code: ConstraintImpossible, Claim: claim.Name,
			Message: "each constraint can be satisfied alone, and no devices satisfy all of them: " + describe(constraints)}
	}

	return nil
}

// violated returns why no choice of devices satisfies the constraint, or "" if some choice might.
func violated(constraint *resourceapi.DeviceConstraint, slots []slot) string {
	covered, values := covered(constraint, slots)
	if constraint.DistinctAttribute != nil {
		if got := maxMatching(covered, byValue(constraint)); got < len(covered) {
			return fmt.Sprintf("distinctAttribute %s: needs %d devices with different values, "+
				"and can have %d; the values are %s",
				*constraint.DistinctAttribute, len(covered), got, named(values))
		}
		return ""
	}

	most, best := 0, ""
	for _, value := range values {
		if got := maxMatching(restricted(constraint, covered, value), byDevice); got > most {
			most, best = got, value
		}
	}

	switch {
	case most == len(covered):
		return ""
	case most == 0:
		return fmt.Sprintf("matchAttribute %s: no device that can be had has the attribute",
			*constraint.MatchAttribute)
	}

	return fmt.Sprintf("matchAttribute %s: needs %d devices with the same value, and can have at "+
		"most %d, with %s",
		*constraint.MatchAttribute, len(covered), most, best)
}

// satisfiable reports whether some choice of devices may satisfy all constraints.
func satisfiable(constraints []resourceapi.DeviceConstraint, slots []slot, choices *int) bool {
	i := slices.IndexFunc(constraints, func(c resourceapi.DeviceConstraint) bool {
		return c.MatchAttribute != nil
	})
	if i >= 0 {
		others := slices.Delete(slices.Clone(constraints), i, i+1)
		coveredSlots, values := covered(&constraints[i], slots)
		if len(coveredSlots) == 0 {
			return satisfiable(others, slots, choices)
		}
		return slices.ContainsFunc(values, func(value string) bool {
			return satisfiable(others, restricted(&constraints[i], slots, value), choices)
		})
	}

	if *choices++; *choices > mostChoices {
		return true
	}

	for i := range constraints {
		coveredSlots, _ := covered(&constraints[i], slots)
		if maxMatching(coveredSlots, byValue(&constraints[i])) < len(coveredSlots) {
			return false
		}
	}

	return maxMatching(slots, byDevice) == len(slots)
}

// covered returns the slots that the constraint applies to, and the sorted values of the attribute
// among their candidates.
func covered(constraint *resourceapi.DeviceConstraint, slots []slot) ([]slot, []string) {
	var coveredSlots []slot
	values := map[string]struct{}{}
	for _, s := range slots {
		if !covers(constraint, s) {
			continue
		}

		coveredSlots = append(coveredSlots, s)
		for i := range s.candidates {
			for _, value := range s.candidates[i].values(constraint) {
				values[value] = struct{}{}
			}
		}
	}

	return coveredSlots, slices.Sorted(maps.Keys(values))
}

func covers(constraint *resourceapi.DeviceConstraint, s slot) bool {
	return len(constraint.Requests) == 0 || slices.Contains(constraint.Requests, s.request) ||
		slices.Contains(constraint.Requests, s.reference)
}

// restricted returns all slots. The slots that the constraint applies to keep only candidates that
// have the given value, perhaps among others.
func restricted(constraint *resourceapi.DeviceConstraint, slots []slot, value string) []slot {
	kept := slices.Clone(slots)
	for i, s := range kept {
		if !covers(constraint, s) {
			continue
		}

		kept[i].candidates = nil
		for j := range s.candidates {
			if slices.Contains(s.candidates[j].values(constraint), value) {
				kept[i].candidates = append(kept[i].candidates, s.candidates[j])
			}
		}
	}

	return kept
}

// matchKeys returns the vertices with which a candidate can match a slot.
type matchKeys func(slot int, c *candidate) (vertices []string)

// byDevice matches each device with one slot, or with any number if it allows multiple allocations.
func byDevice(slot int, c *candidate) []string {
	if c.isShared() {
		return []string{c.id.String() + "/" + strconv.Itoa(slot)}
	}
	return []string{c.id.String()}
}

// byValue matches one device of each value of the constraint's attribute. Devices with several
// values must not have any of them in common, so this matches at least as many slots as the
// allocator can.
func byValue(constraint *resourceapi.DeviceConstraint) matchKeys {
	return func(_ int, c *candidate) []string { return c.values(constraint) }
}

// maxMatching returns the size of a maximum bipartite matching between slots and the vertices that
// keys returns for their candidates. It searches augmenting paths (Kuhn's algorithm).
func maxMatching(slots []slot, keys matchKeys) int {
	matched := map[string]int{} // the slot that a vertex is matched with
	size := 0
	for i := range slots {
		if findAugmentingPath(slots, keys, matched, map[string]struct{}{}, i) {
			size++
		}
	}
	return size
}

// findAugmentingPath searches an augmenting path that starts at slot i and passes no visited
// vertex. If it finds one, it updates matched along the path and returns true.
func findAugmentingPath(
	slots []slot, keys matchKeys, matched map[string]int, visited map[string]struct{}, i int,
) bool {
	for j := range slots[i].candidates {
		for _, vertex := range keys(i, &slots[i].candidates[j]) {
			if _, seen := visited[vertex]; seen {
				continue
			}

			visited[vertex] = struct{}{}
			other, isMatched := matched[vertex]
			if !isMatched || findAugmentingPath(slots, keys, matched, visited, other) {
				matched[vertex] = i
				return true
			}
		}
	}
	return false
}

func named(values []string) string {
	if len(values) == 0 {
		return "none"
	}
	return some(values)
}

func describe(constraints []resourceapi.DeviceConstraint) string {
	var all []string
	for _, c := range constraints {
		if c.MatchAttribute != nil {
			all = append(all, "matchAttribute "+string(*c.MatchAttribute))
		} else {
			all = append(all, "distinctAttribute "+string(*c.DistinctAttribute))
		}
	}

	return strings.Join(all, ", ")
}
