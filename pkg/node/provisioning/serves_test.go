// SPDX-License-Identifier: Apache-2.0

package provisioning

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
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

	rated := v1alpha1.XPUPortSpec{Rate: &v1alpha1.PortRate{Maximum: 500}}
	if !serves(&v1alpha1.XPUPort{}, &rated) {
		t.Error("a Port of an older agent, which says no rate, is replaced")
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

// TestAheadServes checks that a Port made ahead is kept only for the pool, XPU and network of its
// making.
func TestAheadServes(t *testing.T) {
	a := &Ahead{Namespace: "xpu-system"}
	p := pool.Pool{Name: "fast", Spec: v1alpha1.DevicePoolSpec{Network: "lab"}}
	for name, test := range map[string]struct {
		change func(*v1alpha1.XPUPort)
		want   bool
	}{
		"the pool's own": {func(*v1alpha1.XPUPort) {}, true},
		"a pod's":        {func(port *v1alpha1.XPUPort) { port.Spec.Ahead = false }, false},
		"of another namespace": {
			func(port *v1alpha1.XPUPort) { port.Namespace = "default" }, false,
		},
		"being deleted": {
			func(port *v1alpha1.XPUPort) { port.DeletionTimestamp = new(metav1.Now()) }, false,
		},
		"of another XPU":     {func(port *v1alpha1.XPUPort) { port.Spec.XPU = "other" }, false},
		"of another network": {func(port *v1alpha1.XPUPort) { port.Spec.Network = "other" }, false},
		"of another pool": {
			func(port *v1alpha1.XPUPort) { port.Labels[v1alpha1.LabelPool] = "slow" }, false,
		},
		"of no pool": {func(port *v1alpha1.XPUPort) { port.Labels = nil }, false},
	} {
		port := &v1alpha1.XPUPort{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "xpu-system", Labels: map[string]string{v1alpha1.LabelPool: "fast"},
			},
			Spec: v1alpha1.XPUPortSpec{XPU: "card", Network: "lab", Ahead: true},
		}
		test.change(port)
		if got := a.serves(port, "card", p); got != test.want {
			t.Errorf("a Port %s serves: %t, want %t", name, got, test.want)
		}
	}
}

// TestWhy checks what is said about a Port that is not ready.
func TestWhy(t *testing.T) {
	condition := func(kind string, status metav1.ConditionStatus) []metav1.Condition {
		return []metav1.Condition{{
			Type: kind, Status: status, Reason: "Refused", Message: "the card is full",
		}}
	}
	for name, test := range map[string]struct {
		conditions []metav1.Condition
		want       string
	}{
		"nothing is known":  {nil, ""},
		"another condition": {condition("Other", metav1.ConditionFalse), ""},
		"ready":             {condition(v1alpha1.ConditionReady, metav1.ConditionTrue), ""},
		"not ready": {
			condition(v1alpha1.ConditionReady, metav1.ConditionFalse),
			": Refused: the card is full",
		},
		"may be ready": {
			condition(v1alpha1.ConditionReady, metav1.ConditionUnknown),
			": Refused: the card is full",
		},
	} {
		port := &v1alpha1.XPUPort{}
		port.Status.Conditions = test.conditions
		if got := why(port); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}
