// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// TestSumUpFallbacks checks that the pool has a condition for what its cluster lacks.
func TestSumUpFallbacks(t *testing.T) {
	lacks := func(feature, message string) v1alpha1.XPUNodePool {
		return v1alpha1.XPUNodePool{
			Functions: 4, Healthy: 4,
			Fallbacks: []v1alpha1.Fallback{{Feature: feature, Message: message}},
		}
	}

	pool := &v1alpha1.DevicePool{
		Spec: v1alpha1.DevicePoolSpec{Publish: v1alpha1.PublishDRA, Model: v1alpha1.ModelPorts},
	}

	entries := []poolEntry{
		{"n1", false, lacks(v1alpha1.FeatureSharedCapacity, "model Ports offers nothing")},
		{"n2", false, lacks(v1alpha1.FeatureSharedCapacity, "model Ports offers nothing")},
	}

	sumUp(pool, entries, true)
	sumUpFallbacks(pool, entries)

	has := func(conditionType, reason, text string, status metav1.ConditionStatus) {
		t.Helper()
		c := meta.FindStatusCondition(pool.Status.Conditions, conditionType)
		if c == nil || c.Reason != reason || c.Status != status ||
			!strings.Contains(c.Message, text) {
			t.Errorf("condition %s is %+v, want %s, %s: ...%s...", conditionType, c, status, reason,
				text)
		}
	}

	has(v1alpha1.ConditionSupported, v1alpha1.ReasonFeatureMissing,
		"node n1: model Ports offers nothing; turn on feature gate DRAConsumableCapacity",
		metav1.ConditionFalse)
	has(v1alpha1.ConditionReady, v1alpha1.ReasonFeatureMissing, "see condition Supported",
		metav1.ConditionFalse)

	entries = []poolEntry{{"n1", false, v1alpha1.XPUNodePool{Functions: 4, Healthy: 4}}}
	sumUp(pool, entries, true)
	sumUpFallbacks(pool, entries)
	has(v1alpha1.ConditionSupported, v1alpha1.ReasonSupported, "", metav1.ConditionTrue)

	// Without lists a pool offers all it has.
	pool.Spec.DataDirect = true
	entries = []poolEntry{{"n1", false, lacks(v1alpha1.FeatureLists, "pcieRoot has one")}}
	sumUp(pool, entries, true)
	sumUpFallbacks(pool, entries)
	has(v1alpha1.ConditionSupported, v1alpha1.ReasonFeatureMissing,
		"turn on feature gate DRAListTypeAttributes in kube-apiserver and kube-scheduler, which is "+
			"off by default", metav1.ConditionFalse)
	has(v1alpha1.ConditionReady, v1alpha1.ReasonPublished, "", metav1.ConditionTrue)

	// The feature gate is on, so the message says all there is to do.
	entries[0].Fallbacks[0] = v1alpha1.Fallback{
		Feature: v1alpha1.FeatureLists, Message: "pcieRoot has one: upgrade it", GateOn: true,
	}
	sumUpFallbacks(pool, entries)
	has(v1alpha1.ConditionSupported, v1alpha1.ReasonFeatureMissing, "upgrade it",
		metav1.ConditionFalse)
	if c := meta.FindStatusCondition(pool.Status.Conditions,
		v1alpha1.ConditionSupported); strings.Contains(c.Message, "turn on") {
		t.Errorf("message of a gate that is on: %s", c.Message)
	}

	pool.Spec.Model, entries = v1alpha1.ModelFunctions, []poolEntry{
		{"n1", false, v1alpha1.XPUNodePool{Functions: 4, Healthy: 4}},
	}
	sumUpFallbacks(pool, entries)
	has(v1alpha1.ConditionSupported, v1alpha1.ReasonSupported, "", metav1.ConditionTrue)

	pool.Spec.DataDirect, pool.Spec.ListNUMANodes = false, true
	sumUpFallbacks(pool, entries)
	has(v1alpha1.ConditionSupported, v1alpha1.ReasonSupported, "", metav1.ConditionTrue)

	// The effects of taints need them.
	for _, set := range []func(*v1alpha1.DevicePoolSpec){
		func(s *v1alpha1.DevicePoolSpec) { s.EvictLostAfter = &metav1.Duration{Duration: time.Minute} },
		func(s *v1alpha1.DevicePoolSpec) { s.LinkDown = v1alpha1.LinkDownNone },
	} {
		pool.Spec = v1alpha1.DevicePoolSpec{Publish: v1alpha1.PublishDRA}
		set(&pool.Spec)
		sumUpFallbacks(pool, []poolEntry{{"n1", false, lacks(v1alpha1.FeatureTaints, "no taint")}})
		has(v1alpha1.ConditionSupported, v1alpha1.ReasonFeatureMissing, "no taint",
			metav1.ConditionFalse)
	}

	pool.Spec = v1alpha1.DevicePoolSpec{Publish: v1alpha1.PublishDRA}
	sumUpFallbacks(pool, entries)
	if c := meta.FindStatusCondition(pool.Status.Conditions,
		v1alpha1.ConditionSupported); c != nil {
		t.Errorf("a pool that needs nothing has %+v", c)
	}
}
