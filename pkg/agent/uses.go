package agent

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/pool"
)

const (
	// usesInterval is how often the kubelet is asked what pods have, though no pool changed: another device plugin may
	// have given a Function of ours away.
	usesInterval = time.Minute
	// conflictInterval is how often it is asked while it does not answer, or a pod has a Function by another way of
	// publishing than its pool's: the kubelet does not tell when such a pod is gone.
	conflictInterval = 2 * time.Second
	// lookTimeout is how long an answer is waited for before pools are published without it.
	lookTimeout = 2 * time.Second
)

// uses knows Functions that a pod has by another way of publishing than that of their pool: the pool was moved, or
// another device plugin gave them away. They are not offered until that pod is gone.
type uses struct {
	journal *journal.Journal
	tracker *pool.Tracker
	pods    *podresources.Tracker
	// changed is called when a Function may have become free for its pool, or not.
	changed func()
	log     logr.Logger
	times   times

	// away says that the kubelet did not answer when it was asked last.
	away atomic.Bool
}

// elsewhere is a [health.Source].
func (u *uses) elsewhere(id inventory.ID) string {
	p, ok := u.tracker.PoolOf(id)
	if !ok {
		return ""
	}
	resource := resourceOf(p)
	if a, taken := u.journal.Get(id); taken && a.State != journal.Releasing {
		if message := u.conflict(a, resource); message != "" {
			return message
		}
	}
	return u.pods.InUse(id, resource)
}

// conflict says that what is in the journal is not by this resource, "" for a claim.
func (u *uses) conflict(a journal.Attachment, resource string) string {
	pod := "a pod"
	if a.Pod.Name != "" { // the kubelet does not tell whom it allocates a Function to
		pod = fmt.Sprintf("pod %s/%s", a.Pod.Namespace, a.Pod.Name)
	}
	switch {
	case a.Claim.UID != "" && resource != "":
		return fmt.Sprintf("claim %s/%s has it: it is offered as %s when that is gone",
			a.Claim.Namespace, a.Claim.Name, resource)
	case a.Claim.UID != "":
	case a.Resource == "" && !u.pods.Has(a.Function, resource): // nor did it when the CNI plugin came
		return fmt.Sprintf("%s has it by CNI alone: it is offered again when that pod is gone", pod)
	case a.Resource != "" && a.Resource != resource:
		return fmt.Sprintf("%s has it by resource %s: it is offered again when that pod is gone", pod, a.Resource)
	}
	return ""
}

// maybe says whether a pod may have the Function by an extended resource, whatever the journal says: the kubelet said so
// last, or did not answer.
func (u *uses) maybe(id inventory.ID) bool { return u.away.Load() || u.pods.InUse(id, "") != "" }

// resourceOf is the extended resource by which a pool's Functions are handed out, "" for DRA.
func resourceOf(p pool.Pool) string {
	if p.Spec.Publish != v1alpha1.PublishDevicePlugin {
		return ""
	}
	return p.ResourceName()
}

// look asks the kubelet, before what changed is published. One that is away says nothing new.
func (u *uses) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	different, err := u.pods.Refresh(ctx)
	u.away.Store(err != nil)
	if different {
		u.changed()
	}
}

// run asks the kubelet again and again until ctx ends. changes has a value when there may be a conflict that was not
// there before: it is asked more often at once.
func (u *uses) run(ctx context.Context, changes <-chan struct{}) error {
	for asked := time.Now(); ; {
		interval := usesInterval
		if u.away.Load() || u.conflicts() {
			interval = u.times.conflictInterval()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changes:
			continue
		case <-time.After(time.Until(asked.Add(interval))):
		}
		u.look(ctx)
		asked = time.Now()
	}
}

// conflicts says whether any Function is in use elsewhere.
func (u *uses) conflicts() bool {
	pools, _ := u.tracker.Pools()
	for _, p := range pools {
		for _, f := range p.Functions {
			if u.elsewhere(f.ID) != "" {
				return true
			}
		}
	}
	return false
}

// reserver reserves Functions for claims.
type reserver interface {
	Reserve(ctx context.Context, want journal.Attachment) error
}

// guard keeps a claim from a Function that was allocated to it while the pool moved to the device plugin, and that the
// kubelet gave to a pod since; or the other way round, that a pod still has from before. It is what the DRA driver
// reserves and releases Functions by.
type guard struct {
	reserver
	*releases
	uses *uses
}

// Free is that of the releases. It is what Prepare does first: there is no use in waiting for the Port of a Function
// that a pod has. See [dra.Releaser].
func (g guard) Free(ctx context.Context, id inventory.ID) error {
	if !g.byDRA(id) {
		g.uses.look(ctx)
	}
	if err := g.check(id); err != nil {
		return err
	}
	return g.releases.Free(ctx, id)
}

// Reserve is that of the reserver. See [dra.Attacher]. The kubelet is asked again in any case: it may have been about
// to give the Function to a pod when the pool moved to DRA.
func (g guard) Reserve(ctx context.Context, want journal.Attachment) error {
	if !g.uses.away.Load() { // it is asked every other moment
		g.uses.look(ctx)
	}
	if err := g.check(want.Function); err != nil {
		return err
	}
	err := g.reserver.Reserve(ctx, want)
	if !g.byDRA(want.Function) {
		g.uses.changed() // the device plugin must not offer it
	}
	return err
}

// check fails if a pod has the Function without a claim, as far as is known.
func (g guard) check(id inventory.ID) error {
	if message := g.uses.pods.InUse(id, ""); message != "" {
		return errors.New(message)
	}
	return nil
}

func (g guard) byDRA(id inventory.ID) bool {
	p, ok := g.uses.tracker.PoolOf(id)
	return ok && p.Spec.Publish == v1alpha1.PublishDRA
}
