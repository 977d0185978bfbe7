// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"errors"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// TestPeerVanishes checks that a peer which lost its power is detected, both idle and during a
// call.
func TestPeerVanishes(t *testing.T) {
	for name, send := range map[string]string{"idle": "", "in a call": "request"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn, vanish := connectAcross(t)
			vanish()
			begin := time.Now()
			if _, err := conn.Write([]byte(send)); err != nil {
				t.Fatal(err)
			}
			if err := conn.SetReadDeadline(begin.Add(3 * peerTimeout)); err != nil {
				t.Fatal(err)
			}

			_, err := conn.Read(make([]byte, 1))
			if !errors.Is(err, unix.ETIMEDOUT) && !errors.Is(err, unix.EHOSTUNREACH) {
				t.Errorf("after %s: %v, want the connection to be given up", time.Since(begin), err)
			}
		})
	}
}

// connectAcross connects to a listener in another network namespace; vanish cuts that namespace
// off.
func connectAcross(t *testing.T) (conn net.Conn, vanish func()) {
	t.Helper()
	here, there := netns.New(t), netns.New(t)
	netns.Connect(t, here, "here", there, "there")
	assign(t, here, "here", "198.18.0.1/30")
	address := assign(t, there, "there", "198.18.0.2/30")

	var listener net.Listener
	if err := there.Do(func() (err error) {
		listener, err = net.Listen("tcp", "198.18.0.2:0")
		return err
	}); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { _ = listener.Close() })
	if err := here.Do(func() (err error) {
		conn, err = newDialer().DialContext(t.Context(), "tcp", listener.Addr().String())
		return err
	}); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { _ = conn.Close() })
	peer, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = peer.Close() })

	return conn, func() {
		t.Helper()
		if err := there.Handle().AddrDel(address.link, address.Addr); err != nil {
			t.Fatal(err)
		}
	}
}

type assigned struct {
	*netlink.Addr
	link netlink.Link
}

func assign(t *testing.T, n *netns.Namespace, name, address string) assigned {
	t.Helper()
	link, err := n.Handle().LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}

	parsed, err := netlink.ParseAddr(address)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Handle().AddrAdd(link, parsed); err != nil {
		t.Fatal(err)
	}

	return assigned{parsed, link}
}
