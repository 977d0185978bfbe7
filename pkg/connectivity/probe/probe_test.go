// SPDX-License-Identifier: Apache-2.0

package probe_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/connectivity/probe"
	"github.com/opiproject/xpu-device-plugin/pkg/connectivity/wire"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m.Run)) }

// mtu is what the segment carries.
const mtu = 1400

// pod is a network namespace in which a probe runs.
type pod struct {
	t       *testing.T
	peer    wire.Peer
	ns      *netns.Namespace
	orders  string
	reports *json.Decoder
	number  int
}

// start runs the probe of a pod, and returns when it has told about its interface.
func start(t *testing.T, ns *netns.Namespace, peer wire.Peer, run string) *pod {
	t.Helper()
	out, in := io.Pipe()
	p := &pod{t: t, peer: peer, ns: ns, orders: t.TempDir(), reports: json.NewDecoder(out)}
	must.Run(t, func(ctx context.Context) error {
		return ns.Do(func() error {
			return probe.Run(ctx, probe.Options{Run: run, Self: peer, Interface: "test0",
				Orders: p.orders, Reports: in})
		})
	})
	return p
}

// next returns the next report.
func (p *pod) next() (r wire.Report) {
	p.t.Helper()
	must.Succeed(p.t, p.reports.Decode(&r))
	return r
}

// order has the pod do something, as the kubelet does: the file is replaced.
func (p *pod) order(o wire.Order) wire.Report {
	p.t.Helper()
	p.number++
	o.Number = p.number
	text, err := json.Marshal(o)
	must.Succeed(p.t, err)
	temporary := filepath.Join(p.orders, "new")
	must.Succeed(p.t, os.WriteFile(temporary, text, 0o600))
	must.Succeed(p.t, os.Rename(temporary, filepath.Join(p.orders, wire.OrderFile)))

	r := p.next()
	if r.Order != o.Number {
		p.t.Fatalf("report %+v, want one of order %d", r, o.Number)
	}
	return r
}

// connected returns two namespaces with interfaces test0 that are connected. Their addresses end
// with 1 and 2.
func connected(t *testing.T) [2]*netns.Namespace {
	t.Helper()
	needs.Root(t, "for network namespaces")
	pair := [2]*netns.Namespace{netns.New(t), netns.New(t)}
	netns.Connect(t, pair[0], "test0", pair[1], "test0")
	for i, ns := range pair {
		link, err := ns.Handle().LinkByName("test0")
		must.Succeed(t, err)
		must.Succeed(t, ns.Handle().LinkSetMTU(link, mtu))
		for _, form := range []string{"10.9.0.%d/24", "fd00:9::%d/64"} {
			address, err := netlink.ParseAddr(fmt.Sprintf(form, i+1))
			must.Succeed(t, err)
			address.Flags = unix.IFA_F_NODAD // usable at once
			must.Succeed(t, ns.Handle().AddrAdd(link, address))
		}
		must.Succeed(t, ns.Handle().LinkSetUp(link))
	}
	return pair
}

func questions(size int, addresses ...string) (all []wire.Question) {
	for _, a := range addresses {
		all = append(all, wire.Question{Address: netip.MustParseAddr(a), Size: size})
	}
	return all
}

func TestInterface(t *testing.T) {
	pair := connected(t)
	p := start(t, pair[0], wire.Peer{Pod: "a", Network: "blue"}, "run")
	got := p.next()
	want := wire.Interface{Name: "test0", MAC: got.Interface.MAC, MTU: mtu, Up: true,
		Addresses: []netip.Prefix{netip.MustParsePrefix("10.9.0.1/24"),
			netip.MustParsePrefix("fd00:9::1/64")}}
	if diff := cmp.Diff(want, got.Interface, cmp.Comparer(func(a, b netip.Prefix) bool {
		return a == b
	})); diff != "" || len(got.Interface.MAC) != 17 {
		t.Errorf("MAC %q, (-want +got):\n%s", got.Interface.MAC, diff)
	}
}

// TestPackets: the other pod answers small packets and those of the full MTU, in both families, and
// a larger packet is an error.
func TestPackets(t *testing.T) {
	pair := connected(t)
	a, b := wire.Peer{Pod: "a", Network: "blue"}, wire.Peer{Pod: "b", Network: "blue"}
	p, q := start(t, pair[0], a, "run"), start(t, pair[1], b, "run")
	p.next()
	q.next()

	for _, size := range []int{0, mtu} {
		r := p.order(wire.Order{Questions: questions(size, "10.9.0.2", "fd00:9::2"),
			Patience: 10 * time.Second})
		for i, got := range r.Answers {
			if got.From == nil || *got.From != b || got.Took <= 0 || got.Error != "" {
				t.Errorf("size %d, question %d: %+v", size, i, got)
			}
		}
	}

	r := p.order(wire.Order{Questions: questions(mtu+1, "10.9.0.2", "fd00:9::2"),
		Patience: 10 * time.Second})
	for i, got := range r.Answers {
		if got.Error == "" || got.From != nil {
			t.Errorf("more than the MTU, question %d: %+v", i, got)
		}
	}
}

// TestSilence: nobody answers an address that nobody has, a packet of another run, and an IPv4
// address out of the subnet, which is looked for on the link all the same. An IPv6 address without
// a route is not asked, which is not silence.
func TestSilence(t *testing.T) {
	pair := connected(t)
	p := start(t, pair[0], wire.Peer{Pod: "a", Network: "blue"}, "run")
	q := start(t, pair[1], wire.Peer{Pod: "b", Network: "blue"}, "another run")
	p.next()
	q.next()

	r := p.order(wire.Order{
		Questions: questions(0, "10.9.0.7", "10.9.0.2", "192.0.2.1", "2001:db8::1"), Call: true,
		Patience: 500 * time.Millisecond,
	})
	for i, got := range r.Answers {
		if want := (wire.Answer{Silent: i < 3, Unsent: i == 3}); got != want {
			t.Errorf("question %d: %+v, want %+v", i, got, want)
		}
	}
	if len(r.Heard) > 0 {
		t.Errorf("heard %v", r.Heard)
	}
}

// TestCall: pods of another network on the same segment are heard, whatever addresses they have.
func TestCall(t *testing.T) {
	pair := connected(t)
	a, b := wire.Peer{Pod: "a", Network: "blue"}, wire.Peer{Pod: "b", Network: "red"}
	p, q := start(t, pair[0], a, "run"), start(t, pair[1], b, "run")
	p.next()
	q.next()

	if r := p.order(wire.Order{Call: true, Patience: time.Second}); r.Error != "" {
		t.Error(r.Error)
	}
	if r := q.order(wire.Order{}); !slices.Equal(r.Heard, []wire.Peer{a}) || r.Error != "" {
		t.Errorf("%+v, want that a was heard", r)
	}
	if r := p.order(wire.Order{}); len(r.Heard) > 0 {
		t.Errorf("a pod hears itself: %v", r.Heard)
	}
}

// TestCalled: questions and answers of pods of the same network do not show that calls arrive, and
// calls do, in both IP versions.
func TestCalled(t *testing.T) {
	pair := connected(t)
	a, b := wire.Peer{Pod: "a", Network: "blue"}, wire.Peer{Pod: "b", Network: "blue"}
	p, q := start(t, pair[0], a, "run"), start(t, pair[1], b, "run")
	p.next()
	q.next()

	asked := p.order(wire.Order{Questions: questions(0, "10.9.0.2", "fd00:9::2"),
		Patience: 10 * time.Second})
	for _, r := range []wire.Report{asked, q.order(wire.Order{})} {
		if len(r.Called) > 0 || len(r.Heard) > 0 {
			t.Errorf("%+v, want no calls before there was one", r)
		}
	}

	p.order(wire.Order{Call: true, Patience: time.Second})
	r := q.order(wire.Order{})
	slices.SortFunc(r.Called, func(c, _ wire.Call) int {
		if c.IPv6 {
			return 1
		}
		return -1
	})
	if want := []wire.Call{{From: a}, {From: a, IPv6: true}}; !slices.Equal(r.Called, want) ||
		len(r.Heard) > 0 {
		t.Errorf("%+v, want calls %+v", r, want)
	}
}

// TestRoom: however many pods of its own network a pod has heard, it notes other networks.
func TestRoom(t *testing.T) {
	pair := connected(t)
	p := start(t, pair[0], wire.Peer{Pod: "a", Network: "blue"}, "run")
	p.next()

	must.Succeed(t, pair[1].Do(func() error {
		socket, err := net.Dial("udp4", "10.9.0.1:30777")
		if err != nil {
			return err
		}
		defer socket.Close()
		for i := range 2 * wire.MaxHeard {
			if _, err := fmt.Fprintf(socket,
				`{"run":"run","kind":"answer","from":{"pod":"%d","network":"blue"}}`, i); err != nil {
				return err
			}
		}
		_, err = fmt.Fprint(socket,
			`{"run":"run","kind":"answer","from":{"pod":"b","network":"red"}}`)
		return err
	}))

	must.Eventually(t, "the pod of the other network is heard", func() bool {
		return slices.Equal(p.order(wire.Order{}).Heard, []wire.Peer{{Pod: "b", Network: "red"}})
	})
}

func TestNoInterface(t *testing.T) {
	needs.Root(t, "for network namespaces")
	ns, orders := netns.New(t), t.TempDir()
	out, in := io.Pipe()
	go func() {
		_ = in.CloseWithError(ns.Do(func() error {
			return probe.Run(t.Context(),
				probe.Options{Interface: "test0", Orders: orders, Reports: in})
		}))
	}()

	var r wire.Report
	must.Succeed(t, json.NewDecoder(out).Decode(&r))
	if r.Error != "interface test0: route ip+net: no such network interface" {
		t.Errorf("%+v", r)
	}
}
