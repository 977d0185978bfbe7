// SPDX-License-Identifier: Apache-2.0

package inventory_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	gocmp "github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

// soon is how long a test waits for an event that must come. Durations are measured separately.
const soon = 20 * time.Second

const (
	firstPF = pci.Address("0000:3b:00.0")
	firstVF = pci.Address("0000:3b:01.0")
)

// world is a simulated host and its inventory.
type world struct {
	*inventory.Inventory
	simulated *simulate.Host
	host      *netns.Namespace
	changes   chan struct{}
	registry  *prometheus.Registry
}

func newWorld(t *testing.T, card simulate.Card) *world {
	t.Helper()
	host, xpu := netns.New(t), netns.New(t)
	simulated, err := simulate.New(t.Context(), simulate.Config{
		Root: t.TempDir(), HostNS: host.Path(), XPUNS: xpu.Path(), Cards: []simulate.Card{card},
		Log: logr.Discard(),
	})
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		if err := simulated.Close(); err != nil {
			t.Error(err)
		}
	})

	w := &world{simulated: simulated, host: host, changes: make(chan struct{}, 1),
		registry: prometheus.NewRegistry()}
	w.Inventory = inventory.New(inventory.Options{
		SysRoot: simulated.SysRoot(), NetNS: host.Path(), Changed: w.changed, Registry: w.registry,
		Log: logr.Discard(),
	})

	run(t, w.Inventory)
	return w
}

func (w *world) changed() {
	select {
	case w.changes <- struct{}{}:
	default:
	}
}

// run runs the inventory until the test ends.
func run(t *testing.T, i *inventory.Inventory) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := i.Run(ctx); err != nil {
			t.Error(err)
		}
	})

	t.Cleanup(running.Wait)
	t.Cleanup(cancel)

	waiting, stop := context.WithTimeout(ctx, soon)
	defer stop()

	if !i.Synced(waiting) {
		t.Fatal("the inventory does not become ready")
	}
}

// until waits until holds returns true, and returns how long this took. It calls holds only when
// the inventory says that it has changed.
func (w *world) until(t *testing.T, what string, holds func() bool) time.Duration {
	t.Helper()
	begin := time.Now()
	limit := time.After(soon)
	for !holds() {
		select {
		case <-w.changes:
		case <-limit:
			t.Fatalf("%s: never seen; the inventory has %+v", what, w.Snapshot())
		}
	}

	return time.Since(begin)
}

func (w *world) count(kind function.Kind) int {
	n := 0
	for _, f := range w.Snapshot() {
		if f.Kind == kind {
			n++
		}
	}
	return n
}

func (w *world) get(t *testing.T, a pci.Address) function.Function {
	t.Helper()
	f, ok := w.Get(function.ID{Address: a})
	if !ok {
		t.Fatalf("no Function %s", a)
	}
	return f
}

func TestKnowsTheCard(t *testing.T) {
	w := newWorld(t, simulate.Card{PFs: 2, VFs: 2, NUMANode: 1})
	common := function.Function{
		Class: function.Network, Vendor: "15b3", Driver: "mlx5_core", PFDriver: "mlx5_core",
		NUMANode: 1, PCIeRoot: "pci0000:3a",
		LinkType: "ether", LinkUp: true,
	}

	var want []function.Function
	add := func(
		address, pf pci.Address, kind function.Kind, index int, pfName, netdev, device string,
	) {
		f := common
		f.ID.Address, f.PF, f.Kind, f.Index, f.PFName, f.Netdev, f.Device = address, pf, kind, index, pfName, netdev, device
		if kind == function.PF {
			f.NumVFs, f.VFOffset, f.VFStride, f.TotalVFs = 2, 8, 1, 8
			if address == "0000:3b:00.1" {
				f.VFOffset = 15
			}
		}

		want = append(want, f)
	}

	add("0000:3b:00.0", "0000:3b:00.0", function.PF, -1, "enp59s0f0", "enp59s0f0", "a2dc")
	add("0000:3b:00.1", "0000:3b:00.1", function.PF, -1, "enp59s0f1", "enp59s0f1", "a2dc")
	add("0000:3b:01.0", "0000:3b:00.0", function.VF, 0, "enp59s0f0", "enp59s0f0v0", "101e")
	add("0000:3b:01.1", "0000:3b:00.0", function.VF, 1, "enp59s0f0", "enp59s0f0v1", "101e")
	add("0000:3b:02.0", "0000:3b:00.1", function.VF, 0, "enp59s0f1", "enp59s0f1v0", "101e")
	add("0000:3b:02.1", "0000:3b:00.1", function.VF, 1, "enp59s0f1", "enp59s0f1v1", "101e")
	if diff := gocmp.Diff(want, w.Snapshot()); diff != "" {
		t.Errorf("Functions (-want +got):\n%s", diff)
	}

	clear(w.Snapshot())
	if diff := gocmp.Diff(want, w.Snapshot()); diff != "" {
		t.Errorf("a snapshot is not the caller's own (-want +got):\n%s", diff)
	}
	if _, ok := w.Get(function.ID{Address: "0000:3b:03.0"}); ok {
		t.Error("Get found a Function that is not there")
	}

	const metrics = `# HELP xpu_inventory_functions Network functions of this node, by kind.
# TYPE xpu_inventory_functions gauge
xpu_inventory_functions{kind="PF"} 2
xpu_inventory_functions{kind="SF"} 0
xpu_inventory_functions{kind="VF"} 4
`

	if err := testutil.GatherAndCompare(w.registry, strings.NewReader(metrics),
		"xpu_inventory_functions"); err != nil {
		t.Error(err)
	}
}

func TestFollowsVFs(t *testing.T) {
	w := newWorld(t, simulate.Card{PFs: 1, TotalVFs: 16})
	if n := w.count(function.VF); n != 0 {
		t.Fatalf("%d VFs, want 0", n)
	}
	if err := w.simulated.AddVFs(firstPF, 8); err != nil {
		t.Fatal(err)
	}

	took := w.until(t, "8 VFs with netdevs", func() bool {
		n := 0
		for _, f := range w.Snapshot() {
			if f.Kind == function.VF && f.Netdev != "" {
				n++
			}
		}
		return n == 8
	})

	t.Logf("VFs added: seen after %v", took)
	if err := w.simulated.RemoveVFs(firstPF); err != nil {
		t.Fatal(err)
	}

	took = w.until(t, "no VFs", func() bool { return w.count(function.VF) == 0 })
	t.Logf("VFs removed: seen after %v", took)
}

func TestFollowsTheLink(t *testing.T) {
	w := newWorld(t, simulate.Card{PFs: 1, VFs: 2})
	for _, up := range []bool{false, true} {
		if err := w.simulated.SetLink(firstPF, up); err != nil {
			t.Fatal(err)
		}
		took := w.until(t, fmt.Sprintf("link up %t", up), func() bool {
			return w.get(t, firstPF).LinkUp == up && w.get(t, firstVF).LinkUp == up
		})
		t.Logf("link up %t: seen after %v", up, took)
	}
}

// TestRoutesReadAgain: as long as the routes cannot be read, every Function counts as used by the
// default route. When they can be read, no event is needed.
func TestRoutesReadAgain(t *testing.T) {
	simulated, err := simulate.New(t.Context(), simulate.Config{
		Root: t.TempDir(), Cards: []simulate.Card{{PFs: 1, VFs: 1}}, Log: logr.Discard(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { simulated.Close() })

	netdev := filepath.Join(simulated.SysRoot(), "bus/pci/devices", string(firstVF), "net/eth1")
	if err := os.MkdirAll(netdev, 0o755); err != nil {
		t.Fatal(err)
	}

	w := &world{changes: make(chan struct{}, 1)}
	var readable atomic.Bool
	w.Inventory = inventory.New(inventory.Options{
		SysRoot: simulated.SysRoot(), NetNS: netns.New(t).Path(), Changed: w.changed,
		Log: logr.Discard(),
		HostNetdevs: func() (hostuse.Netdevs, error) {
			if !readable.Load() {
				return nil, netlink.ErrDumpInterrupted
			}
			return nil, nil
		},
	})

	run(t, w.Inventory)
	time.Sleep(300 * time.Millisecond) // until the scans are over that the subscriptions cause
	if f := w.get(t, firstVF); f.Netdev != "eth1" || !f.DefaultRoute {
		t.Errorf("%+v is free of a default route that is not known", f)
	}

	readable.Store(true)
	w.until(t, "the routes are read again", func() bool { return !w.get(t, firstVF).DefaultRoute })
}

// TestNetdevMoves: a Function stays the same, except for Netdev, whatever a pod does with its
// netdev.
func TestNetdevMoves(t *testing.T) {
	w := newWorld(t, simulate.Card{PFs: 1, VFs: 2})
	pod := netns.New(t)
	before := w.get(t, firstVF)
	id := before.ID

	link, err := w.host.Handle().LinkByName(before.Netdev)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.host.Handle().LinkSetNsFd(link, pod.Fd()); err != nil {
		t.Fatal(err)
	}

	w.until(t, "the netdev in the pod", func() bool { return w.get(t, firstVF).Netdev == "" })
	want := before
	want.Netdev = ""
	if diff := gocmp.Diff(want, w.get(t, firstVF)); diff != "" {
		t.Errorf("in the pod (-want +got):\n%s", diff)
	}
	if name, err := w.Netdev(id); name != "" || err != nil {
		t.Errorf("Netdev = %q, %v, want none", name, err)
	}

	link, err = pod.Handle().LinkByName(before.Netdev)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(pod.Handle().LinkSetName(link, "net1"),
		pod.Handle().LinkSetNsFd(link, w.host.Fd())); err != nil {
		t.Fatal(err)
	}

	w.until(t, "the netdev back", func() bool { return w.get(t, firstVF).Netdev == "net1" })
	want.Netdev = "net1"
	if diff := gocmp.Diff(want, w.get(t, firstVF)); diff != "" {
		t.Errorf("back on the host (-want +got):\n%s", diff)
	}
	if name, err := w.Netdev(id); name != "net1" || err != nil {
		t.Errorf("Netdev = %q, %v, want net1", name, err)
	}
}

// TestPFMoves: VFs keep the properties that they have from their PF.
func TestPFMoves(t *testing.T) {
	w := newWorld(t, simulate.Card{PFs: 1, VFs: 1})
	pod := netns.New(t)
	before := w.get(t, firstVF)
	link, err := w.host.Handle().LinkByName("enp59s0f0")
	if err != nil {
		t.Fatal(err)
	}
	// The kernel does this when a netdev moves. Here the inventory sees it in any case.
	if err := w.host.Handle().LinkSetDown(link); err != nil {
		t.Fatal(err)
	}

	w.until(t, "the PF's netdev down", func() bool { return !w.get(t, firstPF).LinkUp })
	if err := w.host.Handle().LinkSetNsFd(link, pod.Fd()); err != nil {
		t.Fatal(err)
	}

	w.until(t, "the PF's netdev in the pod", func() bool { return w.get(t, firstPF).Netdev == "" })
	if diff := gocmp.Diff(before, w.get(t, firstVF)); diff != "" {
		t.Errorf("VF (-want +got):\n%s", diff)
	}
	if got := w.get(t, firstPF); got.PFName != "enp59s0f0" || !got.LinkUp {
		t.Errorf("PF: name %q, link %t, want the last known", got.PFName, got.LinkUp)
	}
}

// TestQuietWhenNothingChanges: events without consequences change nothing, and very many events
// cause few scans.
func TestQuietWhenNothingChanges(t *testing.T) {
	w := newWorld(t, simulate.Card{PFs: 1, VFs: 1})
	select {
	case <-w.changes: // from the first scan
	case <-time.After(soon):
		t.Fatal("the first scan was not told")
	}

	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "storm"}}
	if err := w.host.Handle().LinkAdd(bridge); err != nil {
		t.Fatal(err)
	}

	for n := range 2000 {
		if err := w.host.Handle().LinkSetMTU(bridge, 1000+n%2); err != nil {
			t.Fatal(err)
		}
	}

	// All of these events have been handled when the inventory has seen a change that comes after
	// them.
	if err := w.simulated.SetLink(firstPF, false); err != nil {
		t.Fatal(err)
	}

	changes := 0
	limit := time.After(soon)
	for w.get(t, firstPF).LinkUp {
		select {
		case <-w.changes:
			changes++
		case <-limit:
			t.Fatal("the change was not seen")
		}
	}

	if changes > 1 {
		t.Errorf("told of %d changes, want 1", changes)
	}
}

func TestNetdevOfWhatIsNotThere(t *testing.T) {
	root := t.TempDir()
	must.Succeed(t, os.MkdirAll(filepath.Join(root, "bus/pci/devices/0000:00:00.0"), 0o755))
	i := inventory.New(inventory.Options{SysRoot: root, Log: logr.Discard()})
	for _, id := range []function.ID{{Address: firstPF}, function.SubfunctionID(firstPF, 1)} {
		_, err := i.Netdev(id)
		if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), id.String()) {
			t.Errorf("%s: %v, want an ErrNotExist that names it", id, err)
		}
	}
}

// TestNetdevOfNoDriver: a netdev in another namespace differs from a missing netdev.
func TestNetdevOfNoDriver(t *testing.T) {
	for name, test := range map[string]struct {
		dirs []string
		none bool
	}{
		"no driver":                          {nil, true},
		"netdev in a pod":                    {[]string{"net"}, false},
		"virtio device without a driver":     {[]string{"virtio3"}, true},
		"netdev of a virtio device in a pod": {[]string{"virtio3/net"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			device := filepath.Join(root, "bus/pci/devices", string(firstVF))
			for _, dir := range append(test.dirs, ".") {
				if err := os.MkdirAll(filepath.Join(device, dir), 0o755); err != nil {
					t.Fatal(err)
				}
			}

			if err := os.Symlink("../../drivers/virtio-pci",
				filepath.Join(device, "driver")); err != nil {
				t.Fatal(err)
			}

			id := function.ID{Address: firstVF}
			netdev, err := inventory.New(inventory.Options{
				SysRoot: root, Log: logr.Discard(),
			}).Netdev(id)
			if netdev != "" || errors.Is(err, inventory.ErrNoNetdev) != test.none ||
				err != nil && !test.none {
				t.Errorf("Netdev = %q, %v", netdev, err)
			}
		})
	}
}

func TestNodeWithoutPCI(t *testing.T) {
	i := inventory.New(inventory.Options{
		SysRoot: t.TempDir(), NetNS: netns.New(t).Path(), Log: logr.Discard(),
	})
	run(t, i)
	if got := i.Snapshot(); len(got) != 0 {
		t.Errorf("Functions %v, want none", got)
	}
}

// TestBusUnreadable: the inventory keeps the known Functions while the bus cannot be read.
func TestBusUnreadable(t *testing.T) {
	root := t.TempDir()
	devices := filepath.Join(root, "bus/pci/devices")
	device := filepath.Join(devices, "0000:3b:00.0")
	if err := os.MkdirAll(device, 0o755); err != nil {
		t.Fatal(err)
	}

	for name, content := range map[string]string{
		"class": "0x020000", "vendor": "0x15b3", "device": "0x1015",
	} {
		if err := os.WriteFile(filepath.Join(device, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}

	host := netns.New(t)
	registry := prometheus.NewRegistry()
	w := &world{changes: make(chan struct{}, 1), host: host, registry: registry}
	failed := make(chan struct{}, 100)
	log := funcr.New(func(_, args string) {
		if strings.Contains(args, "Cannot read the Functions") {
			failed <- struct{}{}
		}
	}, funcr.Options{})

	w.Inventory = inventory.New(inventory.Options{
		SysRoot: root, NetNS: host.Path(), Changed: w.changed, Registry: registry, Log: log,
	})
	run(t, w.Inventory)
	w.until(t, "the NIC", func() bool { return w.count(function.PF) == 1 })
	if err := errors.Join(os.Rename(devices, devices+".away"),
		os.WriteFile(devices, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	if err := host.Handle().
		LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "event"}}); err != nil {
		t.Fatal(err)
	}

	<-failed
	if n := w.count(function.PF); n != 1 {
		t.Errorf("%d PFs are known, want the one that was", n)
	}
}

// TestProblemIsLoggedOnce: a malformed entry is logged and counted once while it stays the same.
func TestProblemIsLoggedOnce(t *testing.T) {
	host := netns.New(t)
	root := t.TempDir()
	devices := filepath.Join(root, "bus/pci/devices")
	device := filepath.Join(devices, "0000:3b:00.0")
	if err := os.MkdirAll(device, 0o755); err != nil {
		t.Fatal(err)
	}

	write := func(name, content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(device, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}

	write("class", "garbage")

	var mutex sync.Mutex
	var lines []string
	log := funcr.New(func(_, args string) {
		mutex.Lock()
		defer mutex.Unlock()
		if strings.Contains(args, "0000:3b:00.0") {
			lines = append(lines, args)
		}
	}, funcr.Options{})

	registry := prometheus.NewRegistry()
	w := &world{changes: make(chan struct{}, 1), host: host, registry: registry}
	w.Inventory = inventory.New(inventory.Options{
		SysRoot: root, NetNS: host.Path(), Changed: w.changed, Registry: registry, Log: log,
	})
	run(t, w.Inventory)

	// Each round changes another device, so that the test can wait for a scan.
	for n := range 3 {
		other := filepath.Join(devices, fmt.Sprintf("0000:3c:00.%d", n))
		if err := os.Mkdir(other, 0o755); err != nil {
			t.Fatal(err)
		}

		for name, content := range map[string]string{
			"class": "0x020000", "vendor": "0x15b3", "device": "0x1015",
		} {
			if err := os.WriteFile(filepath.Join(other, name), []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}

		if n == 2 {
			write("class", "other garbage")
		}

		if err := host.Handle().LinkAdd(&netlink.Bridge{
			LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("event%d", n)},
		}); err != nil {
			t.Fatal(err)
		}

		w.until(t, "the other NIC", func() bool { return w.count(function.PF) == n+1 })
	}

	mutex.Lock()
	defer mutex.Unlock()

	if len(lines) != 2 || !strings.Contains(lines[0], `"garbage`) ||
		!strings.Contains(lines[1], `other garbage`) {
		t.Errorf("log lines:\n%s\nwant one for each of the two states", strings.Join(lines, "\n"))
	}

	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, family := range families {
		if family.GetName() != "xpu_inventory_skipped_entries_total" {
			continue
		}
		for _, m := range family.GetMetric() {
			reason, want := m.GetLabel()[0].GetValue(), 0.0
			if reason == "class" {
				want = 2
			}
			if got := m.GetCounter().GetValue(); got != want {
				t.Errorf("skipped{reason=%q} = %v, want %v", reason, got, want)
			}
		}
	}
}

// BenchmarkFirstScan measures the first scan of a node with 1024 VFs on 4 PFs.
func BenchmarkFirstScan(b *testing.B) {
	root := large(b)
	for b.Loop() {
		if n, err := inventory.Rescan(root)(); err != nil || n != 4*257 {
			b.Fatalf("%d Functions, %v", n, err)
		}
	}
}

// BenchmarkRescan measures the scan after an event on that node.
func BenchmarkRescan(b *testing.B) {
	rescan := inventory.Rescan(large(b))
	for b.Loop() {
		if n, err := rescan(); err != nil || n != 4*257 {
			b.Fatalf("%d Functions, %v", n, err)
		}
	}
}

func large(b *testing.B) string {
	b.Helper()
	h, err := simulate.New(b.Context(), simulate.Config{
		Root: must.MemoryDir(b), Cards: []simulate.Card{{PFs: 4, VFs: 256}}, Log: logr.Discard(),
	})
	if err != nil {
		b.Fatal(err)
	}

	b.Cleanup(func() {
		if err := h.Close(); err != nil {
			b.Error(err)
		}
	})

	return h.SysRoot()
}

// TestDriver: the driver is read at each call. For a device that is gone, the error says so.
func TestDriver(t *testing.T) {
	root := t.TempDir()
	device := filepath.Join(root, "bus/pci/devices", string(firstVF))
	must.Succeed(t, os.MkdirAll(filepath.Join(root, "bus/pci/devices/0000:00:00.0"), 0o755))
	i := inventory.New(inventory.Options{SysRoot: root, Log: logr.Discard()})
	if _, err := i.Driver(function.ID{Address: firstVF}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a device that is gone: %v, want an ErrNotExist", err)
	}

	must.Succeed(t, os.MkdirAll(device, 0o755))
	for _, want := range []string{"", "igbvf", "vfio-pci"} {
		if want != "" {
			_ = os.Remove(filepath.Join(device, "driver"))
			must.Succeed(t,
				os.Symlink("../../../../bus/pci/drivers/"+want, filepath.Join(device, "driver")))
		}
		if driver, err := i.Driver(function.ID{Address: firstVF}); err != nil || driver != want {
			t.Errorf("driver %q, error %v; want %q", driver, err, want)
		}
	}
}

// TestHostUseByEvent: a VF that becomes a port of a host's bridge is seen as used, and as free when
// it leaves the bridge.
func TestHostUseByEvent(t *testing.T) {
	w := newWorld(t, simulate.Card{PFs: 1, VFs: 1})
	attributes := netlink.NewLinkAttrs()
	attributes.Name = "br0"
	bridge := &netlink.Bridge{LinkAttrs: attributes}
	must.Succeed(t, w.host.Handle().LinkAdd(bridge))
	link, err := w.host.Handle().LinkByName(w.get(t, firstVF).Netdev)
	must.Succeed(t, err)
	use := func() string { return w.get(t, firstVF).HostUse }

	must.Succeed(t, w.host.Handle().LinkSetMaster(link, bridge))
	w.until(t, "the VF is a port of the bridge", func() bool {
		return use() == "is a port of bridge br0"
	})
	must.Succeed(t, w.host.Handle().LinkSetNoMaster(link))
	w.until(t, "the VF has left the bridge", func() bool { return use() == "" })

	address, err := netlink.ParseAddr("192.0.2.7/24")
	must.Succeed(t, err)
	must.Succeed(t, w.host.Handle().AddrAdd(link, address))
	w.until(t, "the VF has an address", func() bool { return use() == "has address 192.0.2.7/24" })
	must.Succeed(t, w.host.Handle().AddrDel(link, address))
	w.until(t, "the VF has no address any more", func() bool { return use() == "" })
}
