package netdev

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// Attached is everything that is known about a netdev in a pod.
type Attached struct {
	Before   Snapshot
	Place    Place
	Want     function.Interface
	Observed Observed
}

// Check says in words how what is in the pod, and what the PF enforces, differs from what [Engine.Attach] made of it;
// nothing means that it does not. Addresses and routes that the pod added are no difference, nor is what a PF or an
// eswitch does not tell. An error says that it could not be seen.
func (e *Engine) Check(ctx context.Context, device Device, a Attached) ([]string, error) {
	device = device.as(a.Before)
	enforced, err := e.complete(ctx, Snapshot{}, device)
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
	now := snapshotOf(l)
	for _, p := range []difference{
		{property{name: "name", value: a.Want.Name}, now.Name},
		{property{name: "mac", value: a.Observed.MAC}, now.MAC},
		{property{name: "mtu", value: a.Observed.MTU}, now.MTU},
		{property{name: "up", value: true}, now.Up},
		{property{name: "allmulticast", value: a.Want.AllMulticast}, a.Want.AllMulticast && now.AllMulticast},
	} {
		if p.value != p.now {
			d = append(d, p.String())
		}
	}
	return checkLayer3(d, pod, l, a.Want)
}

// checkLayer3 looks for the addresses and routes that were asked for.
func checkLayer3(d []string, pod *conn, l *link, want function.Interface) ([]string, error) {
	have, err := addresses(pod, l)
	if err != nil {
		return nil, fmt.Errorf("interface %s: addresses: %w", want.Name, err)
	}
	for _, address := range want.Addresses {
		if !slices.Contains(have, address) {
			d = append(d, fmt.Sprintf("address %s is missing", address))
		}
	}
	for _, route := range want.Routes {
		found, err := routeTo(pod, route)
		if err != nil {
			return nil, fmt.Errorf("interface %s: route to %s: %w", want.Name, route.To, err)
		}
		if found == nil || !route.Yield && !leadsOut(route, *found, l.Attrs().Index) {
			d = append(d, fmt.Sprintf("route to %s is missing", route.To))
		}
	}
	return d, nil
}

// Add gives a netdev that is in a pod more addresses and routes, and accepts those that it has already.
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
	want := function.Interface{Name: l.Attrs().Name, Addresses: addresses, Routes: routes}
	if err := e.configure(pod, l, want); err != nil {
		return Observed{}, err
	}
	return observe(pod, l.Attrs().Index)
}

// leadsOut says whether a route of the kernel leads where r does: out through the interface with the index.
func leadsOut(r function.Route, found netlink.Route, index int) bool {
	via, _ := netip.AddrFromSlice(found.Gw)
	return found.LinkIndex == index && via.Unmap() == r.Via.Unmap()
}

// arpNotify is IPV4_DEVCONF_ARP_NOTIFY of linux/ip.h.
const arpNotify = 22

// announceItself has the kernel tell the neighbours of the interface's addresses whenever it comes up, or gets another
// MAC: an address may have been another pod's a moment ago. That is arp_notify and ndisc_notify of the kernel's
// ip-sysctl.rst. The addresses are there already. Where it cannot be set, neighbours learn by their own timeouts.
func (e *Engine) announceItself(pod *conn, index int, name string, addresses []netip.Prefix) {
	is4 := func(p netip.Prefix) bool { return p.Addr().Is4() }
	if slices.ContainsFunc(addresses, is4) {
		e.trace("arp_notify")
		_ = pod.set(index, 0, 0, conf4(arpNotify, 1))
	}
	if slices.ContainsFunc(addresses, func(p netip.Prefix) bool { return !is4(p) }) {
		e.trace("ndisc_notify")
		_ = e.writeConf6(pod, name, "ndisc_notify", 1)
	}
}

// Announce has the kernel of an attached interface tell its neighbours once more, when it has a carrier: what it told when
// the interface came up is lost without. It waits until ctx ends, and is over when the pod or the interface is.
func (e *Engine) Announce(ctx context.Context, place Place, observed Observed) error {
	if len(observed.Addresses) == 0 || observed.MAC == "" {
		return nil
	}
	pod, err := e.dialPlace(place)
	if pod == nil || err != nil {
		return err
	}
	defer pod.close()
	if err := awaitCarrier(ctx, pod, observed.Index); err != nil {
		return fmt.Errorf("interface %s: %w", observed.Name, err)
	}
	// The MAC that it has: the kernel notifies of it all the same (NETDEV_CHANGEADDR), and asks no driver.
	if err := pod.set(observed.Index, 0, 0, hardwareAddr(unix.IFLA_ADDRESS, observed.MAC)); err != nil {
		return fmt.Errorf("interface %s: announce its addresses: %w", observed.Name, err)
	}
	return nil
}

// carrierLook is how often it is looked whether ctx has ended while the kernel says nothing. The socket must not be closed
// under a read: it would stay, and with it the pod's namespace.
const carrierLook = 200 * time.Millisecond

// awaitCarrier returns when the link has a carrier.
func awaitCarrier(ctx context.Context, pod *conn, index int) error {
	// Before the first look, so that nothing is missed.
	changes, err := nl.SubscribeAt(pod.ns, netns.None(), unix.NETLINK_ROUTE, unix.RTNLGRP_LINK)
	if err != nil {
		return fmt.Errorf("carrier: %w", err)
	}
	defer changes.Close()
	timeout := unix.NsecToTimeval(int64(carrierLook))
	if err := changes.SetReceiveTimeout(&timeout); err != nil {
		return fmt.Errorf("carrier: %w", err)
	}
	for {
		l, err := pod.existing(index)
		if err != nil || l.Attrs().RawFlags&unix.IFF_LOWER_UP != 0 {
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("has no carrier yet: %w", context.Cause(ctx))
		}
		if _, _, err := changes.Receive(); err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("carrier: %w", err)
		}
	}
}
