// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// remotes parses a configuration.
func remotes(t *testing.T, text string) *plane.Remotes {
	t.Helper()
	r, err := plane.ParseRemotes([]byte(text))
	must.Succeed(t, err)
	return r
}

// destinations returns where a VXLAN port sends frames to unknown addresses.
func (x *xpu) destinations(name string) (all []string) {
	x.t.Helper()
	link, err := x.Handle().LinkByName(name)
	if err != nil {
		return nil // the data plane replaces the netdev at present
	}
	entries, err := x.Handle().NeighList(link.Attrs().Index, unix.AF_BRIDGE)
	must.Succeed(x.t, err)
	for _, e := range entries {
		if e.HardwareAddr.String() == "00:00:00:00:00:00" {
			all = append(all, e.IP.String())
		}
	}
	slices.Sort(all)
	return all
}

// wantDestinations waits until frames are sent to these addresses.
func (x *xpu) wantDestinations(name string, want ...string) {
	x.t.Helper()
	must.Eventually(x.t, "the destinations are right", func() bool {
		return slices.Equal(x.destinations(name), want)
	})
}

// testRemotes checks that two xPUs with a router between them, which passes no multicast, reach
// each other, and that the agent keeps its own entries only.
func testRemotes(t *testing.T, mode plane.Mode) {
	const vxlan, foreign = "vx-net-blue", "203.0.113.77"
	both := remotes(t, "remotes: [{addresses: [198.51.100.1, 203.0.113.2, 'fd00::2']}]")
	a, b := newXPU(t, mode, "p0"), newXPU(t, mode, "p0")
	router := netns.New(t)
	must.Succeed(t, router.Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)
	}))

	for _, end := range []struct {
		*xpu
		port, own, of, subnet string
	}{
		{a, "a", "198.51.100.1", "198.51.100.254", "203.0.113.0/24"},
		{b, "b", "203.0.113.2", "203.0.113.254", "198.51.100.0/24"},
	} {
		netns.Connect(t, end.Namespace, "p0", router, end.port)
		addAddress(t, end.Namespace, "p0", end.own+"/24")
		addAddress(t, router, end.port, end.of+"/24")
		must.Succeed(t, end.Handle().RouteAdd(&netlink.Route{
			LinkIndex: end.link("p0").Attrs().Index, Gw: net.ParseIP(end.of),
			Dst: netaddr.ToIPNet(netip.MustParsePrefix(end.subnet)),
		}))
		end.cfg.Remotes = both
		end.start()
		end.network("net-blue", 10, 1000)
	}

	podA, podB := newPod(t, a, rep1, 1), newPod(t, b, rep1, 2)
	a.port(rep1, "net-blue", podA.mac)
	b.port(rep1, "net-blue", podB.mac)
	reach(t, podA, podB)
	reach(t, podB, podA)
	if group := a.link(vxlan).(*netlink.Vxlan).Group; group != nil {
		t.Errorf("frames are sent to the group %s", group)
	}
	a.wantDestinations(vxlan, "203.0.113.2")

	entry := func(to string) *netlink.Neigh {
		return &netlink.Neigh{
			LinkIndex: a.link(vxlan).Attrs().Index, Family: unix.AF_BRIDGE,
			Flags: netlink.NTF_SELF, State: netlink.NUD_PERMANENT, IP: net.ParseIP(to),
			HardwareAddr: make(net.HardwareAddr, 6),
		}
	}
	must.Succeed(t, a.Handle().NeighAppend(entry(foreign)))
	must.Succeed(t, a.Handle().NeighDel(entry("203.0.113.2")))
	a.wantDestinations(vxlan, "203.0.113.2", foreign)
	reach(t, podA, podB)

	// A change keeps what another program has put there, also while the agent does not run.
	must.Succeed(t, a.agent.SetRemotes(a.ctx(),
		remotes(t, "remotes: [{addresses: [203.0.113.2, 203.0.113.3]}]")))
	a.wantDestinations(vxlan, "203.0.113.2", "203.0.113.3", foreign)
	before := a.link(vxlan).Attrs().Index
	a.stop()
	a.cfg.Remotes = remotes(t, "remotes: [{vnis: [1-1000], addresses: [203.0.113.2]}]")
	a.start()
	a.wantDestinations(vxlan, "203.0.113.2", foreign)
	if after := a.link(vxlan).Attrs().Index; after != before {
		t.Errorf("the VXLAN port was made anew: ifindex %d, was %d", after, before)
	}
	reach(t, podA, podB)

	must.Succeed(t, a.Handle().LinkDel(a.link(vxlan)))
	a.wantDestinations(vxlan, "203.0.113.2")
	must.Succeed(t, a.agent.SetRemotes(a.ctx(), remotes(t, "remotes: [{addresses: []}]")))
	a.wantDestinations(vxlan)

	// A network that no rule has uses its multicast group.
	must.Succeed(t, a.agent.SetRemotes(a.ctx(),
		remotes(t, "remotes: [{vnis: [7], addresses: [203.0.113.2]}]")))
	a.wantDestinations(vxlan, "239.0.3.232")
	must.Succeed(t, a.agent.SetRemotes(a.ctx(), both))
	a.wantDestinations(vxlan, "203.0.113.2")
	reach(t, podA, podB)
}
