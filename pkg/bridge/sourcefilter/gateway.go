// SPDX-License-Identifier: Apache-2.0

package sourcefilter

import (
	"bytes"
	"maps"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Gateway is the router of a network. It is a netdev of this machine in a VRF.
type Gateway struct {
	Index int // ifindex of the netdev
	VRF   int // ifindex of the VRF's netdev
	MAC   net.HardwareAddr
	// Addresses are all IP addresses of the netdev, IPv6 link-local addresses too.
	Addresses []netip.Addr
}

// Names of the sets in the table of the family "inet". The keys begin with an ifindex too. A packet
// to the machine itself comes from the VRF's netdev, or from the gateway's own netdev if its
// addresses are link-local (vrf_ip6_rcv of drivers/net/vrf.c).
const (
	setRouted    = "routed"     // gateway or VRF: it answers Neighbor Discovery and pings only
	setGateways  = "gateways"   // gateway: it routes in its VRF only
	setLocalIPv4 = "local-ipv4" // gateway or VRF . IPv4 address that answers pings
	setLocalIPv6 = "local-ipv6" // gateway or VRF . IPv6 address that answers pings
)

// routedKeyTypes returns the type of the keys of each set in the table of the family "inet".
func routedKeyTypes() map[string]nftables.SetDatatype {
	return map[string]nftables.SetDatatype{
		setRouted: nftables.TypeIFIndex, setGateways: nftables.TypeIFIndex,
		setLocalIPv4: nftables.MustConcatSetType(nftables.TypeIFIndex, nftables.TypeIPAddr),
		setLocalIPv6: nftables.MustConcatSetType(nftables.TypeIFIndex, nftables.TypeIP6Addr),
	}
}

const (
	chainForward = "forward" // packets that the machine forwards
	chainLocal   = "local"   // packets to the machine itself from a gateway or a VRF
)

// Types of ICMP (RFC 792) and ICMPv6 (RFC 4443).
const (
	echoReply     = 0
	echoRequest   = 8
	echoRequestV6 = 128
	echoReplyV6   = 129
)

// routedChains keep clients of a gateway from the machine itself: from its services, which may
// listen on all addresses, and from all its other addresses, because the kernel looks for those
// before it looks into the VRF (FIB rule 0). Echo replies are for the administrator's own pings.
func routedChains() []*chain {
	base := func(name string, hook *nftables.ChainHook) nftables.Chain {
		priority := priorityFirst
		return nftables.Chain{
			Name: name, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: &priority,
		}
	}

	answers := func(etherType uint16, message, reply []expr.Any, local []expr.Any) [][]expr.Any {
		return [][]expr.Any{
			rule(etherTypeIs(etherType), message, local, accept()),
			rule(etherTypeIs(etherType), reply, local, accept()),
		}
	}

	local4 := whenOwn(setLocalIPv4, ipv4Destination())
	local6 := whenOwn(setLocalIPv6, ipv6Destination())

	return []*chain{
		{base(chainInput, nftables.ChainHookInput), [][]expr.Any{
			rule(fromPort(setRouted), goTo(chainLocal)),
		}},
		{base(chainForward, nftables.ChainHookForward), [][]expr.Any{
			// What a gateway forwards comes from its VRF. It has lost its VRF otherwise.
			rule(fromPort(setGateways), drop()),
		}},
		{nftables.Chain{Name: chainLocal}, slices.Concat(
			answers(unix.ETH_P_IP, icmpv4(echoRequest), icmpv4(echoReply), local4),
			answers(unix.ETH_P_IPV6, icmpv6(echoRequestV6), icmpv6(echoReplyV6), local6),
			[][]expr.Any{
				rule(icmpv6(solicitation), accept()),
				rule(icmpv6(advertisement), accept()),
				rule(drop()),
			},
		)},
	}
}

// SetGateway makes this machine the gateway of a network: the network's ports reach it, and none of
// them can pretend to be it. The gateway answers ARP, Neighbor Discovery and pings only. An error
// wraps [ErrUnsupported] if the kernel cannot filter, because the machine itself would be open.
func (f *Filter) SetGateway(network string, g Gateway) error {
	if f.unsupported != nil {
		return f.unsupported
	}

	before, existed := f.gateways[network]
	if existed && before.Index != g.Index {
		if err := f.RemoveGateway(network); err != nil {
			return err
		}
	}

	// The machine is protected before the ports can reach it.
	if err := f.change(g.Index, routed(g)); err != nil {
		return err
	}

	if existed && before.Index == g.Index && bytes.Equal(before.MAC, g.MAC) &&
		slices.Equal(before.Addresses, g.Addresses) {
		f.gateways[network] = g
		return nil // nothing changes for the ports
	}

	f.gateways[network] = g
	if err := f.updateNetwork(network); err != nil {
		f.gateways[network] = before
		if !existed {
			delete(f.gateways, network)
		}
		return err
	}

	return nil
}

// routed returns the elements that a gateway itself needs.
func routed(g Gateway) elements {
	all := elements{}
	all.add(setRouted, g.Index, nil)
	all.add(setGateways, g.Index, nil)
	all.addLocal(g.Index, g.Addresses)
	all.addLocal(g.VRF, g.Addresses)
	return all
}

// RemoveGateway reverses SetGateway. Another program may have removed the gateway's netdev before.
func (f *Filter) RemoveGateway(network string) error {
	before, exists := f.gateways[network]
	if !exists {
		return nil
	}

	delete(f.gateways, network)
	if err := f.updateNetwork(network); err != nil {
		f.gateways[network] = before
		return err
	}

	return f.change(before.Index, nil)
}

// SetVRF makes the netdev of a VRF answer pings to these addresses, and nothing else.
func (f *Filter) SetVRF(index int, addresses []netip.Addr) error {
	if f.unsupported != nil {
		return f.unsupported
	}
	all := elements{}
	all.add(setRouted, index, nil)
	all.addLocal(index, addresses)
	return f.change(index, all)
}

// RemoveVRF reverses SetVRF.
func (f *Filter) RemoveVRF(index int) error { return f.change(index, nil) }

func (e elements) addLocal(index int, addresses []netip.Addr) {
	for _, a := range addresses {
		set := setLocalIPv4
		if a.Is6() {
			set = setLocalIPv6
		}
		e.add(set, index, a.AsSlice())
	}
}

// updateNetwork filters the ports of a network, and its VXLAN port, as described last.
func (f *Filter) updateNetwork(network string) error {
	for _, index := range slices.Sorted(f.members.All(network)) {
		if err := f.change(index, f.elementsOf(f.ports[index])); err != nil {
			return err
		}
	}
	if v := f.vxlans[network]; v.Index != 0 {
		return f.change(v.Index, f.elementsOfVXLAN(network, v))
	}
	return nil
}

// addGateways adds the elements by which a port reaches the gateways of its networks, and by which
// it cannot pretend to be one. It returns the addresses that the port must not use there.
func (f *Filter) addGateways(all elements, m member) (reserved map[netip.Addr]bool) {
	reserved = map[netip.Addr]bool{}
	for _, network := range m.networks {
		g, exists := f.gateways[network]
		if !exists {
			continue
		}

		all.addGateway(m.index, g)
		m.add(all, setForeignMACs, g.MAC)

		for _, a := range g.Addresses {
			reserved[a] = true
			set, claimed := setReservedIPv4, setForeignIPv4
			if a.Is6() {
				set, claimed = setReservedIPv6, setForeignIPv6
			}
			m.add(all, set, a.AsSlice())
			m.add(all, claimed, a.AsSlice())
		}
	}

	return reserved
}

// elementsOfVXLAN returns the elements that the VXLAN port of a network needs. Frames with the MAC
// address of the gateway, and packets with one of its addresses, may come from there, because the
// same gateway may be on several machines. Claims of its addresses may not.
func (f *Filter) elementsOfVXLAN(network string, v VXLAN) elements {
	all, index := isolated(v.Index), v.Index
	all.add(setVXLANs, index, nil)
	if g, exists := f.gateways[network]; exists {
		all.addGateway(index, g)
		all.addRouter(v, g)
		for _, a := range g.Addresses {
			claimed := setForeignIPv4
			if a.Is6() {
				claimed = setForeignIPv6
			}
			all.add(claimed, index, a.AsSlice())
		}
	}
	return all
}

// addGateway adds the elements by which a port or VXLAN port reaches a gateway. The elements of a
// trunk have no VLAN id, because the bridge hands a frame to the gateway of the frame's VLAN only.
func (e elements) addGateway(index int, g Gateway) {
	e.add(setGatewayMACs, index, g.MAC)
	for _, a := range g.Addresses {
		set := setGatewayIPv4
		if a.Is6() {
			set = setGatewayIPv6
		}
		e.add(set, index, a.AsSlice())
	}
}

// countRouted returns how many of these elements are in the table of the family "inet".
func countRouted(some []element) (n int) {
	types := routedKeyTypes()
	for _, e := range some {
		if _, is := types[e.set]; is {
			n++
		}
	}
	return n
}

// routedElements returns how many elements the table of the family "inet" has.
func (f *Filter) routedElements() int {
	return countRouted(slices.Collect(maps.Keys(f.refCount)))
}
