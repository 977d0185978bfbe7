// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

// impatient has everything that is done after a while done soon.
func impatient(o *Options) {
	o.OrphanGrace, o.BridgeGrace = 300*time.Millisecond, 50*time.Millisecond
	o.ResyncPeriod, o.CheckInterval = 200*time.Millisecond, 50*time.Millisecond
	o.AgentTimeout = 2 * time.Second
}

// someone is a client of the agent of another installation, or of this one behind the controller's
// back.
func someone(t *testing.T, agent *opitest.Agent, installation opi.Installation) *opi.Client {
	t.Helper()
	config := agent.Config()
	config.Installation = installation
	c, err := opi.Dial(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })

	return c
}

func portIn(network, id string, last byte) opi.Port {
	return opi.Port{ID: id, MAC: net.HardwareAddr{2, 0, 0, 0, 0, last}, Networks: []string{network}}
}

// stays fails if the agent loses one of the ports while it is compared often enough for an orphan
// to go.
func (c *cluster) stays(agent *opitest.Agent, ids ...string) {
	c.Helper()
	before := agent.Calls("ListBridgePorts")
	c.eventually("the agent is compared again", func() error {
		if n := agent.Calls("ListBridgePorts") - before; n < 8 {
			return fmt.Errorf("%d times", n)
		}
		return nil
	})

	for _, id := range ids {
		if !slices.Contains(agent.Ports(), id) {
			c.Fatalf("port %s is gone; the agent has %q", id, agent.Ports())
		}
	}
}

// TestOrphans: what is the installation's and nobody's goes, and what is another's stays and is
// told of.
func TestOrphans(t *testing.T) {
	c := newCluster(t, impatient)
	agent := opitest.Start(t)
	ours, theirs := someone(t, agent, opitest.Installation), someone(t, agent, "other")
	left, foreign := opi.Network{ID: "net-left", VLAN: 7}, opi.Network{ID: "other-red", VLAN: 8}
	vrf := opi.Installation("other").VRFID("tenants")
	foreign.Gateway = &opi.Gateway{
		VRF: vrf, MAC: opi.Installation("other").GatewayMAC(),
		Prefixes: []netip.Prefix{netip.MustParsePrefix("10.8.0.1/24")},
	}
	err := errors.Join(ours.EnsureNetwork(t.Context(), left),
		theirs.EnsureNetwork(t.Context(), foreign),
		ours.EnsurePort(t.Context(), portIn(left.ID, "vf-0000-3b-02-6", 6)),
		ours.EnsurePort(t.Context(), portIn(left.ID, "sf-3b-00-0-5", 5)),
		theirs.EnsurePort(t.Context(), portIn(foreign.ID, "vf-0000-3b-02-7", 7)),
		theirs.EnsurePort(t.Context(), portIn(foreign.ID, "uplink", 8)))

	if err != nil {
		t.Fatal(err)
	}

	c.network("blue", 100)
	xpu := c.xpu("card", agent)
	c.up(c.blue("a", 0), vf(0))
	c.has(agent, "uplink", "vf-0000-3b-02-0", "vf-0000-3b-02-7")

	c.eventually("only networks that are needed or others'", func() error {
		want := []string{opitest.Installation.NetworkID("blue"), foreign.ID}
		if got := agent.Networks(); len(got) != 2 || !slices.Contains(got, want[0]) ||
			!slices.Contains(got, want[1]) {
			return fmt.Errorf("the agent has %q, want %q", got, want)
		}
		return nil
	})

	c.told("XPU", "card", "OrphanDeleted")
	c.eventually("what is others' is told", func() error {
		if err := c.get(xpu); err != nil {
			return err
		}

		want := &v1alpha1.XPUForeign{
			Ports: 2, Networks: 1, Gateways: 1, VRFs: 1, Examples: []string{
				"network other-red (VLAN 8)", "gateway other-red-gw", "VRF " + vrf, "port uplink",
				"port vf-0000-3b-02-7",
			},
		}

		if diff := gocmp.Diff(want, xpu.Status.Foreign); diff != "" {
			return errors.New("status.foreign -want +got: " + diff)
		}

		return nil
	})

	c.stays(agent, "uplink", "vf-0000-3b-02-0", "vf-0000-3b-02-7")
	if got := agent.Gateways(); !slices.Equal(got, []string{"other-red-gw"}) {
		t.Errorf("the agent has gateways %q, want that of others", got)
	}
}

// TestForeignPort: a port of another installation is in the way. It is neither replaced nor
// deleted, and the XPUPort says so.
func TestForeignPort(t *testing.T) {
	c := newCluster(t, impatient)
	agent := opitest.Start(t)
	theirs := someone(t, agent, "other")
	red := opi.Network{ID: "other-red", VLAN: 8}
	foreign := portIn(red.ID, "vf-0000-3b-02-0", 7)
	if err := errors.Join(theirs.EnsureNetwork(t.Context(), red),
		theirs.EnsurePort(t.Context(), foreign)); err != nil {
		t.Fatal(err)
	}

	c.network("blue", 100)
	c.xpu("card", agent)
	o := c.blue("a", 0)
	port := c.port(o, vf(0))
	c.portReason(port, v1alpha1.ReasonConflict, "other-red")
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonConflict, "other-red")
	c.delete(o)
	c.gone(port)
	c.stays(agent, foreign.ID)
	if got, err := theirs.GetPort(t.Context(), foreign.ID); err != nil || !got.Equal(foreign) ||
		got.State != opi.StateUp {
		t.Errorf("their port is %+v, %v", got, err)
	}

	// Nor is their VLAN taken.
	c.network("late", 8)
	late := c.claim(want{name: "late", pool: "fast", function: vf(1), config: `{"network":"late"}`})
	c.portReason(c.port(late, vf(1)), v1alpha1.ReasonConflict, "VLAN 8")
}

// TestUnknownPort: an agent that was restarted has the port, and does not tell whose it is. The
// Function is kept from the next pod until somebody has seen to that.
func TestUnknownPort(t *testing.T) {
	c := newCluster(t, impatient)
	agent := opitest.Start(t)
	agent.Set(func(b *opitest.Behaviour) { b.V02 = true })
	c.xpu("card", agent)
	c.network("blue", 100)
	o := c.blue("a", 0)
	port := c.up(o, vf(0))
	agent.Kill()
	if err := agent.Run(); err != nil {
		t.Fatal(err)
	}

	c.portReason(port, v1alpha1.ReasonUnknown, "does not tell")
	c.delete(o)
	c.portReason(port, v1alpha1.ReasonUnknown, "kept from other pods")
	c.told("XPUPort", port.Name, v1alpha1.ReasonUnknown)
	c.claimReason(c.blue("b", 0), v1alpha1.ConditionProvisioned,
		v1alpha1.ReasonFunctionBusy, port.Name)
	c.stays(agent, "vf-0000-3b-02-0")
	agent.Lose("vf-0000-3b-02-0") // an administrator deleted it there
	c.gone(port)
}

// TestUntoldPortsAreTold: ports of which the agent does not tell whose they are are neither others'
// nor deleted.
func TestUntoldPortsAreTold(t *testing.T) {
	c := newCluster(t, impatient)
	agent := opitest.Start(t)
	ours, net := someone(t, agent, opitest.Installation), opi.Network{ID: "net-left", VLAN: 7}
	if err := errors.Join(ours.EnsureNetwork(t.Context(), net),
		ours.EnsurePort(t.Context(), portIn(net.ID, "vf-0000-3b-02-7", 7))); err != nil {
		t.Fatal(err)
	}

	agent.Set(func(b *opitest.Behaviour) { b.Untold = true })
	xpu := c.xpu("card", agent)
	c.eventually("what is unknown is told", func() error {
		if err := c.get(xpu); err != nil {
			return err
		}

		want := &v1alpha1.XPUForeign{
			Unknown: 1, Examples: []string{"port vf-0000-3b-02-7 (unknown whose)"},
		}
		got := xpu.Status.Foreign
		if got != nil && got.Networks == 0 && gocmp.Equal(want, got) {
			return nil
		}

		return fmt.Errorf("status.foreign is %+v, want %+v", got, want)
	})

	c.stays(agent, "vf-0000-3b-02-7")
}

// TestTakenEndpoint: an older XPU whose endpoint is changed does not take the agent of a younger
// one, also after the controller was started anew.
func TestTakenEndpoint(t *testing.T) {
	c := newCluster(t, impatient)
	agent := opitest.Start(t)
	c.network("blue", 100)
	older := c.xpuOn("another-"+c.node, "older", "127.0.0.1:1")
	c.xpuReason(older, v1alpha1.ReasonXPUUnavailable, "")
	younger := c.xpu("younger", agent)
	c.up(c.blue("a", 0), vf(0))
	c.xpuReason(younger, v1alpha1.ReasonConnected, "") // the agent counts as its own from now on

	c.change(older, func() { older.Spec.Endpoint = agent.Config().Endpoint })
	c.xpuReason(older, v1alpha1.ReasonConflict, "XPU younger has the OPI agent at ")
	c.stop()
	c.start(impatient)
	c.xpuReason(older, v1alpha1.ReasonConflict, "XPU younger has the OPI agent at ")
	c.xpuReason(younger, v1alpha1.ReasonConnected, "")
	c.stays(agent, "vf-0000-3b-02-0")
}

// TestTwoNamesOfOneAgent: an XPU for an agent that another one has already is refused, however the
// endpoint is written. The Ports of the first one stay, and the second one takes over once the
// first one is gone.
func TestTwoNamesOfOneAgent(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "LOCALHOST", "[::ffff:127.0.0.1]"} {
		t.Run(host, func(t *testing.T) {
			c := newCluster(t, impatient)
			agent := opitest.Start(t)
			c.network("blue", 100)
			first := c.xpu("first", agent)
			o := c.blue("a", 0)
			port := c.up(o, vf(0))
			_, number, _ := net.SplitHostPort(agent.Config().Endpoint)
			second := c.xpuOn("another-"+c.node, "second", host+":"+number)
			c.xpuReason(second, v1alpha1.ReasonConflict, "XPU first has the OPI agent at ")
			c.stays(agent, "vf-0000-3b-02-0")
			c.delete(first)
			c.xpuReason(first, v1alpha1.ReasonInUse, port.Name)
			c.delete(o)
			c.gone(first)
			c.xpuReason(second, v1alpha1.ReasonConnected, "")
		})
	}
}

// TestAgentOfAnotherXPU: two XPUs whose endpoints have nothing in common have one agent. The port
// of the one is not taken for an orphan of the other, nor replaced by a Port of the other's node
// that has a Function of the same address.
func TestAgentOfAnotherXPU(t *testing.T) {
	c := newCluster(t, impatient)
	agent := opitest.Start(t)
	c.network("blue", 100)
	c.xpu("first", agent)
	c.up(c.blue("a", 0), vf(0))
	other := "another-" + c.node
	second := c.xpuOn(other, "second", forward(t, agent.Config().Endpoint))
	c.xpuReason(second, v1alpha1.ReasonConnected, "")
	o := c.claim(want{
		name: "b", node: other, pool: "fast", function: vf(0), config: `{"network":"blue"}`,
	})
	port := &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: claim.PortName(other, vf(0))},
	}
	c.portReason(port, v1alpha1.ReasonConflict, "XPU first")
	c.stays(agent, "vf-0000-3b-02-0")
	c.delete(o)
	c.gone(port)
	c.stays(agent, "vf-0000-3b-02-0")
}

// TestXPUAbandoned: the Ports of a card that will not answer again go when it is abandoned, and its
// Functions stay tainted, by its condition, until it is back without their ports.
func TestXPUAbandoned(t *testing.T) {
	c := newCluster(t, impatient)
	agent := opitest.Start(t)
	agent.Set(func(b *opitest.Behaviour) { b.KeepOnStop = true })
	c.network("blue", 100)
	xpu := c.xpu("card", agent)
	o := c.blue("a", 0)
	port := c.up(o, vf(0))
	agent.Stop()
	c.delete(o)
	c.portReason(port, v1alpha1.ReasonReleasing, "cannot be reached")
	c.delete(xpu)
	c.xpuReason(xpu, v1alpha1.ReasonInUse, "spec.abandon")
	if err := c.get(port); err != nil {
		t.Errorf("the XPUPort went with its XPU: %v", err)
	}

	c.abandon(xpu)
	c.gone(port)
	c.gone(xpu)

	// Another card, which comes back.
	next := opitest.Start(t)
	next.Set(func(b *opitest.Behaviour) { b.KeepOnStop = true })
	xpu = c.xpu("next", next)
	o = c.blue("b", 0)
	port = c.up(o, vf(0))
	next.Stop()
	c.delete(o)
	c.portReason(port, v1alpha1.ReasonReleasing, "cannot be reached")
	c.abandon(xpu)
	c.gone(port)
	c.xpuReason(xpu, v1alpha1.ReasonAbandoned, "may still serve its ports")
	next.Set(func(b *opitest.Behaviour) { b.StuckDelete = true })
	if err := next.Run(); err != nil {
		t.Fatal(err)
	}

	c.xpuReason(xpu, v1alpha1.ReasonAbandoned, "is back")
	next.Set(func(b *opitest.Behaviour) { b.StuckDelete = false })

	c.eventually("the card is of use again", func() error {
		next.Kill() // what is stuck goes with the agent
		if err := next.Run(); err != nil {
			return err
		}
		return hasReason(c.xpuNamed("next").Status.Conditions, v1alpha1.ConditionReady,
			v1alpha1.ReasonConnected, "")
	})
}

// TestFunctionAbandoned: a Port that the agent cannot delete goes when the administrator gives its
// Function up. No pod gets the Function until the administrator frees it. Other Functions, and
// Ports that are up, are not concerned.
func TestFunctionAbandoned(t *testing.T) {
	c := newCluster(t, impatient)
	agent := opitest.Start(t)
	c.network("blue", 100)
	xpu := c.xpu("card", agent)
	o := c.blue("a", 0)
	port, other := c.up(o, vf(0)), c.up(c.blue("b", 1), vf(1))
	agent.Set(func(b *opitest.Behaviour) { b.StuckDelete = true })
	c.delete(o)
	c.portReason(port, v1alpha1.ReasonReleasing, "spec.abandonedFunctions")

	c.abandonFunctions(xpu, vf(0), vf(1))
	c.gone(port)
	c.told("XPUPort", port.Name, v1alpha1.ReasonAbandoned)
	c.functions(xpu, vf(0).String())
	next := c.blue("c", 0)
	c.portReason(c.port(next, vf(0)), v1alpha1.ReasonAbandoned, "spec.abandonedFunctions")
	c.claimReason(next, v1alpha1.ConditionProvisioned, v1alpha1.ReasonAbandoned, vf(0).String())
	c.stays(agent, "vf-0000-3b-02-0", "vf-0000-3b-02-1")
	c.portReason(other, v1alpha1.ReasonUp, "")

	agent.Set(func(b *opitest.Behaviour) { b.StuckDelete = false })
	agent.Lose("vf-0000-3b-02-0")
	c.abandonFunctions(xpu)
	c.up(next, vf(0))
	c.functions(xpu, "")
}

// TestAbandonedThatCanBeDeleted: an agent that can let a port go after all is believed, and nothing
// is given up.
func TestAbandonedThatCanBeDeleted(t *testing.T) {
	c := newCluster(t, impatient)
	agent := opitest.Start(t)
	c.network("blue", 100)
	xpu := c.xpu("card", agent)
	o := c.blue("a", 0)
	port := c.up(o, vf(0))
	c.abandonFunctions(xpu, vf(0))
	c.functions(xpu, vf(0).String())
	c.delete(o)
	c.gone(port)
	c.has(agent)
}

// abandonFunctions has the XPU give up exactly these Functions.
func (c *cluster) abandonFunctions(xpu *v1alpha1.XPU, functions ...function.ID) {
	c.Helper()
	before := xpu.DeepCopy()
	xpu.Spec.AbandonedFunctions = nil
	for _, f := range functions {
		xpu.Spec.AbandonedFunctions = append(xpu.Spec.AbandonedFunctions, f.String())
	}
	if err := c.Patch(context.Background(), xpu, client.MergeFrom(before)); err != nil {
		c.Fatal(err)
	}
}

// functions waits until the XPU's condition Functions names this one; "" until there is none.
func (c *cluster) functions(xpu *v1alpha1.XPU, names string) {
	c.Helper()
	c.eventually("the condition Functions", func() error {
		if err := c.get(xpu); err != nil {
			return err
		}

		condition := meta.FindStatusCondition(xpu.Status.Conditions, v1alpha1.ConditionFunctions)
		switch {
		case condition == nil && names == "":
			return nil
		case condition == nil || names == "":
			return fmt.Errorf("it is %+v, want %q in it", condition, names)
		}

		return hasReason(xpu.Status.Conditions, v1alpha1.ConditionFunctions,
			v1alpha1.ReasonAbandoned, names)
	})
}

// TestAbandonedIsAsked: the agent of an abandoned XPU that is back is asked, also by a controller
// that has just started and does not know yet that it is.
func TestAbandonedIsAsked(t *testing.T) {
	patient := func(o *Options) { o.OrphanGrace = time.Hour }
	c := newCluster(t, patient)
	agent := opitest.Start(t)
	c.network("blue", 100)
	xpu := c.xpu("card", agent)
	o := c.blue("a", 0)
	port := c.up(o, vf(0))
	c.abandon(xpu)
	c.stop()
	c.delete(o)
	c.delete(port)
	c.start(patient)
	c.gone(port)
	c.has(agent)
}

// TestNetworkDeletedWhileAway: a network that is deleted while its xPU is away goes when the xPU is
// back, and its VLAN is free.
func TestNetworkDeletedWhileAway(t *testing.T) {
	c := newCluster(t, func(o *Options) {
		impatient(o)
		o.BridgeGrace = time.Hour
	})

	agent := opitest.Start(t)
	agent.Set(func(b *opitest.Behaviour) { b.KeepOnStop = true })
	network := c.network("blue", 100)
	xpu := c.xpu("card", agent)
	o := c.blue("a", 0)
	port := c.up(o, vf(0))
	c.delete(o)
	c.gone(port)
	agent.Stop()
	c.xpuReason(xpu, v1alpha1.ReasonXPUUnavailable, "")
	c.delete(network)
	c.gone(network)
	c.stop() // and nobody remembers
	c.start(impatient)
	c.network("green", 100)
	if err := agent.Run(); err != nil {
		t.Fatal(err)
	}

	c.up(c.claim(want{name: "b", pool: "fast", function: vf(1), config: `{"network":"green"}`}),
		vf(1))
	if got := agent.Networks(); !slices.Equal(got,
		[]string{opitest.Installation.NetworkID("green")}) {
		t.Errorf("networks %q", got)
	}
}

// TestPortDeletedBehindTheBack: a port that somebody deletes, or changes, while the connection
// stays is made again.
func TestPortDeletedBehindTheBack(t *testing.T) {
	c := newCluster(t, impatient)
	agent := opitest.Start(t)
	c.network("blue", 100)
	c.xpu("card", agent)
	port := c.up(c.blue("a", 0), vf(0))
	somebody := someone(t, agent, opitest.Installation)
	mac, err := net.ParseMAC(port.Spec.MAC)
	if err != nil {
		t.Fatal(err)
	}

	id, network := port.Status.BridgePort, opitest.Installation.NetworkID("blue")
	wanted := opi.Port{ID: id, MAC: mac, Networks: []string{network}}
	for name, damage := range map[string]func() error{
		"deleted": func() error { return somebody.DeletePort(t.Context(), id) },
		"another MAC": func() error {
			return somebody.EnsurePort(t.Context(), portIn(network, id, 9))
		},
		"its network, too": func() error {
			return errors.Join(somebody.DeletePort(t.Context(), id),
				somebody.DeleteNetwork(t.Context(), network))
		},
	} {
		if err := damage(); err != nil {
			t.Logf("%s: %v", name, err) // it was mended in between
		}
		c.eventually(name+": the port is served again", func() error {
			got, err := somebody.GetPort(t.Context(), id)
			if err == nil && (!got.Equal(wanted) || got.State != opi.StateUp) {
				err = fmt.Errorf("it is %+v", got)
			}
			return err
		})
	}
}

// TestAgentHangs: an agent that answers nothing while its connection stays is away.
func TestAgentHangs(t *testing.T) {
	c := newCluster(t, func(o *Options) {
		impatient(o)
		o.AgentTimeout = 100 * time.Millisecond
	})

	agent := opitest.Start(t)
	c.network("blue", 100)
	xpu := c.xpu("card", agent)
	c.up(c.blue("a", 0), vf(0))
	c.xpuReason(xpu, v1alpha1.ReasonConnected, "")
	agent.Set(func(b *opitest.Behaviour) { b.Hung = true })
	c.xpuReason(xpu, v1alpha1.ReasonXPUUnavailable, "does not answer")
	o := c.blue("b", 1)
	c.portReason(c.port(o, vf(1)), v1alpha1.ReasonXPUUnavailable, "cannot be reached")
	agent.Set(func(b *opitest.Behaviour) { b.Hung = false })
	c.xpuReason(xpu, v1alpha1.ReasonConnected, "")
	c.up(o, vf(1))
}

// TestLongTextsOfAgents: conditions and events have room for what an agent says, as it is cut.
func TestLongTextsOfAgents(t *testing.T) {
	c := newCluster(t, impatient)
	agent := opitest.Start(t)
	agent.Set(func(b *opitest.Behaviour) {
		b.Realise = func(id string) error {
			if strings.HasPrefix(id, "vf-") {
				return errors.New("card on fire" + strings.Repeat(", heiß", 8000))
			}
			return nil
		}
	})

	c.network("blue", 100)
	c.xpu("card", agent)
	o := c.blue("a", 0)
	c.portReason(c.port(o, vf(0)), v1alpha1.ReasonFailed, "card on fire")
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonFailed, "card on fire")
	c.told("ResourceClaim", "a", v1alpha1.ReasonFailed)
}

// TestEndlessAgent: an agent whose lists do not end serves its Ports, also what it forgot.
func TestEndlessAgent(t *testing.T) {
	c := newCluster(t, impatient)
	agent := opitest.Start(t)
	c.network("blue", 100)
	c.xpu("card", agent)
	c.up(c.blue("a", 0), vf(0))
	agent.Set(func(b *opitest.Behaviour) { b.Endless = true })
	c.up(c.blue("b", 1), vf(1))
	agent.Lose("vf-0000-3b-02-0")
	c.has(agent, "vf-0000-3b-02-0", "vf-0000-3b-02-1")
}

func (c *cluster) abandon(xpu *v1alpha1.XPU) {
	c.Helper()
	before := client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"abandon":true}}`))
	if err := c.Patch(context.Background(), xpu, before); err != nil {
		c.Fatal(err)
	}
}

func (c *cluster) xpuNamed(name string) *v1alpha1.XPU {
	c.Helper()
	xpu := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if err := c.get(xpu); err != nil {
		c.Fatal(err)
	}
	return xpu
}

// forward listens at another address and passes connections on.
func forward(t *testing.T, endpoint string) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })

	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go pass(conn, endpoint)
		}
	}()

	return listener.Addr().String()
}

func pass(conn net.Conn, endpoint string) {
	defer conn.Close()
	to, err := net.Dial("tcp", endpoint)
	if err != nil {
		return
	}
	defer to.Close()

	go func() {
		_, _ = io.Copy(to, conn)
		_ = to.Close()
	}()

	_, _ = io.Copy(conn, to)
}

// TestQuota: an XPUPort that a quota forbids is told of where the pod is.
func TestQuota(t *testing.T) {
	c := newCluster(t, impatient)
	c.xpu("card", opitest.Start(t))
	c.network("blue", 100)
	none := corev1.ResourceList{"count/xpuports.xpu.opiproject.org": resource.MustParse("0")}
	quota := &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: "none"},
		Spec:       corev1.ResourceQuotaSpec{Hard: none},
	}

	c.create(quota)
	// kube-controller-manager's part
	quota.Status = corev1.ResourceQuotaStatus{Hard: none, Used: none}
	if err := c.Status().Update(t.Context(), quota); err != nil {
		t.Fatal(err)
	}

	o := c.claim(want{
		name: "a", pool: "fast", function: vf(0), config: `{"network":"blue"}`, pod: "p",
	})
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonForbidden, "quota")
	c.told("ResourceClaim", "a", v1alpha1.ReasonForbidden)
	c.told("Pod", "p", v1alpha1.ReasonForbidden)
}

// TestPodIsTold: the XPUPort names the pod that it is for, also where a claim is between them.
func TestPodIsTold(t *testing.T) {
	c := newCluster(t, nil)
	c.xpu("card", opitest.Start(t))
	c.network("blue", 100)
	port := c.up(c.claim(want{
		name: "a", pool: "fast", function: vf(0), config: `{"network":"blue"}`, pod: "p",
	}), vf(0))
	if port.Status.Pod != "p" {
		t.Errorf("status.pod %q", port.Status.Pod)
	}
}

// TestNodeOfAllocation: a node's agent that names a pool after another node gets no Port there.
func TestNodeOfAllocation(t *testing.T) {
	c := newCluster(t, nil)
	c.xpu("card", opitest.Start(t))
	c.network("blue", 100)
	o := c.claim(want{name: "a", pool: "fast", function: vf(0), config: `{"network":"blue"}`,
		on: "node-of-the-attacker"})
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonInvalidConfig, "another node")
}

// TestPortWithoutFinalizer: an XPUPort that somebody made without the finalizer gets it before the
// agent is asked for anything.
func TestPortWithoutFinalizer(t *testing.T) {
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	c.xpu("card", agent)
	c.network("blue", 100)
	port := c.up(c.blue("a", 0), vf(0))
	made := &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: "by-hand"}, Spec: port.Spec,
	}
	made.Spec.Function.PCIAddress, made.Spec.MAC, made.Spec.Claim = "0000:3b:02.7", "02:00:00:00:00:77", v1alpha1.ClaimRef{}
	c.create(made)
	c.portReason(made, v1alpha1.ReasonUp, "")
	if !slices.Contains(made.Finalizers, v1alpha1.FinalizerPort) {
		t.Errorf("finalizers %q", made.Finalizers)
	}

	c.delete(made)
	c.gone(made)
	c.has(agent, "vf-0000-3b-02-0")
}

// TestTakenFromOthers: no claim gets another pod's MAC address, on whatever xPU, a gateway's
// address, or a wider prefix.
func TestTakenFromOthers(t *testing.T) {
	c := newCluster(t, nil)
	c.xpu("card", opitest.Start(t))
	other := "another-" + c.node
	c.xpuOn(other, "other", opitest.Start(t).Config().Endpoint)
	c.network("blue", 100, "10.1.0.0/24")
	c.pool("fast", "") // which allows claims everything
	victim := c.up(c.claim(want{
		name: "victim", pool: "fast", function: vf(0), config: `{"network":"blue"}`,
	}), vf(0))
	for name, test := range map[string]struct{ config, reason, text string }{
		"mac": {`{"network":"blue","mac":"` + victim.Spec.MAC + `"}`, v1alpha1.ReasonConflict,
			victim.Name},
		"address": {`{"network":"blue","addresses":["` + victim.Spec.Addresses[0] +
			`"]}`, v1alpha1.ReasonConflict, victim.Name},
		"gateway": {`{"network":"blue","addresses":["10.1.0.1/24"]}`, v1alpha1.ReasonInvalidConfig,
			"gateway"},
		"prefix": {`{"network":"blue","addresses":["10.1.0.9/1"]}`, v1alpha1.ReasonInvalidConfig,
			"prefix length of subnet 10.1.0.0/24"},
	} {
		o := c.claim(want{
			name: name, node: other, pool: "fast", function: vf(0), config: test.config,
		})
		c.claimReason(o, v1alpha1.ConditionProvisioned, test.reason, test.text)
		c.delete(o)
	}

	// What it had is free again once it is gone.
	c.delete(c.named("victim"))
	c.gone(victim)
	c.claim(want{name: "next", node: other, pool: "fast", function: vf(0),
		config: `{"network":"blue","mac":"` + victim.Spec.MAC + `"}`})
	next := &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: claim.PortName(other, vf(0))},
	}
	c.portReason(next, v1alpha1.ReasonUp, "")
}
