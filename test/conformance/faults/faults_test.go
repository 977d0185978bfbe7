// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"regexp"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
	"github.com/opiproject/xpu-device-plugin/pkg/conformance/cases"
)

// TestFaults checks that each fault has a name of its own and cases that exist.
func TestFaults(t *testing.T) {
	all := cases.All(conformance.NewKinds())
	seen := map[string]bool{}
	for _, f := range All() {
		if seen[f.Name] {
			t.Errorf("two faults are called %q", f.Name)
		}
		seen[f.Name] = true

		wanted, found := regexp.MustCompile(f.Pattern()), 0
		for _, c := range all {
			if wanted.MatchString(c.ID()) {
				found++
			}
		}
		if found == 0 || found > 2 {
			t.Errorf("%s: %d cases are called %s, want 1 or 2", f.Name, found, f.Cases)
		}
	}
	if len(seen) < 100 {
		t.Errorf("there are %d faults, want at least 100", len(seen))
	}
}

func TestApply(t *testing.T) {
	f := Fault{file: "x.go", edits: []edit{{"one", "two"}, {"two three", "four"}}}
	if got, err := f.apply("one three"); err != nil || got != "four" {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := f.apply("one one three"); err == nil {
		t.Errorf("%q, want an error", got)
	}
}
