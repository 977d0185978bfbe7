// SPDX-License-Identifier: Apache-2.0

// Package hostuse finds out what a host uses its netdevs for, so that no pod gets a netdev that the
// host needs. The offer of a Function, its attachment and the removal of a PF's VFs share this
// answer.
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

// Netdev describes what the host does with one of its netdevs.
type Netdev struct {
	// Use is a predicate that says what the host uses the netdev for: "is a port of bridge br0",
	// "carries vlan eth5.100", "has address 10.1.0.5/24", "has route 10.2.0.0/16 in table 100". It
	// is "" if the host does not use the netdev. An IPv6 link-local address does not count as a
	// use, because the kernel assigns one to every netdev that is up.
	Use string
	// DefaultRoute reports whether a default route of the main table uses the netdev.
	DefaultRoute bool
	// Carrier reports whether the netdev is up and has a carrier. This does not count as a use,
	// because many hosts set all netdevs up.
	Carrier bool
	// Parent is the name of the device on its bus, mostly a PCI address. It is "" if the kernel
	// does not report the device.
	Parent string
	// AltNames are the other names of the netdev (IFLA_PROP_LIST), sorted; nil if it has none.
	AltNames []string
}

// Netdevs holds the netdevs of a network namespace by name.
type Netdevs map[string]Netdev

// Read returns the uses of all netdevs in the network namespace at the path, or in the namespace of
// the process if the path is "". A netdev on top of another one counts only if both are in this
// namespace, because the kernel does not list netdevs of other namespaces.
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

// reader collects the uses of netdevs by ifindex.
type reader struct {
	handle   *links.Handle
	links    []netlink.Link
	uses     map[int]string // the first use that was found
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
			AltNames: slices.Sorted(slices.Values(a.AltNames)),
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

// readUses finds the ports of bridges, bonds, OVS and VRFs, the netdevs that lie below another
// netdev, and XDP programs.
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

// peers are the kinds of netdevs whose IFLA_LINK is the other end of a pair and not a lower netdev
// (drivers/net).
var peers = []string{"veth", "vxcan", "netkit"}

// lower returns the ifindex of the netdev that a VLAN, macvlan or tunnel lies on. It returns 0 if
// there is no such netdev or if it is in another namespace.
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

// readRoutes finds the netdevs that routes of any table use. The main table is not enough, because
// a default route may be in a policy table, or may be replaced by two routes that cover half of all
// addresses each.
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

// meant reports whether a user or a program made the route on purpose. It excludes the routes that
// the kernel makes for addresses and for IPv6 link-local addresses, because addresses count by
// themselves.
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
