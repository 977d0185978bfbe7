// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/service"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

var broadcast = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// send sends an Ethernet frame from a pod's eth0, with any source address.
func (p *pod) send(t *testing.T, dst, src net.HardwareAddr, etherType uint16, payload []byte) {
	t.Helper()
	eth0, err := p.Handle().LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}

	var socket int
	err = p.Do(func() (err error) {
		socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(socket) }()

	frame := slices.Concat(dst, src, []byte{byte(etherType >> 8), byte(etherType)}, payload)
	if err := unix.Sendto(socket, frame, 0,
		&unix.SockaddrLinklayer{Ifindex: eth0.Attrs().Index, Halen: 6}); err != nil {
		t.Fatal(err)
	}
}

// capture receives the frames of one EtherType that a pod gets.
type capture struct {
	t      *testing.T
	socket int
}

// capture captures frames of etherTypeTest.
func (p *pod) capture(t *testing.T) *capture {
	t.Helper()
	return p.captureType(t, etherTypeTest)
}

// captureType captures frames of an EtherType.
func (p *pod) captureType(t *testing.T, etherType int) *capture {
	t.Helper()
	networkOrder := etherType>>8 | etherType<<8&0xffff
	c := &capture{t: t}
	must.Succeed(t, p.Do(func() (err error) {
		c.socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, networkOrder)
		return err
	}))

	t.Cleanup(func() { _ = unix.Close(c.socket) })
	must.Succeed(t,
		unix.SetsockoptTimeval(c.socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO,
			&unix.Timeval{Sec: int64(timeout.Seconds())}))

	return c
}

// next returns the payload of the next frame.
func (c *capture) next() string {
	c.t.Helper()
	for {
		buffer := make([]byte, 2000)
		n, err := unix.Read(c.socket, buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		must.Succeed(c.t, err)
		return string(buffer[:n])
	}
}

// etherTypeTest is an EtherType that IEEE 802 reserves for experiments.
const etherTypeTest = 0x88b5

// spoof sends frames from the MAC address of another pod.
func (p *pod) spoof(t *testing.T, victim *pod) {
	t.Helper()
	for range 3 {
		p.send(t, broadcast, victim.mac, etherTypeTest, bytes.Repeat([]byte{0}, 46))
	}
}

// testMACStaysWithItsPort checks that even without a filter no other port and no other xPU takes
// over the MAC address of a port by sending from it.
func testMACStaysWithItsPort(t *testing.T, mode plane.Mode) {
	a, b := wired(t, mode, func(cfg *service.Config) { cfg.SourceFilter = false })
	for _, x := range []*xpu{a, b} {
		x.network("net-blue", 10, 1000)
	}

	victim, client := newPod(t, a, rep1, 1), newPod(t, a, rep2, 2)
	attacker := newPod(t, a, rep3, 3)
	remote := newPod(t, b, rep1, 4)
	a.port(rep1, "net-blue", victim.mac)
	a.port(rep2, "net-blue", client.mac)
	a.port(rep3, "net-blue", attacker.mac)
	b.port(rep1, "net-blue", remote.mac)
	reach(t, client, victim)
	reach(t, client, attacker)
	reach(t, client, remote)

	for who, p := range map[string]*pod{
		"a port of the same xPU": attacker, "a port of another xPU": remote,
	} {
		p.spoof(t, victim)
		q := client.pinger(t)
		for range 5 {
			if ok, err := q.once(victim, time.Second); err != nil || !ok {
				t.Fatalf("after %s sent from the MAC address of the victim: reaches it: %t, %v",
					who, ok, err)
			}
		}
	}
}

// testSpoofingIsDropped checks that frames from another MAC address than the pod's arrive nowhere,
// also while no agent runs, and after another program has removed the filter.
func testSpoofingIsDropped(t *testing.T, mode plane.Mode) {
	a, b := wired(t, mode)
	for _, x := range []*xpu{a, b} {
		x.network("net-blue", 10, 1000)
	}

	attacker, near, far := newPod(t, a, rep1, 1), newPod(t, a, rep2, 2), newPod(t, b, rep1, 3)
	a.port(rep1, "net-blue", attacker.mac)
	a.port(rep2, "net-blue", near.mac)
	b.port(rep1, "net-blue", far.mac)
	reach(t, attacker, near)
	reach(t, attacker, far)

	captures := []*capture{near.capture(t), far.capture(t)}
	check := func(when string) {
		t.Helper()
		attacker.send(t, broadcast, net.HardwareAddr{2, 0, 0, 0, 0, 0x66}, etherTypeTest,
			[]byte("spoofed, "+when))
		attacker.send(t, broadcast, attacker.mac, etherTypeTest, []byte("honest, "+when))

		for _, c := range captures {
			if got := c.next(); got != "honest, "+when {
				t.Errorf("captured %q, want the honest frame", got)
			}
		}
	}

	check("at first")
	a.stop()
	check("without an agent")
	a.start()
	check("after a restart")

	var nft *nftables.Conn
	must.Succeed(t, a.Do(func() (err error) {
		nft, err = nftables.New(nftables.AsLasting())
		return err
	}))

	t.Cleanup(func() { _ = nft.CloseLasting() })
	nft.FlushRuleset()
	must.Succeed(t, nft.Flush())

	set := &nftables.Set{
		Table: &nftables.Table{Name: "opi-bridge", Family: nftables.TableFamilyBridge},
		Name:  "macs",
	}

	must.Eventually(t, "the filter is there again", func() bool {
		// The transaction that makes the table also deletes it once, so it exists for a while
		// before.
		known, err := nft.GetSetElements(set)
		return err == nil && len(known) == 2
	})

	check("after another program removed the filter")

	must.Succeed(t, a.client.DeletePort(a.ctx(), rep1))
	if left, err := nft.GetSetElements(set); err != nil || len(left) != 1 {
		t.Errorf("after delete the filter knows %d MAC addresses, %v; want that of the other port",
			len(left), err)
	}
}

// arp returns the body of an ARP announcement (RFC 5227, section 3).
func arp(mac net.HardwareAddr, ip net.IP) []byte {
	return bytes.Join([][]byte{
		{0, 1, 8, 0, 6, 4, 0, 1}, mac, ip, make([]byte, 6), ip, make([]byte, 18),
	}, nil)
}

// testAddressesStayWithTheirPort checks that packets from the address of another pod, and claims of
// that address, arrive nowhere, whether they come from the same xPU or from an xPU that filters
// nothing. A network can be configured to allow them.
func testAddressesStayWithTheirPort(t *testing.T, mode plane.Mode) {
	a, b := newXPU(t, mode, "p0"), newXPU(t, mode, "p0")
	b.cfg.SourceFilter = false
	netns.Connect(t, a.Namespace, "p0", b.Namespace, "p0")

	for i, x := range []*xpu{a, b} {
		addAddress(t, x.Namespace, "p0", net.IPv4(198, 51, 100, byte(1+i)).String()+"/24")
		x.start()
		x.network("net-blue", 10, 1000)
	}

	victim, client, near, far := newPod(t, a, rep1, 1), newPod(t, a, rep2, 2), newPod(t, a,
		rep3, 3), newPod(t, b, rep1, 4)
	ensure := func(x *xpu, id string, p *pod) {
		t.Helper()
		address, _ := netip.AddrFromSlice(p.ip)
		port := opi.Port{
			ID: id, MAC: p.mac, Networks: []string{"net-blue"}, Addresses: []netip.Addr{address},
		}
		must.Succeed(t, x.client.EnsurePort(x.ctx(), port))
	}

	ensure(a, rep1, victim)
	ensure(a, rep2, client)
	ensure(a, rep3, near)
	ensure(b, rep1, far)

	for _, p := range []*pod{victim, near, far} {
		reach(t, client, p)
	}

	c := client.captureType(t, unix.ETH_P_ARP)
	// claims reports whether the claim of an address by a pod reaches the client.
	claims := func(p *pod, address net.IP) bool {
		t.Helper()
		claim, end := arp(p.mac, address), slices.Concat(arp(p.mac, p.ip), []byte("end"))
		p.send(t, broadcast, p.mac, unix.ETH_P_ARP, claim)
		p.send(t, broadcast, p.mac, unix.ETH_P_ARP, end)

		for arrived := false; ; {
			switch got := c.next(); {
			case got == string(end):
				return arrived
			case got == string(claim):
				arrived = true
			}
		}
	}

	for where, p := range map[string]*pod{"the same xPU": near, "another xPU": far} {
		if claims(p, victim.ip) {
			t.Errorf("from %s: the claim of another's address arrives", where)
		}
	}

	if claims(near, net.IPv4(192, 0, 2, 99).To4()) {
		t.Error("the claim of an unused address arrives")
	}

	_, subnet, _ := net.ParseCIDR("192.0.2.99/32")
	link, err := near.Handle().LinkByName("eth0")
	must.Succeed(t, err)
	must.Succeed(t, near.Handle().AddrAdd(link, &netlink.Addr{IPNet: subnet}))
	noReach(t, &pod{Namespace: near.Namespace, ip: subnet.IP.To4()}, client)

	network := opi.Network{
		ID: "net-blue", VLAN: 10, VNI: new(uint32(1000)), SourceFilter: opi.SourceFilterMAC,
	}
	must.Succeed(t, a.client.EnsureNetwork(a.ctx(), network))
	if !claims(near, net.IPv4(192, 0, 2, 99).To4()) {
		t.Error("with sourceFilter MAC no other address may be claimed")
	}

	a.stop()
	a.start()
	if !claims(near, net.IPv4(192, 0, 2, 99).To4()) {
		t.Error("after a restart no other address may be claimed")
	}

	network.SourceFilter = opi.SourceFilterAddresses
	must.Succeed(t, a.client.EnsureNetwork(a.ctx(), network))
	if claims(near, victim.ip) {
		t.Error("with sourceFilter Addresses again the claim of another's address arrives")
	}
}

// testNoFilter checks that without the filter a pod may send from any MAC address, as routers and
// bridges in pods do.
func testNoFilter(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "")
	x.cfg.SourceFilter = false
	x.start()
	x.network("net-blue", 10, 0)
	router, pod := newPod(t, x, rep1, 1), newPod(t, x, rep2, 2)
	x.port(rep1, "net-blue", router.mac)
	x.port(rep2, "net-blue", pod.mac)
	reach(t, router, pod)
	c := pod.capture(t)
	router.send(t, broadcast, net.HardwareAddr{2, 0, 0, 0, 0, 0x66}, etherTypeTest,
		[]byte("routed"))
	if got := c.next(); got != "routed" {
		t.Errorf("captured %q", got)
	}
}

// testPodsDoNotReachTheXPU checks that a pod gets no answer from the xPU itself, whatever MAC
// address it sends to, although the xPU has the bridge.
func testPodsDoNotReachTheXPU(t *testing.T, mode plane.Mode) {
	for name, filtered := range map[string]bool{"filtered": true, "not filtered": false} {
		t.Run(name, func(t *testing.T) {
			x := newXPU(t, mode, "")
			x.cfg.SourceFilter = filtered
			management := netns.New(t)
			netns.Connect(t, x.Namespace, "oob", management, "eth0")
			addAddress(t, x.Namespace, "oob", "203.0.113.7/24")
			x.start()
			x.network("net-blue", 10, 0)
			p := newPod(t, x, rep1, 1)
			x.port(rep1, "net-blue", p.mac)

			// The pod has a route to the xPU's address, and sends to the MAC addresses of the
			// bridge and of its own representor.
			eth0, err := p.Handle().LinkByName("eth0")
			must.Succeed(t, err)
			_, subnet, _ := net.ParseCIDR("203.0.113.0/24")
			must.Succeed(t,
				p.Handle().RouteAdd(&netlink.Route{
					LinkIndex: eth0.Attrs().Index, Dst: subnet, Scope: netlink.SCOPE_LINK,
				}))

			_, pods, _ := net.ParseCIDR("192.0.2.0/24")
			bridgeLink := x.link(x.bridge("net-blue"))
			must.Succeed(t,
				x.Handle().RouteAdd(&netlink.Route{
					LinkIndex: bridgeLink.Attrs().Index, Dst: pods, Scope: netlink.SCOPE_LINK,
				}))

			machine := net.ParseIP("203.0.113.7").To4()
			for _, mac := range []net.HardwareAddr{
				bridgeLink.Attrs().HardwareAddr, x.link(rep1).Attrs().HardwareAddr, nil,
			} {
				if mac != nil {
					must.Succeed(t, p.Handle().NeighSet(&netlink.Neigh{
						LinkIndex: eth0.Attrs().Index, IP: machine, HardwareAddr: mac,
						State: netlink.NUD_PERMANENT,
					}))
				} else {
					must.Succeed(t,
						p.Handle().NeighDel(&netlink.Neigh{
							LinkIndex: eth0.Attrs().Index, IP: machine,
						}))
				}

				q := p.pinger(t)
				if ok, err := q.once(&pod{ip: machine}, 300*time.Millisecond); ok {
					t.Errorf("reaches the xPU by MAC %s: %v", mac, err)
				}
			}
		})
	}
}

// testPodsDoNotReachTheXPUByIPv6 checks that IPv6 packets of a pod do not reach the xPU either.
// There, no rp_filter would drop them.
func testPodsDoNotReachTheXPUByIPv6(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "")
	x.cfg.SourceFilter = false
	management := netns.New(t)
	netns.Connect(t, x.Namespace, "oob", management, "eth0")
	addAddress(t, x.Namespace, "oob", "2001:db8:cb::7/64")
	addAddress(t, management, "eth0", "2001:db8:cb::1/64")
	x.start()
	x.network("net-blue", 10, 0)
	p := newPod(t, x, rep1, 1)
	x.port(rep1, "net-blue", p.mac)
	addAddress(t, p.Namespace, "eth0", "2001:db8:cb::66/64")

	var service net.PacketConn
	must.Succeed(t, x.Do(func() (err error) {
		service, err = net.ListenPacket("udp6", "[2001:db8:cb::7]:4791")
		return err
	}))

	defer func() { _ = service.Close() }()
	say := func(from *netns.Namespace, what string) {
		must.Succeed(t, from.Do(func() error {
			conn, err := net.Dial("udp6", service.LocalAddr().String())
			if err != nil {
				return err
			}
			defer func() { _ = conn.Close() }()
			_, err = conn.Write([]byte(what))
			return err
		}))
	}

	eth0, err := p.Handle().LinkByName("eth0")
	must.Succeed(t, err)

	for _, name := range []string{x.bridge("net-blue"), rep1} {
		must.Succeed(t, p.Handle().NeighSet(&netlink.Neigh{
			LinkIndex: eth0.Attrs().Index, IP: net.ParseIP("2001:db8:cb::7"),
			HardwareAddr: x.link(name).Attrs().HardwareAddr,
			State:        netlink.NUD_PERMANENT,
		}))
		say(p.Namespace, "from the pod")
	}

	say(management, "from the administrator")
	received := make([]byte, 100)
	must.Succeed(t, service.SetReadDeadline(time.Now().Add(10*time.Second)))
	n, from, err := service.ReadFrom(received)
	must.Succeed(t, err)
	if got := string(received[:n]); got != "from the administrator" {
		t.Errorf("the xPU's service received %q from %s first", got, from)
	}
}
