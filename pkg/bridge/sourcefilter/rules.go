// SPDX-License-Identifier: Apache-2.0

package sourcefilter

import (
	"encoding/binary"
	"slices"

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

// Names of the table's chains. Those from chainSource to chainForeign exist once more for trunks:
// see [scope].
const (
	chainPrerouting = "prerouting" // all frames from ports of bridges
	chainInput      = "input"      // frames to the machine itself
	chainOutput     = "output"     // frames from the machine itself
	chainUnderlay   = "underlay"   // frames from VXLAN ports
	chainPort       = "port"       // frames from ports
	chainTrunk      = "trunk"      // frames from trunks
	chainSource     = "source"     // frames from ports with a MAC address
	chainARP        = "arp"        // ARP from ports with IP addresses
	chainIPv4       = "ipv4"       // IPv4 from ports with IP addresses
	chainIPv6       = "ipv6"       // IPv6 from ports with IP addresses
	chainForeign    = "foreign"    // frames from other ports, among them VXLAN ports
	chainGateway    = "gateway"    // frames to the MAC address of the port's gateway
	chainDrop       = "drop"       // counts and drops
)

// Registers of nf_tables, of 4 bytes each. The parts of a key are in neighbouring registers.
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

	ofTrunk := scope{tagged: true}
	chains := []*chain{
		{base(chainPrerouting, nftables.ChainHookPrerouting, priorityFirst), [][]expr.Any{
			rule(fromPort(setVXLANs), goTo(chainUnderlay)),
			rule(fromPort(setIsolated), goTo(chainPort)),
			rule(goTo(chainForeign)),
		}},
		{base(chainOutput, nftables.ChainHookOutput, priorityFirst), outputRules()},
		{nftables.Chain{Name: chainUnderlay}, underlayRules()},
		{nftables.Chain{Name: chainPort}, slices.Concat(claimsOfRouters(), [][]expr.Any{
			rule(fromPort(setTrunks), goTo(chainTrunk)),
			rule(fromPort(setFiltered), goTo(chainSource)),
			rule(goTo(chainForeign)),
		})},
		{base(chainInput, nftables.ChainHookInput, priorityFirst), [][]expr.Any{
			rule(whenOwn(setGatewayMACs, etherDestination()), goTo(chainGateway)),
			rule(etherTypeIs(unix.ETH_P_ARP), whenOwn(setGatewayIPv4, arpTarget()), accept()),
			rule(etherTypeIs(unix.ETH_P_IPV6), icmpv6(solicitation),
				whenOwn(setGatewayIPv6, ndTarget()), accept()),
			rule(fromPort(setIsolated), drop()),
		}},
		{nftables.Chain{Name: chainTrunk}, [][]expr.Any{
			// The bridge drops these frames too. They are not counted, because a kernel sends some
			// by itself, such as router solicitations without a tag.
			rule(unlessTagged(), drop()),
			rule(ofTrunk.in(setFiltered), goTo(ofTrunk.name(chainSource))),
			rule(ofTrunk.in(setOpen), goTo(ofTrunk.name(chainForeign))),
			rule(drop()),
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

	return slices.Concat(chains, scope{}.sourceChains(), ofTrunk.sourceChains())
}

// sourceChains are the chains that judge the source addresses of frames.
func (s scope) sourceChains() []*chain {
	return []*chain{
		{nftables.Chain{Name: s.name(chainSource)}, [][]expr.Any{
			rule(s.unlessOwn(setMACs, etherSource()), goTo(chainDrop)),
			rule(s.notIn(setAddressed), goTo(s.name(chainForeign))),
			rule(etherTypeIs(unix.ETH_P_ARP), goTo(s.name(chainARP))),
			rule(etherTypeIs(unix.ETH_P_IP), goTo(s.name(chainIPv4))),
			rule(etherTypeIs(unix.ETH_P_IPV6), goTo(s.name(chainIPv6))),
			rule(goTo(chainDrop)), // for example an IP packet within two VLAN tags
		}},
		{nftables.Chain{Name: s.name(chainARP)}, [][]expr.Any{
			// A probe claims no address (RFC 5227).
			rule(s.fromARP(), when(arpSender(), 0, 0, 0, 0), accept()),
			rule(s.fromARP(), s.whenOwn(setIPv4, arpSender()), accept()),
			rule(goTo(chainDrop)),
		}},
		{nftables.Chain{Name: s.name(chainIPv4)}, [][]expr.Any{
			// A DHCP client has no address yet (RFC 2131).
			rule(when(ipv4Source(), 0, 0, 0, 0), accept()),
			rule(s.whenOwn(setIPv4, ipv4Source()), accept()),
			rule(goTo(chainDrop)),
		}},
		{nftables.Chain{Name: s.name(chainIPv6)}, s.ipv6Rules()},
		{nftables.Chain{Name: s.name(chainForeign)}, [][]expr.Any{
			rule(s.whenOwn(setForeignMACs, etherSource()), goTo(chainDrop)),
			rule(etherTypeIs(unix.ETH_P_ARP), s.whenOwn(setForeignIPv4, arpSender()),
				goTo(chainDrop)),
			rule(etherTypeIs(unix.ETH_P_IPV6), icmpv6(advertisement),
				s.whenOwn(setForeignIPv6, ndTarget()), goTo(chainDrop)),
			rule(etherTypeIs(unix.ETH_P_IPV6), icmpv6(solicitation),
				s.whenOwn(setForeignIPv6, ipv6Source()), goTo(chainDrop)),
			rule(etherTypeIs(unix.ETH_P_IP), s.whenOwn(setReservedIPv4, ipv4Source()),
				goTo(chainDrop)),
			rule(etherTypeIs(unix.ETH_P_IPV6), s.whenOwn(setReservedIPv6, ipv6Source()),
				goTo(chainDrop)),
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
func (s scope) ipv6Rules() [][]expr.Any {
	const optionLength = 8
	own, none := s.whenOwn(setIPv6, ipv6Source()), when(ipv6Source(), make([]byte, 16)...)
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
			rule(with, when(optionType, option), s.whenOwn(setMACs, optionMAC), accept()))
	}

	discovery(routerSolicitation, 8, own, nil, optionSourceMAC)
	discovery(routerSolicitation, 8, none, nil, optionNonce)
	discovery(solicitation, 24, own, nil, optionSourceMAC)
	discovery(solicitation, 24, none, nil, optionNonce)
	discovery(advertisement, 24, own, s.whenOwn(setIPv6, ndTarget()), optionTargetMAC)

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

// whenOwn matches if a set has the frame's port together with this part of the frame.
func whenOwn(set string, part *expr.Payload) []expr.Any { return scope{}.whenOwn(set, part) }

// in matches if a set of the scope has the frame's port, for trunks together with the frame's VLAN
// id.
func (s scope) in(set string) []expr.Any { return lookup(s.name(set), false, s.key()...) }

// notIn matches if in does not.
func (s scope) notIn(set string) []expr.Any { return lookup(s.name(set), true, s.key()...) }

// whenOwn is in for sets whose keys end with this part of the frame.
func (s scope) whenOwn(set string, part *expr.Payload) []expr.Any {
	return lookup(s.name(set), false, append(s.key(), s.last(part))...)
}

// unlessOwn matches if whenOwn does not.
func (s scope) unlessOwn(set string, part *expr.Payload) []expr.Any {
	return lookup(s.name(set), true, append(s.key(), s.last(part))...)
}

// key loads the first parts of a key.
func (s scope) key() []expr.Any {
	key := []expr.Any{load(expr.MetaKeyIIF, regPort)}
	if s.tagged {
		key = append(key, vlanTag(), &expr.Bitwise{
			SourceRegister: regRest, DestRegister: regRest, Len: 2,
			// The other bits are priority and drop eligibility (IEEE 802.1Q-2018, 9.6).
			Mask: []byte{0x0f, 0xff}, Xor: []byte{0, 0},
		})
	}
	return key
}

// last loads the last part of a key, behind the parts of [scope.key].
func (s scope) last(part *expr.Payload) expr.Any {
	moved := *part
	if s.tagged {
		moved.DestRegister++
	}
	return &moved
}

// fromARP matches ARP for IPv4 over Ethernet whose sender is the port's own MAC address.
func (s scope) fromARP() []expr.Any {
	return append(when(arpForm(), 0, 1, 8, 0, 6, 4), s.whenOwn(setMACs, arpSenderMAC())...)
}

// unlessTagged matches frames without a VLAN tag. The kernel shows the tag where it was in the
// frame (nft_payload_copy_vlan).
func unlessTagged() []expr.Any {
	return unless(payload(expr.PayloadBaseLLHeader, 12, 2),
		binary.BigEndian.AppendUint16(nil, unix.ETH_P_8021Q)...)
}

func lookup(set string, invert bool, key ...expr.Any) []expr.Any {
	return append(key, &expr.Lookup{SourceRegister: regPort, SetName: set, Invert: invert})
}

// when matches if a part of the frame has this value.
func when(part expr.Any, value ...byte) []expr.Any {
	return []expr.Any{part, &expr.Cmp{Op: expr.CmpOpEq, Register: regRest, Data: value}}
}

// unless matches if when does not.
func unless(part expr.Any, value ...byte) []expr.Any {
	return []expr.Any{part, &expr.Cmp{Op: expr.CmpOpNeq, Register: regRest, Data: value}}
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

func payload(base expr.PayloadBase, offset, length uint32) *expr.Payload {
	return &expr.Payload{DestRegister: regRest, Base: base, Offset: offset, Len: length}
}

func etherDestination() *expr.Payload { return payload(expr.PayloadBaseLLHeader, 0, 6) }

// vlanTag is the priority and the VLAN id in the tag of a frame.
func vlanTag() *expr.Payload { return payload(expr.PayloadBaseLLHeader, 14, 2) }

func etherSource() *expr.Payload { return payload(expr.PayloadBaseLLHeader, 6, 6) }

// Prefixes are parts of addresses as long as what is compared with them.
func etherSourcePrefix() *expr.Payload { return payload(expr.PayloadBaseLLHeader, 6, 2) }
func ipv6SourcePrefix() *expr.Payload  { return payload(expr.PayloadBaseNetworkHeader, 8, 10) }
func ndTargetPrefix() *expr.Payload    { return transport(8, 10) }

// arpForm is the types and lengths of the addresses: Ethernet and IPv4.
func arpForm() *expr.Payload           { return payload(expr.PayloadBaseNetworkHeader, 0, 6) }
func arpOperation() *expr.Payload      { return payload(expr.PayloadBaseNetworkHeader, 6, 2) }
func arpSenderMAC() *expr.Payload      { return payload(expr.PayloadBaseNetworkHeader, 8, 6) }
func arpSender() *expr.Payload         { return payload(expr.PayloadBaseNetworkHeader, 14, 4) }
func arpTarget() *expr.Payload         { return payload(expr.PayloadBaseNetworkHeader, 24, 4) }
func ipv4Source() *expr.Payload        { return payload(expr.PayloadBaseNetworkHeader, 12, 4) }
func ipv4Destination() *expr.Payload   { return payload(expr.PayloadBaseNetworkHeader, 16, 4) }
func ipv6Destination() *expr.Payload   { return payload(expr.PayloadBaseNetworkHeader, 24, 16) }
func ipv6PayloadLength() *expr.Payload { return payload(expr.PayloadBaseNetworkHeader, 4, 2) }
func ipv6Source() *expr.Payload        { return payload(expr.PayloadBaseNetworkHeader, 8, 16) }
func ndTarget() *expr.Payload          { return transport(8, 16) }
func transport(offset, length uint32) *expr.Payload {
	return payload(expr.PayloadBaseTransportHeader, offset, length)
}

func goTo(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}
}

func accept() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}} }
func drop() []expr.Any   { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }
