// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// Remotes are the other machines that have networks with a VNI. Frames to unknown addresses are
// sent to each of them (head-end replication), so that the underlay needs no multicast.
type Remotes struct {
	Rules []RemoteRule `json:"remotes"`
}

// RemoteRule says to which addresses the frames of networks are sent.
type RemoteRule struct {
	// VNIs are the networks of the rule. If there are none, the rule is for all.
	VNIs []VNIs `json:"vnis,omitempty"`
	// Addresses are IPv4 or IPv6 addresses of machines. The addresses of this machine may be among
	// them and are left out. If there are none, only other programs say where frames are sent.
	Addresses []netip.Addr `json:"addresses"`
}

// maxRemotes limits the addresses of all rules, and so the copies of a frame.
const maxRemotes = 1024

// VNIs are the VNIs from First to Last.
type VNIs struct{ First, Last uint32 }

var vnisForm = regexp.MustCompile(`^(\d{1,8})(?:-(\d{1,8}))?$`)

// UnmarshalJSON accepts a number, or text such as "1-9999".
func (v *VNIs) UnmarshalJSON(data []byte) error {
	text := string(data)
	if unquoted, err := strconv.Unquote(text); err == nil {
		text = unquoted
	}

	parts := vnisForm.FindStringSubmatch(text)
	if parts == nil {
		return fmt.Errorf("vnis: %q: must be a number, or a range such as 1-9999", text)
	}

	first, _ := strconv.ParseUint(parts[1], 10, 32) // has at most 8 digits
	last, _ := strconv.ParseUint(cmp.Or(parts[2], parts[1]), 10, 32)
	if first < 1 || first > last || last > MaxVNI {
		return fmt.Errorf("vnis: %q: must be in 1-%d, the lowest first", text, MaxVNI)
	}

	*v = VNIs{uint32(first), uint32(last)}
	return nil
}

// ParseRemotes parses YAML. Its errors name the rule and the field, and say what would be right.
func ParseRemotes(text []byte) (*Remotes, error) {
	r := &Remotes{}
	if err := yaml.UnmarshalStrict(text, r); err != nil {
		return nil, err
	}
	if r.Rules == nil { // for example because the file is being written
		return nil, errors.New("remotes: is missing, want a list; [] sends to multicast groups")
	}

	var failed []error
	number := 0
	for i, rule := range r.Rules {
		if rule.Addresses == nil {
			failed = append(failed, fmt.Errorf("remotes[%d].addresses: is missing, want a list; "+
				"[] leaves it to other programs where frames are sent", i))
		}
		number += len(rule.Addresses)
		for j, a := range rule.Addresses {
			if a.Zone() != "" || !a.IsGlobalUnicast() || a.Is4In6() {
				failed = append(failed, fmt.Errorf("remotes[%d].addresses[%d]: %s: must be a "+
					"unicast address that is not link-local, such as 198.51.100.2 or fd00::2",
					i, j, a))
			}
		}
	}

	if number > maxRemotes {
		failed = append(failed, fmt.Errorf("remotes: have %d addresses, must have at most %d",
			number, maxRemotes))
	}
	if err := errors.Join(failed...); err != nil {
		return nil, err
	}

	return r, nil
}

// For returns the addresses of all rules for a VNI, sorted. named is false if there is no rule for
// it. A nil Remotes has no rules.
func (r *Remotes) For(vni uint32) (addresses []netip.Addr, named bool) {
	if r == nil {
		return nil, false
	}
	for _, rule := range r.Rules {
		if len(rule.VNIs) == 0 || slices.ContainsFunc(rule.VNIs, func(v VNIs) bool {
			return v.First <= vni && vni <= v.Last
		}) {
			named = true
			addresses = append(addresses, rule.Addresses...)
		}
	}
	slices.SortFunc(addresses, netip.Addr.Compare)
	return slices.Compact(addresses), named
}

// destinations knows where VXLAN ports send frames to unknown addresses. The data plane writes it,
// and Watch makes it forget a port that has lost one.
type destinations struct {
	mu      sync.Mutex
	byIndex map[int]map[netip.Addr]bool // by ifindex of the VXLAN port
}

func newDestinations() *destinations {
	return &destinations{byIndex: map[int]map[netip.Addr]bool{}}
}

func (d *destinations) get(index int) (have map[netip.Addr]bool, known bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	have, known = d.byIndex[index]
	return have, known
}

func (d *destinations) set(index int, have map[netip.Addr]bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.byIndex[index] = have
}

// forget makes the destinations of a VXLAN port unknown.
func (d *destinations) forget(index int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.byIndex, index)
}

// unknownMAC stands for all addresses that a VXLAN port has no entry for.
var unknownMAC = net.HardwareAddr{0, 0, 0, 0, 0, 0}

// destination returns the entry of a VXLAN port's forwarding database by which frames to unknown
// addresses are sent to a machine.
func destination(index int, to netip.Addr) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF,
		State: netlink.NUD_PERMANENT, HardwareAddr: unknownMAC, IP: to.AsSlice(),
	}
}

// setRemotes makes a VXLAN port send frames to unknown addresses to a network's remotes, and no
// longer to stale ones. All other entries belong to other programs, and stay.
func (p *Plane) setRemotes(vxlan netlink.Link, n Segment, from underlay) error {
	if !n.Unicast {
		return nil
	}

	index := vxlan.Attrs().Index
	have, known := p.destinations.get(index)
	if !known {
		var err error
		if have, err = p.destinationsOf(index); err != nil {
			return linkError(err, vxlan, "forwarding database")
		}
	}

	p.destinations.forget(index) // what is known is right only if all of this succeeds
	now := map[netip.Addr]bool{}
	for to := range have {
		now[to] = true
	}

	for _, to := range n.Remotes {
		if now[to] || to.Is4() != from.is4() || slices.Contains(from.own, to) {
			continue
		}
		if err := p.handle.NeighAppend(destination(index, to)); err != nil {
			return linkError(err, vxlan, "send to %s", to)
		}
		now[to] = true
	}

	for _, to := range n.Stale {
		if !now[to] || slices.Contains(n.Remotes, to) {
			continue
		}
		if err := p.handle.NeighDel(destination(index, to)); err != nil &&
			!errors.Is(err, unix.ENOENT) {
			return linkError(err, vxlan, "no longer send to %s", to)
		}
		delete(now, to)
	}

	p.destinations.set(index, now)

	return nil
}

// destinationsOf lists where a VXLAN port sends frames to unknown addresses.
func (c *conn) destinationsOf(index int) (map[netip.Addr]bool, error) {
	header := &netlink.Ndmsg{Family: unix.AF_BRIDGE, Index: uint32(index)}
	messages, err := request.Send(&c.strict, unix.RTM_GETNEIGH, unix.NLM_F_DUMP, header)
	if err != nil {
		return nil, err
	}

	have := map[netip.Addr]bool{}
	for _, m := range messages {
		entry, err := netlink.NeighDeserialize(m)
		if err != nil {
			return nil, fmt.Errorf("entry of a forwarding database: %w", err)
		}
		to, ok := netip.AddrFromSlice(entry.IP)
		if ok && entry.LinkIndex == index && slices.Equal(entry.HardwareAddr, unknownMAC) {
			have[to.Unmap()] = true
		}
	}

	return have, nil
}
