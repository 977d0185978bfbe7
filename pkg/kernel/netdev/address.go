package netdev

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// addAddress adds an address, and accepts that the netdev has it already.
func addAddress(pod *conn, l netlink.Link, address netip.Prefix) error {
	a := &netlink.Addr{IPNet: netipx.PrefixIPNet(address.Masked())}
	a.IP = address.Addr().AsSlice()
	if address.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	err := pod.AddrAdd(l, a)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	have, listErr := addresses(pod, l)
	if slices.Contains(have, address) {
		return nil
	}
	return errors.Join(err, listErr)
}

// addRoute adds a route, and accepts that the very same is there already.
func addRoute(pod *conn, l netlink.Link, route function.Route) error {
	r := routeOut(l, route)
	err := pod.RouteAdd(&r)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	if route.Yield {
		return nil
	}
	other, listErr := routeTo(pod, route)
	if other == nil {
		return errors.Join(err, listErr)
	}
	if sameWay(*other, r) {
		return nil
	}
	gateway := "none"
	if other.Gw != nil {
		gateway = other.Gw.String()
	}
	return fmt.Errorf("the pod has one already, via interface index %d gateway %s: %w", other.LinkIndex, gateway, err)
}

// routeOut is a route out through the link, as the kernel has it.
func routeOut(l netlink.Link, route function.Route) netlink.Route {
	r := netlink.Route{
		LinkIndex: l.Attrs().Index, Dst: netipx.PrefixIPNet(route.To), Priority: route.Metric,
		Table: tableOf(route), Protocol: unix.RTPROT_STATIC, Scope: netlink.SCOPE_LINK, MTU: route.MTU, AdvMSS: route.AdvMSS,
	}
	if route.Via.IsValid() {
		r.Gw, r.Scope = route.Via.AsSlice(), netlink.SCOPE_UNIVERSE
	}
	if route.Scope != nil {
		r.Scope = netlink.Scope(*route.Scope)
	}
	return r
}

// sameWay says whether two routes use the same link and gateway.
func sameWay(a, b netlink.Route) bool { return a.LinkIndex == b.LinkIndex && a.Gw.Equal(b.Gw) }

// routeTo finds the route to the same destination with the same metric.
func routeTo(pod *conn, route function.Route) (*netlink.Route, error) {
	family, metric := netlink.FAMILY_V4, route.Metric
	if route.To.Addr().Is6() {
		family, metric = netlink.FAMILY_V6, cmp.Or(metric, 1024) // IP6_RT_PRIO_USER, net/ip6_route.h
	}
	filter := &netlink.Route{Dst: netipx.PrefixIPNet(route.To), Table: tableOf(route)}
	routes, err := consistent(func() ([]netlink.Route, error) {
		return pod.RouteListFiltered(family, filter, netlink.RT_FILTER_DST|netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, err
	}
	for _, r := range routes {
		if r.Priority == metric {
			return &r, nil
		}
	}
	return nil, nil
}

func addresses(c *conn, l netlink.Link) ([]netip.Prefix, error) {
	list, err := consistent(func() ([]netlink.Addr, error) { return c.AddrList(l, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, err
	}
	var prefixes []netip.Prefix
	for _, a := range list {
		if p, ok := netipx.FromStdIPNet(a.IPNet); ok {
			prefixes = append(prefixes, p)
		}
	}
	return prefixes, nil
}

func tableOf(r function.Route) int { return cmp.Or(r.Table, unix.RT_TABLE_MAIN) }
