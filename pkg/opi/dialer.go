package opi

import (
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// silence is how long an agent may leave the kernel without an answer before the connection is given up.
const silence = 5 * time.Second

// newDialer makes a dialer of connections that find out that the peer is gone: by TCP, and not by HTTP/2 pings, because
// a gRPC server with default settings, as the reference agent is, hangs up on a client that pings more often than each
// 5 minutes.
func newDialer() *net.Dialer {
	return &net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 3},
		Control:         limitSilence,
	}
}

// limitSilence also bounds how long the kernel repeats what the peer does not acknowledge. While it does, a quarter of
// an hour by default, there are no keep-alives.
func limitSilence(_, _ string, socket syscall.RawConn) (err error) {
	failed := socket.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(silence.Milliseconds()))
	})
	if failed != nil {
		return failed
	}
	return err
}
