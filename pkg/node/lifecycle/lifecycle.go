// Package lifecycle decides who has a Function, and takes it there and back. Everything that happens to a Function is
// an [Event]; the table in this package says what follows from it, by how far the Function is ([Phase]), whose it is
// ([Whose]) and what must be shown first ([Evidence]). The DRA driver, the device plugin, the CNI server, the NRI plugin
// and recovery report events and decide nothing themselves.
//
// Whatever is done is in the journal before it is done, so that an agent that ends anywhere continues where it was. Every
// method may be called at any time and as often as needed; a call that failed or was interrupted is continued by the next.
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
	Attach(ctx context.Context, device netdev.Device, before netdev.Snapshot, place netdev.Place, want function.Interface) (netdev.Observed, error)
	Add(ctx context.Context, a netdev.Attached, addresses []netip.Prefix, routes []function.Route) (netdev.Observed, error)
	Check(ctx context.Context, device netdev.Device, a netdev.Attached) (differences []string, err error)
	Restore(ctx context.Context, device netdev.Device, before netdev.Snapshot, place netdev.Place) (netdev.Restored, error)
	Alive(netdev.Place) (bool, error)
	Holds(netdev.Place, netdev.Identity) (bool, error)
}

// Functions knows the node's Functions.
type Functions interface {
	// Get is the Function as it was seen last; ok is false for one that there is not.
	Get(function.ID) (f function.Function, ok bool)
}

// NetdevFinder finds the netdevs of Functions.
type NetdevFinder interface {
	// Netdev is the name that the Function's netdev has on the host at this moment: "" where the netdev is in another
	// network namespace. The error is an [inventory.ErrNoNetdev] where there is none at all, and an [io/fs.ErrNotExist]
	// where there is no such Function.
	Netdev(function.ID) (string, error)
}

// Setup makes reserved Functions usable for their owners: it makes SFs and binds drivers.
type Setup interface {
	// Plan says what is to be done for a reservation, nil for nothing, and what will undo it. It changes nothing. What
	// the owner wishes is in want.Setup: SF, MAC and Driver.
	Plan(ctx context.Context, want journal.Attachment) (*journal.Setup, error)
	// SetUp does what the attachment's Setup says. It may have been done already, wholly or in part.
	SetUp(ctx context.Context, a journal.Attachment) error
	// TearDown undoes what the attachment's Setup says, as far as it was done. The netdev, if there is one, is back on the
	// host. What exists no more needs no undoing.
	TearDown(ctx context.Context, a journal.Attachment) error
}

// Queue runs the post-delete hooks of Functions whose netdev is back.
type Queue interface {
	// First is the name of the first hook that runs after the release of this attachment, "" if none does.
	First(journal.Attachment) string
	// Add takes the Function over, whose attachment is [journal.Attachment.Restored]. The queue deletes the attachment
	// when all hooks are done. Adding a Function again changes nothing. It does not block.
	Add(function.ID)
}

// Kubelet is what the kubelet says that pods have. It is asked anew by those methods that take a context.
type Kubelet interface {
	// Assigned returns what pods have, by [function.ID.String]. An answer that cannot be complete is an error.
	Assigned(context.Context) (map[string]podresources.Assignment, error)
	// Refresh has InUse and Has know what the kubelet says now.
	Refresh(context.Context) (changed bool, err error)
	// InUse says that a pod has the Function by another resource than this, which is "" for claims; "" if none has.
	InUse(id function.ID, resource string) string
	// Has says that a pod has the Function by this resource, which is "" for claims.
	Has(id function.ID, resource string) bool
}

// Claims is what the API server says about claims.
type Claims interface {
	// Consumers are the pods that a claim is reserved for. allocated is false for a claim that does not exist any more, or
	// that has not the device that the journal knows of.
	Consumers(ctx context.Context, c journal.Claim) (pods []types.UID, allocated bool, err error)
}

// Devices lets containers get Functions. What it is told is in the journal by then; it may be told again.
type Devices interface {
	// Offer is called when a Function is attached, before any container is made.
	Offer(journal.Attachment) error
	// Withdraw is called before a Function leaves its sandbox.
	Withdraw(journal.Attachment) error
}

// Ports knows what the xPU serves.
type Ports interface {
	// Serve returns once the xPU serves the Function for whoever has it, and at once where no Port was asked for. It gives
	// up when ctx ends, and says what is missing.
	Serve(ctx context.Context, a journal.Attachment) error
}

// Users tells those who have Functions what becomes of them. Its methods do not block.
type Users interface {
	// Lost is called when a pod has lost a Function that it keeps the right to: a netdev comes back to it with the device,
	// a program that had the Function without a netdev must be started anew, with its pod.
	Lost(journal.Attachment)
	// Back is called when the pod has it again.
	Back(journal.Attachment)
}

// Announcer tells the neighbours of attached interfaces.
type Announcer interface {
	// Announce returns when that is done, or ctx ends: an interface may get its carrier late.
	Announce(ctx context.Context, place netdev.Place, observed netdev.Observed) error
}

// Options of a [Manager].
type Options struct {
	// BootID is the boot's, from /proc/sys/kernel/random/boot_id.
	BootID string
	// Setup, where set, makes Functions usable for their owners; otherwise those are refused that want it.
	Setup Setup
	// Hooks, where set, get every Function that was released, before it is free.
	Hooks Queue
	// Kubelet, where set, is asked which pods have which Functions. Without it no pod is known to have any.
	Kubelet Kubelet
	// Claims, where set, is asked about claims. Without it a claim's Function is taken from it by Unprepare alone.
	Claims Claims
	// Devices, where set, lets containers get attached Functions.
	Devices Devices
	// Announcer, where set, tells the neighbours of attached interfaces. Nobody waits for it.
	Announcer Announcer
	// Functions, where set, says of which Functions it is not to be looked whether pods lost them, as everything is where
	// it was. To look at every one whenever a device changes would take a node with hundreds of SFs a second.
	Functions Functions
	// Ports, where set, is waited for before a netdev goes back to the pod that lost it.
	Ports Ports
	// Users, where set, hear of Functions that pods lose and get back.
	Users Users
	// Changed, where set, is called when a Function may have become healthy or unhealthy. It must not block.
	Changed func()
	// Taken, where set, is called when a Function was reserved for somebody. It must not block.
	Taken func(function.ID)

	// Patience is how often a netdev is looked for that is nowhere. The kernel brings the netdevs of a dead namespace
	// back a moment after the namespace cannot be reached any more. The zero value is [Patience].
	Patience wait.Backoff
	// GoneAfter is how long after its sandbox stopped a netdev that exists and is nowhere counts as on its way back and
	// not as gone. The kernel ends namespaces in the background, on a busy machine late. Until then the Function is not
	// free and Detach and Release fail. 0 is a minute.
	GoneAfter time.Duration
	// AbandonedAfter is how old a reservation must be before it is asked whether anybody still needs it; 0 is 5 minutes.
	AbandonedAfter time.Duration
	// SweepEvery is how often [Manager.Run] continues what is half done though nobody asks; 0 is a minute.
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
	if options.Patience == (wait.Backoff{}) {
		options.Patience = Patience()
	}
	if options.Changed == nil {
		options.Changed = func() {}
	}
	if options.Taken == nil {
		options.Taken = func(function.ID) {}
	}
	options.GoneAfter = cmp.Or(options.GoneAfter, time.Minute)
	options.AbandonedAfter = cmp.Or(options.AbandonedAfter, 5*time.Minute)
	options.SweepEvery = cmp.Or(options.SweepEvery, time.Minute)
	m := &Manager{journal: j, engine: engine, netdevs: netdevs, options: options, log: log}
	m.lasting, m.stop = context.WithCancel(context.Background())
	return m
}
