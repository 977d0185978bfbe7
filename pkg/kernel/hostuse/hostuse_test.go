// SPDX-License-Identifier: Apache-2.0

package hostuse_test

import (
	"net"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// host is a network namespace with a netdev whose uses are read.
type host struct {
	t      *testing.T
	path   string
	handle *netlink.Handle
}

func named(name string) netlink.LinkAttrs {
	attributes := netlink.NewLinkAttrs()
	attributes.Name = name
	return attributes
}

// newHost returns a host with the veth "vf", whose other end is "peer".
func newHost(t *testing.T) *host {
	t.Helper()
	ns := netns.New(t)
	h := &host{t, ns.Path(), ns.Handle()}
	h.add(&netlink.Veth{LinkAttrs: named("vf"), PeerName: "peer"})
	return h
}

// TestAltNames checks that the altnames of a netdev are read, and are sorted.
func TestAltNames(t *testing.T) {
	h := newHost(t)
	for _, name := range []string{"rail0", "a-name-that-is-longer-than-fifteen-bytes"} {
		must.Succeed(t, h.handle.LinkAddAltName(h.link("vf"), name))
	}

	netdevs, err := hostuse.Read(h.path)
	must.Succeed(t, err)
	want := []string{"a-name-that-is-longer-than-fifteen-bytes", "rail0"}
	if got := netdevs["vf"].AltNames; !slices.Equal(got, want) {
		t.Errorf("altnames %q, want %q", got, want)
	}
	if got := netdevs["peer"].AltNames; got != nil {
		t.Errorf("altnames %q of a netdev that has none", got)
	}
}

func (h *host) link(name string) netlink.Link {
	h.t.Helper()
	link, err := h.handle.LinkByName(name)
	must.Succeed(h.t, err)
	return link
}

func (h *host) add(link netlink.Link) netlink.Link {
	h.t.Helper()
	must.Succeed(h.t, h.handle.LinkAdd(link))
	return h.link(link.Attrs().Name)
}

func (h *host) address(netdev, cidr string) {
	h.t.Helper()
	a, err := netlink.ParseAddr(cidr)
	must.Succeed(h.t, err)
	if a.IP.To4() == nil {
		a.Flags = unix.IFA_F_NODAD
	}
	must.Succeed(h.t, h.handle.AddrAdd(h.link(netdev), a))
}

func (h *host) route(netdev, to string, table int) {
	h.t.Helper()
	_, destination, err := net.ParseCIDR(to)
	must.Succeed(h.t, err)
	must.Succeed(h.t, h.handle.LinkSetUp(h.link(netdev)))

	must.Succeed(h.t, h.handle.RouteAdd(&netlink.Route{
		Dst: destination, Table: table, LinkIndex: h.link(netdev).Attrs().Index,
		Scope:    unix.RT_SCOPE_LINK,
		Protocol: unix.RTPROT_STATIC,
	}))
}

// read returns the current description of the netdev "vf".
func (h *host) read() hostuse.Netdev {
	h.t.Helper()
	all, err := hostuse.Read(h.path)
	must.Succeed(h.t, err)
	return all["vf"]
}

// TestUse covers everything that counts as a use of a netdev, and what does not count.
func TestUse(t *testing.T) {
	for name, test := range map[string]struct {
		make func(*host)
		want string
	}{
		"nothing": {func(*host) {}, ""},
		"up":      {func(h *host) { must.Succeed(t, h.handle.LinkSetUp(h.link("vf"))) }, ""},
		"port of a bridge": {func(h *host) {
			must.Succeed(t,
				h.handle.LinkSetMaster(h.link("vf"),
					h.add(&netlink.Bridge{LinkAttrs: named("br0")})))
		}, "is a port of bridge br0"},
		"IPv4 address": {func(h *host) {
			h.address("vf", "192.0.2.7/24")
		}, "has address 192.0.2.7/24"},
		"IPv6 address": {func(h *host) {
			h.address("vf", "2001:db8::7/64")
		}, "has address 2001:db8::7/64"},
		"link-local address": {func(h *host) { h.address("vf", "fe80::7/64") }, ""},
		"macvlan with an address": {func(h *host) {
			above := &netlink.Macvlan{LinkAttrs: named("mac0"), Mode: netlink.MACVLAN_MODE_BRIDGE}
			above.ParentIndex = h.link("vf").Attrs().Index
			h.add(above)
			h.address("mac0", "192.0.2.8/24")
		}, "carries macvlan mac0"},
		"underlay of VXLAN": {func(h *host) {
			h.add(&netlink.Vxlan{
				LinkAttrs: named("vx0"), VxlanId: 7, VtepDevIndex: h.link("vf").Attrs().Index,
				Port: 4789,
			})
		}, "carries vxlan vx0"},
		"default route": {func(h *host) {
			h.route("vf", "0.0.0.0/0", 0)
		}, "has route 0.0.0.0/0"},
		"default route in another table": {func(h *host) {
			h.route("vf", "0.0.0.0/0", 100)
		}, "has route 0.0.0.0/0 in table 100"},
		"half of the default route": {func(h *host) {
			h.route("vf", "128.0.0.0/1", 0)
		}, "has route 128.0.0.0/1"},
		"route": {func(h *host) {
			h.route("vf", "198.51.100.0/24", 0)
		}, "has route 198.51.100.0/24"},
		"IPv6 route in another table": {func(h *host) {
			h.route("vf", "2001:db8::/32", 300)
		}, "has route 2001:db8::/32 in table 300"},
		"use of the other end": {func(h *host) { h.address("peer", "192.0.2.9/24") }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			test.make(h)
			if got := h.read().Use; got != test.want {
				t.Errorf("the netdev %q, want %q", got, test.want)
			}
		})
	}
}

// TestUseEnds checks that a use that has ended is no longer reported.
func TestUseEnds(t *testing.T) {
	h := newHost(t)
	must.Succeed(t,
		h.handle.LinkSetMaster(h.link("vf"), h.add(&netlink.Bridge{LinkAttrs: named("br0")})))
	must.Succeed(t, h.handle.LinkSetNoMaster(h.link("vf")))
	if got := h.read().Use; got != "" {
		t.Errorf("the netdev %q after it left the bridge", got)
	}
}

// TestCarrier checks that a netdev with a carrier is reported as such, and not as used.
func TestCarrier(t *testing.T) {
	h := newHost(t)
	if h.read().Carrier {
		t.Error("a netdev that is down has a carrier")
	}

	must.Succeed(t, h.handle.LinkSetUp(h.link("vf")))
	must.Succeed(t, h.handle.LinkSetUp(h.link("peer")))

	for end := time.Now().Add(10 * time.Second); !h.read().Carrier; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("no carrier")
		}
	}

	if got := h.read().Use; got != "" {
		t.Errorf("the netdev %q because it is up", got)
	}
}

// TestDefaultRoute covers default routes with several next hops, in other tables and of IPv6.
func TestDefaultRoute(t *testing.T) {
	h := newHost(t)
	defaults := func() []string {
		t.Helper()
		all, err := hostuse.Read(h.path)
		must.Succeed(t, err)
		var names []string
		for name, netdev := range all {
			if netdev.DefaultRoute {
				names = append(names, name)
			}
		}

		slices.Sort(names)
		return names
	}

	h.route("vf", "0.0.0.0/0", 100)
	if got := defaults(); len(got) > 0 {
		t.Errorf("default routes over %q by another table", got)
	}

	all := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
	h.address("vf", "10.2.0.1/24")
	h.address("peer", "10.3.0.1/24")
	must.Succeed(t, h.handle.LinkSetUp(h.link("peer")))

	must.Succeed(t,
		h.handle.RouteAdd(&netlink.Route{Dst: all, Priority: 500, MultiPath: []*netlink.NexthopInfo{
			{LinkIndex: h.link("vf").Attrs().Index, Gw: net.IPv4(10, 2, 0, 9)},
			{LinkIndex: h.link("peer").Attrs().Index, Gw: net.IPv4(10, 3, 0, 9)},
		}}))

	if got := defaults(); !slices.Equal(got, []string{"peer", "vf"}) {
		t.Errorf("default routes over %q, want peer and vf", got)
	}

	_, six, err := net.ParseCIDR("::/0")
	must.Succeed(t, err)
	h = newHost(t)
	h.address("vf", "fd00:1::1/64")
	must.Succeed(t, h.handle.LinkSetUp(h.link("vf")))
	must.Succeed(t, h.handle.LinkSetUp(h.link("peer")))
	must.Succeed(t, h.handle.RouteAdd(&netlink.Route{
		Dst: six, LinkIndex: h.link("vf").Attrs().Index, Gw: net.ParseIP("fd00:1::9"),
	}))
	if got := defaults(); !slices.Equal(got, []string{"vf"}) {
		t.Errorf("default routes of IPv6 over %q, want vf", got)
	}
}

// TestNoNamespace checks that a namespace that cannot be read is an error, and not a namespace
// without uses.
func TestNoNamespace(t *testing.T) {
	if _, err := hostuse.Read("/nowhere"); err == nil {
		t.Error("no error for a namespace that is not there")
	}
}
