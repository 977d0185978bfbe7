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
	// Netdev is the name that the Function's netdev has on the host at this moment: "" where the Function has none there,
	// an error where there is no such Function.
	Netdev(inventory.ID) (string, error)
}

// Detacher brings a netdev back to the host from a sandbox.
type Detacher interface {
	Detach(ctx context.Context, id inventory.ID, sandbox string) error
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
	bootID  string
	log     logr.Logger
}

// New makes an attacher. stale is asked to bring back a netdev that an older sandbox still has. bootID is the boot's,
// from /proc/sys/kernel/random/boot_id.
func New(j Journal, engine Engine, netdevs NetdevFinder, stale Detacher, bootID string, log logr.Logger) *Attacher {
	return &Attacher{journal: j, engine: engine, netdevs: netdevs, stale: stale, bootID: bootID, log: log}
}

// Reserve records durably whom the Function belongs to and what its interface shall be. Nothing is touched. The state
// and what belongs to it are set here. Reserving again for the same owner changes nothing once the Function is being
// attached; before, what the interface shall be is replaced. A Function that belongs to another owner is an error that
// names it.
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
	want = reservation(want)
	have, exists := a.journal.Get(want.Function)
	switch {
	case !exists:
	case !sameOwner(have, want):
		return fmt.Errorf("Function %s: belongs to %s", want.Function, owner(have))
	case have.State == journal.Releasing:
		return fmt.Errorf("Function %s: is being released from %s", want.Function, owner(have))
	case have.State != journal.Reserved && want.CNI != nil && !sameRequest(have.CNI, want.CNI):
		return fmt.Errorf("Function %s: is %s for sandbox %s of %s; try again",
			want.Function, have.State, have.Sandbox, owner(have))
	case have.State != journal.Reserved:
		return nil
	default:
		if want.Ended = have.Ended; !forTheNextPod(want) {
			want.ReservedAt = have.ReservedAt
		}
		if want.Port == nil {
			want.Port = have.Port // the xPU may serve it already; only a release takes it away
		}
		if reflect.DeepEqual(have, want) {
			return nil
		}
	}
	if err := a.journal.Put(want); err != nil {
		return err
	}
	a.log.V(1).Info("Function reserved", "function", want.Function.String(), "owner", owner(want))
	return nil
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
	record.State, record.Sandbox, record.Pod, record.BootID = journal.Attaching, sandbox.ID, sandbox.Pod, a.bootID
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
		if alive && record.BootID == a.bootID {
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
	var device link.Device
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
