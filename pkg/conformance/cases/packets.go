// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
)

// pod is a port that is up, and its interface.
type pod struct {
	conformance.Object
	mac  net.HardwareAddr
	wire conformance.Wire
}

var broadcast = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// haveAccess makes a pod with an ACCESS port.
func haveAccess(t *T, network string) *pod {
	return havePod(t, func(p conformance.Port) *evpn.BridgePortSpec {
		return conformance.Access(p.MAC, network)
	})
}

// haveTagged makes a pod with a TRUNK port.
func haveTagged(t *T, networks ...string) *pod {
	return havePod(t, func(p conformance.Port) *evpn.BridgePortSpec {
		return conformance.TrunkPort(p.MAC, networks...)
	})
}

func havePod(t *T, spec func(conformance.Port) *evpn.BridgePortSpec) *pod {
	t.NeedWires()
	port := t.Port()
	p := &pod{mac: port.MAC, wire: t.Wire(port)}
	p.Object = t.HaveAs(t.Kinds.BridgePort, port.ID, spec(port))
	t.Prepare(func() { t.WantUp(p.Kind, p.Name) })
	return p
}

// tag is the VLAN id of a frame on a wire. It is 0 for a frame without a VLAN tag.
type tag uint32

// untagged is the tag of frames without one.
const untagged tag = 0

// tagOf returns the tag that the frames of a logical bridge have at TRUNK ports.
func tagOf(t *T, network string) (vlan tag) {
	t.Prepare(func() {
		got, err := t.Get(t.Kinds.LogicalBridge, network)
		t.WantOK("Get", err)
		vlan = tag(conformance.SpecOf(got).(*evpn.LogicalBridgeSpec).GetVlanId())
	})
	return vlan
}

// The EtherTypes of frames of cases. IEEE 802 reserves typeTest for experiments.
const (
	typeTest = 0x88b5
	typeVLAN = 0x8100
	typeARP  = 0x0806
	typeIPv4 = 0x0800
)

// frame returns an Ethernet frame with at least the smallest size.
func frame(dst, src net.HardwareAddr, vlan tag, etherType uint16, payload []byte) []byte {
	f := slices.Concat(dst, src)
	if vlan != untagged {
		f = binary.BigEndian.AppendUint16(f, typeVLAN)
		f = binary.BigEndian.AppendUint16(f, uint16(vlan))
	}
	f = append(binary.BigEndian.AppendUint16(f, etherType), payload...)
	return append(f, make([]byte, max(0, 60-len(f)))...)
}

// parsed is a frame that has arrived.
type parsed struct {
	src       net.HardwareAddr
	vlan      tag
	etherType uint16
	payload   []byte
}

func parse(f []byte) (p parsed, ok bool) {
	if len(f) < 14 {
		return p, false
	}
	p.src, p.etherType, p.payload = f[6:12], binary.BigEndian.Uint16(f[12:]), f[14:]
	if p.etherType == typeVLAN && len(f) >= 18 {
		p.vlan = tag(binary.BigEndian.Uint16(f[14:]) & 0xfff)
		p.etherType, p.payload = binary.BigEndian.Uint16(f[16:]), f[18:]
	}
	return p, true
}

// test returns a frame from one pod to an address that no other frame is like, and a function that
// knows it again with any tag.
func test(t *T, from *pod, dst net.HardwareAddr, vlan tag) (
	sent []byte, is func(f []byte) (tag, bool),
) {
	token := []byte(t.NewID(t.Kinds.BridgePort))
	// What follows the token keeps a frame from being known by the token of a longer one.
	payload := append(token, '.')
	return frame(dst, from.mac, vlan, typeTest, payload), func(f []byte) (tag, bool) {
		p, ok := parse(f)
		return p.vlan, ok && p.etherType == typeTest && bytes.HasPrefix(p.payload, payload)
	}
}

// wantReach ends the case unless frames of one pod reach another one.
func wantReach(t *T, from, to *pod, dst net.HardwareAddr, sent, received tag) {
	f, is := test(t, from, dst, sent)
	heard := "nothing"
	if !t.Heard(from.wire, f, to.wire, func(f []byte) bool {
		vlan, ok := is(f)
		if ok {
			heard = "them " + vlan.describe()
		}
		return ok && vlan == received
	}) {
		t.Failf("%s hears %s of the frames to %s that %s sends %s, want them %s", to.ID, heard,
			dst, from.ID, sent.describe(), received.describe())
	}
}

// wantApart ends the case if frames of one pod reach another one.
func wantApart(t *T, from, to *pod, dst net.HardwareAddr, sent tag) {
	f, is := test(t, from, dst, sent)
	if !t.Unheard(from.wire, f, to.wire, func(f []byte) bool { _, ok := is(f); return ok }) {
		t.Failf("%s hears the frames to %s that %s sends %s, want nothing", to.ID, dst, from.ID,
			sent.describe())
	}
}

func (v tag) describe() string {
	if v == untagged {
		return "without a tag"
	}
	return fmt.Sprintf("with tag %d", v)
}

// packets are the cases about frames of ACCESS ports.
func packets(kinds conformance.Kinds) []Case {
	return slices.Concat(frames(), framesAfterChanges(kinds))
}

// frames are cases about the ports that frames reach.
func frames() []Case {
	return []Case{
		{
			Name: "frames-reach-the-port-of-their-address", Says: saysBridges,
			Violation: "Two pods of one network do not reach each other.",
			Run: func(t *T) {
				network := t.Network()
				a, b := haveAccess(t, network), haveAccess(t, network)
				wantReach(t, a, b, b.mac, untagged, untagged)
				wantReach(t, b, a, a.mac, untagged, untagged)
			},
		},
		{
			Name: "broadcasts-reach-the-ports-of-the-logical-bridge", Says: saysBridges,
			Violation: "Pods of one network find no addresses of each other.",
			Run: func(t *T) {
				network := t.Network()
				a, b, c := haveAccess(t, network), haveAccess(t, network), haveAccess(t, network)
				wantReach(t, a, b, broadcast, untagged, untagged)
				wantReach(t, a, c, broadcast, untagged, untagged)
			},
		},
		{
			Name: "frames-stay-in-their-logical-bridge", Says: saysBridges,
			Violation: "A pod reaches the pods of another network, which may be another tenant's.",
			Run: func(t *T) {
				network := t.Network()
				a, b, other := haveAccess(t, network), haveAccess(t, network),
					haveAccess(t, t.Network())
				t.Prepare(func() { wantReach(t, a, b, broadcast, untagged, untagged) })
				wantApart(t, a, other, broadcast, untagged)
				wantApart(t, a, other, other.mac, untagged)
			},
		},
		{
			Name: "tags-lead-to-no-other-logical-bridge", Says: saysAccess +
				" (IEEE 802.1Q: a port takes no frames of VLANs that it is not in.)",
			Violation: "A pod reaches the pods of another network by a tag of its own.",
			Run: func(t *T) {
				mine, theirs := t.Network(), t.Network()
				a, b, other := haveAccess(t, mine), haveAccess(t, mine), haveAccess(t, theirs)
				t.Prepare(func() { wantReach(t, a, b, broadcast, untagged, untagged) })
				wantApart(t, a, other, broadcast, tagOf(t, theirs))
			},
		},
	}
}

// framesAfterChanges are cases about frames of ports that are deleted or changed.
func framesAfterChanges(kinds conformance.Kinds) []Case {
	k := kinds.BridgePort
	return []Case{
		{
			Name: "deleted-port-passes-no-frames", Source: "AIP-135",
			Says: "The Delete method should succeed if and only if a resource was present and " +
				"was successfully deleted.",
			Violation: "A pod's Function stays in its network after the pod, for the next pod " +
				"that gets it.",
			Run: func(t *T) {
				network := t.Network()
				a, b := haveAccess(t, network), haveAccess(t, network)
				t.Prepare(func() {
					wantReach(t, a, b, broadcast, untagged, untagged)
					wantReach(t, b, a, broadcast, untagged, untagged)
					t.WantOK("Delete", t.Delete(k, a.Name, false))
					t.WantGone(k, a.Name)
				})
				wantApart(t, a, b, broadcast, untagged)
				wantApart(t, b, a, broadcast, untagged)
			},
		},
		{
			Name: "frames-follow-a-port-that-moves", Source: "AIP-121", Says: strongUpdate,
			Violation: "A pod stays in the network that it was taken out of.",
			Run: func(t *T) {
				before, after := t.Network(), t.Network()
				a, b, c := haveAccess(t, before), haveAccess(t, before), haveAccess(t, after)
				t.Prepare(func() {
					wantReach(t, a, b, broadcast, untagged, untagged)
					_, err := t.Update(k, updated(a.Object, withBridges(a.Object, after)), nil,
						false)
					t.WantOK("Update", err)
					t.WantUp(k, a.Name)
				})
				wantReach(t, a, c, broadcast, untagged, untagged)
				wantReach(t, c, a, a.mac, untagged, untagged)
				wantApart(t, a, b, broadcast, untagged)
			},
		},
		{
			Name: "frames-pass-again-with-the-interface", Says: "Bridge Port is up",
			Violation: "A pod whose Function comes late, or again, has no network although its " +
				"port is up.",
			Run: func(t *T) {
				network := t.Network()
				a := haveAccess(t, network)
				port := portOf(a.Object)
				t.RemoveInterface(port)
				t.Prepare(func() { t.WantNotUp(k, a.Name) })
				t.MakeInterface(port)
				t.Prepare(func() { t.WantUp(k, a.Name) })
				a.wire = t.Wire(port)
				b := haveAccess(t, network)
				wantReach(t, a, b, b.mac, untagged, untagged)
				wantReach(t, b, a, a.mac, untagged, untagged)
			},
		},
	}
}

// packetsAfterRestart are the cases about frames of pods that run while the agent restarts.
func packetsAfterRestart(how conformance.Ending) []Case {
	suffix := "-after-" + strings.ToLower(string(how))
	when := fmt.Sprintf(" (The agent's process got SIG%s.)", how)
	return []Case{
		{
			Name: "frames-pass" + suffix, Says: saysBridges + when,
			Violation: "Pods that run lose their traffic when the agent is updated or crashes.",
			Run: func(t *T) {
				network := t.Network()
				a, b, other := haveAccess(t, network), haveAccess(t, network),
					haveAccess(t, t.Network())
				t.Prepare(func() { wantReach(t, a, b, b.mac, untagged, untagged) })
				t.Restart(how)
				wantReach(t, a, b, b.mac, untagged, untagged)
				wantReach(t, b, a, broadcast, untagged, untagged)
				wantApart(t, a, other, broadcast, untagged)
			},
		},
		{
			Name: "deleted-port-passes-no-frames" + suffix, Source: "AIP-121",
			Says: strongDelete + when,
			Violation: "A pod's Function is back in its network after the pod, for the next pod " +
				"that gets it.",
			Run: func(t *T) {
				network := t.Network()
				a, b := haveAccess(t, network), haveAccess(t, network)
				t.Prepare(func() {
					wantReach(t, a, b, b.mac, untagged, untagged)
					t.WantOK("Delete", t.Delete(a.Kind, a.Name, false))
					t.WantGone(a.Kind, a.Name)
				})
				t.Restart(how)
				wantApart(t, a, b, broadcast, untagged)
				wantApart(t, b, a, broadcast, untagged)
			},
		},
	}
}

// trunkPackets are the cases about frames of TRUNK ports.
func trunkPackets(kinds conformance.Kinds) []Case {
	return slices.Concat(taggedFrames(), taggedFramesApart(), taggedFramesAfterChanges(kinds))
}

// taggedFrames are cases about the ports that tagged frames reach.
func taggedFrames() []Case {
	return []Case{
		{
			Name: "tagged-frames-reach-another-trunk", Says: saysTrunk,
			Violation: "Two pods with several networks do not reach each other.",
			Run: func(t *T) {
				one, two := t.Network(), t.Network()
				a, b := haveTagged(t, one, two), haveTagged(t, one, two)
				for _, vlan := range []tag{tagOf(t, one), tagOf(t, two)} {
					wantReach(t, a, b, b.mac, vlan, vlan)
					wantReach(t, b, a, broadcast, vlan, vlan)
				}
			},
		},
		{
			Name: "tagged-frames-reach-access-ports-without-a-tag", Says: saysTrunk,
			Violation: "A pod with several networks reaches no pod with one.",
			Run: func(t *T) {
				one, two := t.Network(), t.Network()
				a, b, c := haveTagged(t, one, two), haveAccess(t, one), haveAccess(t, two)
				wantReach(t, a, b, b.mac, tagOf(t, one), untagged)
				wantReach(t, a, c, broadcast, tagOf(t, two), untagged)
			},
		},
		{
			Name: "frames-of-access-ports-reach-the-trunk-with-a-tag", Says: saysTrunk,
			Violation: "A pod with several networks cannot tell which one frames are from.",
			Run: func(t *T) {
				one, two := t.Network(), t.Network()
				a, b, c := haveTagged(t, one, two), haveAccess(t, one), haveAccess(t, two)
				wantReach(t, b, a, a.mac, untagged, tagOf(t, one))
				wantReach(t, c, a, broadcast, untagged, tagOf(t, two))
			},
		},
	}
}

// taggedFramesApart are cases about ports that frames of trunks must not reach.
func taggedFramesApart() []Case {
	return []Case{
		{
			Name: "tagged-frames-stay-in-their-logical-bridge", Says: saysTrunk,
			Violation: "A pod with several networks connects them, which may be other tenants'.",
			Run: func(t *T) {
				one, two := t.Network(), t.Network()
				a, b, c := haveTagged(t, one, two), haveAccess(t, one), haveAccess(t, two)
				t.Prepare(func() { wantReach(t, a, b, broadcast, tagOf(t, one), untagged) })
				wantApart(t, a, c, broadcast, tagOf(t, one))
				wantApart(t, b, c, broadcast, untagged)
			},
		},
		{
			Name: "trunk-takes-no-tag-of-another-logical-bridge", Says: saysBridges,
			Violation: "A pod with several networks reaches those of others by their tags.",
			Run: func(t *T) {
				mine, theirs := t.Network(), t.Network()
				a, b, other := haveTagged(t, mine), haveAccess(t, mine), haveAccess(t, theirs)
				t.Prepare(func() { wantReach(t, a, b, broadcast, tagOf(t, mine), untagged) })
				wantApart(t, a, other, broadcast, tagOf(t, theirs))
				wantApart(t, other, a, broadcast, untagged)
			},
		},
		{
			Name: "trunk-takes-no-frames-without-a-tag", Says: saysTrunk +
				" (Untagged frames are in no logical bridge of a trunk.)",
			Level:     conformance.Should,
			Violation: "What a pod sends outside of its networks is in one of them.",
			Run: func(t *T) {
				one, two := t.Network(), t.Network()
				a, b, c := haveTagged(t, one, two), haveAccess(t, one), haveAccess(t, two)
				t.Prepare(func() { wantReach(t, a, b, broadcast, tagOf(t, one), untagged) })
				wantApart(t, a, b, broadcast, untagged)
				wantApart(t, a, c, broadcast, untagged)
			},
		},
	}
}

// taggedFramesAfterChanges are cases about frames of trunks that are changed or deleted.
func taggedFramesAfterChanges(kinds conformance.Kinds) []Case {
	k := kinds.BridgePort
	return []Case{
		{
			Name: "frames-follow-an-update-of-a-trunk", Source: "AIP-121", Says: strongUpdate,
			Violation: "A pod goes on to hear a network that it left, or does not hear a new one.",
			Run: func(t *T) {
				one, two, three := t.Network(), t.Network(), t.Network()
				a := haveTagged(t, one, two)
				left, kept, new := haveAccess(t, one), haveAccess(t, two), haveAccess(t, three)
				t.Prepare(func() {
					wantReach(t, a, left, broadcast, tagOf(t, one), untagged)
					_, err := t.Update(k, updated(a.Object, withBridges(a.Object, two, three)),
						nil, false)
					t.WantOK("Update", err)
					t.WantUp(k, a.Name)
				})
				wantReach(t, a, kept, broadcast, tagOf(t, two), untagged)
				wantReach(t, new, a, a.mac, untagged, tagOf(t, three))
				wantApart(t, a, left, broadcast, tagOf(t, one))
				wantApart(t, left, a, broadcast, untagged)
			},
		},
		{
			Name: "deleted-trunk-passes-no-frames", Source: "AIP-121", Says: strongDelete,
			Violation: "A pod's Function stays in its networks after the pod, for the next pod " +
				"that gets it.",
			Run: func(t *T) {
				one, two := t.Network(), t.Network()
				a, b := haveTagged(t, one, two), haveAccess(t, two)
				t.Prepare(func() {
					wantReach(t, a, b, broadcast, tagOf(t, two), untagged)
					t.WantOK("Delete", t.Delete(k, a.Name, false))
					t.WantGone(k, a.Name)
				})
				wantApart(t, a, b, broadcast, tagOf(t, two))
				wantApart(t, b, a, broadcast, untagged)
			},
		},
	}
}

// gateway is an SVI that is up, with a pod in its logical bridge.
type gateway struct {
	conformance.Object
	*pod
	vrf, network string
	mac          net.HardwareAddr
	address      netip.Addr
	host         netip.Addr // of the pod
}

// haveGateway makes a gateway in a VRF.
func haveGateway(t *T, vrf string) *gateway {
	t.NeedWires()
	g := &gateway{vrf: vrf, network: t.Network(), mac: t.MAC()}
	prefix := t.Prefix(24)
	g.takeAddresses(prefix)
	g.Object = t.HaveAs(t.Kinds.Svi, t.NewID(t.Kinds.Svi), &evpn.SviSpec{
		Vrf: vrf, LogicalBridge: g.network, MacAddress: g.mac,
		GwIpPrefix: []*netcommon.IPPrefix{prefix},
	})
	t.Prepare(func() { t.WantUp(g.Object.Kind, g.Object.Name) })
	g.pod = haveAccess(t, g.network)

	return g
}

// takeAddresses gives the gateway and the pod addresses of the subnet of the gateway's.
func (g *gateway) takeAddresses(prefix *netcommon.IPPrefix) {
	v4 := prefix.GetAddr().GetV4Addr()
	g.address = netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, v4)))
	g.host = netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, v4+9)))
}

// arp returns the body of an ARP packet (RFC 826).
func arp(operation uint16, mac net.HardwareAddr, ip netip.Addr, toMAC net.HardwareAddr,
	to netip.Addr,
) []byte {
	head := []byte{0, 1, typeIPv4 >> 8, typeIPv4 & 0xff, 6, 4}
	head = binary.BigEndian.AppendUint16(head, operation)
	return slices.Concat(head, mac, ip.AsSlice(), toMAC, to.AsSlice())
}

// asksFor reports whether a frame asks who has an address.
func asksFor(f []byte, address netip.Addr) bool {
	p, ok := parse(f)
	return ok && p.etherType == typeARP && len(p.payload) >= 28 && p.payload[7] == 1 &&
		bytes.Equal(p.payload[24:28], address.AsSlice())
}

// resolve returns an ARP request of the pod for the gateway, and a function that knows the answer.
func (g *gateway) resolve() (request []byte, is func(f []byte) bool) {
	request = frame(broadcast, g.pod.mac, untagged, typeARP,
		arp(1, g.pod.mac, g.host, make(net.HardwareAddr, 6), g.address))
	return request, func(f []byte) bool {
		p, ok := parse(f)
		return ok && p.etherType == typeARP && len(p.payload) >= 28 && p.payload[7] == 2 &&
			bytes.Equal(p.payload[14:18], g.address.AsSlice()) &&
			bytes.Equal(p.payload[8:14], g.mac)
	}
}

// wantAnswer ends the case unless a gateway answers ARP.
func wantAnswer(t *T, g *gateway) {
	request, is := g.resolve()
	if !t.Heard(g.wire, request, g.wire, is) {
		t.Failf("the gateway does not answer ARP for %s with %s", g.address, g.mac)
	}
}

// wantNoAnswer ends the case if a gateway answers ARP.
func wantNoAnswer(t *T, g *gateway) {
	request, is := g.resolve()
	if !t.Unheard(g.wire, request, g.wire, is) {
		t.Failf("the gateway answers ARP for %s", g.address)
	}
}

// packet returns an IPv4 packet with a text (RFC 791, protocol 253 of RFC 3692).
func packet(from, to netip.Addr, ttl byte, text []byte) []byte {
	h := []byte{0x45, 0, 0, 0, 0, 1, 0, 0, ttl, 253, 0, 0}
	h = slices.Concat(h, from.AsSlice(), to.AsSlice())
	binary.BigEndian.PutUint16(h[2:], uint16(len(h)+len(text)))
	var sum uint32
	for i := 0; i < len(h); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	binary.BigEndian.PutUint16(h[10:], ^uint16(sum+sum>>16))
	return append(h, text...)
}

// sentTTL is the time to live of packets; each router takes 1 (RFC 791).
const sentTTL = 64

// route returns a packet of the pod of one gateway to the pod of another, as the first gateway gets
// it, and a function that knows it as the other gateway sends it. That function answers ARP.
func (g *gateway) route(t *T, to *gateway) (sent []byte, is func(f []byte) bool) {
	token := append([]byte(t.NewID(t.Kinds.Svi)), '.')
	sent = frame(g.mac, g.pod.mac, untagged, typeIPv4, packet(g.host, to.host, sentTTL, token))
	return sent, func(f []byte) bool {
		if asksFor(f, to.host) {
			p, _ := parse(f)
			asker, _ := netip.AddrFromSlice(p.payload[14:18])
			t.Send(to.wire, frame(p.src, to.pod.mac, untagged, typeARP,
				arp(2, to.pod.mac, to.host, p.payload[8:14], asker)))
			return false
		}
		p, ok := parse(f)
		return ok && p.etherType == typeIPv4 && bytes.Contains(p.payload, token) &&
			p.payload[8] == sentTTL-1
	}
}

// l3Packets are the cases about packets of gateways.
func l3Packets(kinds conformance.Kinds) []Case {
	const saysGateway = "The GW IP addresses assigned to the SVI"
	return []Case{
		{
			Name: "gateway-answers-with-its-mac-address", Says: "Svi's MAC address.",
			Violation: "Pods of the network have no gateway.",
			Run: func(t *T) {
				g := haveGateway(t, t.Have(kinds.Vrf).Name)
				wantAnswer(t, g)
			},
		},
		{
			Name: "packets-pass-between-svis-of-a-vrf", Says: saysGateway,
			Violation: "Pods of two networks with gateways in one VRF do not reach each other.",
			Run: func(t *T) {
				vrf := t.Have(kinds.Vrf).Name
				a, b := haveGateway(t, vrf), haveGateway(t, vrf)
				wantRouted(t, a, b)
				wantRouted(t, b, a)
			},
		},
		{
			Name: "packets-do-not-pass-between-vrfs", Says: "Vrf name",
			Violation: "Pods reach the networks of other VRFs, which may be other tenants'.",
			Run: func(t *T) {
				vrf := t.Have(kinds.Vrf).Name
				a, b, other := haveGateway(t, vrf), haveGateway(t, vrf),
					haveGateway(t, t.Have(kinds.Vrf).Name)
				t.Prepare(func() { wantRouted(t, a, b) })
				sent, is := a.route(t, other)
				if !t.Unheard(a.wire, sent, other.wire, is) {
					t.Failf("%s hears packets of %s, whose SVI is in another VRF", other.pod.ID,
						a.pod.ID)
				}
			},
		},
		{
			Name: "deleted-svi-does-not-answer", Source: "AIP-121", Says: strongDelete,
			Violation: "A gateway that moved to another machine answers at two.",
			Run: func(t *T) {
				g := haveGateway(t, t.Have(kinds.Vrf).Name)
				t.Prepare(func() {
					wantAnswer(t, g)
					t.WantOK("Delete", t.Delete(kinds.Svi, g.Object.Name, false))
					t.WantGone(kinds.Svi, g.Object.Name)
				})
				wantNoAnswer(t, g)
			},
		},
		{
			Name: "packets-follow-an-update-of-an-svi", Source: "AIP-121", Says: strongUpdate,
			Violation: "The pods of a network whose gateway gets another address lose it.",
			Run: func(t *T) {
				g := haveGateway(t, t.Have(kinds.Vrf).Name)
				spec := changedAddress(g, t.Prefix(24))
				t.Prepare(func() {
					_, err := t.Update(kinds.Svi, updated(g.Object, spec), nil, false)
					t.WantOK("Update", err)
					t.WantUp(kinds.Svi, g.Object.Name)
				})
				before := *g
				g.takeAddresses(spec.GetGwIpPrefix()[0])
				wantAnswer(t, g)
				wantNoAnswer(t, &before)
			},
		},
	}
}

// changedAddress returns the spec of a gateway with another address.
func changedAddress(g *gateway, prefix *netcommon.IPPrefix) *evpn.SviSpec {
	before := g.Object.Spec.(*evpn.SviSpec)
	return &evpn.SviSpec{
		Vrf: before.GetVrf(), LogicalBridge: before.GetLogicalBridge(),
		MacAddress: before.GetMacAddress(), GwIpPrefix: []*netcommon.IPPrefix{prefix},
	}
}

// wantRouted ends the case unless packets of the pod of one gateway reach the pod of another one.
func wantRouted(t *T, from, to *gateway) {
	sent, is := from.route(t, to)
	if !t.Heard(from.wire, sent, to.wire, is) {
		t.Failf("%s hears no packets of %s, whose SVI is in the same VRF", to.pod.ID, from.pod.ID)
	}
}
