package dra

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// calls lets one Prepare or Unprepare run at a time for each claim. A later call ends an earlier Prepare: the kubelet gives
// up on a Prepare that takes too long, and calls Prepare again, or Unprepare. The zero value is ready for use.
type calls struct {
	running sync.Map // a *call by the claim's UID
}

type call struct {
	cancel context.CancelCauseFunc
	done   chan struct{} // closed at the end of the call
}

var (
	errUnprepared    = errors.New("the claim is unprepared meanwhile")
	errPreparedAgain = errors.New("the claim is prepared again meanwhile")
)

// begin cancels the call that runs for the claim, with the reason as the cause, and begins a new one when that has ended.
// The context that it returns ends when a later call begins. The caller must call end.
func (c *calls) begin(ctx context.Context, claim types.UID, reason error) (_ context.Context, end func(), err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	mine := &call{cancel: cancel, done: make(chan struct{})}
	for {
		running, exists := c.running.LoadOrStore(claim, mine)
		if !exists {
			return ctx, func() {
				cancel(nil)
				c.running.Delete(claim)
				close(mine.done)
			}, nil
		}
		before := running.(*call)
		before.cancel(reason)
		select {
		case <-before.done:
		case <-ctx.Done():
			defer cancel(nil)
			return nil, nil, fmt.Errorf("wait for the claim's last call: %w", context.Cause(ctx))
		}
	}
}
