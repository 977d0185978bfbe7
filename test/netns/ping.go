// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/net/icmp"

	"github.com/opiproject/xpu-device-plugin/test/ping"
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

	return ping.Send(conn, to, within)
}
