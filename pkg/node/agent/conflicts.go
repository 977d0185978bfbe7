// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

const (
	// usesInterval is how often the kubelet is asked which Functions pods have, because another
	// device plugin may have allocated a Function of a pool.
	usesInterval = time.Minute
	// conflictInterval is how often the kubelet is asked while it does not answer or there is a
	// conflict. The kubelet sends no event when a pod is gone.
	conflictInterval = 2 * time.Second
)

// conflicts finds Functions that a pod got in another way (DRA or device plugin) than their pool
// publishes them, because the pool was changed, or because another device plugin allocated them.
// They are not offered until the pod is gone.
type conflicts struct {
	journal *journal.Journal
	tracker *pool.Tracker
	kubelet *kubelet
	// changed is called when there may be a new conflict.
	changed func()
	times   times
}

// elsewhere describes an owner that has the Function in another way than its pool offers it, or
// returns "". It is a [health.Source].
func (c *conflicts) elsewhere(id function.ID) string {
	p, ok := c.tracker.PoolOf(id)
	if !ok {
		return ""
	}

	resource := p.ResourceName() // "" for claims
	a, exists := c.journal.Get(id)
	pod := "a pod"
	if a.Pod.Name != "" { // the kubelet does not say for which pod an Allocate is
		pod = fmt.Sprintf("pod %s/%s", a.Pod.Namespace, a.Pod.Name)
	}

	switch {
	case !exists, a.State == journal.Releasing:
	case a.Claim.UID != "" && resource == "", a.Claim.UID == "" && a.Resource != "" &&
		a.Resource == resource:
	case a.Claim.UID != "":
		return fmt.Sprintf("claim %s/%s has it: it is offered as %s when that is gone",
			a.Claim.Namespace, a.Claim.Name, resource)
	case a.Resource != "":
		return fmt.Sprintf("%s has it by resource %s: it is offered again when that pod is gone",
			pod, a.Resource)
	case !c.kubelet.pods.Has(id, resource):
		// the kubelet did not know of the resource yet when the CNI plugin was called
		return fmt.Sprintf("%s has it by CNI alone: it is offered again when that pod is gone", pod)
	}

	return c.kubelet.pods.InUse(id, resource)
}

// reserved sends a notification if a Function was reserved in another way than its pool offers it.
func (c *conflicts) reserved(id function.ID) {
	if c.elsewhere(id) != "" {
		c.changed()
	}
}

// run asks the kubelet at intervals until ctx ends. A value from changes says that there may be a
// new conflict, which makes the interval shorter.
func (c *conflicts) run(ctx context.Context, changes <-chan struct{}) error {
	for asked := time.Now(); ctx.Err() == nil; {
		interval := usesInterval
		if c.kubelet.unanswered.Load() || c.any() {
			interval = cmp.Or(c.times.conflict, conflictInterval)
		}
		if pause := time.Until(asked.Add(interval)); pause > 0 {
			loop.Wait(ctx, changes, pause)
			continue
		}

		c.kubelet.refresh(ctx)
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
