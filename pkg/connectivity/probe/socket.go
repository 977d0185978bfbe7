// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// port is the UDP port of all pods. Each pod has its own network namespace.
const port = 30777

// Sizes of headers in bytes: RFC 791, RFC 8200 and RFC 768.
const (
	ipv4Header = 20
	ipv6Header = 40
	udpHeader  = 8
)

// family is what IPv4 and IPv6 do differently.
type family struct {
	network string     // of package net
	all     netip.Addr // all pods of a segment: limited broadcast (RFC 919), all nodes (RFC 4291)
	headers int
	// level, discover and probe are the socket option by which packets are not fragmented, and are
	// not bounded by what the kernel believes of the path: ip(7), ipv6(7).
	level, discover, probe int
}

func families() []family {
	return []family{
		{"udp4", netip.AddrFrom4([4]byte{255, 255, 255, 255}), ipv4Header + udpHeader,
			unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE},
		{"udp6", netip.IPv6LinkLocalAllNodes(), ipv6Header + udpHeader,
			unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE},
	}
}

// listen opens a socket that sends and receives by one interface only, whatever the routes are. For
// IPv4 the kernel takes every destination without a route as on the link of the interface, so that
// an address of another network is looked for on this one. Linux 5.7 and later let every user bind
// a socket to an interface.
func (f family) listen(ctx context.Context, device string) (*net.UDPConn, error) {
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var failed error
		err := raw.Control(func(fd uintptr) {
			failed = os.NewSyscallError("SO_BINDTODEVICE", unix.BindToDevice(int(fd), device))
			if failed == nil {
				failed = os.NewSyscallError("MTU_DISCOVER",
					unix.SetsockoptInt(int(fd), f.level, f.discover, f.probe))
			}
		})
		if err != nil {
			return err
		}
		return failed
	}}

	socket, err := config.ListenPacket(ctx, f.network, fmt.Sprintf(":%d", port))
	if err != nil {
		return nil, fmt.Errorf("socket of interface %s: %w", device, err)
	}
	return socket.(*net.UDPConn), nil
}
