// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"io"
	"net"
	"net/url"
	"sync"
	"testing"
)

// link is a TCP proxy to an API server that can refuse connections or hang.
type link struct {
	listener net.Listener
	target   string

	mu    sync.Mutex
	mode  linkMode
	conns map[net.Conn]bool
}

type linkMode int

const (
	linkUp    linkMode = iota
	linkDown           // connections are refused
	linkHangs          // connections are accepted, and no data arrives
)

func newLink(t *testing.T, host string) *link {
	t.Helper()
	target, err := url.Parse(host)
	if err != nil {
		t.Fatal(err)
	}

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}

	l := &link{listener: listener, target: target.Host, conns: map[net.Conn]bool{}}
	t.Cleanup(func() {
		_ = listener.Close()
		l.set(linkDown)
	})

	go l.serve()
	return l
}

func (l *link) address() string { return l.listener.Addr().String() }

// set changes the mode and closes all connections.
func (l *link) set(mode linkMode) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mode = mode
	for conn := range l.conns {
		_ = conn.Close()
	}
	clear(l.conns)
}

// add registers a connection, and returns how to treat it.
func (l *link) add(conn net.Conn) linkMode {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mode == linkDown {
		_ = conn.Close()
		return l.mode
	}
	l.conns[conn] = true
	return l.mode
}

func (l *link) serve() {
	for {
		conn, err := l.listener.Accept()
		if err != nil {
			return
		}
		if l.add(conn) != linkUp {
			continue
		}

		there, err := net.Dial("tcp", l.target)
		if err != nil || l.add(there) != linkUp {
			_ = conn.Close()
			continue
		}

		go pipe(conn, there)
		go pipe(there, conn)
	}
}

func pipe(to, from net.Conn) {
	_, _ = io.Copy(to, from)
	_ = to.Close()
	_ = from.Close()
}
