// SPDX-License-Identifier: Apache-2.0

package multimap_test

import (
	"slices"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/multimap"
)

func TestSets(t *testing.T) {
	var s multimap.Sets[string, int]
	check := func(key string, want ...int) {
		t.Helper()
		if got := slices.Sorted(s.All(key)); !slices.Equal(got, want) {
			t.Errorf("%s has %v, want %v", key, got, want)
		}
	}

	s.Remove("a", 1) // nothing is in it yet
	check("a")

	s.Add("a", 2)
	s.Add("a", 1)
	s.Add("a", 2) // a second time
	s.Add("b", 2)
	check("a", 1, 2)
	check("b", 2)
	if !s.Has("a", 1) || s.Has("b", 1) || s.Has("c", 1) {
		t.Errorf("Has contradicts %v", s)
	}

	s.Remove("a", 2)
	s.Remove("b", 1) // not in it
	check("a", 1)
	check("b", 2)

	s.Remove("a", 1)
	s.Remove("b", 2)
	if len(s) != 0 {
		t.Errorf("%v has keys without values", s)
	}
}
