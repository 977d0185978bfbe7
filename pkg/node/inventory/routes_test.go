package inventory

import (
	"encoding/binary"
	"net"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// TestDefaultNetdevs asks a real kernel.
func TestDefaultNetdevs(t *testing.T) {
	host := netns.New(t)
	index := func(name, address string) int {
		t.Helper()
		if err := host.Handle().LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}); err != nil {
			t.Fatal(err)
		}
		link, err := host.Handle().LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		a, err := netlink.ParseAddr(address)
		if err != nil {
			t.Fatal(err)
		}
		if err := host.Handle().AddrAdd(link, a); err != nil {
			t.Fatal(err)
		}
		if err := host.Handle().LinkSetUp(link); err != nil {
			t.Fatal(err)
		}
		return link.Attrs().Index
	}
	a, b, c := index("a", "10.1.0.1/24"), index("b", "10.2.0.1/24"), index("c", "10.3.0.1/24")
	look := func(what string, want ...string) {
		t.Helper()
		got, err := defaultNetdevs(host.Path())
		slices.Sort(got)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %q, %v, want %q", what, got, err, want)
		}
	}
	look("no default route")
	add := func(route netlink.Route) {
		t.Helper()
		if err := host.Handle().RouteAdd(&route); err != nil {
			t.Fatal(err)
		}
	}
	all := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
	add(netlink.Route{Dst: all, LinkIndex: c, Table: 100})
	look("in another table")

	woken := follow(t, sources[2], host.Path())
	receiveSoon(t, "subscription", woken)
	add(netlink.Route{Dst: all, LinkIndex: a, Gw: net.IPv4(10, 1, 0, 9)})
	receiveSoon(t, "message", woken)
	look("one", "a")
	add(netlink.Route{Dst: all, Priority: 500, MultiPath: []*netlink.NexthopInfo{
		{LinkIndex: b, Gw: net.IPv4(10, 2, 0, 9)}, {LinkIndex: c, Gw: net.IPv4(10, 3, 0, 9)},
	}})
	look("two routes, one with two next hops", "a", "b", "c")
}

// TestDefaultNetdevsIPv6: a node that reaches the world by IPv6 alone keeps its netdev.
func TestDefaultNetdevsIPv6(t *testing.T) {
	host := netns.New(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(host.Handle().LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "six"}}))
	link, err := host.Handle().LinkByName("six")
	must(err)
	address, err := netlink.ParseAddr("fd00:1::1/64")
	must(err)
	address.Flags = unix.IFA_F_NODAD
	must(host.Handle().AddrAdd(link, address))
	must(host.Handle().LinkSetUp(link))
	woken := follow(t, sources[2], host.Path())
	receiveSoon(t, "subscription", woken)
	must(host.Handle().RouteAdd(&netlink.Route{
		Dst: &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}, LinkIndex: link.Attrs().Index, Gw: net.ParseIP("fd00:1::9"),
	}))
	receiveSoon(t, "message", woken)
	if got, err := defaultNetdevs(host.Path()); err != nil || !slices.Equal(got, []string{"six"}) {
		t.Errorf("%q, %v, want six", got, err)
	}
}

func TestRouteMatters(t *testing.T) {
	message := func(kind uint16, destinationBits byte) []byte {
		m := make([]byte, unix.SizeofNlMsghdr+unix.SizeofRtMsg)
		binary.NativeEndian.PutUint16(m[4:], kind)
		m[unix.SizeofNlMsghdr+1] = destinationBits
		return m
	}
	for _, tt := range []struct {
		name    string
		message []byte
		want    bool
	}{
		{"default route comes", message(unix.RTM_NEWROUTE, 0), true},
		{"default route goes", message(unix.RTM_DELROUTE, 0), true},
		{"another route", message(unix.RTM_NEWROUTE, 24), false},
		{"no route", message(unix.RTM_NEWLINK, 0), false},
		{"too short", message(unix.RTM_NEWROUTE, 0)[:20], false},
		{"empty", nil, false},
	} {
		if got := routeMatters(tt.message); got != tt.want {
			t.Errorf("%s: %t, want %t", tt.name, got, tt.want)
		}
	}
}

// FuzzRoute: only messages with a whole struct rtmsg matter.
func FuzzRoute(f *testing.F) {
	f.Add([]byte{28, 0, 0, 0, unix.RTM_NEWROUTE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, unix.AF_INET, 0, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, message []byte) {
		if routeMatters(message) && len(message) < unix.SizeofNlMsghdr+unix.SizeofRtMsg {
			t.Errorf("% x matters", message)
		}
	})
}
