// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// seeing runs a test with an engine that uses the program of uppers, and with an engine that must
// send probes.
func seeing(t *testing.T, test func(t *testing.T, w *world)) {
	t.Helper()
	t.Run("seen", func(t *testing.T) {
		w := newWorld(t, nil)
		needsUppers(t, w.engine)
		test(t, w)
	})

	t.Run("probed", func(t *testing.T) {
		w := newWorld(t, nil)
		w.engine.WithoutUppers()
		test(t, w)
	})
}

func needsUppers(t testing.TB, engine *netdev.Engine) {
	t.Helper()
	if err := engine.SeesUppers(); err != nil {
		t.Skipf("needs Linux 6.2 with BTF: %v", err)
	}
}

// addOnTop makes a netdev on top of a netdev of ns, in the namespace of the file descriptor. It
// skips the test if the kernel does not support this kind of netdev.
func addOnTop(t *testing.T, ns *netns.Namespace, lower int, upper netlink.Link, to int) {
	t.Helper()
	*upper.Attrs() = netlink.NewLinkAttrs()
	attrs := upper.Attrs()
	attrs.Name, attrs.ParentIndex, attrs.Namespace = "evil0", lower, netlink.NsFd(to)
	err := ns.Handle().LinkAdd(upper)
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.Skipf("the kernel has no netdevs of kind %s; the guest igb of test/qemu has them",
			upper.Type())
	}

	must.Succeed(t, err)
}

// TestUppers checks that an upper netdev of any kind in any namespace is noticed.
func TestUppers(t *testing.T) {
	inHost := func(t *testing.T, w *world) int { t.Helper(); return w.host.Fd() }
	elsewhere := func(t *testing.T, _ *world) int { t.Helper(); return netns.New(t).Fd() }
	for name, test := range map[string]struct {
		upper netlink.Link // nil for no upper netdev
		where func(t *testing.T, w *world) int
	}{
		"nothing":           {},
		"macvlan":           {&netlink.Macvlan{Mode: netlink.MACVLAN_MODE_BRIDGE}, inHost},
		"macvlan elsewhere": {&netlink.Macvlan{Mode: netlink.MACVLAN_MODE_PRIVATE}, elsewhere},
		"VLAN":              {&netlink.Vlan{VlanId: 7}, inHost},
		"VLAN elsewhere": {
			&netlink.Vlan{VlanId: 7, VlanProtocol: netlink.VLAN_PROTOCOL_8021AD}, elsewhere,
		},
		"ipvlan elsewhere": {&netlink.IPVlan{Mode: netlink.IPVLAN_MODE_L2}, elsewhere},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			needsUppers(t, w.engine)
			if test.upper != nil {
				addOnTop(t, w.host, get(t, w.host, hostName).Attrs().Index, test.upper,
					test.where(t, w))
			}
			checkUpper(t, w, test.upper != nil)
		})
	}

	t.Run("bridge", func(t *testing.T) {
		w := newWorld(t, nil)
		needsUppers(t, w.engine)
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "br0"
		bridge := &netlink.Bridge{LinkAttrs: attrs}
		must.Succeed(t, w.host.Handle().LinkAdd(bridge))
		must.Succeed(t, w.host.Handle().LinkSetMaster(get(t, w.host, hostName), bridge))
		checkUpper(t, w, true)
		must.Succeed(t, w.host.Handle().LinkSetNoMaster(get(t, w.host, hostName)))
		checkUpper(t, w, false)
	})
}

func checkUpper(t *testing.T, w *world, want bool) {
	t.Helper()
	if has, known, err := w.engine.Upper(hostName); has != want || !known || err != nil {
		t.Errorf("has an upper one: %t, known %t, %v, want %t", has, known, err, want)
	}
}

// TestUppersUnseen checks that an engine without the program of uppers reports this, and still
// gives correct answers.
func TestUppersUnseen(t *testing.T) {
	w := newWorld(t, nil)
	w.engine.WithoutUppers()
	if err := w.engine.SeesUppers(); err == nil {
		t.Error("no error")
	}
	if has, known, err := w.engine.Upper(hostName); has || known || err != nil {
		t.Errorf("has an upper one: %t, known %t, %v", has, known, err)
	}
}

// TestUppersFail checks that a failure of the program is not taken for a netdev without uppers. The
// release fails and is tried again, and the netdev cannot be attached meanwhile.
func TestUppersFail(t *testing.T) {
	w := newWorld(t, nil)
	needsUppers(t, w.engine)
	before, place, _ := w.attach(t, function.Interface{Name: "net1"})
	mend, err := w.engine.BreakUppers()
	must.Succeed(t, err)

	const says = "look for netdevs on top of"
	_, err = w.engine.Restore(t.Context(), netdev.Device{}, before, place)
	if err == nil || !strings.Contains(err.Error(), says) || errors.Is(err, netdev.ErrLeaks) {
		t.Errorf("release: error %v, want %q, and to try again", err, says)
	}

	device := netdev.Device{Name: hostName}
	_, _, err = w.engine.Plan(t.Context(), device, w.pod.Path(), function.Interface{Name: "net1"})
	if err == nil || !strings.Contains(err.Error(), says) {
		t.Errorf("plan: error %v, want %q", err, says)
	}

	mend()
	_, err = w.engine.Restore(t.Context(), netdev.Device{}, before, place)
	must.Succeed(t, err)
	w.checkRestored(t, before)
}

// BenchmarkUppers measures how long each release takes to prove that nothing is stacked on a
// netdev.
func BenchmarkUppers(b *testing.B) {
	w := newWorld(b, nil)
	needsUppers(b, w.engine)
	for b.Loop() {
		if has, known, err := w.engine.Upper(hostName); has || !known || err != nil {
			b.Fatalf("has an upper one: %t, known %t, %v", has, known, err)
		}
	}
}

// BenchmarkLoadUppers measures the additional time of the first proof of an engine.
func BenchmarkLoadUppers(b *testing.B) {
	host := netns.New(b)
	for b.Loop() {
		engine, err := netdev.New(netdev.Options{HostNetNS: host.Path()})
		must.Succeed(b, err)
		needsUppers(b, engine)
		must.Succeed(b, engine.Close())
	}
}
