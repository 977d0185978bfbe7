// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// TestNextAway: the time is said each minute, and later each quarter of the time. A longer time of
// an earlier controller stays until it is exceeded.
func TestNextAway(t *testing.T) {
	const second, minute = time.Second, time.Minute
	for _, test := range []struct{ written, away, say, again time.Duration }{
		{0, 0, 0, minute},
		{0, 59 * second, 0, second},
		{0, minute, minute, minute},
		{minute, 90 * second, minute, 30 * second},
		{4 * minute, 5 * minute, 5 * minute, 75 * second},
		{40 * minute, 45 * minute, 40 * minute, 5 * minute},
		{40 * minute, 50 * minute, 50 * minute, 12*minute + 30*second},
		{40 * minute, 0, 40 * minute, 50 * minute},
	} {
		say, again := nextAway(test.written, test.away, minute)
		if say != test.say || again != test.again {
			t.Errorf("written %s, away %s: says %s, again in %s; want %s, %s", test.written, test.away, say,
				again, test.say, test.again)
		}
	}

	writes, written := 0, time.Duration(0)
	for written < 24*time.Hour {
		_, again := nextAway(written, written, minute)
		written, _ = nextAway(written, written+again, minute)
		writes++
	}
	if writes > 40 {
		t.Errorf("%d writes in a day", writes)
	}
}

// TestToldOf: what a tenant cluster knows of an OPI agent.
func TestToldOf(t *testing.T) {
	for name, test := range map[string]struct {
		reason     string
		seconds    int32
		brokerAway string
		answers    bool
		away       time.Duration
		known      bool
	}{
		"answers":                              {v1alpha1.ReasonConnected, 0, "", true, 0, true},
		"away":                                 {v1alpha1.ReasonXPUUnavailable, 60, "", false, time.Minute, true},
		"away since when":                      {v1alpha1.ReasonXPUUnavailable, 0, "", false, 0, false},
		"given up":                             {v1alpha1.ReasonAbandoned, 60, "", false, time.Minute, true},
		"nothing is said":                      {"", 0, "", false, 0, false},
		"it was away before the broker was":    {v1alpha1.ReasonXPUUnavailable, 60, "no broker", false, 0, false},
		"it answered before the broker went":   {v1alpha1.ReasonConnected, 0, "no broker", false, 0, false},
		"the broker has not said anything yet": {v1alpha1.ReasonBrokerAway, 60, "", false, 0, false},
	} {
		r := &taintRules{TaintOptions: TaintOptions{
			BrokerAway: func() string { return test.brokerAway },
		}}
		xpu := &v1alpha1.XPU{Status: v1alpha1.XPUStatus{AwaySeconds: test.seconds}}
		if test.reason != "" {
			xpu.Status.Conditions = []metav1.Condition{
				reconciling.NewCondition(v1alpha1.ConditionReady, 1, test.reason, ""),
			}
		}
		answers, away, known := r.reportedBy(xpu)
		if answers != test.answers || away != test.away || known != test.known {
			t.Errorf("%s: answers %t, away %s, known %t", name, answers, away, known)
		}
	}
}
