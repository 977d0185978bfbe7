// SPDX-License-Identifier: Apache-2.0

package access

import (
	"fmt"
	"net"
	"sync"

	"github.com/go-logr/logr"
)

// How many connections there may be, of all clients and of one address. xpu-controller needs one or
// two, and so does each node in direct mode. Nodes may share an address.
const (
	maxConnections           = 1024
	maxConnectionsPerAddress = 64
)

// CheckPlaintext returns an error if other machines can reach an address (host:port). Without TLS,
// they could rewire the ports.
func CheckPlaintext(address string) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("address %q is not host:port: %w", address, err)
	}
	if host == "localhost" || net.ParseIP(host).IsLoopback() {
		return nil
	}
	return fmt.Errorf("address %s is not a loopback address: without TLS anybody who reaches it "+
		"could rewire the ports", address)
}

// LimitConnections returns a listener that closes new connections while there are too many of them,
// because a client without a certificate can hold a connection for as long as a handshake may take.
func LimitConnections(lis net.Listener, log logr.Logger) net.Listener {
	return &limitedListener{
		Listener: lis, log: log, max: maxConnections, maxPerAddress: maxConnectionsPerAddress,
		byAddress: map[string]int{},
	}
}

type limitedListener struct {
	net.Listener
	log                logr.Logger
	max, maxPerAddress int

	mu        sync.Mutex
	open      int            // open connections
	byAddress map[string]int // open connections by the client's address
}

// Accept implements [net.Listener].
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
		if l.acquire(host) {
			return &limitedConn{Conn: conn, release: sync.OnceFunc(func() { l.release(host) })}, nil
		}

		l.log.V(1).Info("too many connections, a new one is closed", "address", host)
		_ = conn.Close()
	}
}

// acquire reports whether there may be another connection from the address, and counts it.
func (l *limitedListener) acquire(host string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open >= l.max || l.byAddress[host] >= l.maxPerAddress {
		return false
	}
	l.open++
	l.byAddress[host]++
	return true
}

func (l *limitedListener) release(host string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	if l.byAddress[host]--; l.byAddress[host] == 0 {
		delete(l.byAddress, host)
	}
}

type limitedConn struct {
	net.Conn
	release func()
}

// Close implements [net.Conn].
func (c *limitedConn) Close() error {
	defer c.release()
	return c.Conn.Close()
}
