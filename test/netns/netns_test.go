// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
)

func TestDoRunsInsideAndComesBack(t *testing.T) {
	n := New(t)
	before, err := vnetns.Get()
	if err != nil {
		t.Fatal(err)
	}
	defer before.Close()

	failure := errors.New("from inside")
	err = n.Do(func() error {
		inside, err := vnetns.Get()
		if err != nil {
			return err
		}
		defer inside.Close()

		if inside.Equal(before) {
			t.Error("Do ran outside of the namespace")
		}

		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		if len(links) != 1 || links[0].Attrs().Name != "lo" ||
			links[0].Attrs().Flags&net.FlagUp == 0 {
			t.Errorf("a new namespace has %v, want lo alone and up", links)
		}

		return failure
	})

	if !errors.Is(err, failure) {
		t.Errorf("Do returned %v, want the function's error", err)
	}

	after, err := vnetns.Get()
	if err != nil {
		t.Fatal(err)
	}
	defer after.Close()

	if !after.Equal(before) {
		t.Error("Do did not come back")
	}
}

func TestNewLeavesNoThreadInside(t *testing.T) {
	before, err := vnetns.Get()
	if err != nil {
		t.Fatal(err)
	}
	defer before.Close()

	for range 20 {
		n := New(t)
		done := make(chan error)
		go func() { done <- n.Do(func() error { return nil }) }()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}

	threads, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil {
		t.Fatal(err)
	}

	for _, thread := range threads {
		ns, err := vnetns.GetFromPath(thread)
		if errors.Is(err, os.ErrNotExist) { // the thread has ended
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if !ns.Equal(before) {
			t.Errorf("%s is another namespace than the test's", thread)
		}

		_ = ns.Close()
	}
}

func TestIn(t *testing.T) {
	n := New(t)
	err := In(n.Path(), func() error {
		here, err := vnetns.Get()
		if err != nil {
			return err
		}
		defer here.Close()

		if !here.Equal(n.ns) {
			t.Error("In is not in the namespace of its path")
		}
		return nil
	})

	if err != nil {
		t.Fatal(err)
	}
	if err := In("/nowhere", nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a path of nothing: %v, want not exist", err)
	}
}

func TestDoNested(t *testing.T) {
	a, b := New(t), New(t)
	same := func(n *Namespace) bool {
		here, err := vnetns.Get()
		if err != nil {
			t.Fatal(err)
		}
		defer here.Close()
		return here.Equal(n.ns)
	}

	err := a.Do(func() error {
		err := b.Do(func() error {
			if !same(b) {
				t.Error("inner Do is not in its namespace")
			}
			return nil
		})

		if !same(a) {
			t.Error("after the inner Do the outer one is not in its namespace")
		}

		return err
	})

	if err != nil {
		t.Fatal(err)
	}
}

func TestConnectCarriesTraffic(t *testing.T) {
	a, b := New(t), New(t)
	Connect(t, a, "left", b, "right")
	address(t, a, "left", "192.0.2.1/30")
	address(t, b, "right", "192.0.2.2/30")

	var client net.Conn
	var pc net.PacketConn
	err := b.Do(func() (err error) {
		pc, err = net.ListenPacket("udp4", "192.0.2.2:7")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()

	err = a.Do(func() (err error) {
		client, err = net.Dial("udp4", "192.0.2.2:7")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()

	if _, err := client.Write([]byte("over the wire")); err != nil {
		t.Fatal(err)
	}

	buf := make([]byte, 64)
	size, _, err := pc.ReadFrom(buf)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(buf[:size]); got != "over the wire" {
		t.Errorf("got %q", got)
	}
}

func TestPing(t *testing.T) {
	a, b := New(t), New(t)
	Connect(t, a, "left", b, "right")
	address(t, a, "left", "192.0.2.1/24")
	address(t, b, "right", "192.0.2.2/24")
	own := netip.MustParseAddr("192.0.2.1")
	if ok, err := a.Ping(own, netip.MustParseAddr("192.0.2.2"), 10*time.Second); err != nil || !ok {
		t.Errorf("the other end: %v, %v, want an answer", ok, err)
	}
	if ok, err := a.Ping(own, netip.MustParseAddr("192.0.2.3"), 300*time.Millisecond); err != nil ||
		ok {
		t.Errorf("an address of nobody: %v, %v, want no answer", ok, err)
	}
	if _, err := b.Ping(own, netip.MustParseAddr("192.0.2.2"), time.Second); err == nil {
		t.Error("from an address of another namespace: no error")
	}
}

func TestUnmount(t *testing.T) {
	n := New(t)
	if err := n.Unmount(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(n.Path()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("stat %s: %v, want not exist", n.Path(), err)
	}
	if err := n.Unmount(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("second Unmount: %v, want not exist", err)
	}
	if err := n.Do(func() error { return nil }); err != nil {
		t.Errorf("Do after Unmount: %v", err)
	}
}

func address(t *testing.T, n *Namespace, name, cidr string) {
	t.Helper()
	link, err := n.Handle().LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}

	addr, err := netlink.ParseAddr(cidr)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Handle().AddrAdd(link, addr); err != nil {
		t.Fatal(err)
	}
}
