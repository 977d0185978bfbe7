// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

// withAhead has a pool with provision: Ahead in network blue, and one Port that was made ahead for
// the Function and is up.
func withAhead(t *testing.T) (*cluster, *opitest.Agent, *v1alpha1.XPUPort) {
	t.Helper()
	c, agent := withCard(t)
	c.network("blue", 100, "10.1.0.0/24")
	pool := c.pool("fast", "blue")
	c.change(pool, func() { pool.Spec.Provision = v1alpha1.ProvisionAhead })
	port := c.aheadPort(vf(0), "blue")
	c.create(port)
	c.portReason(port, v1alpha1.ReasonUp, "")

	return c, agent, port
}

// aheadPort is a Port as a node's agent makes it for pool fast before any pod asks.
func (c *cluster) aheadPort(f function.ID, network string) *v1alpha1.XPUPort {
	return claim.NewPort(c.namespace, f, "fast", v1alpha1.XPUPortSpec{
		NodeName: c.node, XPU: "card", Network: network,
		MAC: string(claim.DerivedMAC("", c.node, f)), Ahead: true,
	})
}

// The Port of a claim takes the place of the one that was made ahead: the xPU has nothing to
// change, and its port stays when the first XPUPort goes.
func TestClaimTakesPortMadeAhead(t *testing.T) {
	c, agent, ahead := withAhead(t)
	if len(ahead.Status.Addresses) != 0 {
		t.Errorf("the Port that was made ahead has the addresses %v", ahead.Status.Addresses)
	}

	made, deleted := agent.Calls("CreateBridgePort"), agent.Calls("DeleteBridgePort")
	o := c.claim(want{name: "a", namespace: "default", pool: "fast", function: vf(0)})
	port := c.up(o, vf(0))
	c.gone(ahead)
	if port.Spec.MAC != ahead.Spec.MAC {
		t.Errorf("the claim's Port has MAC address %s, want that of the Port that was made "+
			"ahead, %s", port.Spec.MAC, ahead.Spec.MAC)
	}
	if got := port.Spec.Addresses; len(got) != 1 || got[0] != "10.1.0.2/24" {
		t.Errorf("addresses %v, want 10.1.0.2/24", got)
	}
	if m, d := agent.Calls("CreateBridgePort")-made, agent.Calls("DeleteBridgePort")-deleted; m+
		d != 0 {
		t.Errorf("the agent was asked to make %d ports and to delete %d, want none", m, d)
	}

	c.has(agent, port.Status.BridgePort)

	// Its MAC address is in the network's book from now on.
	thief := c.claim(want{
		name: "thief", namespace: "default", pool: "fast", function: vf(1),
		config: fmt.Sprintf(`{"mac":%q}`, port.Spec.MAC),
	})

	c.claimReason(thief, v1alpha1.ConditionProvisioned, v1alpha1.ReasonConflict,
		"belongs to XPUPort default/"+port.Name)
	c.delete(thief) // it would take the address in the moment that nobody has it

	// Whoever deletes it cuts nobody off: the next one is the same.
	c.delete(port)
	c.gone(port)
	if again := c.up(o, vf(0)); again.Spec.MAC != port.Spec.MAC {
		t.Errorf("made again, the Port has MAC address %s, want %s", again.Spec.MAC, port.Spec.MAC)
	}

	c.delete(o)
	c.has(agent)
}

// Who asked for the MAC address of a Function whose Port is made ahead does not keep claims from
// the Function.
func TestMACOfFunctionIsTaken(t *testing.T) {
	c, _, ahead := withAhead(t)
	taker := c.claim(want{
		name: "taker", pool: "fast", function: vf(1),
		config: fmt.Sprintf(`{"mac":%q}`, ahead.Spec.MAC),
	})

	c.portReason(c.port(taker, vf(1)), v1alpha1.ReasonConflict, "already associated")
	o := c.claim(want{name: "a", namespace: "default", pool: "fast", function: vf(0)})
	if port := c.up(o, vf(0)); port.Spec.MAC == ahead.Spec.MAC {
		t.Errorf("two Ports of the network have MAC address %s", ahead.Spec.MAC)
	}
}

// A claim whose network cannot be had yet does not leave the Function in the one that its Port was
// made ahead in.
func TestPortMadeAheadDoesNotStay(t *testing.T) {
	c, agent, ahead := withAhead(t)
	c.network("green", 200)
	agent.FailNext("CreateLogicalBridge", 1000, codes.Unavailable, "no green")
	c.claim(want{
		name: "a", pool: "fast", function: vf(0), config: `{"network":"green"}`, ofClass: true,
	})
	c.gone(ahead)
	c.has(agent)
}

// A Port that was made ahead at the XPU which served the PF before is gone there before the
// Function has another at the new one.
func TestPortMadeAheadAtAnotherXPU(t *testing.T) {
	c, agent, ahead := withAhead(t)
	other := opitest.Start(t)
	c.create(&v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "other"}, Spec: v1alpha1.XPUSpec{
		NodeName: c.node, PFs: []string{string(testPF)}, Endpoint: other.Config().Endpoint,
		Insecure: true,
	}})

	c.xpuReason(c.xpuNamed("other"), v1alpha1.ReasonConnected, "")
	o := c.claim(want{name: "a", pool: "fast", function: vf(0)})
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonFunctionBusy,
		"made ahead at XPU card")
	c.has(agent, "vf-0000-3b-02-0")
	c.has(other)
	c.delete(ahead) // as the node's agent does
	c.up(o, vf(0))
	c.has(agent)
	c.has(other, "vf-0000-3b-02-0")
}

// A pool that no longer asks for Ports ahead, or is gone, ends those that there are, although the
// node's agent is away.
func TestPoolMakesNoMoreAhead(t *testing.T) {
	c, agent, ahead := withAhead(t)
	pool := &v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: "fast"}}
	if err := c.get(pool); err != nil {
		t.Fatal(err)
	}
	c.delete(pool)
	c.gone(ahead)
	c.has(agent)
}

// A claim that asks for another network or MAC address gets it, and the Function leaves the network
// that it was in.
func TestClaimWantsOtherThanAhead(t *testing.T) {
	c, agent, ahead := withAhead(t)
	c.network("green", 200)

	o := c.claim(want{
		name: "a", pool: "fast", function: vf(0),
		config: `{"network":"green","mac":"02:00:00:00:00:07"}`, ofClass: true,
	})

	c.up(o, vf(0))
	c.gone(ahead)
	c.has(agent, "vf-0000-3b-02-0")

	c.eventually("the networks at the agent", func() error {
		if got := agent.Networks(); len(got) != 1 {
			return fmt.Errorf("%v, want green alone", got)
		}
		return nil
	})
}

// A Port that is being made ahead while a claim's comes neither ends up at the agent nor keeps the
// claim's from it.
func TestClaimComesWhilePortIsMadeAhead(t *testing.T) {
	c, agent := withCard(t)
	c.network("blue", 100)
	c.network("green", 200)
	pool := c.pool("fast", "blue")
	c.change(pool, func() { pool.Spec.Provision = v1alpha1.ProvisionAhead })
	agent.Set(func(b *opitest.Behaviour) { b.Latency = 300 * time.Millisecond })
	ahead := c.aheadPort(vf(0), "blue")
	c.create(ahead)

	c.eventually("the agent is asked", func() error {
		if agent.Calls("CreateLogicalBridge")+agent.Calls("CreateBridgePort") == 0 {
			return fmt.Errorf("not yet")
		}
		return nil
	})

	o := c.claim(want{
		name: "a", pool: "fast", function: vf(0), config: `{"network":"green"}`, ofClass: true,
	})
	port := c.up(o, vf(0))
	c.gone(ahead)
	agent.Set(func(b *opitest.Behaviour) { b.Latency = 0 })
	client, err := opi.Dial(agent.Config())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()

	got, err := client.GetPort(t.Context(), port.Status.BridgePort)
	if err != nil || got.MAC.String() != port.Spec.MAC {
		t.Errorf("the agent's port has MAC address %s (%v), want the claim's, %s", got.MAC,
			err, port.Spec.MAC)
	}
}

// Ports are made ahead only where the pool says so, and one that cannot come up is not given up:
// nobody waits for it.
func TestPortMadeAheadForNobody(t *testing.T) {
	c := newCluster(t, func(o *Options) {
		o.ProvisionTimeout, o.AheadGrace = 200*time.Millisecond, time.Minute
	})
	agent := opitest.Start(t)
	c.xpu("card", agent)
	c.network("blue", 100)
	pool := c.pool("fast", "blue")
	port := c.aheadPort(vf(0), "blue")
	c.create(port)
	c.portReason(port, v1alpha1.ReasonForbidden,
		"DevicePool fast does not have Ports made ahead in XPUNetwork blue")
	c.has(agent)
	thief := c.aheadPort(vf(1), "blue")
	thief.Spec.MAC = port.Spec.MAC
	c.create(thief)
	c.portReason(thief, v1alpha1.ReasonForbidden, "does not belong to Function "+vf(1).String())

	// The pool may be known later than the Port.
	agent.Kill()
	c.change(pool, func() { pool.Spec.Provision = v1alpha1.ProvisionAhead })
	c.portReason(port, v1alpha1.ReasonXPUUnavailable, "")

	c.eventually("the time to provision is over", func() error {
		if age := time.Since(port.CreationTimestamp.Time); age < 2*time.Second {
			return fmt.Errorf("the Port is %s old", age)
		}
		return nil
	})

	c.portReason(port, v1alpha1.ReasonXPUUnavailable, "")
	if err := agent.Run(); err != nil {
		t.Fatal(err)
	}

	c.portReason(port, v1alpha1.ReasonUp, "")
}
