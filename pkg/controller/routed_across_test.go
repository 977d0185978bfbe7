// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/networks"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// across creates a network of a VRF that has a VNI, which is its VLAN id, and its pool.
func (c *cluster) across(name, vrf string, vlan int32, subnet string) *v1alpha1.XPUNetwork {
	c.Helper()
	n := &v1alpha1.XPUNetwork{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1alpha1.XPUNetworkSpec{
			VLAN: vlan, VNI: ptr.To(vlan), Subnets: []string{subnet},
			Routed:            &v1alpha1.RoutedNetwork{VRF: vrf},
			AllowedNamespaces: v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromAll},
		},
	}
	c.create(n)
	c.pool(name, name)
	return n
}

// routers starts a cluster with two XPUs of two nodes, whose agents are like opi-bridge.
func routers(t *testing.T) (c *cluster, near, far *opitest.Agent, farNode string) {
	t.Helper()
	c, near = routing(t)
	far = opitest.Start(t)
	far.Set(func(b *opitest.Behaviour) { b.Options = true })
	farNode = "far-" + c.node
	c.xpuOn(farNode, "far", far.Config().Endpoint)
	return c, near, far, farNode
}

// claimAt creates a claim for a Function of a node in a network, and returns its Port too.
func (c *cluster) claimAt(
	node, network string, function int,
) (*resourceapi.ResourceClaim, *v1alpha1.XPUPort) {
	c.Helper()
	o := c.claim(want{
		name: fmt.Sprintf("%s-%d", network, function), node: node, pool: network,
		function: vf(function),
	})
	return o, &v1alpha1.XPUPort{ObjectMeta: metav1.ObjectMeta{
		Namespace: o.Namespace, Name: claim.PortName(node, vf(function)),
	}}
}

// TestRoutedBetweenXPUs: an XPU with a Port in a network of a VRF has all networks of the VRF that
// have a VNI, so that it routes to the Ports of other XPUs.
func TestRoutedBetweenXPUs(t *testing.T) {
	c, near, far, farNode := routers(t)
	web := c.across("web", "shop", 10, "10.1.0.0/24")
	c.across("database", "shop", 20, "10.2.0.0/24")
	c.routed("local", "shop", 30, "10.3.0.0/24")
	c.across("other", "bank", 40, "10.1.0.0/24")

	one, portOne := c.claimAt(c.node, "web", 0)
	c.portReason(portOne, v1alpha1.ReasonUp, "")
	c.hasGateways(near, []string{"shop"}, "web", "database")
	c.hasGateways(far, nil)

	two, portTwo := c.claimAt(farNode, "database", 1)
	c.portReason(portTwo, v1alpha1.ReasonUp, "")
	c.hasGateways(far, []string{"shop"}, "web", "database")
	c.networkReason(web, v1alpha1.ReasonUp, "2 of 2 XPUs that need it serve it")

	// A network that ends at each XPU is only where its Ports are.
	three, portThree := c.claimAt(farNode, "local", 2)
	c.portReason(portThree, v1alpha1.ReasonUp, "")
	c.hasGateways(far, []string{"shop"}, "web", "database", "local")
	c.hasGateways(near, []string{"shop"}, "web", "database")

	// The agent has them again after whatever happens.
	far.Kill()
	must.Succeed(t, far.Run())
	c.hasGateways(far, []string{"shop"}, "web", "database", "local")
	cache := c.across("cache", "shop", 50, "10.5.0.0/24")
	c.hasGateways(near, []string{"shop"}, "web", "database", "cache")
	c.hasGateways(far, []string{"shop"}, "web", "database", "local", "cache")

	// They go with the last Port of the VRF at the XPU, and with their XPUNetwork.
	c.delete(one)
	c.gone(portOne)
	c.hasGateways(near, nil)
	c.delete(cache)
	c.gone(cache)
	c.hasGateways(far, []string{"shop"}, "web", "database", "local")
	c.delete(two)
	c.gone(portTwo)
	c.hasGateways(far, []string{"shop"}, "local")
	c.delete(three)
	c.gone(portThree)
	c.hasGateways(far, nil)
	c.networkReason(web, v1alpha1.ReasonUp, "no XPUPort needs it")
}

// TestRoutedWithoutGateways: an XPU whose agent makes no gateways has no route to other networks,
// which is no failure of these.
func TestRoutedWithoutGateways(t *testing.T) {
	c, near, far, farNode := routers(t)
	far.Set(func(b *opitest.Behaviour) { b.Unimplemented = opitest.GatewayRPCs() })
	web := c.across("web", "shop", 10, "10.1.0.0/24")
	database := c.across("database", "shop", 20, "10.2.0.0/24")
	_, port := c.claimAt(c.node, "web", 0)
	c.portReason(port, v1alpha1.ReasonUp, "")
	c.claimAt(farNode, "database", 1)
	c.networkReason(database, v1alpha1.ReasonFailed, "XPU far does not serve it")
	c.networkReason(web, v1alpha1.ReasonUp, "1 of 1 XPUs that need it serve it")
	c.hasGateways(near, []string{"shop"}, "web", "database")
}

// TestMostRouted: an XPU routes to the oldest networks of a VRF only, and a younger one to none.
func TestMostRouted(t *testing.T) {
	c, near := routing(t)
	for i := range networks.MostRouted + 1 {
		c.across(fmt.Sprintf("net-%03d", i), "shop", int32(100+i), fmt.Sprintf("10.%d.0.0/24", i))
	}

	young := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{
		Name: fmt.Sprintf("net-%03d", networks.MostRouted),
	}}
	_, port := c.claimAt(c.node, young.Name, 0)
	c.portReason(port, v1alpha1.ReasonUp, "")
	c.hasGateways(near, []string{"shop"}, young.Name)
	c.networkReason(young, v1alpha1.ReasonUp, "VRF shop has more than 64 networks with a vni")

	_, port = c.claimAt(c.node, "net-000", 1)
	c.portReason(port, v1alpha1.ReasonUp, "")
	c.eventually("the agent has the networks", func() error {
		if n := len(near.Gateways()); n != networks.MostRouted+1 {
			return fmt.Errorf("it has %d gateways", n)
		}
		return nil
	})
}
