// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// TestAltNames: a PF and its VFs have the altnames of the PF's netdev, and keep those that were seen
// last while they cannot be read.
func TestAltNames(t *testing.T) {
	root := t.TempDir()
	host().write(t, root)
	s := testScanner(root)
	var uses hostuse.Netdevs
	failure := errors.New("no buffer space available")
	s.options.HostNetdevs = func() (hostuse.Netdevs, error) { return uses, failure }
	look := func(what string, want ...string) {
		t.Helper()
		functions, err := s.scan()
		must.Succeed(t, err)
		for _, f := range functions {
			if f.PF == "0000:3b:00.0" && !slices.Equal(f.PFAltNames, want) {
				t.Errorf("%s: altnames of %s are %q, want %q", what, f.ID, f.PFAltNames, want)
			}
		}
	}

	look("not known")
	uses, failure = hostuse.Netdevs{
		"ens3f0":   {AltNames: []string{"enp59s0f0np0", "rail0"}, Parent: "0000:3b:00.0"},
		"ens3f0v0": {AltNames: []string{"enp59s0f0v0"}},
	}, nil
	look("known", "enp59s0f0np0", "rail0")
	failure = errors.New("interrupted")
	uses = nil
	look("not known any more: as they were", "enp59s0f0np0", "rail0")
	uses, failure = hostuse.Netdevs{"ens3f0": {AltNames: []string{"x"}, Parent: "0000:3b:00.1"}}, nil
	look("the name is another PF's by now", "enp59s0f0np0", "rail0")

	must.Succeed(t, os.RemoveAll(filepath.Join(root, "bus/pci/devices/0000:3b:00.0/net/ens3f0")))
	uses = hostuse.Netdevs{}
	look("netdev is in a pod", "enp59s0f0np0", "rail0")
}

// TestHostUse: a use belongs to one netdev, and ends when the host ends it. An unknown use counts
// as a use.
func TestHostUse(t *testing.T) {
	root := t.TempDir()
	host().write(t, root)
	s := testScanner(root)
	var uses hostuse.Netdevs
	failure := errors.New("no buffer space available")
	s.options.HostNetdevs = func() (hostuse.Netdevs, error) { return uses, failure }
	vf := function.ID{Address: "0000:3b:01.0"}
	look := func(what, want string) {
		t.Helper()
		functions, err := s.scan()
		must.Succeed(t, err)

		for _, f := range functions {
			switch {
			case f.ID == vf &&
				(want == "" && f.HostUse != "" || !strings.Contains(f.HostUse, want)):
				t.Errorf("%s: the VF's netdev %q, want %q", what, f.HostUse, want)
			case f.Netdev == "" && f.HostUse != "":
				t.Errorf("%s: Function %s, whose netdev is away, %q", what, f.ID, f.HostUse)
			}
		}
	}

	look("not known", "no buffer space available")
	failure, uses = nil, hostuse.Netdevs{
		"ens3f0": {Use: "has address 192.0.2.1/24"}, "ens3f0v0": {},
	}
	look("another netdev's", "")
	uses = hostuse.Netdevs{"ens3f0v0": {Use: "is a port of bridge br0", Parent: "0000:3b:01.0"}}
	look("a bridge's port", "is a port of bridge br0")
	failure = errors.New("interrupted")
	look("not known any more: as it was", "is a port of bridge br0")
	uses, failure = hostuse.Netdevs{"ens3f0v0": {Parent: "0000:3b:01.7"}}, nil
	look("the name is another VF's by now", "is being renamed")
	uses = hostuse.Netdevs{"ens3f0v0": {Parent: "0000:3b:01.0"}}
	look("over", "")
}

// TestUsesAreNoticed: the kernel reports each change that begins or ends a use.
func TestUsesAreNoticed(t *testing.T) {
	host := netns.New(t)
	attributes := netlink.NewLinkAttrs()
	attributes.Name = "vf"
	must.Succeed(t, host.Handle().LinkAdd(&netlink.Veth{LinkAttrs: attributes, PeerName: "peer"}))
	link, err := host.Handle().LinkByName("vf")
	must.Succeed(t, err)
	must.Succeed(t, host.Handle().LinkSetUp(link))
	address, err := netlink.ParseAddr("10.1.0.1/24")
	must.Succeed(t, err)
	all := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}

	heard := map[string]<-chan struct{}{}
	for _, source := range sources {
		heard[source.Name] = follow(t, source, host.Path())
		receiveSoon(t, "subscription to "+source.Name, heard[source.Name])
	}

	for _, change := range []struct {
		what, source string
		make         func() error
	}{
		{"address comes", "addresses", func() error {
			return host.Handle().AddrAdd(link,
				address)
		}},
		{"default route", "routes", func() error {
			return host.Handle().RouteAdd(&netlink.Route{
				Dst: all, LinkIndex: link.Attrs().Index, Gw: net.IPv4(10, 1, 0, 9),
			})
		}},
		{"route in another table", "routes", func() error {
			return host.Handle().RouteAdd(&netlink.Route{
				Dst: all, LinkIndex: link.Attrs().Index, Table: 100, Scope: unix.RT_SCOPE_LINK,
			})
		}},
		{"address goes", "addresses", func() error { return host.Handle().AddrDel(link, address) }},
		{"bridge", "rtnetlink", func() error {
			attributes := netlink.NewLinkAttrs()
			attributes.Name = "br0"
			bridge := &netlink.Bridge{LinkAttrs: attributes}
			return errors.Join(host.Handle().LinkAdd(bridge),
				host.Handle().LinkSetMaster(link, bridge))
		}},
	} {
		must.Succeed(t, change.make())
		receiveSoon(t, change.what, heard[change.source])
	}
}

func TestRouteMatters(t *testing.T) {
	message := func(kind uint16, table, protocol, destinationType byte) []byte {
		m := make([]byte, unix.SizeofNlMsghdr+unix.SizeofRtMsg)
		binary.NativeEndian.PutUint16(m[4:], kind)
		m[unix.SizeofNlMsghdr+4], m[unix.SizeofNlMsghdr+5], m[unix.SizeofNlMsghdr+
			7] = table, protocol, destinationType
		return m
	}
	for _, tt := range []struct {
		name    string
		message []byte
		want    bool
	}{
		{"route comes", message(unix.RTM_NEWROUTE, unix.RT_TABLE_MAIN, unix.RTPROT_STATIC,
			unix.RTN_UNICAST), true},
		{"route goes", message(unix.RTM_DELROUTE, unix.RT_TABLE_MAIN, unix.RTPROT_BOOT,
			unix.RTN_UNICAST), true},
		{"in another table", message(unix.RTM_NEWROUTE, 100, unix.RTPROT_STATIC, unix.RTN_UNICAST),
			true},
		{"the kernel's", message(unix.RTM_NEWROUTE, unix.RT_TABLE_MAIN, unix.RTPROT_KERNEL,
			unix.RTN_UNICAST), false},
		{"local", message(unix.RTM_NEWROUTE, unix.RT_TABLE_LOCAL, unix.RTPROT_STATIC,
			unix.RTN_UNICAST), false},
		{"multicast", message(unix.RTM_NEWROUTE, unix.RT_TABLE_MAIN, unix.RTPROT_STATIC,
			unix.RTN_MULTICAST), false},
		{"no route", message(unix.RTM_NEWLINK, unix.RT_TABLE_MAIN, unix.RTPROT_STATIC,
			unix.RTN_UNICAST), false},
		{"too short", message(unix.RTM_NEWROUTE, unix.RT_TABLE_MAIN, unix.RTPROT_STATIC,
			unix.RTN_UNICAST)[:20], false},
		{"empty", nil, false},
	} {
		if got := routeMatters(tt.message); got != tt.want {
			t.Errorf("%s: %t, want %t", tt.name, got, tt.want)
		}
	}
}

func TestAddressMatters(t *testing.T) {
	message := func(kind uint16, family, scope byte) []byte {
		m := make([]byte, unix.SizeofNlMsghdr+unix.SizeofIfAddrmsg)
		binary.NativeEndian.PutUint16(m[4:], kind)
		m[unix.SizeofNlMsghdr], m[unix.SizeofNlMsghdr+3] = family, scope
		return m
	}
	for _, tt := range []struct {
		name    string
		message []byte
		want    bool
	}{
		{"IPv4", message(unix.RTM_NEWADDR, unix.AF_INET, unix.RT_SCOPE_UNIVERSE), true},
		{"IPv4 goes", message(unix.RTM_DELADDR, unix.AF_INET, unix.RT_SCOPE_UNIVERSE), true},
		{"IPv4 link-local", message(unix.RTM_NEWADDR, unix.AF_INET, unix.RT_SCOPE_LINK), true},
		{"IPv6", message(unix.RTM_NEWADDR, unix.AF_INET6, unix.RT_SCOPE_UNIVERSE), true},
		{"IPv6 link-local", message(unix.RTM_NEWADDR, unix.AF_INET6, unix.RT_SCOPE_LINK), false},
		{"no address", message(unix.RTM_NEWLINK, unix.AF_INET, unix.RT_SCOPE_UNIVERSE), false},
		{"too short", message(unix.RTM_NEWADDR, unix.AF_INET, unix.RT_SCOPE_UNIVERSE)[:17], false},
		{"empty", nil, false},
	} {
		if got := addressMatters(tt.message); got != tt.want {
			t.Errorf("%s: %t, want %t", tt.name, got, tt.want)
		}
	}
}

// FuzzRtnetlink: only messages with a whole struct rtmsg or ifaddrmsg matter.
func FuzzRtnetlink(f *testing.F) {
	f.Add([]byte{28, 0, 0, 0, unix.RTM_NEWROUTE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, unix.AF_INET,
		0, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0})
	f.Add([]byte{24, 0, 0, 0, unix.RTM_NEWADDR, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, unix.AF_INET,
		24, 0, 0, 3, 0, 0, 0})
	f.Add([]byte{})

	f.Fuzz(func(t *testing.T, message []byte) {
		if routeMatters(message) && len(message) < unix.SizeofNlMsghdr+unix.SizeofRtMsg ||
			addressMatters(message) && len(message) < unix.SizeofNlMsghdr+unix.SizeofIfAddrmsg {
			t.Errorf("% x matters", message)
		}
	})
}
