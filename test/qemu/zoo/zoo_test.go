// SPDX-License-Identifier: Apache-2.0

package zoo_test

import (
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/zoo"
)

// TestAll checks that every file is a personality, and that every quirk that it names exists.
func TestAll(t *testing.T) {
	all, err := zoo.All()
	must.Succeed(t, err)
	if len(all) < 14 {
		t.Errorf("%d personalities, want 14 at least", len(all))
	}

	for _, p := range all {
		for _, d := range p.Deviations {
			known := slices.ContainsFunc(quirk.All(), func(q quirk.Quirk) bool {
				return q.Name == d.Quirk
			})
			if d.Quirk != "" && !known {
				t.Errorf("%s: %s: pkg/kernel/quirk has no quirk %q", p.Name, d.Does, d.Quirk)
			}
		}
	}
}

// TestThird checks that three numbers in a row have all personalities, each once.
func TestThird(t *testing.T) {
	all, err := zoo.All()
	must.Succeed(t, err)

	var got []string
	for number := 20417; number < 20420; number++ {
		for _, p := range zoo.Third(all, number) {
			got = append(got, p.Name)
		}
	}

	var want []string
	for _, p := range all {
		want = append(want, p.Name)
	}

	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("personalities (-want +got):\n%s", diff)
	}
}

// TestKnobs checks that the simulated NIC has the knobs of the format, and no others.
func TestKnobs(t *testing.T) {
	source, err := os.ReadFile("../simnic/personality.h")
	must.Succeed(t, err)

	names := func(pattern string) (found []string) {
		for _, match := range regexp.MustCompile(pattern).FindAllSubmatch(source, -1) {
			found = append(found, string(match[1]))
		}
		return found
	}

	var got []string
	for _, field := range names(`[\t ]FIELD\("([a-z]+)"`) {
		for _, aspect := range names(`KNOB\(name(?: "([a-z.-]+)")?, [A-Z]`) {
			got = append(got, field+aspect)
		}
	}

	got = append(got, names(`KNOB\("([a-z.-]+)"`)...)

	var want []string
	for _, k := range personality.Knobs() {
		want = append(want, k.Name)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("knobs (-format +simnic):\n%s", diff)
	}
}
