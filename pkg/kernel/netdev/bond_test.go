// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// bonded returns an interface with all that a port of a bond can ask for on this kernel.
func bonded(t *testing.T, name string) function.Interface {
	t.Helper()
	want := allWishes(t)
	want.Name, want.VLANs, want.Neighbors = name, nil, nil
	want.Bond = &function.Bond{Name: "bond0", Mode: function.BondActiveBackup, MIIMon: 100}
	return want
}

// bondWorld is a world with a second netdev.
type bondWorld struct {
	*world
	before [2]netdev.Snapshot
	place  [2]netdev.Place
}

func devices() [2]netdev.Device { return [2]netdev.Device{device(), {Name: "ens1f0v1"}} }

func newBondWorld(t *testing.T, trace func(string)) *bondWorld {
	t.Helper()
	w := &bondWorld{world: newWorld(t, trace)}
	netns.ConnectQueues(t, w.host, devices()[1].Name, w.xpu, "pf0vf1", 2)
	for _, name := range []string{"pf0vf0", "pf0vf1"} {
		must.Succeed(t, w.xpu.Handle().LinkSetUp(get(t, w.xpu, name)))
	}
	return w
}

// plan plans the attachment of one of the two netdevs.
func (w *bondWorld) plan(t *testing.T, n int, want function.Interface) {
	t.Helper()
	var err error
	w.before[n], w.place[n], err = w.engine.Plan(t.Context(), devices()[n], w.pod.Path(), want)
	must.Succeed(t, err)
}

func (w *bondWorld) attachPort(t *testing.T, n int, want function.Interface) netdev.Observed {
	t.Helper()
	w.plan(t, n, want)
	observed, err := w.engine.Attach(t.Context(), devices()[n], w.before[n], w.place[n], want)
	must.Succeed(t, err)
	return observed
}

func (w *bondWorld) release(t *testing.T, n int) netdev.Restored {
	t.Helper()
	restored, err := w.engine.Restore(t.Context(), devices()[n], w.before[n], w.place[n])
	must.Succeed(t, err)
	w.checkRestored(t, w.before[n])
	return restored
}

// TestBond checks that two interfaces of a pod are ports of a bond, that the bond has what they ask
// for, once, and that it goes with its last port.
func TestBond(t *testing.T) {
	netns.Need(t, netns.Bonds())
	w := newBondWorld(t, nil)
	first, second := bonded(t, "net1"), bonded(t, "net2")
	first.MAC, second.MAC = "02:00:00:00:00:01", "02:00:00:00:00:02"
	second.Bond = &function.Bond{Name: "bond0", Mode: function.BondActiveBackup, MIIMon: 100,
		Primary: true}

	for n, want := range []function.Interface{first, second} {
		observed := w.attachPort(t, n, want)
		if diff := cmp.Diff(netdev.Observed{
			Name: want.Name, MAC: want.MAC, MTU: 1400, Index: w.place[n].Index, Bond: "bond0",
			Addresses: want.Addresses,
		}, observed, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
			t.Errorf("observed (-want +got):\n%s", diff)
		}
	}

	bond := checkBonded(t, w)
	if bond.Primary != get(t, w.pod, "net2").Attrs().Index {
		t.Errorf("primary %d, want net2", bond.Primary)
	}
	checkWishesOfBond(t, w)
	w.checkFailOver(t, first, second)
	w.checkBondDifferences(t, first)

	w.release(t, 0)
	if left := rules(t, w.world); len(left) != 4 {
		t.Errorf("rules %q, want the bond's 4", left)
	}
	if got := get(t, w.pod, "bond0").Attrs().HardwareAddr.String(); got != string(second.MAC) {
		t.Errorf("MAC %s of the bond, want the MAC of the port that is left", got)
	}

	if restored := w.release(t, 1); len(restored.Notes) > 0 {
		t.Errorf("notes %q", restored.Notes)
	}
	checkNothingLeft(t, w)
}

// checkFailOver checks that the bond has the MAC address of the primary port, and of the other port
// while the primary one has no carrier.
func (w *bondWorld) checkFailOver(t *testing.T, backup, primary function.Interface) {
	t.Helper()
	hasMAC := func(mac function.MAC) func() bool {
		return func() bool { return get(t, w.pod, "bond0").Attrs().HardwareAddr.String() == string(mac) }
	}
	peer := get(t, w.xpu, "pf0vf1")
	must.Eventually(t, "the primary port is active", hasMAC(primary.MAC))
	must.Succeed(t, w.xpu.Handle().LinkSetDown(peer))
	must.Eventually(t, "the other port takes over", hasMAC(backup.MAC))
	must.Succeed(t, w.xpu.Handle().LinkSetUp(peer))
	must.Eventually(t, "the primary port is active again", hasMAC(primary.MAC))
}

// checkBonded checks that both interfaces are ports of the bond, and returns the bond.
func checkBonded(t *testing.T, w *bondWorld) *netlink.Bond {
	t.Helper()
	bond, isBond := get(t, w.pod, "bond0").(*netlink.Bond)
	if !isBond || bond.Mode != netlink.BOND_MODE_ACTIVE_BACKUP || bond.Miimon != 100 ||
		bond.FailOverMac != netlink.BOND_FAIL_OVER_MAC_ACTIVE || bond.RawFlags&unix.IFF_UP == 0 ||
		bond.MTU != 1400 {
		t.Fatalf("bond0 is %+v", bond)
	}
	for _, name := range []string{"net1", "net2"} {
		port := get(t, w.pod, name).Attrs()
		if port.MasterIndex != bond.Index || port.RawFlags&unix.IFF_UP == 0 || port.MTU != 1400 {
			t.Errorf("%s is %+v", name, port)
		}
		addresses, err := w.pod.Handle().AddrList(get(t, w.pod, name), netlink.FAMILY_ALL)
		must.Succeed(t, err)
		if len(addresses) > 0 {
			t.Errorf("%s has addresses %v", name, addresses)
		}
	}
	return bond
}

// checkWishesOfBond checks that the bond has addresses, routes and rules once.
func checkWishesOfBond(t *testing.T, w *bondWorld) {
	t.Helper()
	bond := get(t, w.pod, "bond0")
	addresses, err := w.pod.Handle().AddrList(bond, netlink.FAMILY_V4)
	must.Succeed(t, err)
	if len(addresses) != 1 || addresses[0].IPNet.String() != "10.1.0.5/24" {
		t.Errorf("addresses %v", addresses)
	}

	routes, err := w.pod.Handle().RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{
		Dst: netaddr.ToIPNet(netip.MustParsePrefix("10.2.0.0/16")),
	}, netlink.RT_FILTER_DST|netlink.RT_FILTER_TABLE) // in all tables
	must.Succeed(t, err)
	if len(routes) != 1 || routes[0].LinkIndex != bond.Attrs().Index {
		t.Errorf("routes to 10.2.0.0/16: %v", routes)
	}

	got := rules(t, w.world)
	if of := func(line string) bool { return strings.Contains(line, "iif bond0") }; len(got) != 4 ||
		!slices.ContainsFunc(got, of) {
		t.Errorf("rules %q", got)
	}
	if netns.Has(t, netns.VRFs()) &&
		bond.Attrs().MasterIndex != get(t, w.pod, "red").Attrs().Index {
		t.Errorf("the bond is not in the VRF: %+v", bond.Attrs())
	}
}

// checkBondDifferences checks that a CHECK finds what the pod has changed.
func (w *bondWorld) checkBondDifferences(t *testing.T, want function.Interface) {
	t.Helper()
	is := netdev.Attached{Before: w.before[0], Place: w.place[0], Want: want}
	is.Expected.Addresses = want.Addresses
	if d := w.check(t, is); len(d) > 0 {
		t.Errorf("differences %q", d)
	}

	pod, bond, port := w.pod.Handle(), get(t, w.pod, "bond0"), get(t, w.pod, "net1")
	must.Succeed(t, pod.LinkSetNoMaster(port))
	if d := w.check(t, is); !slices.Contains(d, "interface is not a port of bond bond0") {
		t.Errorf("differences %q", d)
	}

	must.Succeed(t, pod.LinkSetDown(port))
	must.Succeed(t, pod.LinkSetMasterByIndex(port, bond.Attrs().Index))
	address := &netlink.Addr{IPNet: netaddr.ToIPNet(want.Addresses[0])}
	must.Succeed(t, pod.AddrDel(bond, address))
	if d := w.check(t, is); !slices.Contains(d, "address 10.1.0.5/24 is missing") {
		t.Errorf("differences %q", d)
	}
}

// checkNothingLeft checks that the pod has neither netdevs nor rules of the attachments.
func checkNothingLeft(t *testing.T, w *bondWorld) {
	t.Helper()
	if left := names(t, w.pod); !slices.Equal(left, []string{"lo"}) {
		t.Errorf("the pod still has %q", left)
	}
	if left := rules(t, w.world); len(left) > 0 {
		t.Errorf("rules that stay in the pod: %q", left)
	}
}

// TestBondModes checks each mode with its options, and that the MAC addresses that a bond gives to
// its ports are given back.
func TestBondModes(t *testing.T) {
	netns.Need(t, netns.Bonds())
	for _, mode := range function.BondModes() {
		t.Run(mode, func(t *testing.T) {
			w := newBondWorld(t, nil)
			bond := function.Bond{Name: "bond0", Mode: mode, MIIMon: 50}
			switch mode {
			case "802.3ad":
				bond.LACPRate, bond.XmitHashPolicy = "fast", "layer3+4"
			case "balance-xor":
				bond.XmitHashPolicy = "vlan+srcmac"
			}

			for n := range 2 {
				w.attachPort(t, n, function.Interface{Name: fmt.Sprintf("net%d", n+1), Bond: &bond})
			}
			same := get(t, w.pod, "net1").Attrs().HardwareAddr.String() ==
				get(t, w.pod, "net2").Attrs().HardwareAddr.String()
			if bonds := mode != function.BondActiveBackup && mode != "balance-tlb" &&
				mode != "balance-alb"; same != bonds {
				t.Errorf("both ports have one MAC: %t", same)
			}

			w.release(t, 0)
			w.release(t, 1)
			checkNothingLeft(t, w)
		})
	}
}

// TestBondSideBySide checks that only one of two attachments at a time makes the bond, and that both
// are its ports.
func TestBondSideBySide(t *testing.T) {
	netns.Need(t, netns.Bonds())
	var mutex sync.Mutex
	made := 0
	w := newBondWorld(t, func(step string) {
		mutex.Lock()
		defer mutex.Unlock()
		if step == "make bond bond0" {
			made++
		}
	})
	wants := [2]function.Interface{bonded(t, "net1"), bonded(t, "net2")}
	wants[1].MAC = "02:00:00:00:00:02"
	for n, want := range wants {
		w.plan(t, n, want)
	}

	errs := [2]error{}
	var group sync.WaitGroup
	for n, want := range wants {
		group.Go(func() {
			_, errs[n] = w.engine.Attach(t.Context(), devices()[n], w.before[n], w.place[n], want)
		})
	}
	group.Wait()
	must.Succeed(t, errs[0])
	must.Succeed(t, errs[1])
	checkBonded(t, w)
	if made != 1 {
		t.Errorf("the bond was made %d times", made)
	}

	for n := range wants {
		group.Go(func() {
			_, errs[n] = w.engine.Restore(t.Context(), devices()[n], w.before[n], w.place[n])
		})
	}
	group.Wait()
	must.Succeed(t, errs[0])
	must.Succeed(t, errs[1])
	checkNothingLeft(t, w)
}

// TestBondAfterEveryStep checks that Restore undoes the attachment of the second port that ends after
// any step, that the first port keeps its bond, and that nothing is left after both.
func TestBondAfterEveryStep(t *testing.T) {
	netns.Need(t, netns.Bonds())
	type crash struct{}
	for step := 1; ; step++ {
		armed, count := false, 0
		w := newBondWorld(t, func(string) {
			if armed {
				if count++; count == step {
					panic(crash{})
				}
			}
		})

		w.attachPort(t, 0, bonded(t, "net1"))
		want := bonded(t, "net2")
		want.MAC = "02:00:00:00:00:02"
		w.plan(t, 1, want)
		armed = true
		crashed := func() (crashed bool) {
			defer func() { _, crashed = recover().(crash) }()
			_, err := w.engine.Attach(t.Context(), devices()[1], w.before[1], w.place[1], want)
			must.Succeed(t, err)
			return
		}()

		armed = false
		t.Run(fmt.Sprintf("step %d", step), func(t *testing.T) {
			w.release(t, 1)
			port, bond := get(t, w.pod, "net1").Attrs(), get(t, w.pod, "bond0").Attrs()
			if port.MasterIndex != bond.Index || len(rules(t, w.world)) != 4 {
				t.Errorf("port %+v, rules %q", port, rules(t, w.world))
			}
			w.release(t, 0)
			checkNothingLeft(t, w)
		})
		if !crashed {
			if step < 9 {
				t.Errorf("only %d steps were tried", step)
			}
			return
		}
	}
}

// TestBondErrors checks that what stands in the way of a bond is named before anything is touched,
// and is left alone.
func TestBondErrors(t *testing.T) {
	netns.Need(t, netns.Bonds())
	for name, test := range map[string]struct {
		given func(w *bondWorld) netlink.Link
		err   string
	}{
		"a bridge": {func(*bondWorld) netlink.Link {
			return &netlink.Bridge{LinkAttrs: linkAttrs("bond0")}
		}, `bond bond0: interface name "bond0": is taken in the pod: the pod has another bridge`},
		"the pod's own bond": {func(*bondWorld) netlink.Link {
			return netlink.NewLinkBond(linkAttrs("bond0"))
		}, "the pod has another bond of this name"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newBondWorld(t, nil)
			must.Succeed(t, w.pod.Handle().LinkAdd(test.given(w)))
			_, _, err := w.engine.Plan(t.Context(), device(), w.pod.Path(), bonded(t, "net1"))
			if err == nil || !strings.Contains(err.Error(), test.err) {
				t.Errorf("error %v, want %q", err, test.err)
			}
		})
	}

	t.Run("other options", func(t *testing.T) {
		w := newBondWorld(t, nil)
		w.attachPort(t, 0, bonded(t, "net1"))
		other := bonded(t, "net2")
		other.Bond = &function.Bond{Name: "bond0", Mode: function.BondActiveBackup, MIIMon: 200}
		_, _, err := w.engine.Plan(t.Context(), devices()[1], w.pod.Path(), other)
		const want = "the bond of this name has other options, mode active-backup"
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	})
}

// TestNoBonds checks that a kernel without bonds is named, and that the netdev is back.
func TestNoBonds(t *testing.T) {
	if netns.Has(t, netns.Bonds()) {
		return // this kernel cannot be without them
	}

	w := newWorld(t, nil)
	want := bonded(t, "net1")
	before, place, err := w.engine.Plan(t.Context(), device(), w.pod.Path(), want)
	must.Succeed(t, err)
	_, err = w.engine.Attach(t.Context(), device(), before, place, want)
	const message = "bond bond0: the node's kernel has no bonds (CONFIG_BONDING, module bonding)"
	if err == nil || !strings.Contains(err.Error(), message) {
		t.Errorf("error %v, want %q", err, message)
	}
	w.checkRestored(t, before)
}

// TestHardwareBond checks that the drivers of real VFs take part in a bond, and that the VFs are as
// before afterwards, at the PF too.
func TestHardwareBond(t *testing.T) {
	first := realVF(t)
	netns.Need(t, netns.Bonds())
	virtfn := filepath.Join("/sys/bus/pci/devices", first.PF.Address, "virtfn1")
	second := netdev.Device{Name: netdevOf(virtfn), PF: &netdev.PF{
		Name: first.PF.Name, Address: first.PF.Address, VF: 1,
	}}
	engine, err := netdev.New(netdev.Options{Trace: func(step string) { t.Log(step) }})
	must.Succeed(t, err)
	defer engine.Close()

	for _, mode := range function.BondModes() {
		t.Run(mode, func(t *testing.T) {
			pod := netns.New(t)
			both := [2]netdev.Device{first, second}
			var before [2]netdev.Snapshot
			var place [2]netdev.Place
			bond := &function.Bond{Name: "bond0", Mode: mode, MIIMon: 100}
			for n, device := range both {
				want := function.Interface{Name: fmt.Sprintf("net%d", n+1), MTU: 1400, Bond: bond,
					Addresses: fullInterface.Addresses}
				if bond.SetsMAC() {
					want.VF = &function.VFConfig{Trust: new(true)}
				}
				before[n], place[n], err = engine.Plan(t.Context(), device, pod.Path(), want)
				must.Succeed(t, err)
				_, err = engine.Attach(t.Context(), device, before[n], place[n], want)
				// This mode changes the MAC address of a netdev that is up, as simnic cannot.
				if refused := errors.Is(err, unix.EOPNOTSUPP); mode != "balance-alb" || !refused {
					must.Succeed(t, err)
				}
			}

			for n, device := range both {
				_, err := engine.Restore(t.Context(), device, before[n], place[n])
				must.Succeed(t, err)
				if left := netdev.Diff(before[n], hardwareSnapshot(t, engine, device)); len(left) > 0 {
					t.Errorf("%s after restore: %q", device.Name, left)
				}
			}
			if left := names(t, pod); !slices.Equal(left, []string{"lo"}) {
				t.Errorf("the pod still has %q", left)
			}
		})
	}
}
