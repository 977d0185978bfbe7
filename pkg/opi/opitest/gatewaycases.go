// SPDX-License-Identifier: Apache-2.0

package opitest

import (
	"net"
	"net/netip"
	"slices"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// routed returns a network with a gateway in a VRF. The installation is that of the ids.
func routed(id string, vlan uint16, vrf string, prefixes ...string) opi.Network {
	n := opi.Network{ID: id, VLAN: vlan, Gateway: &opi.Gateway{
		VRF: vrf, MAC: net.HardwareAddr{0x12, 1, 0, 0, 0, 1},
	}}
	for _, p := range prefixes {
		n.Gateway.Prefixes = append(n.Gateway.Prefixes, netip.MustParsePrefix(p))
	}
	return n
}

// hasRouted fails the test unless the agent has exactly these networks with gateways, up, and their
// VRFs.
func (s suite) hasRouted(want ...opi.Network) {
	s.Helper()
	vrfs, gateways, err := s.client.ListGateways(s.ctx)
	s.ok(err)

	wanted := map[string]bool{}
	for _, n := range want {
		wanted[n.Gateway.VRF] = true
		if !opi.NewRouting(vrfs, gateways).Serves(n.ID, *n.Gateway) {
			s.Errorf("network %s is not routed as wanted: VRFs %+v, gateways %+v", n.ID, vrfs,
				gateways)
		}
	}

	if len(gateways) != len(want) {
		s.Errorf("%d gateways, want %d: %+v", len(gateways), len(want), gateways)
	}
	for _, v := range vrfs {
		ours := Installation.Owns(v.ID) || opi.Installation("other").Owns(v.ID)
		if ours && !wanted[v.ID] {
			s.Errorf("VRF %s is left behind", v.ID)
		}
	}
}

// gatewayCases are the cases of agents with gateways.
func gatewayCases() []clientCase {
	blue := routed("net-blue", 10, "net-vrf", "10.1.0.1/24")
	red := routed("net-red", 20, "net-vrf", "10.2.0.1/24")
	return []clientCase{
		{name: "gateway is made once", needs: gateways, run: func(s suite) {
			s.ok(s.client.EnsureNetwork(s.ctx, blue))
			s.ok(s.client.EnsureNetwork(s.ctx, blue))
			s.ok(s.client.EnsureNetwork(s.ctx, red))
			s.hasRouted(blue, red)
		}},
		{name: "gateway changes its address and VRF", needs: gateways, run: func(s suite) {
			s.ok(s.client.EnsureNetwork(s.ctx, blue))
			changed := routed("net-blue", 10, "net-two", "10.3.0.254/25")
			s.ok(s.client.EnsureNetwork(s.ctx, red))
			s.ok(s.client.EnsureNetwork(s.ctx, changed))
			s.hasRouted(changed, red)
		}},
		{name: "gateway goes with its network", needs: gateways, run: func(s suite) {
			s.ok(s.client.EnsureNetwork(s.ctx, blue))
			s.ok(s.client.EnsureNetwork(s.ctx, red))
			s.ok(s.client.DeleteNetwork(s.ctx, blue.ID))
			s.hasRouted(red)
			s.ok(s.client.DeleteNetwork(s.ctx, blue.ID))
			s.ok(s.client.DeleteNetwork(s.ctx, red.ID))
			s.hasRouted()
		}},
		{name: "gateway of a network in use stays", ports: 1, needs: gateways,
			run: func(s suite) {
				s.ok(s.client.EnsureNetwork(s.ctx, blue))
				s.ok(s.client.EnsurePort(s.ctx, s.port(0)))
				s.is(s.client.DeleteNetwork(s.ctx, blue.ID), opi.ErrInUse)
				s.hasRouted(blue)
				s.ok(s.client.DeletePort(s.ctx, s.ports[0]))
				s.ok(s.client.DeleteNetwork(s.ctx, blue.ID))
				s.hasRouted()
			}},
		{name: "gateway is deleted alone", needs: gateways, run: func(s suite) {
			s.ok(s.client.EnsureNetwork(s.ctx, blue))
			s.is(s.client.DeleteVRF(s.ctx, blue.Gateway.VRF), opi.ErrInUse)
			s.ok(s.client.DeleteGateway(s.ctx, opi.GatewayID(blue.ID)))
			s.ok(s.client.DeleteVRF(s.ctx, blue.Gateway.VRF))
			s.hasRouted()
			got, err := s.client.ListNetworks(s.ctx)
			s.ok(err)
			if !slices.ContainsFunc(got, func(n opi.NetworkStatus) bool { return n.ID == blue.ID }) {
				s.Error("the network is gone too")
			}
		}},
		{name: "another installation's gateway stays", needs: gateways, run: func(s suite) {
			theirs := routed("other-red", 20, "other-vrf", "10.1.0.1/24")
			s.ok(s.other.EnsureNetwork(s.ctx, theirs))
			s.is(s.client.EnsureNetwork(s.ctx,
				routed("net-blue", 10, "other-vrf", "10.9.0.1/24")), opi.ErrInvalid)
			s.ok(s.client.DeleteGateway(s.ctx, opi.GatewayID(theirs.ID)))
			s.ok(s.client.DeleteVRF(s.ctx, theirs.Gateway.VRF))
			s.ok(s.client.EnsureNetwork(s.ctx, blue))
			s.ok(s.client.DeleteNetwork(s.ctx, blue.ID))
			s.hasRouted(theirs)
		}},
	}
}
