// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

const (
	// usesInterval is how often the kubelet is asked which Functions pods have, because another
	// device plugin may have allocated a Function of a pool.
	usesInterval = time.Minute
	// conflictInterval is how often the kubelet is asked while it does not answer or there is a
	// conflict. The kubelet sends no event when a pod is gone.
	conflictInterval = 2 * time.Second
	// refreshTimeout limits how long publishing pools is delayed by a kubelet that does not answer.
	refreshTimeout = 2 * time.Second
)

// conflicts finds Functions that a pod got in another way of publishing (DRA or device plugin) than
// that of their pool, because the pool was changed, or because another device plugin allocated
// them. They are not offered until that pod is gone.
type conflicts struct {
	lifecycle *lifecycle.Manager
	tracker   *pool.Tracker
	pods      *podresources.Client
	// changed is called when there may be a new conflict, or one less.
	changed func()
	times   times

	// unanswered says that the kubelet did not answer the last question.
	unanswered atomic.Bool
}

// elsewhere is a [health.Source].
func (c *conflicts) elsewhere(id function.ID) string {
	p, ok := c.tracker.PoolOf(id)
	if !ok {
		return ""
	}
	return c.lifecycle.Elsewhere(id, p.ResourceName())
}

// reserved sends a notification if a Function was reserved in another way than its pool offers it.
func (c *conflicts) reserved(id function.ID) {
	if c.elsewhere(id) != "" {
		c.changed()
	}
}

// mayBeInUse reports whether a pod may have the Function by an extended resource: the kubelet's
// last answer says so, or the kubelet did not answer. The journal is not used.
func (c *conflicts) mayBeInUse(id function.ID) bool {
	return c.unanswered.Load() || c.pods.InUse(id, "") != ""
}

// refresh asks the kubelet which Functions pods have. While the kubelet does not answer, its last
// answer counts.
func (c *conflicts) refresh(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, refreshTimeout)
	defer cancel()
	different, err := c.pods.Refresh(ctx)
	c.unanswered.Store(err != nil)
	if different {
		c.changed()
	}
}

// run asks the kubelet at intervals until ctx ends. A value from changes says that there may be a
// new conflict, which makes the interval shorter.
func (c *conflicts) run(ctx context.Context, changes <-chan struct{}) error {
	for asked := time.Now(); ctx.Err() == nil; {
		interval := usesInterval
		if c.unanswered.Load() || c.any() {
			interval = cmp.Or(c.times.conflict, conflictInterval)
		}
		if pause := time.Until(asked.Add(interval)); pause > 0 {
			loop.Wait(ctx, changes, pause)
			continue
		}

		c.refresh(ctx)
		asked = time.Now()
	}
	return nil
}

// any reports whether there is a conflict about any Function.
func (c *conflicts) any() bool {
	pools, _ := c.tracker.Pools()
	for _, p := range pools {
		if slices.ContainsFunc(p.Functions, func(f function.Function) bool {
			return c.elsewhere(f.ID) != ""
		}) {
			return true
		}
	}

	return false
}
