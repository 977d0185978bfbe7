// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// TestRulesHarm: rules are made only where the scheduler is known to bear them.
func TestRulesHarm(t *testing.T) {
	for version, want := range map[string]bool{
		"v1.36.0": true, "v1.36.2": true, "v1.36.2+k3s1": true, "v1.36.3": false, "v1.37.0": false,
		"v1.35.6": false, "v1.34.1-gke.100": false, "v1.38.0-beta.0": false, "": true, "unknown": true,
		"v0.0.0-master+$Format:%H$": true,
	} {
		if got := RulesHarm(version); got != want {
			t.Errorf("%q: %t, want %t", version, got, want)
		}
	}
}

// TestAnothersPool: a pool is another XPU's only if that is known.
func TestAnothersPool(t *testing.T) {
	at := func(name, node string, pfs ...string) v1alpha1.XPU {
		return v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: v1alpha1.XPUSpec{NodeName: node, PFs: pfs}}
	}
	const pool, pf = "node1/0000-3b-00-0/fast", "0000:3b:00.0"
	for name, test := range map[string]struct {
		xpu    v1alpha1.XPU
		others []v1alpha1.XPU
		pool   string
		want   bool
	}{
		"its own":                 {at("a", "node1", pf), nil, pool, false},
		"of no XPU at the moment": {at("a", "node1", "0000:86:00.0"), nil, pool, false},
		"served by another": {at("a", "node1", "0000:86:00.0"),
			[]v1alpha1.XPU{at("b", "node1", pf)}, pool, true},
		"of another node":           {at("a", "node2", pf), nil, pool, true},
		"while no node is known":    {at("a", "", pf), nil, pool, false},
		"a name that is not of DRA": {at("a", "node1", pf), nil, "fast", true},
	} {
		ofNode := append([]v1alpha1.XPU{test.xpu}, test.others...)
		if got := isAnothers(ofNode, &test.xpu, test.pool); got != test.want {
			t.Errorf("%s: %t, want %t", name, got, test.want)
		}
	}
}
