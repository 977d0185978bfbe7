// SPDX-License-Identifier: Apache-2.0

package sourcefilter_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/sourcefilter"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// lab is a machine with a bridge that has three ports: one of a pod, a VXLAN port, and one of a
// listener.
type lab struct {
	*netns.Namespace
	t        *testing.T
	filter   *sourcefilter.Filter
	pod      *station
	remote   *station
	listener *station
	markers  uint32
	podVLAN  uint16 // of the pod's markers; 0: they have no tag
}

// station is the far end of a port's wire.
type station struct {
	t      *testing.T
	port   int // ifindex of the port
	link   int // ifindex of the station's own netdev
	socket int
}

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{Namespace: netns.New(t), t: t}
	l.open()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "br0"
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	must.Succeed(t, l.Handle().LinkAdd(bridge))
	must.Succeed(t, l.Handle().LinkSetUp(bridge))

	for name, s := range map[string]**station{
		"pod": &l.pod, "remote": &l.remote, "listener": &l.listener,
	} {
		*s = l.connect(bridge, name)
	}

	must.Succeed(t, l.filter.SetVXLAN("blue", sourcefilter.VXLAN{Index: l.remote.port}))
	for _, from := range []*station{l.pod, l.remote} {
		l.await(from)
	}

	return l
}

func (l *lab) open() {
	l.t.Helper()
	must.Succeed(l.t, l.Do(func() (err error) {
		l.filter, err = sourcefilter.Open()
		return err
	}))

	filter := l.filter
	l.t.Cleanup(func() { _ = filter.Close() })

	if err := filter.Supported(); err != nil {
		l.t.Skip(err)
	}
}

func (l *lab) connect(bridge netlink.Link, name string) *station {
	l.t.Helper()
	other := netns.New(l.t)
	netns.Connect(l.t, l.Namespace, name, other, "eth0")
	port, err := l.Handle().LinkByName(name)
	must.Succeed(l.t, err)
	must.Succeed(l.t, l.Handle().LinkSetMaster(port, bridge))
	eth0, err := other.Handle().LinkByName("eth0")
	must.Succeed(l.t, err)
	s := l.listen(other, eth0.Attrs().Index)
	s.port = port.Attrs().Index
	return s
}

// listen returns the station that a netdev of a namespace is.
func (l *lab) listen(ns *netns.Namespace, link int) *station {
	l.t.Helper()
	s := &station{t: l.t, link: link}
	must.Succeed(l.t, ns.Do(func() (err error) {
		const all = unix.ETH_P_ALL>>8 | unix.ETH_P_ALL<<8&0xffff // in network byte order
		s.socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all)
		if err == nil {
			err = unix.Bind(s.socket, &unix.SockaddrLinklayer{Protocol: all, Ifindex: s.link})
		}
		return err
	}))

	l.t.Cleanup(func() { _ = unix.Close(s.socket) })
	must.Succeed(l.t,
		unix.SetsockoptTimeval(s.socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 20}))

	return s
}

// await returns when frames of a station reach the listener, because the kernel takes a port into
// service some time after its carrier came up.
func (l *lab) await(from *station) {
	l.t.Helper()
	hello := ethernet(otherMAC, etherTypeTest,
		binary.NativeEndian.AppendUint32(nil, uint32(from.port)))
	must.Eventually(l.t, "a port is in service", func() bool {
		from.send(hello)
		buffer := make([]byte, 2000)
		n, _, err := unix.Recvfrom(l.listener.socket, buffer, unix.MSG_DONTWAIT)
		return err == nil && bytes.Equal(buffer[:n], hello)
	})
}

func (s *station) send(frame []byte) {
	s.t.Helper()
	must.Succeed(s.t,
		unix.Sendto(s.socket, frame, 0, &unix.SockaddrLinklayer{Ifindex: s.link, Halen: 6}))
}

// passes reports whether a frame from a station reaches the listener. The station sends a second
// frame, which certainly passes, so that the end of the wait is known.
func (l *lab) passes(from *station, frame []byte) bool {
	l.t.Helper()
	l.markers++
	marker := ethernet(podMAC, unix.ETH_P_IP, ipv4(pod4, l.markers))
	switch {
	case from == l.remote:
		marker = ethernet(otherMAC, unix.ETH_P_IP, ipv4(other4, l.markers))
	case l.podVLAN != 0:
		marker = tagged(l.podVLAN, marker)
	}

	from.send(frame)
	from.send(marker)
	frame, marker = withoutTag(frame), withoutTag(marker)

	passed := false
	for {
		buffer := make([]byte, 2000)
		n, err := unix.Read(l.listener.socket, buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}

		must.Succeed(l.t, err)
		switch got := buffer[:n]; {
		case bytes.Equal(got, marker):
			return passed
		case bytes.Equal(got, frame):
			passed = true
		}
	}
}

var (
	podMAC   = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	otherMAC = net.HardwareAddr{2, 0, 0, 0, 0, 9}

	pod4, other4   = netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.9")
	pod6, other6   = netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::9")
	podLinkLocal   = netip.MustParseAddr("fe80::ff:fe00:1")
	otherLinkLocal = netip.MustParseAddr("fe80::ff:fe00:9")

	unspecified4, unspecified6 = netip.IPv4Unspecified(), netip.IPv6Unspecified()
)

// etherTypeTest is an EtherType that IEEE 802 reserves for experiments.
const etherTypeTest = 0x88b5

func ethernet(src net.HardwareAddr, etherType uint16, payload []byte) []byte {
	return slices.Concat([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, src,
		binary.BigEndian.AppendUint16(nil, etherType), payload)
}

// tagged returns a frame with a tag, which has a VLAN id and may have a priority.
func tagged(tag uint16, frame []byte) []byte {
	return slices.Insert(slices.Clone(frame), 12, 0x81, 0, byte(tag>>8), byte(tag))
}

// withoutTag returns a frame as packet sockets show it, which strip the outer tag.
func withoutTag(frame []byte) []byte {
	if binary.BigEndian.Uint16(frame[12:]) != unix.ETH_P_8021Q {
		return frame
	}
	return slices.Delete(slices.Clone(frame), 12, 16)
}

func arp(operation uint16, mac net.HardwareAddr, sender netip.Addr) []byte {
	return slices.Concat([]byte{0, 1, 8, 0, 6, 4}, binary.BigEndian.AppendUint16(nil, operation),
		mac, sender.AsSlice(), make([]byte, 6), other4.AsSlice())
}

// ipv4 returns a packet with a right checksum, because a bridge may drop other packets
// (br_netfilter).
func ipv4(src netip.Addr, data ...uint32) []byte {
	header := make([]byte, 20, 40)
	header[0], header[3], header[8], header[9] = 0x45, byte(20+4*len(data)), 64, unix.IPPROTO_UDP
	copy(header[12:], src.AsSlice())
	copy(header[16:], other4.AsSlice())
	sum := uint32(0)
	for i := 0; i < len(header); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(header[i:]))
	}

	binary.BigEndian.PutUint16(header[10:], ^uint16(sum+sum>>16))
	for _, word := range data {
		header = binary.BigEndian.AppendUint32(header, word)
	}

	return header
}

func ipv6(src netip.Addr, next byte, payload []byte) []byte {
	header := []byte{0x60, 0, 0, 0, byte(len(payload) >> 8), byte(len(payload)), next, 255}
	return slices.Concat(header, src.AsSlice(), other6.AsSlice(), payload)
}

// discovery returns a message of Neighbor Discovery with a target, if it is valid, and options.
func discovery(src netip.Addr, kind byte, target netip.Addr, options ...byte) []byte {
	message := []byte{kind, 0, 0, 0, 0, 0, 0, 0}
	if target.IsValid() {
		message = append(message, target.AsSlice()...)
	}
	return ipv6(src, unix.IPPROTO_ICMPV6, append(message, options...))
}

func option(kind byte, value []byte) []byte { return append([]byte{kind, 1}, value...) }

// TestPortWithAddresses checks what a pod with a MAC address and IP addresses may send.
func TestPortWithAddresses(t *testing.T) {
	l := newLab(t)
	must.Succeed(t, l.filter.SetPort(sourcefilter.Port{
		Index: l.pod.port, Networks: []string{"blue"}, MAC: podMAC, Addresses: []netip.Addr{
			pod4, pod6, unspecified4,
		},
	}))

	must.Succeed(t, l.filter.SetPort(sourcefilter.Port{
		Index: l.pod.port, Networks: []string{"blue"}, MAC: podMAC, Addresses: []netip.Addr{
			pod4, pod6,
		},
	}))

	router, none := netip.Addr{}, netip.Addr{}
	const rs, ra, ns, na, redirect = 133, 134, 135, 136, 137
	for name, test := range map[string]struct {
		frame  []byte
		passes bool
	}{
		"IPv4": {ethernet(podMAC, unix.ETH_P_IP, ipv4(pod4)), true},
		"IPv4, another's MAC": {
			ethernet(otherMAC, unix.ETH_P_IP, ipv4(pod4)), false,
		},
		"IPv4, another's address": {
			ethernet(podMAC, unix.ETH_P_IP, ipv4(other4)), false,
		},
		"IPv4, no address yet": {
			ethernet(podMAC, unix.ETH_P_IP, ipv4(unspecified4)), true,
		},
		"IPv4, too short": {
			ethernet(podMAC, unix.ETH_P_IP, []byte{0x45})[:15], false,
		},
		"ARP request": {
			ethernet(podMAC, unix.ETH_P_ARP, arp(1, podMAC, pod4)), true,
		},
		"ARP reply": {
			ethernet(podMAC, unix.ETH_P_ARP, arp(2, podMAC, pod4)), true,
		},
		"ARP probe": {
			ethernet(podMAC, unix.ETH_P_ARP, arp(1, podMAC, unspecified4)), true,
		},
		"ARP, another's address": {
			ethernet(podMAC, unix.ETH_P_ARP, arp(2, podMAC, other4)), false,
		},
		"ARP, another's MAC in it": {
			ethernet(podMAC, unix.ETH_P_ARP, arp(2, otherMAC, pod4)), false,
		},
		"ARP of something else": {
			ethernet(podMAC, unix.ETH_P_ARP, append([]byte{0, 6}, arp(2, podMAC, other4)[2:]...)),
			false,
		},
		"ARP, cut": {
			ethernet(podMAC, unix.ETH_P_ARP, arp(2, podMAC, other4))[:24], false,
		},
		"IPv6": {
			ethernet(podMAC, unix.ETH_P_IPV6, ipv6(pod6, unix.IPPROTO_UDP, make([]byte, 8))), true,
		},
		"IPv6, own link-local": {
			ethernet(podMAC, unix.ETH_P_IPV6,
				ipv6(podLinkLocal, unix.IPPROTO_UDP, make([]byte, 8))), true,
		},
		"IPv6, another's address": {
			ethernet(podMAC, unix.ETH_P_IPV6, ipv6(other6, unix.IPPROTO_UDP, make([]byte, 8))),
			false,
		},
		"IPv6, another's link-local": {
			ethernet(podMAC, unix.ETH_P_IPV6,
				ipv6(otherLinkLocal, unix.IPPROTO_UDP, make([]byte, 8))), false,
		},
		"router solicitation": {
			ethernet(podMAC, unix.ETH_P_IPV6,
				discovery(podLinkLocal, rs, router, option(1, podMAC)...)), true,
		},
		"router solicitation, no address": {
			ethernet(podMAC, unix.ETH_P_IPV6, discovery(unspecified6, rs, router)), true,
		},
		"router advertisement": {
			ethernet(podMAC, unix.ETH_P_IPV6,
				discovery(podLinkLocal, ra, router, make([]byte, 8)...)), false,
		},
		"redirect": {
			ethernet(podMAC, unix.ETH_P_IPV6,
				discovery(podLinkLocal, redirect, pod6, make([]byte, 16)...)), false,
		},
		"solicitation": {
			ethernet(podMAC, unix.ETH_P_IPV6, discovery(pod6, ns, other6, option(1, podMAC)...)),
			true,
		},
		"solicitation, no option": {
			ethernet(podMAC, unix.ETH_P_IPV6, discovery(pod6, ns, other6)), true,
		},
		"solicitation, another's MAC in it": {
			ethernet(podMAC, unix.ETH_P_IPV6, discovery(pod6, ns, other6, option(1, otherMAC)...)),
			false,
		},
		"solicitation, another's address": {
			ethernet(podMAC, unix.ETH_P_IPV6, discovery(other6, ns, pod6, option(1, podMAC)...)),
			false,
		},
		"duplicate address detection": {
			ethernet(podMAC, unix.ETH_P_IPV6, discovery(unspecified6, ns, pod6)), true,
		},
		"duplicate address detection, nonce": {
			ethernet(podMAC, unix.ETH_P_IPV6,
				discovery(unspecified6, ns, pod6, option(14, make([]byte, 6))...)), true,
		},
		"advertisement": {
			ethernet(podMAC, unix.ETH_P_IPV6, discovery(pod6, na, pod6, option(2, podMAC)...)),
			true,
		},
		"advertisement from the link-local": {
			ethernet(podMAC, unix.ETH_P_IPV6,
				discovery(podLinkLocal, na, pod6, option(2, podMAC)...)), true,
		},
		"advertisement, another's address": {
			ethernet(podMAC, unix.ETH_P_IPV6, discovery(pod6, na, other6, option(2, podMAC)...)),
			false,
		},
		"advertisement, another's MAC in it": {
			ethernet(podMAC, unix.ETH_P_IPV6, discovery(pod6, na, pod6, option(2, otherMAC)...)),
			false,
		},
		"advertisement, MAC in 2nd option": {ethernet(podMAC, unix.ETH_P_IPV6,
			discovery(pod6, na, pod6, append(option(2, podMAC), option(2, otherMAC)...)...)),
			false},
		"advertisement behind a header": {ethernet(podMAC, unix.ETH_P_IPV6,
			ipv6(pod6, unix.IPPROTO_DSTOPTS,
				append([]byte{unix.IPPROTO_ICMPV6, 0, 1, 4, 0, 0, 0, 0},
					discovery(pod6, na, other6)[40:]...))), false},
		"MLD": {
			ethernet(podMAC, unix.ETH_P_IPV6, discovery(unspecified6, 143, none)), true,
		},
		"something else": {ethernet(podMAC, etherTypeTest, nil), false},
		"IPv4 behind a tag": {
			ethernet(podMAC, unix.ETH_P_8021Q, slices.Concat([]byte{0, 5, 8, 0}, ipv4(other4))),
			false,
		},
		"own IPv4, a tag": {
			ethernet(podMAC, unix.ETH_P_8021Q, slices.Concat([]byte{0, 5, 8, 0}, ipv4(pod4))), true,
		},
		"IPv4, two tags": {
			ethernet(podMAC, unix.ETH_P_8021Q,
				slices.Concat([]byte{0, 5, 0x81, 0, 0, 6, 8, 0}, ipv4(other4))), false,
		},
		"own IPv4, two tags": {
			ethernet(podMAC, unix.ETH_P_8021Q,
				slices.Concat([]byte{0, 5, 0x81, 0, 0, 6, 8, 0}, ipv4(pod4))), false,
		},
	} {
		if got := l.passes(l.pod, test.frame); got != test.passes {
			t.Errorf("%s: passes: %t, want %t", name, got, test.passes)
		}
	}

	dropped, err := l.filter.Dropped()
	if err != nil || len(dropped) != 1 || dropped[l.pod.port] < 20 {
		t.Errorf("dropped %v, %v; want some 20 frames of port %d", dropped, err, l.pod.port)
	}
}

// TestForeign checks that frames from other machines pass unless they pretend to come from a port
// of this machine.
func TestForeign(t *testing.T) {
	l := newLab(t)
	port := sourcefilter.Port{Index: l.pod.port, Networks: []string{"blue"}, MAC: podMAC,
		Addresses: []netip.Addr{pod4, pod6}}
	must.Succeed(t, l.filter.SetPort(port))

	spoofed := map[string][]byte{
		"MAC address": ethernet(podMAC, etherTypeTest, nil),
		"ARP":         ethernet(otherMAC, unix.ETH_P_ARP, arp(2, otherMAC, pod4)),
		"advertisement": ethernet(otherMAC, unix.ETH_P_IPV6,
			discovery(other6, 136, pod6, option(2, otherMAC)...)),
		"solicitation": ethernet(otherMAC, unix.ETH_P_IPV6,
			discovery(pod6, 135, other6, option(1, otherMAC)...)),
		"link-local": ethernet(otherMAC, unix.ETH_P_IPV6,
			discovery(other6, 136, podLinkLocal, option(2, otherMAC)...)),
		"MAC address, no frame": ethernet(podMAC, unix.ETH_P_IP, ipv4(other4)),
	}

	for name, frame := range spoofed {
		if l.passes(l.remote, frame) {
			t.Errorf("%s: passes", name)
		}
	}

	for name, frame := range map[string][]byte{
		"ARP": ethernet(otherMAC, unix.ETH_P_ARP, arp(2, otherMAC, other4)),
		"advertisement": ethernet(otherMAC, unix.ETH_P_IPV6,
			discovery(other6, 136, other6, option(2, otherMAC)...)),
		"routed": ethernet(otherMAC, unix.ETH_P_IP, ipv4(pod4)),
	} {
		if !l.passes(l.remote, frame) {
			t.Errorf("honest %s: does not pass", name)
		}
	}

	must.Succeed(t, l.filter.Remove(port.Index))
	for name, frame := range spoofed {
		if !l.passes(l.remote, frame) {
			t.Errorf("%s: does not pass although the port is gone", name)
		}
	}
}

// TestPortWithMAC checks that a port without IP addresses may send anything from its MAC address,
// and that a port without a MAC address may send anything.
func TestPortWithMAC(t *testing.T) {
	l := newLab(t)
	own, spoofed := ethernet(podMAC, unix.ETH_P_IP, ipv4(other4)), ethernet(otherMAC, unix.ETH_P_IP,
		ipv4(pod4))
	for name, test := range map[string]struct {
		port         sourcefilter.Port
		own, spoofed bool
	}{
		"MAC address":    {sourcefilter.Port{MAC: podMAC}, true, false},
		"no MAC address": {sourcefilter.Port{Addresses: []netip.Addr{pod4}}, true, true},
	} {
		test.port.Index = l.pod.port
		must.Succeed(t, l.filter.SetPort(test.port))
		if passes := l.passes(l.pod, own); passes != test.own {
			t.Errorf("%s: its own frame passes: %t", name, passes)
		}
		if passes := l.passes(l.pod, spoofed); passes != test.spoofed {
			t.Errorf("%s: a spoofed frame passes: %t", name, passes)
		}
	}
}

// TestAdopt checks that a filter that is opened again keeps filtering, and that Sweep ends it for
// ports that are not set again.
func TestAdopt(t *testing.T) {
	l := newLab(t)
	port := sourcefilter.Port{Index: l.pod.port, Networks: []string{"blue"}, MAC: podMAC}
	must.Succeed(t, l.filter.SetPort(port))
	spoofed := ethernet(otherMAC, unix.ETH_P_IP, ipv4(pod4))
	l.open()
	if l.passes(l.pod, spoofed) {
		t.Error("a spoofed frame passes after the filter was opened again")
	}

	must.Succeed(t, l.filter.SetPort(port))
	must.Succeed(t, l.filter.Sweep())
	if l.passes(l.pod, spoofed) {
		t.Error("a spoofed frame passes after sweep")
	}

	l.open()
	must.Succeed(t, l.filter.Sweep())
	if !l.passes(l.pod, spoofed) {
		t.Error("the port is filtered although it was not set again")
	}
}

// TestRestore checks that a table that another program has removed is made anew.
func TestRestore(t *testing.T) {
	l := newLab(t)
	var conn *nftables.Conn
	must.Succeed(t, l.Do(func() (err error) {
		conn, err = nftables.New(nftables.AsLasting())
		return err
	}))

	t.Cleanup(func() { _ = conn.CloseLasting() })
	port := sourcefilter.Port{Index: l.pod.port, Networks: []string{"blue"}, MAC: podMAC}
	must.Succeed(t, l.filter.SetPort(port))
	spoofed := ethernet(otherMAC, unix.ETH_P_IP, ipv4(pod4))

	changed := make(chan struct{}, 100)
	must.Run(t, func(ctx context.Context) error {
		defer context.AfterFunc(ctx, func() { _ = l.filter.Close() })()
		return l.filter.Watch(func() {
			select {
			case changed <- struct{}{}:
			default:
			}
		})
	})

	conn.FlushRuleset()
	must.Succeed(t, conn.Flush())
	<-changed
	if !l.passes(l.pod, spoofed) {
		t.Fatal("a spoofed frame does not pass without a table")
	}

	must.Succeed(t, l.filter.Restore())
	if l.passes(l.pod, spoofed) {
		t.Error("a spoofed frame passes after restore")
	}

	conn.FlushRuleset()
	must.Succeed(t, conn.Flush())
	port.Addresses = []netip.Addr{pod4}
	must.Succeed(t, l.filter.SetPort(port))
	if l.passes(l.pod, spoofed) || l.passes(l.pod, ethernet(podMAC, unix.ETH_P_IP, ipv4(other4))) {
		t.Error("a spoofed frame passes after the next change")
	}

	must.Succeed(t, l.filter.Remove(port.Index))
	if !l.passes(l.pod, spoofed) {
		t.Error("the port is filtered although it was removed")
	}
}

// TestOwnChanges checks that Watch reports what another program removes from the table, but no
// changes of the filter itself and no changes of other tables.
func TestOwnChanges(t *testing.T) {
	l := newLab(t)
	var conn *nftables.Conn
	must.Succeed(t, l.Do(func() (err error) {
		conn, err = nftables.New(nftables.AsLasting())
		return err
	}))

	t.Cleanup(func() { _ = conn.CloseLasting() })
	var others atomic.Bool
	changed := make(chan bool, 100)
	must.Run(t, func(ctx context.Context) error {
		defer context.AfterFunc(ctx, func() { _ = l.filter.Close() })()
		return l.filter.Watch(func() { changed <- others.Load() })
	})

	for range 3 {
		must.Succeed(t,
			l.filter.SetPort(sourcefilter.Port{
				Index: l.pod.port, Networks: []string{"blue"}, MAC: podMAC,
			}))
		must.Succeed(t, l.filter.Remove(l.pod.port))
	}

	must.Succeed(t, l.filter.Restore())
	other := conn.AddTable(&nftables.Table{Name: "other", Family: nftables.TableFamilyBridge})
	must.Succeed(t, conn.Flush())
	conn.DelTable(other)
	must.Succeed(t, conn.Flush())

	others.Store(true)
	ours := &nftables.Table{Name: sourcefilter.TableName, Family: nftables.TableFamilyBridge}
	conn.FlushChain(&nftables.Chain{Name: "prerouting", Table: ours})
	must.Succeed(t, conn.Flush())
	if !<-changed {
		t.Error("reported a change of its own, or of another table")
	}
}

// TestGateway checks that no port can pretend to be the gateway of its network, and that the table
// that protects the machine exists as long as there is a gateway or a VRF.
func TestGateway(t *testing.T) {
	l := newLab(t)
	gateway := sourcefilter.Gateway{
		Index: 1000, VRF: 1001, MAC: otherMAC, Addresses: []netip.Addr{other4, other6},
	}
	ports := map[string]sourcefilter.Port{
		"with addresses": {MAC: podMAC, Addresses: []netip.Addr{pod4, pod6, other4}},
		"with a MAC":     {MAC: podMAC},
		"with nothing":   {},
	}
	frames := map[string][]byte{
		"its MAC":     ethernet(otherMAC, unix.ETH_P_IP, ipv4(pod4)),
		"its address": ethernet(podMAC, unix.ETH_P_IP, ipv4(other4)),
		"its IPv6 address": ethernet(podMAC, unix.ETH_P_IPV6,
			ipv6(other6, unix.IPPROTO_UDP, make([]byte, 8))),
		"a claim": ethernet(podMAC, unix.ETH_P_ARP, arp(2, podMAC, other4)),
		"a claim of the IPv6 address": ethernet(podMAC, unix.ETH_P_IPV6,
			discovery(pod6, 136, other6, option(2, podMAC)...)),
	}

	for kind, port := range ports {
		port.Index, port.Networks = l.pod.port, []string{"blue"}
		must.Succeed(t, l.filter.SetPort(port))
		must.Succeed(t, l.filter.SetGateway("blue", gateway))
		for what, frame := range frames {
			if l.passes(l.pod, frame) {
				t.Errorf("from a port %s a frame with %s passes", kind, what)
			}
		}
		must.Succeed(t, l.filter.RemoveGateway("blue"))
	}

	must.Succeed(t, l.filter.SetPort(sourcefilter.Port{
		Index: l.pod.port, Networks: []string{"blue"},
	}))
	for what, frame := range frames {
		if !l.passes(l.pod, frame) {
			t.Errorf("without a gateway a frame with %s does not pass", what)
		}
	}

	must.Succeed(t, l.filter.SetGateway("blue", gateway))
	for what, passes := range map[string]bool{
		"its MAC": true, "its address": true, "a claim": false, "a claim of the IPv6 address": false,
	} {
		frame := slices.Clone(frames[what])
		if what != "its MAC" { // from another machine the pod's MAC address never passes
			copy(frame[6:], otherMAC)
		}
		if l.passes(l.remote, frame) != passes {
			t.Errorf("from another machine a frame with %s passes: %t", what, !passes)
		}
	}

	exists := func() bool {
		var tables []*nftables.Table
		must.Succeed(t, l.Do(func() error {
			conn, err := nftables.New()
			if err == nil {
				tables, err = conn.ListTablesOfFamily(nftables.TableFamilyINet)
			}
			return err
		}))
		return len(tables) > 0
	}

	must.Succeed(t, l.filter.SetVRF(gateway.VRF, []netip.Addr{pod4}))
	must.Succeed(t, l.filter.RemoveGateway("blue"))
	if !exists() {
		t.Error("the machine is open although there is a VRF")
	}

	l.open() // another agent, which does not know of the VRF yet
	if !exists() {
		t.Error("the machine is open while the agent starts")
	}
	must.Succeed(t, l.filter.Restore())
	must.Succeed(t, l.filter.SetVRF(gateway.VRF, []netip.Addr{pod4}))
	must.Succeed(t, l.filter.Sweep())
	if !exists() {
		t.Error("the machine is open after the start")
	}
	must.Succeed(t, l.filter.RemoveVRF(gateway.VRF))
	if exists() {
		t.Error("a table is left")
	}
}

// TestTrunk checks that the frames of a trunk are judged by the network whose VLAN id they have.
func TestTrunk(t *testing.T) {
	l := newLab(t)
	l.podVLAN = 10
	red4 := netip.MustParseAddr("198.51.100.1")
	trunk := sourcefilter.Port{Index: l.pod.port, Tagged: []sourcefilter.Tagged{
		{VLAN: 10, Network: "blue", MAC: podMAC, Addresses: []netip.Addr{pod4, pod6}},
		{VLAN: 20, Network: "red", MAC: podMAC, Addresses: []netip.Addr{red4}},
		{VLAN: 30, Network: "open"},
		{VLAN: 40, Network: "mac", MAC: podMAC},
	}}
	must.Succeed(t, l.filter.SetPort(trunk))

	const highPriority = 7 << 13
	packet := func(tag uint16, mac net.HardwareAddr, from netip.Addr) []byte {
		return tagged(tag, ethernet(mac, unix.ETH_P_IP, ipv4(from)))
	}
	frames := map[string]struct {
		frame  []byte
		passes bool
	}{
		"blue":                         {packet(10, podMAC, pod4), true},
		"blue, priority":               {packet(10|highPriority, podMAC, pod4), true},
		"blue, another's MAC":          {packet(10, otherMAC, pod4), false},
		"blue, the address in red":     {packet(10, podMAC, red4), false},
		"red":                          {packet(20, podMAC, red4), true},
		"red, the address in blue":     {packet(20, podMAC, pod4), false},
		"open":                         {packet(30, otherMAC, other4), true},
		"MAC only":                     {packet(40, podMAC, other4), true},
		"MAC only, another's MAC":      {packet(40, otherMAC, other4), false},
		"VLAN of no network":           {packet(50, podMAC, pod4), false},
		"VLAN 0":                       {packet(0, podMAC, pod4), false},
		"no tag":                       {ethernet(podMAC, unix.ETH_P_IP, ipv4(pod4)), false},
		"two tags":                     {tagged(10, packet(10, podMAC, pod4)), false},
		"blue, ARP":                    {tagged(10, ethernet(podMAC, unix.ETH_P_ARP, arp(1, podMAC, pod4))), true},
		"blue, ARP of the red address": {tagged(10, ethernet(podMAC, unix.ETH_P_ARP, arp(1, podMAC, red4))), false},
		"blue, IPv6": {tagged(10, ethernet(podMAC, unix.ETH_P_IPV6,
			discovery(pod6, 135, other6, option(1, podMAC)...))), true},
		"red, IPv6 of blue": {tagged(20, ethernet(podMAC, unix.ETH_P_IPV6,
			discovery(pod6, 135, other6, option(1, podMAC)...))), false},
		"red, link-local": {tagged(20, ethernet(podMAC, unix.ETH_P_IPV6,
			discovery(podLinkLocal, 135, otherLinkLocal, option(1, podMAC)...))), true},
	}
	check := func(when string) {
		t.Helper()
		for name, test := range frames {
			if got := l.passes(l.pod, test.frame); got != test.passes {
				t.Errorf("%s: %s: passes: %t, want %t", when, name, got, test.passes)
			}
		}
	}

	check("at first")
	l.open() // another agent, which does not know of the trunk yet
	check("while the agent starts")
	must.Succeed(t, l.filter.SetPort(trunk))
	must.Succeed(t, l.filter.Restore())
	check("after another program removed the filter")

	// The VXLAN port is in the network blue.
	must.Succeed(t, l.filter.SetVXLAN("blue", sourcefilter.VXLAN{Index: l.remote.port}))
	for what, test := range map[string]struct {
		frame  []byte
		passes bool
	}{
		"its MAC":             {ethernet(podMAC, unix.ETH_P_IP, ipv4(other4)), false},
		"a claim":             {ethernet(otherMAC, unix.ETH_P_ARP, arp(2, otherMAC, pod4)), false},
		"a claim of red's":    {ethernet(otherMAC, unix.ETH_P_ARP, arp(2, otherMAC, red4)), true},
		"another's own claim": {ethernet(otherMAC, unix.ETH_P_ARP, arp(2, otherMAC, other4)), true},
	} {
		if got := l.passes(l.remote, test.frame); got != test.passes {
			t.Errorf("from another machine: %s: passes: %t, want %t", what, got, test.passes)
		}
	}

	must.Succeed(t, l.filter.SetGateway("open", sourcefilter.Gateway{
		Index: 1000, VRF: 1001, MAC: otherMAC, Addresses: []netip.Addr{pod4},
	}))
	for what, frame := range map[string][]byte{
		"MAC": packet(30, otherMAC, red4), "address": packet(30, podMAC, pod4),
	} {
		if l.passes(l.pod, frame) {
			t.Errorf("the %s of a gateway passes in the gateway's VLAN", what)
		}
	}
	if !l.passes(l.pod, packet(10, podMAC, pod4)) {
		t.Error("a gateway reserves its address in another network too")
	}

	// A trunk that becomes a port without a tag, and one that is gone.
	must.Succeed(t, l.filter.RemoveGateway("open"))
	must.Succeed(t, l.filter.SetPort(sourcefilter.Port{Index: l.pod.port, MAC: podMAC}))
	l.podVLAN = 0
	if !l.passes(l.pod, ethernet(podMAC, unix.ETH_P_IP, ipv4(pod4))) {
		t.Error("a port that was a trunk may not send without a tag")
	}
}
