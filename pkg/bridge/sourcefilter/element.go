// SPDX-License-Identifier: Apache-2.0

package sourcefilter

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"github.com/google/nftables"

	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
)

// Names of the table's sets. The key of an element begins with the ifindex of the port that a frame
// comes from. In some sets an address follows.
const (
	setIsolated      = "isolated"       // port: its frames do not reach the machine
	setFiltered      = "filtered"       // port: it must use its MAC address
	setMACs          = "macs"           // port . MAC address that it may use
	setAddressed     = "addressed"      // port: it must use its IP addresses
	setIPv4          = "ipv4"           // port . IPv4 address that it may use
	setIPv6          = "ipv6"           // port . IPv6 address that it may use
	setForeignMACs   = "foreign-macs"   // VXLAN port . MAC address of a port of this machine
	setForeignIPv4   = "foreign-ipv4"   // VXLAN port . IPv4 address of a port of this machine
	setForeignIPv6   = "foreign-ipv6"   // VXLAN port . IPv6 address of a port of this machine
	setDroppedFrames = "dropped-frames" // port, with a counter

	setGatewayMACs  = "gateway-macs"  // port . MAC address of its network's gateway
	setGatewayIPv4  = "gateway-ipv4"  // port . IPv4 address of its network's gateway
	setGatewayIPv6  = "gateway-ipv6"  // port . IPv6 address of its network's gateway
	setReservedIPv4 = "reserved-ipv4" // port . IPv4 address that it must not send from
	setReservedIPv6 = "reserved-ipv6" // port . IPv6 address that it must not send from
)

// Sets of trunks. The VLAN id of the frame follows the ifindex in the sets whose names begin with
// trunkPrefix.
const (
	setTrunks = "trunks" // port: its frames must have the VLAN id of one of its networks
	setOpen   = "open"   // port . VLAN id: any source address may be used

	trunkPrefix = "trunk-"
)

// scope is how the keys of sets begin: with the ifindex of a port, and in the sets of trunks with a
// VLAN id after it.
type scope struct{ tagged bool }

// name returns the name of a set or a chain in the scope.
func (s scope) name(name string) string {
	if s.tagged {
		return trunkPrefix + name
	}
	return name
}

// keyTypes returns the type of the keys of each set in the table for bridges.
func keyTypes() map[string]nftables.SetDatatype {
	port := nftables.TypeIFIndex
	with := func(t nftables.SetDatatype) nftables.SetDatatype {
		return nftables.MustConcatSetType(port, t)
	}
	types := map[string]nftables.SetDatatype{
		setIsolated: port, setFiltered: port, setAddressed: port, setDroppedFrames: port,
		setMACs: with(nftables.TypeEtherAddr), setForeignMACs: with(nftables.TypeEtherAddr),
		setIPv4: with(nftables.TypeIPAddr), setForeignIPv4: with(nftables.TypeIPAddr),
		setIPv6: with(nftables.TypeIP6Addr), setForeignIPv6: with(nftables.TypeIP6Addr),
		setGatewayMACs: with(nftables.TypeEtherAddr),
		setGatewayIPv4: with(nftables.TypeIPAddr), setReservedIPv4: with(nftables.TypeIPAddr),
		setGatewayIPv6: with(nftables.TypeIP6Addr), setReservedIPv6: with(nftables.TypeIP6Addr),
		setTrunks: port, setVXLANs: port, setRouterMACs: port, setRouterLinkLocals: port,
		setRouterGateways: with(nftables.TypeEtherAddr),
	}

	vlan := nftables.TypeInetService // a number of 2 bytes; the library has no type for VLAN ids
	inVLAN := func(t nftables.SetDatatype) nftables.SetDatatype {
		return nftables.MustConcatSetType(port, vlan, t)
	}
	for set, key := range map[string]nftables.SetDatatype{
		setFiltered: with(vlan), setAddressed: with(vlan), setOpen: with(vlan),
		setMACs: inVLAN(nftables.TypeEtherAddr), setForeignMACs: inVLAN(nftables.TypeEtherAddr),
		setIPv4: inVLAN(nftables.TypeIPAddr), setForeignIPv4: inVLAN(nftables.TypeIPAddr),
		setIPv6: inVLAN(nftables.TypeIP6Addr), setForeignIPv6: inVLAN(nftables.TypeIP6Addr),
		setReservedIPv4: inVLAN(nftables.TypeIPAddr),
		setReservedIPv6: inVLAN(nftables.TypeIP6Addr),
	} {
		types[scope{tagged: true}.name(set)] = key
	}

	return types
}

// element is an element of a set, or of a map.
type element struct {
	set   string
	key   string // in the bytes that the kernel compares
	value string // of an element of a map
}

// slot is an element without its value. A map has one element for each.
func (e element) slot() element { return element{set: e.set, key: e.key} }

// elementFor returns the element with a port's ifindex and an address. Both are padded to multiples
// of 4 bytes (struct nft_regs).
func elementFor(set string, index int, address []byte) element {
	key := binary.NativeEndian.AppendUint32(nil, uint32(index))
	key = append(key, address...)
	for len(key)%4 != 0 {
		key = append(key, 0)
	}
	return element{set: set, key: string(key)}
}

// elements are the elements that one port needs.
type elements map[element]bool

func (e elements) add(set string, index int, address []byte) {
	e[elementFor(set, index, address)] = true
}

// addValue adds an element of a map.
func (e elements) addValue(set string, index int, address, value []byte) {
	of := elementFor(set, index, address)
	of.value = string(value)
	e[of] = true
}

// isolated returns the element that keeps the frames of a port from the machine.
func isolated(index int) elements { return elements{elementFor(setIsolated, index, nil): true} }

// member is a port in some of its networks.
type member struct {
	scope
	index     int
	vlan      uint16 // of a trunk, which is a member in one network at a time
	networks  []string
	mac       net.HardwareAddr
	addresses []netip.Addr
	shared    bool // ports at other machines have the same addresses
}

// add adds an element of the member's scope.
func (m member) add(all elements, set string, address []byte) {
	var key []byte
	if m.tagged { // padded like an address
		key = append(binary.BigEndian.AppendUint16(nil, m.vlan), 0, 0)
	}
	all.add(m.name(set), m.index, append(key, address...))
}

// members returns the port as a member of its networks.
func (p Port) members() []member {
	if len(p.Tagged) == 0 {
		return []member{{
			index: p.Index, networks: p.Networks, mac: p.MAC, addresses: p.Addresses,
			shared: p.Shared,
		}}
	}

	var all []member
	for _, t := range p.Tagged {
		all = append(all, member{
			scope: scope{tagged: true}, index: p.Index, vlan: t.VLAN,
			networks: []string{t.Network}, mac: t.MAC, addresses: t.Addresses,
			shared: t.Shared,
		})
	}
	return all
}

// elementsOf returns the elements that a port needs.
func (f *Filter) elementsOf(p Port) elements {
	all := isolated(p.Index)
	for _, m := range p.members() {
		if m.tagged {
			all.add(setTrunks, p.Index, nil)
			if m.mac == nil {
				m.add(all, setOpen, nil)
			}
		}
		f.addMember(all, m)
	}
	return all
}

// addMember adds the elements that a port needs in some of its networks.
func (f *Filter) addMember(all elements, m member) {
	reserved := f.addGateways(all, m)
	if m.mac == nil {
		return
	}

	var foreign []int
	for _, network := range m.networks {
		if v := f.vxlans[network]; v.Index != 0 {
			foreign = append(foreign, v.Index)
		}
	}

	m.add(all, setFiltered, nil)
	m.add(all, setMACs, m.mac)

	for _, index := range foreign {
		all.add(setForeignMACs, index, m.mac)
	}

	if len(m.addresses) == 0 {
		return
	}

	if m.shared {
		foreign = nil
	}
	m.add(all, setAddressed, nil)
	for _, a := range append([]netip.Addr{netaddr.LinkLocal(m.mac)}, m.addresses...) {
		if reserved[a] {
			continue
		}

		set, foreignSet := setIPv4, setForeignIPv4
		if a.Is6() {
			set, foreignSet = setIPv6, setForeignIPv6
		}
		m.add(all, set, a.AsSlice())
		for _, index := range foreign {
			all.add(foreignSet, index, a.AsSlice())
		}
	}
}

// portOf returns the ifindex in an element's key.
func portOf(key []byte) (int, error) {
	if len(key) < 4 {
		return 0, fmt.Errorf("element with a key of %d bytes, want at least 4", len(key))
	}
	return int(binary.NativeEndian.Uint32(key)), nil
}
