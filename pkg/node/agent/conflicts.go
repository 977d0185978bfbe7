package agent

import (
	"cmp"
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

const (
	// usesInterval is how often the kubelet is asked what pods have although no pool changed: another device plugin may
	// have allocated a Function of ours.
	usesInterval = time.Minute
	// conflictInterval is how often it is asked while it does not answer, or a pod has a Function by another way of
	// publishing than its pool's: the kubelet does not tell when such a pod is gone.
	conflictInterval = 2 * time.Second
	// lookTimeout is how long an answer is waited for before pools are published without it.
	lookTimeout = 2 * time.Second
)

// conflicts knows Functions that a pod has by another way of publishing than that of their pool: the pool was moved, or
// another device plugin allocated them. They are not offered until that pod is gone.
type conflicts struct {
	lifecycle *lifecycle.Manager
	tracker   *pool.Tracker
	pods      *podresources.Client
	// changed is called when a Function may have become free for its pool, or not.
	changed func()
	times   times

	// away says that the kubelet did not answer when it was asked last.
	away atomic.Bool
}

// elsewhere is a [health.Source].
func (c *conflicts) elsewhere(id function.ID) string {
	p, ok := c.tracker.PoolOf(id)
	switch {
	case !ok:
		return ""
	case p.Spec.Publish == v1alpha1.PublishDevicePlugin:
		return c.lifecycle.Elsewhere(id, p.ResourceName())
	}
	return c.lifecycle.Elsewhere(id, "") // claims have no resource
}

// taken tells of a Function that is reserved by another way than its pool offers it.
func (c *conflicts) taken(id function.ID) {
	if c.elsewhere(id) != "" {
		c.changed()
	}
}

// maybe says whether a pod may have the Function by an extended resource, whatever the journal says: the kubelet said so
// last, or did not answer.
func (c *conflicts) maybe(id function.ID) bool { return c.away.Load() || c.pods.InUse(id, "") != "" }

// look asks the kubelet which Functions pods have. While the kubelet is away, its last answer counts.
func (c *conflicts) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	different, err := c.pods.Refresh(ctx)
	c.away.Store(err != nil)
	if different {
		c.changed()
	}
}

// run asks the kubelet again and again until ctx ends. A value from changes says that there may be a new conflict: then
// the kubelet is asked more often from now on.
func (c *conflicts) run(ctx context.Context, changes <-chan struct{}) error {
	for asked := time.Now(); ctx.Err() == nil; {
		interval := usesInterval
		if c.away.Load() || c.exist() {
			interval = cmp.Or(c.times.conflict, conflictInterval)
		}
		if pause := time.Until(asked.Add(interval)); pause > 0 {
			loop.Wait(ctx, changes, pause)
			continue
		}
		c.look(ctx)
		asked = time.Now()
	}
	return nil
}

// exist says whether there is a conflict about any Function.
func (c *conflicts) exist() bool {
	pools, _ := c.tracker.Pools()
	for _, p := range pools {
		if slices.ContainsFunc(p.Functions, func(f function.Function) bool { return c.elsewhere(f.ID) != "" }) {
			return true
		}
	}
	return false
}
