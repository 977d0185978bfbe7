// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

// When a driver of simnic's VFs reads the GUIDs: values of the file simnic_infiniband.
const (
	readWhenBound = "1"
	readAtOnce    = "2"
)

const (
	nodeGUID, portGUID           = "02:00:00:00:00:00:00:10", "02:00:00:00:00:00:00:11"
	podsNodeGUID, podsPortGUID   = "02:00:00:00:00:00:00:20", "02:00:00:00:00:00:00:21"
	infiniBandFile, interfaceFor = "simnic_infiniband", "net1"
)

// playInfiniBand makes a PF one of InfiniBand with two VFs, until the test ends.
func playInfiniBand(t *testing.T, pf pci.Address, reads string) {
	t.Helper()
	numVFs := card.Attribute(t, pf, "sriov_numvfs")
	become := func(numVFs, mode string) {
		card.SetAttribute(t, pf, "sriov_numvfs", "0")
		uplink, err := netlink.LinkByName(card.Netdev(pf))
		must.Succeed(t, err)
		must.Succeed(t, netlink.LinkSetDown(uplink))
		card.SetAttribute(t, pf, infiniBandFile, mode)
		must.Succeed(t, netlink.LinkSetUp(uplink))
		card.SetAttribute(t, pf, "sriov_numvfs", numVFs)
	}

	become("2", reads)
	t.Cleanup(func() { become(numVFs, "0") })
}

// identify sets the GUIDs of a VF as an administrator does, and binds its driver again.
func identify(t *testing.T, pf pci.Address, index int, node, port string) {
	t.Helper()
	uplink, err := netlink.LinkByName(card.Netdev(pf))
	must.Succeed(t, err)
	parse := func(text string) net.HardwareAddr {
		address, err := net.ParseMAC(text)
		must.Succeed(t, err)
		return address
	}
	must.Succeed(t, netlink.LinkSetVfNodeGUID(uplink, index, parse(node)))
	must.Succeed(t, netlink.LinkSetVfPortGUID(uplink, index, parse(port)))

	vf := card.VF(t, pf, index)
	driver := filepath.Join("/sys/bus/pci/drivers", card.Link(vf, "driver"))
	card.Set(t, filepath.Join(driver, "unbind"), string(vf))
	card.Set(t, filepath.Join(driver, "bind"), string(vf))
}

func asking(node, port function.GUID) function.Interface {
	return function.Interface{Name: interfaceFor, VF: &function.VFConfig{
		NodeGUID: node, PortGUID: port,
	}}
}

// TestInfiniBandRefused covers what an InfiniBand VF cannot be asked for, and what an Ethernet VF
// cannot.
func TestInfiniBandRefused(t *testing.T) {
	card.InGuest(t, "simnic")
	engine, err := netdev.New(netdev.Options{})
	must.Succeed(t, err)
	defer engine.Close()
	pf := card.PFs(t)[0]

	refused := func(t *testing.T, want function.Interface, says string) {
		t.Helper()
		_, err := take(t, engine, deviceOf(t, pf, 0), netns.New(t).Path(), want)
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("error %v, want %q", err, says)
		}
	}
	refused(t, asking(podsNodeGUID, podsPortGUID), "is no InfiniBand PF")

	playInfiniBand(t, pf, readWhenBound)
	refused(t, asking(podsNodeGUID, ""), "tells node GUID 00:00:00:00:00:00:00:00")
	refused(t, function.Interface{Name: interfaceFor, MAC: "02:00:00:00:00:01"},
		"an InfiniBand interface has no MAC address")

	identify(t, pf, 0, nodeGUID, portGUID)
	was := card.Attribute(t, pf, infiniBandFile)
	refused(t, asking(podsNodeGUID, podsPortGUID),
		"has "+portGUID+", and not "+podsPortGUID+": its driver has not read it")
	if diff := cmp.Diff(was, card.Attribute(t, pf, infiniBandFile)); diff != "" {
		t.Errorf("GUIDs (-before +after):\n%s", diff)
	}

	held, err := take(t, engine, deviceOf(t, pf, 0), netns.New(t).Path(),
		asking(nodeGUID, portGUID))
	must.Succeed(t, errors.Join(err, held.release()))
}

// TestInfiniBand kills the engine at each step of an attachment with GUIDs, and at each step of its
// release. The next engine restores everything.
func TestInfiniBand(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	playInfiniBand(t, pf, readAtOnce)
	identify(t, pf, 0, nodeGUID, portGUID)
	identify(t, pf, 1, "02:00:00:00:00:00:00:30", "02:00:00:00:00:00:00:31")

	steps := newInfiniBandLife(t, pf, 0).all(t)
	t.Logf("%d steps", steps)
	for step := 1; step <= steps; step++ {
		t.Run(fmt.Sprintf("step %d", step), func(t *testing.T) {
			newInfiniBandLife(t, pf, step).all(t)
		})
	}
}

// infiniBandLife is the life of a VF with an engine that is killed at a step, or not if it is 0.
type infiniBandLife struct {
	pf           pci.Address
	killed, next *netdev.Engine
	count        int
	was          string
}

type killedAtStep struct{}

func newInfiniBandLife(t *testing.T, pf pci.Address, step int) *infiniBandLife {
	t.Helper()
	l := &infiniBandLife{pf: pf, was: card.Attribute(t, pf, infiniBandFile)}
	open := func(trace func(string)) *netdev.Engine {
		engine, err := netdev.New(netdev.Options{Trace: trace})
		must.Succeed(t, err)
		t.Cleanup(func() { _ = engine.Close() })
		return engine
	}
	l.next = open(nil)
	l.killed = open(func(string) {
		if l.count++; l.count == step {
			panic(killedAtStep{})
		}
	})
	return l
}

// all leads the life, and returns the number of its steps.
func (l *infiniBandLife) all(t *testing.T) int {
	t.Helper()
	device, pod := deviceOf(t, l.pf, 0), netns.New(t)
	want := asking(podsNodeGUID, podsPortGUID)
	before, place, err := l.killed.Plan(t.Context(), device, pod.Path(), want)
	must.Succeed(t, err)

	var observed netdev.Observed
	died := dies(func() {
		observed, err = l.killed.Attach(t.Context(), device, before, place, want)
	})
	if !died {
		must.Succeed(t, err)
		l.checkAttached(t, device, netdev.Attached{
			Before: before, Place: place, Want: want, Observed: observed,
		})
		died = dies(func() {
			_, err = l.killed.Restore(t.Context(), netdev.Device{PF: device.PF}, before, place)
			must.Succeed(t, err)
		})
	}
	if died {
		restored, err := l.next.Restore(t.Context(), netdev.Device{PF: device.PF}, before, place)
		must.Succeed(t, err)
		if len(restored.Notes) > 0 {
			t.Errorf("notes %q", restored.Notes)
		}
	}

	l.checkRestored(t, device, before)
	return l.count
}

// dies reports whether the engine was killed meanwhile.
func dies(meanwhile func()) (died bool) {
	defer func() {
		switch reason := recover(); reason.(type) {
		case nil:
		case killedAtStep:
			died = true
		default:
			panic(reason)
		}
	}()
	meanwhile()
	return false
}

func (l *infiniBandLife) checkAttached(
	t *testing.T, device netdev.Device, a netdev.Attached,
) {
	t.Helper()
	text := card.Attribute(t, l.pf, infiniBandFile)
	if want := "0 node 0200000000000020 port 0200000000000021"; !strings.Contains(text, want) {
		t.Errorf("simnic has %s, want %s", text, want)
	}
	if got := a.Observed.MAC.PortGUID(); got != podsPortGUID {
		t.Errorf("interface has port GUID %s in %s", got, a.Observed.MAC)
	}
	differences, err := l.next.Check(t.Context(), device, a)
	must.Succeed(t, err)
	if len(differences) > 0 {
		t.Errorf("check: %q", differences)
	}
}

func (l *infiniBandLife) checkRestored(
	t *testing.T, device netdev.Device, before netdev.Snapshot,
) {
	t.Helper()
	if diff := cmp.Diff(l.was, card.Attribute(t, l.pf, infiniBandFile)); diff != "" {
		t.Errorf("GUIDs (-before +after):\n%s", diff)
	}
	after, _, err := l.next.Plan(t.Context(), device, netns.New(t).Path(),
		asking(podsNodeGUID, podsPortGUID))
	must.Succeed(t, err)
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("snapshot (-before +after):\n%s", diff)
	}
}
