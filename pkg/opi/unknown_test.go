// SPDX-License-Identifier: Apache-2.0

package opi_test

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

// startV02 returns an agent that behaves like opi-evpn-bridge v0.2.0, with the network net-blue and
// port1, and a client.
func startV02(t *testing.T) (*opitest.Agent, *opi.Client) {
	t.Helper()
	a := opitest.Start(t)
	a.Set(func(b *opitest.Behaviour) { b.V02 = true })
	c := dial(t, a.Config())
	ok(t, c.EnsureNetwork(t.Context(), blue))
	ok(t, c.EnsurePort(t.Context(), port1))
	return a, c
}

// expectUntouched fails the test unless the agent still has port1 and has received no changing call
// since.
func expectUntouched(t *testing.T, a *opitest.Agent, before int) {
	t.Helper()
	if got := a.Ports(); !slices.Contains(got, port1.ID) {
		t.Errorf("the agent has the ports %q, want %s among them", got, port1.ID)
	}
	if changes := changes(a); changes != before {
		t.Errorf("%d calls that change something", changes-before)
	}
}

func changes(a *opitest.Agent) int {
	return a.Calls("CreateBridgePort") + a.Calls("UpdateBridgePort") + a.Calls("DeleteBridgePort")
}

// TestUnknownIsNotGone checks that a port with an unknown owner is neither gone, nor another
// owner's, nor correct.
func TestUnknownIsNotGone(t *testing.T) {
	tests := map[string]func(a *opitest.Agent){
		"not listed after a restart": func(a *opitest.Agent) {
			a.Kill()
			ok(t, a.Run())
		},
		"no list": func(a *opitest.Agent) {
			a.Set(func(b *opitest.Behaviour) { b.Unimplemented = []string{"ListBridgePorts"} })
		},
		"nothing in Get": func(a *opitest.Agent) {
			a.Set(func(b *opitest.Behaviour) { b.V02, b.Blind = false, true })
		},
		"no netdev after a restart": func(a *opitest.Agent) {
			a.Kill()
			ok(t, a.Run())
			a.Set(func(b *opitest.Behaviour) {
				b.Realise = func(string) error { return errors.New("no representor") }
			})
		},
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			a, c := startV02(t)
			change(a)
			waitForAnswer(t, c)
			before := changes(a)
			wantError(t, c.DeletePort(t.Context(), port1.ID), opi.ErrUnknown, port1.ID, "the agent")
			wantError(t, c.EnsurePort(t.Context(), port1), opi.ErrUnknown)
			_, err := c.GetPort(t.Context(), port1.ID)
			wantError(t, err, opi.ErrUnknown)
			expectUntouched(t, a, before)
		})
	}
}

// waitForAnswer waits until the agent, which may have been restarted, answers.
func waitForAnswer(t *testing.T, c *opi.Client) {
	t.Helper()
	ctx := within(t, 20*time.Second)
	for err := c.Check(ctx); err != nil; err = c.Check(ctx) {
		if ctx.Err() != nil {
			t.Fatal(err)
		}
	}
}

// TestListsThatAreNotEmpty checks that an agent's NotFound for a list means an empty list only
// before its first object.
func TestListsThatAreNotEmpty(t *testing.T) {
	a, c := start(t)
	for i := range 300 {
		id, err := opi.PortID(subfunction(i))
		ok(t, err)
		p := opi.Port{
			ID: id, MAC: []byte{2, 0, 0, 0, byte(i >> 8), byte(i)}, Networks: port1.Networks,
		}
		ok(t, c.EnsurePort(t.Context(), p))
	}

	t.Run("first page", func(t *testing.T) {
		a.FailNext("ListBridgePorts", 1, codes.NotFound,
			"unable to find key //network.opiproject.org/ports/"+port1.ID)
		_, err := c.ListPorts(t.Context())
		wantError(t, err, opi.ErrFailed, "has lost one", port1.ID)
	})

	t.Run("later page", func(t *testing.T) {
		a.Set(func(b *opitest.Behaviour) { b.ForgetPages = true })
		_, err := c.ListPorts(t.Context())
		wantError(t, err, opi.ErrUnavailable, "forgot the page token")
	})
}

// TestPortWithoutNetdev checks that the NotFound of v0.2.0 for a port whose netdev is missing does
// not mean that the port is gone.
func TestPortWithoutNetdev(t *testing.T) {
	a, c := startV02(t)
	a.Set(func(b *opitest.Behaviour) {
		b.Realise = func(string) error { return errors.New("no representor") }
	})
	wantError(t, c.DeletePort(t.Context(), port1.ID), opi.ErrFailed, "cannot delete it",
		"netdev that is missing")
	wantError(t, c.EnsurePort(t.Context(), port1), opi.ErrFailed, "netdev that is missing")
	wantError(t, c.EnsurePort(t.Context(), port2), opi.ErrFailed, "netdev that is missing")
	a.Set(func(b *opitest.Behaviour) { b.Realise = nil })
	ok(t, c.DeletePort(t.Context(), port1.ID))
	if got := a.Ports(); len(got) != 0 {
		t.Errorf("the agent has the ports %q", got)
	}
}

// TestPortThatCannotBeDeleted checks a port that v0.2.0 keeps reporting as up.
func TestPortThatCannotBeDeleted(t *testing.T) {
	a, c := startV02(t)
	a.Set(func(b *opitest.Behaviour) { b.StuckDelete = true })
	wantError(t, c.DeletePort(t.Context(), port1.ID), opi.ErrFailed, "operation not supported")
}

// TestPortWhoseNetworkIsGone checks a port whose network was deleted, which v0.2.0 allows.
func TestPortWhoseNetworkIsGone(t *testing.T) {
	a, c := startV02(t)
	a.LoseNetwork(blue.ID)
	wantError(t, c.DeletePort(t.Context(), port1.ID), opi.ErrFailed, blue.ID)
}

// TestVNIOfV02 checks that v0.2.0 gets a VTEP with a VNI, because its process ends without one. It
// checks that later versions and opi-bridge get none, because they would use it, although opi-bridge
// has no VRF of its own either.
func TestVNIOfV02(t *testing.T) {
	vni := uint32(100)
	for name, behaviour := range map[string]opitest.Behaviour{
		"v0.2.0": {V02: true}, "later": {}, "opi-bridge": {Options: true},
	} {
		a := opitest.Start(t)
		a.Set(func(b *opitest.Behaviour) { *b = behaviour })
		c := dial(t, a.Config())
		ok(t, c.EnsureNetwork(t.Context(), opi.Network{ID: "net-vni", VLAN: 30, VNI: &vni}))
		if sent := a.SentVTEP("net-vni"); (sent != nil) != behaviour.V02 {
			t.Errorf("%s: the VTEP %v was sent", name, sent)
		}
	}
}

// TestVTEP checks that every agent gets the VTEP of its xPU with a VNI, and only with a VNI.
func TestVTEP(t *testing.T) {
	vni := uint32(100)
	for _, v02 := range []bool{true, false} {
		for address, want := range map[string]*netcommon.IPPrefix{
			"198.51.100.1": {Len: 32, Addr: &netcommon.IPAddress{
				Af:     netcommon.IpAf_IP_AF_INET,
				V4OrV6: &netcommon.IPAddress_V4Addr{V4Addr: 198<<24 | 51<<16 | 100<<8 | 1},
			}},
			"2001:db8::1": {Len: 128, Addr: &netcommon.IPAddress{
				Af: netcommon.IpAf_IP_AF_INET6, V4OrV6: &netcommon.IPAddress_V6Addr{
					V6Addr: []byte{0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1},
				},
			}},
		} {
			a := opitest.Start(t)
			a.Set(func(b *opitest.Behaviour) { b.V02 = v02 })
			config := a.Config()
			config.VTEP = netip.MustParseAddr(address)
			c := dial(t, config)
			ok(t, c.EnsureNetwork(t.Context(), opi.Network{ID: "net-vni", VLAN: 30, VNI: &vni}))
			ok(t, c.EnsureNetwork(t.Context(), opi.Network{ID: "net-flat", VLAN: 31}))

			if sent := a.SentVTEP("net-vni"); !proto.Equal(sent, want) {
				t.Errorf("v0.2.0 %t: %s was sent as %v", v02, address, sent)
			}
			if sent := a.SentVTEP("net-flat"); sent != nil {
				t.Errorf("v0.2.0 %t: %v was sent without a VNI", v02, sent)
			}
		}
	}
}

// TestOtherReleaseAfterRestart checks that knowledge about an agent's abilities ends with the
// connection.
func TestOtherReleaseAfterRestart(t *testing.T) {
	a := opitest.Start(t)
	s, r := open(t, a.Config(), time.Minute)
	r.waitFor(t, s, "answering", answers)
	ok(t, s.EnsurePort(t.Context(), port1, blue))
	a.Stop()
	r.waitFor(t, s, "down", func(h opi.Health) bool { return !h.Connected })
	a.Set(func(b *opitest.Behaviour) { b.V02 = true })
	ok(t, a.Run())
	r.waitFor(t, s, "answering", answers)
	twin := port2
	twin.MAC = port1.MAC
	ok(t, s.EnsureNetwork(t.Context(), blue))
	// the Get calls of another client teach this one nothing
	ok(t, dial(t, a.Config()).EnsurePort(t.Context(), port1))
	wantError(t, s.EnsurePort(t.Context(), twin, blue), opi.ErrConflict, port1.ID)
}
