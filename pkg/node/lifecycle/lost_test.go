// SPDX-License-Identifier: Apache-2.0

package lifecycle_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle/lifecycletest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// slot is a slot with a card that can be unplugged and plugged in again. The card has one Function.
// The slot finds the node's netdevs, serves the Function's Port, and receives the reports for the
// user.
type slot struct {
	t       *testing.T
	node    *node
	changes chan struct{}

	mutex sync.Mutex
	// there says that there is a device.
	there bool
	// driver is the reason why there is no netdev although there is a device.
	driver error
	// down says that the Port is not up.
	down bool
	// served counts how often the Port was asked for.
	served int
	// looked counts how often a netdev was looked for.
	looked int
	// pf is the reason why the PF has no netdev.
	pf      error
	reports []string
}

func (s *slot) Netdev(id function.ID) (string, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()

	s.looked++
	if id != lifecycletest.ID(0) {
		return "ens1f0", s.pf
	}
	if !s.there {
		return "", fmt.Errorf("is gone: %w", fs.ErrNotExist)
	}
	if s.driver != nil {
		return "", s.driver
	}

	return s.node.Netdev(lifecycletest.ID(0))
}

func (s *slot) Serve(context.Context, journal.Attachment) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.served++
	if s.down {
		return errors.New("the Port is not up")
	}
	return nil
}

func (s *slot) Report(a journal.Attachment) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.reports = append(s.reports, fmt.Sprintf("%s %s", a.State, a.Pod.Name))
}

func (s *slot) plug() {
	s.t.Helper()
	s.set(func() {
		s.node.Plug(0)
		s.there = true
	})
}

func (s *slot) unplug() {
	s.t.Helper()
	s.set(func() { s.there = false })
	s.node.Unplug(0)
	s.changes <- struct{}{}
}

// set changes the slot, and reports a change of devices as the kernel does.
func (s *slot) set(change func()) {
	s.mutex.Lock()
	change()
	s.mutex.Unlock()
	s.changes <- struct{}{}
}

func (s *slot) get(field *int) int {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return *field
}

// eventually waits until the record is in the state, and returns the record.
func (s *slot) eventually(j *journal.Journal, want journal.State) journal.Attachment {
	s.t.Helper()
	var a journal.Attachment
	must.EventuallySucceed(s.t, "state "+string(want), func() error {
		if a, _ = j.Get(lifecycletest.ID(0)); a.State != want {
			return fmt.Errorf("state %s", a.State)
		}
		return nil
	})

	return a
}

// runningWithSlot starts an agent on a node with a slot.
func runningWithSlot(t *testing.T) (*slot, *agent, *lifecycle.Manager) {
	t.Helper()
	return runningWith(t, func(*slot, *lifecycle.Options) {})
}

func runningWith(
	t *testing.T, more func(*slot, *lifecycle.Options),
) (*slot, *agent, *lifecycle.Manager) {
	t.Helper()
	n := newNode(t, 0)
	s := &slot{t: t, node: n, changes: make(chan struct{}, 10)}
	s.plug()
	a, stop := n.start()
	t.Cleanup(stop)

	options := lifecycle.Options{
		BootID: n.BootID, Patience: wait.Backoff{Duration: time.Millisecond, Steps: 3},
		Serve: s.Serve, Report: s.Report,
	}

	more(s, &options)
	manager := lifecycle.New(a.Journal, a.Engine, s, options, testr.New(t))
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := manager.Run(ctx, s.changes); err != nil {
			t.Error(err)
		}
	})

	t.Cleanup(func() { cancel(); running.Wait() })
	return s, a, manager
}

// start reserves the Function and attaches it to the pod's sandbox.
func start(
	t *testing.T, manager *lifecycle.Manager, want journal.Attachment, pod *netns.Namespace,
) {
	t.Helper()
	must.Succeed(t, manager.Reserve(t.Context(), want))
	_, err := manager.Attach(t.Context(), lifecycletest.ID(0), sandbox("s1", pod))
	must.Succeed(t, err)
}

// inPod returns what a pod sees of an interface: its link without the numbers that the kernel
// assigns, its addresses and its routes.
func inPod(t *testing.T, pod *netns.Namespace, name string) string {
	t.Helper()
	l, err := pod.Handle().LinkByName(name)
	must.Succeed(t, err)
	addresses, err := pod.Handle().AddrList(l, unix.AF_INET)
	must.Succeed(t, err)
	routes, err := pod.Handle().RouteList(l, unix.AF_INET)
	must.Succeed(t, err)
	text := fmt.Sprintf("%s mtu %d up %t\n", l.Attrs().Name, l.Attrs().MTU,
		l.Attrs().RawFlags&unix.IFF_UP != 0)
	for _, address := range addresses {
		text += address.IPNet.String() + "\n"
	}

	for _, route := range routes {
		text += fmt.Sprintf("to %s via %s metric %d\n", route.Dst, route.Gw, route.Priority)
	}

	return text + l.Attrs().HardwareAddr.String()
}

// TestDeviceReturns: a pod whose card was unplugged or reset gets its interface back as it was,
// once the Port is up. It does not matter whether it asked for a MAC and an MTU. The release
// restores the netdev as it was before the pod.
func TestDeviceReturns(t *testing.T) {
	t.Parallel()
	wishes := claimed(0)
	none := claimed(0)
	none.Interface.MAC, none.Interface.MTU = "", 0
	for name, want := range map[string]journal.Attachment{"with wishes": wishes, "without": none} {
		t.Run(name, func(t *testing.T) {
			s, a, manager := runningWithSlot(t)
			before := s.node.Snapshot(0)
			pod := netns.New(t)
			start(t, manager, want, pod)
			was := inPod(t, pod, "net0")

			s.unplug()
			record := s.eventually(a.Journal, journal.Lost)
			if record.LostAt.IsZero() || record.Sandbox != "s1" {
				t.Errorf("record %+v", record)
			}

			s.mutex.Lock()
			s.down = true
			s.mutex.Unlock()
			s.plug()

			for s.get(&s.served) == 0 {
				time.Sleep(time.Millisecond)
			}

			if now, _ := a.Journal.Get(lifecycletest.ID(0)); now.State != journal.Lost {
				t.Errorf("state %s although the Port is not up", now.State)
			}

			s.set(func() { s.down = false })
			record = s.eventually(a.Journal, journal.Attached)
			if is := inPod(t, pod, "net0"); is != was || !record.LostAt.IsZero() {
				t.Errorf("in the pod:\n%s\nwas:\n%s\nrecord %+v", is, was, record)
			}

			// The card is reset without a report in between.
			s.unplug()
			s.plug()
			reports := []string{"Lost pod", "Attached pod", "Lost pod", "Attached pod"}
			must.Eventually(t, fmt.Sprintf("reports %q", reports), func() bool {
				s.mutex.Lock()
				defer s.mutex.Unlock()
				return slices.Equal(s.reports, reports)
			})

			if is := inPod(t, pod, "net0"); is != was {
				t.Errorf("in the pod:\n%s\nwas:\n%s", is, was)
			}

			must.Succeed(t, manager.Unprepare(t.Context(), want.Claim.UID))
			s.node.WantAsBefore(0, before)
		})
	}
}

// TestLostEnds: a Function that its pod has lost still ends with the sandbox or the claim, whether
// the device is there or not.
func TestLostEnds(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(context.Context, *lifecycle.Manager) error{
		"with its sandbox": func(ctx context.Context, m *lifecycle.Manager) error {
			return m.Detach(ctx, lifecycletest.ID(0), "s1")
		},
		"with its claim": func(ctx context.Context, m *lifecycle.Manager) error {
			return m.Unprepare(ctx, "claim-1")
		},
	} {
		for _, back := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, back %t", name, back), func(t *testing.T) {
				s, a, manager := runningWithSlot(t)
				pod := netns.New(t)
				start(t, manager, claimed(0), pod)
				s.unplug()
				s.eventually(a.Journal, journal.Lost)

				if back {
					s.mutex.Lock()
					s.down = true
					s.mutex.Unlock()
					s.plug()
				} else {
					// a veth may be anywhere while the pod lives; see TestNowhere
					must.Succeed(t, pod.Unmount())
				}

				must.Succeed(t, end(t.Context(), manager))
				if record, exists := a.Journal.Get(lifecycletest.ID(0)); exists &&
					record.State != journal.Reserved {
					t.Errorf("state %s", record.State)
				}
				if message := manager.Lost(lifecycletest.ID(0)); message != "" {
					t.Errorf("lost: %s", message)
				}
			})
		}
	}
}

// TestProgramLosesDevice: a program that used the Function without a netdev does not get it back,
// and the report says so.
func TestProgramLosesDevice(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*slot){
		"unplugged":      func(s *slot) { s.unplug() },
		"another driver": func(s *slot) { s.set(func() { s.driver = nil }) },
	} {
		t.Run(name, func(t *testing.T) {
			s, a, _ := runningWithSlot(t)
			s.set(func() { s.driver = inventory.ErrNoNetdev })
			// The driver was bound when the Function was reserved.
			record := claimed(0)
			record.Interface = function.Interface{Name: "net0", Userspace: true}
			record.Setup = &journal.Setup{Driver: "vfio-pci"}
			pod := netns.New(t)
			_, place, err := a.Engine.Plan(t.Context(), netdev.Device{}, pod.Path(),
				record.Interface)
			must.Succeed(t, err)
			record.State, record.Sandbox, record.BootID, record.Place = journal.Attached, "s1", s.node.BootID, place
			record.Before, record.Observed = &netdev.Snapshot{}, &netdev.Observed{Name: "net0"}
			must.Succeed(t, a.Journal.Put(record))
			s.changes <- struct{}{}
			change(s)
			s.eventually(a.Journal, journal.Lost)
			s.set(func() { s.there, s.driver = true, inventory.ErrNoNetdev })
			// the queue takes this value only after it has handled the one before
			s.set(func() {})
			manager := lifecycle.New(a.Journal, a.Engine,
				s, lifecycle.Options{BootID: s.node.BootID}, testr.New(t))
			if message := manager.Lost(lifecycletest.ID(0)); !strings.Contains(message,
				"pod default/pod lost the Function") ||
				!strings.Contains(message, "delete the pod") {
				t.Errorf("message %q", message)
			}

			if record, _ := a.Journal.Get(lifecycletest.ID(0)); record.State != journal.Lost {
				t.Errorf("state %s after the device is back", record.State)
			}
		})
	}
}

// TestProgramsDeviceIsReplaced: a program loses its device when another one is in its place, which
// the agent tells by the number of the device. It is certain then that the pod cannot get it back.
// Nothing is certain of a device that cannot be read, or whose number was not recorded.
func TestProgramsDeviceIsReplaced(t *testing.T) {
	t.Parallel()
	var inode atomic.Uint64
	inode.Store(7)
	s, a, manager := runningWith(t, func(s *slot, o *lifecycle.Options) {
		s.driver = inventory.ErrNoNetdev
		o.Inode = func(function.ID) (uint64, error) {
			if n := inode.Load(); n != 0 {
				return n, nil
			}
			return 0, errors.New("cannot be read")
		}
	})
	want := claimed(0)
	want.Interface = function.Interface{Name: "net0", Userspace: true}
	start(t, manager, want, netns.New(t))
	record, _ := a.Journal.Get(lifecycletest.ID(0))
	if _, replaced := manager.Replaced(record); record.Inode != 7 || replaced {
		t.Errorf("inode %d, replaced %t at the attachment", record.Inode, replaced)
	}

	inode.Store(8)
	s.changes <- struct{}{}
	s.eventually(a.Journal, journal.Lost)
	record, _ = a.Journal.Get(lifecycletest.ID(0))
	if lost, replaced := manager.Replaced(record); lost <= 0 || !replaced {
		t.Errorf("lost for %s, replaced %t", lost, replaced)
	}

	for name, change := range map[string]func(*journal.Attachment){
		"the same":     func(a *journal.Attachment) { a.Inode = 8 },
		"unrecorded":   func(a *journal.Attachment) { a.Inode = 0 },
		"another boot": func(a *journal.Attachment) { a.BootID = "another" },
		"in use":       func(a *journal.Attachment) { a.State = journal.Attached },
		"unreadable":   func(*journal.Attachment) { inode.Store(0) },
	} {
		other := record
		change(&other)
		if _, replaced := manager.Replaced(other); replaced {
			t.Errorf("%s: replaced", name)
		}
		inode.Store(8)
	}
}

// TestNothingLost: a netdev that the pod renamed, or moved to a namespace of its own, is not lost.
func TestNothingLost(t *testing.T) {
	t.Parallel()
	s, a, manager := runningWithSlot(t)
	pod, inner := netns.New(t), netns.New(t)
	start(t, manager, claimed(0), pod)
	useAsPodWould(t, pod, "net0")
	moved, err := pod.Handle().LinkByName("mine0")
	must.Succeed(t, err)

	check := func(where string) {
		t.Helper()
		for range 2 { // the queue takes the second value only after it has handled the first
			s.changes <- struct{}{}
		}

		for len(s.changes) > 0 {
			time.Sleep(time.Millisecond)
		}

		if record, _ := a.Journal.Get(lifecycletest.ID(0)); record.State != journal.Attached ||
			len(s.reports) > 0 {
			t.Errorf("%s: state %s, reported %q", where, record.State, s.reports)
		}
	}

	check("renamed")
	must.Succeed(t, pod.Handle().LinkSetNsFd(moved, inner.Fd()))
	check("moved on")
	back, err := inner.Handle().LinkByName("mine0")
	must.Succeed(t, err)
	must.Succeed(t, inner.Handle().LinkSetNsFd(back, pod.Fd()))
	must.Succeed(t, manager.Unprepare(t.Context(), "claim-1"))
}

// TestVMRuntimeTakesDevice: a pod whose runtime passes the device to a virtual machine has not lost
// the Function. The pod has lost it if no driver has the device.
func TestVMRuntimeTakesDevice(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		driver string
		want   journal.State
	}{{"vfio-pci", journal.Attached}, {"", journal.Lost}} {
		t.Run("driver "+test.driver, func(t *testing.T) {
			s, a, manager := runningWith(t, func(_ *slot, o *lifecycle.Options) {
				o.Seen = func(id function.ID) (function.Function, bool) {
					return function.Function{ID: id, Driver: test.driver, NoNetdev: true}, true
				}
			})

			pod := netns.New(t)
			start(t, manager, claimed(0), pod)
			s.node.Unplug(0)
			s.set(func() { s.driver = inventory.ErrNoNetdev })
			if test.want == journal.Lost {
				s.eventually(a.Journal, journal.Lost)
				return
			}

			for range 2 { // the queue takes the second value only after it has handled the first
				s.changes <- struct{}{}
			}

			for len(s.changes) > 0 {
				time.Sleep(time.Millisecond)
			}

			if record, _ := a.Journal.Get(lifecycletest.ID(0)); record.State != test.want {
				t.Errorf("state %s, want %s", record.State, test.want)
			}
		})
	}
}

// maker makes SFs by plugging them in.
type maker struct {
	*slot
	made int
}

func (m *maker) Plan(_ context.Context, want journal.Attachment) (*journal.Setup, error) {
	return want.Setup, nil
}

func (m *maker) SetUp(context.Context, journal.Attachment) error {
	m.mutex.Lock()
	there := m.there
	m.mutex.Unlock()
	if !there {
		m.made++
		m.plug()
	}
	return nil
}

func (m *maker) TearDown(context.Context, journal.Attachment) error { return nil }

// TestSFIsMadeAgain: an SF that was made for its owner has to be made again when the card is back.
func TestSFIsMadeAgain(t *testing.T) {
	t.Parallel()
	var sfs *maker
	s, a, manager := runningWith(t, func(s *slot, o *lifecycle.Options) {
		sfs = &maker{slot: s}
		o.Setup = sfs
	})

	pod := netns.New(t)
	want := claimed(0)
	want.Setup = &journal.Setup{SF: true}
	start(t, manager, want, pod)
	was := inPod(t, pod, "net0")
	s.mutex.Lock()
	s.pf = fs.ErrNotExist // the PF is gone too
	s.mutex.Unlock()
	s.unplug()
	s.eventually(a.Journal, journal.Lost)
	if sfs.made != 0 {
		t.Errorf("the SF is made %d times without its PF", sfs.made)
	}

	s.set(func() { s.pf = nil })
	s.eventually(a.Journal, journal.Attached)
	if is := inPod(t, pod, "net0"); is != was || sfs.made != 1 {
		t.Errorf("made %d times; in the pod:\n%s\nwas:\n%s", sfs.made, is, was)
	}

	must.Succeed(t, manager.Unprepare(t.Context(), want.Claim.UID))
}

// containers gets the exposed Functions, and fails the calls with these numbers.
type containers struct {
	mutex   sync.Mutex
	reports []string
	refused []int
}

func (c *containers) Expose(a journal.Attachment) error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.reports = append(c.reports, string(a.State))
	if slices.Contains(c.refused, len(c.reports)-1) {
		return errors.New("not now")
	}
	return nil
}

// TestLostIsWithdrawn: no container gets a Function that its pod has lost, and a failure to
// withdraw it is retried. If the Function cannot be exposed again, the pod has not got it back
// either.
func TestLostIsWithdrawn(t *testing.T) {
	t.Parallel()
	devices := &containers{refused: []int{1, 3}}
	s, a, manager := runningWith(t, func(_ *slot, o *lifecycle.Options) {
		o.Expose = devices.Expose
	})
	pod := netns.New(t)
	start(t, manager, claimed(0), pod)
	s.unplug()
	s.eventually(a.Journal, journal.Lost)
	s.plug()
	want := []string{"Attached", "Lost", "Lost", "Attached", "Lost", "Attached"}
	must.Eventually(t, fmt.Sprintf("reports %q", want), func() bool {
		devices.mutex.Lock()
		defer devices.mutex.Unlock()
		return slices.Equal(devices.reports, want)
	})

	s.eventually(a.Journal, journal.Attached)
	// Unprepare waits for the Function's lock, under which the report is sent.
	must.Succeed(t, manager.Unprepare(t.Context(), "claim-1"))
	s.mutex.Lock()
	defer s.mutex.Unlock()

	if reports := []string{"Lost pod", "Attached pod"}; !slices.Equal(s.reports, reports) {
		t.Errorf("reported %q, want %q", s.reports, reports)
	}
}

// TestLostBeforeReboot: a Function that was attached before a reboot is gone with its pod, and does
// not count as lost.
func TestLostBeforeReboot(t *testing.T) {
	t.Parallel()
	s, a, manager := runningWithSlot(t)
	pod := netns.New(t)
	start(t, manager, claimed(0), pod)

	for _, state := range []journal.State{journal.Attached, journal.Lost} {
		record, _ := a.Journal.Get(lifecycletest.ID(0))
		record.State, record.BootID = state, "boot-0"
		must.Succeed(t, a.Journal.Put(record))
		s.mutex.Lock()
		s.there = false
		s.mutex.Unlock()

		for range 2 {
			s.changes <- struct{}{}
		}

		for len(s.changes) > 0 {
			time.Sleep(time.Millisecond)
		}

		if now, _ := a.Journal.Get(lifecycletest.ID(0)); now.State != state {
			t.Errorf("state %s, was %s", now.State, state)
		}
	}

	if s.get(&s.served) > 0 || len(s.reports) > 0 {
		t.Errorf("the Port was asked for %d times, reported %q", s.served, s.reports)
	}
}

// seen has what the inventory saw last.
type seen struct {
	function.Function
	known bool
}

func (s seen) Get(function.ID) (function.Function, bool) { return s.Function, s.known }

// TestNothingToLookAt: sysfs is not read if the inventory sees every Function where it was. Any
// other Function is looked up.
func TestNothingToLookAt(t *testing.T) {
	t.Parallel()
	bound := function.Function{Driver: "mlx5_core"}
	onHost := bound
	onHost.Netdev = "ens1f0v0"
	for name, test := range map[string]struct {
		seen   seen
		looked bool
	}{
		"in the pod":  {seen{bound, true}, false},
		"gone":        {seen{function.Function{}, false}, true},
		"on the host": {seen{onHost, true}, true},
		"no driver":   {seen{function.Function{}, true}, true},
	} {
		t.Run(name, func(t *testing.T) {
			s, _, manager := runningWith(t, func(_ *slot, o *lifecycle.Options) {
				o.Seen = test.seen.Get
			})
			pod := netns.New(t)
			start(t, manager, claimed(0), pod)
			before := s.get(&s.looked)
			s.changes <- struct{}{}

			if test.looked {
				for s.get(&s.looked) == before {
					time.Sleep(time.Millisecond)
				}
			} else {
				s.changes <- struct{}{}
				for len(s.changes) > 0 {
					time.Sleep(time.Millisecond)
				}
				if looked := s.get(&s.looked) - before; looked > 0 {
					t.Errorf("it was looked %d times", looked)
				}
			}

			must.Succeed(t, manager.Unprepare(t.Context(), "claim-1"))
		})
	}
}

// TestPodMovesNetdevToHost: a pod that moves its netdev to the host has not lost it, and does not
// get it back, because it could move it again. The release finds the netdev.
func TestPodMovesNetdevToHost(t *testing.T) {
	t.Parallel()
	s, a, manager := runningWithSlot(t)
	before := s.node.Snapshot(0)
	pod := netns.New(t)
	start(t, manager, claimed(0), pod)
	l, err := pod.Handle().LinkByName("net0")
	must.Succeed(t, err)
	must.Succeed(t, pod.Handle().LinkSetNsFd(l, s.node.Host.Fd()))

	for range 3 { // the queue takes the last value only after it has handled the one before
		s.changes <- struct{}{}
	}

	for len(s.changes) > 0 {
		time.Sleep(time.Millisecond)
	}

	if record, _ := a.Journal.Get(lifecycletest.ID(0)); record.State != journal.Attached ||
		len(s.reports) > 0 {
		t.Errorf("state %s, reported %q", record.State, s.reports)
	}
	if got, err := s.node.Netdev(lifecycletest.ID(0)); got != "net0" || err != nil {
		t.Errorf("netdev %q on the host, %v", got, err)
	}

	must.Succeed(t, manager.Unprepare(t.Context(), "claim-1"))
	s.node.WantAsBefore(0, before)
}
