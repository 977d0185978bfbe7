// SPDX-License-Identifier: Apache-2.0

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
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/listen"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

// Attached describes a netdev in a pod.
type Attached struct {
	Before   Snapshot
	Place    Place
	Want     function.Interface
	Observed Observed
	Expected Expected // used by [Engine.Check] only
}

// Expected is what an interface has by the last result of a chain of CNI plugins. Plugins that run
// after this one may have changed the interface (CNI specification, section CHECK).
type Expected struct {
	MAC       function.MAC   // "" if the result does not contain it
	Addresses []netip.Prefix // of the interface
}

// Check returns a sentence for each difference between what [Engine.Attach] configured and the
// current state of the interface, the PF and the eswitch.
//
// Other plugins may change some properties later. Of these, Check compares the MAC and the
// addresses with a.Expected, and ignores the MTU, all flags except "up", the sysctls, and a master
// that nobody asked for. Additional addresses, routes, rules and neighbors of the pod are not
// differences. It is an error if the PF no longer reports a VF that it reported before.
func (e *Engine) Check(ctx context.Context, device Device, a Attached) ([]string, error) {
	d, err := e.checkEnforced(ctx, device.as(a.Before), a)
	if err != nil {
		return nil, err
	}
	ofRDMA, err := e.checkRDMA(a.Place, a.Before.RDMA)
	d = append(d, ofRDMA...)
	if a.Want.Userspace || err != nil {
		return d, err
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

	more, err := missing(pod, l, a)
	if err != nil {
		return nil, fmt.Errorf("interface %s: %w", a.Want.Name, err)
	}

	return append(d, more...), nil
}

// checkEnforced compares what the PF and the eswitch enforce. It ignores the MAC of the VF if the
// attachment did not set it, because some PFs report the MAC that the VF gave itself. It accepts
// the MAC in the last result of the chain, because a later plugin may have changed it.
func (e *Engine) checkEnforced(ctx context.Context, device Device, a Attached) ([]string, error) {
	if a.Before.VF != nil && device.PF == nil {
		return nil, errors.New(
			"its PF has no netdev on the host: what it enforces for the VF is unknown")
	}

	enforced, err := e.enforced(ctx, e.patient(ctx), Snapshot{}, device)
	if err != nil {
		return nil, err
	}
	if device.PF != nil && enforced.VF == nil {
		gone := fmt.Sprintf("PF %s does not have VF %d any more", device.PF, device.PF.VF)
		return []string{gone}, nil
	}

	var d []string
	for _, p := range compare(a.Before.enforcing(a.Want).WithoutNetdev(), enforced) {
		if p.name == "vf mac" && (!a.Before.sets().MAC || enforced.VF.MAC == a.Expected.MAC) {
			continue
		}
		d = append(d, p.String())
	}

	return d, nil
}

// missing lists what the interface and the pod lack of what the interface was given, by the checks
// of [Properties]. The bond of an interface has its addresses and the like.
func missing(pod *conn, l *link, a Attached) (d []string, err error) {
	upper, ofUpper := l, a
	if a.Want.Bond != nil {
		if upper, err = bondOf(pod, l, a.Want.Bond); err != nil {
			return nil, err
		}
		ofUpper.Want = a.Want.OfBond()
	}

	for _, p := range Properties() {
		at, of := upper, ofUpper
		if p.isOfPort() {
			at, of = l, a
		}
		if p.check == nil || at == nil {
			continue
		}

		more, err := p.check(pod, at, of)
		if err != nil {
			return nil, err
		}
		d = append(d, more...)
	}

	return d, nil
}

func missingVRF(pod *conn, l *link, a Attached) ([]string, error) {
	if a.Want.VRF == nil {
		return nil, nil
	}

	there, err := pod.LinkByName(a.Want.VRF.Name)
	if err != nil && !errors.Is(err, links.ErrNotFound) {
		return nil, fmt.Errorf("VRF %s: %w", a.Want.VRF.Name, err)
	}
	if err != nil || there.Attrs().Index != l.master {
		return []string{fmt.Sprintf("interface is not in VRF %s", a.Want.VRF.Name)}, nil
	}

	v, isVRF := there.(*netlink.Vrf)
	switch {
	case !isVRF:
		return []string{fmt.Sprintf("VRF %s is a %s", a.Want.VRF.Name, there.Type())}, nil
	case v.Table != uint32(a.Want.VRF.Table):
		return []string{fmt.Sprintf("VRF %s has table %d, not %d", v.Name, v.Table,
			a.Want.VRF.Table)}, nil
	case v.RawFlags&unix.IFF_UP == 0:
		return []string{fmt.Sprintf("VRF %s is down", v.Name)}, nil
	}

	return nil, nil
}

// otherMAC compares the MAC with the last result of the chain, unless the interface is a port of a
// bond or a team, which sets its own MAC on its ports.
func otherMAC(pod *conn, l *link, a Attached) ([]string, error) {
	if a.Expected.MAC == "" || a.Expected.MAC == l.MAC {
		return nil, nil
	}

	if l.master != 0 {
		master, err := pod.LinkByIndex(l.master)
		if err != nil && !errors.Is(err, links.ErrNotFound) {
			return nil, fmt.Errorf("its master: %w", err)
		}
		if err == nil && slices.Contains([]string{"bond", "team"}, master.Type()) {
			return nil, nil
		}
	}

	return []string{property{name: "mac", value: a.Expected.MAC, now: l.MAC}.String()}, nil
}

// missingAddresses looks at the master of the interface too, because a bond may have the addresses.
func missingAddresses(pod *conn, l *link, a Attached) (d []string, err error) {
	have, err := addresses(pod, l.Identity.Index)
	if err != nil {
		return nil, fmt.Errorf("addresses: %w", err)
	}

	if l.master != 0 {
		more, err := addresses(pod, l.master)
		if err != nil {
			return nil, fmt.Errorf("addresses of its master: %w", err)
		}
		have = append(have, more...)
	}

	for _, address := range a.Expected.Addresses {
		if !slices.Contains(have, address) {
			d = append(d, fmt.Sprintf("address %s is missing", address))
		}
	}

	return d, nil
}

func missingVLANs(pod *conn, l *link, a Attached) (d []string, err error) {
	for _, vlan := range a.Want.VLANs {
		there, err := pod.LinkByName(vlan.Name)
		if err != nil && !errors.Is(err, links.ErrNotFound) {
			return nil, fmt.Errorf("VLAN interface %s: %w", vlan.Name, err)
		}

		wrong := "is missing"
		if err == nil {
			wrong = unlikeVLAN(there, l.Identity.Index, vlan)
		}
		if wrong != "" {
			d = append(d, fmt.Sprintf("VLAN interface %s %s", vlan.Name, wrong))
		}
	}

	return d, nil
}

// unlikeVLAN says how a netdev differs from a VLAN interface on the netdev with the index. It is ""
// if it does not.
func unlikeVLAN(there netlink.Link, index int, want function.VLAN) string {
	v, isVLAN := there.(*netlink.Vlan)
	switch {
	case !isVLAN:
		return "is a " + there.Type()
	case v.ParentIndex != index:
		return "is on another netdev"
	case v.VlanId != want.Tag:
		return fmt.Sprintf("has tag %d, not %d", v.VlanId, want.Tag)
	case v.RawFlags&unix.IFF_UP == 0:
		return "is down"
	}
	return ""
}

// missingRoutes accepts a route in any table, because later plugins move routes (sbr, vrf). It
// looks for none if the interface is a port of a master that nobody asked for, such as a bond. The
// kernel drops the routes of an interface that gets a master. Which ones are there again depends on
// the plugin and its version: vrf 1.9 of containernetworking adds the routes of the main table that
// have a gateway to the table of the VRF, and loses the others.
func missingRoutes(pod *conn, l *link, a Attached) (d []string, err error) {
	if l.master != 0 && a.Want.VRF == nil {
		return nil, nil
	}

	for _, route := range a.Want.Routes {
		there, err := routed(pod, l.Identity.Index, route.In(a.Want.VRF))
		if err != nil {
			return nil, fmt.Errorf("route to %s: %w", route.To, err)
		}
		if !there {
			d = append(d, fmt.Sprintf("route to %s is missing", route.To))
		}
	}

	return d, nil
}

// missingNeighbors looks for no neighbors if the interface has another MAC than at its attachment,
// because the kernel drops all neighbors with a change of the MAC, which a later plugin may do.
func missingNeighbors(pod *conn, l *link, a Attached) (d []string, err error) {
	if len(a.Want.Neighbors) == 0 || l.MAC != a.Observed.MAC {
		return nil, nil
	}

	have, err := request.Consistent(func() (list []netlink.Neigh, err error) {
		err = pod.library(func(h *netlink.Handle) error {
			list, err = h.NeighList(l.Identity.Index, netlink.FAMILY_ALL)
			return err
		})
		return list, err
	})
	if err != nil {
		return nil, fmt.Errorf("neighbors: %w", err)
	}

	for _, n := range a.Want.Neighbors {
		isThere := func(other netlink.Neigh) bool {
			return other.IP.Equal(n.Address.AsSlice()) && macOf(other.HardwareAddr) == n.MAC &&
				other.State&unix.NUD_PERMANENT != 0
		}
		if !slices.ContainsFunc(have, isThere) {
			d = append(d, fmt.Sprintf("neighbor %s is missing", n.Address))
		}
	}

	return d, nil
}

// routed reports whether a route exists, in its table or in any other. A route that yields may be
// replaced by any route to the same destination.
func routed(pod *conn, index int, route function.Route) (bool, error) {
	r := routeOut(index, route)
	same := func(other netlink.Route) bool { return sameWay(other, r) }
	found, err := routeLike(pod, r, func(other netlink.Route) bool {
		return route.Yield ||
			same(other)
	})

	if found == nil && err == nil {
		r.Table = unix.RT_TABLE_UNSPEC
		found, err = routeLike(pod, r, same)
	}

	return found != nil, err
}

// Add adds addresses and routes to a netdev in a pod. It accepts addresses and routes that exist
// already.
func (e *Engine) Add(
	ctx context.Context, a Attached, addresses []netip.Prefix, routes []function.Route,
) (Observed, error) {
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

	more := function.Interface{
		Name: l.Name, Addresses: addresses, Routes: routes, VRF: a.Want.VRF, Bond: a.Want.Bond,
	}
	return e.configure(ctx, e.patient(ctx), pod, l.Identity.Index, more)
}

// addAddress adds an address, unless the netdev has it already.
func addAddress(pod *conn, index int, address netip.Prefix) error {
	a := &netlink.Addr{IPNet: netaddr.ToIPNet(address)}
	if address.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}

	err := pod.library(func(h *netlink.Handle) error { return h.AddrAdd(reference(index), a) })
	if !errors.Is(err, unix.EEXIST) {
		return err
	}

	have, listErr := addresses(pod, index)
	if slices.Contains(have, address) {
		return nil
	}

	return errors.Join(err, listErr)
}

// addRoute adds a route, unless the pod has it already.
func addRoute(pod *conn, index int, route function.Route) error {
	r := routeOut(index, route)
	err := pod.library(func(h *netlink.Handle) error { return h.RouteAdd(&r) })
	if errors.Is(err, unix.ENETUNREACH) && route.Via.IsValid() {
		return fmt.Errorf("gateway %s is in no subnet of the interface's addresses: %w",
			route.Via, err)
	}
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	if route.Yield {
		return nil
	}

	other, listErr := routeLike(pod, r, func(netlink.Route) bool { return true })
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

	return fmt.Errorf("the pod has one already, via interface index %d gateway %s: %w",
		other.LinkIndex, gateway, err)
}

func routeOut(index int, route function.Route) netlink.Route {
	r := netlink.Route{
		LinkIndex: index, Dst: netaddr.ToIPNet(route.To), Priority: route.Metric,
		Table: cmp.Or(route.Table, unix.RT_TABLE_MAIN), Protocol: unix.RTPROT_STATIC,
		Scope: netlink.SCOPE_LINK,
		MTU:   route.MTU, AdvMSS: route.AdvMSS,
	}

	if route.Via.IsValid() {
		r.Gw, r.Scope = route.Via.AsSlice(), netlink.SCOPE_UNIVERSE
	}

	if route.Scope != nil {
		r.Scope = netlink.Scope(*route.Scope)
	}
	if route.Source.IsValid() {
		r.Src = route.Source.AsSlice()
	}
	if route.OnLink {
		r.Flags = int(netlink.FLAG_ONLINK)
	}

	return r
}

func sameWay(a, b netlink.Route) bool { return a.LinkIndex == b.LinkIndex && a.Gw.Equal(b.Gw) }

// routeLike returns a route to the same destination, with the same metric, that meant accepts. It
// looks in the table of r, or in all tables if that is RT_TABLE_UNSPEC. It returns nil if there is
// no such route.
func routeLike(pod *conn, r netlink.Route, meant func(netlink.Route) bool) (*netlink.Route, error) {
	family, metric := netlink.FAMILY_V4, r.Priority
	if len(r.Dst.IP) == net.IPv6len {
		// The kernel uses metric 1024 for 0 (IP6_RT_PRIO_USER of include/net/ip6_route.h).
		family, metric = netlink.FAMILY_V6, cmp.Or(metric, 1024)
	}

	filter := &netlink.Route{Dst: r.Dst, Table: r.Table}
	routes, err := request.Consistent(func() (list []netlink.Route, err error) {
		const fields = netlink.RT_FILTER_DST | netlink.RT_FILTER_TABLE
		err = pod.library(func(h *netlink.Handle) error {
			list, err = h.RouteListFiltered(family, filter, fields)
			return err
		})
		return list, err
	})
	if err != nil {
		return nil, err
	}

	for _, other := range routes {
		if other.Priority == metric && meant(other) {
			return &other, nil
		}
	}

	return nil, nil
}

func addresses(c *conn, index int) ([]netip.Prefix, error) {
	list, err := request.Consistent(func() (list []netlink.Addr, err error) {
		err = c.library(func(h *netlink.Handle) error {
			list, err = h.AddrList(reference(index), netlink.FAMILY_ALL)
			return err
		})
		return list, err
	})
	if err != nil {
		return nil, err
	}

	var prefixes []netip.Prefix
	for _, a := range list {
		if p, ok := netaddr.FromIPNet(a.IPNet); ok {
			prefixes = append(prefixes, p)
		}
	}

	return prefixes, nil
}

// announceItself makes the kernel announce the addresses whenever the interface comes up or gets
// another MAC (Documentation/networking/ip-sysctl.rst). The announcement matters because an address
// may have belonged to another pod before. Errors are ignored, because the entries of neighbours
// time out anyway.
func (e *Engine) announceItself(pod *conn, index int, name string, addresses []netip.Prefix) {
	const arpNotify = 22 // IPV4_DEVCONF_ARP_NOTIFY of include/uapi/linux/ip.h
	if slices.ContainsFunc(addresses, func(p netip.Prefix) bool { return p.Addr().Is4() }) {
		e.trace("arp_notify")
		_ = pod.set(index, 0, 0, conf4(arpNotify, 1))
	}

	if slices.ContainsFunc(addresses, func(p netip.Prefix) bool { return p.Addr().Is6() }) {
		e.trace("ndisc_notify")
		_ = e.writeConf6(pod, name, "ndisc_notify", 1)
	}
}

// Announce waits until an attached interface has a carrier, and then makes the kernel announce its
// addresses. This is necessary because an announcement without a carrier is lost. Announce returns
// when it is done, or when ctx, the pod or the interface ends. It uses the fields Place, Want and
// Observed.
func (e *Engine) Announce(ctx context.Context, a Attached) error {
	place, observed := a.Place, a.Observed
	// A bond announces itself when a port becomes active (NETDEV_NOTIFY_PEERS).
	if len(observed.Addresses) == 0 || observed.MAC == "" || observed.Bond != "" {
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

	l, err := pod.existing(observed.Index)
	if err != nil {
		return fmt.Errorf("interface %s: %w", observed.Name, err)
	}
	if inVRF := place.Remains != nil && place.Remains.VRF != nil; l.master != 0 && !inVRF {
		return nil // the addresses and the MAC belong to the master
	}
	// The kernel announces the addresses even if the MAC stays the same (NETDEV_CHANGEADDR), and
	// does not call the driver. The MAC is the current one, because others may have changed it
	// since the attachment.
	if err := pod.set(observed.Index, 0, 0, hardwareAddr(unix.IFLA_ADDRESS, l.MAC)); err != nil {
		return fmt.Errorf("interface %s: announce its addresses: %w", observed.Name, err)
	}

	// With the change of the address the kernel drops all entries of the neighbour table, permanent
	// ones too (neigh_changeaddr of net/core/neighbour.c).
	for _, n := range a.Want.Neighbors {
		if err := addNeighbor(pod, observed.Index, n); err != nil {
			return fmt.Errorf("interface %s: neighbor %s: %w", observed.Name, n.Address, err)
		}
	}

	return nil
}

// awaitCarrier returns nil when the link has a carrier, and an error if ctx ends before.
func (c *conn) awaitCarrier(ctx context.Context, index int) (err error) {
	var changes notify.Signal
	var listening sync.WaitGroup
	ctx, stop := context.WithCancel(ctx)
	defer listening.Wait() // the socket keeps the network namespace alive
	defer stop()

	listening.Go(func() {
		listen.Links.Follow(ctx, fmt.Sprintf("/proc/self/fd/%d", int(c.ns)), changes.Notify,
			logr.Discard())
	})

	var l *link
	seen := func() bool {
		l, err = c.existing(index)
		return err != nil || l.rawFlags&unix.IFF_LOWER_UP != 0
	}

	if ended := loop.Until(ctx, changes.Subscribe, seen); ended != nil {
		if l != nil && !l.Up {
			return fmt.Errorf("is administratively down: %w", ended)
		}
		return fmt.Errorf("has no carrier yet: %w", ended)
	}

	return err
}
