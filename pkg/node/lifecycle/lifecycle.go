// SPDX-License-Identifier: Apache-2.0

// Package lifecycle decides who has a Function, and moves it to its owner and back. The DRA driver,
// the device plugin, the CNI server and the NRI plugin report an [Event] and decide nothing
// themselves. [Table] says which [Step] follows from it, by the [Phase] of the Function, by whose
// it is ([Whose]) and by what must be shown first ([Evidence]).
//
// The journal has each step before it is done, so that an agent that was killed continues where it
// was. Every method may be called at any time and again: a call continues what an earlier one left
// undone.
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

// Engine moves netdevs. Its methods are those of [netdev.Engine].
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
	// Netdev is the name of the Function's netdev on the host, "" if the netdev is in another
	// network namespace. The error is [inventory.ErrNoNetdev] if there is no netdev at all, and
	// [io/fs.ErrNotExist] if there is no such Function.
	Netdev(function.ID) (string, error)
}

// Setup makes reserved Functions usable for their owners: it makes SFs and binds drivers.
type Setup interface {
	// Plan completes the SF, MAC and Driver of want.Setup with what is needed to undo them; nil if
	// nothing is to be done. It changes nothing.
	Plan(ctx context.Context, want journal.Attachment) (*journal.Setup, error)
	// SetUp does what the attachment's Setup says and is not done yet.
	SetUp(ctx context.Context, a journal.Attachment) error
	// TearDown undoes what SetUp did. The netdev, if any, is on the host.
	TearDown(ctx context.Context, a journal.Attachment) error
}

// Queue runs the post-delete hooks of Functions whose netdev is back. Its methods do not block.
type Queue interface {
	// First is the name of the first hook for the attachment, "" if there is none.
	First(journal.Attachment) string
	// Add has the hooks of a Function run, whose attachment is [journal.Attachment.Restored], and
	// then the attachment deleted. Of a Function that is being released and quarantined, it has the
	// Port deleted and nothing else. It may be called again.
	Add(function.ID)
}

// Kubelet is what the kubelet says that pods have. Methods with a context ask it anew. A resource
// of "" stands for claims.
type Kubelet interface {
	// Assigned returns what pods have, by [function.ID.String]. An answer that cannot be complete
	// is an error.
	Assigned(context.Context) (map[string]podresources.Assignment, error)
	// Refresh has InUse and Has know what the kubelet says now.
	Refresh(context.Context) (changed bool, err error)
	// InUse describes a pod that has the Function by another resource than this, "" if there is
	// none.
	InUse(id function.ID, resource string) string
	// Has says whether a pod has the Function by this resource.
	Has(id function.ID, resource string) bool
}

// Claims is what the API server says about claims.
type Claims interface {
	// Consumers are the pods that a claim is reserved for. allocated is false if the claim is gone
	// or has another device.
	Consumers(ctx context.Context, c journal.Claim) (pods []types.UID, allocated bool, err error)
}

// Options of a [Manager]. Parts that are not set are done without.
type Options struct {
	BootID string // of this boot, from /proc/sys/kernel/random/boot_id
	Setup  Setup  // must be set if any reservation has a Setup
	Hooks  Queue  // gets every Function that was released, before it is free
	// Kubelet says which pods have which Functions. Without it no pod is known to have any.
	Kubelet Kubelet
	// Claims says who needs a claim. Without it only Unprepare takes a Function from its claim.
	Claims Claims
	// Expose lets the containers of a claim get its Functions in state Attached, and no others:
	// those of the journal, but this one as it is here, since the journal may have it in state
	// Attached until the call returns. It is called after a Function is attached and before any
	// container is made, and before a Function leaves its sandbox. The call may be repeated.
	Expose func(journal.Attachment) error
	// Announce tells the neighbours of an attached interface, once it has its carrier or until ctx
	// ends.
	Announce func(ctx context.Context, place netdev.Place, observed netdev.Observed) error
	// Seen is the Function as the inventory saw it last. When a device changes, it spares a look at
	// the kernel for Functions that did not move: to look at hundreds of SFs takes a second.
	Seen func(function.ID) (f function.Function, exists bool)
	// Driver is the kernel driver that a Function has at this moment, "" for none. The error is
	// [io/fs.ErrNotExist] if there is no such Function, and any other one if that cannot be found
	// out. Without it drivers are not compared.
	Driver func(function.ID) (string, error)
	// Unusable says why a Function cannot be attached, by what the host shows of it, "" for one
	// that can; driver is the one that is bound for the owner, "" for the Function's own. It is
	// asked before anything is done for an owner, and before an attach; see [health.Unusable]. Nil
	// is never.
	Unusable func(id function.ID, driver string) (reason string)
	// Serve returns once the xPU serves the Function's Port, at once if there is none. It is called
	// before a netdev goes back to the pod that lost it. If ctx ends first, the error says what is
	// missing.
	Serve func(ctx context.Context, a journal.Attachment) error
	// Tracer takes what attaches a Function; nil for none.
	Tracer *tracing.Tracer
	// Report is called when a pod has lost a Function, in state Lost, and when the pod has it
	// again, in state Attached. It must not block.
	Report func(journal.Attachment)
	// Quarantined is called when a Function was quarantined, and Unquarantined with the quarantined
	// record and what became of the Function, in words, when that is over. Neither must block.
	Quarantined   func(journal.Attachment)
	Unquarantined func(a journal.Attachment, outcome string)
	// Now is the clock of the machine, for the times in the journal, which are for people; nil is
	// [time.Now].
	Now func() time.Time
	// Changed is called when the health of a Function may have changed, Taken when a Function was
	// reserved. Neither must block.
	Changed func()
	Taken   func(function.ID)

	// Patience is how often a netdev is looked for that is in no namespace: the kernel brings the
	// netdevs of a dead namespace back a moment after its end. The zero value is [Patience].
	Patience wait.Backoff
	// GoneAfter is how long after the stop of its sandbox a hardware netdev is waited for that is
	// in no namespace; 0 is a minute. A busy kernel ends namespaces late. Until then Detach and
	// Unprepare fail, or the Function is quarantined.
	GoneAfter      time.Duration
	AbandonedAfter time.Duration // how old a reservation must be for a sweep; 0 is 5 minutes
	// the interval of [Resume] and [Sweep] in [Manager.Run]; 0 is a minute
	SweepEvery time.Duration
}

// Manager decides for all Functions of the node. Its methods may be called by several goroutines at
// once.
type Manager struct {
	journal journal.Records
	engine  Engine
	netdevs NetdevFinder
	options Options
	log     logr.Logger
	losses  losses

	// announcing are the announcements under way, whose context is lasting. [Manager.Run] calls
	// stop when it ends. The mutex keeps an Attach that takes longer from beginning another one.
	mutex      sync.Mutex
	announcing sync.WaitGroup
	lasting    context.Context
	stop       context.CancelFunc

	ages     ages
	troubles troubles

	// abandoned are the Functions that nobody needed at the last sweep, with the time of
	// reservation. Only sweep uses it.
	abandoned map[function.ID]time.Time
}

// New makes a manager.
func New(
	j journal.Records, engine Engine, netdevs NetdevFinder, options Options, log logr.Logger,
) *Manager {
	if options.Changed == nil {
		options.Changed = func() {}
	}

	if options.Taken == nil {
		options.Taken = func(function.ID) {}
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

// put writes a record, whose ages are counted from then on.
func (m *Manager) put(a journal.Attachment) error {
	if err := m.journal.Put(a); err != nil {
		return err
	}
	m.ages.observe(a)
	return nil
}
