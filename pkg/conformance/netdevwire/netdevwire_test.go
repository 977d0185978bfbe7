// SPDX-License-Identifier: Apache-2.0

package netdevwire_test

import (
	"bytes"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
	"github.com/opiproject/xpu-device-plugin/pkg/conformance/netdevwire"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

var _ conformance.Wire = (*netdevwire.Wire)(nil)

// TestWire checks that frames arrive as they were sent, with their tags, and that a wire does not
// hear what it sends itself.
func TestWire(t *testing.T) {
	n := netns.New(t)
	netns.Connect(t, n, "a", n, "b")
	open := func(netdev string) *netdevwire.Wire {
		var w *netdevwire.Wire
		must.Succeed(t, n.Do(func() (err error) {
			w, err = netdevwire.Open(netdev)
			return err
		}))
		t.Cleanup(func() { must.Succeed(t, w.Close()) })
		return w
	}
	a, b := open("a"), open("b")

	addresses := []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 17, 0, 0, 0, 0}
	for name, rest := range map[string][]byte{
		"untagged": {0x88, 0xb5, 1},
		"tagged":   {0x81, 0, 0, 7, 0x88, 0xb5, 2},
		"priority": {0x81, 0, 0xa0, 0, 0x88, 0xb5, 3},
		"service":  {0x88, 0xa8, 0, 7, 0x88, 0xb5, 4},
		"double":   {0x81, 0, 0, 7, 0x81, 0, 0, 8, 0x88, 0xb5, 5},
	} {
		addresses[11]++ // because a frame may arrive twice
		sent := slices.Concat(addresses, rest, make([]byte, 46))
		if got := pass(t, a, b, sent); !bytes.Equal(got, sent) {
			t.Errorf("%s: got %x, want %x", name, got, sent)
		}
	}

	for len(a.Frames()) > 0 {
		if frame := <-a.Frames(); bytes.HasPrefix(frame, addresses[:11]) {
			t.Errorf("the sender hears %x", frame)
		}
	}
}

// pass sends a frame until one with the same addresses arrives, which it returns. Until the kernel
// sees the carrier of a new netdev, what is sent is lost.
func pass(t *testing.T, from, to *netdevwire.Wire, sent []byte) []byte {
	t.Helper()
	for limit := time.After(30 * time.Second); ; {
		must.Succeed(t, from.Send(sent))
		select {
		case got := <-to.Frames():
			if bytes.HasPrefix(got, sent[:12]) {
				return got
			}
		case <-time.After(10 * time.Millisecond):
		case <-limit:
			t.Fatalf("%x does not arrive", sent)
		}
	}
}

func TestNoNetdev(t *testing.T) {
	n := netns.New(t)
	err := n.Do(func() error {
		_, err := netdevwire.Open("missing")
		return err
	})
	if err == nil || os.IsPermission(err) {
		t.Errorf("%v, want that there is no such netdev", err)
	}
}
