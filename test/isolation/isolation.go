// SPDX-License-Identifier: Apache-2.0

// Package isolation tests that the second of two tenants on a Function gets nothing from the first,
// hostile tenant, and the first nothing from the second. It works with any Function: a veth, or a
// VF of a guest.
package isolation

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// Stage is the place of a test. The interface of each pod is net1.
type Stage struct {
	Host *netns.Namespace
	// Far is the other end of the Function's wire, where the Function's frames arrive.
	Far       *netns.Namespace
	FarNetdev string
	// Attach gives the Function to a pod. Release takes it back; after an error no other pod may
	// get it.
	Attach  func(t *testing.T, pod *netns.Namespace)
	Release func(t *testing.T, pod *netns.Namespace) error
	// MayKeep reports whether Release may fail with this error, which keeps the Function from the
	// second tenant.
	MayKeep func(error) bool
}

// tenant is the first tenant with its helpers.
type tenant struct {
	*netns.Namespace
	host *netns.Namespace
	// accomplice is another pod of the tenant. hidden has no name, and no process is in it.
	accomplice, hidden *netns.Namespace
	index              int // index of net1
}

// Run plays each trick on a new stage. newStage makes the stage, and calls t.Parallel if several
// stages can exist at once.
func Run(t *testing.T, newStage func(t *testing.T) Stage) {
	for _, trick := range tricks {
		t.Run(trick.name, func(t *testing.T) {
			s := newStage(t)
			first := newTenant(t, s.Host)
			s.Attach(t, first.Namespace)
			l, err := first.Handle().LinkByName("net1")
			must.Succeed(t, err)
			first.index = l.Attrs().Index
			trick.play(t, first)

			switch err := s.Release(t, first.Namespace); {
			case err != nil && s.MayKeep(err):
				return
			case err != nil:
				t.Fatal(err)
			}

			second := netns.New(t)
			s.Attach(t, second)
			s.check(t, first, second)
			must.Succeed(t, s.Release(t, second))
		})
	}
}

func newTenant(t *testing.T, host *netns.Namespace) *tenant {
	t.Helper()
	hidden, err := netns.Make(filepath.Join(t.TempDir(), "hidden"))
	must.Succeed(t, err)
	must.Succeed(t, hidden.Unmount())

	t.Cleanup(func() {
		if err := hidden.Close(); err != nil && !errors.Is(err, os.ErrNotExist) &&
			!errors.Is(err, unix.EINVAL) {
			t.Error(err)
		}
	})

	return &tenant{Namespace: netns.New(t), host: host, accomplice: netns.New(t), hidden: hidden}
}

// check has the second tenant send and receive frames, while the first tenant reads and forges
// frames by all means that it still has.
func (s Stage) check(t *testing.T, first *tenant, second *netns.Namespace) {
	t.Helper()
	near, far := end(t, second, "net1"), end(t, s.Far, s.FarNetdev)
	forged := listen(t, s.Far, forgedType)
	var spies []socket
	var forgers []forger
	for _, ns := range []*netns.Namespace{first.Namespace, first.accomplice, first.hidden} {
		spies = append(spies, listen(t, ns, unix.ETH_P_ALL))
		forgers = append(forgers, newForger(t, ns))
	}

	out, err := netns.Send(near, far)
	must.Succeed(t, err)
	in, err := netns.Send(far, near)
	must.Succeed(t, err)

	for range 50 {
		for _, f := range forgers {
			f.forge(near.MAC)
		}
		time.Sleep(time.Millisecond) // the pause of a sender that wants to stay undetected
	}

	var ends sync.WaitGroup // both ends wait for late frames at the same time
	for direction, traffic := range map[string]*netns.Traffic{"sent": out, "received": in} {
		ends.Go(func() {
			if sent, lost, err := traffic.Stop(); err != nil || sent == 0 || lost > 0 {
				t.Errorf("%d frames of the second tenant %s, %d lost: %v",
					sent, direction, lost, err)
			}
		})
	}

	ends.Wait()
	for _, spy := range spies {
		if n := spy.count(t, netns.TestType); n > 0 {
			t.Errorf("the first tenant read %d frames of the second", n)
		}
	}

	if n := forged.count(t, forgedType); n > 0 {
		t.Errorf("the first tenant forged %d frames of the second", n)
	}
}

func end(t *testing.T, ns *netns.Namespace, name string) netns.End {
	t.Helper()
	l, err := ns.Handle().LinkByName(name)
	must.Succeed(t, err)
	return netns.End{NetNS: ns, Netdev: name, MAC: l.Attrs().HardwareAddr}
}

// forgedType is the EtherType of forged frames, which IEEE 802 reserves for experiments.
const forgedType = 0x88b6

func networkOrder(n uint16) uint16 { return n>>8 | n<<8 }

// socket is a packet socket on all netdevs of a namespace.
type socket int

func listen(t *testing.T, ns *netns.Namespace, etherType uint16) socket {
	t.Helper()
	var fd int
	must.Succeed(t, ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK,
			int(networkOrder(etherType)))
		return err
	}))

	t.Cleanup(func() { _ = unix.Close(fd) })
	return socket(fd)
}

// count reads all received frames, and counts the frames of the type.
func (s socket) count(t *testing.T, etherType uint16) (frames int) {
	t.Helper()
	const typeAt = 12
	for buffer := make([]byte, 2048); ; {
		n, err := unix.Read(int(s), buffer)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return frames
		case err != nil && !errors.Is(err, unix.ENETDOWN):
			t.Fatal(err)
		case n > typeAt+1 && uint16(buffer[typeAt])<<8|uint16(buffer[typeAt+1]) == etherType:
			frames++
		}
	}
}

// forger sends frames from every netdev of a namespace but loopback.
type forger struct {
	socket  int
	indexes []int
}

func newForger(t *testing.T, ns *netns.Namespace) forger {
	t.Helper()
	links, err := netns.Listed(ns.Handle().LinkList)
	must.Succeed(t, err)
	f := forger{socket: int(listen(t, ns, 0))} // protocol 0 receives nothing
	for _, l := range links {
		if l.Attrs().Name != "lo" {
			f.indexes = append(f.indexes, l.Attrs().Index)
		}
	}

	return f
}

// forge sends a frame with the source address. Errors of netdevs that are down do not matter.
func (f forger) forge(source net.HardwareAddr) {
	frame := append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, source...)
	frame = append(frame, forgedType>>8, forgedType&0xff)
	frame = append(frame, make([]byte, 46)...)
	for _, index := range f.indexes {
		_ = unix.Sendto(f.socket, frame, 0, &unix.SockaddrLinklayer{Ifindex: index, Halen: 6})
	}
}

// setUp sets all netdevs of a namespace up.
func setUp(t *testing.T, ns *netns.Namespace) {
	t.Helper()
	links, err := ns.Handle().LinkList()
	must.Succeed(t, err)
	for _, l := range links {
		must.Succeed(t, ns.Handle().LinkSetUp(l))
	}
}
