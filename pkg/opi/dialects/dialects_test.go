// SPDX-License-Identifier: Apache-2.0

package dialects_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
)

func TestNamed(t *testing.T) {
	for _, name := range append(dialects.Names(), "") {
		d, err := dialects.Named(name)
		if d.New == nil || name != "" && d.Name != name || err != nil {
			t.Errorf("%q: %+v, %v", name, d, err)
		}
	}
	if _, err := dialects.Named("klingon"); err == nil ||
		!strings.Contains(err.Error(), `"klingon": must be one of ["dpu-operator" "evpn-gw" "intel-e2000"]`) {
		t.Errorf("error %v", err)
	}
}

// TestAPI checks that the XPU API has the same dialects.
func TestAPI(t *testing.T) {
	var api []string
	for _, d := range v1alpha1.Dialects() {
		api = append(api, string(d))
	}
	if got := dialects.Names(); !slices.Equal(api, got) {
		t.Errorf("dialects %q, want those of the API, %q", got, api)
	}
}

// TestTiming checks that no dialect leaves out a time that is needed.
func TestTiming(t *testing.T) {
	for _, d := range dialects.All() {
		timing := d.Traits.Timing
		if min(timing.Read, timing.Change, timing.Late, timing.Recovery) <= 0 ||
			timing.InFlight <= 0 || d.Traits.Alive == "" {
			t.Errorf("%s: %+v", d.Name, d.Traits)
		}
	}
}
