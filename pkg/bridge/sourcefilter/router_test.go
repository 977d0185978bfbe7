// SPDX-License-Identifier: Apache-2.0

package sourcefilter_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/sourcefilter"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

var (
	gatewayMAC = net.HardwareAddr{0x12, 0, 0, 0, 0, 1}
	gateway4   = netip.MustParseAddr("192.0.2.254")
	gateway6   = netip.MustParseAddr("2001:db8::fe")
)

// TestRouterMAC checks that machines have different router MAC addresses.
func TestRouterMAC(t *testing.T) {
	for vtep, want := range map[string]string{
		"198.51.100.1":  "72:74:c6:33:64:01",
		"10.0.0.255":    "72:74:0a:00:00:ff",
		"2001:db8:5::1": "72:74:a6:99:c0:5c",
		"2001:db8:5::2": "72:74:12:d7:e4:f3",
	} {
		got := sourcefilter.RouterMAC(netip.MustParseAddr(vtep))
		if got.String() != want || !sourcefilter.IsRouterMAC(got) {
			t.Errorf("of VTEP %s: got %s, want %s", vtep, got, want)
		}
	}
	if sourcefilter.IsRouterMAC(podMAC) {
		t.Errorf("%s is a router's", podMAC)
	}
}

// TestRouter checks how a gateway appears at other machines, and what they may send it.
func TestRouter(t *testing.T) {
	l := newLab(t)
	machine := l.bridge(gatewayMAC)
	gateway := sourcefilter.Gateway{
		Index: 1000, VRF: 1001, MAC: gatewayMAC, Addresses: []netip.Addr{gateway4, gateway6},
	}
	vteps := []string{"198.51.100.1", "198.51.100.2"}
	for i, vtep := range vteps {
		if i > 0 {
			l.open() // another agent, and the machine has another address
		}
		router := sourcefilter.RouterMAC(netip.MustParseAddr(vtep))
		must.Succeed(t, l.filter.SetVXLAN("blue", sourcefilter.VXLAN{
			Index: l.remote.port, Router: router,
		}))
		must.Succeed(t, l.filter.SetGateway("blue", gateway))
		must.Succeed(t, l.filter.SetPort(sourcefilter.Port{
			Index: l.pod.port, Networks: []string{"blue"},
		}))
		must.Succeed(t, l.filter.Sweep())

		linkLocal := netaddr.LinkLocal(router)
		for name, test := range map[string]struct{ sent, received []byte }{
			"ARP request": {
				ethernet(gatewayMAC, unix.ETH_P_ARP, arp(1, gatewayMAC, gateway4)),
				ethernet(router, unix.ETH_P_ARP, arp(1, router, unspecified4)),
			},
			"ARP reply": {
				ethernet(gatewayMAC, unix.ETH_P_ARP, arp(2, gatewayMAC, gateway4)),
				ethernet(router, unix.ETH_P_ARP, arp(2, router, gateway4)),
			},
			"solicitation": {
				ethernet(gatewayMAC, unix.ETH_P_IPV6,
					checked(discovery(gateway6, 135, pod6, option(1, gatewayMAC)...))),
				ethernet(router, unix.ETH_P_IPV6,
					checked(discovery(linkLocal, 135, pod6, option(1, router)...))),
			},
			"solicitation without the MAC address": {
				ethernet(gatewayMAC, unix.ETH_P_IPV6, checked(discovery(gateway6, 135, pod6))),
				ethernet(router, unix.ETH_P_IPV6, checked(discovery(linkLocal, 135, pod6))),
			},
			"duplicate address detection": {
				ethernet(gatewayMAC, unix.ETH_P_IPV6, checked(discovery(unspecified6, 135, pod6))),
				ethernet(router, unix.ETH_P_IPV6, checked(discovery(unspecified6, 135, pod6))),
			},
			"advertisement": {
				ethernet(gatewayMAC, unix.ETH_P_IPV6,
					checked(discovery(gateway6, 136, gateway6, option(2, gatewayMAC)...))),
				ethernet(router, unix.ETH_P_IPV6,
					checked(discovery(gateway6, 136, gateway6, option(2, router)...))),
			},
			"IPv4": {
				ethernet(gatewayMAC, unix.ETH_P_IP, ipv4(pod4)),
				ethernet(router, unix.ETH_P_IP, ipv4(pod4)),
			},
		} {
			machine.send(test.sent)
			if diff := cmp.Diff(test.received, l.remote.next(test.received)); diff != "" {
				t.Errorf("%s at other machines (-want +got):\n%s", name, diff)
			}
		}

		// A frame to the router reaches the gateway, and is one for the machine itself.
		frame := ethernet(otherMAC, unix.ETH_P_IP, ipv4(other4))
		copy(frame, router)
		l.remote.send(frame)
		copy(frame, gatewayMAC)
		if got := machine.next(frame); !bytes.Equal(got, frame) {
			t.Errorf("the gateway receives %x, want %x", got, frame)
		}

		if l.passes(l.remote, ethernet(router, etherTypeTest, nil)) {
			t.Error("a frame passes from another machine that pretends to be this one")
		}
	}

	// Neither the router of this machine nor one of another machine can be a port.
	for _, vtep := range append(vteps, "198.51.100.3") {
		router := sourcefilter.RouterMAC(netip.MustParseAddr(vtep))
		linkLocal := netaddr.LinkLocal(router)
		for what, frame := range map[string][]byte{
			"its MAC address": ethernet(router, etherTypeTest, nil),
			"its link-local address": ethernet(podMAC, unix.ETH_P_IPV6,
				ipv6(linkLocal, unix.IPPROTO_UDP, make([]byte, 8))),
			"a claim": ethernet(podMAC, unix.ETH_P_IPV6,
				discovery(pod6, 136, linkLocal, option(2, podMAC)...)),
		} {
			if l.passes(l.pod, frame) {
				t.Errorf("from a port a frame with %s of router %s passes", what, router)
			}
		}
	}

	other := ethernet(sourcefilter.RouterMAC(netip.MustParseAddr("198.51.100.3")), etherTypeTest, nil)
	if !l.passes(l.remote, other) {
		t.Error("a frame of another machine's router does not pass")
	}
}

// bridge returns the machine itself as a station, after it has given the bridge a MAC address.
func (l *lab) bridge(mac net.HardwareAddr) *station {
	l.t.Helper()
	bridge, err := l.Handle().LinkByName("br0")
	must.Succeed(l.t, err)
	must.Succeed(l.t, l.Handle().LinkSetHardwareAddr(bridge, mac))
	return l.listen(l.Namespace, bridge.Attrs().Index)
}

// next returns the next frame with the MAC addresses of another one that a station receives. The
// kernel sends other frames by itself.
func (s *station) next(like []byte) []byte {
	s.t.Helper()
	for {
		buffer := make([]byte, 2000)
		n, sender, err := unix.Recvfrom(s.socket, buffer, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		must.Succeed(s.t, err)
		link, ok := sender.(*unix.SockaddrLinklayer)
		if ok && link.Pkttype != unix.PACKET_OUTGOING && slices.Equal(buffer[:12], like[:12]) {
			return buffer[:n]
		}
	}
}

// checked returns a packet of ICMPv6 with the right checksum (RFC 4443, section 2.3).
func checked(packet []byte) []byte {
	packet = slices.Clone(packet)
	message := packet[40:]
	pseudo := slices.Concat(packet[8:40], []byte{0, 0, 0, byte(len(message)), 0, 0, 0, 58}, message)
	sum := uint32(0)
	for i := 0; i < len(pseudo); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(pseudo[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(message[2:], ^uint16(sum))
	return packet
}
