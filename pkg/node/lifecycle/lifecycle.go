// SPDX-License-Identifier: Apache-2.0

// Package lifecycle decides who owns a Function, and moves the Function to its owner and back. The
// DRA driver, the device plugin, the CNI server and the NRI plugin report an [Event] and decide
// nothing themselves. [Table] says which [Step] follows from the event. It depends on the [Phase]
// of the Function, on its [Owner], and on the [Evidence] that is available.
//
// Each step is written to the journal before it is carried out, so that an agent that was killed
// continues where it stopped. Every method may be called at any time and may be repeated: a call
// continues the work that an earlier call left unfinished.
package lifecycle

import (
	"cmp"
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
)

// Engine moves netdevs. [netdev.Engine] implements it and documents the methods.
type Engine interface {
	Plan(
		ctx context.Context, device netdev.Device, netNS string, want function.Interface,
	) (netdev.Snapshot, netdev.Place, error)
	Attach(
		context.Context, netdev.Device, netdev.Snapshot, netdev.Place, function.Interface,
	) (netdev.Observed, error)
	Add(
		ctx context.Context, a netdev.Attached, addresses []netip.Prefix, routes []function.Route,
	) (netdev.Observed, error)
	Check(
		ctx context.Context, device netdev.Device, a netdev.Attached,
	) (differences []string, err error)
	Restore(
		ctx context.Context, device netdev.Device, before netdev.Snapshot, place netdev.Place,
	) (netdev.Restored, error)
	Alive(netdev.Place) (bool, error)
	Holds(netdev.Place, netdev.Identity) (bool, error)
}

// NetdevFinder finds the netdevs of Functions.
type NetdevFinder interface {
	// Netdev returns the name of the Function's netdev on the host, or "" if the netdev is in
	// another network namespace. The error is [inventory.ErrNoNetdev] if there is no netdev at all,
	// and [io/fs.ErrNotExist] if there is no such Function.
	Netdev(function.ID) (string, error)
}

// Setup prepares reserved Functions for their owners: it creates SFs and binds drivers.
type Setup interface {
	// Plan completes the SF, MAC and Driver of want.Setup with the values that are needed to undo
	// the setup. It returns nil if there is nothing to set up. It changes nothing.
	Plan(ctx context.Context, want journal.Attachment) (*journal.Setup, error)
	// SetUp completes the setup that the attachment names.
	SetUp(ctx context.Context, a journal.Attachment) error
	// TearDown undoes SetUp. The netdev, if any, must be on the host.
	TearDown(ctx context.Context, a journal.Attachment) error
}

// Queue runs the post-delete hooks of Functions whose netdev is back on the host. Its methods do
// not block.
type Queue interface {
	// First returns the name of the first hook for the attachment, or "" if there is no hook.
	First(journal.Attachment) string
	// Add queues the hooks of a Function whose attachment is [journal.Attachment.Restored]. The
	// attachment is deleted after the last hook. For a quarantined Function in state Releasing,
	// only the Port is deleted. Add may be called again for the same Function.
	Add(function.ID)
}

// Kubelet says which Functions the kubelet has given to pods. Methods with a context ask the
// kubelet; the others use its last answer. A resource of "" stands for claims.
type Kubelet interface {
	// Assigned returns the assignments of Functions to pods, keyed by [function.ID.String]. It
	// returns an error if the answer may be incomplete.
	Assigned(context.Context) (map[string]podresources.Assignment, error)
	// Refresh asks the kubelet, so that InUse knows its current answer.
	Refresh(context.Context) (changed bool, err error)
	// InUse describes a pod that has the Function by a resource other than this one. It returns ""
	// if there is no such pod.
	InUse(id function.ID, resource string) string
}

// Claims says what the API server knows about claims.
type Claims interface {
	// Consumers returns the pods that a claim is reserved for. allocated is false if the claim does
	// not exist any more, or is allocated to another device.
	Consumers(ctx context.Context, c journal.Claim) (pods []types.UID, allocated bool, err error)
}

// Options of a [Manager]. Options that are nil or zero are left out, or have the default that is
// named here.
type Options struct {
	// BootID is the ID of the current boot, from /proc/sys/kernel/random/boot_id.
	BootID string
	// Setup must be set if any reservation has a Setup.
	Setup Setup
	// Hooks receives every Function that was released, before the Function is free.
	Hooks Queue
	// Kubelet says which pods have which Functions. Without it, no pod is known to have a Function.
	Kubelet Kubelet
	// Claims says which pods need a claim. Without it, a claim keeps its Functions until Unprepare.
	Claims Claims
	// Expose makes the Functions of a claim available to its containers. Only Functions in state
	// Attached are available. They come from the journal, except for the attachment that is passed
	// here: the journal may have another state for it until the call returns. Expose is called
	// after a Function is attached and before any container is created, and before a Function
	// leaves its sandbox. The call may be repeated.
	Expose func(journal.Attachment) error
	// Announce announces the addresses of an attached interface to its neighbours. It waits until
	// the interface has a carrier, or until ctx ends.
	Announce func(ctx context.Context, a netdev.Attached) error
	// Seen returns the Function as the inventory saw it last. It avoids asking the kernel about
	// Functions that did not change, because asking about hundreds of SFs takes a second.
	Seen func(function.ID) (f function.Function, exists bool)
	// Driver returns the current kernel driver of a Function, or "" if it has no driver. The error
	// is [io/fs.ErrNotExist] if there is no such Function. Any other error means that the driver is
	// unknown. Without this option, drivers are not compared.
	Driver func(function.ID) (string, error)
	// Inode returns a number that the Function's device keeps while it exists, and that a later
	// device with the same ID does not have. Without this option, it is not known whether a device
	// is another one.
	Inode func(function.ID) (uint64, error)
	// RDMA names the RDMA devices that go to the owner's pod with the Function. It returns nil if none
	// do, as everywhere where the RDMA system is in mode shared. Without this option, none do.
	RDMA func(owner journal.Attachment) *netdev.RDMANames
	// Unusable returns why a Function cannot be attached, according to what the host shows of it,
	// or "" if it can be attached. driver is the driver that is bound for the owner, or "" for the
	// Function's own driver. Unusable is called before any change for an owner, and before an
	// attach; see [health.Unusable]. If it is nil, every Function is usable.
	Unusable func(id function.ID, driver string) (reason string)
	// Serve returns once the xPU serves the Function's Port. It returns at once if there is no
	// Port. It is called before a netdev goes back to the pod that lost it. If ctx ends first, the
	// error says what is missing.
	Serve func(ctx context.Context, a journal.Attachment) error
	// Tracer records the attaching of Functions. It may be nil.
	Tracer *tracing.Tracer
	// Report is called when a pod has lost a Function, in state Lost, and when the pod has it
	// again, in state Attached. It must not block.
	Report func(journal.Attachment)
	// Quarantined is called when a Function was quarantined. Unquarantined is called when the
	// quarantine is over, with the quarantined record and a description of the outcome. Neither may
	// block.
	Quarantined   func(journal.Attachment)
	Unquarantined func(a journal.Attachment, outcome string)
	// Now returns the wall clock time. The times in the journal come from it and are meant for
	// people. The default is [time.Now].
	Now func() time.Time
	// Changed is called when the health of a Function may have changed, and Reserved when a
	// Function was reserved. Neither may block.
	Changed  func()
	Reserved func(function.ID)

	// Patience says how often, and for how long, a netdev is looked for that is in no namespace.
	// The kernel brings the netdevs of a dead namespace back a moment after it ended. The default
	// is the function [Patience].
	Patience wait.Backoff
	// GoneAfter is how long after the stop of its sandbox a hardware netdev that is in no namespace
	// is still expected to return; the default is a minute. A busy kernel ends namespaces late.
	// Until then Detach and Unprepare fail, or the Function is quarantined.
	GoneAfter time.Duration
	// AbandonedAfter is how old a reservation must be for a sweep; the default is 5 minutes.
	AbandonedAfter time.Duration
	// SweepEvery is the interval of [Resume] and [Sweep] in [Manager.Run]; the default is a minute.
	SweepEvery time.Duration
}

// Manager decides for all Functions of the node. Its methods may be called from several goroutines
// at once.
type Manager struct {
	journal journal.Records
	engine  Engine
	netdevs NetdevFinder
	options Options
	log     logr.Logger
	losses  losses

	// announcing counts the running announcements, whose context is lasting. [Manager.Run] calls
	// stop when it ends. The mutex prevents an Attach that outlasts Run from starting another
	// announcement.
	mutex      sync.Mutex
	announcing sync.WaitGroup
	lasting    context.Context
	stop       context.CancelFunc

	ages     ages
	failures failures

	// abandoned has the Functions that no pod needed at the last sweep, with the times of their
	// reservations. Only sweep uses it.
	abandoned map[function.ID]time.Time
}

// New returns a Manager. It changes nothing until a method is called.
func New(
	j journal.Records, engine Engine, netdevs NetdevFinder, options Options, log logr.Logger,
) *Manager {
	if options.Changed == nil {
		options.Changed = func() {}
	}

	if options.Reserved == nil {
		options.Reserved = func(function.ID) {}
	}

	if options.Expose == nil {
		options.Expose = func(journal.Attachment) error { return nil }
	}

	if options.Seen == nil {
		options.Seen = func(function.ID) (f function.Function, exists bool) { return f, true }
	}

	if options.Quarantined == nil {
		options.Quarantined = func(journal.Attachment) {}
	}

	if options.Unquarantined == nil {
		options.Unquarantined = func(journal.Attachment, string) {}
	}

	if options.Now == nil {
		options.Now = time.Now
	}

	if options.Report == nil {
		options.Report = func(journal.Attachment) {}
	}

	if options.Unusable == nil {
		options.Unusable = func(function.ID, string) string { return "" }
	}

	options.Patience = cmp.Or(options.Patience, Patience())
	options.GoneAfter = cmp.Or(options.GoneAfter, time.Minute)
	options.AbandonedAfter = cmp.Or(options.AbandonedAfter, 5*time.Minute)
	options.SweepEvery = cmp.Or(options.SweepEvery, time.Minute)
	m := &Manager{journal: j, engine: engine, netdevs: netdevs, options: options, log: log}
	m.lasting, m.stop = context.WithCancel(context.Background())

	return m
}

// put writes a record to the journal, and starts to count its ages.
func (m *Manager) put(a journal.Attachment) error {
	if err := m.journal.Put(a); err != nil {
		return err
	}
	m.ages.observe(a)
	return nil
}
