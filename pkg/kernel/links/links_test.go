// SPDX-License-Identifier: Apache-2.0

package links_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/test/must"
	testns "github.com/opiproject/xpu-device-plugin/test/netns"
)

// sources is a number of MAC addresses that makes IFLA_LINKINFO of a macvlan in mode source too
// long for its length field.
const sources = 6000

// TestHugeNetdevs checks that a netdev with a very large or malformed description does not hide the
// others.
func TestHugeNetdevs(t *testing.T) {
	for name, given := range map[string]func(t *testing.T, h *netlink.Handle, lower netlink.Link){
		"altnames": func(t *testing.T, h *netlink.Handle, lower netlink.Link) {
			for i := range 496 {
				must.Succeed(t,
					h.LinkAddAltName(lower, fmt.Sprintf("%03d%s", i, strings.Repeat("x", 124))))
			}
		},
		"macvlan sources": func(t *testing.T, h *netlink.Handle, lower netlink.Link) {
			attrs := netlink.LinkAttrs{Name: "mv0", ParentIndex: lower.Attrs().Index}
			vlan := &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_SOURCE}
			must.Succeed(t, h.LinkAdd(vlan))
			for i := range sources {
				must.Succeed(t, h.MacvlanMACAddrAdd(vlan, source(i)))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			ns := testns.New(t)
			testns.Connect(t, ns, "net1", ns, "net2")
			lower, err := ns.Handle().LinkByName("net1")
			must.Succeed(t, err)
			given(t, ns.Handle(), lower)
			if _, err := ns.Handle().LinkList(); err == nil {
				t.Error("the library lists the netdevs: nothing is shown")
			}

			h, err := links.Open(netns.NsHandle(ns.Fd()))
			must.Succeed(t, err)
			defer h.Close()

			list, err := h.LinkList()
			must.Succeed(t, err)
			var names []string
			for _, l := range list {
				names = append(names, l.Attrs().Name)
				if l.Attrs().Name == "mv0" && l.Type() != "macvlan" {
					t.Errorf("mv0 is a %s", l.Type())
				}
			}

			for _, want := range []string{"lo", "net1", "net2"} {
				if !slices.Contains(names, want) {
					t.Errorf("%s is not among %q", want, names)
				}
			}

			l, err := h.LinkByName("net1")
			must.Succeed(t, err)
			if name == "altnames" && len(l.Attrs().AltNames) != 496 {
				t.Errorf("%d altnames", len(l.Attrs().AltNames))
			}
			if l, err = h.LinkByIndex(lower.Attrs().Index); err != nil || l.Attrs().Name != "net1" {
				t.Errorf("by index: %v, %v", l, err)
			}
		})
	}
}

func source(i int) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, byte(i >> 8), byte(i)} }

func TestNotFound(t *testing.T) {
	ns := testns.New(t)
	h, err := links.Open(netns.NsHandle(ns.Fd()))
	must.Succeed(t, err)
	defer h.Close()

	if _, err := h.LinkByName("nope"); !errors.Is(err, links.ErrNotFound) ||
		!strings.Contains(err.Error(), "nope") {
		t.Errorf("error %v, want %v", err, links.ErrNotFound)
	}
	if _, err := h.LinkByIndex(4711); !errors.Is(err, links.ErrNotFound) {
		t.Errorf("error %v, want %v", err, links.ErrNotFound)
	}
}

// message returns an RTM_NEWLINK with a kind, then filler of the size, then the attributes.
func message(kind string, filler int, after ...*nl.RtAttr) []byte {
	m := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(m[4:], 7)
	m = append(m, nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated("net1")).Serialize()...)
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.ZeroTerminated(kind))
	m = append(m, info.Serialize()...)
	for ; filler > 0; filler -= 1004 {
		m = append(m, nl.NewRtAttr(unix.IFLA_PAD, make([]byte, 1000)).Serialize()...)
	}

	for _, a := range after {
		m = append(m, a.Serialize()...)
	}

	return m
}

// TestForgedAttributes checks that attributes after an IFLA_LINKINFO whose length may have wrapped
// are ignored, because a pod may have chosen them.
func TestForgedAttributes(t *testing.T) {
	forged := []*nl.RtAttr{
		nl.NewRtAttr(unix.IFLA_PARENT_DEV_NAME, nl.ZeroTerminated("0000:3b:00.2")),
		nl.NewRtAttr(unix.IFLA_MTU, []byte{1}),
	}

	for name, test := range map[string]struct {
		message []byte
		parent  string
	}{
		"wrapped":  {message("macvlan", 1<<16, forged...), ""},
		"hardware": {message("veth", 1<<16, forged[:1]...), "0000:3b:00.2"},
		"small":    {message("macvlan", 0, forged[:1]...), "0000:3b:00.2"},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := links.Parse(test.message)
			must.Succeed(t, err)
			if a := l.Attrs(); a.ParentDev != test.parent || a.Name != "net1" || a.Index != 7 {
				t.Errorf("link %+v", a)
			}

			attrs, err := links.Attributes(test.message)
			if err != nil || attrs.Text(unix.IFLA_PARENT_DEV_NAME) != test.parent {
				t.Errorf("parent %q, %v", attrs.Text(unix.IFLA_PARENT_DEV_NAME), err)
			}
		})
	}

	if _, err := links.Parse(make([]byte, 3)); err == nil {
		t.Error("a link of 3 bytes is read")
	}
}

func FuzzParse(f *testing.F) {
	f.Add(message("macvlan", 1<<16))
	f.Add(message("veth", 0))
	f.Fuzz(func(t *testing.T, m []byte) {
		attrs, err := links.Attributes(m)
		if err == nil && len(m) < unix.SizeofIfInfomsg {
			t.Errorf("%d bytes are read as %v", len(m), attrs)
		}
	})
}

// BenchmarkList lists the netdevs of a host with many VFs and representors.
func BenchmarkList(b *testing.B) {
	ns := testns.New(b)
	for i := range 128 {
		testns.Connect(b, ns, fmt.Sprintf("vf%d", i), ns, fmt.Sprintf("rep%d", i))
	}

	h, err := links.Open(netns.NsHandle(ns.Fd()))
	must.Succeed(b, err)
	defer h.Close()

	for b.Loop() {
		if list, err := h.All(); err != nil || len(list) < 257 {
			b.Fatalf("%d netdevs, %v", len(list), err)
		}
	}
}
