package agent

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
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

// conflicts knows Functions that a pod has by another way of publishing than that of their pool: the pool was moved, or
// another device plugin gave them away. They are not offered until that pod is gone.
type conflicts struct {
	lifecycle inUse
	tracker   *pool.Tracker
	pods      *podresources.Tracker
	// changed is called when a Function may have become free for its pool, or not.
	changed func()
	times   times

	// away says that the kubelet did not answer when it was asked last.
	away atomic.Bool
}

// inUse is the part of [lifecycle.Manager] that uses are about.
type inUse interface {
	Elsewhere(id function.ID, resource string) string
}

// elsewhere is a [health.Source].
func (u *conflicts) elsewhere(id function.ID) string {
	p, ok := u.tracker.PoolOf(id)
	if !ok {
		return ""
	}
	return u.lifecycle.Elsewhere(id, resourceOf(p))
}

// taken tells of a Function that is reserved by another way than its pool offers it.
func (u *conflicts) taken(id function.ID) {
	if u.elsewhere(id) != "" {
		u.changed()
	}
}

// maybe says whether a pod may have the Function by an extended resource, whatever the journal says: the kubelet said so
// last, or did not answer.
func (u *conflicts) maybe(id function.ID) bool { return u.away.Load() || u.pods.InUse(id, "") != "" }

// resourceOf is the extended resource by which a pool's Functions are handed out, "" for DRA.
func resourceOf(p pool.Pool) string {
	if p.Spec.Publish != v1alpha1.PublishDevicePlugin {
		return ""
	}
	return p.ResourceName()
}

// look asks the kubelet, before what changed is published. One that is away says nothing new.
func (u *conflicts) look(ctx context.Context) {
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
func (u *conflicts) run(ctx context.Context, changes <-chan struct{}) error {
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
func (u *conflicts) conflicts() bool {
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
