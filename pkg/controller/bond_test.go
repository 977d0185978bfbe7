// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"slices"
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

const (
	bondConfig = `{"bond":{"name":"bond0","mode":"active-backup"}}`
	secondPF   = pci.Address("0000:3b:00.1")
)

// linkLocal is the link-local address of a Port's MAC address.
func linkLocal(t *testing.T, port *v1alpha1.XPUPort) string {
	t.Helper()
	mac, err := function.ParseMAC(port.Spec.MAC)
	if err != nil {
		t.Fatal(err)
	}
	return netaddr.LinkLocal(mac.HardwareAddr()).String()
}

// mayUse waits until the agent lets a Port send from these addresses.
func (c *cluster) mayUse(agent *opitest.Agent, port *v1alpha1.XPUPort, shared bool, want ...string) {
	c.Helper()
	slices.Sort(want)
	c.eventually("the agent knows the addresses of "+port.Name, func() error {
		got := agent.Addresses(port.Status.BridgePort)
		if slices.Sort(got); !slices.Equal(got, want) {
			return fmt.Errorf("it knows %q, want %q", got, want)
		}
		if agent.Shared(port.Status.BridgePort) != shared {
			return fmt.Errorf("shared is %t", !shared)
		}
		return nil
	})
}

// TestBondInNetwork checks that the ports of a bond have the same addresses and MAC addresses of
// their own, that each may send from the link-local addresses of both, and what is left when one of
// them goes.
func TestBondInNetwork(t *testing.T) {
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	agent.Set(func(b *opitest.Behaviour) { b.Options = true })
	c.xpu("card", agent)
	c.network("blue", 100, "10.1.0.0/24", "fd00::/64")
	c.pool("fast", "blue")

	o := c.claim(want{name: "a", pool: "fast", function: vf(0), config: bondConfig,
		second: secondFunction{pool: "fast", function: vf(1)}})
	left, right := c.up(o, vf(0)), c.up(o, vf(1))
	both := []string{"10.1.0.2/24", "fd00::2/64"}
	if !slices.Equal(left.Spec.Addresses, both) || !slices.Equal(right.Spec.Addresses, both) {
		t.Errorf("addresses %q and %q, want %q", left.Spec.Addresses, right.Spec.Addresses, both)
	}
	if left.Spec.MAC == right.Spec.MAC || left.Spec.Claim.Bond != "bond0" {
		t.Errorf("MAC addresses %s and %s, bond %q", left.Spec.MAC, right.Spec.MAC,
			left.Spec.Claim.Bond)
	}
	c.mayUse(agent, left, false, "10.1.0.2", "fd00::2", linkLocal(t, right))
	c.mayUse(agent, right, false, "10.1.0.2", "fd00::2", linkLocal(t, left))

	// The addresses are the bond's, also for a controller that has just started.
	c.stop()
	c.start(nil)
	other := c.claim(want{name: "b", pool: "fast", function: vf(2)})
	if got := c.up(other, vf(2)).Spec.Addresses; !slices.Equal(got,
		[]string{"10.1.0.3/24", "fd00::3/64"}) {
		t.Errorf("the next Port has %q", got)
	}
	taken := c.claim(want{name: "c", pool: "fast", function: vf(3),
		config: `{"addresses":["10.1.0.2/24"]}`})
	c.claimReason(taken, v1alpha1.ConditionProvisioned, v1alpha1.ReasonConflict, "10.1.0.2")

	// A Port that somebody deletes comes back with the addresses of the bond.
	c.delete(left)
	c.gone(left)
	if left = c.up(o, vf(0)); !slices.Equal(left.Spec.Addresses, both) {
		t.Errorf("the Port came back with %q", left.Spec.Addresses)
	}
	c.mayUse(agent, right, false, "10.1.0.2", "fd00::2", linkLocal(t, left))

	c.deallocate(o)
	c.gone(left)
	c.gone(right)
	c.up(taken, vf(3))
}

// TestBondOfTwoXPUs checks that frames with the addresses of a bond may come from the other xPU.
func TestBondOfTwoXPUs(t *testing.T) {
	c := newCluster(t, nil)
	agents := map[pci.Address]*opitest.Agent{testPF: opitest.Start(t), secondPF: opitest.Start(t)}
	for pf, agent := range agents {
		agent.Set(func(b *opitest.Behaviour) { b.Options = true })
		x := c.xpu("card-"+string(pf[len(pf)-1:]), agent)
		c.change(x, func() { x.Spec.PFs = []string{string(pf)} })
	}
	c.network("blue", 100, "10.1.0.0/24")
	c.pool("fast", "blue")

	second := function.ID{Address: "0000:3b:12.0"}
	o := c.claim(want{name: "a", pool: "fast", function: vf(0), config: bondConfig,
		second: secondFunction{pool: "fast", pf: secondPF, function: second}})
	left, right := c.up(o, vf(0)), c.up(o, second)
	c.mayUse(agents[testPF], left, true, "10.1.0.2", linkLocal(t, right))
	c.mayUse(agents[secondPF], right, true, "10.1.0.2", linkLocal(t, left))
}

// TestBondRefused checks what a bond in a network cannot be.
func TestBondRefused(t *testing.T) {
	c := newCluster(t, nil)
	c.xpu("card", opitest.Start(t))
	c.network("blue", 100, "10.1.0.0/24")
	c.network("red", 200, "10.2.0.0/24")
	c.pool("fast", "blue")
	c.pool("slow", "red")

	for name, w := range map[string]want{
		"must be active-backup": {config: `{"bond":{"name":"bond0","mode":"802.3ad"}}`},
		"request nic joins network blue, and request nic joins network red": {
			config: bondConfig, second: secondFunction{pool: "slow", function: vf(1)},
		},
	} {
		w.name, w.pool, w.function = "a", "fast", vf(0)
		o := c.claim(w)
		c.eventually(name, func() error {
			if err := c.get(o); err != nil {
				return err
			}
			if len(o.Status.Devices) == 0 {
				return fmt.Errorf("no status")
			}
			return hasReason(o.Status.Devices[0].Conditions, v1alpha1.ConditionProvisioned,
				v1alpha1.ReasonInvalidConfig, name)
		})
		c.delete(o)
		c.gone(o)
	}
}
