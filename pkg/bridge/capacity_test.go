// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// fill puts netdevs into a bridge until the bridge is full, and returns the name of the last one.
func (x *xpu) fill(bridge string) (last string) {
	x.t.Helper()
	full := x.link(bridge).Attrs().Index
	for i := 0; ; i++ {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = fmt.Sprintf("other%d", i)
		link := &netlink.Veth{LinkAttrs: attrs, PeerName: fmt.Sprintf("peer%d", i)}
		must.Succeed(x.t, x.Handle().LinkAdd(link))
		err := x.Handle().LinkSetMasterByIndex(link, full)
		if errors.Is(err, unix.EXFULL) {
			return last
		}

		must.Succeed(x.t, err)
		last = attrs.Name
	}
}

// testBridgeIsFull checks that a port says so if its network's bridge is full, and that it comes up
// when the bridge has capacity again.
func testBridgeIsFull(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "")
	x.start()
	x.network("net-blue", 10, 0)
	one, two := newPod(t, x, rep1, 1), newPod(t, x, rep2, 2)
	x.port(rep1, "net-blue", one.mac)
	last := x.fill(x.bridge("net-blue"))
	err := x.client.EnsurePort(x.ctx(),
		opi.Port{ID: rep2, MAC: two.mac, Networks: []string{"net-blue"}})
	if !errors.Is(err, opi.ErrFailed) || !strings.Contains(err.Error(), "at most 1023 ports") {
		t.Errorf("got %v, want that the bridge is full", err)
	}

	must.Succeed(t, x.Handle().LinkDel(x.link(last)))
	x.up(rep2)
	reach(t, one, two)
}

// TestSeveralBridges checks that a network for which the first bridge has no capacity is in a
// second bridge with its VXLAN port, also after a restart, and that the second bridge is removed
// with its last network.
func TestSeveralBridges(t *testing.T) {
	netns.Need(t, netns.VLANFiltering())
	a, b := wired(t, plane.ModeVLANAware)
	for _, x := range []*xpu{a, b} {
		x.network("net-blue", 10, 1000)
		x.network("net-red", 20, 2000)
	}

	blue, red, trunk, far := newPod(t, a, rep1, 1), newPod(t, a, rep2, 2), newPod(t, a, rep3,
		3), newPod(t, b, rep1, 4)
	a.port(rep1, "net-blue", blue.mac)
	a.fill("br-opi")
	a.port(rep2, "net-red", red.mac)
	b.port(rep1, "net-red", far.mac)
	reach(t, red, far)

	at := func(netdev, bridge string) {
		t.Helper()
		if a.link(netdev).Attrs().MasterIndex != a.link(bridge).Attrs().Index {
			t.Errorf("netdev %s is not in bridge %s", netdev, bridge)
		}
	}

	check := func() {
		t.Helper()
		at(rep1, "br-opi")
		at(rep2, "br-opi-1")
		at("vx-net-red", "br-opi-1")
		reach(t, red, far)
	}

	check()

	both := opi.Port{
		ID: rep3, MAC: trunk.mac, Networks: []string{"net-blue", "net-red"}, Trunk: true,
	}
	err := a.client.EnsurePort(a.ctx(), both)
	if err == nil ||
		!strings.Contains(err.Error(), "different bridges of the kernel, br-opi and br-opi-1") {
		t.Errorf("a trunk of networks in two bridges: %v", err)
	}

	q := red.pinger(t)
	a.stop()
	a.start()
	if ok, err := q.once(far, time.Second); err != nil || !ok {
		t.Errorf("over a restart: %t, %v", ok, err)
	}

	check()

	// Without its port, the network can move to the bridge that the trunk needs.
	must.Succeed(t, a.client.DeletePort(a.ctx(), rep1))
	must.Succeed(t, a.client.EnsurePort(a.ctx(), both))
	at(rep3, "br-opi-1")
	at("vx-net-blue", "br-opi-1")

	for _, port := range []string{rep2, rep3} {
		must.Succeed(t, a.client.DeletePort(a.ctx(), port))
	}

	for _, network := range []string{"net-blue", "net-red"} {
		must.Succeed(t, a.client.DeleteNetwork(a.ctx(), network))
	}

	if a.hasLink("br-opi-1") || !a.hasLink("br-opi") {
		t.Error("want the first bridge to be left alone")
	}
}
