// SPDX-License-Identifier: Apache-2.0

package plane

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
	Name string // a name or alternative name
	// First and Last bound the VNIs of the networks that the uplink carries, 1-16777215. If both
	// are 0, the uplink carries the networks that no other uplink carries.
	First, Last uint32
}

// MaxVNI is the largest VNI that a network can have (RFC 7348, section 5).
const MaxVNI = 1<<24 - 1

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

	first, _ := strconv.ParseUint(parts[2], 10, 32) // has at most 8 digits
	last, _ := strconv.ParseUint(parts[3], 10, 32)
	if first < 1 || first > last || last > MaxVNI {
		return Uplink{}, fmt.Errorf("%q: VNIs must be in 1-%d, the lowest first", text, MaxVNI)
	}

	u.First, u.Last = uint32(first), uint32(last)
	return u, nil
}

// names reports whether the uplink is this netdev.
func (u Uplink) names(netdev *netlink.LinkAttrs) bool {
	return netdev.Name == u.Name || slices.Contains(netdev.AltNames, u.Name)
}

// checkUplinks returns an error if two uplinks carry the same networks.
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

// UplinkFor returns the uplink that carries a VNI, or nil if there is none.
func UplinkFor(uplinks []Uplink, vni uint32) *Uplink {
	var other *Uplink
	for i, u := range uplinks {
		switch {
		case u.First <= vni && vni <= u.Last:
			return &uplinks[i]
		case u.Last == 0:
			other = &uplinks[i]
		}
	}
	return other
}

// Underlay is the IP version of the network between the xPUs. All xPUs must use the same version.
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

// ipVersions are the IP versions of an underlay. Auto takes the first one of which the uplink has
// an address.
var ipVersions = [...]struct {
	underlay Underlay
	name     string
	family   int
	overhead int // bytes of the inner Ethernet, VXLAN, UDP and outer IP headers
	// groups are the multicast groups for frames to unknown addresses. A group has the network's
	// VNI in its last 3 bytes.
	groups net.IP
}{
	// administratively scoped (RFC 2365)
	{UnderlayIPv4, "IPv4", unix.AF_INET, 14 + 8 + 8 + 20, net.IPv4(239, 0, 0, 0).To4()},
	// with the scope of the organization (RFC 7346)
	{UnderlayIPv6, "IPv6", unix.AF_INET6, 14 + 8 + 8 + 40, net.ParseIP("ff18:0:0:4789::")},
}

// underlay says where a network's VXLAN is sent from and to.
type underlay struct {
	uplink netlink.Link
	own    []netip.Addr // the addresses of the uplink
	group  net.IP       // the multicast group
	mtu    int          // of the network, in bytes
	// blocked is the reason why no frames pass the uplink. It is nil if, as far as the kernel
	// knows, frames pass.
	blocked error
}

// is4 reports whether VXLAN is sent over IPv4.
func (u underlay) is4() bool { return u.own[0].Is4() }

// sender returns an address of this machine alone in the underlay: the VTEP if there is one, or
// else the lowest address of the uplink, so that the order of the addresses does not matter.
func (u underlay) sender(vtep netip.Addr) netip.Addr {
	if vtep.IsValid() {
		return vtep
	}
	return slices.MinFunc(u.own, netip.Addr.Compare)
}

// ErrOtherVTEP says that the uplink of a network does not have the address that the network asks
// for.
var ErrOtherVTEP = errors.New("is not an address of the uplink")

// CheckVTEP returns an error that wraps [ErrOtherVTEP] if the uplink of a VNI lacks the address,
// and another error if this is not known. It returns nil for the zero address.
func (p *Plane) CheckVTEP(vni uint32, vtep netip.Addr) error {
	if !vtep.IsValid() {
		return nil
	}
	_, err := p.underlayOf(vni, vtep)
	return err
}

// underlayOf returns the underlay of the network with a VNI, and with a VTEP unless that is zero.
func (p *Plane) underlayOf(vni uint32, vtep netip.Addr) (underlay, error) {
	named := UplinkFor(p.uplinks, vni)
	if named == nil {
		return underlay{}, fmt.Errorf("vni %d: no uplink of the agent has it (--uplink)", vni)
	}

	uplink, err := p.find(named.Name)
	if err != nil {
		return underlay{}, err
	}
	if uplink == nil {
		return underlay{}, fmt.Errorf("netdev %s, the uplink, is missing", named.Name)
	}

	blocked := checkOperational(uplink.Attrs())
	var wanted []string
	for _, v := range ipVersions {
		if p.underlay != UnderlayAuto && p.underlay != v.underlay {
			continue
		}

		wanted = append(wanted, v.name)
		own, err := p.senders(uplink, v.family)
		if err != nil {
			return underlay{}, fmt.Errorf("netdev %s, the uplink: addresses: %w", named.Name, err)
		}
		if len(own) == 0 {
			continue
		}

		if vtep.IsValid() && !slices.Contains(own, vtep) {
			return underlay{}, fmt.Errorf("%s %w: netdev %s has %s", vtep, ErrOtherVTEP, named.Name,
				textOf(own))
		}

		group := slices.Clone(v.groups)
		copy(group[len(group)-3:], []byte{byte(vni >> 16), byte(vni >> 8), byte(vni)})

		return underlay{uplink, own, group, uplink.Attrs().MTU - v.overhead, blocked}, nil
	}

	if blocked != nil { // a netdev that is down loses its IPv6 addresses
		return underlay{}, blocked
	}

	return underlay{}, fmt.Errorf("netdev %s, the uplink, has no %s address to send VXLAN from",
		named.Name, strings.Join(wanted, " or "))
}

// checkOperational returns an error if no frames pass an uplink, as far as the kernel knows.
func checkOperational(uplink *netlink.LinkAttrs) error {
	switch {
	case uplink.Flags&net.FlagUp == 0:
		return fmt.Errorf("netdev %[1]s, the uplink, is administratively down: set it up (ip "+
			"link set %[1]s up)",
			uplink.Name)
	case uplink.RawFlags&unix.IFF_LOWER_UP == 0:
		return fmt.Errorf("netdev %s, the uplink, has no carrier: check its cable and the port "+
			"at the other end",
			uplink.Name)
	case uplink.RawFlags&unix.IFF_RUNNING == 0: // for example dormant, until 802.1X admits it
		return fmt.Errorf("netdev %s, the uplink, is not operational but %s (ip link show %[1]s)",
			uplink.Name, uplink.OperState)
	}
	return nil
}

// senders returns the addresses of a family by which a netdev reaches other machines.
func (c *conn) senders(link netlink.Link, family int) (usable []netip.Addr, err error) {
	addresses, err := c.addresses(link.Attrs().Index, family)
	for _, a := range addresses {
		if family == unix.AF_INET || a.Addr().IsGlobalUnicast() {
			usable = append(usable, a.Addr())
		}
	}
	return usable, err
}

func textOf(addresses []netip.Addr) string {
	var texts []string
	for _, a := range addresses {
		texts = append(texts, a.String())
	}
	return strings.Join(texts, ", ")
}

// uplinkState is the part of an uplink's state that networks with a VNI depend on. It is zero if
// the uplink is missing.
type uplinkState struct {
	index, mtu int
	flags      uint32 // the flags that say whether frames pass
}

func uplinkStateOf(attrs *netlink.LinkAttrs) uplinkState {
	return uplinkState{
		attrs.Index, attrs.MTU,
		attrs.RawFlags & (unix.IFF_UP | unix.IFF_LOWER_UP | unix.IFF_RUNNING),
	}
}

// uplinkStates are the states of all uplinks, as their events describe them.
type uplinkStates struct {
	uplinks []Uplink
	byName  map[string]uplinkState // by Uplink.Name
}

func newUplinkStates(uplinks []Uplink) *uplinkStates {
	return &uplinkStates{uplinks: uplinks, byName: map[string]uplinkState{}}
}

// update records an event of a netdev, and reports whether the state of an uplink has changed.
// Often it has not, because each VXLAN port that is made causes an event of its uplink.
func (s *uplinkStates) update(attrs *netlink.LinkAttrs, removed bool) (changed bool) {
	for _, u := range s.uplinks {
		before := s.byName[u.Name]
		isUplink := u.names(attrs)
		if !isUplink && attrs.Index != before.index {
			continue
		}

		now := uplinkStateOf(attrs)
		if removed || !isUplink {
			now = uplinkState{}
		}

		s.byName[u.Name] = now
		changed = changed || now != before
	}
	return changed
}

// eventsLost makes the next event of each uplink count as a change.
func (s *uplinkStates) eventsLost() {
	for name, state := range s.byName {
		state.mtu = -1
		s.byName[name] = state
	}
}

// contains reports whether a netdev is an uplink.
func (s *uplinkStates) contains(index int) bool {
	for _, state := range s.byName {
		if state.index == index {
			return true
		}
	}
	return false
}
