// SPDX-License-Identifier: Apache-2.0

// Package netaddr has what package net/netip lacks: addresses of package net, which libraries of
// CNI and netlink use, and ranges of addresses.
package netaddr

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// FromIP returns the address; ok is false if ip has no valid length. An IPv4 address in the form
// of an IPv6 address becomes an IPv4 address, because package net does not tell them apart.
func FromIP(ip net.IP) (address netip.Addr, ok bool) {
	address, ok = netip.AddrFromSlice(ip)
	return address.Unmap(), ok
}

// FromIPNet returns the prefix; ok is false if address or mask is none.
func FromIPNet(network *net.IPNet) (prefix netip.Prefix, ok bool) {
	if network == nil {
		return netip.Prefix{}, false
	}
	address, ok := FromIP(network.IP)
	ones, bits := network.Mask.Size()
	if !ok || bits < address.BitLen() {
		return netip.Prefix{}, false
	}

	// The mask of an IPv4 address may have the form of an IPv6 mask too.
	prefix = netip.PrefixFrom(address, ones-(bits-address.BitLen()))
	return prefix, prefix.IsValid()
}

// ToIPNet is the opposite of [FromIPNet]. The prefix must be valid.
func ToIPNet(prefix netip.Prefix) *net.IPNet {
	return &net.IPNet{
		IP:   prefix.Addr().AsSlice(),
		Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen()),
	}
}

// Last returns the last address of a valid prefix.
func Last(prefix netip.Prefix) netip.Addr {
	bytes := prefix.Masked().Addr().AsSlice()
	for bit := prefix.Bits(); bit < prefix.Addr().BitLen(); bit++ {
		bytes[bit/8] |= 0x80 >> (bit % 8)
	}
	last, _ := netip.AddrFromSlice(bytes)
	return last
}

// Range is the addresses from First to Last, both included. They are of one family and have no
// zone.
type Range struct {
	First, Last netip.Addr
}

// Single returns the range of one address.
func Single(ip netip.Addr) Range { return Range{ip, ip} }

// ParseRange reads a prefix, "10.1.0.0/24", or a range, "10.1.0.10-10.1.0.19".
func ParseRange(text string) (Range, error) {
	if prefix, err := netip.ParsePrefix(text); err == nil {
		return Range{prefix.Masked().Addr(), Last(prefix)}, nil
	}

	from, to, _ := strings.Cut(text, "-")
	first, err := netip.ParseAddr(from)
	if err != nil {
		return Range{}, err
	}
	last, err := netip.ParseAddr(to)
	if err != nil {
		return Range{}, err
	}

	if first.BitLen() != last.BitLen() || first.Zone() != "" || last.Zone() != "" ||
		last.Less(first) {
		return Range{}, fmt.Errorf("%q is no range of addresses", text)
	}
	return Range{first, last}, nil
}

// Set is a set of addresses. The zero value is empty.
type Set struct {
	ranges []Range // in order, without overlaps
}

// NewSet returns the set of all addresses of the ranges.
func NewSet(of []Range) Set {
	sorted := slices.SortedFunc(slices.Values(of), func(a, b Range) int {
		return cmp.Or(a.First.Compare(b.First), a.Last.Compare(b.Last))
	})

	var s Set
	for _, r := range sorted {
		if n := len(s.ranges); n > 0 && !s.ranges[n-1].Last.Less(r.First) {
			if s.ranges[n-1].Last.Less(r.Last) {
				s.ranges[n-1].Last = r.Last
			}
			continue
		}
		s.ranges = append(s.ranges, r)
	}

	return s
}

// Find returns the range of the set that contains the address.
func (s Set) Find(ip netip.Addr) (r Range, ok bool) {
	i, exact := slices.BinarySearchFunc(s.ranges, ip, func(r Range, ip netip.Addr) int {
		return r.First.Compare(ip)
	})
	if !exact {
		i-- // the last range that begins before the address
	}
	if i < 0 || s.ranges[i].Last.Less(ip) {
		return Range{}, false
	}
	return s.ranges[i], true
}

// Contains reports whether the address is in the set.
func (s Set) Contains(ip netip.Addr) bool {
	_, ok := s.Find(ip)
	return ok
}

// LinkLocal returns the IPv6 link-local address that Linux derives from a MAC address of 6 bytes
// (RFC 4291, appendix A).
func LinkLocal(mac net.HardwareAddr) netip.Addr {
	return netip.AddrFrom16([16]byte{
		0xfe, 0x80, 8: mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5],
	})
}
