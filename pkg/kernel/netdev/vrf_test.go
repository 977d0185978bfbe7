// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// allWishes returns an interface with all that a pod can ask for on this kernel.
func allWishes(t *testing.T) function.Interface {
	t.Helper()
	want := fullInterface
	if netns.Has(t, netns.VRFs()) {
		want.VRF = &function.VRF{Name: "red", Table: 100}
	}
	if netns.Has(t, netns.VLANs()) {
		want.VLANs = []function.VLAN{{Name: "data7", Tag: 7, MTU: 1300,
			Addresses: []netip.Prefix{netip.MustParsePrefix("10.7.0.5/24")}}, {Name: "data8", Tag: 8}}
	}
	return want
}

func linkAttrs(name string) netlink.LinkAttrs {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	return attrs
}

// TestVRF checks that two interfaces of a pod share a VRF, that the routes are in its table, and
// that the VRF goes with its last interface.
func TestVRF(t *testing.T) {
	netns.Need(t, netns.VRFs())

	w := newWorld(t, nil)
	second := netdev.Device{Name: "ens1f0v1"}
	netns.Connect(t, w.host, second.Name, w.xpu, "pf0vf1")
	first, place, _ := w.attach(t, allWishes(t))

	want := function.Interface{
		Name: "net2", VRF: &function.VRF{Name: "red", Table: 100},
		Addresses: []netip.Prefix{netip.MustParsePrefix("10.6.0.5/24")},
	}
	before, secondPlace, err := w.engine.Plan(t.Context(), second, w.pod.Path(), want)
	must.Succeed(t, err)
	_, err = w.engine.Attach(t.Context(), second, before, secondPlace, want)
	must.Succeed(t, err)

	red := get(t, w.pod, "red")
	for _, name := range []string{"net1", "net2"} {
		if port := get(t, w.pod, name); port.Attrs().MasterIndex != red.Attrs().Index {
			t.Errorf("%s is not in the VRF: %+v", name, port.Attrs())
		}
	}
	checkTable(t, w, "10.2.0.0/16", "10.6.0.0/24", "fd00::/64")

	attached := netdev.Attached{Before: first, Place: place, Want: allWishes(t)}
	attached.Expected.Addresses = fullInterface.Addresses
	if differences := w.check(t, attached); len(differences) > 0 {
		t.Errorf("differences %q", differences)
	}

	must.Succeed(t, w.pod.Handle().LinkSetDown(red))
	if d := w.check(t, attached); !slices.Contains(d, "VRF red is down") {
		t.Errorf("differences %q", d)
	}
	must.Succeed(t, w.pod.Handle().LinkSetUp(red))

	otherTable := attached
	otherTable.Want.VRF = &function.VRF{Name: "red", Table: 7}
	if d := w.check(t, otherTable); !slices.Contains(d, "VRF red has table 100, not 7") {
		t.Errorf("differences %q", d)
	}

	otherMAC := attached
	otherMAC.Expected.MAC = "02:00:00:00:00:99"
	const differs = "mac is 02:00:00:00:00:01, was 02:00:00:00:00:99"
	if d := w.check(t, otherMAC); !slices.Contains(d, differs) {
		t.Errorf("differences %q", d)
	}

	must.Succeed(t, w.pod.Handle().LinkSetNoMaster(get(t, w.pod, "net1")))
	if d := w.check(t, attached); !slices.Contains(d, "interface is not in VRF red") {
		t.Errorf("differences %q", d)
	}

	_, err = w.engine.Restore(t.Context(), device(), first, place)
	must.Succeed(t, err)
	w.checkRestored(t, first)
	if left := names(t, w.pod); !slices.Contains(left, "red") {
		t.Errorf("the VRF of net2 is gone: %q", left)
	}

	restored, err := w.engine.Restore(t.Context(), second, before, secondPlace)
	must.Succeed(t, err)
	if left := names(t, w.pod); slices.Contains(left, "red") || len(restored.Notes) > 0 {
		t.Errorf("the pod still has %q; notes %q", left, restored.Notes)
	}
}

// TestVLANs checks that the interface has the VLAN interfaces that the pod asks for, and that they
// go with it.
func TestVLANs(t *testing.T) {
	netns.Need(t, netns.VLANs())

	w := newWorld(t, nil)
	want := allWishes(t)
	want.VRF = nil
	before, place, _ := w.attach(t, want)
	below := get(t, w.pod, "net1").Attrs().Index
	for name, mtu := range map[string]int{"data7": 1300, "data8": 1400} {
		v, isVLAN := get(t, w.pod, name).(*netlink.Vlan)
		if !isVLAN || v.ParentIndex != below || v.VlanId != int(name[4]-'0') || v.MTU != mtu ||
			v.RawFlags&unix.IFF_UP == 0 {
			t.Errorf("%s is %+v", name, v)
		}
	}

	addresses, err := w.pod.Handle().AddrList(get(t, w.pod, "data7"), netlink.FAMILY_V4)
	must.Succeed(t, err)
	if len(addresses) != 1 || addresses[0].IPNet.String() != "10.7.0.5/24" {
		t.Errorf("data7 has %v", addresses)
	}

	attached := netdev.Attached{Before: before, Place: place, Want: want}
	must.Succeed(t, w.pod.Handle().LinkDel(get(t, w.pod, "data8")))
	if d := w.check(t, attached); !slices.Contains(d, "VLAN interface data8 is missing") {
		t.Errorf("differences %q", d)
	}

	checkOtherVLANs(t, w, attached)

	_, err = w.engine.Restore(t.Context(), device(), before, place)
	must.Succeed(t, err)
	w.checkRestored(t, before)
	if left := names(t, w.pod); !slices.Equal(left, []string{"lo"}) {
		t.Errorf("the pod still has %q", left)
	}
}

// checkOtherVLANs checks that a CHECK finds other netdevs in the place of a VLAN interface of net1.
func checkOtherVLANs(t *testing.T, w *world, attached netdev.Attached) {
	t.Helper()
	pod := w.pod.Handle()
	must.Succeed(t, pod.LinkAdd(&netlink.Bridge{LinkAttrs: linkAttrs("br0")}))
	on := func(parent, name string) netlink.LinkAttrs {
		attrs := linkAttrs(name)
		attrs.ParentIndex = get(t, w.pod, parent).Attrs().Index
		return attrs
	}

	for want, other := range map[string]netlink.Link{
		"VLAN interface data8 has tag 9, not 8": &netlink.Vlan{
			LinkAttrs: on("net1", "data8"), VlanId: 9,
		},
		"VLAN interface data8 is on another netdev": &netlink.Vlan{
			LinkAttrs: on("br0", "data8"), VlanId: 8,
		},
		"VLAN interface data8 is a bridge": &netlink.Bridge{LinkAttrs: linkAttrs("data8")},
		"VLAN interface data8 is down":     &netlink.Vlan{LinkAttrs: on("net1", "data8"), VlanId: 8},
	} {
		must.Succeed(t, pod.LinkAdd(other))
		if d := w.check(t, attached); !slices.Contains(d, want) {
			t.Errorf("differences %q, want %q", d, want)
		}
		must.Succeed(t, pod.LinkDel(get(t, w.pod, "data8")))
	}
	must.Succeed(t, pod.LinkDel(get(t, w.pod, "br0")))
}

func checkTable(t *testing.T, w *world, want ...string) {
	t.Helper()
	routes, err := w.pod.Handle().RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: 100},
		netlink.RT_FILTER_TABLE)
	must.Succeed(t, err)
	var got []string
	for _, r := range routes {
		got = append(got, fmt.Sprint(r.Dst))
	}
	for _, route := range want {
		if !slices.Contains(got, route) {
			t.Errorf("table 100 has %q, and not %s", got, route)
		}
	}
}

// TestVRFOfThePodStays checks that a VRF that the pod made is used, and left alone.
func TestVRFOfThePodStays(t *testing.T) {
	netns.Need(t, netns.VRFs())

	w := newWorld(t, nil)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "red"
	must.Succeed(t, w.pod.Handle().LinkAdd(&netlink.Vrf{LinkAttrs: attrs, Table: 100}))
	before, place, _ := w.attach(t, allWishes(t))
	_, err := w.engine.Restore(t.Context(), device(), before, place)
	must.Succeed(t, err)
	if left := names(t, w.pod); !slices.Contains(left, "red") {
		t.Errorf("the pod's own VRF is gone: %q", left)
	}
}

// TestVRFVanishes checks that a VRF that a program of the pod deletes before or at the moment of
// the join is made once more, and that the attachment fails if that happens again.
func TestVRFVanishes(t *testing.T) {
	netns.Need(t, netns.VRFs())

	for name, test := range map[string]struct {
		at    string // the step before which it is deleted
		times int
	}{
		"once": {"join VRF red", 1}, "again": {"join VRF red", 2},
		"as soon as it is made":     {"find VRF red", 1},
		"each time that it is made": {"find VRF red", 2},
	} {
		t.Run(name, func(t *testing.T) {
			at, times := test.at, test.times
			left := times
			var w *world
			w = newWorld(t, func(step string) {
				if step == at && left > 0 {
					left--
					must.Succeed(t, w.pod.Handle().LinkDel(get(t, w.pod, "red")))
				}
			})

			want := function.Interface{Name: "net1", VRF: &function.VRF{Name: "red", Table: 100}}
			before, place, err := w.engine.Plan(t.Context(), device(), w.pod.Path(), want)
			must.Succeed(t, err)
			_, err = w.engine.Attach(t.Context(), device(), before, place, want)
			const vanished = "VRF red: it was deleted by another program at this moment"
			switch {
			case times == 1 && err != nil:
				t.Errorf("error %v", err)
			case times == 2 && (err == nil || !strings.Contains(err.Error(), vanished)):
				t.Errorf("error %v, want %q", err, vanished)
			}

			if times == 1 {
				_, err = w.engine.Restore(t.Context(), device(), before, place)
				must.Succeed(t, err)
			}
			w.checkRestored(t, before)
		})
	}
}

// TestVRFAgain checks that the kernel's rule for VRFs stays for the next VRF of a pod, because the
// kernel does not add it again.
func TestVRFAgain(t *testing.T) {
	netns.Need(t, netns.VRFs())

	w := newWorld(t, nil)
	for range 2 {
		before, place, _ := w.attach(t, function.Interface{
			Name: "net1", VRF: &function.VRF{Name: "red", Table: 100},
		})
		if n := rulesOfVRFs(t, w); n != 2 {
			t.Errorf("%d rules for VRFs, want one for each family", n)
		}
		_, err := w.engine.Restore(t.Context(), device(), before, place)
		must.Succeed(t, err)
	}
	if n := rulesOfVRFs(t, w); n != 2 {
		t.Errorf("%d rules for VRFs stay, want 2", n)
	}
}

func rulesOfVRFs(t *testing.T, w *world) (n int) {
	t.Helper()
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := w.pod.Handle().RuleList(family)
		must.Succeed(t, err)
		for _, r := range list {
			if r.Priority == 1000 {
				n++
			}
		}
	}
	return n
}

// TestVRFErrors checks that what stands in the way of a VRF is named, and that the netdev is back.
func TestVRFErrors(t *testing.T) {
	const missing = "VRF red: the node's kernel has no VRFs (CONFIG_NET_VRF, module vrf)"
	const taken = "VRF red: the pod has another bridge of this name"
	for name, given := range map[string]func(w *world) (want string){
		"no VRFs": func(*world) string { return missing },
		"name is taken": func(w *world) string {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = "red"
			must.Succeed(t, w.pod.Handle().LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
			return taken
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			message := given(w)
			if message == missing && netns.Has(t, netns.VRFs()) {
				return // this kernel cannot be without them
			}

			want := function.Interface{Name: "net1", VRF: &function.VRF{Name: "red", Table: 100}}
			before, place, err := w.engine.Plan(t.Context(), device(), w.pod.Path(), want)
			must.Succeed(t, err)
			_, err = w.engine.Attach(t.Context(), device(), before, place, want)
			if err == nil || !strings.Contains(err.Error(), message) {
				t.Errorf("error %v, want %q", err, message)
			}
			w.checkRestored(t, before)
		})
	}
}
