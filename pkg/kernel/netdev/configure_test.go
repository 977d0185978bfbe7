// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/ethtool"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestWanted checks that a pod's interface has everything that the pod asked for, and that nothing
// of it stays in the pod's namespace or on the netdev.
func TestWanted(t *testing.T) {
	w := newWorld(t, nil)
	before, place, _ := w.attach(t, fullInterface)
	got := podState(t, w)
	for _, want := range []string{
		"rule 100 from 10.1.0.0/24 to <nil> iif  oif  table 100",
		"rule 101 from <nil> to fd01::/64 iif  oif net1 table 101",
		"rule 102 from <nil> to <nil> iif net1 oif  table 100 family 2",
		"rule 102 from <nil> to <nil> iif net1 oif  table 100 family 10",
		"neighbor 10.1.0.1 02:00:00:00:00:aa 128", "neighbor fd00::1 02:00:00:00:00:aa 128",
		"arp_ignore 1", "rp_filter 2", "accept_ra 0",
		"sizes 131072 100000 60000 50000", "tx-tcp-segmentation off", "channels 1 1",
		"route 10.4.0.0/16 via 10.9.9.9 from 10.1.0.5 table 100 mtu 1300 advmss 1200 onlink",
	} {
		if !slices.ContainsFunc(got, func(line string) bool { return strings.HasPrefix(line, want) }) {
			t.Errorf("the pod lacks %q; it has:\n%s", want, strings.Join(got, "\n"))
		}
	}

	restored, err := w.engine.Restore(t.Context(), device(), before, place)
	must.Succeed(t, err)
	if len(restored.Notes) > 0 {
		t.Errorf("notes %q", restored.Notes)
	}

	w.checkRestored(t, before)
	if left := rules(t, w); len(left) > 0 {
		t.Errorf("rules that stay in the pod: %q", left)
	}
}

// TestRulesOfThePodStay checks that rules of the pod and of its other interfaces are left alone.
func TestRulesOfThePodStay(t *testing.T) {
	w := newWorld(t, nil)
	before, place, _ := w.attach(t, fullInterface)
	own := netlink.NewRule()
	own.Family, own.Priority, own.Table, own.Mark = unix.AF_INET, 99, 100, 7
	must.Succeed(t, w.pod.Handle().RuleAdd(own))
	others := netlink.NewRule()
	others.Family, others.Priority, others.Table, others.IifName = unix.AF_INET, 102, 100, "net2"
	must.Succeed(t, w.pod.Handle().RuleAdd(others))

	_, err := w.engine.Restore(t.Context(), device(), before, place)
	must.Succeed(t, err)
	if left := rules(t, w); len(left) != 2 || !strings.HasPrefix(left[0], "rule 99 ") ||
		!strings.Contains(left[1], "iif net2") {
		t.Errorf("rules %q, want the pod's own, and the one of net2", left)
	}
}

// TestRulesThatAreTaken checks that a rule is refused before anything is touched if the pod has one
// that the kernel could take for it.
func TestRulesThatAreTaken(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*netlink.Rule)
		taken  bool
	}{
		"the same":                {func(*netlink.Rule) {}, true},
		"a more specific one":     {func(r *netlink.Rule) { r.IifName = "lo" }, true},
		"one of another priority": {func(r *netlink.Rule) { r.Priority = 99 }, false},
		"one for another table":   {func(r *netlink.Rule) { r.Table = 99 }, false},
		"one of the other family": {func(r *netlink.Rule) { r.Family = unix.AF_INET6 }, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			other := netlink.NewRule()
			other.Family, other.Priority, other.Table = unix.AF_INET, 100, 100
			test.change(other)
			must.Succeed(t, w.pod.Handle().RuleAdd(other))

			want := function.Interface{Name: "net1", Rules: []function.Rule{
				{Priority: 100, From: netip.MustParsePrefix("10.1.0.0/24"), Table: 100},
			}}
			_, _, err := w.engine.Plan(t.Context(), device(), w.pod.Path(), want)
			const message = "already: give IPv4 rule 100 from 10.1.0.0/24 table 100 another priority"
			if taken := err != nil && strings.Contains(err.Error(), message); taken != test.taken {
				t.Errorf("error %v; taken: %t", err, test.taken)
			}
		})
	}
}

// rules returns the rules of the pod's namespace without those of the kernel.
func rules(t *testing.T, w *world) (lines []string) {
	t.Helper()
	list, err := w.pod.Handle().RuleList(netlink.FAMILY_ALL)
	must.Succeed(t, err)
	for _, r := range list {
		ofVRFs := r.Priority == 1000 && r.Table == 0 // comes with the first VRF, and stays
		if r.Priority != 0 && r.Priority < 32766 && !ofVRFs {
			lines = append(lines, fmt.Sprintf("rule %d from %v to %v iif %s oif %s table %d family %d",
				r.Priority, r.Src, r.Dst, r.IifName, r.OifName, r.Table, r.Family))
		}
	}
	return lines
}

// podState describes what TestWanted compares, in lines.
func podState(t *testing.T, w *world) []string {
	t.Helper()
	lines := rules(t, w)
	pod, link := w.pod.Handle(), get(t, w.pod, "net1")
	a := link.Attrs()
	lines = append(lines, fmt.Sprintf("sizes %d %d %d %d", a.GSOMaxSize, a.GROMaxSize,
		a.GSOIPv4MaxSize, a.GROIPv4MaxSize))

	neighbors, err := pod.NeighList(a.Index, netlink.FAMILY_ALL)
	must.Succeed(t, err)
	for _, n := range neighbors {
		lines = append(lines, fmt.Sprintf("neighbor %s %s %d", n.IP, n.HardwareAddr, n.State))
	}

	routes, err := pod.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: 100},
		netlink.RT_FILTER_TABLE)
	must.Succeed(t, err)
	for _, r := range routes {
		onLink := ""
		if r.Flags&int(netlink.FLAG_ONLINK) != 0 {
			onLink = "onlink"
		}
		lines = append(lines, fmt.Sprintf("route %s via %s from %s table %d mtu %d advmss %d %s", r.Dst,
			r.Gw, r.Src, r.Table, r.MTU, r.AdvMSS, onLink))
	}

	must.Succeed(t, namespace.Do(netns.NsHandle(w.pod.Fd()), func() error {
		for _, name := range []string{"ipv4/conf/net1/arp_ignore", "ipv4/conf/net1/rp_filter",
			"ipv6/conf/net1/accept_ra"} {
			text, err := os.ReadFile("/proc/sys/net/" + name)
			if err != nil {
				return err
			}
			lines = append(lines, filepath.Base(name)+" "+strings.TrimSpace(string(text)))
		}
		return nil
	}))

	conn, err := ethtool.Dial(netns.NsHandle(w.pod.Fd()))
	must.Succeed(t, err)
	defer conn.Close()
	features, err := conn.Read(a.Index, "features")
	must.Succeed(t, err)
	channels, err := conn.Read(a.Index, "channels")
	must.Succeed(t, err)

	return append(lines, "tx-tcp-segmentation "+features["tx-tcp-segmentation"],
		"channels "+channels["rx"]+" "+channels["tx"])
}

// TestBadWishes checks that what the kernel refuses after the move is undone, and named.
func TestBadWishes(t *testing.T) {
	for name, test := range map[string]struct {
		want function.Interface
		err  string
	}{
		"sysctl": {function.Interface{
			Name: "net1", Sysctls: map[string]string{"net.ipv6.conf.IFNAME.addr_gen_mode": "99"},
		}, "sysctl net.ipv6.conf.IFNAME.addr_gen_mode"},
		"source that the pod does not have": {function.Interface{
			Name: "net1", Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.5/24")},
			Routes: []function.Route{{To: netip.MustParsePrefix("10.2.0.0/16"),
				Source: netip.MustParseAddr("10.7.7.7")}},
		}, "route to 10.2.0.0/16"},
		"channels": {function.Interface{
			Name: "net1", Ethtool: function.Ethtool{"channels": {"rx": "1000"}},
		}, "ethtool channels"},
		"address that a sysctl removes": {function.Interface{
			Name: "net1", Addresses: []netip.Prefix{netip.MustParsePrefix("fd00::5/64")},
			Sysctls: map[string]string{"net.ipv6.conf.IFNAME.disable_ipv6": "1"},
		}, "address fd00::5/64: the kernel accepted it, and the interface does not have it"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			before, place, err := w.engine.Plan(t.Context(), device(), w.pod.Path(), test.want)
			must.Succeed(t, err)
			_, err = w.engine.Attach(t.Context(), device(), before, place, test.want)
			if err == nil || !strings.Contains(err.Error(), test.err) {
				t.Errorf("error %v, want %q", err, test.err)
			}
			if before.Name != hostName {
				t.Errorf("name %s", before.Name)
			}
			w.checkRestored(t, before)
		})
	}
}
