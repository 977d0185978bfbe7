// SPDX-License-Identifier: Apache-2.0

package gangs

import (
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// access is something that the controller reads in a namespace.
type access struct{ namespace, what string }

const (
	podOfClaim  = "the pod of a claim"
	podsOfGangs = "PodGroups and their pods"
)

// applyRole says what to do if the controller may not read.
const applyRole = "apply the role of this version of xpu-controller"

// denial is a time in which the API server has said that the controller may not read something.
type denial struct{ since, last time.Time }

// lasts notes that the API server has said it again, and reports whether that has lasted. If it did
// not last, and was not said for as long, then a new denial begins: no request was made meanwhile.
func (d *denial) lasts(now time.Time) bool {
	if d.last.Sub(d.since) < lookAround && now.Sub(d.last) > lookAround {
		d.since = now
	}
	d.last = now
	return now.Sub(d.since) >= lookAround
}

// denied notes the answer of the API server, nil or an error. It reports whether the controller may
// not read for so long that its role must be of an older version. While a role is replaced, the API
// server says for a moment that nothing is allowed.
func (g *Gangs) denied(of access, err error) bool {
	g.mu.Lock()
	defer g.mu.Unlock()

	if err == nil || apierrors.IsNotFound(err) {
		delete(g.denials, of)
		return false
	}
	if !apierrors.IsForbidden(err) {
		return false
	}

	now := time.Now()
	d := g.denials[of]
	if d == nil {
		d = &denial{since: now, last: now}
		g.denials[of] = d
	}
	return d.lasts(now)
}
