package inventory

import (
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
)

// readRoutes finds the netdevs of the IPv4 and IPv6 default routes, and the netdevs below those that are bonds, bridges or
// VLANs.
func (s *scanner) readRoutes() {
	found, err := s.options.DefaultNetdevs()
	if err != nil {
		s.report("", reasonRoutes, err)
		return
	}
	s.routed = map[string]bool{}
	for len(found) > 0 {
		netdev := found[0]
		found = found[1:]
		if s.routed[netdev] {
			continue
		}
		s.routed[netdev] = true
		entries, _, _ := s.sysfs.Dir("class/net", netdev).Names() // none if it went meanwhile
		for _, name := range entries {
			if lower, ok := strings.CutPrefix(name, "lower_"); ok {
				found = append(found, lower)
			}
		}
	}
}

// defaultNetdevs asks the kernel for the netdevs that default routes go over. A default route may have several next hops,
// and in IPv6 one destination may have several routes.
func defaultNetdevs(netNS string) ([]string, error) {
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
	var indexes []int
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		defaults := &netlink.Route{Table: unix.RT_TABLE_MAIN} // a nil Dst selects default routes
		const mask = netlink.RT_FILTER_TABLE | netlink.RT_FILTER_DST
		err := handle.RouteListFilteredIter(family, defaults, mask, func(route netlink.Route) bool {
			if len(route.MultiPath) == 0 && route.LinkIndex != 0 { // blackholes have none
				indexes = append(indexes, route.LinkIndex)
			}
			for _, hop := range route.MultiPath {
				indexes = append(indexes, hop.LinkIndex)
			}
			return true
		})
		if err != nil && !errors.Is(err, unix.EAFNOSUPPORT) && !errors.Is(err, unix.EOPNOTSUPP) { // a node without IPv6
			return nil, fmt.Errorf("list routes: %w", err)
		}
	}
	var found []string
	for _, index := range indexes {
		link, err := handle.LinkByIndex(index)
		if errors.Is(err, links.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("netdev %d: %w", index, err)
		}
		found = append(found, link.Attrs().Name)
	}
	return found, nil
}
