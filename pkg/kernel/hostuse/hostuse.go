// SPDX-License-Identifier: Apache-2.0

// Package hostuse says what a host uses its netdevs for, so that no pod is given a netdev that the
// host needs. One answer serves all who ask: who offers a Function, who attaches it, and who takes
// the VFs of a PF away.
package hostuse

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// Netdev is what the host does with one of its netdevs.
type Netdev struct {
	// Use is what the netdev is used for, as a predicate: "is a port of bridge br0", "carries vlan
	// eth5.100", "has address 10.1.0.5/24", "has route 10.2.0.0/16 in table 100"; "" for nothing.
	// IPv6 link-local addresses are no use, because the kernel gives one to every netdev that is
	// set up.
	Use string
	// DefaultRoute says whether a default route of the main table goes over the netdev.
	DefaultRoute bool
	// Carrier says whether the netdev is up and has a carrier. That alone is no use: many hosts set
	// all netdevs up.
	Carrier bool
	// Parent is the name of the device on its bus, a PCI address for most; "" where the kernel does
	// not tell.
	Parent string
}

// Netdevs are the netdevs of a network namespace, by their names.
type Netdevs map[string]Netdev

// Read asks the kernel about all netdevs of the network namespace at the path, "" for that of the
// process. What is above a netdev counts only in the same namespace, because the kernel does not
// tell of others.
func Read(netNS string) (Netdevs, error) {
	ns, err := namespace.Open(netNS)
	if err != nil {
		return nil, err
	}
	defer ns.Close()

	handle, err := links.Open(ns)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	defer handle.Close()

	r := reader{handle: handle, uses: map[int]string{}, defaults: map[int]bool{}}
	for _, read := range []func() error{r.readLinks, r.readAddresses, r.readRoutes} {
		if err := read(); err != nil {
			return nil, err
		}
	}

	return r.netdevs(), nil
}

// reader gathers the uses of netdevs by their indexes.
type reader struct {
	handle   *links.Handle
	links    []netlink.Link
	uses     map[int]string // the first that was found
	defaults map[int]bool
}

func (r *reader) note(index int, format string, arguments ...any) {
	if _, noted := r.uses[index]; !noted && index != 0 {
		r.uses[index] = fmt.Sprintf(format, arguments...)
	}
}

func (r *reader) netdevs() Netdevs {
	found := make(Netdevs, len(r.links))
	for _, link := range r.links {
		a := link.Attrs()
		const running = unix.IFF_UP | unix.IFF_LOWER_UP
		found[a.Name] = Netdev{
			Use: r.uses[a.Index], DefaultRoute: r.defaults[a.Index],
			Carrier: a.RawFlags&running == running, Parent: a.ParentDev,
		}
	}

	return found
}

func (r *reader) readLinks() (err error) {
	if r.links, err = request.Consistent(r.handle.LinkList); err != nil {
		return fmt.Errorf("list netdevs: %w", err)
	}
	r.readUses()
	return nil
}

// readUses finds ports of bridges, bonds, OVS and VRFs, what lies on top of a netdev, and XDP
// programs.
func (r *reader) readUses() {
	byIndex := make(map[int]netlink.Link, len(r.links))
	for _, link := range r.links {
		byIndex[link.Attrs().Index] = link
	}

	for _, link := range r.links {
		a := link.Attrs()
		if master, known := byIndex[a.MasterIndex]; known {
			r.note(a.Index, "is a port of %s %s", master.Type(), master.Attrs().Name)
		} else if a.MasterIndex != 0 {
			r.note(a.Index, "is a port of the netdev with index %d", a.MasterIndex)
		}

		if a.Xdp != nil && a.Xdp.Attached {
			r.note(a.Index, "has XDP program %d", a.Xdp.ProgId)
		}
		r.note(lower(link), "carries %s %s", link.Type(), a.Name)
	}
}

// peers are the kinds of netdevs whose IFLA_LINK is the other end of a pair, and not the netdev
// below (drivers/net).
var peers = []string{"veth", "vxcan", "netkit"}

// lower is the index of the netdev of the same namespace that a link lies on, 0 for none: that of a
// VLAN, a macvlan, a tunnel.
func lower(link netlink.Link) int {
	if vxlan, is := link.(*netlink.Vxlan); is && vxlan.VtepDevIndex != 0 {
		return vxlan.VtepDevIndex
	}
	a := link.Attrs()
	if a.NetNsID >= 0 || a.ParentIndex == a.Index || slices.Contains(peers, link.Type()) {
		return 0
	}
	return a.ParentIndex
}

func (r *reader) readAddresses() error {
	addresses, err := request.Consistent(func() ([]netlink.Addr, error) {
		return r.handle.AddrList(nil, netlink.FAMILY_ALL)
	})
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}

	for _, a := range addresses {
		if a.IP.To4() != nil || !a.IP.IsLinkLocalUnicast() {
			r.note(a.LinkIndex, "has address %s", a.IPNet)
		}
	}

	return nil
}

// readRoutes finds the netdevs of routes in all tables: policy tables hide a default route, and two
// halves replace one.
func (r *reader) readRoutes() error {
	every := &netlink.Route{Table: unix.RT_TABLE_UNSPEC}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := request.Consistent(func() ([]netlink.Route, error) {
			var found []netlink.Route
			keep := func(route netlink.Route) bool {
				if meant(route) {
					found = append(found, route)
				}
				return true
			}

			err := r.handle.RouteListFilteredIter(family, every, netlink.RT_FILTER_TABLE, keep)
			return found, err
		})

		noIPv6 := errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)
		if err != nil && !noIPv6 {
			return fmt.Errorf("list routes: %w", err)
		}

		for _, route := range routes {
			r.noteRoute(route)
		}
	}

	return nil
}

// meant says whether somebody or something but the kernel made the route. The kernel makes routes
// for addresses, which are uses by themselves, and for the link-local addresses of IPv6.
func meant(route netlink.Route) bool {
	return route.Protocol != unix.RTPROT_KERNEL && route.Table != unix.RT_TABLE_LOCAL &&
		route.Type == unix.RTN_UNICAST
}

func (r *reader) noteRoute(route netlink.Route) {
	indexes := []int{route.LinkIndex}
	for _, hop := range route.MultiPath {
		indexes = append(indexes, hop.LinkIndex)
	}

	to, isDefault := "default", true
	if route.Dst != nil {
		ones, _ := route.Dst.Mask.Size()
		to, isDefault = route.Dst.String(), ones == 0
	}

	for _, index := range indexes {
		switch {
		case index == 0: // a blackhole, or a route with several next hops
		case route.Table == unix.RT_TABLE_MAIN:
			r.defaults[index] = r.defaults[index] || isDefault
			r.note(index, "has route %s", to)
		default:
			r.note(index, "has route %s in table %d", to, route.Table)
		}
	}
}
