// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"net"
	"sync"

	"github.com/go-logr/logr"
)

// How many connections there may be. xpu-controller has one or two, and so has each node in direct
// mode; nodes may share an address.
const (
	maxConnections            = 1024
	maxConnectionsOfAnAddress = 64
)

// LimitConnections closes new connections while there are too many, of all or of their address:
// whoever has no certificate can hold one for as long as the handshake may take.
func LimitConnections(lis net.Listener, log logr.Logger) net.Listener {
	return &limitedListener{
		Listener: lis, log: log, max: maxConnections, maxOfAnAddress: maxConnectionsOfAnAddress,
		of: map[string]int{},
	}
}

type limitedListener struct {
	net.Listener
	log                 logr.Logger
	max, maxOfAnAddress int

	mu  sync.Mutex
	all int
	of  map[string]int // by address
}

// Accept is part of [net.Listener].
func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}

		host, _, err := net.SplitHostPort(conn.RemoteAddr().String())
		if err != nil {
			host = conn.RemoteAddr().String()
		}
		if l.take(host) {
			return &limitedConn{Conn: conn, end: sync.OnceFunc(func() { l.give(host) })}, nil
		}

		l.log.V(1).Info("too many connections, a new one is closed", "address", host)
		_ = conn.Close()
	}
}

func (l *limitedListener) take(host string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all >= l.max || l.of[host] >= l.maxOfAnAddress {
		return false
	}
	l.all++
	l.of[host]++
	return true
}

func (l *limitedListener) give(host string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all--
	if l.of[host]--; l.of[host] == 0 {
		delete(l.of, host)
	}
}

type limitedConn struct {
	net.Conn
	end func()
}

// Close is part of [net.Conn].
func (c *limitedConn) Close() error {
	defer c.end()
	return c.Conn.Close()
}
