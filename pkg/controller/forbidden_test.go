// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

// closedNetwork is a network for namespaces of team a.
func (c *cluster) closedNetwork(name string, vlan int32) *v1alpha1.XPUNetwork {
	c.Helper()
	n := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1alpha1.XPUNetworkSpec{
			VLAN: vlan, AllowedNamespaces: v1alpha1.AllowedNamespaces{
				From:     v1alpha1.NamespacesFromSelector,
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"team": "a"}},
			},
		}}

	c.create(n)
	return n
}

// label makes the test's namespace one of team a, or of none.
func (c *cluster) label(team string) {
	c.Helper()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.namespace}}
	c.change(namespace, func() { namespace.Labels["team"] = team })
}

// change changes an object as it is at the API server now.
func (c *cluster) change(o client.Object, change func()) {
	c.Helper()
	c.eventually("the object is changed", func() error {
		if err := c.get(o); err != nil {
			return err
		}
		change()
		return c.Update(context.Background(), o)
	})
}

// TestAllowedNamespaces: a claim joins a network once its namespace is allowed, by its labels or by
// the network's word. It stays when the namespace is not allowed any more.
func TestAllowedNamespaces(t *testing.T) {
	for name, allow := range map[string]func(c *cluster, n *v1alpha1.XPUNetwork){
		"labels": func(c *cluster, _ *v1alpha1.XPUNetwork) { c.label("a") },
		"network": func(c *cluster, n *v1alpha1.XPUNetwork) {
			c.change(n, func() {
				n.Spec.AllowedNamespaces = v1alpha1.AllowedNamespaces{
					From: v1alpha1.NamespacesFromAll,
				}
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, impatient)
			agent := opitest.Start(t)
			c.xpu("card", agent)
			network := c.closedNetwork("blue", 100)
			o := c.claim(want{
				name: "a", pool: "fast", function: vf(0), config: `{"network":"blue"}`, pod: "p",
			})
			c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonForbidden,
				"XPUNetwork blue does not let pods of namespace "+c.namespace+" join")
			c.told("Pod", "p", v1alpha1.ReasonForbidden)
			c.has(agent)
			allow(c, network)
			port := c.up(o, vf(0))
			c.label("b")
			c.stays(agent, port.Status.BridgePort)
		})
	}
}

// TestNobodyAllowed: from None closes a network.
func TestNobodyAllowed(t *testing.T) {
	c := newCluster(t, nil)
	c.xpu("card", opitest.Start(t))

	c.create(&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "blue"},
		Spec: v1alpha1.XPUNetworkSpec{
			VLAN: 100, AllowedNamespaces: v1alpha1.AllowedNamespaces{
				From: v1alpha1.NamespacesFromNone,
			},
		}})

	c.pool("fast", "blue") // the DevicePool's network is no way around it
	o := c.claim(want{name: "a", pool: "fast", function: vf(0)})
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonForbidden, "XPUNetwork blue")
}

// TestPodOfAnotherNamespace: an agent's Port joins a network if its pod's namespace may. The pod of
// Allocate is not known.
func TestPodOfAnotherNamespace(t *testing.T) {
	c, agent := withCard(t)
	c.closedNetwork("blue", 100)
	port := c.podPort(vf(0), "blue") // of a pod in namespace default
	c.create(port)
	c.portReason(port, v1alpha1.ReasonForbidden, "does not let pods of namespace default join")
	allocated := c.podPort(vf(1), "blue")
	allocated.Spec.Pod = nil
	c.create(allocated)
	c.portReason(allocated, v1alpha1.ReasonForbidden,
		"the kubelet does not say which pod it allocates for")
	c.label("a")
	allowed := c.podPort(vf(2), "blue")
	allowed.Spec.Pod.Namespace = c.namespace
	c.create(allowed)
	c.portReason(allowed, v1alpha1.ReasonUp, "")
	c.has(agent, allowed.Status.BridgePort)
}

// TestPrivilegedFields: what a claim may set for a Function is for the DevicePool to say. The class
// may set everything.
func TestPrivilegedFields(t *testing.T) {
	c := newCluster(t, nil)
	c.xpu("card", opitest.Start(t))
	c.network("blue", 100, "10.1.0.0/24")
	pool := c.pool("fast", "blue")
	c.change(pool, func() { pool.Spec.Allow = nil })
	const config = `{"mac":"02:00:00:00:00:01","addresses":["10.1.0.5/24"]}`
	o := c.claim(want{name: "a", pool: "fast", function: vf(0), config: config})
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonForbidden,
		"mac, addresses: Forbidden: DevicePool fast lets only a DeviceClass")
	b := c.claim(want{name: "b", pool: "fast", function: vf(1), config: config, ofClass: true})
	c.up(b, vf(1))
	c.deallocate(b)
	c.change(pool, func() {
		pool.Spec.Allow = []v1alpha1.PrivilegedField{v1alpha1.FieldMAC, v1alpha1.FieldAddresses}
	})
	c.up(o, vf(0))
}
