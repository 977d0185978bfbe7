// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"slices"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/grpc/codes"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

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

// TestRoutedDenied: an XPU whose agent refuses the gateways to this client has no route to a network
// without Ports there, and the network says it without being a failure.
func TestRoutedDenied(t *testing.T) {
	c, near, far, farNode := routers(t)
	far.FailNext("CreateVrf", 1_000_000, codes.PermissionDenied, "not for you")
	web := c.across("web", "shop", 10, "10.1.0.0/24")
	database := c.across("database", "shop", 20, "10.2.0.0/24")
	_, port := c.claimAt(c.node, "web", 0)
	c.portReason(port, v1alpha1.ReasonUp, "")
	c.networkReason(web, v1alpha1.ReasonUp, "1 of 1 XPUs that need it serve it")

	c.claimAt(farNode, "database", 1)
	c.networkReason(database, v1alpha1.ReasonFailed, "XPU far does not serve it")
	c.networkReason(web, v1alpha1.ReasonUp, "1 of 1 XPUs that need it serve it; 1 XPUs with "+
		"XPUPorts in other networks of VRF shop have no route to it, such as far")

	// The first Port of its own at the XPU makes it a failure, until the Port is gone.
	two, portTwo := c.claimAt(farNode, "web", 2)
	c.networkReason(web, v1alpha1.ReasonFailed, "XPU far does not serve it")
	c.delete(two)
	c.gone(portTwo)
	c.networkReason(web, v1alpha1.ReasonUp, "1 of 1 XPUs that need it serve it; 1 XPUs")
	c.hasGateways(near, []string{"shop"}, "web", "database")
}

// TestRoutedConflictAcross: XPUs without Ports in a network lose its gateway when the network comes
// into conflict with an older one, and get it again when the conflict ends.
func TestRoutedConflictAcross(t *testing.T) {
	c, near, far, farNode := routers(t)
	web := c.across("a-web", "shop", 10, "10.1.0.0/24")
	cache := c.across("b-cache", "shop", 20, "10.2.0.0/24")
	_, portOne := c.claimAt(c.node, web.Name, 0)
	_, portTwo := c.claimAt(farNode, cache.Name, 1)
	c.portReason(portOne, v1alpha1.ReasonUp, "")
	c.portReason(portTwo, v1alpha1.ReasonUp, "")
	c.hasGateways(near, []string{"shop"}, web.Name, cache.Name)
	c.hasGateways(far, []string{"shop"}, web.Name, cache.Name)

	subnet := func(subnets ...string) {
		c.eventually("other subnets", func() error {
			if err := c.get(web); err != nil {
				return err
			}
			web.Spec.Subnets = subnets
			return c.Update(t.Context(), web)
		})
	}
	subnet("10.0.0.0/14")
	c.networkReason(cache, v1alpha1.ReasonConflict, "overlaps")
	c.hasGateways(near, []string{"shop"}, web.Name)
	c.hasGateways(far, []string{"shop"}, cache.Name)

	subnet("10.1.0.0/24")
	c.networkReason(cache, v1alpha1.ReasonUp, "2 of 2")
	c.hasGateways(near, []string{"shop"}, web.Name, cache.Name)
	c.hasGateways(far, []string{"shop"}, web.Name, cache.Name)
}

// TestRoutedDeletedWhileAway: a network that is deleted while no controller runs goes from the XPUs
// that have Ports in other networks of its VRF.
func TestRoutedDeletedWhileAway(t *testing.T) {
	c, near := routing(t)
	web := c.across("web", "shop", 10, "10.1.0.0/24")
	cache := c.across("cache", "shop", 20, "10.2.0.0/24")
	_, port := c.claimAt(c.node, web.Name, 0)
	c.portReason(port, v1alpha1.ReasonUp, "")
	c.hasGateways(near, []string{"shop"}, web.Name, cache.Name)

	c.stop()
	c.delete(cache)
	c.start(func(o *Options) {
		impatient(o)
		o.OrphanGrace = time.Hour
	})
	c.gone(cache)
	c.hasGateways(near, []string{"shop"}, web.Name)
}

// TestRoutedQuiet: a new network of a VRF does not have the bridges of all others reconciled.
func TestRoutedQuiet(t *testing.T) {
	const others = 20
	c, near := routing(t)
	var names []string
	for i := range others {
		name := fmt.Sprintf("net-%03d", i)
		c.across(name, "shop", int32(100+i), fmt.Sprintf("10.%d.0.0/24", i))
		names = append(names, name)
	}
	_, port := c.claimAt(c.node, names[0], 0)
	c.portReason(port, v1alpha1.ReasonUp, "")
	c.hasGateways(near, []string{"shop"}, names...)

	before := reconciled(t, "bridge")
	c.across("more", "shop", 200, "10.200.0.0/24")
	c.hasGateways(near, []string{"shop"}, append(names, "more")...)
	if n := reconciled(t, "bridge") - before; n >= others {
		t.Errorf("%v bridges were reconciled for one new network", n)
	}
}

// reconciled returns how often all controllers of this name in the process have reconciled.
func reconciled(t *testing.T, name string) (n float64) {
	t.Helper()
	families, err := ctrlmetrics.Registry.Gather()
	must.Succeed(t, err)
	for _, family := range families {
		if family.GetName() != "controller_runtime_reconcile_total" {
			continue
		}
		for _, metric := range family.GetMetric() {
			if slices.ContainsFunc(metric.GetLabel(), func(l *dto.LabelPair) bool {
				return l.GetValue() == name
			}) {
				n += metric.GetCounter().GetValue()
			}
		}
	}
	return n
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
