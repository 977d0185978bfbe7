// SPDX-License-Identifier: Apache-2.0

package opi_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/evpngw"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// trunk1 is port1 as a trunk.
func trunk1(networks ...string) opi.Port {
	return opi.Port{ID: port1.ID, MAC: port1.MAC, Networks: networks, Trunk: true}
}

func manyNetworks(n int) (ids []string) {
	for i := range n {
		ids = append(ids, fmt.Sprintf("net-%d", i))
	}
	return ids
}

// TestTrunkWithManyNetworks checks that all networks are compared, up to the limit.
func TestTrunkWithManyNetworks(t *testing.T) {
	a, c := start(t)
	ids := manyNetworks(opi.MaxNetworks)
	for i, id := range ids {
		must.Succeed(t, c.EnsureNetwork(t.Context(), opi.Network{ID: id, VLAN: uint16(100 + i)}))
	}

	trunk := trunk1(ids...)
	must.Succeed(t, c.EnsurePort(t.Context(), trunk))
	must.Succeed(t, c.EnsurePort(t.Context(), trunk))
	if n := a.Calls("CreateBridgePort"); n != 1 {
		t.Errorf("the port was made %d times, want once", n)
	}
	if got, err := c.GetPort(t.Context(), trunk.ID); err != nil || !got.Equal(trunk) {
		t.Errorf("got %v, %v", got, err)
	}
}

// TestTrunkLacksNetwork checks that a trunk is not up while the agent reports it without one of its
// networks.
func TestTrunkLacksNetwork(t *testing.T) {
	a, c := start(t)
	must.Succeed(t, c.EnsureNetwork(t.Context(), red))
	trunk := trunk1("net-blue", "net-red")
	a.Set(func(b *opitest.Behaviour) { b.LeavesOut = "net-red" })
	wantError(t, c.EnsurePort(t.Context(), trunk), opi.ErrConflict, "networks [net-blue]")

	a.Set(func(b *opitest.Behaviour) { b.LeavesOut = "" })
	must.Succeed(t, c.EnsurePort(t.Context(), trunk))
	if got, err := c.GetPort(t.Context(), trunk.ID); err != nil || !got.Equal(trunk) {
		t.Errorf("got %v, %v", got, err)
	}
}

// TestAgentWithoutTrunks checks what an agent that turns out to have no trunks leads to.
func TestAgentWithoutTrunks(t *testing.T) {
	a, c := start(t)
	a.FailNext("CreateBridgePort", 1, codes.Unimplemented, "ptype TRUNK: needs another mode")
	err := c.EnsurePort(t.Context(), trunk1("net-blue"))
	wantError(t, err, opi.ErrNoTrunks, "needs another mode", "--data-plane vlan-aware",
		"name one network")
}

// TestDialectWithoutTrunks checks that nothing is sent to agents of a dialect without trunks.
func TestDialectWithoutTrunks(t *testing.T) {
	a := opitest.Start(t)
	cfg := a.Config()
	cfg.Dialect = evpngw.E2000()
	session, err := opi.NewSession(cfg, opi.SessionOptions{Failed: func(string, error) {}})
	must.Succeed(t, err)
	err = session.EnsurePort(t.Context(), trunk1("net-blue"), blue)
	wantError(t, err, opi.ErrNoTrunks, "dialect")
	if a.Calls("CreateLogicalBridge")+a.Calls("CreateBridgePort") != 0 {
		t.Error("the agent was asked for a network or a port")
	}
}

// TestTrunkAddressesAreSent checks that the agent gets the addresses of each network, and that an
// agent that knows one list for the whole port gets one that restricts no network too much.
func TestTrunkAddressesAreSent(t *testing.T) {
	a, c := startWithOptions(t)
	must.Succeed(t, c.EnsureNetwork(t.Context(), red))
	one, two := netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("10.2.0.2")

	for what, test := range map[string]struct {
		addresses map[string][]netip.Addr
		all       []string
	}{
		"one each": {
			map[string][]netip.Addr{"net-blue": {one}, "net-red": {two}},
			[]string{"10.1.0.2", "10.2.0.2"},
		},
		"any in one network": {map[string][]netip.Addr{"net-blue": {one}}, nil},
	} {
		trunk := trunk1("net-blue", "net-red")
		trunk.AddressesIn = test.addresses
		must.Succeed(t, c.EnsurePort(t.Context(), trunk))
		if got := a.Addresses(trunk.ID); !slices.Equal(got, test.all) {
			t.Errorf("%s: addresses of the port %q, want %q", what, got, test.all)
		}

		got := a.AddressesIn(trunk.ID)
		for _, id := range trunk.Networks {
			var want []string
			for _, address := range test.addresses[id] {
				want = append(want, address.String())
			}
			if has, sent := got[id]; !sent || !slices.Equal(has, want) {
				t.Errorf("%s: addresses in %s %q, sent %t, want %q", what, id, has, sent, want)
			}
		}
	}
}
