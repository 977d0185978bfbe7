// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

// dpu is an agent that tells of a card.
func (c *cluster) dpu(serial string) *opitest.Agent {
	agent := opitest.Start(c.TB)
	agent.Set(func(b *opitest.Behaviour) { b.HostPFs = []string{"host-pf c1pf0 serial " + serial} })
	return agent
}

// registered creates an XPU that says where its agent is, and nothing more.
func (c *cluster) registered(name string, agent *opitest.Agent) *v1alpha1.XPU {
	c.Helper()
	x := &v1alpha1.XPU{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.XPUSpec{
			Endpoint: agent.Config().Endpoint, Insecure: true,
		},
	}
	c.create(x)
	return x
}

// host says what a node's agent found: a card in testPF.
func (c *cluster) host(node, serial string) *v1alpha1.XPUNode {
	c.Helper()
	n := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: node},
		Status: v1alpha1.XPUNodeStatus{PFs: []v1alpha1.XPUNodePF{
			{Address: string(testPF), Serial: serial, VFOffset: 16, VFStride: 1, TotalVFs: 64},
		}}}
	c.create(n)
	return n
}

// card waits until an XPU is on the node, "" for none, and its condition Card has the reason.
func (c *cluster) card(xpu *v1alpha1.XPU, node, reason string) {
	c.Helper()
	c.eventually(fmt.Sprintf("XPU %s is on node %q: %s", xpu.Name, node, reason), func() error {
		if err := c.get(xpu); err != nil {
			return err
		}

		condition := meta.FindStatusCondition(xpu.Status.Conditions, v1alpha1.ConditionCard)
		if condition == nil && reason == "" {
			condition = &metav1.Condition{}
		}
		if condition == nil || condition.Reason != reason || xpu.Node() != node {
			return fmt.Errorf("it is on %q: %+v", xpu.Node(), condition)
		}

		return nil
	})
}

// TestCards covers that nobody types a card: an XPU is where the card is that its agent tells of,
// whichever of the two comes first.
func TestCards(t *testing.T) {
	c := newCluster(t, nil)
	c.network("blue", 100, "10.1.0.0/24")
	c.pool("fast", "blue")
	agent := c.dpu("MT1")
	xpu := c.registered("card", agent)
	c.card(xpu, "", v1alpha1.ReasonCardNotFound)
	o := c.claim(want{name: "a", pool: "fast", function: vf(3)})
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonNoXPU, "no XPU")
	c.host(c.node, "MT1")
	c.card(xpu, c.node, v1alpha1.ReasonFound)
	port := c.up(o, vf(3))
	if port.Spec.XPU != "card" || port.Status.BridgePort != "c1pf0vf3" {
		t.Errorf("XPU %s, bridge port %s", port.Spec.XPU, port.Status.BridgePort)
	}

	c.has(agent, "c1pf0vf3")
	if xpu.Status.Serial != "MT1" || len(xpu.Status.PFs) != 1 {
		t.Errorf("status %+v", xpu.Status)
	}

	t.Run("an agent that takes its word for another's card", func(t *testing.T) {
		thief := c.registered("thief", c.dpu("MT1"))
		c.card(thief, "", v1alpha1.ReasonConflict)
		c.card(xpu, c.node, v1alpha1.ReasonFound)
	})

	t.Run("an XPU whose spec names another's PF later", func(t *testing.T) {
		second := c.xpuOn(c.node, "second", opitest.Start(t).Config().Endpoint)
		c.change(second, func() { second.Spec.PFs = []string{string(testPF)} })
		c.change(xpu, func() { xpu.Status.Serial = "" }) // the controller looks again
		c.card(xpu, c.node, v1alpha1.ReasonFound)
		c.delete(second)
		c.gone(second)
	})

	t.Run("a status that says something else", func(t *testing.T) {
		c.eventually("change it", func() error {
			if err := c.get(xpu); err != nil {
				return err
			}
			xpu.Status.NodeName = ""
			return c.Status().Update(t.Context(), xpu)
		})
		c.card(xpu, c.node, v1alpha1.ReasonFound)
	})

	t.Run("the agent is started anew with another name for the PF", func(t *testing.T) {
		agent.Kill()
		agent.Set(func(b *opitest.Behaviour) { b.HostPFs = []string{"host-pf c2pf0 serial MT1"} })
		if err := agent.Run(); err != nil {
			t.Fatal(err)
		}

		c.eventually("its name is c2pf0", func() error {
			if err := c.get(xpu); err != nil || xpu.Status.PFs[0].Name != "c2pf0" {
				return fmt.Errorf("%v, %+v", err, xpu.Status.PFs)
			}
			return nil
		})

		c.has(agent, "c1pf0vf3") // a Port keeps its id
		c.up(c.claim(want{name: "b", pool: "fast", function: vf(4)}), vf(4))
		c.has(agent, "c1pf0vf3", "c2pf0vf4")
	})

	c.delete(o)
	c.delete(port)
	c.gone(port)
	c.has(agent, "c2pf0vf4")
}

// TestCardMoves covers a card that is put into another node, and one that is replaced in its slot.
func TestCardMoves(t *testing.T) {
	c := newCluster(t, nil)
	xpu := c.registered("card", c.dpu("MT1"))
	host := c.host(c.node, "MT1")
	c.card(xpu, c.node, v1alpha1.ReasonFound)
	c.change(host, func() { host.Status.PFs[0].Serial = "MT2" })
	c.card(xpu, "", v1alpha1.ReasonCardNotFound)
	replaced := c.registered("another", c.dpu("MT2"))
	c.card(replaced, c.node, v1alpha1.ReasonFound)
	c.host(c.node+"-2", "MT1")
	c.card(xpu, c.node+"-2", v1alpha1.ReasonFound)
}

// TestCardOfUnknownNode covers an XPUNode that somebody deletes, or that goes with its Node: nothing
// says then that the card is in another node, so that its XPUPorts stay and new ones are served.
func TestCardOfUnknownNode(t *testing.T) {
	c := newCluster(t, nil)
	c.network("blue", 100, "10.1.0.0/24")
	c.pool("fast", "blue")
	agent := c.dpu("MT1")
	xpu := c.registered("card", agent)
	host := c.host(c.node, "MT1")
	c.card(xpu, c.node, v1alpha1.ReasonFound)
	port := c.up(c.claim(want{name: "a", pool: "fast", function: vf(3)}), vf(3))

	c.delete(host)
	c.card(xpu, c.node, v1alpha1.ReasonCardNotFound)
	c.up(c.claim(want{name: "b", pool: "fast", function: vf(4)}), vf(4))
	c.has(agent, "c1pf0vf3", "c1pf0vf4")
	c.portReason(port, v1alpha1.ReasonUp, "")

	c.host(c.node+"-2", "MT1")
	c.card(xpu, c.node+"-2", v1alpha1.ReasonFound)
}

// TestStolenCard covers a node that tells of another node's card: who had the card keeps it and all
// Ports, the contradiction is a condition, and spec.nodeName ends it. So it is for who comes first,
// as nothing tells them apart.
func TestStolenCard(t *testing.T) {
	c := newCluster(t, nil)
	c.network("blue", 100, "10.1.0.0/24")
	c.pool("fast", "blue")
	agent := c.dpu("MT1")
	xpu := c.registered("card", agent)
	owner := c.host(c.node, "MT1")
	c.card(xpu, c.node, v1alpha1.ReasonFound)
	c.up(c.claim(want{name: "a", pool: "fast", function: vf(3)}), vf(3))

	thief := c.host(c.node+"-thief", "MT1")
	c.card(xpu, c.node, v1alpha1.ReasonContradiction)
	c.up(c.claim(want{name: "b", pool: "fast", function: vf(4)}), vf(4))
	c.has(agent, "c1pf0vf3", "c1pf0vf4")

	// who had it does not tell of it any more
	c.change(owner, func() { owner.Status.PFs[0].Serial = "MT2" })
	c.card(xpu, thief.Name, v1alpha1.ReasonFound)
	c.change(owner, func() { owner.Status.PFs[0].Serial = "MT1" })
	c.card(xpu, thief.Name, v1alpha1.ReasonContradiction)
	c.change(xpu, func() { xpu.Spec.NodeName = c.node })
	c.card(xpu, c.node, v1alpha1.ReasonFound)
}

// TestAgentFallsSilent covers an agent that does not tell any more which PFs it serves: what it
// told holds until the spec is changed.
func TestAgentFallsSilent(t *testing.T) {
	c := newCluster(t, nil)
	agent := c.dpu("MT1")
	xpu := c.registered("card", agent)
	c.host(c.node, "MT1")
	c.card(xpu, c.node, v1alpha1.ReasonFound)

	agent.Kill()
	agent.Set(func(b *opitest.Behaviour) { b.HostPFs = nil })
	if err := agent.Run(); err != nil {
		t.Fatal(err)
	}

	c.card(xpu, c.node, v1alpha1.ReasonNotTold)
	if xpu.PF(string(testPF)) == nil {
		t.Errorf("its PFs are %+v", xpu.Status.PFs)
	}

	c.change(xpu, func() { xpu.Spec.Endpoint = opitest.Start(t).Config().Endpoint })
	c.card(xpu, "", v1alpha1.ReasonNotTold)
}

// TestFunctionOfNoCard covers XPUPorts for Functions that the card does not have: the OPI agent is
// not asked for them.
func TestFunctionOfNoCard(t *testing.T) {
	c := newCluster(t, nil)
	c.network("blue", 100)
	agent := c.dpu("MT1")
	xpu := c.registered("card", agent)
	c.host(c.node, "MT1")
	c.card(xpu, c.node, v1alpha1.ReasonFound)

	for _, f := range []function.ID{
		function.SubfunctionID("0000:03:00.0", 88), // an SF of another PF
		{Address: "0000:03:00.0"},                  // another PF
		vf(64),                                     // beyond the most VFs
		function.SubfunctionID(vf(0).Address, 88),  // an SF of a VF
	} {
		port := c.podPort(f, "blue")
		c.create(port)
		c.portReason(port, v1alpha1.ReasonNoXPU, "XPU card does not have Function "+f.String()+
			": its PFs are 0000:3b:00.0 with at most 64 VFs")
	}

	own := c.podPort(function.SubfunctionID(testPF, 88), "blue")
	c.create(own)
	c.portReason(own, v1alpha1.ReasonUp, "")
	c.has(agent, "c1pf0sf88")
}

// TestTwoCards covers two cards in a node: each Function's port is at the card that has it.
func TestTwoCards(t *testing.T) {
	c := newCluster(t, nil)
	c.network("blue", 100, "10.1.0.0/24")
	c.pool("fast", "blue")
	host := c.host(c.node, "MT1")
	c.change(host, func() {
		second := host.Status.PFs[0]
		second.Address, second.Serial = "0000:5e:00.0", "MT2"
		host.Status.PFs = append(host.Status.PFs, second)
	})

	first, second := c.dpu("MT1"), c.dpu("MT2")
	c.card(c.registered("second", second), c.node, v1alpha1.ReasonFound)
	c.card(c.registered("first", first), c.node, v1alpha1.ReasonFound)
	c.up(c.claim(want{name: "a", pool: "fast", function: vf(0)}), vf(0))
	other := function.ID{Address: "0000:5e:02.0"}
	c.up(c.claim(want{name: "b", pool: "fast", function: other, pf: "0000:5e:00.0"}), other)
	c.has(first, "c1pf0vf0")
	c.has(second, "c1pf0vf0")
}

// TestMovedCardHasPorts covers a card that is put into another node while the first still has
// XPUPorts there: Functions of the two nodes have ports of the same id.
func TestMovedCardHasPorts(t *testing.T) {
	c := newCluster(t, nil)
	c.network("blue", 100, "10.1.0.0/24")
	c.pool("fast", "blue")
	agent := c.dpu("MT1")
	xpu := c.registered("card", agent)
	host := c.host(c.node, "MT1")
	c.card(xpu, c.node, v1alpha1.ReasonFound)
	before := c.claim(want{name: "before", pool: "fast", function: vf(3)})
	left := c.up(before, vf(3))
	c.change(host, func() { host.Status.PFs[0].Serial = "none" })
	next := c.node + "-2"
	c.host(next, "MT1")
	c.card(xpu, next, v1alpha1.ReasonFound)

	after := c.claim(want{name: "after", pool: "fast", node: next, function: vf(3)})
	port := &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: claim.PortName(next, vf(3))},
	}
	c.portReason(port, v1alpha1.ReasonUp, "")
	c.has(agent, "c1pf0vf3")
	deleted := agent.Calls("DeleteBridgePort")
	c.delete(before)
	c.delete(left)
	c.gone(left)
	if n := agent.Calls("DeleteBridgePort") - deleted; n != 0 {
		t.Errorf("the agent was asked %d times to delete the port that the other node's Function "+
			"has now", n)
	}

	c.has(agent, "c1pf0vf3")
	c.delete(after)
	c.delete(port)
	c.gone(port)
	c.has(agent)
}

// TestCardByHand covers an XPU that an administrator wrote: what contradicts the cards is said.
func TestCardByHand(t *testing.T) {
	c := newCluster(t, nil)
	c.host(c.node, "MT1")
	xpu := c.xpu("card", c.dpu("MT1"))
	c.card(xpu, c.node, v1alpha1.ReasonFound)
	c.change(xpu, func() { xpu.Spec.NodeName = "elsewhere" })
	c.card(xpu, "elsewhere", v1alpha1.ReasonContradiction)
	silent := c.xpu("silent", opitest.Start(t))
	c.card(silent, c.node, "")
	nobody := c.registered("nobody", opitest.Start(t))
	c.card(nobody, "", v1alpha1.ReasonNotTold)

	c.eventually("the agent of the node sees its XPU", func() error {
		var seen v1alpha1.XPUList
		err := c.List(t.Context(), &seen, client.MatchingFields{"status.nodeName": c.node})
		if err == nil && (len(seen.Items) != 1 || seen.Items[0].Name != "silent") {
			err = fmt.Errorf("it sees %d XPUs", len(seen.Items))
		}
		return err
	})
}
