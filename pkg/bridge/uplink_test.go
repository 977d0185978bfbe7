// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"errors"
	"net"
	"slices"
	"strings"
	"testing"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// testIPv6Underlay checks two xPUs that reach each other by IPv6 only. Their addresses are
// tentative at first, as on a machine that starts.
func testIPv6Underlay(t *testing.T, mode plane.Mode) {
	a, b := newXPU(t, mode, "p0"), newXPU(t, mode, "p0")
	netns.Connect(t, a.Namespace, "p0", b.Namespace, "p0")
	a.start()
	b.start()
	addAddress(t, a.Namespace, "p0", "2001:db8::1/64")
	addAddress(t, b.Namespace, "p0", "2001:db8::2/64")

	for _, x := range []*xpu{a, b} {
		x.network("net-blue", 10, 70000)
	}

	left, right := newPod(t, a, rep1, 1), newPod(t, b, rep1, 2)
	a.port(rep1, "net-blue", left.mac)
	b.port(rep1, "net-blue", right.mac)
	reach(t, left, right)
	vxlan := a.link("vx-net-blue").(*netlink.Vxlan)
	if want := net.ParseIP("ff18:0:0:4789::1:1170"); !vxlan.Group.Equal(want) || vxlan.MTU != 1430 {
		t.Errorf("VXLAN port is group %s, MTU %d, want %s, 1430", vxlan.Group, vxlan.MTU, want)
	}

	// VXLAN changes to IPv4 when the uplinks of both xPUs get an IPv4 address.
	addAddress(t, a.Namespace, "p0", "198.51.100.1/24")
	addAddress(t, b.Namespace, "p0", "198.51.100.2/24")

	for _, x := range []*xpu{a, b} {
		must.Eventually(t, "IPv4 is preferred", func() bool {
			link, err := x.Handle().LinkByName("vx-net-blue") // is made anew
			return err == nil && link.Attrs().MTU == 1450
		})
	}

	reach(t, left, right)
}

// testUnderlayIsChosen checks that an agent that is configured to use IPv6 does not use IPv4.
func testUnderlayIsChosen(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "p0")
	x.cfg.Plane.Underlay = plane.UnderlayIPv6
	wire := netns.New(t)
	netns.Connect(t, x.Namespace, "p0", wire, "wire")
	addAddress(t, x.Namespace, "p0", "198.51.100.1/24")
	x.start()
	vni := uint32(1000)
	err := x.client.EnsureNetwork(x.ctx(), opi.Network{ID: "net-blue", VLAN: 10, VNI: &vni})
	if err == nil ||
		!strings.Contains(err.Error(), "p0, the uplink, has no IPv6 address to send VXLAN from") {
		t.Errorf("without an IPv6 address: %v", err)
	}

	addAddress(t, x.Namespace, "p0", "2001:db8::1/64")
	must.Eventually(t, "up", func() bool {
		return x.client.EnsureNetwork(x.ctx(),
			opi.Network{ID: "net-blue", VLAN: 10, VNI: &vni}) == nil
	})
}

// testVTEP checks that VXLAN is sent from the address that a network asks for, that an address of
// another machine is refused, and that the network is DOWN while its uplink lacks the address.
func testVTEP(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "p0")
	netns.Connect(t, x.Namespace, "p0", netns.New(t), "wire")
	addAddress(t, x.Namespace, "p0", "198.51.100.1/24")
	addAddress(t, x.Namespace, "p0", "198.51.100.2/24")
	x.start()

	vni := uint32(1000)
	spec := func(last uint32) *evpn.LogicalBridgeSpec {
		address := netcommon.IPAddress_V4Addr{V4Addr: 198<<24 | 51<<16 | 100<<8 | last}
		return &evpn.LogicalBridgeSpec{VlanId: 10, Vni: &vni, VtepIpPrefix: &netcommon.IPPrefix{
			Len: 24, Addr: &netcommon.IPAddress{V4OrV6: &address},
		}}
	}
	create := func(spec *evpn.LogicalBridgeSpec) (*evpn.LogicalBridge, error) {
		return x.networks().CreateLogicalBridge(x.ctx(), &evpn.CreateLogicalBridgeRequest{
			LogicalBridgeId: "net-blue", LogicalBridge: &evpn.LogicalBridge{Spec: spec},
		})
	}

	_, err := create(spec(3))
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(),
		"198.51.100.3 is not an address of the uplink: netdev p0 has 198.51.100.1, 198.51.100.2") {
		t.Errorf("another machine's address: %v", err)
	}

	got, err := create(spec(2))
	must.Succeed(t, err)
	if !proto.Equal(got.GetSpec(), spec(2)) || got.GetStatus().GetOperStatus() !=
		evpn.LBOperStatus_LB_OPER_STATUS_UP {
		t.Errorf("the network is %v", got)
	}

	source := func() string { return x.link("vx-net-blue").(*netlink.Vxlan).SrcAddr.String() }
	if source() != "198.51.100.2" {
		t.Errorf("VXLAN is sent from %s", source())
	}

	// A client that does not know of VTEPs gets the same network.
	x.network("net-blue", 10, vni)
	if source() != "198.51.100.2" {
		t.Errorf("VXLAN is sent from %s", source())
	}

	second, err := netlink.ParseAddr("198.51.100.2/24")
	must.Succeed(t, err)
	must.Succeed(t, x.Handle().AddrDel(x.link("p0"), second))
	must.Eventually(t, "DOWN without its VTEP", func() bool {
		now, err := x.networks().GetLogicalBridge(x.ctx(),
			&evpn.GetLogicalBridgeRequest{Name: got.GetName()})
		must.Succeed(t, err)
		return strings.Contains(now.GetStatus().GetComponents()[0].GetDetails(),
			"198.51.100.2 is not an address of the uplink")
	})
}

// testSeveralUplinks checks that each network is at the uplink that carries its VNI.
func testSeveralUplinks(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "")
	x.cfg.Plane.Uplinks = []plane.Uplink{
		{Name: "p0", First: 1, Last: 999}, {Name: "p1", First: 1000, Last: 1999},
	}
	wire := netns.New(t)
	for i, name := range []string{"p0", "p1"} {
		netns.Connect(t, x.Namespace, name, wire, name)
		addAddress(t, x.Namespace, name, net.IPv4(198, 51, 100, byte(1+i)).String()+"/24")
	}

	x.start()
	x.network("net-blue", 10, 999)
	x.network("net-red", 20, 1000)

	for network, uplink := range map[string]string{"net-blue": "p0", "net-red": "p1"} {
		if at := x.link("vx-" +
			network).(*netlink.Vxlan).VtepDevIndex; at != x.link(uplink).Attrs().Index {
			t.Errorf("%s is at ifindex %d, want %s", network, at, uplink)
		}
	}

	vni := uint32(2000)
	err := x.client.EnsureNetwork(x.ctx(), opi.Network{ID: "net-green", VLAN: 30, VNI: &vni})
	if err == nil || !strings.Contains(err.Error(), "vni 2000: the agent has no uplink") {
		t.Errorf("a network with a VNI of no uplink: %v", err)
	}

	must.Succeed(t, x.Handle().LinkSetMTU(x.link("p1"), 1400))
	must.Eventually(t, "the MTU follows that of its own uplink", func() bool {
		return x.link("vx-net-red").Attrs().MTU == 1350
	})
	if mtu := x.link("vx-net-blue").Attrs().MTU; mtu != 1450 {
		t.Errorf("the other network has MTU %d, want 1450", mtu)
	}
}

// testUplinkOfKind checks uplinks that are bonds or VLANs, if the kernel has them.
func testUplinkOfKind(t *testing.T, mode plane.Mode) {
	for name, make := range map[string]func(port netlink.Link) netlink.Link{
		"bond": func(netlink.Link) netlink.Link {
			bond := netlink.NewLinkBond(netlink.LinkAttrs{Name: "uplink"})
			bond.Mode, bond.Miimon = netlink.BOND_MODE_ACTIVE_BACKUP, 100
			return bond
		},
		"VLAN": func(port netlink.Link) netlink.Link {
			return &netlink.Vlan{
				LinkAttrs: netlink.LinkAttrs{Name: "uplink", ParentIndex: port.Attrs().Index},
				VlanId:    7,
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := newXPU(t, mode, "uplink"), newXPU(t, mode, "uplink")
			netns.Connect(t, a.Namespace, "p0", b.Namespace, "p0")

			for i, x := range []*xpu{a, b} {
				port := x.link("p0")
				if err := x.Handle().LinkAdd(make(port)); errors.Is(err, unix.EOPNOTSUPP) {
					t.Skipf("the kernel has no netdevs of the kind %s", name)
				} else if err != nil {
					t.Fatal(err)
				}

				uplink := x.link("uplink")
				if uplink.Type() == "bond" {
					must.Succeed(t, x.Handle().LinkSetDown(port))
					must.Succeed(t, x.Handle().LinkSetMaster(port, uplink))
				}

				must.Succeed(t, x.Handle().LinkSetUp(port))
				must.Succeed(t, x.Handle().LinkSetUp(uplink))
				addAddress(t, x.Namespace, "uplink",
					net.IPv4(198, 51, 100, byte(1+i)).String()+"/24")
				x.start()
				x.network("net-blue", 10, 1000)
			}

			left, right := newPod(t, a, rep1, 1), newPod(t, b, rep1, 2)
			a.port(rep1, "net-blue", left.mac)
			b.port(rep1, "net-blue", right.mac)
			reach(t, left, right)
		})
	}
}

// testUplinkIsBlocked checks that a network with a VNI and its ports go down with the reason as
// soon as the uplink carries no frames, that they come up with the uplink, and that other networks
// stay up.
func testUplinkIsBlocked(t *testing.T, mode plane.Mode) {
	a, b := wired(t, mode)
	for _, x := range []*xpu{a, b} {
		x.network("net-blue", 10, 1000)
	}

	a.network("net-local", 20, 0)
	left, right, local := newPod(t, a, rep1, 1), newPod(t, b, rep1, 2), newPod(t, a, rep2, 3)
	a.port(rep1, "net-blue", left.mac)
	b.port(rep1, "net-blue", right.mac)
	a.port(rep2, "net-local", local.mac)
	reach(t, left, right)

	const noCarrier = "netdev p0, the uplink, has no carrier: check its cable and the port at " +
		"the other end"
	const setDown = "netdev p0, the uplink, is administratively down: set it up (ip link set p0 up)"
	ends := func(x *xpu, set func(netlink.Link) error) { must.Succeed(t, set(x.link("p0"))) }

	isDown := func(why string) {
		t.Helper()
		must.Eventually(t, "the network is down: "+why, func() bool {
			all, err := a.client.ListNetworks(a.ctx())
			return err == nil && slices.ContainsFunc(all, func(n opi.NetworkStatus) bool {
				return n.ID == "net-blue" && n.State == opi.StateFailed &&
					n.Detail == "bridge: "+why
			})
		})

		if said := a.down(rep1); said != "representor: net-blue is down: "+why {
			t.Errorf("the port says %q, want %q", said, why)
		}

		a.up(rep2)
		if vxlan := a.link("vx-net-blue").Attrs(); vxlan.MTU != 1450 || vxlan.MasterIndex == 0 {
			t.Errorf("the VXLAN port is %+v, want it in place as before", vxlan)
		}
	}

	for range 2 {
		ends(b, b.Handle().LinkSetDown)
		isDown(noCarrier)
		ends(a, a.Handle().LinkSetDown)
		isDown(setDown)
		ends(a, a.Handle().LinkSetUp)
		isDown(noCarrier)
		ends(b, b.Handle().LinkSetUp)
		a.up(rep1)
		reach(t, left, right)
	}

	// An agent that starts meanwhile gives the same reason, and makes the network completely.
	a.stop()
	ends(b, b.Handle().LinkSetDown)
	a.start()
	isDown(noCarrier)
	ends(b, b.Handle().LinkSetUp)
	a.up(rep1)
	reach(t, left, right)
}

// testBlockedWithoutAddress checks the reason for an uplink that is down and so has lost its IPv6
// addresses.
func testBlockedWithoutAddress(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "p0")
	wire := netns.New(t)
	netns.Connect(t, x.Namespace, "p0", wire, "wire")
	addAddress(t, x.Namespace, "p0", "2001:db8::1/64")
	must.Succeed(t, x.Handle().LinkSetDown(x.link("p0")))
	x.start()
	vni := uint32(1000)
	err := x.client.EnsureNetwork(x.ctx(), opi.Network{ID: "net-blue", VLAN: 10, VNI: &vni})
	if err == nil || !strings.Contains(err.Error(), "is administratively down") {
		t.Errorf("an uplink that is down: %v", err)
	}

	addAddress(t, x.Namespace, "p0", "198.51.100.1/24")
	must.Succeed(t, x.Handle().LinkSetUp(x.link("p0")))

	must.Eventually(t, "up", func() bool {
		return x.client.EnsureNetwork(x.ctx(),
			opi.Network{ID: "net-blue", VLAN: 10, VNI: &vni}) == nil
	})
}

// testMTUIsRefused checks that a network whose MTU is too large for the uplink is down and names
// both MTUs, and that it comes up when the uplink's MTU is large enough.
func testMTUIsRefused(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "p0")
	wire := netns.New(t)
	netns.Connect(t, x.Namespace, "p0", wire, "wire")
	addAddress(t, x.Namespace, "p0", "198.51.100.1/24")
	x.start()
	vni := uint32(1000)
	blue := opi.Network{ID: "net-blue", VLAN: 10, VNI: &vni, MTU: 1500}
	err := x.client.EnsureNetwork(x.ctx(), blue)
	if err == nil || !strings.Contains(err.Error(), "mtu 1500: VXLAN carries at most 1450") {
		t.Errorf("MTU 1500: %v", err)
	}
	if mtu := x.client.MTU("net-blue"); mtu != 1450 {
		t.Errorf("the client knows the MTU %d, want 1450", mtu)
	}

	must.Succeed(t, x.Handle().LinkSetMTU(x.link("p0"), 1550))
	must.Eventually(t, "up with a larger MTU", func() bool {
		return x.client.EnsureNetwork(x.ctx(), blue) == nil
	})
}
