// Package lifecycle decides who has a Function, and takes it there and back. Everything that happens to a Function is
// an [Event]; the table in this package says what follows from it, by how far the Function is ([Phase]), whose it is
// ([Whose]) and what must be shown first ([Evidence]). The DRA driver, the device plugin, the CNI server, the NRI plugin
// and recovery report events and decide nothing themselves.
//
// Each step is in the journal before it is done, so that an agent that ends anywhere continues where it was. Every method
// may be called at any time and as often as needed; a call that failed or was interrupted is continued by the next.
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
)

// Journal is the durable record of attachments.
type Journal interface {
	Get(function.ID) (journal.Attachment, bool)
	All() []journal.Attachment
	ByPod(types.UID) []journal.Attachment
	Put(journal.Attachment) error
	Delete(function.ID) error
	Lock(context.Context, function.ID) (unlock func(), err error)
	Subscribe(context.Context) <-chan struct{}
}

// Engine moves netdevs.
type Engine interface {
	Plan(ctx context.Context, device netdev.Device, netNS string, want function.Interface) (netdev.Snapshot, netdev.Place, error)
	Attach(
		ctx context.Context, device netdev.Device, before netdev.Snapshot, place netdev.Place, want function.Interface,
	) (netdev.Observed, error)
	Add(ctx context.Context, a netdev.Attached, addresses []netip.Prefix, routes []function.Route) (netdev.Observed, error)
	Check(ctx context.Context, device netdev.Device, a netdev.Attached) (differences []string, err error)
	Restore(ctx context.Context, device netdev.Device, before netdev.Snapshot, place netdev.Place) (netdev.Restored, error)
	Alive(netdev.Place) (bool, error)
	Holds(netdev.Place, netdev.Identity) (bool, error)
}

// NetdevFinder finds the netdevs of Functions.
type NetdevFinder interface {
	// Netdev is the name that the Function's netdev has on the host at this moment: "" if the netdev is in another network
	// namespace. The error is an [inventory.ErrNoNetdev] if there is no netdev at all, and an [io/fs.ErrNotExist] if there
	// is no such Function.
	Netdev(function.ID) (string, error)
}

// Setup makes reserved Functions usable for their owners: it makes SFs and binds drivers.
type Setup interface {
	// Plan says what is to be done for a reservation, nil for nothing, and what will undo it. It changes nothing. What
	// the owner wishes is in want.Setup: SF, MAC and Driver.
	Plan(ctx context.Context, want journal.Attachment) (*journal.Setup, error)
	// SetUp does what the attachment's Setup says. It may have been done already, wholly or in part.
	SetUp(ctx context.Context, a journal.Attachment) error
	// TearDown undoes what the attachment's Setup says, as far as it was done, once the netdev, if any, is on the host.
	TearDown(ctx context.Context, a journal.Attachment) error
}

// Queue runs the post-delete hooks of Functions whose netdev is back. Its methods do not block.
type Queue interface {
	// First is the name of the first hook that runs after the release of this attachment, "" if none does.
	First(journal.Attachment) string
	// Add hands a Function over whose attachment is [journal.Attachment.Restored]; doing so again changes nothing. The
	// queue deletes the attachment when all hooks are done.
	Add(function.ID)
}

// Kubelet is what the kubelet says that pods have. Methods with a context ask it anew.
type Kubelet interface {
	// Assigned returns what pods have, by [function.ID.String]. An answer that cannot be complete is an error.
	Assigned(context.Context) (map[string]podresources.Assignment, error)
	// Refresh has InUse and Has know what the kubelet says now.
	Refresh(context.Context) (changed bool, err error)
	// InUse says that a pod has the Function by another resource than this, which is "" for claims; "" if none has.
	InUse(id function.ID, resource string) string
	// Has says whether a pod has the Function by this resource, which is "" for claims.
	Has(id function.ID, resource string) bool
}

// Claims is what the API server says about claims.
type Claims interface {
	// Consumers are the pods that a claim is reserved for. allocated is false for a claim that does not exist any more, or
	// that has not the device that the journal knows of.
	Consumers(ctx context.Context, c journal.Claim) (pods []types.UID, allocated bool, err error)
}

// Devices lets containers get Functions. What it is told is in the journal by then, and may be told again.
type Devices interface {
	// Offer is called when a Function is attached, before any container is made; Withdraw before it leaves its sandbox.
	Offer(journal.Attachment) error
	Withdraw(journal.Attachment) error
}

// Options of a [Manager]. Parts that are not set are done without.
type Options struct {
	// BootID is the boot's, from /proc/sys/kernel/random/boot_id.
	BootID string
	// Setup makes Functions usable for their owners. It must be set if any reservation has a Setup.
	Setup Setup
	// Hooks gets every Function that was released, before it is free.
	Hooks Queue
	// Kubelet says which pods have which Functions. Without it no pod is known to have any.
	Kubelet Kubelet
	// Claims says who needs a claim. Without it only Unprepare takes a Function from its claim.
	Claims Claims
	// Devices lets containers get attached Functions.
	Devices Devices
	// Announce tells the neighbours of an attached interface. It may take until ctx ends: an interface may get its carrier
	// late.
	Announce func(ctx context.Context, place netdev.Place, observed netdev.Observed) error
	// Seen is the Function as the inventory saw it last. It spares a look at the kernel for Functions that are where they
	// were, when a device changes: to look at all would take a node with hundreds of SFs a second.
	Seen func(function.ID) (f function.Function, exists bool)
	// Serve returns once the xPU serves the Function's Port, at once if it has none. The error says what is missing when
	// ctx ends before. It is called before a netdev goes back to the pod that lost it.
	Serve func(ctx context.Context, a journal.Attachment) error
	// Lost is called when a pod has lost a Function, Back when it has it again. Neither must block. A program that had the
	// Function without a netdev does not get it back: its pod must be started anew.
	Lost, Back func(journal.Attachment)
	// Changed is called when a Function may have become healthy or unhealthy, Taken when one was reserved. Neither must
	// block.
	Changed func()
	Taken   func(function.ID)

	// Patience is how often a netdev is looked for that is nowhere. The kernel brings the netdevs of a dead namespace
	// back a moment after the namespace cannot be reached any more. The zero value is [Patience].
	Patience wait.Backoff
	// GoneAfter is how long after the stop of its sandbox a hardware netdev that is nowhere is still expected back; 0 is a
	// minute. The kernel ends namespaces in the background, on a busy machine late. Until then Detach and Release fail.
	GoneAfter time.Duration
	// AbandonedAfter is how old a reservation must be for a sweep; 0 is 5 minutes.
	AbandonedAfter time.Duration
	// SweepEvery is the interval of [Resume] and [Sweep] in [Manager.Run]; 0 is a minute.
	SweepEvery time.Duration
}

// Manager decides for all Functions of the node. Its methods may be called by several goroutines at once.
type Manager struct {
	journal Journal
	engine  Engine
	netdevs NetdevFinder
	options Options
	log     logr.Logger

	// announcing are the announcements under way. Their context is lasting, which stop ends with [Manager.Run]: they keep
	// the pods' namespaces.
	announcing sync.WaitGroup
	lasting    context.Context
	stop       context.CancelFunc

	// abandoned are the Functions that nobody needed at the last sweep, with the time of their reservation. Only sweep
	// uses it, which runs in one goroutine.
	abandoned map[function.ID]time.Time
}

// New makes a manager.
func New(j Journal, engine Engine, netdevs NetdevFinder, options Options, log logr.Logger) *Manager {
	if options.Changed == nil {
		options.Changed = func() {}
	}
	if options.Taken == nil {
		options.Taken = func(function.ID) {}
	}
	if options.Lost == nil {
		options.Lost = func(journal.Attachment) {}
	}
	if options.Back == nil {
		options.Back = func(journal.Attachment) {}
	}
	options.Patience = cmp.Or(options.Patience, Patience())
	options.GoneAfter = cmp.Or(options.GoneAfter, time.Minute)
	options.AbandonedAfter = cmp.Or(options.AbandonedAfter, 5*time.Minute)
	options.SweepEvery = cmp.Or(options.SweepEvery, time.Minute)
	m := &Manager{journal: j, engine: engine, netdevs: netdevs, options: options, log: log}
	m.lasting, m.stop = context.WithCancel(context.Background())
	return m
}
