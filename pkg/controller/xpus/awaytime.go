// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"time"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// recordAway has the status say for how long this process has failed to reach the XPU's OPI agent,
// and returns the pause before it says so again. Controllers of tenants need it: the condition Ready
// tells them that the agent did not answer, and not whether anybody has asked it since.
func (r *reconciler) recordAway(xpu *v1alpha1.XPU) (again time.Duration) {
	health := r.Sessions.Connection(xpu.Name).Health
	switch {
	case !r.Infra:
		return 0
	case health.Connected:
		r.away.Reset(xpu.Name)
		xpu.Status.AwaySeconds = 0
		return 0
	case !health.Away: // nothing is known
		return 0
	}

	written := time.Duration(xpu.Status.AwaySeconds) * time.Second
	say, again := nextAway(written, r.away.Elapsed(xpu.Name), r.AwayStep)
	xpu.Status.AwaySeconds = int32(say / time.Second)
	return again
}

// nextAway returns which time the status shall have, if written is in it and the agent has been away
// for the time away, and the pause before the next longer one. The steps are a quarter of the time,
// so that an xPU that is down for a day costs 40 writes.
func nextAway(written, away, step time.Duration) (say, again time.Duration) {
	next := func(after time.Duration) time.Duration { return after + max(step, after/4) }
	if away < next(written) {
		return written, next(written) - away
	}
	return away, next(away) - away
}
