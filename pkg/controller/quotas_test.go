// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/addresses"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

// TestNamespaceQuota: a ResourceQuota limits the rates that claims of its namespace ask for. A claim
// that waits keeps its Function, also when another controller takes over.
func TestNamespaceQuota(t *testing.T) {
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	c.xpu("card", agent)
	c.network("blue", 100)
	c.pool("fast", "blue")
	quota := &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: "rates"},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{
			addresses.HardBandwidth:  resource.MustParse("1G"),
			addresses.HardGuaranteed: resource.MustParse("300M"),
			addresses.HardPorts:      resource.MustParse("5"),
		}},
	}
	c.create(quota)

	rated := func(n, guaranteed, maximum int) want {
		return want{name: fmt.Sprint("nic-", n), pool: "fast", function: vf(n), config: fmt.Sprintf(
			`{"vf": {"minTxRate": %d, "maxTxRate": %d}}`, guaranteed, maximum)}
	}
	first := c.claim(rated(0, 100, 600))
	if port := c.up(first, vf(0)); *port.Spec.Rate != (v1alpha1.PortRate{
		Guaranteed: 100, Maximum: 600}) {
		t.Errorf("rate %+v", port.Spec.Rate)
	}

	second := c.claim(rated(1, 0, 500))
	c.claimReason(second, v1alpha1.ConditionProvisioned, v1alpha1.ReasonQuotaExceeded,
		"ResourceQuota rates: xpu.opiproject.org/bandwidth is 1G, and pods of the namespace have "+
			"600 Mbit/s, and 500 are asked for")
	third := c.claim(want{name: "nic-2", pool: "fast", function: vf(2)})
	c.claimReason(third, v1alpha1.ConditionProvisioned, v1alpha1.ReasonQuotaExceeded,
		"the interface has no maximum rate; set vf.maxTxRate")
	c.claimReason(c.claim(rated(3, 301, 350)), v1alpha1.ConditionProvisioned,
		v1alpha1.ReasonQuotaExceeded, "100 Mbit/s are guaranteed already, and 301 are asked for")
	c.up(c.claim(rated(4, 0, 400)), vf(4))

	// The next controller counts the same.
	c.stop()
	c.start(nil)
	c.claimReason(c.claim(rated(5, 0, 1)), v1alpha1.ConditionProvisioned,
		v1alpha1.ReasonQuotaExceeded, "have 1000 Mbit/s, and 1 are asked for")
	c.delete(first)
	c.delete(c.port(first, vf(0)))
	c.up(second, vf(1))
}

// TestQuotaWakesClaims: a claim that exceeds a quota is tried again when there is room: because
// another claim of the namespace ends, or because the quota is raised or deleted. It does not wait
// for the next of the attempts that are made without an event.
func TestQuotaWakesClaims(t *testing.T) {
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	c.xpu("card", agent)
	c.network("blue", 100)
	c.pool("fast", "blue")
	quota := &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: "ports"},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{
			addresses.HardPorts: resource.MustParse("1"),
		}},
	}
	c.create(quota)

	first := c.claim(want{name: "nic-0", pool: "fast", function: vf(0)})
	c.up(first, vf(0))
	for i, makeRoom := range []func(){
		func() {
			c.delete(first)
			c.delete(c.port(first, vf(0)))
		},
		func() {
			c.change(quota, func() { quota.Spec.Hard[addresses.HardPorts] = resource.MustParse("2") })
		},
		func() { c.delete(quota) },
	} {
		n := i + 1
		waits := c.claim(want{name: fmt.Sprint("nic-", n), pool: "fast", function: vf(n)})
		c.claimReason(waits, v1alpha1.ConditionProvisioned, v1alpha1.ReasonQuotaExceeded,
			"ResourceQuota ports")

		start := time.Now()
		makeRoom()
		c.up(waits, vf(n))
		if took := time.Since(start); took > reconciling.LastRetry/2 {
			t.Errorf("claim %d has its Port %s after there is room", n, took)
		}
	}
}

// TestQuotaOfExtendedResources: the rates of Functions count that pods have as extended resources:
// that of a DeviceClass for a claim that the scheduler makes, and that of the network configuration,
// which an agent writes into the Port.
func TestQuotaOfExtendedResources(t *testing.T) {
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	c.xpu("card", agent)
	c.network("blue", 100)
	c.pool("fast", "blue")
	c.create(&corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: "rates"},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{
			addresses.HardBandwidth: resource.MustParse("1G"),
		}},
	})

	made := c.claim(want{name: "web-extended-resources-x", pool: "fast", function: vf(0),
		config: `{"vf": {"maxTxRate": 600}}`, ofClass: true})
	c.up(made, vf(0))

	port := c.podPort(vf(1), "blue")
	port.Spec.Pod.Namespace = c.namespace
	port.Spec.Rate = &v1alpha1.PortRate{Maximum: 401}
	c.create(port)
	c.portReason(port, v1alpha1.ReasonQuotaExceeded,
		"pods of the namespace have 600 Mbit/s, and 401 are asked for")

	port = c.podPort(vf(2), "blue")
	port.Spec.Pod.Namespace = c.namespace
	c.create(port)
	c.portReason(port, v1alpha1.ReasonQuotaExceeded, "the interface has no maximum rate")
}
