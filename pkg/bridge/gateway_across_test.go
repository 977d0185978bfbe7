// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/sourcefilter"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// underlays are the addresses of two xPUs.
var underlays = map[string][2]string{
	"IPv4": {"198.51.100.1/24", "198.51.100.2/24"},
	"IPv6": {"2001:db8:5::1/64", "2001:db8:5::2/64"},
}

// twoRouters starts two xPUs that both have the gateways of net-blue and net-red in vrf-one.
func twoRouters(t *testing.T, mode plane.Mode, underlay [2]string) (a, b router) {
	t.Helper()
	a, b = router{newXPU(t, mode, "p0")}, router{newXPU(t, mode, "p0")}
	netns.Connect(t, a.Namespace, "p0", b.Namespace, "p0")
	for i, r := range []router{a, b} {
		addAddress(t, r.Namespace, "p0", underlay[i])
		r.forwardIPv6("1")
		r.start()
		r.network("net-blue", 10, 1000)
		r.network("net-red", 20, 2000)
		r.vrf("vrf-one")
		r.svi("net-blue", "vrf-one", "10.1.0.1/24", "fd00:1::1/64")
		r.svi("net-red", "vrf-one", "10.2.0.1/24", "fd00:2::1/64")
	}
	return a, b
}

// testRoutesBetweenXPUs checks that hosts of two networks reach each other if they are at two xPUs
// that both have the gateways, and that no host learns of the gateway from another xPU.
func testRoutesBetweenXPUs(t *testing.T, mode plane.Mode) {
	for version, underlay := range underlays {
		t.Run(version, func(t *testing.T) {
			a, b := twoRouters(t, mode, underlay)
			near, far := a.newHost(rep1, "net-blue", 1, 2), b.newHost(rep1, "net-red", 2, 2)
			near.reaches(t, far.v4, far.v6)
			far.reaches(t, near.v4, near.v6)
			for h, gateways := range map[*host][]netip.Addr{near: blueGateway, far: redGateway} {
				for _, gateway := range gateways {
					if mac := h.neighbor(t, gateway); !bytes.Equal(mac, gatewayMAC) {
						t.Errorf("%s has %s at %s, not at %s", h.v4, gateway, mac, gatewayMAC)
					}
				}
			}

			b.network("net-green", 30, 3000)
			b.vrf("vrf-two")
			b.svi("net-green", "vrf-two", "10.3.0.1/24", "fd00:3::1/64")
			green := b.newHost(rep2, "net-green", 3, 2)
			near.reachesNot(t, green.v4, green.v6)
			green.reachesNot(t, near.v4, near.v6, far.v4, far.v6)

			for _, r := range []router{a, b} {
				r.stop()
				r.start()
			}
			near.reaches(t, far.v4, far.v6)
		})
	}
}

// neighbor returns the MAC address that a host knows for an address.
func (h *host) neighbor(t *testing.T, of netip.Addr) net.HardwareAddr {
	t.Helper()
	eth0, err := h.Handle().LinkByName("eth0")
	must.Succeed(t, err)
	neighbors, err := h.Handle().NeighList(eth0.Attrs().Index, netlink.FAMILY_ALL)
	must.Succeed(t, err)
	for _, n := range neighbors {
		if n.IP.String() == of.String() {
			return n.HardwareAddr
		}
	}
	return nil
}

// testRouterMoves checks that the gateways of an xPU reach other xPUs after the xPU's address in the
// underlay has changed, although the VXLAN ports are the same ones.
func testRouterMoves(t *testing.T, mode plane.Mode) {
	a, b := twoRouters(t, mode, underlays["IPv4"])
	near, far := a.newHost(rep1, "net-blue", 1, 2), b.newHost(rep1, "net-red", 2, 2)
	near.reaches(t, far.v4, far.v6)

	// The order of the addresses of an uplink does not matter.
	before := a.link("vx-net-blue").Attrs().Index
	addAddress(t, a.Namespace, "p0", "198.51.100.11/24")
	far.reaches(t, near.v4, near.v6)

	old, err := netlink.ParseAddr("198.51.100.1/24")
	must.Succeed(t, err)
	must.Succeed(t, a.Handle().AddrDel(a.link("p0"), old))
	addAddress(t, a.Namespace, "p0", "198.51.100.11/24")
	router := sourcefilter.RouterMAC(netip.MustParseAddr("198.51.100.11"))
	must.Eventually(t, "the gateway has the new address", func() bool {
		addresses, err := a.Handle().AddrList(a.link(a.sviNetdev("net-blue")), netlink.FAMILY_V6)
		return err == nil && slices.ContainsFunc(addresses, func(have netlink.Addr) bool {
			return have.IP.String() == netaddr.LinkLocal(router).String()
		})
	})
	if now := a.link("vx-net-blue").Attrs().Index; now != before {
		t.Errorf("the VXLAN port is another one")
	}

	near.reaches(t, far.v4, far.v6)
	far.reaches(t, near.v4, near.v6)
}

// testRouterIsNotClaimed checks that no host, whatever its source filter, can pretend to be the
// gateway of another xPU or of its own one.
func testRouterIsNotClaimed(t *testing.T, mode plane.Mode) {
	a, b := twoRouters(t, mode, underlays["IPv4"])
	near, far := a.newHost(rep1, "net-blue", 1, 2), b.newHost(rep1, "net-red", 2, 2)
	attacker, other := b.newHost(rep2, "net-red", 2, 3), a.newHost(rep2, "net-red", 2, 4)
	near.reaches(t, far.v4, far.v6)
	attacker.reaches(t, other.v4, other.v6)
	must.Succeed(t, b.client.EnsureNetwork(b.ctx(), opi.Network{
		ID: "net-red", VLAN: 20, VNI: new(uint32(2000)), SourceFilter: opi.SourceFilterNone,
	}))

	victims := map[*host]*capture{}
	for _, h := range []*host{far, other} {
		victims[h] = h.captureType(t, unix.ETH_P_ALL)
	}

	test := bytes.Repeat([]byte("attack"), 10)
	for _, vtep := range []string{"198.51.100.1", "198.51.100.2", "198.51.100.3"} {
		mac := sourcefilter.RouterMAC(netip.MustParseAddr(vtep))
		linkLocal := netaddr.LinkLocal(mac)
		attacker.send(t, broadcast, mac, etherTypeTest, test)
		attacker.send(t, broadcast, mac, unix.ETH_P_ARP, arp(mac, redGateway[0].AsSlice()))
		attacker.send(t, broadcast, mac, unix.ETH_P_ARP, arp(mac, far.v4.AsSlice()))
		attacker.send(t, broadcast, attacker.mac, unix.ETH_P_IPV6,
			neighborAdvertisement(t, attacker.v6, linkLocal, attacker.mac))
		attacker.send(t, broadcast, attacker.mac, unix.ETH_P_IPV6,
			neighborAdvertisement(t, linkLocal, attacker.v6, attacker.mac))
	}
	for i, gateway := range redGateway {
		claim := arp(attacker.mac, gateway.AsSlice())
		etherType := uint16(unix.ETH_P_ARP)
		if i > 0 {
			claim = neighborAdvertisement(t, attacker.v6, gateway, attacker.mac)
			etherType = unix.ETH_P_IPV6
		}
		attacker.send(t, broadcast, attacker.mac, etherType, claim)
		attacker.send(t, broadcast, gatewayMAC, etherType, claim)
	}
	attacker.send(t, broadcast, gatewayMAC, etherTypeTest, test)

	end := strings.Repeat("the end ", 10)
	attacker.send(t, broadcast, attacker.mac, etherTypeTest, []byte(end))
	router := sourcefilter.RouterMAC(netip.MustParseAddr("198.51.100.3"))
	for h, c := range victims {
		for got := ""; got != end; {
			got = c.next()
			linkLocal := string(netaddr.LinkLocal(router).AsSlice()[:10])
			claims := strings.Contains(got, string(attacker.mac)) &&
				(strings.Contains(got, string(redGateway[1].AsSlice())) ||
					strings.HasPrefix(got, "\x00\x01\x08\x00") &&
						strings.Contains(got, string(redGateway[0].AsSlice())))
			if got == string(test) || claims || strings.Contains(got, linkLocal) &&
				strings.Contains(got, string(attacker.v6.AsSlice())) {
				t.Errorf("%s receives %x", h.v4, got)
			}
		}
	}

	near.reaches(t, far.v4, far.v6, other.v4, other.v6)
	far.reaches(t, near.v4, near.v6)
}
