package netdev

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/go-logr/logr"
	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/listen"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

// Attached is what is known about a netdev in a pod.
type Attached struct {
	Before   Snapshot
	Place    Place
	Want     function.Interface
	Observed Observed
}

// Check lists in words the differences between what [Engine.Attach] did and what is in the pod and enforced by the PF and the
// eswitch. Addresses and routes that the pod added are no difference, nor is what a PF or an eswitch does not tell.
func (e *Engine) Check(_ context.Context, device Device, a Attached) ([]string, error) {
	device = device.as(a.Before)
	enforced, err := e.complete(Snapshot{}, device)
	if err != nil {
		return nil, err
	}
	d := Diff(a.Before.enforcing(a.Want).WithoutNetdev(), enforced)
	if a.Want.Userspace {
		return d, nil
	}
	pod, l, err := e.locate(a.Place, a.Before.Identity, a.Want.Name)
	if err != nil {
		return nil, err
	}
	if pod == nil {
		return append(d, fmt.Sprintf("network namespace %s is gone", a.Place.NetNS)), nil
	}
	defer pod.close()
	if l == nil {
		return append(d, fmt.Sprintf("interface %s is not in the pod", a.Want.Name)), nil
	}
	for _, p := range []property{
		{name: "name", value: a.Want.Name, now: l.Name},
		{name: "mac", value: a.Observed.MAC, now: l.MAC},
		{name: "mtu", value: a.Observed.MTU, now: l.MTU},
		{name: "up", value: true, now: l.Up},
		{name: "allmulticast", value: a.Want.AllMulticast, now: a.Want.AllMulticast && l.AllMulticast},
	} {
		if p.value != p.now {
			d = append(d, p.String())
		}
	}
	have, err := addresses(pod, l.Identity.Index)
	if err != nil {
		return nil, fmt.Errorf("interface %s: addresses: %w", a.Want.Name, err)
	}
	for _, address := range a.Want.Addresses {
		if !slices.Contains(have, address) {
			d = append(d, fmt.Sprintf("address %s is missing", address))
		}
	}
	for _, route := range a.Want.Routes {
		r := routeOut(l.Identity.Index, route)
		found, err := routeLike(pod, r)
		if err != nil {
			return nil, fmt.Errorf("interface %s: route to %s: %w", a.Want.Name, route.To, err)
		}
		if found == nil || !route.Yield && !sameWay(*found, r) {
			d = append(d, fmt.Sprintf("route to %s is missing", route.To))
		}
	}
	return d, nil
}

// Add gives a netdev in a pod more addresses and routes, and accepts those that it has already.
func (e *Engine) Add(_ context.Context, a Attached, addresses []netip.Prefix, routes []function.Route) (Observed, error) {
	pod, l, err := e.locate(a.Place, a.Before.Identity, a.Want.Name)
	if err != nil {
		return Observed{}, err
	}
	if pod == nil {
		return Observed{}, fmt.Errorf("network namespace %s: %w", a.Place.NetNS, unix.ENOENT)
	}
	defer pod.close()
	if l == nil {
		return Observed{}, fmt.Errorf("interface %s: is not in the pod", a.Want.Name)
	}
	return e.configure(pod, l.Identity.Index, function.Interface{Name: l.Name, Addresses: addresses, Routes: routes})
}

// addAddress adds an address, and accepts that the netdev has it already.
func addAddress(pod *conn, index int, address netip.Prefix) error {
	a := &netlink.Addr{IPNet: netipx.PrefixIPNet(address)}
	if address.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	err := pod.AddrAdd(reference(index), a)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	have, listErr := addresses(pod, index)
	if slices.Contains(have, address) {
		return nil
	}
	return errors.Join(err, listErr)
}

// addRoute adds a route, and accepts that the pod has it already.
func addRoute(pod *conn, index int, route function.Route) error {
	r := routeOut(index, route)
	err := pod.RouteAdd(&r)
	if errors.Is(err, unix.ENETUNREACH) && route.Via.IsValid() {
		return fmt.Errorf("gateway %s is in no subnet of the interface's addresses: %w", route.Via, err)
	}
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	if route.Yield {
		return nil
	}
	other, listErr := routeLike(pod, r)
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

func routeOut(index int, route function.Route) netlink.Route {
	r := netlink.Route{
		LinkIndex: index, Dst: netipx.PrefixIPNet(route.To), Priority: route.Metric,
		Table: cmp.Or(route.Table, unix.RT_TABLE_MAIN), Protocol: unix.RTPROT_STATIC, Scope: netlink.SCOPE_LINK,
		MTU: route.MTU, AdvMSS: route.AdvMSS,
	}
	if route.Via.IsValid() {
		r.Gw, r.Scope = route.Via.AsSlice(), netlink.SCOPE_UNIVERSE
	}
	if route.Scope != nil {
		r.Scope = netlink.Scope(*route.Scope)
	}
	return r
}

func sameWay(a, b netlink.Route) bool { return a.LinkIndex == b.LinkIndex && a.Gw.Equal(b.Gw) }

// routeLike finds the route to the same destination with the same metric.
func routeLike(pod *conn, r netlink.Route) (*netlink.Route, error) {
	family, metric := netlink.FAMILY_V4, r.Priority
	if len(r.Dst.IP) == net.IPv6len {
		family, metric = netlink.FAMILY_V6, cmp.Or(metric, 1024) // IP6_RT_PRIO_USER, net/ip6_route.h
	}
	filter := &netlink.Route{Dst: r.Dst, Table: r.Table}
	routes, err := request.Consistent(func() ([]netlink.Route, error) {
		return pod.RouteListFiltered(family, filter, netlink.RT_FILTER_DST|netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, err
	}
	for _, other := range routes {
		if other.Priority == metric {
			return &other, nil
		}
	}
	return nil, nil
}

func addresses(c *conn, index int) ([]netip.Prefix, error) {
	list, err := request.Consistent(func() ([]netlink.Addr, error) { return c.AddrList(reference(index), netlink.FAMILY_ALL) })
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

// announceItself has the kernel announce the addresses whenever the interface comes up or gets another MAC, as an address may
// have been another pod's before (ip-sysctl.rst). Errors are ignored: the entries of the neighbours time out anyway.
func (e *Engine) announceItself(pod *conn, index int, name string, addresses []netip.Prefix) {
	const arpNotify = 22 // IPV4_DEVCONF_ARP_NOTIFY of linux/ip.h
	if slices.ContainsFunc(addresses, func(p netip.Prefix) bool { return p.Addr().Is4() }) {
		e.trace("arp_notify")
		_ = pod.set(index, 0, 0, conf4(arpNotify, 1))
	}
	if slices.ContainsFunc(addresses, func(p netip.Prefix) bool { return p.Addr().Is6() }) {
		e.trace("ndisc_notify")
		_ = e.writeConf6(pod, name, "ndisc_notify", 1)
	}
}

// Announce waits until an attached interface has a carrier, and has the kernel announce its addresses then: without a carrier,
// the announcement when it came up was lost. It returns when ctx, the pod or the interface ends.
func (e *Engine) Announce(ctx context.Context, place Place, observed Observed) error {
	if len(observed.Addresses) == 0 || observed.MAC == "" {
		return nil
	}
	pod, err := e.dialPlace(place)
	if pod == nil || err != nil {
		return err
	}
	defer pod.close()
	if err := pod.awaitCarrier(ctx, observed.Index); err != nil {
		return fmt.Errorf("interface %s: %w", observed.Name, err)
	}
	// The kernel announces the addresses (NETDEV_CHANGEADDR) although the MAC is the same, and does not call the driver.
	if err := pod.set(observed.Index, 0, 0, hardwareAddr(unix.IFLA_ADDRESS, observed.MAC)); err != nil {
		return fmt.Errorf("interface %s: announce its addresses: %w", observed.Name, err)
	}
	return nil
}

// awaitCarrier returns nil when the link has a carrier, and an error when ctx ends before.
func (c *conn) awaitCarrier(ctx context.Context, index int) (err error) {
	var changes notify.Signal
	var listening sync.WaitGroup
	ctx, stop := context.WithCancel(ctx)
	defer listening.Wait() // the socket keeps the network namespace
	defer stop()
	listening.Go(func() {
		listen.Links.Follow(ctx, fmt.Sprintf("/proc/self/fd/%d", int(c.ns)), changes.Notify, logr.Discard())
	})
	seen := func() bool {
		var l *link
		l, err = c.existing(index)
		return err != nil || l.rawFlags&unix.IFF_LOWER_UP != 0
	}
	if ended := loop.Until(ctx, changes.Subscribe, seen); ended != nil {
		return fmt.Errorf("has no carrier yet: %w", ended)
	}
	return err
}
