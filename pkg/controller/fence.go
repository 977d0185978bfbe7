// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// fenceAge is how long an answer of the API server is valid. A leader that was elected meanwhile
// reads all objects first, which takes longer.
const fenceAge = 500 * time.Millisecond

// fenceTimeout bounds the wait for an API server that does not answer.
const fenceTimeout = 5 * time.Second

// Fence keeps a leader from acting after another one was elected. A leader that was suspended for
// longer than its Lease lasts, or whose Lease was edited, learns this only when it renews the
// Lease. Safe for concurrent use. A nil Fence always lets the caller act; a controller without
// leader election has one.
type Fence struct {
	reader client.Reader // of the API server, not of a cache
	lease  client.ObjectKey
	prefix string // that the names of this process have as a leader

	mu      sync.Mutex
	elected term      // the zero value before the first check
	checked time.Time // by the wall clock and the monotonic one
}

// term is the time from one election to the next.
type term struct {
	holder      string
	transitions int32 // how often the Lease went from one holder to another
}

// NewFence returns a fence for the Lease of a leader election. The holders' identities are
// "host_uid", with the name of the host that they run on.
func NewFence(reader client.Reader, lease client.ObjectKey, host string) *Fence {
	return &Fence{reader: reader, lease: lease, prefix: host + "_"}
}

// Check returns an error if this process is no longer the leader, or if that is unknown. Only a
// process that was elected may call it. It calls the API server at most twice in a second.
func (f *Fence) Check(ctx context.Context) error {
	if f == nil {
		return nil
	}

	f.mu.Lock()
	defer f.mu.Unlock()

	if recent(f.checked) {
		return nil
	}

	ctx, cancel := context.WithTimeout(ctx, fenceTimeout)
	defer cancel()

	var lease coordinationv1.Lease
	asked := time.Now()
	if err := f.reader.Get(ctx, f.lease, &lease); err != nil {
		return fmt.Errorf("whether this is still the leader: Lease %s: %w", f.lease, err)
	}

	now := term{ptr.Deref(lease.Spec.HolderIdentity, ""), ptr.Deref(lease.Spec.LeaseTransitions, 0)}
	if f.elected == (term{}) && strings.HasPrefix(now.holder, f.prefix) {
		f.elected = now
	}
	if now.holder == "" || now != f.elected {
		return fmt.Errorf("this is not the leader any more: Lease %s is held by %q; nothing is done "+
			"until it is elected again", f.lease, now.holder)
	}

	f.checked = asked
	return nil
}

// recent reports whether an answer is recent by both clocks, because the monotonic clock stands
// still while a machine is suspended, and the wall clock may be set.
func recent(then time.Time) bool {
	wall := time.Now().Round(0).Sub(then.Round(0))
	return !then.IsZero() && time.Since(then) < fenceAge && 0 <= wall && wall < fenceAge
}
