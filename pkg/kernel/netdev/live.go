package netdev

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
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
