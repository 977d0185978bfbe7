// Package release brings Functions back: the one procedure that takes an attachment from any state to a clean
// Function on the host. Every method is convergent: it may be called at any time, as often as needed, and a call that
// failed or was interrupted is continued by the next.
package release

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
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
}

// Engine brings netdevs back.
type Engine interface {
	Restore(ctx context.Context, device link.Device, before link.Snapshot, place link.Place) (link.Restored, error)
	Alive(link.Place) (bool, error)
}

// Options of a [Releaser].
type Options struct {
	// BootID is the boot's, from /proc/sys/kernel/random/boot_id.
	BootID string
	// Patience is how often a netdev is looked for that is nowhere. The kernel brings the netdevs of a dead namespace
	// back a moment after the namespace cannot be reached any more. The zero value is [attach.Patience].
	Patience wait.Backoff
	// GoneAfter is how long after its sandbox stopped the netdev of a device that is still there counts as on its way
	// back and not as gone. The kernel ends namespaces in the background, on a busy machine late. Until then the
	// Function is not free and Detach and Release fail; afterwards it has lost its driver. 0 is a minute.
	GoneAfter time.Duration
	// Released, where set, is called when the netdev is back and before the Function is free, at least once. An error
	// keeps the Function from becoming free.
	Released func(context.Context, journal.Attachment) error
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
// Nothing happens to a Function that another sandbox has.
func (r *Releaser) Detach(ctx context.Context, id inventory.ID, sandbox string) error {
	return r.with(ctx, id, func(a journal.Attachment) error {
		switch {
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

// Release takes the Function from its claim: it is brought back, wherever it is, and then free. Nothing happens to a
// Function that belongs to another claim or is free. claim is "" for a Function that was allocated as an extended
// resource.
func (r *Releaser) Release(ctx context.Context, id inventory.ID, claim types.UID) error {
	return r.with(ctx, id, func(a journal.Attachment) error {
		if a.Claim.UID != claim {
			r.log.V(1).Info("Late release ignored", "function", id.String(), "released", claim, "claim", a.Claim.UID)
			return nil
		}
		return r.bringBack(ctx, a, journal.Releasing)
	})
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
	start := time.Now()
	if err := r.restore(ctx, a); err != nil {
		return err
	}
	if a.State == journal.Detaching {
		if err := r.journal.Put(a.Untouched()); err != nil {
			return err
		}
		r.log.Info("Function detached", "function", a.Function.String(), "sandbox", a.Sandbox, "took", time.Since(start))
		return nil
	}
	if r.options.Released != nil {
		if err := r.options.Released(ctx, a); err != nil {
			return err
		}
	}
	if err := r.journal.Delete(a.Function); err != nil {
		return err
	}
	r.log.Info("Function released", "function", a.Function.String(), "claim", a.Claim.Name, "took", time.Since(start))
	return nil
}

// mayReturn says whether a netdev that is nowhere is still expected.
func (r *Releaser) mayReturn(a journal.Attachment) bool {
	_, err := r.netdevs.Netdev(a.Function)
	return err == nil && a.Before.Identity.IsHardware() && time.Since(a.StoppedAt) < r.options.GoneAfter
}

// restore brings the netdev back. One that exists no more is back as far as that is possible.
func (r *Releaser) restore(ctx context.Context, a journal.Attachment) error {
	log := r.log.WithValues("function", a.Function.String())
	if a.Before == nil {
		return nil
	}
	if a.BootID != r.options.BootID {
		log.Info("The machine was booted since the Function was attached: there is nothing to restore")
		return nil
	}
	var restored link.Restored
	var err error
	waitErr := wait.ExponentialBackoffWithContext(ctx, r.options.Patience, func(ctx context.Context) (bool, error) {
		device, _ := attach.Device(r.netdevs, a) // without a name, the engine looks itself
		restored, err = r.engine.Restore(ctx, device, *a.Before, a.Place)
		return !errors.Is(err, link.ErrGone), nil
	})
	switch {
	case errors.Is(err, link.ErrGone) && ctx.Err() == nil && !r.mayReturn(a):
		log.Error(err, "The netdev of the Function is gone: it ended with its namespace or lost its driver; there is nothing to restore",
			"netdev", a.Before.Name)
		return nil
	case err != nil:
		return err
	case restored.Name == "" && waitErr != nil: // not tried even once
		return waitErr
	}
	for _, note := range restored.Notes {
		log.Info("The netdev could not get all its names back", "netdev", restored.Name, "reason", note)
	}
	return nil
}
