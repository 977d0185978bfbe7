// SPDX-License-Identifier: Apache-2.0

// Package lifecycletest provides a node for tests of packages that own Functions. Its Functions are
// SFs whose netdevs are ends of veth pairs, in a network namespace that stands for the host. The
// other ends are in a namespace that stands for the xPU. The real engine moves the netdevs, a real
// journal records them, and an agent can be ended at every point and started again.
package lifecycletest

import (
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	vnetns "github.com/vishvananda/netns"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/ethtool"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// Node is a host with Functions and its xPU.
type Node struct {
	Host, XPU *netns.Namespace
	// JournalPath is the path of the journal file.
	JournalPath string
	// BootID is the ID of the host's current boot.
	BootID string
	// Event, if set, is called at every point where the agent could end: before each change to a
	// netdev, and before and after each write to the journal.
	Event func(what string)

	t testing.TB
	// sysRoot is a sysfs that shows the netdevs of Host.
	sysRoot string
	peers   map[function.ID]int
}

// New returns a node with the given number of Functions.
func New(t testing.TB, functions int) *Node {
	t.Helper()
	n := &Node{
		Host: netns.New(t), XPU: netns.New(t),
		JournalPath: filepath.Join(t.TempDir(), "journal.db"), BootID: "boot-1",
		t: t, peers: map[function.ID]int{},
	}

	n.sysRoot = n.Host.Sysfs(t)
	for i := range functions {
		n.Plug(i)
	}

	return n
}

// ID returns the identity of the i-th Function, counted from 0.
func ID(i int) function.ID { return function.SubfunctionID("0000:3b:00.0", uint32(i)) }

// Netdev returns the name of the i-th Function's netdev on the host.
func Netdev(i int) string { return fmt.Sprintf("ens1f0s%d", i) }

// Queues is the number of queues that a netdev has in each direction.
const Queues = 3

// Representor returns the name of the i-th Function's representor on the xPU.
func Representor(i int) string { return fmt.Sprintf("pf0sf%d", i) }

// Plug makes the i-th Function's device.
func (n *Node) Plug(i int) {
	n.t.Helper()
	netns.ConnectQueues(n.t, n.Host, Netdev(i), n.XPU, Representor(i), Queues)
	representor, err := n.XPU.Handle().LinkByName(Representor(i))
	must.Succeed(n.t, err)
	n.peers[ID(i)] = representor.Attrs().Index
	n.poll(i)
}

// poll makes the i-th Function's netdev receive by NAPI, as every card does. A veth does so only
// for GRO.
func (n *Node) poll(i int) {
	n.t.Helper()
	link, err := n.Host.Handle().LinkByName(Netdev(i))
	must.Succeed(n.t, err)
	conn, err := ethtool.Dial(vnetns.NsHandle(n.Host.Fd()))
	must.Succeed(n.t, err)
	defer conn.Close()
	must.Succeed(n.t,
		conn.Change(link.Attrs().Index, "features", map[string]string{"rx-gro": ethtool.On}))
}

// Unplug removes the i-th Function's device, wherever its netdev is.
func (n *Node) Unplug(i int) {
	n.t.Helper()
	representor, err := n.XPU.Handle().LinkByName(Representor(i))
	must.Succeed(n.t, err)
	must.Succeed(n.t, n.XPU.Handle().LinkDel(representor))
}

// Netdev implements [lifecycle.NetdevFinder]. It finds a veth by its peer, which stays the same.
func (n *Node) Netdev(id function.ID) (string, error) {
	peer, ok := n.peers[id]
	if !ok {
		return "", fmt.Errorf("no Function %s", id)
	}

	links, err := netns.Listed(n.Host.Handle().LinkList)
	if err != nil {
		return "", err
	}

	for _, l := range links {
		if l.Type() == "veth" && l.Attrs().ParentIndex == peer {
			return l.Attrs().Name, nil
		}
	}

	return "", nil
}

// Snapshot returns the i-th Function's netdev as it is on the host.
func (n *Node) Snapshot(i int) netdev.Snapshot {
	n.t.Helper()
	engine, err := netdev.New(netdev.Options{HostNetNS: n.Host.Path(), SysRoot: n.sysRoot})
	must.Succeed(n.t, err)
	defer engine.Close()

	name, err := n.Netdev(ID(i))
	must.Succeed(n.t, err)
	if name == "" {
		n.t.Fatalf("Function %s has no netdev on the host", ID(i))
	}

	s, _, err := engine.Plan(n.t.Context(), netdev.Device{Name: name}, netns.New(n.t).Path(),
		function.Interface{Name: "any0"})
	must.Succeed(n.t, err)

	return s
}

// WantAsBefore fails the test unless the i-th Function's netdev is on the host and equals the
// snapshot.
func (n *Node) WantAsBefore(i int, before netdev.Snapshot) {
	n.t.Helper()
	if left := netdev.Diff(before, n.Snapshot(i)); len(left) > 0 {
		n.t.Errorf("Function %s is not as it was: %q", ID(i), left)
	}
}

// Agent is one run of the agent.
type Agent struct {
	Journal   *journal.Journal
	Engine    *netdev.Engine
	Lifecycle *lifecycle.Manager
}

// Start starts an agent with these hooks. The agent runs until stop is called.
func (n *Node) Start(hooks func(*Agent) lifecycle.Queue) (a *Agent, stop func()) {
	n.t.Helper()
	a = &Agent{}
	var err error
	a.Journal, err = journal.Open(n.JournalPath)
	must.Succeed(n.t, err)
	a.Engine, err = netdev.New(netdev.Options{
		HostNetNS: n.Host.Path(), SysRoot: n.sysRoot, Trace: n.report,
	})
	must.Succeed(n.t, err)

	a.Lifecycle = lifecycle.New(eventJournal{a.Journal, n.report}, a.Engine, n, lifecycle.Options{
		BootID: n.BootID, Patience: wait.Backoff{Duration: time.Millisecond, Steps: 3},
		Hooks: hooks(a),
	}, logr.Discard())

	return a, sync.OnceFunc(func() {
		a.Engine.Close()
		a.Journal.Close()
	})
}

func (n *Node) report(event string) {
	if n.Event != nil {
		n.Event(event)
	}
}

// eventJournal reports each write as an event.
type eventJournal struct {
	*journal.Journal
	report func(event string)
}

func (j eventJournal) Put(a journal.Attachment) error {
	j.report("before " + string(a.State))
	defer j.report("after " + string(a.State))
	return j.Journal.Put(a)
}

func (j eventJournal) Delete(id function.ID) error {
	j.report("before delete")
	defer j.report("after delete")
	return j.Journal.Delete(id)
}

// Crashes runs do and ends the agent at the given event, counted from 1. It returns false if there
// were fewer events.
func (n *Node) Crashes(at int, do func()) (crashed bool) {
	type crash struct{}
	defer func() {
		n.Event = nil
		if p := recover(); p != nil {
			if _, crashed = p.(crash); !crashed {
				panic(p)
			}
		}
	}()

	count := 0
	n.Event = func(string) {
		if count++; count == at {
			panic(crash{})
		}
	}

	do()
	return false
}
