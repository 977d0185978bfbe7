// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// TestHandover checks that Attach continues with the connection of Plan, and closes it.
func TestHandover(t *testing.T) {
	host, pod := netns.New(t), netns.New(t)
	must.Succeed(t, host.Handle().LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "v0"}, PeerName: "v1",
	}))
	e, err := New(Options{HostNetNS: host.Path()})
	must.Succeed(t, err)
	defer e.Close()

	device, want := Device{Name: "v0"}, function.Interface{Name: "net1"}

	before, place, err := e.Plan(t.Context(), device, pod.Path(), want)
	must.Succeed(t, err)
	planned := e.planned.take(place)
	if planned == nil || !planned.isPod || planned.cookie != place.Cookie {
		t.Fatalf("kept %+v, want the connection to the pod's namespace", planned)
	}

	e.planned.give(place, planned, time.Hour)

	_, err = e.Attach(t.Context(), device, before, place, want)
	must.Succeed(t, err)
	if e.planned.take(place) != nil || planned.ns.IsOpen() {
		t.Error("the Attach did not take the connection, or did not close it")
	}
}

// TestHandoverOfAnotherNamespace covers a path that refers to another namespace since Plan. The
// connection keeps the old namespace alive, but Attach must notice that the path no longer refers
// to it.
func TestHandoverOfAnotherNamespace(t *testing.T) {
	host, pod, other := netns.New(t), netns.New(t), netns.New(t)
	must.Succeed(t, host.Handle().LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "v0"}, PeerName: "v1",
	}))
	e, err := New(Options{HostNetNS: host.Path()})
	must.Succeed(t, err)
	defer e.Close()

	device, want := Device{Name: "v0"}, function.Interface{Name: "net1"}
	path := filepath.Join(t.TempDir(), "netns")
	must.Succeed(t, os.Symlink(pod.Path(), path))

	before, place, err := e.Plan(t.Context(), device, path, want)
	must.Succeed(t, err)
	must.Succeed(t, os.Remove(path))
	must.Succeed(t, os.Symlink(other.Path(), path))

	_, err = e.Attach(t.Context(), device, before, place, want)
	if err == nil || !strings.Contains(err.Error(), "is another one than before") {
		t.Errorf("error %v", err)
	}
	if _, err := e.host.named("v0"); err != nil {
		t.Errorf("the netdev has left the host: %v", err)
	}
}

// TestHandoverEnds checks that a connection that is not taken is closed: after its time, when
// another connection replaces it, and with the Engine.
func TestHandoverEnds(t *testing.T) {
	pod := netns.New(t)
	open := func() *conn {
		c, err := dial(pod.Path())
		must.Succeed(t, err)
		return c
	}

	var h handover
	late, first, second := open(), open(), open()
	place := Place{NetNS: pod.Path(), Cookie: late.cookie, Index: 1}

	h.give(place, late, time.Millisecond)
	must.Eventually(t, "the connection that nobody took is closed", func() bool {
		h.mutex.Lock()
		defer h.mutex.Unlock()
		return len(h.conns) == 0 && !late.ns.IsOpen()
	})

	h.give(place, first, time.Hour)
	h.give(place, second, time.Hour)
	if first.ns.IsOpen() {
		t.Error("the first connection is open still")
	}

	h.close()
	if second.ns.IsOpen() || h.take(place) != nil {
		t.Error("the second connection is open still")
	}
}
