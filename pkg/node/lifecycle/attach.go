// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/uptime"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Reserve waits until the owner is admitted (see [Manager.Admit]), records the owner and the
// interface that it wants, and sets the Function up.
//
// Another Reserve for the same owner replaces the interface unless the Function is already being
// attached, and continues a setup that failed. A reservation without a claim and a CNI request is
// for a pod that is not known yet. Another Reserve of that kind releases the Function first and
// makes a new reservation, unless the Function is [Untouched].
func (m *Manager) Reserve(ctx context.Context, want journal.Attachment) error {
	_, err := m.ReserveAs(ctx, want, func(journal.Attachment) (journal.Attachment, error) {
		return want, nil
	})
	return err
}

// ReserveAs is [Manager.Reserve] for an owner whose wish depends on the Function's current record.
// It passes the record to wish as [Manager.Admit] would return it. wish is called once the owner is
// admitted, under the Function's lock. It is not called if the Function is already attached for the
// owner. ReserveAs returns the record that it found.
func (m *Manager) ReserveAs(
	ctx context.Context, owner journal.Attachment,
	wish func(have journal.Attachment) (want journal.Attachment, err error),
) (have journal.Attachment, err error) {
	defer wrap(&err, owner.Function)
	d, err := m.reconcile(ctx, triggerOf(owner), owner.Function, func(d decision) error {
		want, err := wish(d.found())
		if err != nil {
			return err
		}
		return m.reserve(ctx, d.record, want)
	})

	return d.found(), err
}

// reserve replaces the record of the Function, if any, and sets the Function up. The caller must
// hold the Function's lock.
func (m *Manager) reserve(ctx context.Context, have, want journal.Attachment) (err error) {
	checked := want.Interface
	if want.CNI == nil && (want.Claim.UID == "" || want.Claim.Share != "") {
		// The device plugin does not know the name yet, and neither does the owner of a share.
		checked.Name = cmp.Or(checked.Name, "later")
	}
	if err := checked.Validate(); err != nil {
		return err
	}
	if have.State != Free && have.Claim.UID != want.Claim.UID {
		// the owner has changed since the request was made up
		return taken("belongs to %s", describeOwner(have))
	}
	if err := m.awaitUsable(ctx, want); err != nil {
		return err
	}

	cni, wanted := want.CNI, want.Interface
	want = want.BackToReserved()
	want.CNI, want.Interface = cni, wanted
	want.Ended, want.ReservedAt, want.Made = have.Ended, have.ReservedAt, have.Made
	// A new allocation gets a new time, because a sweep must not take it for the reservation of an
	// earlier pod that is gone.
	again := triggerOf(want).event == Allocate
	if want.ReservedAt.IsZero() || again {
		want.ReservedAt, want.Made = m.options.Now().UTC(), uptime.Of(m.options.BootID)
	}

	want.Driver = cmp.Or(have.Driver, m.driver(want.Function))
	// The xPU may serve the Port already, and only a release deletes it.
	want.Port = cmp.Or(want.Port, have.Port)
	if have.Setup != nil {
		want.Setup = have.Setup // only a release undoes it
	} else if want.Setup != nil {
		if want.Setup, err = m.options.Setup.Plan(ctx, want); err != nil {
			return err
		}
	}

	if !reflect.DeepEqual(have, want) {
		if err := m.put(want); err != nil {
			return err
		}
		m.log.V(1).Info("Function reserved", "function", want.Function.String(), "owner",
			describeOwner(want))
		m.options.Reserved(want.Function)
	}

	return m.setUp(ctx, want)
}

// driver returns the current driver of a Function, or "" if it is unknown. An unknown driver is not
// compared after the release.
func (m *Manager) driver(id function.ID) string {
	if m.options.Driver == nil {
		return ""
	}

	driver, err := m.options.Driver(id)
	if err != nil {
		m.log.V(1).Info("The driver of a Function cannot be read, and is not compared", "function",
			id.String(), "error", err.Error())
	}

	return driver
}

// inode returns a number that differs between a Function's device and a later one at its address, or
// 0 if it is unknown.
func (m *Manager) inode(id function.ID) uint64 {
	if m.options.Inode == nil {
		return 0
	}

	inode, err := m.options.Inode(id)
	if err != nil {
		return 0
	}
	return inode
}

// UnusableError is returned for a Function that cannot be attached, according to what the host
// shows of it.
type UnusableError struct{ reason string }

func (e UnusableError) Error() string { return e.reason }

// awaitUsable returns when the Function can be attached for the owner. It waits for at most
// [Patience], because a netdev may only just have come back, and some drivers make it a moment
// late.
func (m *Manager) awaitUsable(ctx context.Context, want journal.Attachment) error {
	driver := ""
	if want.Setup != nil {
		driver = want.Setup.Driver
	}

	return Retry(ctx, Patience(), func(context.Context) (done bool, err error) {
		if reason := m.options.Unusable(want.Function, driver); reason != "" {
			return false, UnusableError{reason}
		}
		return true, nil
	})
}

// setUp completes the setup of the record, if it has one. The caller must hold the Function's lock.
func (m *Manager) setUp(ctx context.Context, a journal.Attachment) error {
	if a.Setup == nil {
		return nil
	}
	return m.options.Setup.SetUp(ctx, a)
}

// Sandbox is a pod sandbox that asks for a Function.
type Sandbox struct {
	// ID is the ID of the sandbox container. Each sandbox of a pod has another one.
	ID string
	// NetNS is the path of the sandbox's network namespace.
	NetNS string
	Pod   journal.Pod
}

// Attach moves a reserved Function into a sandbox as the interface that was reserved. Another call
// for the same sandbox returns the same result. A Function in an older sandbox of the same pod, or
// in a sandbox that is gone, is brought back first. A Function in another pod is an error.
func (m *Manager) Attach(
	ctx context.Context, id function.ID, sandbox Sandbox,
) (observed netdev.Observed, err error) {
	defer wrap(&err, id)
	if sandbox.ID == "" || sandbox.NetNS == "" {
		return observed, fmt.Errorf("sandbox %q with network namespace %q: both must be given",
			sandbox.ID, sandbox.NetNS)
	}

	t := trigger{event: SandboxStarts, pod: sandbox.Pod, sandbox: sandbox.ID, netNS: sandbox.NetNS}
	d, err := m.reconcile(ctx, t, id, func(d decision) (err error) {
		ctx, end := m.options.Tracer.Stage(ctx, d.record.Owner(), "attach Function",
			attribute.String("xpu.function", id.String()))
		observed, err = m.move(ctx, d.record, sandbox)
		end(err)
		return err
	})

	if err == nil && d.step == Keep {
		observed = *d.record.Observed
	}

	return observed, err
}

// maxNames is how many names are tried for an interface whose name the pod did not choose. A pod
// has only a few interfaces.
const maxNames = 64

// move moves the netdev into the sandbox. The caller must hold the Function's lock.
func (m *Manager) move(
	ctx context.Context, record journal.Attachment, sandbox Sandbox,
) (netdev.Observed, error) {
	if err := m.awaitUsable(ctx, record); err != nil {
		return netdev.Observed{}, err
	}

	device, before, place, err := m.plan(ctx, record, sandbox.NetNS)
	for tries := 0; record.AnyName && errors.Is(err, netdev.ErrNameTaken) &&
		tries < maxNames; tries++ {
		record.Interface.Name = m.otherName(record)
		device, before, place, err = m.plan(ctx, record, sandbox.NetNS)
	}

	if err != nil {
		return netdev.Observed{}, err
	}

	record.State, record.BootID = journal.Attaching, m.options.BootID
	record.Sandbox, record.Pod = sandbox.ID, sandbox.Pod
	record.Before, record.Place = &before, place
	if record.Interface.Userspace {
		record.Inode = m.inode(record.Function)
	}
	return m.transfer(ctx, record, device, before, record.Interface)
}

// transfer writes the record, whose state is Attaching or Reattaching, and moves the netdev to the
// record's place. now describes the netdev before the move. A transfer that fails is undone. If the
// agent ends before that, [Manager.Recover] undoes it.
func (m *Manager) transfer(
	ctx context.Context, record journal.Attachment, device netdev.Device, now netdev.Snapshot,
	want function.Interface,
) (netdev.Observed, error) {
	start, state := time.Now(), record.State
	if err := m.put(record); err != nil {
		return netdev.Observed{}, err
	}

	observed, err := m.engine.Attach(ctx, device, now, record.Place, want)
	if err == nil {
		record.State, record.Observed = journal.Attached, &observed
		record.AttachedAt, record.LostAt = m.options.Now().UTC(), time.Time{}
		record.Place.Index, record.Made = observed.Index, uptime.Of(m.options.BootID)
		err = m.put(record)
	}

	if err == nil {
		err = m.options.Expose(record)
	}
	if err != nil {
		return netdev.Observed{}, errors.Join(err,
			m.undoTransfer(context.WithoutCancel(ctx), record.Function, state))
	}

	m.announce(record)
	m.log.Info("Function attached", "function", record.Function.String(), "interface",
		observed.Name,
		"pod", record.Pod.Namespace+"/"+record.Pod.Name, "sandbox", record.Sandbox, "took",
		time.Since(start))

	if state == journal.Reattaching {
		m.healthChanged(record.Function)
		m.options.Report(record)
	}

	return observed, nil
}

// undoTransfer moves the netdev back to the host after a transfer that failed. state is the state
// in which the transfer began.
func (m *Manager) undoTransfer(ctx context.Context, id function.ID, state journal.State) error {
	a, _ := m.journal.Get(id)
	if state == journal.Reattaching {
		a.State = state // the state is Attached already if the transfer failed at its end
		return m.lose(ctx, a)
	}
	defer m.healthChanged(id)
	return m.bringBack(ctx, a, journal.Detaching)
}

// announceTimeout is how long an interface may take to get a carrier. After that, its addresses are
// not announced.
const announceTimeout = 5 * time.Second

// announce announces the interface's addresses to its neighbours, in the background.
func (m *Manager) announce(record journal.Attachment) {
	if m.options.Announce == nil || record.Interface.Userspace ||
		len(record.Observed.Addresses) == 0 {
		return
	}

	m.mutex.Lock()
	defer m.mutex.Unlock()

	if m.lasting.Err() != nil {
		return // Run has ended, and waits for no more announcements
	}

	m.announcing.Go(func() {
		ctx, cancel := context.WithTimeout(m.lasting, announceTimeout)
		defer cancel()
		err := m.options.Announce(ctx, netdev.Attached{
			Place: record.Place, Want: record.Interface, Observed: *record.Observed,
		})
		if err != nil {
			m.log.V(1).Info("The interface's addresses are not announced", "function",
				record.Function.String(), "reason", err.Error())
		}
	})
}

func (m *Manager) endAnnouncements() {
	m.mutex.Lock()
	m.stop()
	m.mutex.Unlock()
	m.announcing.Wait()
}

// otherName returns the name after the record's ("net2" after "net1") that no other Function of the
// pod has.
func (m *Manager) otherName(record journal.Attachment) string {
	var number int
	_, _ = fmt.Sscanf(record.Interface.Name, "net%d", &number) // 0 for any other name

	for {
		number++
		name := fmt.Sprintf("net%d", number)
		if !slices.ContainsFunc(m.journal.ByPod(record.Pod.UID), func(a journal.Attachment) bool {
			return a.Function != record.Function && a.Interface.Name == name
		}) {
			return name
		}
	}
}

// Patience returns how often a netdev is looked for that is not on the host yet: 14 times within 2
// s. The reason may be that its driver was just bound, that udev renames it, or that it is on its
// way back from another namespace.
func Patience() wait.Backoff {
	return wait.Backoff{Duration: 5 * time.Millisecond, Factor: 1.5, Steps: 14}
}

// Retry calls try until it is done, as often as patience allows. It returns the error of the last
// call, or the error of ctx if try was never called.
func Retry(
	ctx context.Context, patience wait.Backoff, try func(context.Context) (done bool, err error),
) (err error) {
	waitErr := wait.ExponentialBackoffWithContext(ctx, patience,
		func(ctx context.Context) (done bool, _ error) {
			done, err = try(ctx)
			return done, nil
		})
	return cmp.Or(err, waitErr)
}

func (m *Manager) plan(ctx context.Context, record journal.Attachment, netNS string) (
	device netdev.Device, before netdev.Snapshot, place netdev.Place, err error,
) {
	err = Retry(ctx, Patience(), func(ctx context.Context) (done bool, err error) {
		device, err = Device(m.netdevs, record)
		if record.Interface.Userspace {
			device.Name, err = "", nil
		}

		device.RDMA = m.rdma(record)
		if err == nil {
			before, place, err = m.engine.Plan(ctx, device, netNS, record.Interface)
		}

		id, seen := record.Function, before.Identity
		if err == nil && !record.Interface.Userspace && id.Subfunction == "" && seen.Bus == "pci" &&
			seen.Parent != string(id.Address) {
			// Another netdev took the name of the Function's netdev between the two calls.
			err = fmt.Errorf("netdev %s: belongs to Function %s by now: %w", before.Name,
				seen.Parent, netdev.ErrNoNetdev)
		}

		return !errors.Is(err, netdev.ErrNoNetdev), err
	})
	if errors.Is(err, netdev.ErrNoNetdev) && m.driverless(record.Function) {
		err = fmt.Errorf("%w: %w", UnusableError{"the Function has no driver"}, err)
	}
	return device, before, place, err
}

// rdma names the RDMA devices that go to the pod with the Function. One that was given another
// driver for its owner has none.
func (m *Manager) rdma(record journal.Attachment) *netdev.RDMANames {
	if m.options.RDMA == nil || record.Setup != nil && record.Setup.Driver != "" {
		return nil
	}
	return m.options.RDMA(record)
}

// driverless reports whether a Function certainly has no driver now, although the inventory may not
// know it yet.
func (m *Manager) driverless(id function.ID) bool {
	if m.options.Driver == nil {
		return false
	}
	driver, err := m.options.Driver(id)
	return err == nil && driver == ""
}

// Device returns the host's view of a Function. If the Function has no netdev on the host, the
// error is [netdev.ErrNoNetdev], and the device has only the PF and the port.
func Device(netdevs NetdevFinder, record journal.Attachment) (netdev.Device, error) {
	var device netdev.Device
	if number, isSF := record.Function.SFNum(); isSF {
		device.Port = &function.EswitchPort{PF: record.PF, SF: true, Number: number}
	}

	if record.IsVF() {
		device.Port = &function.EswitchPort{PF: record.PF, Number: uint32(record.VFIndex)}
		// Without the PF's netdev, the VF's settings can be neither read nor changed. This matters
		// only to owners that ask for such settings.
		if name, err := netdevs.Netdev(function.ID{Address: record.PF}); err == nil && name != "" {
			device.PF = &netdev.PF{Name: name, Address: string(record.PF), VF: record.VFIndex}
		}
	}

	name, err := netdevs.Netdev(record.Function)
	if err != nil {
		return device, fmt.Errorf("%w: %w", netdev.ErrNoNetdev, err)
	}
	if name == "" {
		return device, netdev.ErrNoNetdev
	}

	device.Name = name
	return device, nil
}

// IsIn reports whether an attached Function is in the network namespace at the path. Several paths
// can lead to the same namespace.
func (m *Manager) IsIn(a journal.Attachment, netNS string) (bool, error) {
	return m.engine.Alive(netdev.Place{NetNS: netNS, Cookie: a.Place.Cookie})
}

// Addresses are the result of an IPAM plugin for an interface that is already attached.
type Addresses struct {
	Addresses []netip.Prefix
	Routes    []function.Route
	// Result is the output of the plugin.
	Result json.RawMessage
}

// Check returns how an attached Function differs from what was attached; nothing if there is no
// difference. expect, if set, adapts the expected interface to the changes that later plugins of
// the chain made.
func (m *Manager) Check(
	ctx context.Context, id function.ID, expect func(*netdev.Attached),
) (differences []string, err error) {
	err = m.withLock(ctx, id, func(record journal.Attachment) (err error) {
		defer wrap(&err, id)
		if record.State != journal.Attached {
			differences = []string{"is not attached"}
			return nil
		}

		// the netdev is in the pod, and only the PF matters here
		device, _ := Device(m.netdevs, record)
		is := attached(record)
		if expect != nil {
			expect(&is)
		}

		differences, err = m.engine.Check(ctx, device, is)
		return err
	})
	return differences, err
}

// Address adds addresses to an interface that is attached, if the attachment belongs to the CNI
// request. Addresses that the interface already has are no error.
func (m *Manager) Address(
	ctx context.Context, id function.ID, belongs func(journal.Attachment) bool, add Addresses,
) error {
	return m.withLock(ctx, id, func(record journal.Attachment) (err error) {
		defer wrap(&err, id)
		if record.State != journal.Attached || record.CNI == nil || !belongs(record) {
			return errors.New("is not attached for this request")
		}

		// The journal keeps the value that was read, which must not change.
		record.CNI = new(*record.CNI)
		record.CNI.IPAM = add.Result
		record.Interface.Addresses = union(record.Interface.Addresses, add.Addresses)
		record.Interface.Routes = union(record.Interface.Routes, add.Routes)
		if err := record.Interface.Validate(); err != nil {
			return err
		}
		if err := m.put(record); err != nil {
			return err
		}

		observed, err := m.engine.Add(ctx, attached(record), add.Addresses, add.Routes)
		if err != nil {
			return err
		}

		record.Observed = &observed
		return m.put(record)
	})
}

// union returns have, followed by the elements of more that have lacks. It does not change have,
// because the journal holds it.
func union[T comparable](have, more []T) []T {
	all := slices.Clone(have)
	for _, m := range more {
		if !slices.Contains(all, m) {
			all = append(all, m)
		}
	}
	return all
}

func attached(record journal.Attachment) netdev.Attached {
	return netdev.Attached{
		Before: *record.Before, Place: record.Place, Want: record.Interface,
		Observed: *record.Observed,
		Expected: netdev.Expected{Addresses: record.Interface.Addresses},
	}
}
