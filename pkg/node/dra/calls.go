package dra

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// calls lets one Prepare or Unprepare run at a time for each claim; a later one ends an earlier Prepare. The kubelet gives
// up on a Prepare that takes too long, and calls again, or calls Unprepare. The zero value is ready for use.
type calls struct {
	running sync.Map // of *call by the claim's UID
}

// call is a Prepare or Unprepare that runs.
type call struct {
	cancel context.CancelCauseFunc
	done   chan struct{}
}

var (
	errUnprepared    = errors.New("the claim is unprepared meanwhile")
	errPreparedAgain = errors.New("the claim is prepared again meanwhile")
)

// begin cancels the call that runs for the claim, with the reason as the cause, and begins a new one once that has ended.
// The context that it returns ends when a later call begins. end must be called.
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
