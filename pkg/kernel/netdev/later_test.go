// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// chained returns an attached interface with addresses and a route, and the properties that it has
// by the last result of a chain of plugins.
func chained(t *testing.T, w *world) netdev.Attached {
	t.Helper()
	want := fullInterface
	want.Routes = want.Routes[:1]
	before, place, observed := w.attach(t, want)
	return netdev.Attached{
		Before: before, Place: place, Want: want, Observed: observed,
		Expected: netdev.Expected{MAC: observed.MAC, Addresses: observed.Addresses},
	}
}

// TestCheckAfterOtherPlugins checks that changes of later plugins in a chain are not reported as
// differences.
func TestCheckAfterOtherPlugins(t *testing.T) {
	for name, plugin := range map[string]func(*testing.T, *netns.Namespace, netlink.Link, *netdev.Attached){
		"tuning": func(t *testing.T, pod *netns.Namespace, l netlink.Link, a *netdev.Attached) {
			h := pod.Handle()
			must.Succeed(t,
				h.LinkSetHardwareAddr(l, function.MAC("02:00:00:00:00:77").HardwareAddr()))
			must.Succeed(t, h.LinkSetMTU(l, 1300))
			must.Succeed(t, h.SetPromiscOn(l))
			must.Succeed(t, h.LinkSetAllmulticastOff(l))
			a.Expected.MAC = "02:00:00:00:00:77"
		},
		"sbr": func(t *testing.T, pod *netns.Namespace, l netlink.Link, _ *netdev.Attached) {
			h := pod.Handle()
			routes, err := h.RouteListFiltered(netlink.FAMILY_V4,
				&netlink.Route{LinkIndex: l.Attrs().Index}, netlink.RT_FILTER_OIF)
			must.Succeed(t, err)

			for _, r := range routes {
				if r.Gw == nil {
					continue
				}

				must.Succeed(t, h.RouteDel(&r))
				onLink := netlink.Route{LinkIndex: r.LinkIndex, Dst: prefixOf("10.1.0.0/24"),
					Scope: netlink.SCOPE_LINK, Table: 100}
				must.Succeed(t, h.RouteReplace(&onLink))
				r.Table = 100
				must.Succeed(t, h.RouteAdd(&r))
			}
		},
		"bond": func(t *testing.T, pod *netns.Namespace, l netlink.Link, a *netdev.Attached) {
			netns.Need(t, netns.Bonds())
			h := pod.Handle()
			bond := netlink.NewLinkBond(linkAttrs("master0"))
			bond.Mode = netlink.BOND_MODE_ACTIVE_BACKUP
			must.Succeed(t, h.LinkAdd(bond))
			master := get(t, pod, "master0")
			must.Succeed(t, h.LinkSetHardwareAddr(master,
				function.MAC("02:00:00:00:00:88").HardwareAddr()))
			must.Succeed(t, h.LinkSetDown(l))
			must.Succeed(t, h.LinkSetMaster(l, master))
			must.Succeed(t, h.LinkSetUp(master))
			for _, address := range a.Expected.Addresses {
				must.Succeed(t, h.AddrReplace(master, &netlink.Addr{
					IPNet: netaddr.ToIPNet(address), Flags: unix.IFA_F_NODAD,
				}))
			}
		},
		"bridge, vrf": func(t *testing.T, pod *netns.Namespace, l netlink.Link, _ *netdev.Attached) {
			h := pod.Handle()
			attrs := netlink.NewLinkAttrs()
			attrs.Name = "master0"
			must.Succeed(t, h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
			must.Succeed(t, h.LinkSetMaster(l, get(t, pod, "master0")))
			routes, err := h.RouteListFiltered(netlink.FAMILY_V4,
				&netlink.Route{LinkIndex: l.Attrs().Index}, netlink.RT_FILTER_OIF)
			must.Succeed(t, err)

			for _, r := range routes {
				if r.Gw != nil {
					must.Succeed(t, h.RouteDel(&r))
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			a := chained(t, w)
			plugin(t, w.pod, get(t, w.pod, "net1"), &a)
			if got := w.check(t, a); len(got) > 0 {
				t.Errorf("check: %q", got)
			}

			_, err := w.engine.Restore(t.Context(), netdev.Device{}, a.Before, a.Place)
			must.Succeed(t, err)
			w.checkRestored(t, a.Before)
		})
	}
}

func prefixOf(text string) *net.IPNet {
	n, err := netlink.ParseIPNet(text)
	if err != nil {
		panic(err)
	}
	return n
}

// TestCheckByTheResult checks that the interface is compared with the last result of the chain.
func TestCheckByTheResult(t *testing.T) {
	w := newWorld(t, nil)
	a := chained(t, w)
	a.Expected.MAC = "02:00:00:00:00:99"
	a.Expected.Addresses = append(a.Expected.Addresses, netip.MustParsePrefix("10.1.0.77/24"))
	want := []string{
		"mac is 02:00:00:00:00:01, was 02:00:00:00:00:99", "address 10.1.0.77/24 is missing",
	}
	if diff := cmp.Diff(want, w.check(t, a)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestAnnounceKeepsTheMAC checks that the announcement does not undo a change of the MAC after the
// attachment.
func TestAnnounceKeepsTheMAC(t *testing.T) {
	w := newWorld(t, nil)
	must.Succeed(t, w.xpu.Handle().LinkSetUp(get(t, w.xpu, "pf0vf0")))
	a := chained(t, w)
	const other = "02:00:00:00:00:66"
	must.Succeed(t,
		w.pod.Handle().LinkSetHardwareAddr(get(t, w.pod, "net1"),
			function.MAC(other).HardwareAddr()))
	must.Succeed(t, w.engine.Announce(t.Context(), a))
	if got := get(t, w.pod, "net1").Attrs().HardwareAddr.String(); got != other {
		t.Errorf("MAC %s, want %s", got, other)
	}
}

// TestAnnounceKeepsNeighbors checks that the announcement, at which the kernel drops all entries of
// the neighbour table, leaves the ones that the pod asked for.
func TestAnnounceKeepsNeighbors(t *testing.T) {
	w := newWorld(t, nil)
	must.Succeed(t, w.xpu.Handle().LinkSetUp(get(t, w.xpu, "pf0vf0")))
	before, place, observed := w.attach(t, fullInterface)
	must.Succeed(t, w.engine.Announce(t.Context(), netdev.Attached{
		Before: before, Place: place, Want: fullInterface, Observed: observed,
	}))

	got := podState(t, w)
	for _, n := range fullInterface.Neighbors {
		if want := fmt.Sprintf("neighbor %s %s 128", n.Address, n.MAC); !slices.Contains(got, want) {
			t.Errorf("the pod lacks %q; it has:\n%s", want, strings.Join(got, "\n"))
		}
	}
}

// sysctl writes a sysctl of a network namespace.
func sysctl(t *testing.T, ns *netns.Namespace, path, value string) {
	t.Helper()
	must.Succeed(t, ns.Do(func() error {
		return os.WriteFile("/proc/sys/net/"+path,
			[]byte(value), 0)
	}))
}

// TestIPv6SwitchedOff checks that an interface with an IPv6 address has IPv6, even if it is off in
// the namespace.
func TestIPv6SwitchedOff(t *testing.T) {
	w := newWorld(t, nil)
	sysctl(t, w.pod, "ipv6/conf/default/disable_ipv6", "1")
	sysctl(t, w.pod, "ipv6/conf/all/disable_ipv6", "1")
	before, place, observed := w.attach(t, fullInterface)
	if len(observed.Addresses) != len(fullInterface.Addresses) {
		t.Errorf("addresses %v", observed.Addresses)
	}

	_, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place)
	must.Succeed(t, err)
	w.checkRestored(t, before)
}

// TestStableSecret covers a netdev whose addresses depend on a secret. The move removes the secret,
// and the release succeeds without the addresses.
func TestStableSecret(t *testing.T) {
	w := newWorld(t, nil)
	sysctl(t, w.host, "ipv6/conf/"+hostName+"/stable_secret", "2001:db8::1")
	before, place, _ := w.attach(t, function.Interface{Name: "net1"})
	restored, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place)
	must.Succeed(t, err)
	if left := netdev.Diff(before, w.snapshot(t, hostName)); len(left) != len(restored.Notes) {
		t.Errorf("left %q, notes %q", left, restored.Notes)
	}

	for _, note := range restored.Notes {
		if !strings.HasPrefix(note, "net.ipv6.conf addr_gen_mode is ") {
			t.Errorf("note %q", note)
		}
	}
}

// TestAnnounceOfDownInterface checks that the error names the reason if the pod has set the
// interface down.
func TestAnnounceOfDownInterface(t *testing.T) {
	w := newWorld(t, nil)
	a := chained(t, w)
	must.Succeed(t, w.xpu.Handle().LinkSetDown(get(t, w.xpu, "pf0vf0")))

	for down, says := range map[bool]string{
		true: "is administratively down", false: "has no carrier yet",
	} {
		l := get(t, w.pod, "net1")
		if down {
			must.Succeed(t, w.pod.Handle().LinkSetDown(l))
		} else {
			must.Succeed(t, w.pod.Handle().LinkSetUp(l))
		}

		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		mentions(t, w.engine.Announce(ctx, a), says)
		cancel()
	}
}
