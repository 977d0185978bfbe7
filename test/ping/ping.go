// SPDX-License-Identifier: Apache-2.0

// Package ping sends ICMP echo requests.
package ping

import (
	"math/rand/v2"
	"net"
	"net/netip"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
)

// Send reports whether an IPv4 address answers an ICMP echo request within the time. The
// connection is a raw socket for ICMP (RFC 792).
func Send(conn *icmp.PacketConn, to netip.Addr, within time.Duration) (answered bool, err error) {
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
