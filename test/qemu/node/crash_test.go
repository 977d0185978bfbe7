// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/rdma"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/node"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// crashing is set in the environment of a process that must kill itself. Its value is a life in
// JSON.
const crashing = "XPU_TEST_CRASHING"

// TestMain also serves these processes.
func TestMain(m *testing.M) {
	if text := os.Getenv(crashing); text != "" {
		var l life
		err := json.Unmarshal([]byte(text), &l)
		if err == nil {
			err = l.run()
		}
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}

		os.Exit(0)
	}
	os.Exit(m.Run())
}

// life takes a VF into a pod and back, by the parts of the agent, in a process that kills itself on
// the way.
type life struct {
	PF      pci.Address
	VF      function.ID
	Index   int
	Journal string // path of the journal
	NetNS   string // path of the pod's network namespace
	At      int    // number of the event at which the process kills itself; 0 for none
	Before  string // beginning of another event at which it does; "" for none
	// Ethtool are settings of the driver that the pod asks for.
	Ethtool function.Ethtool
	RDMA    *netdev.RDMANames
	Hides   bool // the pod leaves a VLAN of the VF in a network namespace that cannot be found
}

// agent has the parts of the agent that touch VFs.
type agent struct {
	journal   *journal.Journal
	engine    *netdev.Engine
	lifecycle *lifecycle.Manager
}

// start makes an agent. It calls event at every point where a crash could matter: before each
// change of a netdev, and before and after each write to the journal.
func (l life) start(event func(string)) (*agent, error) {
	records, err := journal.Open(l.Journal)
	if err != nil {
		return nil, err
	}

	engine, err := netdev.New(netdev.Options{Trace: event})
	if err != nil {
		return nil, errors.Join(err, records.Close())
	}

	netdevs := inventory.New(inventory.Options{SysRoot: "/sys"})
	told := toldJournal{records, event}
	manager := lifecycle.New(told, engine, netdevs, lifecycle.Options{
		BootID: "boot", Driver: netdevs.Driver,
		RDMA: func(journal.Attachment) *netdev.RDMANames { return l.RDMA },
	}, logr.Discard())

	return &agent{
		journal: records, engine: engine, lifecycle: manager,
	}, nil
}

func (a *agent) close() error { return errors.Join(a.engine.Close(), a.journal.Close()) }

// toldJournal reports each write.
type toldJournal struct {
	*journal.Journal
	event func(string)
}

func (j toldJournal) Put(a journal.Attachment) error {
	j.event("before " + string(a.State) + " is written")
	defer j.event("after " + string(a.State) + " is written")
	return j.Journal.Put(a)
}

func (j toldJournal) Delete(id function.ID) error {
	j.event("before the record is deleted")
	defer j.event("after the record is deleted")
	return j.Journal.Delete(id)
}

// run runs the life in the process, and prints the events.
func (l life) run() error {
	count := 0
	a, err := l.start(func(what string) {
		count++
		fmt.Println(what)
		if count == l.At || l.Before != "" && strings.HasPrefix(what, l.Before) {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		}
	})

	if err != nil {
		return err
	}

	ctx := context.Background()
	err = a.lifecycle.Reserve(ctx, journal.Attachment{
		Function: l.VF, PF: l.PF, VFIndex: l.Index,
		Claim: journal.Claim{Namespace: "default", Name: "c", UID: "claim"},
		Interface: function.Interface{
			Name: "net1", MTU: 1400, MAC: "02:00:00:00:00:01",
			Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24")},
			Ethtool:   l.Ethtool,
			VF: &function.VFConfig{
				VLAN: new(100), QoS: new(3), SpoofCheck: new(false), Trust: new(true),
				MaxTxRate: new(100),
			},
		},
	})

	if err == nil {
		_, err = a.lifecycle.Attach(ctx, l.VF, lifecycle.Sandbox{ID: "sandbox", NetNS: l.NetNS})
	}

	if err == nil {
		err = useAsPodWould(l.NetNS)
	}

	if err == nil && l.RDMA != nil {
		err = useRDMAAsPodWould(l.NetNS)
	}

	if err == nil && l.Hides {
		err = hideVLAN(l.NetNS)
	}

	if err == nil {
		err = a.lifecycle.Unprepare(ctx, "claim")
	}

	return errors.Join(err, a.close())
}

// hideVLAN makes a VLAN on the interface in a network namespace that only this process holds.
func hideVLAN(path string) error {
	hidden, err := namespace.New()
	if err != nil {
		return err
	}

	return asPod(path, "mine0", func(pod *netlink.Handle, l netlink.Link) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex = "evil0", l.Attrs().Index
		attrs.Namespace = netlink.NsFd(int(hidden))
		return pod.LinkAdd(&netlink.Vlan{
			LinkAttrs: attrs, VlanId: 7, VlanProtocol: netlink.VLAN_PROTOCOL_8021Q,
		})
	})
}

// useAsPodWould makes the changes that a pod with NET_ADMIN can make.
func useAsPodWould(path string) error {
	return asPod(path, "net1", func(pod *netlink.Handle, l netlink.Link) error {
		return errors.Join(
			pod.LinkSetMTU(l, 1300), pod.LinkSetAlias(l, "mine"),
			pod.LinkAddAltName(l, "a-rather-long-alternative-name"),
			pod.LinkSetName(l, "mine0"),
		)
	})
}

// useRDMAAsPodWould makes the changes that a pod with NET_ADMIN can make of its RDMA devices.
func useRDMAAsPodWould(path string) error {
	ns, err := vnetns.GetFromPath(path)
	if err != nil {
		return err
	}
	defer ns.Close()

	var system rdma.System
	devices, err := system.List(ns)
	for _, d := range devices {
		err = errors.Join(err, system.SetModeration(ns, d.Index, !*d.Moderation),
			system.Rename(ns, d.Index, "mine"))
	}
	return err
}

// asPod calls do for an interface in the network namespace at a path.
func asPod(path, name string, do func(pod *netlink.Handle, l netlink.Link) error) error {
	ns, err := vnetns.GetFromPath(path)
	if err != nil {
		return err
	}
	defer ns.Close()

	pod, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer pod.Close()

	l, err := pod.LinkByName(name)
	if err != nil {
		return err
	}

	return do(pod, l)
}

// driverWishes are settings of the drivers that have different values on the host, by guest.
var driverWishes = map[string]function.Ethtool{
	"igb": {"rings": {"rx": "512", "tx": "128"}},
	"simnic": {
		"RSS": {
			"table": "weights 3 0 1", "hash function": "2",
			"hash key": strings.Repeat("6d5a56da", 10),
		},
	},
}

// TestCrashAtEachStep kills an agent at every step of attach and release of a VF with all
// properties that the card supports. Another agent then does the work of an agent's start, and releases
// the VF. The test checks that nothing of the first agent's work is left.
func TestCrashAtEachStep(t *testing.T) {
	ethtool, known := driverWishes[os.Getenv(plan.GuestVariable)]
	if !known {
		t.Skip("make test-qemu runs it in the guests igb and simnic")
	}
	pf := card.PFs(t)[0]
	node.Carrier(t, pf)
	crashAtEachStep(t, life{PF: pf, VF: node.VFs(t, pf)[1], Index: 1, Ethtool: ethtool},
		func() any { return driverSettings(t, node.VFs(t, pf)[1]) })
}

// TestRDMACrashAtEachStep does the same with a VF whose RDMA device goes to the pod too.
func TestRDMACrashAtEachStep(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	node.Carrier(t, pf)
	card.ExclusiveRDMA(t, pf)

	vf := node.VFs(t, pf)[1]
	dir := filepath.Join("bus/pci/devices", string(vf.Address))
	names := entries(t, filepath.Join("/sys", dir, "infiniband"))
	if len(names) != 1 {
		t.Fatalf("the VF has RDMA devices %q", names)
	}

	crashAtEachStep(t, life{
		PF: pf, VF: vf, Index: 1, RDMA: &netdev.RDMANames{Dir: dir, Names: names},
	}, func() any {
		devices, err := rdma.System{}.List(vnetns.None())
		must.Succeed(t, err)
		return devices
	})
}

// crashAtEachStep kills a process at each step of a life, and checks that a second one leaves the
// host as it was, with all that state returns.
func crashAtEachStep(t *testing.T, l life, state func() any) {
	t.Helper()
	before, was := node.HostState(t), state()
	for at := 1; ; at++ {
		l.Journal, l.At = filepath.Join(t.TempDir(), "journal.db"), at
		l.NetNS = netns.New(t).Path()

		last, killed := l.crash(t)
		if !killed {
			if at < 20 {
				t.Errorf("only %d steps", at-1)
			}
			node.WantState(t, before)
			return
		}

		t.Run(fmt.Sprintf("step %d %s", at, last), func(t *testing.T) {
			l.heal(t)
			node.WantState(t, before)
			if diff := cmp.Diff(was, state()); diff != "" {
				t.Errorf("settings (-before +after):\n%s", diff)
			}
		})
	}
}

// entries returns the names in a folder.
func entries(t *testing.T, folder string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(folder)
	must.Succeed(t, err)
	for _, entry := range list {
		names = append(names, entry.Name())
	}
	return names
}

// driverSettings returns the settings of a VF's netdev on the host.
func driverSettings(t *testing.T, vf function.ID) netdev.Settings {
	t.Helper()
	engine, err := netdev.New(netdev.Options{})
	must.Succeed(t, err)
	defer engine.Close()
	s, err := engine.Snapshot(t.Context(), netdev.Device{Name: card.Netdev(vf.Address)})
	must.Succeed(t, err)
	return s.Settings
}

// TestKilledWhileRebinding kills an agent between unbind and bind of a VF's driver, which free the
// VF of what its pod left on it. It checks that another agent binds the driver.
func TestKilledWhileRebinding(t *testing.T) {
	card.InGuest(t, "igb")
	pf := card.PFs(t)[0]
	node.Carrier(t, pf)
	before := node.HostState(t)

	l := life{
		PF: pf, VF: node.VFs(t, pf)[1], Index: 1, NetNS: netns.New(t).Path(),
		Journal: filepath.Join(t.TempDir(), "journal.db"), Before: "bind ", Hides: true,
	}
	if last, killed := l.crash(t); !killed {
		t.Fatalf("the driver was not bound again: %s", last)
	}
	if driver := card.Link(l.VF.Address, "driver"); driver != "" {
		t.Errorf("driver %s is bound after the crash", driver)
	}

	l.heal(t)
	node.WantState(t, before)
}

// crash runs a process that kills itself, and returns the last event that it printed. killed is
// false if the process ended by itself.
func (l life) crash(t *testing.T) (last string, killed bool) {
	t.Helper()
	text, err := json.Marshal(l)
	must.Succeed(t, err)
	child := exec.Command("/proc/self/exe")
	child.Env = append(os.Environ(), crashing+"="+string(text))
	output, err := child.CombinedOutput()
	lines := strings.Split(strings.TrimSpace(string(output)), "\n")
	last = lines[len(lines)-1]
	if err == nil {
		return last, false
	}

	exit, exited := errors.AsType[*exec.ExitError](err)
	if !exited || exit.Sys().(syscall.WaitStatus).Signal() != unix.SIGKILL {
		t.Fatalf("the process was not killed at step %d: %v\n%s", l.At, err, output)
	}

	return last, true
}

// heal plays the next agent.
func (l life) heal(t *testing.T) {
	t.Helper()
	a, err := l.start(func(string) {})
	must.Succeed(t, err)
	defer func() { must.Succeed(t, a.close()) }()

	if err := a.lifecycle.Recover(t.Context()); err != nil {
		t.Errorf("recover: %v", err)
	}
	if err := a.lifecycle.Unprepare(t.Context(), "claim"); err != nil {
		t.Errorf("release: %v", err)
	}
	if left := a.journal.All(); len(left) > 0 {
		t.Errorf("the journal still has %+v", left)
	}
}
