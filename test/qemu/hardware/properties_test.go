// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

// properties are the properties of a netdev on the host and of its VF at the PF, as the netlink
// package reads them, and not the product.
type properties struct {
	Name, Alias, MAC string
	AltNames         []string
	MTU, TxQLen      int
	Flags            uint32
	VF               netlink.VfInfo
}

const adminFlags = unix.IFF_UP | unix.IFF_NOARP | unix.IFF_PROMISC | unix.IFF_ALLMULTI

// read reads a VF's properties. For a Function without a PF it reads only the netdev's own
// properties. The netdev is found by its device.
func read(t *testing.T, function pci.Address, pf *netdev.PF) properties {
	t.Helper()
	a := linkOf(t, card.Netdev(function)).Attrs()
	p := properties{
		Name: a.Name, Alias: a.Alias, MAC: a.HardwareAddr.String(), AltNames: a.AltNames,
		MTU: a.MTU, TxQLen: a.TxQLen,
		Flags: a.RawFlags & adminFlags,
	}

	if pf != nil {
		p.VF = enforced(t, pf)
	}

	return p
}

// enforced returns the settings that a PF enforces for a VF.
func enforced(t *testing.T, pf *netdev.PF) netlink.VfInfo {
	t.Helper()
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	must.Succeed(t, err)
	defer handle.Close()

	l, err := handle.LinkByName(pf.Name)
	must.Succeed(t, err)

	for _, vf := range l.Attrs().Vfs {
		if vf.ID == pf.VF {
			vf.RxPackets, vf.TxPackets, vf.RxBytes, vf.TxBytes = 0, 0, 0, 0
			vf.Multicast, vf.Broadcast, vf.RxDropped, vf.TxDropped = 0, 0, 0, 0
			return vf
		}
	}

	t.Fatalf("PF %s tells nothing about VF %d", pf.Name, pf.VF)
	return netlink.VfInfo{}
}

// unchanged returns the differences from the properties before.
func unchanged(t *testing.T, function pci.Address, pf *netdev.PF, before properties) {
	t.Helper()
	if diff := cmp.Diff(before, read(t, function, pf)); diff != "" {
		t.Errorf("not as it was (-want +got):\n%s", diff)
	}
}

// carrier waits until a PF has its carrier, because igb refuses rates without a carrier.
func carrier(t *testing.T, pf pci.Address) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if linkOf(t, card.Netdev(pf)).Attrs().RawFlags&unix.IFF_LOWER_UP != 0 {
			return
		}
	}
	t.Fatalf("PF %s has no carrier", pf)
}

// everything returns all settings that igb supports.
func everything() function.Interface {
	return function.Interface{
		Name: "net1", MTU: 1400, MAC: "02:00:00:00:00:11",
		VF: &function.VFConfig{
			VLAN: new(100), QoS: new(3), Proto: "802.1q", SpoofCheck: new(false), Trust: new(true),
			MaxTxRate: new(100),
		},
	}
}

// untrusted returns everything for a VF that is not trusted and so may not change its MAC.
func untrusted() function.Interface {
	want := everything()
	want.VF.Trust = nil
	return want
}

// TestProperties checks that the settings that a pod may request for a VF, and for a PF, are
// applied, work, and are undone, on a driver that treats most of them in its own way.
func TestProperties(t *testing.T) {
	card.InGuest(t, "igb")
	pfs := card.PFs(t)
	pf := pfs[0]
	carrier(t, pf)
	engine, err := netdev.New(netdev.Options{Trace: func(step string) { t.Log(step) }})
	must.Succeed(t, err)
	defer engine.Close()

	vf, device := card.VF(t, pf, 0), deviceOf(t, pf, 0)
	must.Succeed(t, netlink.LinkSetAlias(linkOf(t, device.Name), "the host's"))
	must.Succeed(t, netlink.LinkAddAltName(linkOf(t, device.Name), "host-vf0"))

	t.Cleanup(func() {
		must.Succeed(t, netlink.LinkSetAlias(linkOf(t, card.Netdev(vf)), ""))
		must.Succeed(t, netlink.LinkDelAltName(linkOf(t, card.Netdev(vf)), "host-vf0"))
	})

	for _, up := range []bool{false, true} {
		name := "all properties of a VF that is down"
		if up {
			name = "all properties of a VF that is up"
			must.Succeed(t, netlink.LinkSetUp(linkOf(t, device.Name)))
		}

		before := read(t, vf, device.PF)
		t.Run(name+" are set and put back", func(t *testing.T) {
			held, err := take(t, engine, device, netns.New(t).Path(), everything())
			must.Succeed(t, err)
			areSet(t, device.PF, held.observed)
			must.Succeed(t, held.release())
			unchanged(t, vf, device.PF, before)
		})

		t.Run(name+" are put back when its network namespace is deleted", func(t *testing.T) {
			deleted(t, engine, device, everything())
			unchanged(t, vf, device.PF, before)
			deleted(t, engine, device, untrusted())
			unchanged(t, vf, device.PF, before)
		})

		t.Run(name+" stay as they are when one is refused", func(t *testing.T) {
			refused(t, engine, device, func() { unchanged(t, vf, device.PF, before) })
		})
	}

	must.Succeed(t, netlink.LinkSetDown(linkOf(t, device.Name)))

	t.Run("VF whose attachment ends at any step is put back", func(t *testing.T) {
		endsAnywhere(t, vf, device)
	})
	t.Run("pods have traffic under the MACs they ask for", func(t *testing.T) {
		ownMACs(t, engine, pfs)
	})
	t.Run("rate waits for the carrier of the PF", func(t *testing.T) {
		rateWaits(t, engine, vf, device)
	})
	t.Run("PF without VFs is a pod's, and is put back", func(t *testing.T) {
		wholeCard(t, engine, pfs[1])
	})
}

// areSet compares the settings in effect with everything.
func areSet(t *testing.T, pf *netdev.PF, observed netdev.Observed) {
	t.Helper()
	want := everything()
	if observed.Name != want.Name || observed.MTU != want.MTU || observed.MAC != want.MAC {
		t.Errorf("in the pod: %+v", observed)
	}

	got := enforced(t, pf)
	got.LinkState, got.VlanProto = 0, 0
	wantVF := netlink.VfInfo{
		ID: pf.VF, Mac: want.MAC.HardwareAddr(), Vlan: 100, Qos: 3, TxRate: 100,
		MaxTxRate: 100, Trust: 1,
		RssQuery: got.RssQuery,
	}

	if diff := cmp.Diff(wantVF, got); diff != "" {
		t.Errorf("enforced (-want +got):\n%s", diff)
	}
}

// deleted ends the namespace that has the pod's interface. The kernel returns the interface to the
// host, down and with the pod's name. Then the VF is released.
func deleted(t *testing.T, engine *netdev.Engine, device netdev.Device, want function.Interface) {
	t.Helper()
	var held taken
	t.Run("pod", func(t *testing.T) { // the namespace ends with this subtest
		var err error
		held, err = take(t, engine, device, netns.New(t).Path(), want)
		must.Succeed(t, err)
	})

	// The kernel ends namespaces in the background.
	back := wait.Backoff{Duration: 10 * time.Millisecond, Factor: 1.5, Steps: 14}
	var err error
	_ = wait.ExponentialBackoff(back, func() (bool, error) {
		err = held.release()
		return err == nil, nil
	})

	must.Succeed(t, err)
}

// refused requests settings that igb does not support, together with supported ones. unchanged is
// called after each refusal.
func refused(t *testing.T, engine *netdev.Engine, device netdev.Device, unchanged func()) {
	t.Helper()
	for field, ask := range map[string]func(*function.VFConfig){
		"vf.minTxRate, vf.maxTxRate": func(c *function.VFConfig) { c.MinTxRate = new(10) },
		"vf.vlanProtocol":            func(c *function.VFConfig) { c.Proto = "802.1ad" },
		"vf.linkState":               func(c *function.VFConfig) { c.LinkState = "enable" },
		// the link has 1000 Mbit/s
		"vf.maxTxRate": func(c *function.VFConfig) { c.MaxTxRate = new(1001) },
	} {
		want := everything()
		ask(want.VF)
		begin := time.Now()
		_, err := take(t, engine, device, netns.New(t).Path(), want)
		t.Logf("after %s: %v", time.Since(begin).Round(time.Millisecond), err)
		says := ": PF " + device.PF.Name + " (" + device.PF.Address + ") refuses "
		if err == nil || !strings.Contains(err.Error(), field+says) {
			t.Errorf("error %v, want one with %q", err, field+says)
		}

		unchanged()
	}
}

// endsAnywhere ends an attachment at each of its steps without undoing it, and releases the VF with
// another engine.
func endsAnywhere(t *testing.T, vf pci.Address, device netdev.Device) {
	t.Helper()
	before := read(t, vf, device.PF)
	ended := true
	for step := 1; ended; step++ {
		type end struct{}
		count, last := 0, ""
		engine, err := netdev.New(netdev.Options{Trace: func(s string) {
			if count++; count == step {
				last = s
				panic(end{})
			}
		}})

		must.Succeed(t, err)
		want := untrusted()
		snapshot, place, err := engine.Plan(t.Context(), device, netns.New(t).Path(), want)
		must.Succeed(t, err)

		ended = func() (ended bool) {
			defer func() { _, ended = recover().(end) }()
			_, err := engine.Attach(t.Context(), device, snapshot, place, want)
			must.Succeed(t, err)
			return
		}()

		must.Succeed(t, engine.Close())
		next, err := netdev.New(netdev.Options{})
		must.Succeed(t, err)
		if _, err := next.Restore(t.Context(), netdev.Device{PF: device.PF}, snapshot,
			place); err != nil {
			t.Errorf("ended at step %d, %q: %v", step, last, err)
		}

		must.Succeed(t, next.Close())
		unchanged(t, vf, device.PF, before)
		if !ended && step < 7 {
			t.Errorf("only %d steps were tried", step)
		}
	}
}

// ownMACs attaches two VFs of one card, and one of another, to pods that request MACs.
func ownMACs(t *testing.T, engine *netdev.Engine, pfs []pci.Address) {
	t.Helper()
	var functions []netdev.Device
	var before []properties
	// A netdev that is up gets the MAC when it leaves the host, which sets it down.
	up := linkOf(t, deviceOf(t, pfs[0], 1).Name)
	must.Succeed(t, netlink.LinkSetUp(up))
	defer func() { must.Succeed(t, netlink.LinkSetDown(up)) }()

	for _, f := range []struct {
		pf    pci.Address
		index int
	}{{pfs[0], 0}, {pfs[0], 1}, {pfs[1], 0}} {
		functions = append(functions, deviceOf(t, f.pf, f.index))
		before = append(before, read(t, card.VF(t, f.pf, f.index), functions[len(functions)-1].PF))
	}

	pods := func(t *testing.T, config *function.VFConfig, macs ...function.MAC) {
		var pods []pod
		for i, mac := range macs {
			pods = append(pods,
				attachedAs(t, engine, functions[i], byte(i+1),
					function.Interface{MAC: mac, VF: config}))
			if mac != "" && pods[i].mac.String() != string(mac) {
				t.Errorf("MAC %s, want %s", pods[i].mac, mac)
			}
		}

		reach(t, pods[0], pods[1])
		reach(t, pods[0], pods[2])
	}

	t.Run("as asked for", func(t *testing.T) {
		pods(t, nil, "02:00:00:00:00:21", "02:00:00:00:00:22", "02:00:00:00:00:23")
	})
	t.Run("again, others", func(t *testing.T) {
		pods(t, nil, "02:00:00:00:00:32", "02:00:00:00:00:33", "02:00:00:00:00:31")
	})

	t.Run("trusted", func(t *testing.T) {
		pods(t, &function.VFConfig{Trust: new(true)}, "02:00:00:00:00:41", "02:00:00:00:00:42",
			"02:00:00:00:00:43")
	})

	t.Run("their own", func(t *testing.T) { pods(t, nil, "", "", "") })
	for i, f := range functions {
		address := card.VF(t, pci.Address(f.PF.Address), f.PF.VF)
		unchanged(t, address, f.PF, before[i])
	}
}

// rateWaits takes the carrier away, as a reset of the card does.
func rateWaits(t *testing.T, engine *netdev.Engine, vf pci.Address, device netdev.Device) {
	t.Helper()
	before := read(t, vf, device.PF)
	want := function.Interface{Name: "net1", VF: &function.VFConfig{MaxTxRate: new(100)}}
	pf := linkOf(t, device.PF.Name)
	must.Succeed(t, netlink.LinkSetDown(pf))
	begin := time.Now()
	_, err := take(t, engine, device, netns.New(t).Path(), want)
	for _, says := range []string{
		"vf.maxTxRate: PF " + device.PF.Name, "the PF is administratively down",
	} {
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("PF that is down: error %v, want one with %q", err, says)
		}
	}

	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("the PF is down, yet it was waited for %s", took)
	}

	unchanged(t, vf, device.PF, before)
	must.Succeed(t, netlink.LinkSetUp(pf))
	begin = time.Now()
	held, err := take(t, engine, device, netns.New(t).Path(), want)
	must.Succeed(t, err)
	t.Logf("the carrier came, and the VF was attached, after %s",
		time.Since(begin).Round(time.Millisecond))
	if got := enforced(t, device.PF); got.MaxTxRate != 100 {
		t.Errorf("enforced: %+v", got)
	}

	must.Succeed(t, netlink.LinkSetDown(pf))
	err = held.release()
	must.Succeed(t, netlink.LinkSetUp(pf))
	carrier(t, pci.Address(device.PF.Address))

	if err == nil {
		// QEMU's card sets its link up some 500 ms after the driver set it down.
		t.Log("the card took the rate although the PF was down")
		unchanged(t, vf, device.PF, before)
		return
	}

	if says := "max_tx_rate is 100, was 0"; !strings.Contains(err.Error(), says) {
		t.Errorf("release while the PF is down: error %v, want one with %q", err, says)
	}

	must.Succeed(t, held.release())
	unchanged(t, vf, device.PF, before)
}

// wholeCard gives a PF's netdev to a pod, which reaches a VF of the other card.
func wholeCard(t *testing.T, engine *netdev.Engine, pf pci.Address) {
	t.Helper()
	numVFs := card.Attribute(t, pf, "sriov_numvfs")
	card.SetAttribute(t, pf, "sriov_numvfs", "0")
	t.Cleanup(func() { card.SetAttribute(t, pf, "sriov_numvfs", numVFs) })

	before := read(t, pf, nil)
	device := netdev.Device{Name: before.Name}
	want := function.Interface{Name: "net1", MTU: 1400, MAC: "02:00:00:00:00:51"}
	t.Run("network namespace deleted", func(t *testing.T) {
		deleted(t, engine, device, want)
		unchanged(t, pf, nil, before)
	})

	other := attached(t, engine, card.PFs(t)[0], 1, 2, nil)
	t.Run("released", func(t *testing.T) {
		whole := attachedAs(t, engine, device, 1, want)
		if whole.mac.String() != string(want.MAC) {
			t.Errorf("MAC %s", whole.mac)
		}
		reach(t, whole, other)
	})

	unchanged(t, pf, nil, before)
}
