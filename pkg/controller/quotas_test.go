// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/addresses"
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
	c.stop()
	c.start(nil) // a controller looks at every claim when it starts
	c.up(second, vf(1))
}
