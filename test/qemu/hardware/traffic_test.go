// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

// deviceOf returns a VF as a device of package netdev.
func deviceOf(t *testing.T, pf pci.Address, index int) netdev.Device {
	t.Helper()
	return netdev.Device{
		Name: card.Netdev(card.VF(t, pf, index)),
		PF:   &netdev.PF{Name: card.Netdev(pf), Address: string(pf), VF: index},
	}
}

// taken is a Function that the product's engine took to a pod.
type taken struct {
	engine   *netdev.Engine
	device   netdev.Device
	before   netdev.Snapshot
	place    netdev.Place
	observed netdev.Observed
}

// take attaches a Function to a namespace, or returns the engine's error.
func take(
	t *testing.T, engine *netdev.Engine, device netdev.Device, netNS string,
	want function.Interface,
) (_ taken, err error) {
	t.Helper()
	held := taken{engine: engine, device: device}
	if held.before, held.place, err = engine.Plan(t.Context(), device, netNS, want); err != nil {
		return held, err
	}
	held.observed, err = engine.Attach(t.Context(), device, held.before, held.place, want)
	return held, err
}

// release undoes take. It works after the test's context has ended, too.
func (h taken) release() error {
	_, err := h.engine.Restore(context.Background(), netdev.Device{PF: h.device.PF},
		h.before, h.place)
	return err
}

// attachedAs takes a Function to a pod of its own, as net1 with 192.0.2.<host>. It undoes
// everything when the test ends.
func attachedAs(
	t *testing.T, engine *netdev.Engine, device netdev.Device, host byte, want function.Interface,
) pod {
	t.Helper()
	address := netip.AddrFrom4([4]byte{192, 0, 2, host})
	want.Name, want.Addresses = "net1", []netip.Prefix{netip.PrefixFrom(address, 24)}
	p := pod{Namespace: netns.New(t), ip: address.AsSlice()}
	held, err := take(t, engine, device, p.Path(), want)
	must.Succeed(t, err)

	t.Cleanup(func() {
		if err := held.release(); err != nil {
			t.Errorf("release of %s: %v", device.Name, err)
		}
	})

	p.mac = held.observed.MAC.HardwareAddr()
	return p
}

// attached does the same as attachedAs for a VF whose settings at the PF alone matter.
func attached(
	t *testing.T, engine *netdev.Engine, pf pci.Address, index int, host byte,
	config *function.VFConfig,
) pod {
	t.Helper()
	return attachedAs(t, engine, deviceOf(t, pf, index), host, function.Interface{VF: config})
}

// TestTrafficVLAN checks that the VLAN that a PF enforces for a VF keeps networks apart, on one
// card and across two cards on one wire.
func TestTrafficVLAN(t *testing.T) {
	card.InGuest(t, "igb")
	pfs := card.PFs(t)
	if len(pfs) < 2 {
		t.Fatalf("the guest has %d cards, want 2", len(pfs))
	}

	engine, err := netdev.New(netdev.Options{})
	must.Succeed(t, err)
	defer engine.Close()

	tag := func(vlan int) *function.VFConfig { return &function.VFConfig{VLAN: &vlan} }
	t.Run("same VLAN", func(t *testing.T) {
		a, b := attached(t, engine, pfs[0], 0, 1, tag(100)), attached(t, engine, pfs[0], 1,
			2, tag(100))
		c := attached(t, engine, pfs[1], 0, 3, tag(100))
		reach(t, a, b)
		reach(t, a, c)
		other, none := attached(t, engine, pfs[0], 2, 4, tag(200)), attached(t, engine,
			pfs[1], 1, 5, nil)
		apart(t, a, other) // on one card
		apart(t, c, other) // across two
		apart(t, c, none)
		apart(t, a, none)
	})

	t.Run("no VLAN, after release", func(t *testing.T) {
		a, b := attached(t, engine, pfs[0], 0, 1, nil), attached(t, engine, pfs[0], 1, 2, nil)
		reach(t, a, b)
		reach(t, a, attached(t, engine, pfs[1], 0, 3, nil))
	})
}

func reach(t *testing.T, from, to pod) {
	t.Helper()
	if !from.reaches(t, to, patience) {
		t.Errorf("%s does not reach %s", from.ip, to.ip)
	}
}

func apart(t *testing.T, from, to pod) {
	t.Helper()
	if from.reaches(t, to, time.Second) {
		t.Errorf("%s reaches %s", from.ip, to.ip)
	}
}

// TestTrafficSpoofCheck checks that frames that a VF sends with another MAC pass only if the spoof
// check is off. It uses simnic's VFs, because QEMU's igb accepts the setting and checks nothing.
func TestTrafficSpoofCheck(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	engine, err := netdev.New(netdev.Options{})
	must.Succeed(t, err)
	defer engine.Close()

	for _, test := range []struct {
		name  string
		check bool
	}{{"off", false}, {"on", true}} {
		t.Run(test.name, func(t *testing.T) {
			a := attached(t, engine, pf, 0, 1, &function.VFConfig{SpoofCheck: &test.check})
			b := attached(t, engine, pf, 1, 2, nil)
			reach(t, a, b) // waits for the carrier
			to, from := b.frames(t), a.frames(t)
			own := append([]byte{}, a.mac...)
			spoofed := []byte{2, 0, 0, 0, 0, 0x99}
			within := patience
			if test.check {
				within = time.Second
			}

			if got := passes(t, from, to, b.mac, own, patience); !got {
				t.Errorf("a frame under the VF's own MAC does not come through")
			}
			if got := passes(t, from, to, b.mac, spoofed, within); got == test.check {
				t.Errorf("a frame under another MAC comes through: %v", got)
			}
		})
	}
}

// etherType is the EtherType of the test's frames: IEEE 802 local experimental 1.
const etherType = 0x88b5

// frames returns a socket for the test's frames on the pod's interface.
func (p pod) frames(t *testing.T) int {
	t.Helper()
	return frames(t, p.Namespace, "net1")
}

// frames returns a socket for the test's frames on a netdev.
func frames(t *testing.T, ns *netns.Namespace, netdev string) int {
	t.Helper()
	l, err := ns.Handle().LinkByName(netdev)
	must.Succeed(t, err)
	const networkOrder = etherType>>8 | etherType&0xff<<8
	fd := -1
	must.Succeed(t, ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, networkOrder)
		return err
	}))

	t.Cleanup(func() { _ = unix.Close(fd) })
	must.Succeed(t,
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: networkOrder, Ifindex: l.Attrs().Index}))
	wait := unix.NsecToTimeval((100 * time.Millisecond).Nanoseconds())
	must.Succeed(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait))

	return fd
}

// passes reports whether one of a few frames from this MAC arrives.
func passes(t *testing.T, from, to int, target, source []byte, within time.Duration) bool {
	t.Helper()
	frame := make([]byte, 60)
	copy(frame, target)
	copy(frame[6:], source)
	frame[12], frame[13] = etherType>>8, etherType&0xff
	buffer := make([]byte, 1500)
	for end := time.Now().Add(within); time.Now().Before(end); {
		if _, err := unix.Write(from, frame); err != nil {
			t.Fatalf("send: %v", err)
		}

		n, err := unix.Read(to, buffer)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}

		must.Succeed(t, err)
		if n >= 12 && string(buffer[6:12]) == string(source) {
			return true
		}
	}

	return false
}
