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
	"k8s.io/utils/ptr"
)

// The allocator tries one combination of devices after the other. Where no combination fits, it
// tries all: for 5 VFs of different PFs where there are 4 PFs with 32 VFs each, that takes more
// than half a minute. What is here finds that out from numbers: it gives devices, and values of
// attributes, to the seats of a claim, as a bipartite matching. It leaves out shared counters and
// capacities. So what it calls impossible is, and some of what it does not is too.

// mostChoices of alternatives and of values are looked at. What has more is not called impossible.
const mostChoices = 4096

// seat is a place for one device in a claim.
type seat struct {
	request, reference string // the request, and REQUEST/SUBREQUEST if an alternative was chosen
	options            []candidate
}

// seatings yields the seats of a claim for each choice of alternatives.
func (s *survey) seatings(claim *resourceapi.ResourceClaim) iter.Seq[[]seat] {
	var requests []*surveyedRequest
	for _, r := range s.requests {
		if r.claim == claim {
			requests = append(requests, r)
		}
	}

	return func(yield func([]seat) bool) {
		var choose func(seats []seat, rest []*surveyedRequest) bool
		choose = func(seats []seat, rest []*surveyedRequest) bool {
			if len(rest) == 0 {
				return yield(seats)
			}

			for _, a := range rest[0].alternatives {
				if !choose(slices.Concat(seats, a.seats(rest[0].name)), rest[1:]) {
					return false
				}
			}

			return true
		}

		choose(nil, requests)
	}
}

// seats returns a seat for each device that the alternative wants.
func (a *alternative) seats(request string) []seat {
	free := a.free()
	if a.all {
		return nil // there is no choice
	}
	return slices.Repeat([]seat{{request, a.reference, free}}, a.wanted)
}

// impossible returns why the claims cannot be served together, or nothing if that needs a search.
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

// claimImpossible returns why a claim cannot be served, whichever alternatives are chosen.
func (s *survey) claimImpossible(claim *resourceapi.ResourceClaim) *Reason {
	var first *Reason
	choices := 0
	for seats := range s.seatings(claim) {
		choices++
		reason := seatsImpossible(claim, seats)
		if reason == nil || choices > mostChoices {
			return nil
		}
		if first == nil {
			first = reason
		}
	}

	if first != nil {
		first.Causes = s.taken(claim)
	}

	return first
}

func seatsImpossible(claim *resourceapi.ResourceClaim, seats []seat) *Reason {
	if got := assign(seats, byDevice); got < len(seats) {
		return &Reason{Code: Conflict, Claim: claim.Name, Message: fmt.Sprintf(
			"the requests of the claim need %d devices together, and %d that match can be had",
			len(seats), got)}
	}

	constraints := claim.Spec.Devices.Constraints
	for i := range constraints {
		if message := violated(&constraints[i], seats); message != "" {
			return &Reason{Code: ConstraintImpossible, Claim: claim.Name, Message: message}
		}
	}

	choices := 0
	if len(constraints) > 1 && !satisfiable(constraints, seats, &choices) {
		return &Reason{Code: ConstraintImpossible, Claim: claim.Name,
			Message: "each constraint can be satisfied alone, and no devices satisfy all of them: " + describe(constraints)}
	}

	return nil
}

// violated says why no choice of devices satisfies the constraint, or "".
func violated(constraint *resourceapi.DeviceConstraint, seats []seat) string {
	covered, values := covered(constraint, seats)
	if constraint.DistinctAttribute != nil {
		if got := assign(covered, byValue(constraint)); got < len(covered) {
			return fmt.Sprintf("distinctAttribute %s: needs %d devices with different values, "+
				"and can have %d; the values are %s",
				*constraint.DistinctAttribute, len(covered), got, named(values))
		}
		return ""
	}

	most, best := 0, ""
	for _, value := range values {
		if got := assign(restricted(constraint, covered, value), byDevice); got > most {
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

// satisfiable says whether some devices may satisfy all constraints.
func satisfiable(constraints []resourceapi.DeviceConstraint, seats []seat, choices *int) bool {
	i := slices.IndexFunc(constraints, func(c resourceapi.DeviceConstraint) bool {
		return c.MatchAttribute != nil
	})
	if i >= 0 {
		others := slices.Delete(slices.Clone(constraints), i, i+1)
		those, values := covered(&constraints[i], seats)
		if len(those) == 0 {
			return satisfiable(others, seats, choices)
		}
		return slices.ContainsFunc(values, func(value string) bool {
			return satisfiable(others, restricted(&constraints[i], seats, value), choices)
		})
	}

	if *choices++; *choices > mostChoices {
		return true
	}

	for i := range constraints {
		if seats, _ := covered(&constraints[i],
			seats); assign(seats, byValue(&constraints[i])) < len(seats) {
			return false
		}
	}

	return assign(seats, byDevice) == len(seats)
}

// covered returns the seats that the constraint is for, and the values that their devices have,
// sorted.
func covered(constraint *resourceapi.DeviceConstraint, seats []seat) ([]seat, []string) {
	var those []seat
	values := map[string]struct{}{}
	for _, s := range seats {
		if !covers(constraint, s) {
			continue
		}

		those = append(those, s)
		for i := range s.options {
			if value, has := attributeOf(constraint, &s.options[i]); has {
				values[value] = struct{}{}
			}
		}
	}

	return those, slices.Sorted(maps.Keys(values))
}

func covers(constraint *resourceapi.DeviceConstraint, s seat) bool {
	return len(constraint.Requests) == 0 || slices.Contains(constraint.Requests, s.request) ||
		slices.Contains(constraint.Requests, s.reference)
}

// restricted returns the seats, those that the constraint is for with the devices of one value
// only.
func restricted(constraint *resourceapi.DeviceConstraint, seats []seat, value string) []seat {
	kept := slices.Clone(seats)
	for i, s := range kept {
		if !covers(constraint, s) {
			continue
		}

		kept[i].options = nil
		for j := range s.options {
			if has, ok := attributeOf(constraint, &s.options[j]); ok && has == value {
				kept[i].options = append(kept[i].options, s.options[j])
			}
		}
	}

	return kept
}

// attributeOf returns the device's value of the constraint's attribute, as text that differs where
// the allocator sees a difference. An attribute of the driver's own domain may leave the domain
// out.
func attributeOf(constraint *resourceapi.DeviceConstraint, c *candidate) (string, bool) {
	name := string(ptr.Deref(constraint.MatchAttribute,
		ptr.Deref(constraint.DistinctAttribute, "")))
	attribute, has := c.Attributes[resourceapi.QualifiedName(name)]
	if !has {
		if id, own := strings.CutPrefix(name, c.id.Driver.String()+"/"); own {
			attribute, has = c.Attributes[resourceapi.QualifiedName(id)]
		}
	}

	switch {
	case !has:
		return "", false
	case attribute.StringValue != nil:
		return strconv.Quote(*attribute.StringValue), true
	case attribute.IntValue != nil:
		return strconv.FormatInt(*attribute.IntValue, 10), true
	case attribute.BoolValue != nil:
		return strconv.FormatBool(*attribute.BoolValue), true
	case attribute.VersionValue != nil:
		return "version " + *attribute.VersionValue, true
	}

	return "", false
}

// key is what a device takes from others by sitting on a seat; ok says whether it may sit there.
type key func(seat int, c *candidate) (taken string, ok bool)

// byDevice lets each device sit on one seat, except those that allow several allocations.
func byDevice(seat int, c *candidate) (string, bool) {
	if c.isShared() {
		return c.id.String() + "/" + strconv.Itoa(seat), true
	}
	return c.id.String(), true
}

// byValue lets one device of each value sit.
func byValue(constraint *resourceapi.DeviceConstraint) key {
	return func(_ int, c *candidate) (string, bool) { return attributeOf(constraint, c) }
}

// assign returns how many seats can be filled at once: a maximum bipartite matching, by augmenting
// paths.
func assign(seats []seat, by key) int {
	sitting := map[string]int{} // the seat that has taken a key
	filled := 0
	for i := range seats {
		if augment(seats, by, sitting, map[string]struct{}{}, i) {
			filled++
		}
	}
	return filled
}

// augment fills the seat, if need be by moving others.
func augment(seats []seat, by key, sitting map[string]int, tried map[string]struct{}, i int) bool {
	for j := range seats[i].options {
		k, ok := by(i, &seats[i].options[j])
		if _, again := tried[k]; again || !ok {
			continue
		}

		tried[k] = struct{}{}
		other, taken := sitting[k]
		if !taken || augment(seats, by, sitting, tried, other) {
			sitting[k] = i
			return true
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
