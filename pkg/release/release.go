// Package release brings Functions back: the one procedure that takes an attachment from any state to a clean
// Function on the host. Every method is convergent: it may be called at any time, as often as needed, and a call that
// failed or was interrupted is continued by the next.
package release

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/attach"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/link"
)

// Journal is the durable record of attachments.
type Journal interface {
	Get(inventory.ID) (journal.Attachment, bool)
	Put(journal.Attachment) error
	Delete(inventory.ID) error
	All() []journal.Attachment
	Lock(context.Context, inventory.ID) (unlock func(), err error)
	Subscribe(context.Context) <-chan struct{}
}

// Engine brings netdevs back.
type Engine interface {
	Restore(ctx context.Context, device link.Device, before link.Snapshot, place link.Place) (link.Restored, error)
	Alive(link.Place) (bool, error)
}

// Queue runs the post-delete hooks of Functions whose netdev is back.
type Queue interface {
	// First is the name of the first hook that runs after the release of this attachment, "" if none does.
	First(journal.Attachment) string
	// Add takes the Function over, whose attachment is [journal.Attachment.Restored]. The queue deletes the attachment
	// when all hooks are done. Adding a Function again changes nothing. It does not block.
	Add(inventory.ID)
}

// Outfitter undoes what Functions were fitted out with for their owners.
type Outfitter interface {
	// Undo undoes what the attachment's Outfit says, as far as it was done. The netdev, if there is one, is back on the
	// host. What exists no more needs no undoing.
	Undo(ctx context.Context, a journal.Attachment) error
}

// Options of a [Releaser].
type Options struct {
	// BootID is the boot's, from /proc/sys/kernel/random/boot_id.
	BootID string
	// Patience is how often a netdev is looked for that is nowhere. The kernel brings the netdevs of a dead namespace
	// back a moment after the namespace cannot be reached any more. The zero value is [attach.Patience].
	Patience wait.Backoff
	// GoneAfter is how long after its sandbox stopped a netdev that exists and is nowhere counts as on its way back and
	// not as gone. The kernel ends namespaces in the background, on a busy machine late. Until then the Function is not
	// free and Detach and Release fail. 0 is a minute.
	GoneAfter time.Duration
	// Outfits undoes Outfits; it must be set where there can be any.
	Outfits Outfitter
	// Hooks, where set, get every Function that was released, before it is free.
	Hooks Queue
}

// Releaser brings Functions back. Its methods may be called by several goroutines at once.
type Releaser struct {
	journal Journal
	engine  Engine
	netdevs attach.NetdevFinder
	options Options
	log     logr.Logger
}

// New makes a releaser.
func New(j Journal, engine Engine, netdevs attach.NetdevFinder, options Options, log logr.Logger) *Releaser {
	if options.Patience == (wait.Backoff{}) {
		options.Patience = attach.Patience()
	}
	options.GoneAfter = cmp.Or(options.GoneAfter, time.Minute)
	return &Releaser{journal: j, engine: engine, netdevs: netdevs, options: options, log: log}
}

// Detach brings the Function back from a sandbox that stops. The reservation stays: the pod may get another sandbox.
// That of a claim is then without the CNI request of the sandbox, also where that never had the Function attached.
// Nothing happens to a Function that another sandbox has.
func (r *Releaser) Detach(ctx context.Context, id inventory.ID, sandbox string) error {
	return r.with(ctx, id, func(a journal.Attachment) error {
		switch {
		case a.State == journal.Reserved && a.CNI != nil && a.CNI.Claimed != nil && a.CNI.ContainerID == sandbox:
			return r.journal.Put(a.Untouched())
		case a.State == journal.Reserved:
			return nil
		case a.Sandbox != sandbox:
			r.log.V(1).Info("Late stop of a sandbox ignored", "function", id.String(), "stopped", sandbox, "sandbox", a.Sandbox)
			return nil
		case a.State == journal.Releasing:
			return r.finish(ctx, a)
		}
		return r.bringBack(ctx, a, journal.Detaching)
	})
}

// Release takes the Function from its owner: it is brought back, wherever it is, and then free, at once or when the
// post-delete hooks are done; see [Releaser.Free]. Nothing happens to a Function that is free or that does not belong to
// the caller any more, such as [journal.ClaimIs] says.
func (r *Releaser) Release(ctx context.Context, id inventory.ID, belongs func(journal.Attachment) bool) error {
	return r.with(ctx, id, func(a journal.Attachment) error {
		if !belongs(a) {
			r.log.V(1).Info("Late release ignored", "function", id.String(), "claim", a.Claim.Name, "sandbox", a.Sandbox)
			return nil
		}
		return r.bringBack(ctx, a, journal.Releasing)
	})
}

// Free waits until the Function is not on its way to being free any more: it is free, or belongs to somebody. A way back
// that was interrupted is continued. When ctx ends first, the error says what is still to be done.
func (r *Releaser) Free(ctx context.Context, id inventory.ID) error {
	if a, ok := r.journal.Get(id); !ok || a.State != journal.Releasing {
		return nil
	}
	watch, stop := context.WithCancel(ctx)
	defer stop()
	changes := r.journal.Subscribe(watch)
	failed := r.with(ctx, id, func(a journal.Attachment) error {
		if a.State != journal.Releasing {
			return nil
		}
		return r.finish(ctx, a)
	})
	for {
		a, ok := r.journal.Get(id)
		if !ok || a.State != journal.Releasing {
			return nil
		}
		select {
		case <-changes:
		case <-ctx.Done():
			err := fmt.Errorf("Function %s: %s: %w", id, Pending(a), context.Cause(ctx))
			if !a.Restored() {
				err = errors.Join(err, failed)
			}
			return err
		}
	}
}

// Pending says what a Function that is not back yet waits for. It changes only when that does.
func Pending(a journal.Attachment) string {
	owner := "its last pod"
	if a.Pod.Name != "" {
		owner = fmt.Sprintf("pod %s/%s", a.Pod.Namespace, a.Pod.Name)
	}
	stopped := a.StoppedAt.Format(time.RFC3339)
	switch {
	case !a.Restored():
		return fmt.Sprintf("is not back from %s, which ended at %s: the log of this node's xpu-agent says why", owner, stopped)
	case a.Hooks == nil || a.Hooks.Error == "":
		return fmt.Sprintf("is back from %s, which ended at %s, and waits for its post-delete hooks", owner, stopped)
	}
	return fmt.Sprintf("is back from %s, which ended at %s, and waits for post-delete hook %s, which is tried again: %s",
		owner, stopped, a.Hooks.Next, a.Hooks.Error)
}

// Recover continues, at agent start and whenever it is called, what was interrupted or failed. What is attached to a
// namespace that lives is left alone.
func (r *Releaser) Recover(ctx context.Context) error {
	all := r.journal.All()
	errs := make([]error, len(all))
	var group sync.WaitGroup
	for i, a := range all {
		group.Go(func() {
			errs[i] = r.with(ctx, a.Function, func(a journal.Attachment) error { return r.recoverOne(ctx, a) })
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

func (r *Releaser) recoverOne(ctx context.Context, a journal.Attachment) error {
	switch a.State {
	case journal.Reserved:
		return nil
	case journal.Releasing:
		return r.finish(ctx, a)
	case journal.Attached:
		alive, err := r.engine.Alive(a.Place)
		if err != nil || alive && a.BootID == r.options.BootID {
			return err
		}
	}
	return r.bringBack(ctx, a, journal.Detaching)
}

// with calls f with the Function's attachment, if there is one, while nobody else works on the Function.
func (r *Releaser) with(ctx context.Context, id inventory.ID, f func(journal.Attachment) error) error {
	unlock, err := r.journal.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	a, ok := r.journal.Get(id)
	if !ok {
		return nil
	}
	if err := f(a); err != nil {
		return fmt.Errorf("Function %s: %w", id, err)
	}
	return nil
}

// bringBack writes down where the attachment goes, and goes there.
func (r *Releaser) bringBack(ctx context.Context, a journal.Attachment, state journal.State) error {
	if a.State != state {
		a.State = state
		if a.StoppedAt.IsZero() {
			a.StoppedAt = time.Now().UTC()
		}
		if err := r.journal.Put(a); err != nil {
			return err
		}
	}
	return r.finish(ctx, a)
}

// finish does what the states Detaching and Releasing stand for.
func (r *Releaser) finish(ctx context.Context, a journal.Attachment) error {
	if a.Restored() {
		return r.handOver(a)
	}
	start := time.Now()
	if err := r.restore(ctx, a); err != nil {
		return err
	}
	log := r.log.WithValues("function", a.Function.String(), "took", time.Since(start))
	if a.State == journal.Detaching {
		if err := r.journal.Put(a.Untouched()); err != nil {
			return err
		}
		log.Info("Function detached", "sandbox", a.Sandbox)
		return nil
	}
	if a.Outfit != nil {
		if err := r.options.Outfits.Undo(ctx, a); err != nil {
			return err
		}
	}
	first := r.firstHook(a)
	if first == "" {
		if err := r.journal.Delete(a.Function); err != nil {
			return err
		}
		log.Info("Function released", "claim", a.Claim.Name)
		return nil
	}
	a.RestoredAt, a.Hooks = time.Now().UTC(), &journal.Hooks{Next: first}
	if err := r.journal.Put(a); err != nil {
		return err
	}
	log.Info("Function is back", "claim", a.Claim.Name, "hook", first)
	return r.handOver(a)
}

// firstHook is [Queue.First], "" without a queue.
func (r *Releaser) firstHook(a journal.Attachment) string {
	if r.options.Hooks == nil {
		return ""
	}
	return r.options.Hooks.First(a)
}

// handOver leaves what is left of a release to the hooks.
func (r *Releaser) handOver(a journal.Attachment) error {
	if r.options.Hooks == nil {
		return r.journal.Delete(a.Function)
	}
	r.options.Hooks.Add(a.Function)
	return nil
}

// lost says whether a netdev that is not found is found never more.
func (r *Releaser) lost(a journal.Attachment, err error) bool {
	switch {
	case errors.Is(err, link.ErrGone):
		return !r.mayReturn(a)
	case errors.Is(err, link.ErrAway) && a.Before.Identity.IsHardware():
		// The pod's namespace lives, but a netdev does not survive its device, nor its driver.
		_, err := r.netdevs.Netdev(a.Function)
		return errors.Is(err, fs.ErrNotExist) || errors.Is(err, inventory.ErrNoNetdev)
	}
	return false
}

// mayReturn says whether a netdev that is nowhere is still expected. A stop that is long to come yet was written down
// before the clock was set back.
func (r *Releaser) mayReturn(a journal.Attachment) bool {
	_, err := r.netdevs.Netdev(a.Function)
	return err == nil && a.Before.Identity.IsHardware() && time.Since(a.StoppedAt).Abs() < r.options.GoneAfter
}

// removed says whether the device of a Function exists no more.
func (r *Releaser) removed(id inventory.ID) bool {
	_, err := r.netdevs.Netdev(id)
	return errors.Is(err, fs.ErrNotExist)
}

// restore brings the Function back. A netdev that exists no more is back as far as that is possible: what the PF and
// the eswitch enforced with it is undone.
func (r *Releaser) restore(ctx context.Context, a journal.Attachment) error {
	log := r.log.WithValues("function", a.Function.String())
	ownSF := a.Outfit != nil && a.Outfit.SF
	switch {
	case a.Before == nil:
		return nil
	case a.BootID != r.options.BootID:
		log.Info("The machine was booted since the Function was attached: there is nothing to restore")
		return nil
	case ownSF && r.removed(a.Function):
		log.V(1).Info("The SF, which was made for its owner, is deleted already: there is nothing to restore")
		return nil
	}
	restored, device, err := r.restoreNetdev(ctx, a)
	if err != nil && ctx.Err() == nil && r.lost(a, err) {
		log.Error(err, "The netdev of the Function is gone: it ended with its namespace or its device, or lost its driver; "+
			"there is nothing to bring back", "netdev", a.Before.Name)
		restored, err = r.engine.Restore(ctx, device, a.Before.WithoutNetdev(), link.Place{})
	}
	if err != nil {
		return err
	}
	if !ownSF { // of which nobody knows names
		for _, note := range restored.Notes {
			log.Info("The netdev could not get all its names back", "netdev", restored.Name, "reason", note)
		}
	}
	return r.stillEnforced(a, device)
}

// restoreNetdev has the engine look for the netdev until it is not nowhere any more, and returns the host's side of the
// Function as the engine had it last.
func (r *Releaser) restoreNetdev(ctx context.Context, a journal.Attachment) (
	restored link.Restored, device link.Device, err error,
) {
	waitErr := wait.ExponentialBackoffWithContext(ctx, r.options.Patience, func(ctx context.Context) (bool, error) {
		device, _ = attach.Device(r.netdevs, a) // without a name, the engine looks itself
		restored, err = r.engine.Restore(ctx, device, *a.Before, a.Place)
		return !errors.Is(err, link.ErrGone), nil
	})
	if err == nil {
		err = waitErr // not tried even once
	}
	return restored, device, err
}

// stillEnforced is an error where the PF enforces something for the pod still, as it had no netdev by which it could be
// told otherwise. The VFs of a PF mostly end with its driver, and what was enforced for them with it.
func (r *Releaser) stillEnforced(a journal.Attachment, device link.Device) error {
	changes := a.Before.VFChanges(a.Interface)
	if device.PF != nil || len(changes) == 0 || r.removed(a.Function) {
		return nil
	}
	return fmt.Errorf("its PF %s (%s) has no netdev on the host, so that what it enforces for the pod cannot be "+
		"undone: %s; move the PF's netdev back to the host's network namespace, or bind the PF's driver again",
		a.PF, a.PFName, strings.Join(changes, "; "))
}
