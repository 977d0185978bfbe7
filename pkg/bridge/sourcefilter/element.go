// SPDX-License-Identifier: Apache-2.0

package sourcefilter

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"github.com/google/nftables"
)

// Names of the table's sets. Their elements begin with the ifindex of the port that a frame comes
// from.
const (
	setIsolated      = "isolated"       // ports that do not reach the machine
	setFiltered      = "filtered"       // ports with a MAC address that they must use
	setMACs          = "macs"           // . MAC address that the port may use
	setAddressed     = "addressed"      // ports with addresses that they must use
	setIPv4          = "ipv4"           // . address that the port may use
	setIPv6          = "ipv6"           //
	setForeignMACs   = "foreign-macs"   // VXLAN port . MAC address that is a port's of this machine
	setForeignIPv4   = "foreign-ipv4"   // VXLAN port . address that is a port's of this machine
	setForeignIPv6   = "foreign-ipv6"   //
	setDroppedFrames = "dropped-frames" // counters, by port
)

// keyTypes are what the sets' elements are made of.
func keyTypes() map[string]nftables.SetDatatype {
	port := nftables.TypeIFIndex
	with := func(t nftables.SetDatatype) nftables.SetDatatype {
		return nftables.MustConcatSetType(port, t)
	}
	return map[string]nftables.SetDatatype{
		setIsolated: port, setFiltered: port, setAddressed: port, setDroppedFrames: port,
		setMACs: with(nftables.TypeEtherAddr), setForeignMACs: with(nftables.TypeEtherAddr),
		setIPv4: with(nftables.TypeIPAddr), setForeignIPv4: with(nftables.TypeIPAddr),
		setIPv6: with(nftables.TypeIP6Addr), setForeignIPv6: with(nftables.TypeIP6Addr),
	}
}

// element is an element of one of the sets.
type element struct {
	set string
	key string // the bytes that the kernel compares
}

// elementFor makes an element of a port's ifindex and an address, each padded to 4 bytes (struct
// nft_regs).
func elementFor(set string, index int, address []byte) element {
	key := binary.NativeEndian.AppendUint32(nil, uint32(index))
	key = append(key, address...)
	for len(key)%4 != 0 {
		key = append(key, 0)
	}
	return element{set, string(key)}
}

// needed are the elements that a port needs.
type needed map[element]bool

func (n needed) add(set string, index int, address []byte) {
	n[elementFor(set, index, address)] = true
}

func (n needed) isolated(index int) needed {
	n.add(setIsolated, index, nil)
	return n
}

func (f *Filter) portNeeds(p Port) needed {
	all := needed{}.isolated(p.Index)
	if p.MAC == nil {
		return all
	}

	var foreign []int
	for _, network := range p.Networks {
		if index := f.vxlans[network]; index != 0 {
			foreign = append(foreign, index)
		}
	}

	all.add(setFiltered, p.Index, nil)
	all.add(setMACs, p.Index, p.MAC)

	for _, index := range foreign {
		all.add(setForeignMACs, index, p.MAC)
	}

	if len(p.Addresses) == 0 {
		return all
	}

	all.add(setAddressed, p.Index, nil)
	for _, a := range append([]netip.Addr{linkLocal(p.MAC)}, p.Addresses...) {
		set, foreignSet := setIPv4, setForeignIPv4
		if a.Is6() {
			set, foreignSet = setIPv6, setForeignIPv6
		}
		all.add(set, p.Index, a.AsSlice())
		for _, index := range foreign {
			all.add(foreignSet, index, a.AsSlice())
		}
	}

	return all
}

// linkLocal is the IPv6 link-local address that Linux makes of a MAC address (RFC 4291, appendix
// A).
func linkLocal(mac net.HardwareAddr) netip.Addr {
	return netip.AddrFrom16([16]byte{
		0xfe, 0x80, 8: mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5],
	})
}

// portOf returns the ifindex in the key of an element.
func portOf(key []byte) (int, error) {
	if len(key) < 4 {
		return 0, fmt.Errorf("element with a key of %d bytes, want at least 4", len(key))
	}
	return int(binary.NativeEndian.Uint32(key)), nil
}
