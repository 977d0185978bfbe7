// SPDX-License-Identifier: Apache-2.0

package simulate_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/go-logr/logr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

// waitTimeout bounds waits for expected events.
const waitTimeout = 20 * time.Second

const (
	pf0 = pci.Address("0000:3b:00.0")
	vf0 = pci.Address("0000:3b:01.0")
	vf1 = pci.Address("0000:3b:01.1")
)

type world struct {
	*simulate.Host
	host, xpu *netns.Namespace
}

func newWorld(t *testing.T, cards ...simulate.Card) world {
	t.Helper()
	w := world{host: netns.New(t), xpu: netns.New(t)}
	w.Host = start(t,
		simulate.Config{
			Root: t.TempDir(), HostNS: w.host.Path(), XPUNS: w.xpu.Path(), Cards: cards,
		})
	return w
}

func start(t *testing.T, config simulate.Config) *simulate.Host {
	t.Helper()
	h, err := simulate.New(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})

	return h
}

func (w world) device(a pci.Address) string {
	return filepath.Join(w.SysRoot(), "bus/pci/devices", string(a))
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(data))
}

// shownNetdev returns the content of a function's net directory in the tree, or "".
func (w world) shownNetdev(t *testing.T, a pci.Address) string {
	t.Helper()
	return strings.Join(list(t, filepath.Join(w.device(a), "net")), " ")
}

func list(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}

	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// waitForNetdev waits for a netdev in the tree. It checks only when the directory changes.
func (w world) waitForNetdev(t *testing.T, a pci.Address, want string) {
	t.Helper()
	dir, err := filepath.EvalSymlinks(filepath.Join(w.device(a), "net"))
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	waitForChange(t, dir, func() bool { return w.shownNetdev(t, a) == want })
	t.Logf("%s shows %q after %v", a, want, time.Since(begin))
}

func waitForChange(t *testing.T, dir string, holds func() bool) {
	t.Helper()
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.Close()

	if err := watcher.Add(dir); err != nil {
		t.Fatal(err)
	}

	limit := time.After(waitTimeout)
	for !holds() {
		select {
		case <-watcher.Events:
		case err := <-watcher.Errors:
			t.Fatal(err)
		case <-limit:
			t.Fatalf("%s: what was waited for did not come", dir)
		}
	}
}

func link(t *testing.T, n *netns.Namespace, name string) netlink.Link {
	t.Helper()
	l, err := n.Handle().LinkByName(name)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return l
}

func gone(n *netns.Namespace, name string) bool {
	_, err := n.Handle().LinkByName(name)
	var missing netlink.LinkNotFoundError
	return errors.As(err, &missing)
}

func TestTree(t *testing.T) {
	w := newWorld(t, simulate.Card{PFs: 2, VFs: 8, NUMANode: 1})
	for path, want := range map[string]string{
		"bus/pci/devices/0000:3a:00.0/class":                        "0x060400",
		"bus/pci/devices/0000:3b:00.0/class":                        "0x020000",
		"bus/pci/devices/0000:3b:00.0/vendor":                       "0x15b3",
		"bus/pci/devices/0000:3b:00.0/device":                       "0xa2dc",
		"bus/pci/devices/0000:3b:00.0/numa_node":                    "1",
		"bus/pci/devices/0000:3b:00.0/sriov_numvfs":                 "8",
		"bus/pci/devices/0000:3b:00.0/sriov_totalvfs":               "8",
		"bus/pci/devices/0000:3b:00.0/sriov_offset":                 "8",
		"bus/pci/devices/0000:3b:00.1/sriov_offset":                 "15",
		"bus/pci/devices/0000:3b:00.1/sriov_stride":                 "1",
		"bus/pci/devices/0000:3b:00.1/virtfn1/device":               "0x101e",
		"bus/pci/devices/0000:3b:02.1/physfn/device":                "0xa2dc",
		"bus/pci/devices/0000:3b:00.1/net/enp59s0f1/phys_port_name": "p1",
		"bus/pci/devices/0000:3b:02.1/net/enp59s0f1v1/mtu":          "1500",
		"class/net/enp59s0f1v1/device/numa_node":                    "1",
		"class/net/enp59s0f1v1/operstate":                           "down",
	} {
		if got := read(t, filepath.Join(w.SysRoot(), path)); got != want {
			t.Errorf("%s is %q, want %q", path, got, want)
		}
	}

	for path, want := range map[string]string{
		"bus/pci/devices/0000:3b:02.1":         "../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:02.1",
		"bus/pci/devices/0000:3b:02.1/driver":  "../../../../bus/pci/drivers/mlx5_core",
		"bus/pci/devices/0000:3b:02.1/physfn":  "../0000:3b:00.1",
		"bus/pci/devices/0000:3b:00.1/virtfn1": "../0000:3b:02.1",
	} {
		if got, err := os.Readlink(filepath.Join(w.SysRoot(), path)); err != nil || got != want {
			t.Errorf("%s -> %q, %v, want %q", path, got, err, want)
		}
	}
}

func TestNetdevs(t *testing.T) {
	begin := time.Now()
	w := newWorld(t, simulate.Card{PFs: 2, VFs: 8}, simulate.Card{PFs: 2, VFs: 8, Bus: "5e"})
	t.Logf("2 cards with 2 x 8 VFs took %v", time.Since(begin))
	functions := w.Functions()
	if len(functions) != 36 {
		t.Fatalf("%d functions, want 36", len(functions))
	}

	macs := map[string]bool{}
	for _, f := range functions {
		netdev, representor := link(t, w.host, f.Netdev), link(t, w.xpu, f.Representor)
		if netdev.Attrs().ParentIndex != representor.Attrs().Index ||
			representor.Attrs().ParentIndex != netdev.Attrs().Index {
			t.Errorf("%s and %s are no pair", f.Netdev, f.Representor)
		}

		if mac := netdev.Attrs().HardwareAddr.String(); macs[mac] {
			t.Errorf("%s: MAC %s belongs to another netdev", f.Netdev, mac)
		} else {
			macs[mac] = true
		}

		dir := filepath.Join(w.device(f.Address), "net", f.Netdev)
		if got, want := read(t,
			filepath.Join(dir, "address")), netdev.Attrs().HardwareAddr.String(); got != want {
			t.Errorf("%s: address %s, want %s", f.Netdev, got, want)
		}
		if got, want := read(t,
			filepath.Join(dir, "ifindex")), fmt.Sprint(netdev.Attrs().Index); got != want {
			t.Errorf("%s: ifindex %s, want %s", f.Netdev, got, want)
		}
		if f.Index < 0 {
			continue
		}
		if got := link(t, w.xpu, f.PortID()); got.Attrs().Index != representor.Attrs().Index {
			t.Errorf("%s: is not the representor of %s", f.PortID(), f.Address)
		}
		if netdev.Attrs().Flags&net.FlagUp != 0 || representor.Attrs().Flags&net.FlagUp != 0 {
			t.Errorf("%s: is up from the start", f.Netdev)
		}
	}

	if got := functions[len(functions)-1].Representor; got != "pf3vf7" {
		t.Errorf("last representor is %s, want pf3vf7: PFs of all cards of an xPU are counted "+
			"through", got)
	}
}

func TestMACsDifferBetweenHostsAndStay(t *testing.T) {
	mac := func(root, name string) string {
		host, xpu := netns.New(t), netns.New(t)
		h, err := simulate.New(t.Context(),
			simulate.Config{
				Root: root, Name: name, HostNS: host.Path(), XPUNS: xpu.Path(),
				Cards: []simulate.Card{{PFs: 1}},
			})

		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()

		return link(t, host, "enp59s0f0").Attrs().HardwareAddr.String()
	}

	one, other := t.TempDir(), t.TempDir()
	if a, b := mac(one, ""), mac(one, ""); a != b {
		t.Errorf("the same root has MACs %s and %s", a, b)
	}
	if a, b := mac(one, ""), mac(other, ""); a == b {
		t.Errorf("two roots have the same MAC %s", a)
	}
	if a, b := mac(one, "node1"), mac(one, "node2"); a == b {
		t.Errorf("two names have the same MAC %s", a)
	}
	if a, b := mac(one, "node1"), mac(other, "node1"); a != b {
		t.Errorf("the same name has MACs %s and %s", a, b)
	}
}

func TestLink(t *testing.T) {
	w := newWorld(t, simulate.Card{PFs: 1, VFs: 1})
	dir := filepath.Join(w.device(pf0), "net/enp59s0f0")
	carrier := func(want string) {
		t.Helper()
		waitForChange(t, dir, func() bool { return read(t, filepath.Join(dir, "carrier")) == want })
	}

	carrier("1")
	if err := w.SetLink(pf0, false); err != nil {
		t.Fatal(err)
	}

	carrier("0")
	if err := w.SetLink(pf0, true); err != nil {
		t.Fatal(err)
	}

	carrier("1")
	if err := w.host.Handle().LinkSetDown(link(t, w.host, "enp59s0f0")); err != nil {
		t.Fatal(err)
	}

	waitForChange(t, dir, func() bool {
		_, err := os.Stat(filepath.Join(dir, "carrier"))
		return errors.Is(err, os.ErrNotExist) && read(t, filepath.Join(dir, "operstate")) == "down"
	})

	if err := w.SetLink(vf0, true); err == nil || !strings.Contains(err.Error(), string(vf0)) {
		t.Errorf("SetLink of a VF: %v, want an error", err)
	}
}

// TestNetdevFollowed moves a VF's netdev to a pod and back with another name, MAC and ifindex, and
// renames it on the host.
func TestNetdevFollowed(t *testing.T) {
	w := newWorld(t, simulate.Card{PFs: 1, VFs: 2})
	pod := netns.New(t)
	// Another netdev takes the free ifindex on the host.
	index := link(t, w.host, "enp59s0f0v0").Attrs().Index

	if err := w.host.Handle().LinkSetNsFd(link(t, w.host, "enp59s0f0v0"), pod.Fd()); err != nil {
		t.Fatal(err)
	}

	w.waitForNetdev(t, vf0, "")
	if _, err := os.Lstat(filepath.Join(w.SysRoot(), "class/net/enp59s0f0v0")); !errors.Is(err,
		os.ErrNotExist) {
		t.Errorf("class/net still has the netdev: %v", err)
	}

	squatter := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "enp59s0f0v0", Index: index}}
	if err := w.host.Handle().LinkAdd(squatter); err != nil {
		t.Fatal(err)
	}

	inPod := link(t, pod, "enp59s0f0v0")
	mac, _ := net.ParseMAC("02:00:5e:00:53:01")
	err := errors.Join(
		pod.Handle().LinkSetName(inPod, "net1"), pod.Handle().LinkSetHardwareAddr(inPod, mac),
		pod.Handle().LinkSetMTU(inPod, 1400), pod.Handle().LinkSetNsFd(inPod, w.host.Fd()))
	if err != nil {
		t.Fatal(err)
	}

	w.waitForNetdev(t, vf0, "net1")
	back := link(t, w.host, "net1")
	if back.Attrs().Index == index {
		t.Fatalf("the netdev has ifindex %d again, so this shows nothing", index)
	}

	for name, want := range map[string]string{
		"ifindex": fmt.Sprint(back.Attrs().Index), "mtu": "1400", "address": mac.String(),
	} {
		if got := read(t, filepath.Join(w.device(vf0), "net/net1", name)); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}

	if err := w.host.Handle().LinkSetName(back, "later"); err != nil {
		t.Fatal(err)
	}

	w.waitForNetdev(t, vf0, "later")
	if got := w.shownNetdev(t, vf1); got != "enp59s0f0v1" {
		t.Errorf("the other VF shows %q", got)
	}

	// Like in the kernel, a netdev's device appears first.
	class := filepath.Join(w.SysRoot(), "class/net")
	waitForChange(t, class, func() bool {
		return slices.Equal(list(t, class), []string{"enp59s0f0", "enp59s0f0v1", "later"})
	})
}

// TestAnnouncement checks that a program which reads the tree exactly on each message of the kernel
// finally sees the current state.
func TestAnnouncement(t *testing.T) {
	w := newWorld(t, simulate.Card{PFs: 1, VFs: 1})
	pod := netns.New(t)
	updates := make(chan netlink.LinkUpdate, 64)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	err := w.host.Do(func() error { return netlink.LinkSubscribe(updates, ctx.Done()) })
	if err != nil {
		t.Fatal(err)
	}

	until := func(want string) {
		t.Helper()
		limit := time.After(waitTimeout)
		for w.shownNetdev(t, vf0) != want {
			select {
			case <-updates:
			case <-limit:
				t.Fatalf("after the last message the tree shows %q, want %q",
					w.shownNetdev(t, vf0), want)
			}
		}
	}

	for range 20 {
		if err := w.host.Handle().LinkSetNsFd(link(t, w.host, "enp59s0f0v0"),
			pod.Fd()); err != nil {
			t.Fatal(err)
		}

		until("")
		if err := pod.Handle().LinkSetNsFd(link(t, pod, "enp59s0f0v0"), w.host.Fd()); err != nil {
			t.Fatal(err)
		}
		until("enp59s0f0v0")
	}
}

func TestAddAndRemoveVFs(t *testing.T) {
	w := newWorld(t, simulate.Card{PFs: 1, TotalVFs: 16})
	pod := netns.New(t)
	if n := len(w.Functions()); n != 1 {
		t.Fatalf("%d functions, want the PF alone", n)
	}
	if err := w.AddVFs(pf0, 2); err != nil {
		t.Fatal(err)
	}
	if got := read(t, filepath.Join(w.device(pf0), "sriov_numvfs")); got != "2" {
		t.Errorf("sriov_numvfs is %s, want 2", got)
	}

	for what, n := range map[string]int{"set it to 0 first": 3, "has 2 VFs": 17} {
		if err := w.AddVFs(pf0, n); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("AddVFs to what has some: %v, want an error with %q", err, what)
		}
	}

	if err := w.AddVFs(vf0, 1); err == nil {
		t.Error("AddVFs to a VF: no error")
	}
	// A VF in use is removed too.
	if err := w.host.Handle().LinkSetNsFd(link(t, w.host, "enp59s0f0v0"), pod.Fd()); err != nil {
		t.Fatal(err)
	}
	if err := w.RemoveVFs(pf0); err != nil {
		t.Fatal(err)
	}

	for n, name := range map[*netns.Namespace]string{
		pod: "enp59s0f0v0", w.host: "enp59s0f0v1", w.xpu: "pf0vf0",
	} {
		if !gone(n, name) {
			t.Errorf("%s is still there", name)
		}
	}

	for _, a := range []pci.Address{vf0, vf1} {
		if _, err := os.Lstat(w.device(a)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", a, err)
		}
	}

	if err := w.AddVFs(pf0, 16); err != nil {
		t.Fatal(err)
	}
	if n := len(w.Functions()); n != 17 {
		t.Errorf("%d functions, want 17", n)
	}
}

// TestNumVFs covers writes to sriov_numvfs.
func TestNumVFs(t *testing.T) {
	w := newWorld(t, simulate.Card{PFs: 1, TotalVFs: 8})
	file := filepath.Join(w.device(pf0), "sriov_numvfs")
	dir, err := filepath.EvalSymlinks(w.device(pf0))
	if err != nil {
		t.Fatal(err)
	}

	write := func(text, want string, functions int) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		waitForChange(t, dir, func() bool {
			return read(t, file) == want &&
				len(w.Functions()) == functions
		})
	}

	write("4\n", "4", 5)
	write("4", "4", 5)
	write("6\n", "4", 5) // rejected: EBUSY
	write("0\n", "0", 1)
	write("9\n", "0", 1) // rejected: ERANGE
	write("many\n", "0", 1)
	write("-1\n", "0", 1)
	write("8\n", "8", 9)
}

// TestNamespaceDies covers a pod that ends before its VF was moved back.
func TestNamespaceDies(t *testing.T) {
	w := newWorld(t, simulate.Card{PFs: 1, VFs: 1})
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br"}}
	representor := link(t, w.xpu, "pf0vf0")
	err := errors.Join(w.xpu.Handle().LinkAdd(bridge),
		w.xpu.Handle().LinkSetMaster(representor, bridge), w.xpu.Handle().LinkSetUp(representor))
	if err != nil {
		t.Fatal(err)
	}

	for range 3 {
		moveToDyingNamespace(t, w.host, link(t, w.host, "enp59s0f0v0"))
		// The pod has ended; the kernel destroys its namespace some time later.
		w.waitForNetdev(t, vf0, "")
		w.waitForNetdev(t, vf0, "enp59s0f0v0")
		netdev := link(t, w.host, "enp59s0f0v0").Attrs()
		again := link(t, w.xpu, "vf-0000-3b-01-0").Attrs()
		if again.Index != representor.Attrs().Index || again.Name != "pf0vf0" ||
			again.ParentIndex != netdev.Index {
			t.Errorf("representor is %s with ifindex %d, want pf0vf0 with %d", again.Name,
				again.Index, representor.Attrs().Index)
		}

		if again.MasterIndex != bridge.Index || again.Flags&net.FlagUp == 0 {
			t.Errorf("representor: bridge %d, flags %v, want bridge %d and up", again.MasterIndex,
				again.Flags, bridge.Index)
		}
	}
}

// moveToDyingNamespace moves a netdev into a namespace that then ends.
func moveToDyingNamespace(t *testing.T, from *netns.Namespace, l netlink.Link) {
	t.Helper()
	t.Run("pod", func(t *testing.T) {
		pod := netns.New(t)
		if err := from.Handle().LinkSetNsFd(l, pod.Fd()); err != nil {
			t.Fatal(err)
		}
	})
}

func TestClose(t *testing.T) {
	host, xpu, pod, wire := netns.New(t), netns.New(t), netns.New(t), netns.New(t)
	root := t.TempDir()
	config := simulate.Config{
		Root: root, HostNS: host.Path(), XPUNS: xpu.Path(),
		Cards:  []simulate.Card{{PFs: 1, VFs: 2}},
		Uplink: &simulate.Uplink{NetNS: wire.Path(), Bridge: "wire"},
	}

	h, err := simulate.New(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := simulate.New(t.Context(),
		simulate.Config{Root: root, HostNS: host.Path(), Cards: config.Cards}); err == nil {
		t.Error("a host without an xPU: no error")
	}
	if err := host.Handle().LinkSetNsFd(link(t, host, "enp59s0f0v0"), pod.Fd()); err != nil {
		t.Fatal(err)
	}

	for range 2 {
		if err := h.Close(); err != nil {
			t.Fatal(err)
		}
	}

	for name, n := range map[string]*netns.Namespace{"host": host, "xPU": xpu, "pod": pod} {
		links, err := n.Handle().LinkList()
		if err != nil || len(links) != 1 {
			t.Errorf("%s: %d links, %v, want lo alone", name, len(links), err)
		}
	}

	if entries, err := os.ReadDir(root); err != nil || len(entries) != 0 {
		t.Errorf("root has %v, %v, want nothing", entries, err)
	}
}

func TestRootOfSomethingElse(t *testing.T) {
	root := t.TempDir()
	file := filepath.Join(root, "sys/precious")
	if err := errors.Join(os.Mkdir(filepath.Dir(file), 0o755),
		os.WriteFile(file, nil, 0o644)); err != nil {
		t.Fatal(err)
	}

	if _, err := simulate.New(t.Context(),
		simulate.Config{Root: root, Cards: []simulate.Card{{PFs: 1}}}); err == nil ||
		!strings.Contains(err.Error(), root) {
		t.Errorf("%v, want an error that names %s", err, root)
	}

	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
}

// TestKilledBefore covers a tree that a killed simulation left behind.
func TestKilledBefore(t *testing.T) {
	root := t.TempDir()
	start(t, simulate.Config{Root: root, Cards: []simulate.Card{{PFs: 2, VFs: 8}}})
	h := start(t, simulate.Config{Root: root, Cards: []simulate.Card{{PFs: 1}}})
	if _, err := os.Lstat(filepath.Join(h.SysRoot(), "bus/pci/devices/0000:3b:00.1")); !errors.Is(
		err, os.ErrNotExist,
	) {
		t.Errorf("the earlier PF is still there: %v", err)
	}
}

func TestTreeAlone(t *testing.T) {
	root := must.MemoryDir(t)
	begin := time.Now()
	h := start(t, simulate.Config{Root: root, Cards: []simulate.Card{{PFs: 4, VFs: 256}}})
	t.Logf("1024 VFs took %v", time.Since(begin))
	if n := len(h.Functions()); n != 4+1024 {
		t.Errorf("%d functions, want 1028", n)
	}
	if err := h.SetLink(pf0, false); err == nil {
		t.Error("SetLink without netdevs: no error")
	}
}

// TestUplink sends frames from one xPU to another.
func TestUplink(t *testing.T) {
	wire := netns.New(t)
	xpus := []*netns.Namespace{netns.New(t), netns.New(t)}
	for n, xpu := range xpus {
		start(t, simulate.Config{
			Root: t.TempDir(), HostNS: netns.New(t).Path(), XPUNS: xpu.Path(),
			Cards: []simulate.Card{{PFs: 1}}, Log: logr.Discard(),
			Uplink: &simulate.Uplink{
				NetNS: wire.Path(), Bridge: "wire",
				Address: netip.MustParsePrefix(fmt.Sprintf("192.0.2.%d/24", n+1)),
			},
		})
	}

	var there net.PacketConn
	err := xpus[1].Do(func() (err error) {
		there, err = net.ListenPacket("udp4", "192.0.2.2:4789")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()

	err = xpus[0].Do(func() error {
		here, err := net.Dial("udp4", "192.0.2.2:4789")
		if err != nil {
			return err
		}
		defer here.Close()
		_, err = here.Write([]byte("over the uplink"))
		return err
	})

	if err != nil {
		t.Fatal(err)
	}
	if err := there.SetReadDeadline(time.Now().Add(waitTimeout)); err != nil {
		t.Fatal(err)
	}

	buf := make([]byte, 64)
	n, _, err := there.ReadFrom(buf)
	if got := string(buf[:n]); err != nil || got != "over the uplink" {
		t.Errorf("got %q, %v", got, err)
	}
	if up := link(t, xpus[0], "p0").Attrs().RawFlags & unix.IFF_UP; up == 0 {
		t.Error("p0 is down")
	}
}
