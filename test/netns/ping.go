// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
)

// Ping reports whether the IPv4 address to answers an ICMP echo request within the time. The
// requests come from the address from, which an interface of the namespace has.
func (n *Namespace) Ping(from, to netip.Addr, within time.Duration) (answered bool, err error) {
	var conn *icmp.PacketConn
	if err := n.Do(func() (err error) {
		conn, err = icmp.ListenPacket("ip4:icmp", from.String())
		return err
	}); err != nil {
		return false, fmt.Errorf("ping %s from %s: %w", to, from, err)
	}

	defer conn.Close()
	id := rand.IntN(1 << 16)
	request, err := (&icmp.Message{Type: ipv4.ICMPTypeEcho, Body: &icmp.Echo{ID: id}}).Marshal(nil)
	if err != nil {
		return false, err
	}

	buffer := make([]byte, 1500)
	for end := time.Now().Add(within); time.Now().Before(end); {
		// Sending fails as long as the MAC address of the receiver is unknown.
		_, _ = conn.WriteTo(request, &net.IPAddr{IP: to.AsSlice()})
		if err := conn.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
			return false, err
		}

		size, source, err := conn.ReadFrom(buffer)
		if err != nil || source.String() != to.String() {
			continue
		}

		reply, err := icmp.ParseMessage(1, buffer[:size]) // 1 is ICMP's protocol number
		if err != nil || reply.Type != ipv4.ICMPTypeEchoReply {
			continue
		}
		if echo, ok := reply.Body.(*icmp.Echo); ok && echo.ID == id {
			return true, nil
		}
	}

	return false, nil
}
