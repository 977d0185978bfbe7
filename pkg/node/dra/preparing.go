package dra

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// preparing knows what runs for claims: one Prepare or Unprepare at a time for each. The kubelet gives up on a Prepare
// that takes too long, and calls again, or calls Unprepare. The zero value is ready for use.
type preparing struct {
	mutex sync.Mutex
	calls map[types.UID]*call
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

// enter begins a Prepare, and leave ends it. The one before is ended first. ctx ends when another call for the claim
// comes.
func (p *preparing) enter(ctx context.Context, claim types.UID) (_ context.Context, leave func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	leave, err := p.take(ctx, claim, errPreparedAgain, cancel)
	if err != nil { // ctx has ended: whatever is done with it fails
		return ctx, func() { cancel(nil) }
	}
	return ctx, leave
}

// end ends a Prepare that runs for the claim, and keeps others from beginning until leave is called.
func (p *preparing) end(ctx context.Context, claim types.UID) (leave func(), err error) {
	return p.take(ctx, claim, errUnprepared, func(error) {})
}

// take ends the call that runs, waits for its end, and takes its place.
func (p *preparing) take(
	ctx context.Context, claim types.UID, reason error, cancel context.CancelCauseFunc,
) (leave func(), err error) {
	mine := &call{cancel: cancel, done: make(chan struct{})}
	for {
		p.mutex.Lock()
		running := p.calls[claim]
		if running == nil {
			if p.calls == nil {
				p.calls = map[types.UID]*call{}
			}
			p.calls[claim] = mine
			p.mutex.Unlock()
			return func() { p.leave(claim, mine) }, nil
		}
		p.mutex.Unlock()
		running.cancel(reason)
		select {
		case <-running.done:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the claim's last call: %w", context.Cause(ctx))
		}
	}
}

func (p *preparing) leave(claim types.UID, mine *call) {
	mine.cancel(nil)
	p.mutex.Lock()
	defer p.mutex.Unlock()
	delete(p.calls, claim)
	close(mine.done)
}
