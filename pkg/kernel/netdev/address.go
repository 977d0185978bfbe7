package netdev

import (
	"cmp"
	"errors"
	"fmt"
	"net"
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
	if listErr != nil {
		return errors.Join(err, listErr)
	}
	if slices.Contains(have, address) {
		return nil
	}
	return err
}

// addRoute adds a route, and accepts that the very same is there already.
func addRoute(pod *conn, l netlink.Link, route function.Route) error {
	r := &netlink.Route{
		LinkIndex: l.Attrs().Index, Dst: netipx.PrefixIPNet(route.To), Priority: route.Metric,
		Table: tableOf(route), Protocol: unix.RTPROT_STATIC, Scope: netlink.SCOPE_LINK, MTU: route.MTU, AdvMSS: route.AdvMSS,
	}
	if route.Via.IsValid() {
		r.Gw, r.Scope = route.Via.AsSlice(), netlink.SCOPE_UNIVERSE
	}
	if route.Scope != nil {
		r.Scope = netlink.Scope(*route.Scope)
	}
	err := pod.RouteAdd(r)
	if !errors.Is(err, unix.EEXIST) || route.Yield {
		return ignoring(err, unix.EEXIST)
	}
	other, listErr := routeTo(pod, route)
	if listErr != nil {
		return errors.Join(err, listErr)
	}
	if other == nil {
		return err
	}
	if other.LinkIndex == r.LinkIndex && other.Gw.Equal(r.Gw) {
		return nil
	}
	return fmt.Errorf("the pod has one already, via interface index %d gateway %s: %w", other.LinkIndex, gateway(other.Gw), err)
}

// ignoring is err, or nil where it is the one that does not matter.
func ignoring(err, harmless error) error {
	if errors.Is(err, harmless) {
		return nil
	}
	return err
}

func gateway(ip net.IP) string {
	if ip == nil {
		return "none"
	}
	return ip.String()
}

// routeTo finds the route to the same destination with the same metric.
func routeTo(pod *conn, route function.Route) (*netlink.Route, error) {
	filter := &netlink.Route{Dst: netipx.PrefixIPNet(route.To), Table: tableOf(route)}
	routes, err := consistent(func() ([]netlink.Route, error) {
		return pod.RouteListFiltered(family(route.To.Addr()), filter, netlink.RT_FILTER_DST|netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, err
	}
	metric := route.Metric
	if metric == 0 && route.To.Addr().Is6() {
		metric = 1024 // IP6_RT_PRIO_USER, net/ip6_route.h
	}
	for _, r := range routes {
		if r.Priority == metric {
			return &r, nil
		}
	}
	return nil, nil
}

func family(a netip.Addr) int {
	if a.Is4() {
		return netlink.FAMILY_V4
	}
	return netlink.FAMILY_V6
}

func addresses(c *conn, l netlink.Link) ([]netip.Prefix, error) {
	list, err := consistent(func() ([]netlink.Addr, error) { return c.AddrList(l, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, err
	}
	var prefixes []netip.Prefix
	for _, a := range list {
		if p, ok := netipx.FromStdIPNet(&net.IPNet{IP: a.IP, Mask: a.Mask}); ok {
			bits := p.Bits()
			ip, _ := netipx.FromStdIP(a.IP)
			prefixes = append(prefixes, netip.PrefixFrom(ip, bits))
		}
	}
	return prefixes, nil
}

// globalAddresses are those that are not link-local, in the kernel's order.
func globalAddresses(c *conn, l netlink.Link) ([]netip.Prefix, error) {
	all, err := addresses(c, l)
	return slices.DeleteFunc(all, func(p netip.Prefix) bool { return p.Addr().IsLinkLocalUnicast() && p.Addr().Is6() }), err
}

func tableOf(r function.Route) int { return cmp.Or(r.Table, unix.RT_TABLE_MAIN) }
