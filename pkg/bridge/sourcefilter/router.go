// SPDX-License-Identifier: Apache-2.0

package sourcefilter

import (
	"bytes"
	"crypto/sha256"
	"net"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
)

// The gateway of a network has the same MAC address and the same IP addresses on each machine. Each
// machine drops what others say about them, so that no machine can take the gateway from another.
// Between machines, a gateway is therefore a router with an address of its own: its router MAC
// address. The table translates at the VXLAN port:
//
//   - A frame that the gateway sends to other machines comes from the router MAC address. An ARP
//     request becomes a probe, which claims no IP address (RFC 5227, section 2.1.1). A Neighbor
//     Solicitation comes from the link-local address of the router MAC address.
//   - A frame from other machines to the router MAC address goes to the gateway.
//
// So replies reach the machine that has asked, and the pods of one machine learn nothing about its
// gateway from another machine.

// routerPrefix is how router MAC addresses begin. It makes them unicast addresses that are
// administered locally (IEEE 802c, AAI), and no port may have such an address. The bytes are "rt".
var routerPrefix = []byte{0x72, 0x74}

// RouterMAC returns the MAC address of this machine's gateways at other machines. VXLAN is sent
// from vtep, which no other machine in the underlay has. An IPv4 address is the end of the MAC
// address. Of an IPv6 address, the end is 32 bits of the SHA-256 digest.
func RouterMAC(vtep netip.Addr) net.HardwareAddr {
	end := vtep.AsSlice()
	if vtep.Is6() {
		digest := sha256.Sum256(end)
		end = digest[:4]
	}
	return append(bytes.Clone(routerPrefix), end...)
}

// IsRouterMAC reports whether a MAC address may be that of a machine's gateways at other machines.
// No port and no gateway may have it.
func IsRouterMAC(mac net.HardwareAddr) bool { return bytes.HasPrefix(mac, routerPrefix) }

// VXLAN is the VXLAN port of a network, which connects it to other machines.
type VXLAN struct {
	Index int // ifindex; 0 if there is none
	// Router is the MAC address that the network's gateway has at other machines, see [RouterMAC].
	Router net.HardwareAddr
}

func (v VXLAN) equal(w VXLAN) bool { return v.Index == w.Index && bytes.Equal(v.Router, w.Router) }

// Names of the sets of VXLAN ports. All but setVXLANs are maps, and exist for networks with a
// gateway on this machine.
const (
	setVXLANs           = "vxlans"             // VXLAN port
	setRouterMACs       = "router-macs"        // VXLAN port : router MAC address
	setRouterLinkLocals = "router-link-locals" // VXLAN port : link-local address of that
	setRouterGateways   = "router-gateways"    // VXLAN port . router MAC address : gateway's MAC address
)

// valueTypes returns the type of the values of each map.
func valueTypes() map[string]nftables.SetDatatype {
	return map[string]nftables.SetDatatype{
		setRouterMACs: nftables.TypeEtherAddr, setRouterLinkLocals: nftables.TypeIP6Addr,
		setRouterGateways: nftables.TypeEtherAddr,
	}
}

// addRouter adds the elements by which a gateway reaches other machines.
func (e elements) addRouter(v VXLAN, g Gateway) {
	if len(v.Router) == 0 {
		return
	}
	e.add(setForeignMACs, v.Index, v.Router)
	e.addValue(setRouterMACs, v.Index, nil, v.Router)
	e.addValue(setRouterLinkLocals, v.Index, nil, netaddr.LinkLocal(v.Router).AsSlice())
	e.addValue(setRouterGateways, v.Index, v.Router, g.MAC)
}

// regValue is the first register of the value that a map has for a key. It is behind the longest
// key.
const regValue = unix.NFT_REG32_08

// underlayRules are for frames from VXLAN ports. Frames to the router MAC address go to the
// gateway. They are for this machine then, although the kernel has seen before that they were not.
func underlayRules() [][]expr.Any {
	return [][]expr.Any{
		rule(
			mapped(setRouterGateways, load(expr.MetaKeyIIF, regPort), etherDestination()),
			write(expr.PayloadBaseLLHeader, 0, 6),
			[]expr.Any{
				&expr.Immediate{Register: regRest, Data: []byte{unix.PACKET_HOST}},
				&expr.Meta{Key: expr.MetaKeyPKTTYPE, SourceRegister: true, Register: regRest},
			},
		),
		rule(goTo(chainForeign)),
	}
}

// claimsOfRouters are the rules for what ports must not pretend: to be the router of a machine.
func claimsOfRouters() [][]expr.Any {
	return [][]expr.Any{
		rule(when(etherSourcePrefix(), routerPrefix...), goTo(chainDrop)),
		rule(etherTypeIs(unix.ETH_P_IPV6), when(ipv6SourcePrefix(), routerLinkLocals()...),
			goTo(chainDrop)),
		rule(etherTypeIs(unix.ETH_P_IPV6), icmpv6(advertisement),
			when(ndTargetPrefix(), routerLinkLocals()...), goTo(chainDrop)),
	}
}

// routerLinkLocals is how the link-local addresses of all router MAC addresses begin.
func routerLinkLocals() []byte {
	some := netaddr.LinkLocal(append(bytes.Clone(routerPrefix), 0, 0, 0, 0)).As16()
	return some[:10]
}

// outputRules are for the frames that a gateway sends to other machines.
func outputRules() [][]expr.Any {
	router := mapped(setRouterMACs, load(expr.MetaKeyOIF, regPort))
	linkLocal := mapped(setRouterLinkLocals, load(expr.MetaKeyOIF, regPort))
	fromARP := rule(etherTypeIs(unix.ETH_P_ARP), when(arpForm(), 0, 1, 8, 0, 6, 4))

	// A message of Neighbor Discovery has the MAC address in its only option.
	const length, optionLength = 24, 8
	withMAC := func(kind, option byte) []expr.Any {
		return rule(router, etherTypeIs(unix.ETH_P_IPV6), icmpv6(kind),
			when(ipv6PayloadLength(), 0, length+optionLength),
			when(transport(length, 1), option),
			writeWithChecksum(expr.PayloadBaseTransportHeader, length+2, 6, icmpv6Checksum))
	}

	return [][]expr.Any{
		rule(router, fromARP, write(expr.PayloadBaseNetworkHeader, 8, 6)),
		rule(router, fromARP, when(arpOperation(), 0, arpRequest),
			[]expr.Any{&expr.Immediate{Register: regValue, Data: make([]byte, 4)}},
			write(expr.PayloadBaseNetworkHeader, 14, 4)),
		rule(linkLocal, etherTypeIs(unix.ETH_P_IPV6), icmpv6(solicitation),
			unless(ipv6Source(), make([]byte, 16)...),
			writeWithChecksum(expr.PayloadBaseNetworkHeader, 8, 16, ipv6Header+icmpv6Checksum)),
		withMAC(solicitation, optionSourceMAC),
		withMAC(advertisement, optionTargetMAC),
		rule(router, write(expr.PayloadBaseLLHeader, 6, 6)),
	}
}

const (
	arpRequest     = 1  // operation (RFC 826)
	ipv6Header     = 40 // bytes, without extension headers
	icmpv6Checksum = 2  // offset in the message (RFC 4443, section 2.1)
)

// mapped reads the value that a map has for a key into regValue. It matches if there is one.
func mapped(set string, key ...expr.Any) []expr.Any {
	return append(key, &expr.Lookup{
		SourceRegister: regPort, SetName: set, DestRegister: regValue, IsDestRegSet: true,
	})
}

// write writes what is in regValue into the frame.
func write(base expr.PayloadBase, offset, length uint32) []expr.Any {
	return []expr.Any{&expr.Payload{
		OperationType: expr.PayloadWrite, SourceRegister: regValue, Base: base, Offset: offset,
		Len: length,
	}}
}

// writeWithChecksum is write for a part that an Internet checksum (RFC 1071) covers. The checksum
// has an offset from the same base.
func writeWithChecksum(base expr.PayloadBase, offset, length, checksum uint32) []expr.Any {
	return []expr.Any{&expr.Payload{
		OperationType: expr.PayloadWrite, SourceRegister: regValue, Base: base, Offset: offset,
		Len: length, CsumType: expr.CsumTypeInet, CsumOffset: checksum,
	}}
}
