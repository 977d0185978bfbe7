// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// world is a host with the netdev "ens1f0v0", whose other end is in the namespace of the xPU, and a
// pod.
type world struct {
	host, xpu, pod *netns.Namespace
	sysRoot        string // sysfs of the host
	engine         *netdev.Engine
}

const hostName = "ens1f0v0"

func newWorld(t testing.TB, trace func(string)) *world {
	t.Helper()
	return newWorldOfQueues(t, 2, trace)
}

// newWorldOfQueues returns a world whose netdev has this number of queues in each direction.
func newWorldOfQueues(t testing.TB, queues int, trace func(string)) *world {
	t.Helper()
	w := &world{host: netns.New(t), xpu: netns.New(t), pod: netns.New(t)}
	netns.ConnectQueues(t, w.host, hostName, w.xpu, "pf0vf0", queues)
	w.sysRoot = w.host.Sysfs(t)
	engine, err := netdev.New(netdev.Options{
		HostNetNS: w.host.Path(), SysRoot: w.sysRoot, Trace: trace,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { engine.Close() })

	w.engine = engine
	return w
}

func device() netdev.Device { return netdev.Device{Name: hostName} }

func get(t testing.TB, ns *netns.Namespace, name string) netlink.Link {
	t.Helper()
	l, err := ns.Handle().LinkByName(name)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return l
}

func names(t testing.TB, ns *netns.Namespace) []string {
	t.Helper()
	links, err := ns.Handle().LinkList()
	if err != nil {
		t.Fatal(err)
	}

	var names []string
	for _, l := range links {
		names = append(names, l.Attrs().Name)
	}

	slices.Sort(names)
	return names
}

// snapshot returns the current snapshot of a netdev on the host.
func (w *world) snapshot(t testing.TB, name string) netdev.Snapshot {
	t.Helper()
	spare := netns.New(t)
	s, _, err := w.engine.Plan(t.Context(), netdev.Device{Name: name}, spare.Path(),
		function.Interface{Name: "net1"})
	must.Succeed(t, err)
	return s
}

func (w *world) attach(
	t testing.TB, want function.Interface,
) (netdev.Snapshot, netdev.Place, netdev.Observed) {
	t.Helper()
	before, place, err := w.engine.Plan(t.Context(), device(), w.pod.Path(), want)
	must.Succeed(t, err)
	observed, err := w.engine.Attach(t.Context(), device(), before, place, want)
	must.Succeed(t, err)
	return before, place, observed
}

func (w *world) checkRestored(t testing.TB, before netdev.Snapshot) {
	t.Helper()
	if left := netdev.Diff(before, w.snapshot(t, before.Name)); len(left) > 0 {
		t.Errorf("after restore: %q", left)
	}
}

var fullInterface = function.Interface{
	Name: "net1", MTU: 1400, MAC: "02:00:00:00:00:01", AllMulticast: true,
	Addresses: []netip.Prefix{
		netip.MustParsePrefix("10.1.0.5/24"), netip.MustParsePrefix("fd00::5/64"),
	},
	Routes: []function.Route{
		{To: netip.MustParsePrefix("10.2.0.0/16"), Via: netip.MustParseAddr("10.1.0.1"), Metric: 7},
		{To: netip.MustParsePrefix("10.3.0.0/16")},
		{To: netip.MustParsePrefix("fd01::/64"), Via: netip.MustParseAddr("fd00::1")},
		{To: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("10.1.0.1")},
		{To: netip.MustParsePrefix("10.4.0.0/16"), Via: netip.MustParseAddr("10.9.9.9"), OnLink: true,
			Source: netip.MustParseAddr("10.1.0.5"), Table: 100, MTU: 1300, AdvMSS: 1200},
	},
	Rules: []function.Rule{
		{Priority: 100, From: netip.MustParsePrefix("10.1.0.0/24"), Table: 100},
		{Priority: 101, To: netip.MustParsePrefix("fd01::/64"), Outgoing: true, Table: 101},
		{Priority: 102, Incoming: true, Table: 100},
	},
	Neighbors: []function.Neighbor{
		{Address: netip.MustParseAddr("10.1.0.1"), MAC: "02:00:00:00:00:aa"},
		{Address: netip.MustParseAddr("fd00::1"), MAC: "02:00:00:00:00:aa"},
	},
	Sysctls: map[string]string{
		"net.ipv4.conf.IFNAME.arp_ignore": "1", "net.ipv4.conf.IFNAME.rp_filter": "2",
		"net.ipv6.conf.IFNAME.accept_ra": "0",
	},
	Offload: &function.Offload{
		GSOMaxSize: 131072, GROMaxSize: 100000, GSOIPv4MaxSize: 60000, GROIPv4MaxSize: 50000,
	},
	Ethtool: function.Ethtool{
		"features": {"tx-tcp-segmentation": "off"}, "channels": {"rx": "1", "tx": "1"},
	},
}

func TestRoundTrip(t *testing.T) {
	w := newWorld(t, nil)
	h := w.host.Handle()
	l := get(t, w.host, hostName)
	must.Succeed(t, h.LinkAddAltName(l, "net1")) // the name that the pod wants
	must.Succeed(t, h.LinkAddAltName(l, "enp59s0f0v0"))
	must.Succeed(t, h.LinkSetAlias(l, "rack 7"))
	must.Succeed(t, h.LinkSetTxQLen(l, 777))

	before, place, observed := w.attach(t, fullInterface)
	if diff := cmp.Diff(netdev.Observed{
		Name: "net1", MAC: "02:00:00:00:00:01", MTU: 1400, Index: place.Index,
		Addresses: fullInterface.Addresses,
	}, observed, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("observed (-want +got):\n%s", diff)
	}

	if got := names(t, w.host); slices.Contains(got, hostName) {
		t.Errorf("host still has %q", got)
	}

	checkRoutes(t, w)

	pod := w.pod.Handle()
	inPod := get(t, w.pod, "net1")
	must.Succeed(t, pod.LinkSetDown(inPod))
	must.Succeed(t, pod.LinkSetName(inPod, "evil0"))
	must.Succeed(t, pod.LinkSetMTU(inPod, 1280))
	must.Succeed(t,
		pod.LinkSetHardwareAddr(inPod, function.MAC("02:00:00:00:00:99").HardwareAddr()))
	must.Succeed(t, pod.LinkSetAlias(inPod, "mine"))
	must.Succeed(t, pod.LinkSetTxQLen(inPod, 5))
	must.Succeed(t, pod.LinkAddAltName(inPod, "eth7"))
	must.Succeed(t, pod.LinkDelAltName(inPod, "enp59s0f0v0"))
	must.Succeed(t, pod.SetPromiscOn(inPod))
	must.Succeed(t, pod.LinkSetARPOff(inPod))

	restored, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place)
	must.Succeed(t, err)
	if diff := cmp.Diff(netdev.Restored{Name: hostName}, restored); diff != "" {
		t.Errorf("restored (-want +got):\n%s", diff)
	}

	w.checkRestored(t, before)
	if restored, err = w.engine.Restore(t.Context(), device(), before, place); err != nil ||
		restored.Name != hostName {
		t.Errorf("second restore: %+v, %v", restored, err)
	}
}

func checkRoutes(t *testing.T, w *world) {
	t.Helper()
	routes, err := w.pod.Handle().RouteList(get(t, w.pod, "net1"), netlink.FAMILY_ALL)
	must.Succeed(t, err)
	var got []string
	for _, r := range routes {
		got = append(got, fmt.Sprintf("%v via %v metric %d", r.Dst, r.Gw, r.Priority))
	}

	for _, want := range []string{
		"10.2.0.0/16 via 10.1.0.1 metric 7", "10.3.0.0/16 via <nil> metric 0",
		"fd01::/64 via fd00::1 metric 1024",
		"0.0.0.0/0 via 10.1.0.1 metric 0",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("no route %q among %q", want, got)
		}
	}
}

// TestCounters checks that the counters of a pod's interface can be read from the host until the
// pod ends.
func TestCounters(t *testing.T) {
	w := newWorld(t, nil)
	must.Succeed(t, w.xpu.Handle().LinkSetUp(get(t, w.xpu, "pf0vf0")))
	before, place, _ := w.attach(t, function.Interface{Name: "net1"})
	must.Eventually(t, "the interface sends what an interface sends when it comes up", func() bool {
		counters, exists, err := w.engine.Counters(place)
		if err != nil || !exists {
			t.Fatalf("counters %+v, %t, %v", counters, exists, err)
		}
		return counters.TxPackets > 0 && counters.TxBytes > counters.TxPackets
	})

	_, err := w.engine.Restore(t.Context(), device(), before, place)
	must.Succeed(t, err)
	if counters, exists, err := w.engine.Counters(place); exists || err != nil {
		t.Errorf("counters %+v, %t, %v of an interface that is gone", counters, exists, err)
	}
	if counters, err := w.engine.VFCounters(hostName, "0000:3b:00.0"); err == nil {
		t.Errorf("the counters of another device's netdev are %v", counters)
	}
	if counters, err := w.engine.VFCounters(hostName, ""); err != nil || len(counters) > 0 {
		t.Errorf("a netdev without VFs has counters %v, %v", counters, err)
	}
}

// TestRestoreWithTakenNames covers names that another netdev of the host got meanwhile, and an
// altname of the pod that would prevent the move back.
func TestRestoreWithTakenNames(t *testing.T) {
	w := newWorld(t, nil)
	other := func(name string) { netns.Connect(t, w.host, name, w.xpu, "rep-"+name) }
	other("uplink")
	before, place, _ := w.attach(t, function.Interface{Name: "net1"})
	other(hostName) // another netdev gets the name while this one is in the pod
	must.Succeed(t, w.pod.Handle().LinkAddAltName(get(t, w.pod, "net1"), "uplink"))

	restored, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place)
	must.Succeed(t, err)
	want := netdev.Restored{
		Name: "xpu0", Notes: []string{"name ens1f0v0 is taken by another netdev"},
	}
	if diff := cmp.Diff(want, restored); diff != "" {
		t.Errorf("restored (-want +got):\n%s", diff)
	}
	if got := names(t, w.pod); !slices.Equal(got, []string{"lo"}) {
		t.Errorf("pod has %q", got)
	}

	now := w.snapshot(t, "xpu0")
	if diff := netdev.Diff(before, now); !slices.Equal(diff,
		[]string{`name is "xpu0", was "ens1f0v0"`}) {
		t.Errorf("diff %q", diff)
	}

	must.Succeed(t, w.host.Handle().LinkDel(get(t, w.host, hostName)))
	if restored, err = w.engine.Restore(t.Context(), netdev.Device{Name: "xpu0"},
		before, place); err != nil || restored.Name != hostName {
		t.Errorf("restore after the name is free: %+v, %v", restored, err)
	}

	w.checkRestored(t, before)
}

// TestRestoreWithNameThatIsFreeSoon covers a name that another netdev has for a moment, because its
// driver has just been bound.
func TestRestoreWithNameThatIsFreeSoon(t *testing.T) {
	var w *world
	w = newWorld(t, func(step string) {
		if strings.HasPrefix(step, "wait: name "+hostName) {
			must.Succeed(t, w.host.Handle().LinkSetName(get(t, w.host, hostName), "another"))
		}
	})

	before, place, _ := w.attach(t, function.Interface{Name: "net1"})
	netns.Connect(t, w.host, hostName, w.xpu, "rep-other")

	restored, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place)
	must.Succeed(t, err)
	if diff := cmp.Diff(netdev.Restored{Name: hostName}, restored); diff != "" {
		t.Errorf("restored (-want +got):\n%s", diff)
	}

	w.checkRestored(t, before)
}

// everyWish returns interfaces that together have all that pods can ask for on this kernel.
func everyWish(t *testing.T) map[string]function.Interface {
	t.Helper()
	wishes := map[string]function.Interface{"alone": allWishes(t)}
	if netns.Has(t, netns.Bonds()) {
		wishes["port of a bond"] = bonded(t, "net1")
	}
	return wishes
}

// checkLeft checks that the pod has no netdevs of an attachment any more.
func (w *world) checkLeft(t *testing.T) {
	t.Helper()
	if left := names(t, w.pod); !slices.Equal(left, []string{"lo"}) {
		t.Errorf("the pod still has %q", left)
	}
}

// TestRestoreAfterEveryStep checks that Restore undoes an attachment that ends after any step
// without an undo.
func TestRestoreAfterEveryStep(t *testing.T) {
	for name, want := range everyWish(t) {
		t.Run(name, func(t *testing.T) { testRestoreAfterEveryStep(t, want) })
	}
}

func testRestoreAfterEveryStep(t *testing.T, want function.Interface) {
	type crash struct{ step int }
	for step := 0; ; step++ {
		armed, count := true, 0
		w := newWorld(t, func(string) {
			if count++; armed && count == step+1 {
				panic(crash{step})
			}
		})

		must.Succeed(t, w.host.Handle().LinkAddAltName(get(t, w.host, hostName), "net1"))
		before, place, err := w.engine.Plan(t.Context(), device(), w.pod.Path(), want)
		must.Succeed(t, err)

		crashed := func() (crashed bool) {
			defer func() {
				if _, crashed = recover().(crash); !crashed {
					must.Succeed(t, err)
				}
			}()
			_, err = w.engine.Attach(t.Context(), device(), before, place, want)
			return
		}()

		armed = false
		t.Run(fmt.Sprintf("step %d", step), func(t *testing.T) {
			restored, err := w.engine.Restore(t.Context(), device(), before, place)
			must.Succeed(t, err)
			if restored.Name != hostName {
				t.Errorf("restored %+v", restored)
			}
			w.checkRestored(t, before)
			w.checkLeft(t)
		})

		if !crashed {
			if step < 9 {
				t.Errorf("only %d steps were tried", step)
			}
			return
		}
	}
}

// TestRestoreAfterEveryStepOfRestore checks that the next Restore continues one that ended after
// any step.
func TestRestoreAfterEveryStepOfRestore(t *testing.T) {
	for name, want := range everyWish(t) {
		t.Run(name, func(t *testing.T) { testRestoreAfterEveryStepOfRestore(t, want) })
	}
}

func testRestoreAfterEveryStepOfRestore(t *testing.T, want function.Interface) {
	type crash struct{}
	for step := 1; ; step++ {
		armed, count := false, 0
		w := newWorld(t, func(string) {
			if armed {
				if count++; count == step {
					panic(crash{})
				}
			}
		})

		must.Succeed(t, w.host.Handle().LinkAddAltName(get(t, w.host, hostName), "net1"))
		write(t, w.sysRoot, hostName, "queues/rx-1/rps_cpus", "1")
		before, place, _ := w.attach(t, want)
		must.Succeed(t, w.pod.Handle().LinkAddAltName(get(t, w.pod, "net1"), hostName))
		write(t, w.pod.Sysfs(t), "net1", "gro_flush_timeout", "7")
		changeEthtool(t, w.pod, "net1", "channels", "rx", "1")
		armed = true

		crashed := func() (crashed bool) {
			defer func() { _, crashed = recover().(crash) }()
			_, err := w.engine.Restore(t.Context(), device(), before, place)
			must.Succeed(t, err)
			return
		}()

		armed = false
		_, err := w.engine.Restore(t.Context(), device(), before, place)
		must.Succeed(t, err)
		w.checkRestored(t, before)
		w.checkLeft(t)

		if !crashed {
			if step < 7 {
				t.Errorf("only %d steps were tried", step)
			}
			return
		}
	}
}

func TestPlanErrors(t *testing.T) {
	prefix := netip.MustParsePrefix
	tests := []struct {
		name  string
		given func(t *testing.T, w *world)
		dev   netdev.Device
		want  function.Interface
		err   string
	}{
		{name: "no netdev", dev: netdev.Device{}, want: function.Interface{Name: "net1"},
			err: "no netdev in the host's network namespace"},
		{name: "unknown netdev", dev: netdev.Device{Name: "nope"},
			want: function.Interface{Name: "net1"}, err: `"nope": no netdev in`},
		{name: "name taken", dev: device(), want: function.Interface{Name: "lo"},
			err: `interface name "lo": is taken in the pod`},
		{name: "altname taken", dev: device(), want: function.Interface{Name: "net1"},
			err: `is taken in the pod, as an altname of lo`,
			given: func(t *testing.T, w *world) {
				must.Succeed(t, w.pod.Handle().LinkAddAltName(get(t, w.pod, "lo"), "net1"))
			}},
		{name: "bridge port", dev: device(), want: function.Interface{Name: "net1"},
			err: "is in use on the host",
			given: func(t *testing.T, w *world) {
				attrs := netlink.NewLinkAttrs()
				attrs.Name = "br0"
				must.Succeed(t, w.host.Handle().LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
				must.Succeed(t,
					w.host.Handle().LinkSetMaster(get(t, w.host, hostName), get(t, w.host, "br0")))
			}},
		{name: "VF properties without PF", dev: device(), want: function.Interface{
			Name: "net1", VF: &function.VFConfig{VLAN: new(7)},
		},
			err: "has no PF that VF properties could be set with"},
		{name: "VF of a netdev that is no PF",
			dev:  netdev.Device{Name: hostName, PF: &netdev.PF{Name: "lo", VF: 1}},
			want: function.Interface{Name: "net1", VF: &function.VFConfig{VLAN: new(7)}},
			err:  "has no PF that VF properties could be set with"},
		{name: "unknown PF", dev: netdev.Device{
			Name: hostName, PF: &netdev.PF{Name: "nope", Address: "0000:3b:00.0", VF: 1},
		},
			want: function.Interface{Name: "net1"}, err: "PF nope (0000:3b:00.0): "},
		{name: "no such feature", dev: device(), want: function.Interface{
			Name: "net1", Ethtool: function.Ethtool{"features": {"tx-teleport": "on"}},
		},
			err: `ethtool features ["tx-teleport"]: the driver cannot change it; it can change `},
		{name: "no such group", dev: device(), want: function.Interface{
			Name: "net1", Ethtool: function.Ethtool{"rings": {"rx": "64"}},
		},
			err: `ethtool rings ["rx"]: the driver cannot change it; it can change none of this group`},
		{name: "bad address", dev: device(),
			want: function.Interface{Name: "net1", Addresses: []netip.Prefix{prefix("0.0.0.0/0")}},
			err:  "addresses[0] 0.0.0.0/0: must be a unicast address"},
	}

	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, func(step string) { t.Errorf("touched: %s", step) })
			if test.given != nil {
				test.given(t, w)
			}
			_, _, err := w.engine.Plan(t.Context(), test.dev, w.pod.Path(), test.want)
			if err == nil || !strings.Contains(err.Error(), test.err) {
				t.Errorf("error %v, want one with %q", err, test.err)
			}
		})
	}

	t.Run("namespace", func(t *testing.T) {
		w := newWorld(t, nil)
		plain := filepath.Join(t.TempDir(), "plain")
		must.Succeed(t, os.WriteFile(plain, nil, 0o600))

		for path, want := range map[string]string{
			w.host.Path(): "is the host's own", t.TempDir() + "/none": "no such file",
			plain: "is a plain file",
		} {
			if _, _, err := w.engine.Plan(t.Context(), device(),
				path, function.Interface{Name: "net1"}); err == nil ||
				!strings.Contains(err.Error(), want) {
				t.Errorf("%s: error %v, want one with %q", path, err, want)
			}
		}
	})
}

// TestAttachUndoes covers settings that only the kernel can refuse, after the move. The netdev must
// be back on the host with its old properties.
func TestAttachUndoes(t *testing.T) {
	tests := map[string]struct {
		given func(t *testing.T, w *world)
		want  function.Interface
		err   string
	}{
		"MTU": {want: function.Interface{Name: "net1", MTU: 1 << 20},
			err: "as net1 with MTU 1048576"},
		"gateway that is not on the link": {err: "gateway 10.9.9.9 is in no subnet of the " +
			"interface's addresses: network is unreachable", want: function.Interface{
			Name: "net1",
			Routes: []function.Route{
				{To: netip.MustParsePrefix("10.2.0.0/16"), Via: netip.MustParseAddr("10.9.9.9")},
			}}},
		"second default route": {
			given: func(t *testing.T, w *world) {
				must.Succeed(t,
					w.pod.Handle().RouteAdd(&netlink.Route{
						LinkIndex: 1, Scope: netlink.SCOPE_LINK,
						Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)},
					}))
			},
			want: function.Interface{
				Name: "net1", Routes: []function.Route{{To: netip.MustParsePrefix("0.0.0.0/0")}},
			},
			err: "route to 0.0.0.0/0: the pod has one already, via interface index 1 gateway " +
				"none: file exists",
		},
		"name taken since": {
			given: func(t *testing.T, w *world) { netns.Connect(t, w.pod, "net1", w.xpu, "late") },
			want:  function.Interface{Name: "net1"}, err: "file exists",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			before, place, err := w.engine.Plan(t.Context(), device(), w.pod.Path(), test.want)
			must.Succeed(t, err)

			if test.given != nil {
				test.given(t, w)
			}

			_, err = w.engine.Attach(t.Context(), device(), before, place, test.want)
			if err == nil || !strings.Contains(err.Error(), test.err) {
				t.Errorf("error %v, want one with %q", err, test.err)
			}

			w.checkRestored(t, before)
		})
	}
}

func TestAttachTwiceSameAddress(t *testing.T) {
	w := newWorld(t, nil)
	want := function.Interface{
		Name: "net1", Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.5/24")},
	}
	_, place, _ := w.attach(t, want)
	if place.Cookie == 0 {
		t.Error("no cookie")
	}
	// The kernel refuses the same address. The engine must accept that it exists already.
	if err := netdev.AddAddress(w.pod.Path(), place.Index, want.Addresses[0]); err != nil {
		t.Errorf("same address again: %v", err)
	}

	connected := function.Route{To: netip.MustParsePrefix("10.1.0.0/24")}
	if err := netdev.AddRoute(w.pod.Path(), place.Index, connected); err != nil {
		t.Errorf("the route that the kernel made for the address: %v", err)
	}

	netns.Connect(t, w.pod, "net2", w.xpu, "other")
	if err := netdev.AddRoute(w.pod.Path(), get(t, w.pod, "net2").Attrs().Index,
		connected); err == nil {
		t.Error("a second route to the same network was accepted")
	}
}

// TestIndexTaken covers a pod in which the netdev's ifindex on the host is taken.
func TestIndexTaken(t *testing.T) {
	w := newWorld(t, nil)
	index := get(t, w.host, hostName).Attrs().Index
	for i := 0; ; i++ {
		if _, err := w.pod.Handle().LinkByIndex(index); err == nil {
			break
		}
		netns.Connect(t, w.pod, fmt.Sprintf("eth%d", i), w.xpu, fmt.Sprintf("peer%d", i))
	}

	before, place, observed := w.attach(t, function.Interface{Name: "net1"})
	if place.Index == index || observed.Index != place.Index {
		t.Errorf("index %d on the host, %d planned, %d got", index, place.Index, observed.Index)
	}

	_, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place)
	must.Succeed(t, err)
	w.checkRestored(t, before)
}

// TestIndexTakenAndMACRefused covers an index that was taken since Plan and a driver that then
// refuses the MAC, which it may accept after a reset of the VF.
func TestIndexTakenAndMACRefused(t *testing.T) {
	var steps []string
	w := newWorld(t, func(step string) { steps = append(steps, step) })
	// No driver accepts the address of a multicast group.
	want := function.Interface{Name: "net1", MAC: "03:00:00:00:00:01"}
	before, place, err := w.engine.Plan(t.Context(), device(), w.pod.Path(),
		function.Interface{Name: "net1"})
	must.Succeed(t, err)
	before.VF = &netdev.VFState{MAC: want.MAC}
	place.Index = get(t, w.pod, "lo").Attrs().Index
	_, err = w.engine.Attach(t.Context(), device(), before, place, want)
	if says := "with MAC 03:00:00:00:00:01"; err == nil || !strings.Contains(err.Error(), says) {
		t.Errorf("error %v, want one with %q", err, says)
	}
	if !slices.Contains(steps, "down to reset the VF") {
		t.Errorf("the VF was not reset: %q", steps)
	}

	w.checkRestored(t, before)
}

func TestNamespaceGone(t *testing.T) {
	w := newWorld(t, nil)
	before, place, _ := w.attach(t, fullInterface)

	// The namespace lives on without its path, so that the netdev can be reached neither there nor
	// on the host.
	must.Succeed(t, w.pod.Unmount())
	if alive, err := w.engine.Alive(place); alive || err != nil {
		t.Errorf("alive %v, %v", alive, err)
	}

	// A runtime may leave the mount point behind.
	must.Succeed(t, os.WriteFile(place.NetNS, nil, 0o600))
	if alive, err := w.engine.Alive(place); alive || err != nil {
		t.Errorf("alive %v, %v, where only the mount point is left", alive, err)
	}

	must.Succeed(t, os.Remove(place.NetNS))
	if _, err := w.engine.Restore(t.Context(), device(), before, place); !errors.Is(err,
		netdev.ErrGone) {
		t.Errorf("error %v, want %v", err, netdev.ErrGone)
	}

	// When a namespace ends, the kernel moves hardware to the host, under the pod's name and down.
	// It would destroy the end of a veth, so the test moves it.
	l := get(t, w.pod, "net1")
	must.Succeed(t, w.pod.Handle().LinkSetNsFd(l, w.host.Fd()))
	restored, err := w.engine.Restore(t.Context(), netdev.Device{Name: "net1"}, before, place)
	must.Succeed(t, err)
	if restored.Name != hostName {
		t.Errorf("restored %+v", restored)
	}

	w.checkRestored(t, before)
}

func TestNetdevMovedOn(t *testing.T) {
	w := newWorld(t, nil)
	before, place, _ := w.attach(t, function.Interface{Name: "net1"})
	nested := netns.New(t)
	must.Succeed(t, w.pod.Handle().LinkSetNsFd(get(t, w.pod, "net1"), nested.Fd()))
	if _, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place); !errors.Is(err,
		netdev.ErrAway) {
		t.Errorf("error %v, want %v", err, netdev.ErrAway)
	}
}

// TestVethDestroyed covers a veth, which the kernel destroys together with its namespace.
func TestVethDestroyed(t *testing.T) {
	w := newWorld(t, nil)
	before, place, _ := w.attach(t, function.Interface{Name: "net1"})
	must.Succeed(t, w.xpu.Handle().LinkDel(get(t, w.xpu, "pf0vf0")))
	must.Succeed(t, w.pod.Unmount())
	if _, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place); !errors.Is(err,
		netdev.ErrGone) {
		t.Errorf("error %v, want %v", err, netdev.ErrGone)
	}
}

// TestPathReused checks that another namespace under the same path is not taken for the pod's.
func TestPathReused(t *testing.T) {
	w := newWorld(t, nil)
	before, place, _ := w.attach(t, function.Interface{Name: "net1"})
	place.NetNS = netns.New(t).Path()
	if alive, err := w.engine.Alive(place); alive || err != nil {
		t.Errorf("alive %v, %v", alive, err)
	}
	if _, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place); !errors.Is(err,
		netdev.ErrGone) {
		t.Errorf("error %v, want %v", err, netdev.ErrGone)
	}
}

// BenchmarkBareMove is the reference for [BenchmarkRoundTrip]. It measures how long the kernel
// takes to move a netdev to a pod and back and to set it up both times.
func BenchmarkBareMove(b *testing.B) {
	w := newWorld(b, nil)
	host, pod := w.host.Handle(), w.pod.Handle()
	l := get(b, w.host, hostName)
	for b.Loop() {
		must.Succeed(b, host.LinkSetNsFd(l, w.pod.Fd()))
		must.Succeed(b, pod.LinkSetUp(l))
		must.Succeed(b, pod.LinkSetNsFd(l, w.host.Fd()))
		must.Succeed(b, host.LinkSetUp(l))
	}
}

func BenchmarkRoundTrip(b *testing.B) {
	w := newWorld(b, nil)
	want := function.Interface{
		Name: "net1", MTU: 1400, MAC: "02:00:00:00:00:01", Addresses: fullInterface.Addresses[:1],
	}
	var attach, restore time.Duration
	for b.Loop() {
		start := time.Now()
		before, place, _ := w.attach(b, want)
		middle := time.Now()
		_, err := w.engine.Restore(b.Context(), netdev.Device{}, before, place)
		must.Succeed(b, err)
		attach, restore = attach+middle.Sub(start), restore+time.Since(middle)
	}

	b.ReportMetric(float64(attach.Microseconds())/float64(b.N), "attach-us")
	b.ReportMetric(float64(restore.Microseconds())/float64(b.N), "restore-us")
}

// BenchmarkSnapshot measures how long it takes to read all properties of a netdev, by the number of
// its queues.
func BenchmarkSnapshot(b *testing.B) {
	for _, queues := range []int{1, 16, 64, 256} {
		b.Run(fmt.Sprint(queues), func(b *testing.B) {
			w := newWorldOfQueues(b, queues, nil)
			for b.Loop() {
				_, err := w.engine.Snapshot(b.Context(), device())
				must.Succeed(b, err)
			}
		})
	}
}

// BenchmarkSnapshotCrowded measures the same on a host with many VFs and representors.
func BenchmarkSnapshotCrowded(b *testing.B) {
	w := newWorld(b, nil)
	for i := range 128 {
		netns.Connect(b, w.host, fmt.Sprintf("vf%d", i), w.host, fmt.Sprintf("rep%d", i))
	}
	for b.Loop() {
		_, err := w.engine.Snapshot(b.Context(), device())
		must.Succeed(b, err)
	}
}

// TestNamespaceOfProcess covers a runtime that names a namespace by a process in it, as the host
// numbers processes. The engine finds the namespace in the host's procfs, and the netdev comes back
// when the process ends.
func TestNamespaceOfProcess(t *testing.T) {
	w := newWorld(t, nil)
	pause := exec.Command("sleep", "600")
	pause.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL,
	}
	must.Succeed(t, pause.Start())
	t.Cleanup(func() { _ = pause.Process.Kill(); _ = pause.Wait() })

	proc := t.TempDir()
	must.Succeed(t,
		os.Symlink(fmt.Sprintf("/proc/%d", pause.Process.Pid), filepath.Join(proc, "4711")))
	engine, err := netdev.New(netdev.Options{HostNetNS: w.host.Path(), ProcRoot: proc})
	must.Succeed(t, err)
	defer engine.Close()

	want := fullInterface
	want.Sysctls = nil // they are below the other root of procfs

	const path = "/proc/4711/ns/net"
	before, place, err := engine.Plan(t.Context(), device(), path, want)
	must.Succeed(t, err)
	if place.NetNS != path {
		t.Errorf("place %+v, want the host's path", place)
	}

	observed, err := engine.Attach(t.Context(), device(), before, place, want)
	must.Succeed(t, err)
	attached := netdev.Attached{
		Before: before, Place: place, Want: want, Observed: observed,
	}
	if differences, err := engine.Check(t.Context(), device(), attached); err != nil ||
		len(differences) > 0 {
		t.Errorf("differences %q, %v", differences, err)
	}

	alive, err := engine.Alive(place)
	holds, errHolds := engine.Holds(place, before.Identity)
	if !alive || !holds || err != nil || errHolds != nil {
		t.Errorf("alive %t, %v; holds %t, %v", alive, err, holds, errHolds)
	}

	_, err = engine.Restore(t.Context(), device(), before, place)
	must.Succeed(t, err)
	w.checkRestored(t, before)
	if holds, err := engine.Holds(place, before.Identity); holds || err != nil {
		t.Errorf("holds %t, %v after the netdev went", holds, err)
	}

	must.Succeed(t, pause.Process.Kill())
	_ = pause.Wait()
	if alive, err := engine.Alive(place); alive || err != nil {
		t.Errorf("alive %t, %v after the process ended", alive, err)
	}
}
