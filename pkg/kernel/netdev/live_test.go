// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

func (w *world) check(t *testing.T, a netdev.Attached) []string {
	t.Helper()
	differences, err := w.engine.Check(t.Context(), netdev.Device{}, a)
	must.Succeed(t, err)
	return differences
}

// TestCheck checks that every property that was asked for is compared, and that all differences are
// reported.
func TestCheck(t *testing.T) {
	w := newWorld(t, nil)
	before, place, observed := w.attach(t, fullInterface)
	attached := netdev.Attached{
		Before: before, Place: place, Want: fullInterface, Observed: observed,
		Expected: netdev.Expected{MAC: observed.MAC, Addresses: observed.Addresses},
	}
	if got := w.check(t, attached); len(got) > 0 {
		t.Errorf("just attached: %q", got)
	}

	h := w.pod.Handle()
	l := get(t, w.pod, "net1")
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Table = unix.AF_INET, 100, 100
	must.Succeed(t, h.RuleDel(rule))
	if diff := cmp.Diff([]string{"IPv4 rule 100 from 10.1.0.0/24 table 100 is missing"},
		w.check(t, attached)); diff != "" {
		t.Errorf("a rule less (-want +got):\n%s", diff)
	}

	must.Succeed(t, h.NeighDel(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: net.IPv4(10, 1, 0, 1)}))
	if got := w.check(t, attached); !slices.Contains(got, "neighbor 10.1.0.1 is missing") {
		t.Errorf("a neighbor less: %q", got)
	}

	must.Succeed(t, h.LinkSetDown(l)) // this also removes the routes and the IPv6 address
	must.Succeed(t, h.LinkSetName(l, "mine0"))
	must.Succeed(t, h.LinkSetMTU(l, 1300))
	must.Succeed(t, h.LinkSetHardwareAddr(l, function.MAC("02:00:00:00:00:66").HardwareAddr()))

	want := []string{
		`name is "mine0", was "net1"`,
		"mac is 02:00:00:00:00:66, was 02:00:00:00:00:01", "up is false, was true",
		"address fd00::5/64 is missing", "route to 10.2.0.0/16 is missing",
		"route to 10.3.0.0/16 is missing",
		"route to fd01::/64 is missing", "route to 0.0.0.0/0 is missing",
		"route to 10.4.0.0/16 is missing",
		"IPv4 rule 100 from 10.1.0.0/24 table 100 is missing",
	}

	if diff := cmp.Diff(want, w.check(t, attached)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	must.Succeed(t, h.LinkSetNsFd(l, netns.New(t).Fd()))
	if got := w.check(t, attached); !slices.Equal(got,
		[]string{"interface net1 is not in the pod"}) {
		t.Errorf("moved on: %q", got)
	}

	must.Succeed(t, w.pod.Unmount())
	if got := w.check(t, attached); len(got) != 1 || !strings.HasSuffix(got[0], "is gone") {
		t.Errorf("without the namespace: %q", got)
	}
}

// TestRoutes checks that a route that yields leaves an existing route of the pod in place, and that
// a route that does not yield is refused in this case.
func TestRoutes(t *testing.T) {
	w := newWorld(t, nil)
	h := w.pod.Handle()
	lo := get(t, w.pod, "lo")
	defaultRoute := netip.MustParsePrefix("0.0.0.0/0")
	must.Succeed(t,
		h.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: netlinkDst(t, defaultRoute),
			Scope: netlink.SCOPE_LINK}))

	want := function.Interface{
		Name: "net1", Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.5/24")},
		Routes: []function.Route{
			{To: defaultRoute, Via: netip.MustParseAddr("10.1.0.1"), Yield: true},
			{To: netip.MustParsePrefix("10.2.0.0/16"), Via: netip.MustParseAddr("10.1.0.1"),
				Table: 100, MTU: 1300, AdvMSS: 1200},
			{To: netip.MustParsePrefix("10.3.0.0/16"), Scope: new(int(netlink.SCOPE_LINK))},
		},
	}

	before, place, observed := w.attach(t, want)
	attached := netdev.Attached{Before: before, Place: place, Want: want, Observed: observed}
	if got := w.check(t, attached); len(got) > 0 {
		t.Errorf("just attached: %q", got)
	}

	routes, err := h.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: 100},
		netlink.RT_FILTER_TABLE)
	must.Succeed(t, err)
	if len(routes) != 1 || routes[0].MTU != 1300 || routes[0].AdvMSS != 1200 {
		t.Errorf("table 100: %v", routes)
	}

	stubborn := []function.Route{{To: defaultRoute, Via: netip.MustParseAddr("10.1.0.1")}}
	if _, err := w.engine.Add(t.Context(), attached, nil, stubborn); err == nil ||
		!strings.Contains(err.Error(), "the pod has one already") {
		t.Errorf("error %v", err)
	}
}

func netlinkDst(t *testing.T, p netip.Prefix) *net.IPNet {
	t.Helper()
	n, err := netlink.ParseIPNet(p.String())
	must.Succeed(t, err)
	return n
}

func TestAdd(t *testing.T) {
	w := newWorld(t, nil)
	want := function.Interface{Name: "net1"}
	before, place, observed := w.attach(t, want)
	attached := netdev.Attached{Before: before, Place: place, Want: want, Observed: observed}
	for range 2 { // the second time everything exists already
		observed, err := w.engine.Add(t.Context(), attached, fullInterface.Addresses,
			fullInterface.Routes)
		must.Succeed(t, err)
		if len(observed.Addresses) != len(fullInterface.Addresses) {
			t.Errorf("observed %+v", observed)
		}
	}

	checkRoutes(t, w)
	must.Succeed(t, w.pod.Handle().LinkSetNsFd(get(t, w.pod, "net1"), netns.New(t).Fd()))
	if _, err := w.engine.Add(t.Context(), attached, fullInterface.Addresses, nil); err == nil ||
		!strings.Contains(err.Error(), "is not in the pod") {
		t.Errorf("error %v", err)
	}

	must.Succeed(t, w.pod.Unmount())
	if _, err := w.engine.Add(t.Context(), attached, fullInterface.Addresses, nil); !errors.Is(err,
		unix.ENOENT) {
		t.Errorf("error %v, want %v", err, unix.ENOENT)
	}
}

// TestUserspace covers a Function without a netdev whose PF has no netdev either, so that nothing
// is touched. Tests with real VFs cover what a PF enforces.
func TestUserspace(t *testing.T) {
	w := newWorld(t, func(step string) { t.Errorf("touched: %s", step) })
	want := function.Interface{Name: "net1", Userspace: true}
	before, place, err := w.engine.Plan(t.Context(), netdev.Device{}, w.pod.Path(), want)
	must.Succeed(t, err)
	observed, err := w.engine.Attach(t.Context(), netdev.Device{}, before, place, want)
	must.Succeed(t, err)
	if diff := cmp.Diff(netdev.Observed{Name: "net1"}, observed); diff != "" {
		t.Errorf("observed (-want +got):\n%s", diff)
	}
	if alive, err := w.engine.Alive(place); err != nil || !alive {
		t.Errorf("alive %t, %v", alive, err)
	}

	if got := w.check(t, netdev.Attached{
		Before: before, Place: place, Want: want, Observed: observed,
	}); len(got) > 0 {
		t.Errorf("check: %q", got)
	}

	_, err = w.engine.Restore(t.Context(), netdev.Device{}, before, place)
	must.Succeed(t, err)

	for name, refused := range map[string]function.Interface{
		"VF properties could be set with": {
			Name: "net1", Userspace: true, VF: &function.VFConfig{VLAN: new(1)},
		},
		"the MAC could be set with": {
			Name: "net1", Userspace: true, MAC: "02:00:00:00:00:01",
		},
		"must be empty": {Name: "net1", Userspace: true, MTU: 1400},
	} {
		if _, _, err := w.engine.Plan(t.Context(), netdev.Device{}, w.pod.Path(),
			refused); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("error %v, want one with %q", err, name)
		}
	}
}
