// SPDX-License-Identifier: Apache-2.0

package sourcefilter

import (
	"encoding/binary"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// chain is a chain with its rules. A rule is a list of expressions. If an expression does not match
// the frame, or the frame lacks the part that it reads, the rule ends. The last expression is the
// verdict.
type chain struct {
	nftables.Chain
	rules [][]expr.Any
}

// Names of the table's chains.
const (
	chainPrerouting = "prerouting" // all frames from ports of bridges
	chainInput      = "input"      // frames to the machine itself
	chainSource     = "source"     // frames from ports with a MAC address
	chainARP        = "arp"        // ARP from ports with IP addresses
	chainIPv4       = "ipv4"       // IPv4 from ports with IP addresses
	chainIPv6       = "ipv6"       // IPv6 from ports with IP addresses
	chainForeign    = "foreign"    // frames from other ports, among them VXLAN ports
	chainGateway    = "gateway"    // frames to the MAC address of the port's gateway
	chainDrop       = "drop"       // counts and drops
)

// Registers of nf_tables, of 4 bytes each. A key of two parts is in neighbouring registers.
const (
	regPort = unix.NFT_REG32_00
	regRest = unix.NFT_REG32_01
)

// priorityFirst runs a chain before all others (NF_BR_PRI_NAT_DST_BRIDGED of
// linux/netfilter_bridge.h).
const priorityFirst = nftables.ChainPriority(-300)

func (f *Filter) chains() []*chain {
	base := func(
		name string, hook *nftables.ChainHook, priority nftables.ChainPriority,
	) nftables.Chain {
		return nftables.Chain{
			Name: name, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: &priority,
		}
	}

	return []*chain{
		{base(chainPrerouting, nftables.ChainHookPrerouting, priorityFirst), [][]expr.Any{
			rule(fromPort(setFiltered), goTo(chainSource)),
			rule(goTo(chainForeign)),
		}},
		{base(chainInput, nftables.ChainHookInput, priorityFirst), [][]expr.Any{
			rule(whenOwn(setGatewayMACs, etherDestination()), goTo(chainGateway)),
			rule(etherTypeIs(unix.ETH_P_ARP), whenOwn(setGatewayIPv4, arpTarget()), accept()),
			rule(etherTypeIs(unix.ETH_P_IPV6), icmpv6(solicitation),
				whenOwn(setGatewayIPv6, ndTarget()), accept()),
			rule(fromPort(setIsolated), drop()),
		}},
		{nftables.Chain{Name: chainSource}, [][]expr.Any{
			rule(unlessOwn(setMACs, etherSource()), goTo(chainDrop)),
			rule(unlessPort(setAddressed), goTo(chainForeign)),
			rule(etherTypeIs(unix.ETH_P_ARP), goTo(chainARP)),
			rule(etherTypeIs(unix.ETH_P_IP), goTo(chainIPv4)),
			rule(etherTypeIs(unix.ETH_P_IPV6), goTo(chainIPv6)),
			rule(goTo(chainDrop)), // for example an IP packet within two VLAN tags
		}},
		{nftables.Chain{Name: chainARP}, [][]expr.Any{
			// A probe claims no address (RFC 5227).
			rule(fromARP(), when(arpSender(), 0, 0, 0, 0), accept()),
			rule(fromARP(), whenOwn(setIPv4, arpSender()), accept()),
			rule(goTo(chainDrop)),
		}},
		{nftables.Chain{Name: chainIPv4}, [][]expr.Any{
			// A DHCP client has no address yet (RFC 2131).
			rule(when(ipv4Source(), 0, 0, 0, 0), accept()),
			rule(whenOwn(setIPv4, ipv4Source()), accept()),
			rule(goTo(chainDrop)),
		}},
		{nftables.Chain{Name: chainIPv6}, ipv6Rules()},
		{nftables.Chain{Name: chainForeign}, [][]expr.Any{
			rule(whenOwn(setForeignMACs, etherSource()), goTo(chainDrop)),
			rule(etherTypeIs(unix.ETH_P_ARP), whenOwn(setForeignIPv4, arpSender()),
				goTo(chainDrop)),
			rule(etherTypeIs(unix.ETH_P_IPV6), icmpv6(advertisement),
				whenOwn(setForeignIPv6, ndTarget()), goTo(chainDrop)),
			rule(etherTypeIs(unix.ETH_P_IPV6), icmpv6(solicitation),
				whenOwn(setForeignIPv6, ipv6Source()), goTo(chainDrop)),
			rule(etherTypeIs(unix.ETH_P_IP), whenOwn(setReservedIPv4, ipv4Source()),
				goTo(chainDrop)),
			rule(etherTypeIs(unix.ETH_P_IPV6), whenOwn(setReservedIPv6, ipv6Source()),
				goTo(chainDrop)),
		}},
		{nftables.Chain{Name: chainGateway}, [][]expr.Any{
			rule(etherTypeIs(unix.ETH_P_ARP), accept()),
			rule(etherTypeIs(unix.ETH_P_IP), accept()),
			// The gateway is the router. It learns nothing from other routers in the network.
			rule(icmpv6(routerAdvertisement), drop()),
			rule(icmpv6(redirect), drop()),
			rule(etherTypeIs(unix.ETH_P_IPV6), accept()),
			rule(drop()),
		}},
		{nftables.Chain{Name: chainDrop}, [][]expr.Any{
			rule([]expr.Any{load(expr.MetaKeyIIF, regPort), &expr.Dynset{
				SrcRegKey: regPort, SetName: setDroppedFrames, SetID: f.sets[setDroppedFrames].ID,
				Operation: uint32(unix.NFT_DYNSET_OP_UPDATE), Exprs: []expr.Any{&expr.Counter{}},
			}}, drop()),
			rule(drop()), // if there are too many counters
		}},
	}
}

// Types of ICMPv6 (RFC 4861, section 4).
const (
	routerSolicitation  = 133
	routerAdvertisement = 134
	solicitation        = 135
	advertisement       = 136
	redirect            = 137
)

// Options of Neighbor Discovery (RFC 4861, section 4.6; RFC 3971, section 5.3.2).
const (
	optionSourceMAC = 1
	optionTargetMAC = 2
	optionNonce     = 14
)

// ipv6Rules returns the rules for IPv6 from a port with IP addresses. Neighbor Discovery may have
// one option of 8 bytes: the port's MAC address, or the nonce of duplicate address detection (RFC
// 7527). Messages of routers are dropped.
func ipv6Rules() [][]expr.Any {
	const optionLength = 8
	own, none := whenOwn(setIPv6, ipv6Source()), when(ipv6Source(), make([]byte, 16)...)
	var rules [][]expr.Any
	// discovery accepts messages of one type that have this source and claim. Without an option
	// they have this length.
	discovery := func(kind, length byte, source, claim []expr.Any, option byte) {
		message := rule(icmpv6(kind), source, claim)
		optionType, optionMAC := transport(uint32(length), 1), transport(uint32(length)+2, 6)
		rules = append(rules, rule(message, when(ipv6PayloadLength(), 0, length), accept()))
		with := rule(message, when(ipv6PayloadLength(), 0, length+optionLength))
		if option == optionNonce {
			rules = append(rules, rule(with, when(optionType, option), accept()))
			return
		}

		rules = append(rules,
			rule(with, when(optionType, option), whenOwn(setMACs, optionMAC), accept()))
	}

	discovery(routerSolicitation, 8, own, nil, optionSourceMAC)
	discovery(routerSolicitation, 8, none, nil, optionNonce)
	discovery(solicitation, 24, own, nil, optionSourceMAC)
	discovery(solicitation, 24, none, nil, optionNonce)
	discovery(advertisement, 24, own, whenOwn(setIPv6, ndTarget()), optionTargetMAC)

	for kind := byte(routerSolicitation); kind <= redirect; kind++ {
		rules = append(rules, rule(icmpv6(kind), goTo(chainDrop)))
	}

	return append(rules,
		rule(none, accept()), // MLD before the port has an address (RFC 3590)
		rule(own, accept()),
		rule(goTo(chainDrop)),
	)
}

// rule joins expressions.
func rule(parts ...[]expr.Any) (all []expr.Any) {
	for _, part := range parts {
		all = append(all, part...)
	}
	return all
}

// load reads a property of the frame into a register.
func load(key expr.MetaKey, register uint32) expr.Any {
	return &expr.Meta{Key: key, Register: register}
}

// fromPort matches frames from the ports in a set.
func fromPort(set string) []expr.Any { return lookup(set, false, load(expr.MetaKeyIIF, regPort)) }

// unlessPort matches frames from ports that are not in a set.
func unlessPort(set string) []expr.Any { return lookup(set, true, load(expr.MetaKeyIIF, regPort)) }

// whenOwn matches if a set has the frame's port together with this part of the frame.
func whenOwn(set string, part expr.Any) []expr.Any {
	return lookup(set, false, load(expr.MetaKeyIIF, regPort), part)
}

// fromARP matches ARP for IPv4 over Ethernet whose sender is the port's own MAC address.
func fromARP() []expr.Any {
	return append(when(arpForm(), 0, 1, 8, 0, 6, 4), whenOwn(setMACs, arpSenderMAC())...)
}

// unlessOwn matches if whenOwn does not.
func unlessOwn(set string, part expr.Any) []expr.Any {
	return lookup(set, true, load(expr.MetaKeyIIF, regPort), part)
}

func lookup(set string, invert bool, key ...expr.Any) []expr.Any {
	return append(key, &expr.Lookup{SourceRegister: regPort, SetName: set, Invert: invert})
}

// when matches if a part of the frame has this value.
func when(part expr.Any, value ...byte) []expr.Any {
	return []expr.Any{part, &expr.Cmp{Op: expr.CmpOpEq, Register: regRest, Data: value}}
}

func etherTypeIs(etherType uint16) []expr.Any {
	return when(load(expr.MetaKeyPROTOCOL, regRest),
		binary.BigEndian.AppendUint16(nil, etherType)...)
}

func icmpv4(kind byte) []expr.Any {
	return append(when(load(expr.MetaKeyL4PROTO, regRest), unix.IPPROTO_ICMP),
		when(transport(0, 1), kind)...)
}

func icmpv6(kind byte) []expr.Any {
	return append(when(load(expr.MetaKeyL4PROTO, regRest), unix.IPPROTO_ICMPV6),
		when(transport(0, 1), kind)...)
}

func payload(base expr.PayloadBase, offset, length uint32) expr.Any {
	return &expr.Payload{DestRegister: regRest, Base: base, Offset: offset, Len: length}
}

func etherDestination() expr.Any { return payload(expr.PayloadBaseLLHeader, 0, 6) }

func etherSource() expr.Any { return payload(expr.PayloadBaseLLHeader, 6, 6) }

// arpForm is the types and lengths of the addresses: Ethernet and IPv4.
func arpForm() expr.Any           { return payload(expr.PayloadBaseNetworkHeader, 0, 6) }
func arpSenderMAC() expr.Any      { return payload(expr.PayloadBaseNetworkHeader, 8, 6) }
func arpSender() expr.Any         { return payload(expr.PayloadBaseNetworkHeader, 14, 4) }
func arpTarget() expr.Any         { return payload(expr.PayloadBaseNetworkHeader, 24, 4) }
func ipv4Source() expr.Any        { return payload(expr.PayloadBaseNetworkHeader, 12, 4) }
func ipv4Destination() expr.Any   { return payload(expr.PayloadBaseNetworkHeader, 16, 4) }
func ipv6Destination() expr.Any   { return payload(expr.PayloadBaseNetworkHeader, 24, 16) }
func ipv6PayloadLength() expr.Any { return payload(expr.PayloadBaseNetworkHeader, 4, 2) }
func ipv6Source() expr.Any        { return payload(expr.PayloadBaseNetworkHeader, 8, 16) }
func ndTarget() expr.Any          { return transport(8, 16) }
func transport(offset, length uint32) expr.Any {
	return payload(expr.PayloadBaseTransportHeader, offset, length)
}

func goTo(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}
}

func accept() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}} }
func drop() []expr.Any   { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }
