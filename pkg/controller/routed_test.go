// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// routed creates a network of a VRF, and its pool.
func (c *cluster) routed(name, vrf string, vlan int32, subnets ...string) *v1alpha1.XPUNetwork {
	c.Helper()
	n := &v1alpha1.XPUNetwork{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1alpha1.XPUNetworkSpec{
			VLAN: vlan, Subnets: subnets, Routed: &v1alpha1.RoutedNetwork{VRF: vrf},
			AllowedNamespaces: v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromAll},
		},
	}
	c.create(n)
	c.pool(name, name)
	return n
}

// routing starts a cluster with an XPU whose agent is like opi-bridge.
func routing(t *testing.T) (*cluster, *opitest.Agent) {
	t.Helper()
	agent := opitest.Start(t)
	agent.Set(func(b *opitest.Behaviour) { b.Options = true })
	c := newCluster(t, impatient)
	c.xpu("card", agent)
	return c, agent
}

// hasGateways waits until the agent has exactly the gateways of these networks, and the VRFs.
func (c *cluster) hasGateways(agent *opitest.Agent, vrfs []string, networks ...string) {
	c.Helper()
	var wantGateways, wantVRFs []string
	for _, name := range networks {
		wantGateways = append(wantGateways,
			opi.GatewayID(opitest.Installation.NetworkID(name)))
	}
	for _, name := range vrfs {
		wantVRFs = append(wantVRFs, opitest.Installation.VRFID(name))
	}
	slices.Sort(wantGateways)
	slices.Sort(wantVRFs)

	c.eventually("the agent's gateways", func() error {
		gateways, has := agent.Gateways(), agent.VRFs()
		if !slices.Equal(gateways, wantGateways) || !slices.Equal(has, wantVRFs) {
			return fmt.Errorf("it has gateways %q and VRFs %q, want %q and %q", gateways, has,
				wantGateways, wantVRFs)
		}
		return nil
	})
}

// TestRouted takes two networks of one VRF through their lives.
func TestRouted(t *testing.T) {
	c, agent := routing(t)
	blue := c.routed("blue", "tenants", 10, "10.1.0.0/24", "fd00:1::/64")
	red := c.routed("red", "tenants", 20, "10.2.0.0/24")
	one := c.claim(want{name: "one", pool: "blue", function: vf(0)})
	two := c.claim(want{name: "two", pool: "red", function: vf(1)})
	portOne, portTwo := c.up(one, vf(0)), c.up(two, vf(1))
	c.hasGateways(agent, []string{"tenants"}, "blue", "red")
	c.networkReason(blue, v1alpha1.ReasonUp, "")

	id := opi.GatewayID(opitest.Installation.NetworkID("blue"))
	spec := agent.GatewaySpec(id)
	if len(spec.GetGwIpPrefix()) != 2 || spec.GetGwIpPrefix()[0].GetLen() != 24 ||
		spec.GetGwIpPrefix()[0].GetAddr().GetV4Addr() != 10<<24|1<<16|1 ||
		string(spec.GetMacAddress()) != string(opitest.Installation.GatewayMAC()) {
		t.Errorf("the gateway of blue is %v", spec)
	}

	// Whatever happens to the gateway at the agent, it comes back.
	agent.LoseGateway(id)
	c.hasGateways(agent, []string{"tenants"}, "blue", "red")
	agent.ChangeGateway(id, func(spec *evpn.SviSpec) { spec.GwIpPrefix = spec.GwIpPrefix[:1] })
	c.eventually("the gateway is as wanted again", func() error {
		if n := len(agent.GatewaySpec(id).GetGwIpPrefix()); n != 2 {
			return fmt.Errorf("it has %d addresses", n)
		}
		return nil
	})
	agent.Kill()
	must.Succeed(t, agent.Run())
	c.hasGateways(agent, []string{"tenants"}, "blue", "red")
	c.has(agent, portOne.Status.BridgePort, portTwo.Status.BridgePort)

	// The addresses change with the spec.
	c.eventually("red gets another gateway", func() error {
		if err := c.get(red); err != nil {
			return err
		}
		red.Spec.Gateways = []string{"10.2.0.254"}
		return c.Update(t.Context(), red)
	})
	c.eventually("the agent has it", func() error {
		spec := agent.GatewaySpec(opi.GatewayID(opitest.Installation.NetworkID("red")))
		if got := spec.GetGwIpPrefix(); len(got) != 1 ||
			got[0].GetAddr().GetV4Addr() != 10<<24|2<<16|254 {
			return fmt.Errorf("the gateway is %v", spec)
		}
		return nil
	})

	// A gateway goes with the last port of its network at the XPU, a VRF with its last gateway.
	c.delete(one)
	c.delete(portOne)
	c.gone(portOne)
	c.hasGateways(agent, []string{"tenants"}, "red")
	c.delete(blue)
	c.gone(blue)

	// A network that is being deleted keeps its gateway as long as it has ports.
	c.delete(red)
	c.networkReason(red, v1alpha1.ReasonInUse, "")
	c.hasGateways(agent, []string{"tenants"}, "red")
	c.delete(two)
	c.delete(portTwo)
	c.gone(portTwo)
	c.gone(red)
	c.hasGateways(agent, nil)
}

// TestRoutedRefused: networks and ports say why an agent does not make a gateway.
func TestRoutedRefused(t *testing.T) {
	for name, test := range map[string]struct {
		behave func(*opitest.Behaviour)
		says   string
	}{
		"the agent has no gateways": {
			func(b *opitest.Behaviour) { b.Unimplemented = opitest.GatewayRPCs() },
			"method GetVrf not implemented",
		},
		"the gateway is down": {
			func(b *opitest.Behaviour) {
				b.RealiseGateway = func(string) error { return errors.New("no CONFIG_NET_VRF") }
			}, "no CONFIG_NET_VRF",
		},
		"the agent leaves out the addresses": {
			func(b *opitest.Behaviour) { b.Untold = true }, "does not tell its addresses",
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, agent := routing(t)
			agent.Set(test.behave)
			blue := c.routed("blue", "tenants", 10, "10.1.0.0/24")
			o := c.claim(want{name: "one", pool: "blue", function: vf(0)})
			c.networkReason(blue, v1alpha1.ReasonFailed, test.says)
			c.eventually("the port says it", func() error {
				port := c.port(o, vf(0))
				if err := c.get(port); err != nil {
					return err
				}
				ready := v1alpha1.ReadyOf(port.Status.Conditions)
				if !strings.Contains(ready.Message, test.says) {
					return fmt.Errorf("%s: %s", ready.Reason, ready.Message)
				}
				return nil
			})
			if ports := agent.Ports(); len(ports) > 0 {
				t.Errorf("ports %q in a network without its gateway", ports)
			}
		})
	}
}

// TestRoutedByDialect: an XPU whose agents never make gateways is not asked for one.
func TestRoutedByDialect(t *testing.T) {
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	c.routed("blue", "tenants", 10, "10.1.0.0/24")
	xpu := &v1alpha1.XPU{
		ObjectMeta: metav1.ObjectMeta{Name: "card"},
		Spec: v1alpha1.XPUSpec{
			NodeName: c.node, Endpoint: agent.Config().Endpoint, Insecure: true,
			Dialect: v1alpha1.DialectIntelE2000,
		},
	}
	c.create(xpu)
	node := c.vfReport()
	defer c.delete(node)

	o := c.claim(want{name: "one", pool: "blue", function: vf(1)})
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonNoGateways,
		"OPI agents of dialect intel-e2000, which XPU card has, make no gateways")
	if n := agent.Calls("GetVrf") + agent.Calls("CreateLogicalBridge"); n > 0 {
		t.Errorf("the agent was asked %d times", n)
	}
}

// TestRoutedConflicts: subnets of a VRF do not overlap, and no pod has what is the gateway's.
func TestRoutedConflicts(t *testing.T) {
	c, agent := routing(t)
	older := c.routed("a-older", "tenants", 10, "10.1.0.0/16")
	younger := c.routed("b-younger", "tenants", 20, "10.1.2.0/24")
	other := c.routed("c-other", "another", 30, "10.1.0.0/16")
	c.networkReason(younger, v1alpha1.ReasonConflict,
		"10.1.2.0/24 overlaps with 10.1.0.0/16 of XPUNetwork a-older")

	one := c.claim(want{name: "one", pool: older.Name, function: vf(0)})
	two := c.claim(want{name: "two", pool: younger.Name, function: vf(1)})
	three := c.claim(want{name: "three", pool: other.Name, function: vf(2)})
	c.up(one, vf(0))
	c.up(three, vf(2))
	c.claimReason(two, v1alpha1.ConditionProvisioned, v1alpha1.ReasonNetworkNotReady, "overlaps")
	c.hasGateways(agent, []string{"another", "tenants"}, older.Name, other.Name)

	mac := opitest.Installation.GatewayMAC().String()
	four := c.claim(want{name: "four", pool: older.Name, function: vf(3),
		config: fmt.Sprintf(`{"mac": %q}`, mac)})
	c.claimReason(four, v1alpha1.ConditionProvisioned, v1alpha1.ReasonConflict, "is the gateway's")
	five := c.claim(want{name: "five", pool: older.Name, function: vf(4),
		config: `{"addresses": ["10.1.0.1/16"]}`})
	c.claimReason(five, v1alpha1.ConditionProvisioned, v1alpha1.ReasonInvalidConfig, "is a gateway's")

	c.eventually("the older network gives the subnet back", func() error {
		if err := c.get(older); err != nil {
			return err
		}
		older.Spec.Subnets = []string{"10.1.0.0/24"}
		return c.Update(t.Context(), older)
	})
	c.networkReason(younger, v1alpha1.ReasonUp, "")
}

// TestRoutedOrphans: VRFs and gateways of the installation that no network needs are deleted, and
// others stay.
func TestRoutedOrphans(t *testing.T) {
	c, agent := routing(t)
	ours, theirs := someone(t, agent, opitest.Installation), someone(t, agent, "other")
	left := func(installation opi.Installation, vlan int32) opi.Network {
		n := installation.Network("left", vlan, nil)
		n.Gateway = &opi.Gateway{
			VRF: installation.VRFID("left"), MAC: installation.GatewayMAC(),
			Prefixes: []netip.Prefix{netip.MustParsePrefix("10.9.0.1/24")},
		}
		return n
	}
	must.Succeed(t, ours.EnsureNetwork(t.Context(), left(opitest.Installation, 7)))
	must.Succeed(t, theirs.EnsureNetwork(t.Context(), left("other", 8)))

	c.eventually("the orphans are gone", func() error {
		if len(agent.Gateways()) != 1 || len(agent.VRFs()) != 1 || len(agent.Networks()) != 1 {
			return fmt.Errorf("gateways %q, VRFs %q, networks %q", agent.Gateways(),
				agent.VRFs(), agent.Networks())
		}
		return nil
	})
	if !opi.Installation("other").Owns(agent.VRFs()[0]) {
		t.Errorf("VRFs %q are left", agent.VRFs())
	}
}

// TestOrphansWithoutGateways: an agent that does not list VRFs and gateways for this client is
// compared all the same. It loses a network that nobody needs.
func TestOrphansWithoutGateways(t *testing.T) {
	c, agent := routing(t)
	agent.FailNext("ListVrfs", 1_000_000, codes.PermissionDenied, "no rule")
	left := opi.Network{ID: "net-left", VLAN: 7}
	must.Succeed(t, someone(t, agent, opitest.Installation).EnsureNetwork(t.Context(), left))

	c.eventually("the network is gone", func() error {
		if networks := agent.Networks(); len(networks) > 0 {
			return fmt.Errorf("networks %q", networks)
		}
		return nil
	})
	c.told("XPU", "card", "OrphanDeleted")
}
