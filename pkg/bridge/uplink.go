// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Uplink is a netdev that VXLAN is sent from, such as a port of the card, a bond, or a VLAN of one.
type Uplink struct {
	Name string // or an alternative name
	// First and Last are the VNIs of the networks that it carries, 1-16777215; 0: those that no
	// other uplink has.
	First, Last uint32
}

const maxVNI = 1<<24 - 1 // RFC 7348, section 5

var uplinkForm = regexp.MustCompile(`^([^=/\s]+)(?:=(\d{1,8})-(\d{1,8}))?$`)

// ParseUplink parses "p0" or "p0=1-9999", the VNIs of the networks that the uplink carries.
func ParseUplink(text string) (Uplink, error) {
	parts := uplinkForm.FindStringSubmatch(text)
	if parts == nil {
		return Uplink{},
			fmt.Errorf("%q: must be the name of a netdev, or with VNIs, such as p0=1-9999", text)
	}

	u := Uplink{Name: parts[1]}
	if parts[2] == "" {
		return u, nil
	}

	first, _ := strconv.ParseUint(parts[2], 10, 32) // of at most 8 digits
	last, _ := strconv.ParseUint(parts[3], 10, 32)
	if first < 1 || first > last || last > maxVNI {
		return Uplink{}, fmt.Errorf("%q: VNIs must be in 1-%d, the lowest first", text, maxVNI)
	}

	u.First, u.Last = uint32(first), uint32(last)
	return u, nil
}

func (u Uplink) is(netdev *netlink.LinkAttrs) bool {
	return netdev.Name == u.Name || slices.Contains(netdev.AltNames, u.Name)
}

func (u Uplink) has(vni uint32) bool { return u.First <= vni && vni <= u.Last }

// checkUplinks finds uplinks that are for the same networks.
func checkUplinks(uplinks []Uplink) error {
	var failed []error
	for i, u := range uplinks {
		for _, other := range uplinks[:i] {
			if u.First <= other.Last && other.First <= u.Last {
				failed = append(failed,
					fmt.Errorf("uplinks %s and %s have VNIs in common: give each its own, such "+
						"as %s=1-9999 and %s=10000-19999",
						other.Name, u.Name, other.Name, u.Name))
			}
		}
	}

	return errors.Join(failed...)
}

// uplinkFor returns the uplink of networks with a VNI, nil if there is none.
func uplinkFor(uplinks []Uplink, vni uint32) *Uplink {
	for _, is := range []func(Uplink) bool{
		func(u Uplink) bool { return u.has(vni) },
		func(u Uplink) bool { return u.Last == 0 },
	} {
		if i := slices.IndexFunc(uplinks, is); i >= 0 {
			return &uplinks[i]
		}
	}
	return nil
}

// Underlay is the IP version of the network between the xPUs, which all xPUs of a network must have
// in common.
type Underlay string

const (
	// UnderlayAuto is IPv4 for an uplink that has an IPv4 address, else IPv6.
	UnderlayAuto Underlay = "auto"
	UnderlayIPv4 Underlay = "ipv4"
	UnderlayIPv6 Underlay = "ipv6"
)

func (u Underlay) check() error {
	switch u {
	case UnderlayAuto, UnderlayIPv4, UnderlayIPv6:
		return nil
	}
	return fmt.Errorf("underlay %q: must be %s, %s or %s", u, UnderlayAuto, UnderlayIPv4,
		UnderlayIPv6)
}

// ipVersions are what an underlay may be of, in the order in which an uplink's addresses are looked
// for.
var ipVersions = [...]struct {
	underlay Underlay
	name     string
	family   int
	overhead int // bytes of the inner Ethernet, VXLAN, UDP and outer IP headers
	// multicast for frames to unknown addresses; the network's VNI is in the last 3 bytes
	groups net.IP
}{
	// administratively scoped (RFC 2365)
	{UnderlayIPv4, "IPv4", unix.AF_INET, 14 + 8 + 8 + 20, net.IPv4(239, 0, 0, 0).To4()},
	// of the organization (RFC 7346)
	{UnderlayIPv6, "IPv6", unix.AF_INET6, 14 + 8 + 8 + 40, net.ParseIP("ff18:0:0:4789::")},
}

// underlay is where a network's VXLAN is sent from and to.
type underlay struct {
	uplink netlink.Link
	group  net.IP // of multicast
	mtu    int    // in bytes, of what fits in one packet
	// blocked is why nothing passes the uplink now; nil if frames do, as far as the kernel knows.
	blocked error
}

// underlayOf finds the uplink of networks with a VNI.
func (b *bridgePlane) underlayOf(vni uint32) (underlay, error) {
	named := uplinkFor(b.uplinks, vni)
	if named == nil {
		return underlay{}, fmt.Errorf("vni %d: no uplink of the agent has it (--uplink)", vni)
	}

	uplink, err := b.find(named.Name)
	if err != nil {
		return underlay{}, err
	}
	if uplink == nil {
		return underlay{}, fmt.Errorf("netdev %s, the uplink, is missing", named.Name)
	}

	blocked := blockage(uplink.Attrs())
	var wanted []string
	for _, v := range ipVersions {
		if b.underlay != UnderlayAuto && b.underlay != v.underlay {
			continue
		}

		wanted = append(wanted, v.name)
		has, err := b.canSend(uplink, v.family)
		if err != nil {
			return underlay{}, fmt.Errorf("netdev %s, the uplink: addresses: %w", named.Name, err)
		}
		if !has {
			continue
		}

		group := slices.Clone(v.groups)
		copy(group[len(group)-3:], []byte{byte(vni >> 16), byte(vni >> 8), byte(vni)})

		return underlay{uplink, group, uplink.Attrs().MTU - v.overhead, blocked}, nil
	}

	if blocked != nil { // which takes IPv6 addresses away
		return underlay{}, blocked
	}

	return underlay{}, fmt.Errorf("netdev %s, the uplink, has no %s address to send VXLAN from",
		named.Name, strings.Join(wanted, " or "))
}

// blockage returns why nothing passes an uplink, nil if frames do as far as the kernel knows.
func blockage(uplink *netlink.LinkAttrs) error {
	switch {
	case uplink.Flags&net.FlagUp == 0:
		return fmt.Errorf("netdev %[1]s, the uplink, is administratively down: set it up (ip "+
			"link set %[1]s up)",
			uplink.Name)
	case uplink.RawFlags&unix.IFF_LOWER_UP == 0:
		return fmt.Errorf("netdev %s, the uplink, has no carrier: check its cable and the port "+
			"at the other end",
			uplink.Name)
	case uplink.RawFlags&unix.IFF_RUNNING == 0: // such as dormant, before 802.1X has let it in
		return fmt.Errorf("netdev %s, the uplink, is not operational but %s (ip link show %[1]s)",
			uplink.Name, uplink.OperState)
	}
	return nil
}

// canSend tells whether a netdev has an address of a family with which it reaches other machines.
func (b *bridgePlane) canSend(link netlink.Link, family int) (bool, error) {
	addresses, err := b.addresses(link.Attrs().Index, family)
	usable := func(a netip.Prefix) bool {
		return family == unix.AF_INET || a.Addr().IsGlobalUnicast()
	}
	return slices.ContainsFunc(addresses, usable), err
}

// uplinkState is what networks with a VNI depend on.
type uplinkState struct {
	index, mtu int
	flags      uint32 // that say whether frames pass
}

func uplinkStateOf(attrs *netlink.LinkAttrs) uplinkState {
	return uplinkState{
		attrs.Index, attrs.MTU,
		attrs.RawFlags & (unix.IFF_UP | unix.IFF_LOWER_UP | unix.IFF_RUNNING),
	}
}

// uplinkChanged tells whether an event has anything new of an uplink for the networks. Each VXLAN
// port that is made is an event of it too.
func (b *bridgePlane) uplinkChanged(attrs *netlink.LinkAttrs, removed bool) (changed bool) {
	for _, u := range b.uplinks {
		before := b.uplinksNow[u.Name]
		is := u.is(attrs)
		if !is && attrs.Index != before.index {
			continue
		}

		now := uplinkStateOf(attrs)
		if removed || !is {
			now = uplinkState{}
		}

		b.uplinksNow[u.Name] = now
		changed = changed || now != before
	}
	return changed
}

// uplinksUnknown has the next event of each uplink be something new, because events were lost.
func (b *bridgePlane) uplinksUnknown() {
	for name, state := range b.uplinksNow {
		state.mtu = -1
		b.uplinksNow[name] = state
	}
}

// isUplink tells whether an ifindex is that of an uplink.
func (b *bridgePlane) isUplink(index int) bool {
	for _, now := range b.uplinksNow {
		if now.index == index {
			return true
		}
	}
	return false
}
