// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// testLargePackets checks that packets as large as VXLAN carries pass between the networks of two
// xPUs. For larger packets the gateway tells the sender the MTU, or fragments them.
func testLargePackets(t *testing.T, mode plane.Mode) {
	for version, largest := range map[string]int{"IPv4": 1450, "IPv6": 1430} {
		t.Run(version, func(t *testing.T) {
			a, b := twoRouters(t, mode, underlays[version])
			near, far := a.newHost(rep1, "net-blue", 1, 2), b.newHost(rep1, "net-red", 2, 2)
			near.reaches(t, far.v4, far.v6)
			for _, pair := range [][2]*host{{near, far}, {far, near}} {
				from, to := pair[0], pair[1]
				for _, address := range []netip.Addr{to.v4, to.v6} {
					from.wantAnswer(t, address, largest, true, "reply")
					tooBig := fmt.Sprintf("larger than %d", largest)
					from.wantAnswer(t, address, largest+1, true, tooBig)
					from.wantAnswer(t, address, 1500, true, tooBig)
					from.wantAnswer(t, address, 1500, false, "reply")
				}
			}

			// Within a network the bridge drops them. Only of those with up to 4 bytes too many the
			// VXLAN port tells the sender.
			neighbor := b.newHost(rep2, "net-blue", 1, 3)
			near.wantAnswer(t, neighbor.v4, largest, true, "reply")
			if answer := near.answer(t, neighbor.v4, 1500, true); answer != "nothing" {
				t.Errorf("a packet that is too large within a network gets %q", answer)
			}
		})
	}
}

// wantAnswer sends packets of a size in bytes until the answer is the wanted one. whole packets must
// not be fragmented.
func (h *host) wantAnswer(t *testing.T, to netip.Addr, size int, whole bool, want string) {
	t.Helper()
	answer := ""
	for range 30 {
		if answer = h.answer(t, to, size, whole); answer == want {
			return
		}
	}
	t.Errorf("%s gets %q for packets of %d bytes to %s (whole: %t), want %q", h.v4, answer, size, to,
		whole, want)
}

// answer sends an echo request in a packet of a size, and returns what comes of it.
func (h *host) answer(t *testing.T, to netip.Addr, size int, whole bool) string {
	t.Helper()
	network, from, protocol, headers := "ip4:icmp", h.v4, 1, 20+8
	var request, reply icmp.Type = ipv4.ICMPTypeEcho, ipv4.ICMPTypeEchoReply
	if to.Is6() {
		network, from, protocol, headers = "ip6:ipv6-icmp", h.v6, 58, 40+8
		request, reply = ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply
	}

	var conn net.PacketConn
	must.Succeed(t, h.Do(func() (err error) {
		conn, err = net.ListenPacket(network, from.String())
		return err
	}))
	defer func() { _ = conn.Close() }()
	must.Succeed(t, discoverMTU(conn.(*net.IPConn), to.Is6(), whole))

	id := rand.IntN(1 << 16)
	data, err := (&icmp.Message{
		Type: request, Body: &icmp.Echo{ID: id, Data: make([]byte, size-headers)},
	}).Marshal(nil)
	must.Succeed(t, err)
	if _, err := conn.WriteTo(data, &net.IPAddr{IP: to.AsSlice()}); err != nil {
		return err.Error()
	}

	must.Succeed(t, conn.SetReadDeadline(time.Now().Add(300*time.Millisecond)))
	for buffer := make([]byte, 2000); ; {
		n, _, err := conn.ReadFrom(buffer)
		if err != nil {
			return "nothing"
		}
		message, err := icmp.ParseMessage(protocol, buffer[:n])
		if err != nil {
			continue
		}
		switch body := message.Body.(type) {
		case *icmp.Echo:
			if message.Type == reply && body.ID == id && len(body.Data) == size-headers {
				return "reply"
			}
		case *icmp.DstUnreach:
			if message.Code == fragmentationNeeded {
				return fmt.Sprintf("larger than %d", int(buffer[6])<<8|int(buffer[7]))
			}
		case *icmp.PacketTooBig:
			return fmt.Sprintf("larger than %d", body.MTU)
		}
	}
}

// discoverMTU makes the kernel send packets of any size whole, whatever it has heard of the path,
// or fragment those that are too large for the path.
func discoverMTU(conn *net.IPConn, isIPv6, whole bool) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}

	level, option, value := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT
	if whole {
		value = unix.IP_PMTUDISC_PROBE
	}
	if isIPv6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER
	}
	var set error
	err = raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), level, option, value) })

	return errors.Join(err, set)
}

// testRestartAcrossXPUs checks that a restart of the agents of two xPUs loses no packet between
// networks of the two.
func testRestartAcrossXPUs(t *testing.T, mode plane.Mode) {
	a, b := twoRouters(t, mode, underlays["IPv4"])
	near, far := a.newHost(rep1, "net-blue", 1, 2), b.newHost(rep1, "net-red", 2, 2)
	near.reaches(t, far.v4, far.v6)
	near.losesNothing(t, far, func() {
		for range 3 {
			for _, r := range []router{a, b} {
				r.stop()
				r.start()
			}
		}
	})
}

// losesNothing checks that the packets of a host reach another one, and come back, while something
// is done.
func (h *host) losesNothing(t *testing.T, to *host, do func()) {
	t.Helper()
	lost, stop := make(chan string, 1), make(chan struct{})
	go func() {
		defer close(lost)
		for {
			for _, address := range []netip.Addr{to.v4, to.v6} {
				if !h.pings(t, address, 1) {
					lost <- address.String()
					return
				}
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	}()

	do()
	close(stop)
	if address, some := <-lost; some {
		t.Errorf("a packet to %s was lost", address)
	}
}

// fragmentationNeeded is a code of ICMP's Destination Unreachable, with the MTU in bytes 6 and 7 of
// the message (RFC 1191).
const fragmentationNeeded = 4
