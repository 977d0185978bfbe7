// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"testing"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// TestUnreachableIsReportedOnce checks that a cluster whose connections end is no news at each
// attempt, although each connection has another port at the broker.
func TestUnreachableIsReportedOnce(t *testing.T) {
	reports := 0
	m := NewMembers()
	m.log, m.metrics = logr.Discard(), newMetrics(prometheus.NewRegistry())
	m.onChange = func(string) { reports++ }
	known := &member{}
	m.byTenant["a"] = known

	for _, from := range []string{"10.0.0.9:40000", "10.0.0.9:40001"} {
		m.setState("a", known, memberState{
			reason: v1alpha1.ReasonUnreachable,
			message: "the cluster at https://192.0.2.1:6443 does not answer: read tcp " + from +
				"->192.0.2.1:6443: read: connection reset by peer",
		})
	}
	const want = "the cluster at https://192.0.2.1:6443 does not answer: read tcp 192.0.2.1:6443: " +
		"read: connection reset by peer"
	if got := m.state("a").message; reports != 1 || got != want {
		t.Errorf("reported %d times, at last %q", reports, got)
	}
}
