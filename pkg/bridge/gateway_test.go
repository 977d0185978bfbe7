// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// gatewayTests hold in each mode of the data plane.
var gatewayTests = map[string]func(*testing.T, plane.Mode){
	"AcrossXPUs":              testGatewayAcrossXPUs,
	"AddressesChange":         testGatewayChanges,
	"ByClient":                testGatewayByClient,
	"DataPlaneChanges":        testGatewayDataPlaneChanges,
	"Deleted":                 testGatewayIsDeleted,
	"Heals":                   testGatewayHeals,
	"IPv6IsNotForwarded":      testIPv6IsNotForwarded,
	"IsNotClaimed":            testGatewayIsNotClaimed,
	"LargePackets":            testLargePackets,
	"LongIDs":                 testLongGatewayIDs,
	"MachineIsClosed":         testMachineIsClosed,
	"NetdevsOfOthers":         testGatewayNetdevsOfOthers,
	"NewState":                testGatewayNewState,
	"Quiet":                   testGatewayIsQuiet,
	"RestartAcrossXPUs":       testRestartAcrossXPUs,
	"RestartKeepsTraffic":     testGatewayRestart,
	"RouterIsNotClaimed":      testRouterIsNotClaimed,
	"RouterMoves":             testRouterMoves,
	"RoutesBetweenXPUs":       testRoutesBetweenXPUs,
	"RoutesWithinAVRF":        testRoutesWithinVRF,
	"SameAddressesInTwoVRFs":  testSameAddresses,
	"WithoutRouteOutOfTheVRF": testNoRouteOut,
}

// TestGateways checks that VRFs and SVIs behave in the same way in both modes of the data plane.
func TestGateways(t *testing.T) {
	netns.Need(t, netns.VRFs())
	for _, mode := range []plane.Mode{plane.ModeBridgePerNetwork, plane.ModeVLANAware} {
		t.Run(string(mode), func(t *testing.T) {
			if mode == plane.ModeVLANAware {
				netns.Need(t, netns.VLANFiltering())
			}
			for name, test := range gatewayTests {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					test(t, mode)
				})
			}
		})
	}
}

// router is an xPU that clients ask for VRFs and SVIs.
type router struct{ *xpu }

// newRouter starts an xPU that forwards IPv6.
func newRouter(t *testing.T, mode plane.Mode) router {
	t.Helper()
	r := router{newXPU(t, mode, "")}
	r.forwardIPv6("1")
	r.start()
	return r
}

func (x *xpu) forwardIPv6(value string) { x.sysctl("net/ipv6/conf/all/forwarding", value) }

// sysctl writes a parameter of the xPU's kernel.
func (x *xpu) sysctl(name, value string) {
	x.t.Helper()
	must.Succeed(x.t, x.Do(func() error {
		return os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0)
	}))
}

func (r router) conn() *grpc.ClientConn {
	r.t.Helper()
	conn, err := grpc.NewClient(r.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must.Succeed(r.t, err)
	r.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (r router) vrfs() evpn.VrfServiceClient { return evpn.NewVrfServiceClient(r.conn()) }
func (r router) svis() evpn.SviServiceClient { return evpn.NewSviServiceClient(r.conn()) }

// vrfSpec returns a valid spec of a VRF, with the loopback 100.127.255.1.
func vrfSpec() *evpn.VrfSpec {
	return &evpn.VrfSpec{LoopbackIpPrefix: &netcommon.IPPrefix{
		Len: 32, Addr: &netcommon.IPAddress{
			V4OrV6: &netcommon.IPAddress_V4Addr{V4Addr: 100<<24 | 127<<16 | 255<<8 | 1},
		},
	}}
}

func (r router) vrf(id string) {
	r.t.Helper()
	got, err := r.vrfs().CreateVrf(r.ctx(), &evpn.CreateVrfRequest{
		VrfId: id, Vrf: &evpn.Vrf{Spec: vrfSpec()},
	})
	must.Succeed(r.t, err)
	if got.GetStatus().GetOperStatus() != evpn.VRFOperStatus_VRF_OPER_STATUS_UP {
		r.t.Fatalf("VRF %s is %v", id, got.GetStatus())
	}
}

var gatewayMAC = net.HardwareAddr{2, 0, 0, 0, 0xff, 1}

// sviSpec returns the spec of an SVI with these addresses, such as 10.1.0.1/24.
func sviSpec(t *testing.T, network, vrf string, addresses ...string) *evpn.SviSpec {
	t.Helper()
	spec := &evpn.SviSpec{
		Vrf: "vrfs/" + vrf, LogicalBridge: "logicalBridges/" + network, MacAddress: gatewayMAC,
	}
	for _, text := range addresses {
		prefix := netip.MustParsePrefix(text)
		message := &netcommon.IPPrefix{Len: int32(prefix.Bits()), Addr: &netcommon.IPAddress{}}
		if a := prefix.Addr(); a.Is4() {
			b := a.As4()
			message.Addr.V4OrV6 = &netcommon.IPAddress_V4Addr{
				V4Addr: uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3]),
			}
		} else {
			message.Addr.V4OrV6 = &netcommon.IPAddress_V6Addr{V6Addr: a.AsSlice()}
		}
		spec.GwIpPrefix = append(spec.GwIpPrefix, message)
	}
	return spec
}

// svi makes an SVI, which has the network's id, and waits until it is up.
func (r router) svi(network, vrf string, addresses ...string) {
	r.t.Helper()
	got, err := r.svis().CreateSvi(r.ctx(), &evpn.CreateSviRequest{
		SviId: network, Svi: &evpn.Svi{Spec: sviSpec(r.t, network, vrf, addresses...)},
	})
	must.Succeed(r.t, err)
	if got.GetStatus().GetOperStatus() != evpn.SVIOperStatus_SVI_OPER_STATUS_UP {
		r.t.Fatalf("SVI of %s is %v", network, got.GetStatus())
	}
}

// sviState returns the status of an SVI and the details of its component.
func (r router) sviState(id string) (up bool, details string) {
	r.t.Helper()
	got, err := r.svis().GetSvi(r.ctx(), &evpn.GetSviRequest{Name: "svis/" + id})
	must.Succeed(r.t, err)
	return got.GetStatus().GetOperStatus() == evpn.SVIOperStatus_SVI_OPER_STATUS_UP,
		got.GetStatus().GetComponents()[0].GetDetails()
}

// sviNetdev returns the name of the netdev of an SVI with the id of its network.
func (r router) sviNetdev(id string) string {
	if r.cfg.Plane.Mode == plane.ModeVLANAware {
		return "svi-" + id
	}
	return "br-" + id
}

// host is a pod with addresses in two families.
type host struct {
	*pod
	v4, v6 netip.Addr
}

// newHost makes a pod with a port in a network whose subnets are 10.<n>.0.0/24 and fd00:<n>::/64,
// with the network's gateway as its router.
func (r router) newHost(port, network string, subnet, last byte) *host {
	r.t.Helper()
	h := &host{
		pod: newPod(r.t, r.xpu, port, last),
		v4:  netip.AddrFrom4([4]byte{10, subnet, 0, last}),
		v6:  netip.MustParseAddr(fmt.Sprintf("fd00:%d::%d", subnet, last)),
	}
	h.mac = net.HardwareAddr{2, 0, 0, 0, subnet, last}
	eth0, err := h.Handle().LinkByName("eth0")
	must.Succeed(r.t, err)
	must.Succeed(r.t, h.Handle().LinkSetHardwareAddr(eth0, h.mac))
	addAddress(r.t, h.Namespace, "eth0", h.v4.String()+"/24")
	addAddress(r.t, h.Namespace, "eth0", h.v6.String()+"/64")

	for _, gateway := range []netip.Addr{
		netip.AddrFrom4([4]byte{10, subnet, 0, 1}),
		netip.MustParseAddr(fmt.Sprintf("fd00:%d::1", subnet)),
	} {
		must.Succeed(r.t, h.Handle().RouteAdd(&netlink.Route{
			LinkIndex: eth0.Attrs().Index, Gw: gateway.AsSlice(),
			Dst: netaddr.ToIPNet(netip.PrefixFrom(zeroOf(gateway), 0)),
		}))
	}

	must.Succeed(r.t, r.client.EnsurePort(r.ctx(), opi.Port{
		ID: port, MAC: h.mac, Networks: []string{network}, Addresses: []netip.Addr{h.v4, h.v6},
	}))

	return h
}

func zeroOf(address netip.Addr) netip.Addr {
	if address.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// pings reports whether an address answers an echo request of a host within some tries. A link-local
// address has the index of the host's interface as its zone.
func (h *host) pings(t *testing.T, to netip.Addr, tries int) bool {
	t.Helper()
	network, from, protocol := "ip4:icmp", h.v4, 1
	var request, reply icmp.Type = ipv4.ICMPTypeEcho, ipv4.ICMPTypeEchoReply
	if to.Is6() {
		network, from, protocol = "ip6:ipv6-icmp", h.v6, 58
		request, reply = ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply
	}
	if to.Zone() != "" {
		from = netaddr.LinkLocal(h.mac).WithZone(to.Zone())
	}

	var conn *icmp.PacketConn
	must.Succeed(t, h.Do(func() (err error) {
		conn, err = icmp.ListenPacket(network, from.String())
		return err
	}))
	defer func() { _ = conn.Close() }()

	id := rand.IntN(1 << 16)
	data, err := (&icmp.Message{Type: request, Body: &icmp.Echo{ID: id}}).Marshal(nil)
	must.Succeed(t, err)
	buffer := make([]byte, 2000)
	target := &net.IPAddr{IP: to.AsSlice(), Zone: to.Zone()}

	for range tries {
		_, _ = conn.WriteTo(data, target) // the neighbor may be unknown
		must.Succeed(t, conn.SetReadDeadline(time.Now().Add(300*time.Millisecond)))
		for {
			n, source, err := conn.ReadFrom(buffer)
			if err != nil {
				break
			}
			message, err := icmp.ParseMessage(protocol, buffer[:n])
			if err != nil || message.Type != reply || !target.IP.Equal(source.(*net.IPAddr).IP) {
				continue
			}
			if echo, ok := message.Body.(*icmp.Echo); ok && echo.ID == id {
				return true
			}
		}
	}

	return false
}

// reaches checks that a host reaches another one, or an address.
func (h *host) reaches(t *testing.T, to ...netip.Addr) {
	t.Helper()
	for _, address := range to {
		if !h.pings(t, address, 30) {
			t.Fatalf("%s does not reach %s", h.v4, address)
		}
	}
}

func (h *host) reachesNot(t *testing.T, to ...netip.Addr) {
	t.Helper()
	for _, address := range to {
		if h.pings(t, address, 2) {
			t.Errorf("%s reaches %s", h.v4, address)
		}
	}
}

// twoNetworks makes net-blue and net-red in one VRF with a host in each.
func (r router) twoNetworks() (blue, red *host) {
	r.t.Helper()
	r.network("net-blue", 10, 0)
	r.network("net-red", 20, 0)
	r.vrf("vrf-one")
	r.svi("net-blue", "vrf-one", "10.1.0.1/24", "fd00:1::1/64")
	r.svi("net-red", "vrf-one", "10.2.0.1/24", "fd00:2::1/64")
	return r.newHost(rep1, "net-blue", 1, 2), r.newHost(rep2, "net-red", 2, 2)
}

var (
	blueGateway = []netip.Addr{netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd00:1::1")}
	redGateway  = []netip.Addr{netip.MustParseAddr("10.2.0.1"), netip.MustParseAddr("fd00:2::1")}
)

func testRoutesWithinVRF(t *testing.T, mode plane.Mode) {
	r := newRouter(t, mode)
	blue, red := r.twoNetworks()
	// A promiscuous bridge would copy each frame of each network to the machine.
	if n := r.link(r.bridge("net-blue")).Attrs().Promisc; n != 0 {
		t.Errorf("the bridge is promiscuous for %d reasons", n)
	}
	blue.reaches(t, blueGateway...)
	blue.reaches(t, redGateway...)
	blue.reaches(t, red.v4, red.v6)
	red.reaches(t, blue.v4, blue.v6)

	r.network("net-green", 30, 0)
	r.vrf("vrf-two")
	r.svi("net-green", "vrf-two", "10.3.0.1/24", "fd00:3::1/64")
	green := r.newHost(rep3, "net-green", 3, 2)
	green.reaches(t, netip.MustParseAddr("10.3.0.1"), netip.MustParseAddr("fd00:3::1"))
	green.reachesNot(t, blue.v4, blue.v6, red.v4, red.v6)
	green.reachesNot(t, blueGateway...)
	blue.reachesNot(t, green.v4, green.v6)

	// A network without a gateway stays without one.
	r.network("net-grey", 40, 0)
	grey := r.newHost("vf-0000-03-00-5", "net-grey", 1, 9)
	grey.reachesNot(t, blueGateway...)
}

func testSameAddresses(t *testing.T, mode plane.Mode) {
	r := newRouter(t, mode)
	hosts := map[string][]*host{}
	for i, vrf := range []string{"vrf-one", "vrf-two"} {
		r.vrf(vrf)
		for j, subnet := range []byte{1, 2} {
			network := fmt.Sprintf("net-%d-%d", i, j)
			r.network(network, uint16(10*i+j+1), 0)
			r.svi(network, vrf, fmt.Sprintf("10.%d.0.1/24", subnet),
				fmt.Sprintf("fd00:%d::1/64", subnet))
			// The hosts of the two VRFs have different addresses, so that it is seen who answers.
			hosts[vrf] = append(hosts[vrf], r.newHost(fmt.Sprintf("vf-0000-03-00-%d", 2*i+j),
				network, subnet, byte(2+i)))
		}
	}

	for vrf, other := range map[string]string{"vrf-one": "vrf-two", "vrf-two": "vrf-one"} {
		blue, red := hosts[vrf][0], hosts[vrf][1]
		blue.reaches(t, red.v4, red.v6)
		red.reaches(t, blue.v4, blue.v6)
		blue.reaches(t, redGateway...)
		blue.reachesNot(t, hosts[other][0].v4, hosts[other][1].v4, hosts[other][0].v6,
			hosts[other][1].v6)
	}
}

// testMachineIsClosed checks that hosts reach nothing of the xPU through the gateway but its
// answers to pings: no service that listens on all addresses, also if the xPU wants sockets to be
// reached from VRFs, and none of its other addresses.
func testMachineIsClosed(t *testing.T, mode plane.Mode) {
	r := newRouter(t, mode)
	for _, protocol := range []string{"tcp", "udp", "raw"} {
		r.sysctl("net/ipv4/"+protocol+"_l3mdev_accept", "1")
	}

	management := netns.New(t)
	netns.Connect(t, r.Namespace, "oob", management, "eth0")
	addAddress(t, r.Namespace, "oob", "203.0.113.7/24")
	addAddress(t, r.Namespace, "oob", "2001:db8:cb::7/64")
	addAddress(t, management, "eth0", "203.0.113.1/24")
	blue, _ := r.twoNetworks()
	blue.reaches(t, blueGateway...)

	var tcp net.Listener
	var udp net.PacketConn
	must.Succeed(t, r.Do(func() (err error) {
		if tcp, err = net.Listen("tcp", ":50151"); err != nil {
			return err
		}
		udp, err = net.ListenPacket("udp", ":50151")
		return err
	}))
	t.Cleanup(func() { _, _ = tcp.Close(), udp.Close() })

	closed := append(slices.Concat(blueGateway, redGateway),
		netip.MustParseAddr("203.0.113.7"), netip.MustParseAddr("2001:db8:cb::7"))
	for _, address := range closed {
		target := netip.AddrPortFrom(address, 50151).String()
		must.Succeed(t, blue.Do(func() error {
			conn, err := net.DialTimeout("tcp", target, 300*time.Millisecond)
			if err == nil {
				t.Errorf("a host connects to %s", target)
				_ = conn.Close()
			}

			if conn, err = net.Dial("udp", target); err != nil {
				return err
			}
			defer func() { _ = conn.Close() }()
			_, err = conn.Write([]byte("from a host"))
			return err
		}))
	}

	blue.reachesNot(t, netip.MustParseAddr("203.0.113.7"), netip.MustParseAddr("2001:db8:cb::7"))

	must.Succeed(t, management.Do(func() error {
		conn, err := net.Dial("udp", "203.0.113.7:50151")
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		_, err = conn.Write([]byte("from the administrator"))
		return err
	}))

	received := make([]byte, 100)
	must.Succeed(t, udp.SetReadDeadline(time.Now().Add(timeout)))
	n, from, err := udp.ReadFrom(received)
	must.Succeed(t, err)
	if got := string(received[:n]); got != "from the administrator" {
		t.Errorf("the xPU's service received %q from %s first", got, from)
	}

	// The gateway does not answer ARP for the xPU's other addresses.
	eth0, err := blue.Handle().LinkByName("eth0")
	must.Succeed(t, err)
	must.Succeed(t, blue.Handle().RouteAdd(&netlink.Route{
		LinkIndex: eth0.Attrs().Index, Scope: netlink.SCOPE_LINK,
		Dst: netaddr.ToIPNet(netip.MustParsePrefix("203.0.113.0/24")),
	}))
	blue.reachesNot(t, netip.MustParseAddr("203.0.113.7"))
	neighbors, err := blue.Handle().NeighList(eth0.Attrs().Index, netlink.FAMILY_V4)
	must.Succeed(t, err)
	for _, n := range neighbors {
		if n.IP.String() == "203.0.113.7" && len(n.HardwareAddr) > 0 {
			t.Errorf("the gateway says that 203.0.113.7 is at %s", n.HardwareAddr)
		}
	}
}

// testNoRouteOut checks that packets to addresses that the VRF does not know are not routed by the
// xPU's own routes, also after another program has removed the route that ends the table.
func testNoRouteOut(t *testing.T, mode plane.Mode) {
	r := newRouter(t, mode)
	outside := netns.New(t)
	netns.Connect(t, r.Namespace, "oob", outside, "eth0")
	addAddress(t, r.Namespace, "oob", "203.0.113.7/24")
	addAddress(t, r.Namespace, "oob", "2001:db8:cb::7/64")
	addAddress(t, outside, "eth0", "203.0.113.1/24")
	addAddress(t, outside, "eth0", "2001:db8:cb::1/64")
	r.sysctl("net/ipv4/ip_forward", "1")
	blue, red := r.twoNetworks()
	blue.reaches(t, red.v4)

	eth0, err := outside.Handle().LinkByName("eth0")
	must.Succeed(t, err)
	for gateway, subnet := range map[string]string{
		"203.0.113.7": "10.0.0.0/8", "2001:db8:cb::7": "fd00::/16",
	} {
		must.Succeed(t, outside.Handle().RouteAdd(&netlink.Route{
			LinkIndex: eth0.Attrs().Index, Gw: net.ParseIP(gateway),
			Dst: netaddr.ToIPNet(netip.MustParsePrefix(subnet)),
		}))
	}

	out := []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("2001:db8:cb::1")}
	blue.reachesNot(t, out...)

	table := int(r.link("vrf-vrf-one").(*netlink.Vrf).Table)
	ends := func(family int) []netlink.Route {
		routes, err := r.Handle().RouteListFiltered(family, &netlink.Route{
			Table: table, Type: unix.RTN_UNREACHABLE,
		}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
		must.Succeed(t, err)
		return routes
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		found := ends(family)
		if len(found) != 1 {
			t.Fatalf("the table ends by %v", found)
		}
		must.Succeed(t, r.Handle().RouteDel(&found[0]))
		must.Eventually(t, "the table ends again", func() bool { return len(ends(family)) == 1 })
	}
	blue.reachesNot(t, out...)
}

// testGatewayIsNotClaimed checks that no host can pretend to be the gateway, whatever its source
// filter.
func testGatewayIsNotClaimed(t *testing.T, mode plane.Mode) {
	r := newRouter(t, mode)
	r.network("net-blue", 10, 0)
	r.vrf("vrf-one")
	r.svi("net-blue", "vrf-one", "10.1.0.1/24", "fd00:1::1/64")
	attacker, victim := r.newHost(rep1, "net-blue", 1, 2), r.newHost(rep2, "net-blue", 1, 3)
	victim.reaches(t, attacker.v4, attacker.v6)
	victim.reaches(t, blueGateway...)

	gateway4, gateway6 := net.IPv4(10, 1, 0, 1).To4(), net.ParseIP("fd00:1::1")
	c, c6 := victim.captureType(t, unix.ETH_P_ARP), victim.captureType(t, unix.ETH_P_IPV6)
	claim := arp(attacker.mac, gateway4)
	advertisement := neighborAdvertisement(t, attacker.v6, netip.MustParseAddr("fd00:1::1"),
		attacker.mac)
	honest := slices.Concat(arp(attacker.mac, attacker.v4.AsSlice()), []byte("end"))

	check := func(filter opi.SourceFilter) {
		t.Helper()
		must.Succeed(t, r.client.EnsureNetwork(r.ctx(), opi.Network{
			ID: "net-blue", VLAN: 10, SourceFilter: filter,
		}))
		attacker.send(t, broadcast, attacker.mac, unix.ETH_P_ARP, claim)
		attacker.send(t, broadcast, gatewayMAC, unix.ETH_P_ARP, claim)
		attacker.send(t, broadcast, attacker.mac, unix.ETH_P_IPV6, advertisement)
		attacker.send(t, broadcast, attacker.mac, unix.ETH_P_IPV6,
			neighborAdvertisement(t, attacker.v6, attacker.v6, attacker.mac))
		attacker.send(t, broadcast, attacker.mac, unix.ETH_P_ARP, honest)
		for got := ""; got != string(honest); {
			if got = c.next(); got == string(claim) {
				t.Errorf("with source filter %s a claim of %s arrives", filter, gateway4)
			}
		}
		for own := false; !own; {
			got := c6.next()
			own = strings.Contains(got, string(attacker.v6.AsSlice())) && got[6] == 58 &&
				got[40] == 136
			if own && strings.HasPrefix(got[48:], string(gateway6)) {
				t.Errorf("with source filter %s a claim of %s arrives", filter, gateway6)
				own = false
			}
		}
		victim.reaches(t, blueGateway...)
	}

	check(opi.SourceFilterAddresses)
	check(opi.SourceFilterMAC)
	check(opi.SourceFilterNone)
	r.stop()
	r.start()
	check(opi.SourceFilterNone)

	// A port may not have the gateway's MAC address or one of its addresses.
	for _, port := range []opi.Port{
		{ID: rep3, MAC: gatewayMAC},
		{ID: rep1, MAC: attacker.mac, Addresses: []netip.Addr{netip.MustParseAddr("10.1.0.1")}},
	} {
		port.Networks = []string{"net-blue"}
		err := r.client.EnsurePort(r.ctx(), port)
		if err == nil || !strings.Contains(err.Error(), "already in use") ||
			!strings.Contains(err.Error(), "SVI net-blue") {
			t.Errorf("port %s: %v", port.ID, err)
		}
	}
}

// neighborAdvertisement returns an IPv6 packet that says that a target is at a MAC address.
func neighborAdvertisement(
	t *testing.T, from, target netip.Addr, mac net.HardwareAddr,
) []byte {
	t.Helper()
	all := netip.MustParseAddr("ff02::1")
	body := slices.Concat([]byte{0x20, 0, 0, 0}, target.AsSlice(), []byte{2, 1}, mac)
	message, err := (&icmp.Message{
		Type: ipv6.ICMPTypeNeighborAdvertisement, Body: &icmp.RawBody{Data: body},
	}).Marshal(icmp.IPv6PseudoHeader(from.AsSlice(), all.AsSlice()))
	must.Succeed(t, err)
	header := []byte{0x60, 0, 0, 0, 0, byte(len(message)), 58, 255}
	return slices.Concat(header, from.AsSlice(), all.AsSlice(), message)
}

// testGatewayRestart checks that a restart of the agent loses no routed packet.
func testGatewayRestart(t *testing.T, mode plane.Mode) {
	r := newRouter(t, mode)
	blue, red := r.twoNetworks()
	blue.reaches(t, red.v4, red.v6)
	indexes := func() (all []int) {
		for _, name := range []string{
			r.sviNetdev("net-blue"), r.sviNetdev("net-red"), "vrf-vrf-one",
		} {
			all = append(all, r.link(name).Attrs().Index)
		}
		return all
	}

	before := indexes()
	blue.losesNothing(t, red, func() {
		for range 3 {
			r.stop()
			r.start()
		}
	})
	if diff := cmp.Diff(before, indexes()); diff != "" {
		t.Errorf("netdevs were made anew (-before +after):\n%s", diff)
	}
	if up, details := r.sviState("net-blue"); !up {
		t.Errorf("after the restart: %s", details)
	}
}

// testGatewayHeals checks that what another program takes away comes back.
func testGatewayHeals(t *testing.T, mode plane.Mode) {
	r := newRouter(t, mode)
	blue, red := r.twoNetworks()
	blue.reaches(t, red.v4, red.v6)
	svi := r.sviNetdev("net-blue")
	link := func() netlink.Link { return r.link(svi) }

	address := func(text string) *netlink.Addr {
		parsed, err := netlink.ParseAddr(text)
		must.Succeed(t, err)
		return parsed
	}

	steps := map[string]func() error{
		"an address": func() error { return r.Handle().AddrDel(link(), address("10.1.0.1/24")) },
		"an IPv6 address": func() error {
			return r.Handle().AddrDel(link(), address("fd00:1::1/64"))
		},
		"its VRF":    func() error { return r.Handle().LinkSetNoMaster(link()) },
		"its state":  func() error { return r.Handle().LinkSetDown(link()) },
		"the VRF":    func() error { return r.Handle().LinkDel(r.link("vrf-vrf-one")) },
		"its netdev": func() error { return r.Handle().LinkDel(link()) },
		"the VRF's state": func() error {
			return r.Handle().LinkSetDown(r.link("vrf-vrf-one"))
		},
		"the bridge": func() error { return r.Handle().LinkDel(r.link(r.bridge("net-blue"))) },
		"its MAC address": func() error {
			return r.Handle().LinkSetHardwareAddr(link(), net.HardwareAddr{2, 9, 9, 9, 9, 9})
		},
		"forwarding": func() error {
			return r.Do(func() error {
				return os.WriteFile("/proc/sys/net/ipv4/conf/"+svi+"/forwarding", []byte("0"), 0)
			})
		},
		"forwarding of the VRF": func() error {
			return r.Do(func() error {
				return os.WriteFile("/proc/sys/net/ipv4/conf/vrf-vrf-one/forwarding", []byte("0"),
					0)
			})
		},
		"forwarding of IPv6": func() error {
			return r.Do(func() error {
				return os.WriteFile("/proc/sys/net/ipv6/conf/"+svi+"/forwarding", []byte("0"), 0)
			})
		},
		"its filter": func() error {
			return r.Do(flushRuleset)
		},
	}

	if mode == plane.ModeVLANAware {
		steps["its VLAN"] = func() error {
			return r.Handle().BridgeVlanDel(r.link("br-opi"), 10, false, false, true, false)
		}
	}

	for what, take := range steps {
		t.Run(what, func(t *testing.T) {
			must.Succeed(t, take())
			must.Eventually(t, "it is as wanted again", func() bool {
				got, err := r.Handle().LinkByName(svi)
				return err == nil && r.isWanted(got, "10.1.0.1/24", "fd00:1::1/64")
			})
			must.Eventually(t, "the SVI is up", func() bool {
				up, _ := r.sviState("net-blue")
				return up
			})
			blue.reaches(t, red.v4, red.v6)
			red.reaches(t, blue.v4, blue.v6)
		})
	}
}

// isWanted reports whether the netdev of an SVI is in its VRF and up, forwards and has these
// addresses.
func (r router) isWanted(link netlink.Link, want ...string) bool {
	r.t.Helper()
	vrf, err := r.Handle().LinkByName("vrf-vrf-one")
	addresses, errList := r.Handle().AddrList(link, netlink.FAMILY_ALL)
	if err != nil || errList != nil || link.Attrs().MasterIndex != vrf.Attrs().Index ||
		link.Attrs().Flags&net.FlagUp == 0 || vrf.Attrs().Flags&net.FlagUp == 0 ||
		link.Attrs().HardwareAddr.String() != gatewayMAC.String() {
		return false
	}

	var have []string
	for _, a := range addresses {
		if !a.IP.IsLinkLocalUnicast() {
			have = append(have, a.IPNet.String())
		}
	}
	if slices.Sort(have); !slices.Equal(have, want) {
		return false
	}

	forwards := true
	must.Succeed(r.t, r.Do(func() error {
		for _, name := range []string{"vrf-vrf-one", link.Attrs().Name} {
			for _, family := range []string{"ipv4", "ipv6"} {
				text, err := os.ReadFile("/proc/sys/net/" + family + "/conf/" + name + "/forwarding")
				forwards = forwards && err == nil && strings.TrimSpace(string(text)) == "1"
			}
		}
		return nil
	}))

	return forwards
}

// testGatewayIsDeleted checks that nothing is left of a gateway, and what must be deleted first.
func testGatewayIsDeleted(t *testing.T, mode plane.Mode) {
	r := newRouter(t, mode)
	r.network("net-blue", 10, 0)
	newPod(t, r.xpu, rep1, 2)
	before := r.picture()

	r.vrf("vrf-one")
	r.svi("net-blue", "vrf-one", "10.1.0.1/24", "fd00:1::1/64")
	if _, err := r.vrfs().DeleteVrf(r.ctx(),
		&evpn.DeleteVrfRequest{Name: "vrfs/vrf-one"}); err == nil ||
		!strings.Contains(err.Error(), "VRF vrf-one is in use by SVI net-blue") {
		t.Errorf("delete of a VRF with an SVI: %v", err)
	}
	if err := r.client.DeleteNetwork(r.ctx(), "net-blue"); !errors.Is(err, opi.ErrInUse) {
		t.Errorf("delete of a network with an SVI: %v", err)
	}

	r.deleteSVI("net-blue")
	r.deleteVRF("vrf-one")
	if diff := cmp.Diff(before, r.picture()); diff != "" {
		t.Errorf("left behind (-before +after):\n%s", diff)
	}

	host := r.newHost(rep2, "net-blue", 1, 3)
	host.reachesNot(t, blueGateway...)
}

func (r router) deleteSVI(id string) {
	r.t.Helper()
	_, err := r.svis().DeleteSvi(r.ctx(), &evpn.DeleteSviRequest{Name: "svis/" + id})
	must.Succeed(r.t, err)
}

func (r router) deleteVRF(id string) {
	r.t.Helper()
	_, err := r.vrfs().DeleteVrf(r.ctx(), &evpn.DeleteVrfRequest{Name: "vrfs/" + id})
	must.Succeed(r.t, err)
}

// picture describes what the kernel has, but for its own local routes.
func (r router) picture() (all []string) {
	r.t.Helper()
	links, err := r.Handle().LinkList()
	must.Succeed(r.t, err)
	for _, link := range links {
		attrs := link.Attrs()
		all = append(all, fmt.Sprintf("netdev %s of type %s in %d", attrs.Name, link.Type(),
			attrs.MasterIndex))
		addresses, err := r.Handle().AddrList(link, netlink.FAMILY_ALL)
		must.Succeed(r.t, err)
		for _, a := range addresses {
			// A representor gets its own link-local address a moment after it is up.
			if isRep := attrs.Name == rep1 || attrs.Name == rep2; isRep && a.IP.IsLinkLocalUnicast() {
				continue
			}
			all = append(all, fmt.Sprintf("address %s of %s", a.IPNet, attrs.Name))
		}
		if attrs.HardwareAddr.String() == gatewayMAC.String() {
			all = append(all, attrs.Name+" has the gateway's MAC address")
		}
	}

	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := r.Handle().RouteListFiltered(family, &netlink.Route{
			Type: unix.RTN_UNREACHABLE,
		}, netlink.RT_FILTER_TYPE|netlink.RT_FILTER_TABLE)
		must.Succeed(r.t, err)
		for _, route := range routes {
			all = append(all, "route "+route.String())
		}
	}

	if r.cfg.Plane.Mode == plane.ModeVLANAware {
		all = append(all, fmt.Sprintf("br-opi in VLANs %v", r.vlans("br-opi")))
	}

	slices.Sort(all)
	return append(all, r.filters()...)
}

// testGatewayNewState checks that a start without the state removes the gateways.
func testGatewayNewState(t *testing.T, mode plane.Mode) {
	r := newRouter(t, mode)
	before := r.picture()
	r.network("net-blue", 10, 0)
	r.vrf("vrf-one")
	r.svi("net-blue", "vrf-one", "10.1.0.1/24", "fd00:1::1/64")
	r.stop()

	must.Succeed(t, os.Remove(r.cfg.State))
	if err := r.open(); err == nil || !strings.Contains(err.Error(), "--new-state") {
		t.Errorf("start with a state file that is missing: %v", err)
	}

	must.Succeed(t, os.Remove(r.cfg.State))
	r.cfg.NewState = true
	r.start()
	if diff := cmp.Diff(before, r.picture()); diff != "" {
		t.Errorf("left behind (-before +after):\n%s", diff)
	}
}

// testGatewayDataPlaneChanges checks that an agent that starts in the other mode brings gateways over
// and leaves nothing of the earlier mode.
func testGatewayDataPlaneChanges(t *testing.T, mode plane.Mode) {
	netns.Need(t, netns.VLANFiltering())
	other := plane.ModeVLANAware
	if mode == other {
		other = plane.ModeBridgePerNetwork
	}

	r := newRouter(t, mode)
	blue, red := r.twoNetworks()
	blue.reaches(t, red.v4, red.v6)
	before := r.picture()

	for _, now := range []plane.Mode{other, mode} {
		r.stop()
		r.cfg.Plane.Mode = now
		r.start()
		blue.reaches(t, red.v4, red.v6)
		red.reaches(t, blue.v4, blue.v6)
		if up, details := r.sviState("net-blue"); !up {
			t.Errorf("in mode %s the SVI is down: %s", now, details)
		}
	}

	// The netdevs of a mode have new ifindexes, which also are in the elements of the filters.
	withoutIndexes := func(picture []string) (kept []string) {
		for _, line := range picture {
			if !strings.HasPrefix(line, "element") {
				kept = append(kept, regexp.MustCompile(` in \d+$`).ReplaceAllString(line, ""))
			}
		}
		return kept
	}
	if diff := cmp.Diff(withoutIndexes(before), withoutIndexes(r.picture())); diff != "" {
		t.Errorf("after two changes (-before +after):\n%s", diff)
	}
}

// testLongGatewayIDs checks that the names of netdevs fit, whatever the ids.
func testLongGatewayIDs(t *testing.T, mode plane.Mode) {
	r := newRouter(t, mode)
	long := strings.Repeat("x", 58)
	for i, subnet := range []byte{1, 2} {
		network := fmt.Sprintf("net-%s%d", long, i)
		r.network(network, uint16(10+i), 0)
		r.vrf(fmt.Sprintf("v%s%d", long, i))
		r.svi(network, fmt.Sprintf("v%s%d", long, 0), fmt.Sprintf("10.%d.0.1/24", subnet))
	}
	one := r.newHost(rep1, fmt.Sprintf("net-%s0", long), 1, 2)
	two := r.newHost(rep2, fmt.Sprintf("net-%s1", long), 2, 2)
	one.reaches(t, two.v4)
}

// testGatewayNetdevsOfOthers checks that netdevs of other programs are left alone, whatever their
// names.
func testGatewayNetdevsOfOthers(t *testing.T, mode plane.Mode) {
	r := newRouter(t, mode)
	r.network("net-blue", 10, 0)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "vrf-vrf-one"
	must.Succeed(t, r.Handle().LinkAdd(&netlink.Vrf{LinkAttrs: attrs, Table: 77}))

	got, err := r.vrfs().CreateVrf(r.ctx(), &evpn.CreateVrfRequest{
		VrfId: "vrf-one", Vrf: &evpn.Vrf{Spec: vrfSpec()},
	})
	must.Succeed(t, err)
	if status := got.GetStatus(); status.GetOperStatus() !=
		evpn.VRFOperStatus_VRF_OPER_STATUS_DOWN ||
		!strings.Contains(status.GetComponents()[0].GetDetails(), "is not ours") {
		t.Errorf("a VRF whose name is taken is %v", status)
	}

	made, err := r.svis().CreateSvi(r.ctx(), &evpn.CreateSviRequest{
		SviId: "net-blue", Svi: &evpn.Svi{Spec: sviSpec(t, "net-blue", "vrf-one", "10.1.0.1/24")},
	})
	must.Succeed(t, err)
	if status := made.GetStatus(); status.GetOperStatus() !=
		evpn.SVIOperStatus_SVI_OPER_STATUS_DOWN ||
		!strings.Contains(status.GetComponents()[0].GetDetails(), "is missing") {
		t.Errorf("its SVI is %v", status)
	}

	r.deleteSVI("net-blue")
	r.deleteVRF("vrf-one")
	if vrf, ok := r.link("vrf-vrf-one").(*netlink.Vrf); !ok || vrf.Table != 77 ||
		vrf.Flags&net.FlagUp != 0 {
		t.Errorf("the VRF of another program is now %+v", vrf)
	}
}

// testIPv6IsNotForwarded checks that an SVI with an IPv6 address is down, with what to do, while
// the kernel forwards no IPv6, and that IPv4 passes meanwhile.
func testIPv6IsNotForwarded(t *testing.T, mode plane.Mode) {
	r := newRouter(t, mode)
	blue, red := r.twoNetworks()
	blue.reaches(t, red.v4, red.v6)
	r.forwardIPv6("0")
	alone := false // one netdev can forward alone
	must.Succeed(t, r.Do(func() error {
		_, err := os.Stat("/proc/sys/net/ipv6/conf/all/force_forwarding")
		alone = err == nil
		return nil
	}))
	if alone {
		blue.reaches(t, red.v4, red.v6)
		return
	}

	must.Eventually(t, "the SVI is down", func() bool {
		up, details := r.sviState("net-blue")
		return !up && strings.Contains(details, "net.ipv6.conf.all.forwarding")
	})
	blue.reaches(t, red.v4)
	r.forwardIPv6("1")
	must.Eventually(t, "the SVI is up", func() bool {
		up, _ := r.sviState("net-blue")
		return up
	})
	blue.reaches(t, red.v6)
}

// testGatewayChanges checks that a gateway follows its spec and the VLAN id of its network.
func testGatewayChanges(t *testing.T, mode plane.Mode) {
	r := newRouter(t, mode)
	blue, red := r.twoNetworks()
	blue.reaches(t, red.v4)
	update := func(spec *evpn.SviSpec) {
		t.Helper()
		got, err := r.svis().UpdateSvi(r.ctx(), &evpn.UpdateSviRequest{
			Svi: &evpn.Svi{Name: "svis/net-blue", Spec: spec},
		})
		must.Succeed(t, err)
		if got.GetStatus().GetOperStatus() != evpn.SVIOperStatus_SVI_OPER_STATUS_UP {
			t.Fatalf("after the update: %v", got.GetStatus())
		}
	}

	update(sviSpec(t, "net-blue", "vrf-one", "10.1.0.1/24", "10.9.0.1/24"))
	blue.reaches(t, netip.MustParseAddr("10.9.0.1"), red.v4)
	blue.reachesNot(t, netip.MustParseAddr("fd00:1::1"))
	if addresses, err := r.Handle().AddrList(r.link(r.sviNetdev("net-blue")),
		netlink.FAMILY_V6); err != nil || len(addresses) != 0 {
		t.Errorf("IPv6 addresses %v, %v", addresses, err)
	}

	r.vrf("vrf-two")
	update(sviSpec(t, "net-blue", "vrf-two", "10.1.0.1/24", "fd00:1::1/64"))
	blue.reaches(t, blueGateway...)
	blue.reachesNot(t, red.v4, red.v6)

	update(sviSpec(t, "net-blue", "vrf-one", "10.1.0.1/24", "fd00:1::1/64"))
	blue.reaches(t, red.v4, red.v6)

	_, err := r.networks().UpdateLogicalBridge(r.ctx(), &evpn.UpdateLogicalBridgeRequest{
		LogicalBridge: &evpn.LogicalBridge{
			Name: "logicalBridges/net-blue", Spec: &evpn.LogicalBridgeSpec{VlanId: 11},
		},
	})
	must.Succeed(t, err)
	blue.reaches(t, red.v4, red.v6)
	if mode == plane.ModeVLANAware {
		if diff := cmp.Diff([]string{"11", "20"}, r.vlans("br-opi")); diff != "" {
			t.Errorf("VLANs of the bridge itself (-want +got):\n%s", diff)
		}
	}

	_, err = r.vrfs().UpdateVrf(r.ctx(), &evpn.UpdateVrfRequest{Vrf: &evpn.Vrf{
		Name: "vrfs/vrf-one", Spec: &evpn.VrfSpec{
			LoopbackIpPrefix: sviSpec(t, "", "", "10.255.0.1/24").GetGwIpPrefix()[0],
		},
	}})
	must.Succeed(t, err)
	blue.reaches(t, netip.MustParseAddr("10.255.0.1"))

	// The gateway moves to another network.
	r.network("net-green", 30, 0)
	green := r.newHost(rep3, "net-green", 1, 7)
	update(sviSpec(t, "net-green", "vrf-one", "10.1.0.1/24", "fd00:1::1/64"))
	green.reaches(t, red.v4, red.v6)
	blue.reachesNot(t, blueGateway...)
}

// testGatewayAcrossXPUs checks that hosts of another xPU reach a gateway by VXLAN.
func testGatewayAcrossXPUs(t *testing.T, mode plane.Mode) {
	a, b := newXPU(t, mode, "p0"), newXPU(t, mode, "p0")
	netns.Connect(t, a.Namespace, "p0", b.Namespace, "p0")
	addAddress(t, a.Namespace, "p0", "198.51.100.1/24")
	addAddress(t, b.Namespace, "p0", "198.51.100.2/24")
	for _, x := range []*xpu{a, b} {
		x.forwardIPv6("1")
		x.start()
		x.network("net-blue", 10, 1000)
		x.network("net-red", 20, 2000)
	}

	r := router{a}
	r.vrf("vrf-one")
	r.svi("net-blue", "vrf-one", "10.1.0.1/24", "fd00:1::1/64")
	r.svi("net-red", "vrf-one", "10.2.0.1/24", "fd00:2::1/64")
	near := r.newHost(rep1, "net-blue", 1, 2)
	far, away := router{b}.newHost(rep1, "net-red", 2, 2), router{b}.newHost(rep2, "net-blue", 1, 3)
	far.reaches(t, redGateway...)
	far.reaches(t, near.v4, near.v6)
	near.reaches(t, far.v4, far.v6)
	away.reaches(t, far.v4, far.v6)
}

// testGatewayIsQuiet checks that an agent causes no events while everything is as wanted.
func testGatewayIsQuiet(t *testing.T, mode plane.Mode) {
	r := newRouter(t, mode)
	blue, red := r.twoNetworks()
	blue.reaches(t, red.v4, red.v6)
	events := r.watchLinks()
	must.Eventually(t, "no event for half a second", func() bool { return quiet(events) == 0 })

	must.Succeed(t, r.Handle().LinkSetTxQLen(r.link(r.sviNetdev("net-blue")), 77))
	if seen := quiet(events); seen > 4 {
		t.Errorf("%d events after a change of a queue's length, want the few of it", seen)
	}
	must.Succeed(t, r.Handle().LinkSetTxQLen(r.link("vrf-vrf-one"), 77))
	if seen := quiet(events); seen > 4 {
		t.Errorf("%d events after a change of a queue's length, want the few of it", seen)
	}
}

// flushRuleset removes all filters of a machine, as some firewalls do when they start.
func flushRuleset() error {
	nft, err := nftables.New()
	if err != nil {
		return err
	}
	nft.FlushRuleset()
	return nft.Flush()
}

// filters describes the elements of the agent's filters.
func (r router) filters() (all []string) {
	r.t.Helper()
	must.Succeed(r.t, r.Do(func() error {
		nft, err := nftables.New()
		if err != nil {
			return err
		}
		tables, err := nft.ListTables()
		if err != nil {
			return err
		}

		for _, table := range tables {
			sets, err := nft.GetSets(table)
			if err != nil {
				return err
			}
			all = append(all, fmt.Sprintf("table %s of family %d", table.Name, table.Family))
			for _, set := range sets {
				elements, err := nft.GetSetElements(set)
				if err != nil {
					return err
				}
				for _, e := range elements {
					all = append(all, fmt.Sprintf("element %s %x", set.Name, e.Key))
				}
			}
		}
		return nil
	}))
	slices.Sort(all)
	return all
}

// watchLinks returns the events of the xPU's netdevs.
func (x *xpu) watchLinks() <-chan netlink.LinkUpdate {
	x.t.Helper()
	events, done := make(chan netlink.LinkUpdate, 100), make(chan struct{})
	x.t.Cleanup(func() { close(done) })
	ns := vnetns.NsHandle(x.Fd())
	must.Succeed(x.t, netlink.LinkSubscribeWithOptions(events, done,
		netlink.LinkSubscribeOptions{Namespace: &ns}))
	return events
}

// quiet returns how many events there are in half a second.
func quiet(events <-chan netlink.LinkUpdate) (seen int) {
	for end := time.After(500 * time.Millisecond); ; seen++ {
		select {
		case <-events:
		case <-end:
			return seen
		}
	}
}
