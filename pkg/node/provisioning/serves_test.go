// SPDX-License-Identifier: Apache-2.0

package provisioning

import (
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// TestServes checks that an existing Port can be used for a wanted one only if the xPU treats both
// the same, and both are for the same pod or the existing one is for any.
func TestServes(t *testing.T) {
	pod := func(namespace, name, uid string) *v1alpha1.PodRef {
		return &v1alpha1.PodRef{Namespace: namespace, Name: name, UID: types.UID(uid)}
	}
	for _, test := range []struct {
		name       string
		have, want *v1alpha1.PodRef
		is         bool
	}{
		{"any pod's", nil, pod("default", "p", "1"), true},
		{"neither's", nil, nil, true},
		{"a pod's, for any", pod("default", "p", "1"), nil, false},
		{"the same", pod("default", "p", "1"), pod("default", "p", "1"), true},
		{"a pod of the same name", pod("default", "p", "1"), pod("default", "p", "2"), false},
		{"an old runtime does not tell", pod("default", "p", "1"), pod("default", "p", ""), true},
		{"it had not told", pod("default", "p", ""), pod("default", "p", "1"), true},
		{"in another namespace", pod("default", "p", "1"), pod("other", "p", ""), false},
		{"of another name", pod("default", "p", "1"), pod("default", "q", ""), false},
	} {
		base := v1alpha1.XPUPortSpec{XPU: "card", Network: "lab", MAC: "02:00:00:00:00:01"}
		have, want := base, base
		have.Pod, want.Pod = test.have, test.want
		if got := serves(&v1alpha1.XPUPort{Spec: have}, &want); got != test.is {
			t.Errorf("%s: %t", test.name, got)
		}

		for field, change := range map[string]func(*v1alpha1.XPUPortSpec){
			"xpu":     func(s *v1alpha1.XPUPortSpec) { s.XPU = "other" },
			"network": func(s *v1alpha1.XPUPortSpec) { s.Network = "other" },
			"mac":     func(s *v1alpha1.XPUPortSpec) { s.MAC = "02:00:00:00:00:02" },
		} {
			other := have
			change(&other)
			if serves(&v1alpha1.XPUPort{Spec: other}, &want) {
				t.Errorf("%s: serves with another %s", test.name, field)
			}
		}
	}

	assigned := &v1alpha1.XPUPort{Spec: v1alpha1.XPUPortSpec{AssignAddresses: true}}
	assigned.Status.Addresses = []string{"10.1.0.2/24"}
	for name, test := range map[string]struct {
		want v1alpha1.XPUPortSpec
		is   bool
	}{
		"any addresses": {v1alpha1.XPUPortSpec{AssignAddresses: true}, true},
		"those that it got": {
			v1alpha1.XPUPortSpec{AssignAddresses: true, Addresses: []string{"10.1.0.2/24"}}, true,
		},
		"others": {
			v1alpha1.XPUPortSpec{AssignAddresses: true, Addresses: []string{"10.1.0.3/24"}}, false,
		},
		"none": {v1alpha1.XPUPortSpec{}, false},
	} {
		if got := serves(assigned, &test.want); got != test.is {
			t.Errorf("%s: %t", name, got)
		}
	}
}
