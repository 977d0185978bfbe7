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
	// usesInterval is how often the kubelet is asked what pods have, as another device plugin may
	// have allocated a Function of ours.
	usesInterval = time.Minute
	// conflictInterval is how often it is asked while it does not answer or there is a conflict.
	// The kubelet sends no event when a pod is gone.
	conflictInterval = 2 * time.Second
	// lookTimeout bounds how long pools are not published because the kubelet has not answered.
	lookTimeout = 2 * time.Second
)

// conflicts knows the Functions that a pod got by another way of publishing (DRA or device plugin)
// than that of their pool: the pool was changed, or another device plugin allocated them. They are
// not offered until that pod is gone.
type conflicts struct {
	lifecycle *lifecycle.Manager
	tracker   *pool.Tracker
	pods      *podresources.Client
	// changed is called when there may be a new conflict, or one less.
	changed func()
	times   times

	// away: the kubelet did not answer the last question.
	away atomic.Bool
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

// maybe says whether a pod may have the Function by an extended resource: the last answer of the
// kubelet says so, or it did not answer. The journal does not count.
func (c *conflicts) maybe(id function.ID) bool {
	return c.away.Load() || c.pods.InUse(id, "") != ""
}

// look asks the kubelet which Functions pods have. While the kubelet is away, its last answer
// counts.
func (c *conflicts) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	different, err := c.pods.Refresh(ctx)
	c.away.Store(err != nil)
	if different {
		c.changed()
	}
}

// run asks the kubelet at intervals until ctx ends. A value from changes says that there may be a
// new conflict, which makes the interval shorter.
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
		if slices.ContainsFunc(p.Functions, func(f function.Function) bool {
			return c.elsewhere(f.ID) != ""
		}) {
			return true
		}
	}

	return false
}
