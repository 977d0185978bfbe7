// Package attach takes Functions into pods. It writes down what it is about to do before it touches anything, so that
// package release can undo it from any point.
package attach

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/link"
)

// Journal is the durable record of attachments.
type Journal interface {
	Get(inventory.ID) (journal.Attachment, bool)
	All() []journal.Attachment
	Put(journal.Attachment) error
	Lock(context.Context, inventory.ID) (unlock func(), err error)
}

// Engine moves netdevs.
type Engine interface {
	Plan(ctx context.Context, device link.Device, netNS string, want link.Interface) (link.Snapshot, link.Place, error)
	Attach(ctx context.Context, device link.Device, before link.Snapshot, place link.Place, want link.Interface) (link.Observed, error)
	Add(ctx context.Context, a link.Attached, addresses []netip.Prefix, routes []link.Route) (link.Observed, error)
	Check(ctx context.Context, device link.Device, a link.Attached) (differences []string, err error)
	Alive(link.Place) (bool, error)
}

// NetdevFinder finds the netdevs of Functions.
type NetdevFinder interface {
	// Netdev is the name that the Function's netdev has on the host at this moment: "" where the netdev is in another
	// network namespace. The error is an [inventory.ErrNoNetdev] where there is none at all, and an [io/fs.ErrNotExist]
	// where there is no such Function.
	Netdev(inventory.ID) (string, error)
}

// Detacher brings a netdev back to the host from a sandbox.
type Detacher interface {
	Detach(ctx context.Context, id inventory.ID, sandbox string) error
}

// Outfitter makes reserved Functions usable for their owners: it makes SFs and binds drivers.
type Outfitter interface {
	// Plan says what is to be done for a reservation, nil for nothing, and what will undo it. It changes nothing. What
	// the owner wishes is in want.Outfit: SF, MAC and Driver.
	Plan(ctx context.Context, want journal.Attachment) (*journal.Outfit, error)
	// FitOut does what the attachment's Outfit says. It may have been done already, wholly or in part.
	FitOut(ctx context.Context, a journal.Attachment) error
}

// Sandbox is the pod sandbox that wants a Function.
type Sandbox struct {
	// ID is that of the sandbox container; a pod gets a new one for each of its sandboxes.
	ID string
	// NetNS is the path of the sandbox's network namespace.
	NetNS string
	Pod   journal.Pod
}

// Attacher reserves Functions and takes them into pods. Its methods may be called by several goroutines at once.
type Attacher struct {
	journal Journal
	engine  Engine
	netdevs NetdevFinder
	stale   Detacher
	options Options
	log     logr.Logger
}

// Options of an [Attacher].
type Options struct {
	// BootID is the boot's, from /proc/sys/kernel/random/boot_id.
	BootID string
	// Outfits, where set, makes Functions usable for their owners; otherwise those are refused that want it.
	Outfits Outfitter
}

// New makes an attacher. stale is asked to bring back a netdev that an older sandbox still has.
func New(j Journal, engine Engine, netdevs NetdevFinder, stale Detacher, options Options, log logr.Logger) *Attacher {
	return &Attacher{journal: j, engine: engine, netdevs: netdevs, stale: stale, options: options, log: log}
}

// Reserve records durably whom the Function belongs to and what its interface shall be, and then has it fitted out for
// its owner; nothing else is touched. The state and what belongs to it are set here. Reserving again for the same owner
// changes nothing once the Function is being attached; before, what the interface shall be is replaced. A Function that
// belongs to another owner is an error that names it. A reservation whose fitting out failed stays, and is continued when
// it is made again.
//
// The owner is the claim, or else the CNI request, or else whomever the kubelet allocates the Function to: a
// reservation without a claim and a request is for the next pod that comes, and made again it is a new one: ReservedAt
// is then the time of the last.
func (a *Attacher) Reserve(ctx context.Context, want journal.Attachment) error {
	if err := validate(want); err != nil {
		return fmt.Errorf("Function %s: %w", want.Function, err)
	}
	unlock, err := a.journal.Lock(ctx, want.Function)
	if err != nil {
		return err
	}
	defer unlock()
	want, touched, err := a.record(ctx, reservation(want))
	if err != nil || touched {
		return err
	}
	return a.fitOut(ctx, want)
}

// fitOut does what the reservation's Outfit says, if it has one. The caller has the Function's lock.
func (a *Attacher) fitOut(ctx context.Context, reserved journal.Attachment) error {
	if reserved.Outfit == nil {
		return nil
	}
	if a.options.Outfits == nil {
		return fmt.Errorf("Function %s: %w", reserved.Function, errNoOutfits)
	}
	if err := a.options.Outfits.FitOut(ctx, reserved); err != nil {
		return fmt.Errorf("Function %s: %w", reserved.Function, err)
	}
	return nil
}

// errNoOutfits is returned for what only an [Outfitter] can do.
var errNoOutfits = errors.New("cannot be fitted out: this agent makes no SFs and binds no drivers")

// Recover has reserved Functions fitted out, at agent start: the agent may have ended in the middle, and a boot undoes
// SFs and drivers, while the kubelet, which remembers what it allocated, starts pods on them without asking again. The
// attachments of an earlier boot must have been brought back. One that fails keeps no other from being fitted out, and
// is tried again when it is reserved again.
func (a *Attacher) Recover(ctx context.Context) error {
	all := a.journal.All()
	errs := make([]error, len(all))
	var group sync.WaitGroup
	for i, known := range all {
		if known.State == journal.Reserved && known.Outfit != nil {
			group.Go(func() { errs[i] = a.recoverOne(ctx, known.Function) })
		}
	}
	group.Wait()
	return errors.Join(errs...)
}

func (a *Attacher) recoverOne(ctx context.Context, id inventory.ID) error {
	unlock, err := a.journal.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if reserved, ok := a.journal.Get(id); ok && reserved.State == journal.Reserved {
		return a.fitOut(ctx, reserved)
	}
	return nil
}

// record writes the reservation down, where the one there is does not say as much already, and returns it. touched says
// that the Function is being attached to its owner.
func (a *Attacher) record(ctx context.Context, want journal.Attachment) (_ journal.Attachment, touched bool, err error) {
	have, exists := a.journal.Get(want.Function)
	if exists {
		if err := refuse(have, want); err != nil {
			return want, false, fmt.Errorf("Function %s: %w", want.Function, err)
		}
		if have.State != journal.Reserved {
			return have, true, nil
		}
		if want.Ended = have.Ended; !forTheNextPod(want) {
			want.ReservedAt = have.ReservedAt
		}
		if want.Port == nil {
			want.Port = have.Port // the xPU may serve it already; only a release takes it away
		}
	}
	if want.Outfit, err = a.outfit(ctx, have, want); err != nil {
		return want, false, fmt.Errorf("Function %s: %w", want.Function, err)
	}
	if reflect.DeepEqual(have, want) {
		return want, false, nil
	}
	if err := a.journal.Put(want); err != nil {
		return want, false, err
	}
	a.log.V(1).Info("Function reserved", "function", want.Function.String(), "owner", owner(want))
	return want, false, nil
}

// refuse says why a reservation cannot take the place of the one there is.
func refuse(have, want journal.Attachment) error {
	switch {
	case !sameOwner(have, want):
		return fmt.Errorf("belongs to %s", owner(have))
	case have.State == journal.Releasing:
		return fmt.Errorf("is being released from %s", owner(have))
	case have.State != journal.Reserved && want.CNI != nil && !sameRequest(have.CNI, want.CNI):
		return fmt.Errorf("is %s for sandbox %s of %s; try again", have.State, have.Sandbox, owner(have))
	}
	return nil
}

// outfit is what is to be done for the owner. What was done already for the same owner stays, as only a release undoes
// it; so a next pod whose pool has changed since the last one must wait for that.
func (a *Attacher) outfit(ctx context.Context, have, want journal.Attachment) (*journal.Outfit, error) {
	switch {
	case have.Outfit != nil && forTheNextPod(want) && !sameWish(*have.Outfit, want.Outfit):
		return nil, errors.New("is still what its pool made of it before the pool was changed; try again")
	case have.Outfit != nil:
		return have.Outfit, nil
	case want.Outfit == nil:
		return nil, nil
	case a.options.Outfits == nil:
		return nil, errNoOutfits
	}
	return a.options.Outfits.Plan(ctx, want)
}

func sameWish(have journal.Outfit, want *journal.Outfit) bool {
	return want != nil && have.SF == want.SF && have.Driver == want.Driver
}

// forTheNextPod says whether a reservation is for whomever the kubelet allocates the Function to.
func forTheNextPod(a journal.Attachment) bool { return a.Claim.UID == "" && a.CNI == nil }

// validate checks the interface. The device plugin does not know its name.
func validate(want journal.Attachment) error {
	if forTheNextPod(want) {
		want.Interface.Name = cmp.Or(want.Interface.Name, "later")
	}
	return want.Interface.Validate()
}

// reservation is what is wanted, with nothing else.
func reservation(want journal.Attachment) journal.Attachment {
	reserved := want.Untouched()
	reserved.Interface, reserved.CNI = want.Interface, want.CNI
	reserved.ReservedAt, reserved.Ended = time.Now().UTC(), nil
	return reserved
}

// sameOwner says whether a reservation may take the place of the one there is.
func sameOwner(have, want journal.Attachment) bool {
	if have.Claim.UID != want.Claim.UID {
		return false
	}
	return have.Claim.UID != "" || have.CNI == nil || sameRequest(have.CNI, want.CNI)
}

// sameRequest says whether two CNI requests are about the same attachment, as CNI has it.
func sameRequest(have, want *journal.CNI) bool {
	return have != nil && want != nil && have.ContainerID == want.ContainerID && have.IfName == want.IfName
}

// owner names the one that has a Function.
func owner(a journal.Attachment) string {
	switch {
	case a.Claim.UID != "":
		return fmt.Sprintf("claim %s/%s (UID %s)", a.Claim.Namespace, a.Claim.Name, a.Claim.UID)
	case a.Pod.UID != "":
		return fmt.Sprintf("pod %s/%s (UID %s)", a.Pod.Namespace, a.Pod.Name, a.Pod.UID)
	case a.CNI != nil:
		return fmt.Sprintf("container %s as %s", a.CNI.ContainerID, a.CNI.IfName)
	}
	return "a pod by an extended resource"
}

// Attach takes a reserved Function into a sandbox as the interface that was reserved. For the sandbox that has it
// already it returns what it did the first time. From an older sandbox of the same pod, or one that is gone, the
// Function is first brought back; that another pod still has it is an error.
func (a *Attacher) Attach(ctx context.Context, id inventory.ID, sandbox Sandbox) (link.Observed, error) {
	observed, err := a.attach(ctx, id, sandbox)
	if err != nil {
		return link.Observed{}, fmt.Errorf("Function %s: %w", id, err)
	}
	return observed, nil
}

func (a *Attacher) attach(ctx context.Context, id inventory.ID, sandbox Sandbox) (link.Observed, error) {
	if sandbox.ID == "" || sandbox.NetNS == "" {
		return link.Observed{}, fmt.Errorf("sandbox %q with network namespace %q: both must be given", sandbox.ID, sandbox.NetNS)
	}
	if err := a.bringBackStale(ctx, id, sandbox); err != nil {
		return link.Observed{}, err
	}
	observed, touched, err := a.moveLocked(ctx, id, sandbox)
	if err != nil && touched {
		err = errors.Join(err, a.stale.Detach(context.WithoutCancel(ctx), id, sandbox.ID))
	}
	return observed, err
}

// moveLocked also says whether a failure left more than a reservation behind.
func (a *Attacher) moveLocked(ctx context.Context, id inventory.ID, sandbox Sandbox) (observed link.Observed, touched bool, err error) {
	unlock, err := a.journal.Lock(ctx, id)
	if err != nil {
		return link.Observed{}, false, err
	}
	defer unlock()
	record, ok := a.journal.Get(id)
	switch {
	case !ok:
		return link.Observed{}, false, errors.New("is not reserved")
	case record.State == journal.Attached && record.Sandbox == sandbox.ID:
		return *record.Observed, false, nil
	case record.State != journal.Reserved:
		return link.Observed{}, false, fmt.Errorf("is %s for sandbox %s; try again", record.State, record.Sandbox)
	case record.Claim.UID != "" && record.Pod.UID != "" && record.Pod.UID != sandbox.Pod.UID:
		return link.Observed{}, false, fmt.Errorf("is reserved for pod %s/%s (UID %s), not for %s/%s (UID %s)",
			record.Pod.Namespace, record.Pod.Name, record.Pod.UID, sandbox.Pod.Namespace, sandbox.Pod.Name, sandbox.Pod.UID)
	case record.Interface.Name == "":
		return link.Observed{}, false, errors.New("is allocated, but nobody asked yet for an interface")
	case record.CNI != nil && record.CNI.ContainerID != sandbox.ID:
		return link.Observed{}, false, fmt.Errorf("is reserved for %s, not for sandbox %s", owner(record), sandbox.ID)
	}
	return a.move(ctx, record, sandbox)
}

// move is the write-ahead order: look, write down, touch, write down. Whatever ends it after the first write leaves the
// state Attaching, from which Detach, Release and Recover go on.
func (a *Attacher) move(ctx context.Context, record journal.Attachment, sandbox Sandbox) (observed link.Observed, touched bool, err error) {
	start := time.Now()
	device, before, place, err := a.plan(ctx, record, sandbox.NetNS)
	if err != nil {
		return link.Observed{}, false, err
	}
	record.State, record.Sandbox, record.Pod, record.BootID = journal.Attaching, sandbox.ID, sandbox.Pod, a.options.BootID
	record.Before, record.Place = &before, place
	if err := a.journal.Put(record); err != nil {
		return link.Observed{}, false, err
	}
	observed, err = a.engine.Attach(ctx, device, before, place, record.Interface)
	if err != nil {
		return link.Observed{}, true, err
	}
	record.State, record.Observed, record.AttachedAt = journal.Attached, &observed, time.Now().UTC()
	record.Place.Index = observed.Index
	if err := a.journal.Put(record); err != nil {
		return link.Observed{}, true, err
	}
	a.log.Info("Function attached", "function", record.Function.String(), "interface", observed.Name,
		"pod", sandbox.Pod.Namespace+"/"+sandbox.Pod.Name, "sandbox", sandbox.ID, "took", time.Since(start))
	return observed, true, nil
}

// bringBackStale makes sure that no older sandbox has the Function.
func (a *Attacher) bringBackStale(ctx context.Context, id inventory.ID, sandbox Sandbox) error {
	unlock, err := a.journal.Lock(ctx, id)
	if err != nil {
		return err
	}
	record, ok := a.journal.Get(id)
	unlock()
	if !ok || record.State == journal.Reserved || record.State == journal.Releasing ||
		record.State == journal.Attached && record.Sandbox == sandbox.ID {
		return nil
	}
	if record.Pod.UID != sandbox.Pod.UID {
		alive, err := a.engine.Alive(record.Place)
		if err != nil {
			return err
		}
		if alive && record.BootID == a.options.BootID {
			return fmt.Errorf("is %s in pod %s/%s (sandbox %s)", record.State, record.Pod.Namespace, record.Pod.Name, record.Sandbox)
		}
	}
	// A sandbox that is gone by now, and comes late, must not take the Function from the one that followed it.
	if _, err := os.Stat(sandbox.NetNS); err != nil {
		return fmt.Errorf("network namespace of sandbox %s: %w", sandbox.ID, err)
	}
	a.log.Info("Function is brought back from an older sandbox", "function", id.String(), "sandbox", record.Sandbox, "state", record.State)
	return a.stale.Detach(ctx, id, record.Sandbox)
}

// Patience is how often, within 2 s, a netdev is looked for that is not on the host yet: its driver was just bound, udev
// renames it, or it is on its way back from another namespace.
func Patience() wait.Backoff {
	return wait.Backoff{Duration: 5 * time.Millisecond, Factor: 1.5, Steps: 14}
}

// plan finds the netdev and looks at it.
func (a *Attacher) plan(ctx context.Context, record journal.Attachment, netNS string) (
	device link.Device, before link.Snapshot, place link.Place, err error,
) {
	waitErr := wait.ExponentialBackoffWithContext(ctx, Patience(), func(ctx context.Context) (bool, error) {
		var found error
		device, found = Device(a.netdevs, record)
		if record.Interface.Userspace {
			device.Name, found = "", nil
		}
		if found == nil {
			before, place, found = a.engine.Plan(ctx, device, netNS, record.Interface)
		}
		if found == nil && !record.Interface.Userspace {
			found = belongs(before, record.Function)
		}
		err = found
		if errors.Is(found, link.ErrNoNetdev) {
			return false, nil
		}
		return true, found
	})
	if err == nil {
		err = waitErr
	}
	return device, before, place, err
}

// belongs refuses a netdev that took the name of the Function's between two looks.
func belongs(s link.Snapshot, id inventory.ID) error {
	if s.Identity.Bus == "pci" && id.Subfunction == "" && s.Identity.Parent != string(id.Address) {
		return fmt.Errorf("netdev %s: belongs to Function %s by now: %w", s.Name, s.Identity.Parent, link.ErrNoNetdev)
	}
	return nil
}

// Device is a fresh look at the host's side of a Function. The error is a [link.ErrNoNetdev] where the Function has no
// netdev on the host; the PF is then there nevertheless, as far as it is known.
func Device(netdevs NetdevFinder, record journal.Attachment) (link.Device, error) {
	device := link.Device{Port: portOf(record)}
	if record.IsVF() {
		// Without the PF's netdev nothing can be asked or told about the VF. That matters only to who wants it.
		if name, err := netdevs.Netdev(inventory.ID{Address: record.PF}); err == nil && name != "" {
			device.PF = &link.PF{Name: name, Address: string(record.PF), VF: record.VFIndex}
		}
	}
	name, err := netdevs.Netdev(record.Function)
	if err != nil {
		return device, fmt.Errorf("%w: %w", link.ErrNoNetdev, err)
	}
	if name == "" {
		return device, link.ErrNoNetdev
	}
	device.Name = name
	return device, nil
}
