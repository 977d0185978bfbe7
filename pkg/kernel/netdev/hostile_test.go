// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	bpflink "github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// macvlan makes a macvlan on a netdev of ns, in the namespace of the file descriptor, and sets it
// up.
func macvlan(
	t testing.TB, ns *netns.Namespace, lower, name string, mode netlink.MacvlanMode, to int,
) *netlink.Macvlan {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex, attrs.Namespace = name, get(t,
		ns, lower).Attrs().Index, netlink.NsFd(to)
	m := &netlink.Macvlan{LinkAttrs: attrs, Mode: mode}
	must.Succeed(t, ns.Handle().LinkAdd(m))
	return m
}

// addAltNames adds as many long altnames to a netdev as the kernel accepts.
func addAltNames(t testing.TB, ns *netns.Namespace, name string) {
	t.Helper()
	l := get(t, ns, name)
	for i := range 496 {
		must.Succeed(t,
			ns.Handle().LinkAddAltName(l, fmt.Sprintf("%03d%s", i, strings.Repeat("x", 124))))
	}
}

// TestHugeAnswers covers pods that make the description of a netdev too large for the netlink
// library.
func TestHugeAnswers(t *testing.T) {
	for name, hostile := range map[string]func(t *testing.T, pod *netns.Namespace){
		"altnames of the interface": func(t *testing.T, pod *netns.Namespace) {
			addAltNames(t, pod, "net1")
		},
		"altnames of lo": func(t *testing.T, pod *netns.Namespace) {
			addAltNames(t, pod, "lo")
		},
		"macvlan sources": func(t *testing.T, pod *netns.Namespace) {
			m := macvlan(t, pod, "net1", "mv0", netlink.MACVLAN_MODE_SOURCE, pod.Fd())
			for i := range 6000 {
				must.Succeed(t,
					pod.Handle().MacvlanMACAddrAdd(m,
						net.HardwareAddr{2, 0, 0, 0, byte(i >> 8), byte(i)}))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			before, place, _ := w.attach(t, function.Interface{Name: "net1"})
			hostile(t, w.pod)
			_, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place)
			must.Succeed(t, err)
			w.checkRestored(t, before)
		})
	}

	// The kernel moves a card's netdev to the host when the namespace ends. The library can then
	// list no netdev of the host.
	t.Run("after the end of the namespace", func(t *testing.T) {
		w := newWorld(t, nil)
		before, place, _ := w.attach(t, function.Interface{Name: "net1"})
		addAltNames(t, w.pod, "net1")

		must.Succeed(t,
			w.pod.Handle().LinkSetNsFd(&netlink.Device{
				LinkAttrs: netlink.LinkAttrs{Index: place.Index},
			}, w.host.Fd()))

		must.Succeed(t, w.pod.Unmount())
		if _, err := w.host.Handle().LinkList(); err == nil {
			t.Error("the library lists the netdevs: nothing is shown")
		}

		_, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place)
		must.Succeed(t, err)
		w.checkRestored(t, before)
	})
}

// TestStackedElsewhere covers netdevs that a pod put on its own netdev and that are in another
// namespace when the pod ends. They are deleted, or the next owner does not get the netdev.
func TestStackedElsewhere(t *testing.T) {
	type accomplice struct {
		where string
		gone  bool // the engine can find the namespace
		fd    func(t *testing.T, w *world) int
	}

	accomplices := []accomplice{
		{"host", true, func(_ *testing.T, w *world) int { return w.host.Fd() }},
		{"process", true, func(t *testing.T, _ *world) int { return process(t) }},
		{"beside the pod", true, func(t *testing.T, w *world) int {
			beside, err := netns.Make(w.pod.Path() + "2")
			must.Succeed(t, err)
			t.Cleanup(func() { must.Succeed(t, beside.Close()) })
			return beside.Fd()
		}},
		{"file descriptor", false, func(t *testing.T, _ *world) int {
			hidden, err := netns.Make(filepath.Join(t.TempDir(), "hidden"))
			must.Succeed(t, err)
			fd, err := unix.Dup(hidden.Fd())
			must.Succeed(t, err)
			t.Cleanup(func() { _ = unix.Close(fd) })
			must.Succeed(t, hidden.Close())
			return fd
		}},
	}

	for _, a := range accomplices {
		for _, moved := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s moved %t", a.where, moved), func(t *testing.T) {
				seeing(t, func(t *testing.T, w *world) {
					stackElsewhere(t, w, a.fd(t, w), moved, a.gone)
				})
			})
		}
	}
}

// stackElsewhere makes a macvlan of the pod in the namespace of the file descriptor, or moves it
// there. If the engine can find the namespace, the release deletes the macvlan. Otherwise the
// release fails.
func stackElsewhere(t *testing.T, w *world, to int, moved, found bool) {
	t.Helper()
	before, place, _ := w.attach(t, function.Interface{Name: "net1"})

	if moved {
		m := macvlan(t, w.pod, "net1", "evil0", netlink.MACVLAN_MODE_BRIDGE, w.pod.Fd())
		must.Succeed(t, w.pod.Handle().LinkSetNsFd(m, to))
	} else {
		macvlan(t, w.pod, "net1", "evil0", netlink.MACVLAN_MODE_PRIVATE, to)
	}

	_, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place)
	if !found {
		if !errors.Is(err, netdev.ErrLeaks) ||
			!strings.Contains(err.Error(), "a macvlan or macvtap") {
			t.Errorf("error %v, want %v", err, netdev.ErrLeaks)
		}
		return
	}

	must.Succeed(t, err)
	w.checkRestored(t, before)
	_, err = w.engine.Restore(t.Context(), netdev.Device{}, before, place)
	must.Succeed(t, err)
}

// TestVLANElsewhere checks that a VLAN of the pod in a namespace that cannot be found is noticed by
// its number.
func TestVLANElsewhere(t *testing.T) {
	for id, protocol := range map[int]netlink.VlanProtocol{
		1: netlink.VLAN_PROTOCOL_8021Q, 4094: netlink.VLAN_PROTOCOL_8021AD,
	} {
		t.Run(fmt.Sprintf("%s %d", protocol, id), func(t *testing.T) {
			seeing(t, func(t *testing.T, w *world) {
				hideOnTop(t, w, &netlink.Vlan{VlanId: id, VlanProtocol: protocol}, "a VLAN")
			})
		})
	}
}

// TestIPVLANElsewhere checks that an ipvlan of the pod in a namespace that cannot be found is
// noticed.
func TestIPVLANElsewhere(t *testing.T) {
	seeing(t, func(t *testing.T, w *world) {
		hideOnTop(t, w, &netlink.IPVlan{Mode: netlink.IPVLAN_MODE_L2}, "an ipvlan")
	})
}

// hideOnTop puts a netdev on the pod's netdev, in a namespace that cannot be found. The release
// fails as long as this upper netdev exists. Its error contains name.
func hideOnTop(t *testing.T, w *world, upper netlink.Link, name string) {
	t.Helper()
	before, place, observed := w.attach(t, function.Interface{Name: "net1"})
	hidden := netns.New(t) // outside the directories in which the engine looks
	addOnTop(t, w.pod, observed.Index, upper, hidden.Fd())

	_, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place)
	if !errors.Is(err, netdev.ErrLeaks) || !strings.Contains(err.Error(), name) {
		t.Errorf("error %v, want %v by %s", err, netdev.ErrLeaks, name)
	}

	must.Succeed(t, hidden.Handle().LinkDel(get(t, hidden, upper.Attrs().Name)))
	start := time.Now()
	_, err = w.engine.Restore(t.Context(), netdev.Device{}, before, place)
	must.Succeed(t, err)
	t.Logf("with nothing on it the release took %s", time.Since(start))
}

// process starts a process in its own network namespace, and returns a file descriptor of this
// namespace.
func process(t *testing.T) int {
	t.Helper()
	sleep := exec.Command("sleep", "600")
	sleep.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL,
	}
	must.Succeed(t, sleep.Start())
	t.Cleanup(func() { _ = sleep.Process.Kill(); _ = sleep.Wait() })

	fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/net", sleep.Process.Pid),
		unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })

	return fd
}

// TestStackedOnHost checks that a netdev with a macvlan of the host is not attached, because the
// release would delete the macvlan.
func TestStackedOnHost(t *testing.T) {
	seeing(t, func(t *testing.T, w *world) {
		macvlan(t, w.host, hostName, "mv0", netlink.MACVLAN_MODE_BRIDGE, w.host.Fd())
		checkInUse(t, w, "a macvlan")
	})

	// Without the program of uppers, the search for a VLAN would take too long before each
	// attachment.
	t.Run("VLAN", func(t *testing.T) {
		w := newWorld(t, nil)
		needsUppers(t, w.engine)
		addOnTop(t, w.host, get(t, w.host, hostName).Attrs().Index, &netlink.Vlan{VlanId: 7},
			w.host.Fd())
		checkInUse(t, w, "a VLAN or another netdev")
	})
}

func checkInUse(t *testing.T, w *world, by string) {
	t.Helper()
	_, _, err := w.engine.Plan(t.Context(), device(), w.pod.Path(),
		function.Interface{Name: "net1"})
	if err == nil || !strings.Contains(err.Error(), "is in use on the host, by "+by) {
		t.Errorf("error %v", err)
	}
}

// TestManyStacked checks that thousands of macvlans are deleted in bounded time, in each call and
// in total.
func TestManyStacked(t *testing.T) {
	const count = 2000
	var end context.CancelFunc
	w := newWorld(t, func(step string) {
		if strings.HasPrefix(step, "delete ") {
			end()
		}
	})

	before, place, _ := w.attach(t, function.Interface{Name: "net1"})
	for i := range count {
		macvlan(t, w.pod, "net1", fmt.Sprintf("mv%d", i), netlink.MACVLAN_MODE_BRIDGE, w.pod.Fd())
	}

	ctx, cancel := context.WithCancel(t.Context())
	end = cancel

	if _, err := w.engine.Restore(ctx, netdev.Device{}, before, place); !errors.Is(err,
		context.Canceled) ||
		!strings.Contains(err.Error(), "2000 netdevs that the pod made on top of it are left") {
		t.Errorf("error %v", err)
	}

	end = func() {}
	const patience = 10 * time.Second
	for try, left := 1, count; ; try++ {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		start := time.Now()
		_, err := w.engine.Restore(ctx, netdev.Device{}, before, place)
		cancel()
		if took := time.Since(start); took > 2*patience {
			t.Errorf("try %d took %s", try, took)
		}
		if err == nil {
			break
		}

		now := len(names(t, w.pod))
		if now >= left {
			t.Fatalf("try %d: %d are left after %d: %v", try, now, left, err)
		}

		left = now
	}

	w.checkRestored(t, before)
}

// program returns a BPF program that returns the verdict for every packet.
func program(t *testing.T, kind ebpf.ProgramType, verdict int32) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: kind, License: "GPL", Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R0, verdict), asm.Return(),
		},
	})

	must.Succeed(t, err)
	t.Cleanup(func() { _ = p.Close() })

	return p
}

func attachTCX(t *testing.T, index int, held bool) {
	t.Helper()
	const next = -1 // TCX_NEXT
	p := program(t, ebpf.SchedCLS, next)
	if !held {
		must.Succeed(t, bpflink.RawAttachProgram(bpflink.RawAttachProgramOptions{
			Target: index, Program: p, Attach: ebpf.AttachTCXIngress,
		}))
		return
	}

	l, err := bpflink.AttachTCX(bpflink.TCXOptions{
		Interface: index, Program: p, Attach: ebpf.AttachTCXEgress,
	})
	must.Succeed(t, err)
	t.Cleanup(func() { _ = l.Close() })
}

func attachXDPLink(t *testing.T, index int) {
	t.Helper()
	const pass = 2 // XDP_PASS
	l, err := bpflink.AttachXDP(bpflink.XDPOptions{
		Interface: index, Program: program(t, ebpf.XDP, pass), Flags: bpflink.XDPGenericMode,
	})
	must.Succeed(t, err)
	t.Cleanup(func() { _ = l.Close() })
}

// TestProgramsOfThePod checks that no BPF program of the pod stays on the netdev, no matter what
// holds the program.
func TestProgramsOfThePod(t *testing.T) {
	for name, attach := range map[string]func(t *testing.T, index int){
		"tcx":         func(t *testing.T, index int) { attachTCX(t, index, false) },
		"tcx by link": func(t *testing.T, index int) { attachTCX(t, index, true) },
		"XDP by link": attachXDPLink,
		"all": func(t *testing.T, index int) {
			attachTCX(t, index, false)
			attachTCX(t, index, true)
			attachXDPLink(t, index)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			before, place, observed := w.attach(t, function.Interface{Name: "net1"})
			must.Succeed(t, w.pod.Do(func() error { attach(t, observed.Index); return nil }))
			_, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place)
			must.Succeed(t, err)
			w.checkRestored(t, before) // its Plan would refuse a netdev with programs
		})
	}
}

// TestProgramsOnTheHost checks that a netdev with a tcx program of the host is not attached.
func TestProgramsOnTheHost(t *testing.T) {
	w := newWorld(t, nil)
	index := get(t, w.host, hostName).Attrs().Index
	must.Succeed(t, w.host.Do(func() error { attachTCX(t, index, false); return nil }))
	_, _, err := w.engine.Plan(t.Context(), device(), w.pod.Path(),
		function.Interface{Name: "net1"})
	if err == nil ||
		!strings.Contains(err.Error(), "is in use on the host, by TCXIngress program") {
		t.Errorf("error %v", err)
	}
}
