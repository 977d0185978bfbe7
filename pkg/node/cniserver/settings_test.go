// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// TestAddSettings checks that a network configuration replaces single settings of a claim's
// interface, and does not write into what the claim has.
func TestAddSettings(t *testing.T) {
	claimed := function.Interface{
		VRF: &function.VRF{Name: "red", Table: 1}, Sysctls: map[string]string{"a": "1", "b": "1"},
		Offload: &function.Offload{GSOMaxSize: 1, GROMaxSize: 1},
		Ethtool: function.Ethtool{"features": {"x": "on", "y": "on"}},
	}
	both := claimed
	addSettings(&both, function.Interface{
		AllMulticast: true, Sysctls: map[string]string{"b": "2"},
		Offload: &function.Offload{GROMaxSize: 2, GSOIPv4MaxSize: 2},
		Ethtool: function.Ethtool{"features": {"y": "off"}, "rings": {"rx": "2"}},
	})

	want := function.Interface{
		AllMulticast: true, VRF: &function.VRF{Name: "red", Table: 1},
		Sysctls: map[string]string{"a": "1", "b": "2"},
		Offload: &function.Offload{GSOMaxSize: 1, GROMaxSize: 2, GSOIPv4MaxSize: 2},
		Ethtool: function.Ethtool{"features": {"x": "on", "y": "off"}, "rings": {"rx": "2"}},
	}
	if diff := cmp.Diff(want, both); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if claimed.Sysctls["b"] != "1" || claimed.Ethtool["features"]["y"] != "on" ||
		claimed.Offload.GROMaxSize != 1 {
		t.Errorf("the claim's interface has changed: %+v", claimed)
	}

	same := claimed
	addSettings(&same, function.Interface{})
	if diff := cmp.Diff(claimed, same); diff != "" {
		t.Errorf("without settings (-want +got):\n%s", diff)
	}
}
