package lifecycle

import (
	"fmt"
	"slices"
)

// Entry is what the table says about an event and whoever has the Function.
type Entry struct {
	Event Event
	Whose Whose
	// Rules has one for each of [Phases]; the zero value is for what cannot be.
	Rules []Rule
}

// Phases are all there are, in the order of a Function's life.
func Phases() []Phase { return slices.Clone(phases) }

// Table is the whole table, in the order of a Function's life.
func Table() []Entry {
	var entries []Entry
	for _, event := range events {
		for _, whose := range []Whose{Nobodys, Own, PodsClaim, PodsRequest, NextPods, AnotherClaims, AnotherRequests} {
			row, ok := table[event][whose]
			if !ok {
				continue
			}
			entry := Entry{Event: event, Whose: whose}
			for _, phase := range phases {
				entry.Rules = append(entry.Rules, row[phase])
			}
			entries = append(entries, entry)
		}
	}
	return entries
}

// String is the step, with what must be shown for it: "release if .., else refuse".
func (r Rule) String() string {
	if r.If == "" {
		return string(r.Step)
	}
	return fmt.Sprintf("%s if %s, else %s", r.Step, r.If, r.Else)
}
