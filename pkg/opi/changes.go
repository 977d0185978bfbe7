// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The verbs of changes, as in the error "create port".
const (
	creation = "create"
	update   = "update"
	deletion = "delete"
)

// changes tracks the changing calls to an agent whose outcome is unknown. At most one call per
// object runs at a time, because an agent may carry out two calls in either order. Safe for
// concurrent use.
type changes struct {
	timing  Timing
	mu      sync.Mutex
	running map[object]*change
	// last call whose answer was lost, until its effect has been observed
	lost map[object]*change
}

// object identifies a port or a network.
type object struct{ noun, id string }

// change is a call that changes an object.
type change struct {
	verb  string
	since time.Time // of the loss of its answer
	done  chan struct{}
	err   error // valid after done is closed
}

// begin registers a change and returns it as own. If a change of the object is running already,
// begin returns that change as other instead.
func (c *changes) begin(o object, verb string) (own, other *change) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if running := c.running[o]; running != nil {
		return nil, running
	}

	if c.running == nil {
		c.running, c.lost = map[object]*change{}, map[object]*change{}
	}

	own = &change{verb: verb, done: make(chan struct{})}
	c.running[o] = own

	return own, nil
}

func (c *changes) end(o object, ended *change, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	delete(c.running, o)
	if answerLost(err) {
		c.lost[o] = &change{verb: ended.verb, since: time.Now()}
	} else if lost := c.lost[o]; err == nil && lost != nil && lost.verb == ended.verb {
		delete(c.lost, o)
	}

	ended.err = err
	close(ended.done)
}

// runningOn returns the running change of the object, or nil.
func (c *changes) runningOn(o object) *change {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.running[o]
}

// observe records whether the agent has the object, and will keep it.
func (c *changes) observe(o object, exists bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if lost := c.lost[o]; lost != nil && exists == (lost.verb == creation) {
		delete(c.lost, o)
	}
}

// doubt describes why a lost call may still change the object, or returns "" if no lost call can.
// The text does not say for how long, because it is in conditions, which are written when their
// texts change.
func (c *changes) doubt(o object, verb string) string {
	c.mu.Lock()
	defer c.mu.Unlock()

	lost := c.lost[o]
	if lost == nil || lost.verb != verb {
		return ""
	}

	if time.Since(lost.since) >= c.timing.Late {
		delete(c.lost, o)
		return ""
	}

	const format = "the agent may still %s %s: its answer was lost, and the call is believed to have " +
		"come to nothing %s later"
	return fmt.Sprintf(format, verb, o.noun, c.timing.Late)
}

// answerLost reports whether a call ended without an answer of the agent.
func answerLost(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return outcomeUnknown(err)
	}
	return false
}

// change makes a call that changes an object. If ctx ends first, the call continues in the
// background, because the agent continues too. [Client.waitForChange] waits for it.
func (c *Client) change(
	ctx context.Context, o object, verb string, call func(context.Context) error,
) error {
	for {
		if ctx.Err() != nil {
			return status.FromContextError(ctx.Err()).Err()
		}

		own, other := c.changes.begin(o, verb)
		if other != nil {
			other.wait(ctx)
			continue
		}

		go func() { c.changes.end(o, own, callDetached(ctx, c.traits.Timing.Change, call)) }()
		if !own.wait(ctx) {
			return status.FromContextError(ctx.Err()).Err()
		}

		return own.err
	}
}

// callDetached makes a call that is not cancelled with ctx, only after the time limit.
func callDetached(
	ctx context.Context, limit time.Duration, call func(context.Context) error,
) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	err := call(ctx)
	if err != nil && ctx.Err() != nil {
		const format = "the agent has not answered within %s; it may still be at it"
		return &Error{Kind: ErrTimeout, Detail: fmt.Sprintf(format, limit), Err: err}
	}
	return err
}

// wait waits for the end of the change. It returns false if ctx ends first.
func (c *change) wait(ctx context.Context) bool {
	select {
	case <-c.done:
		return true
	case <-ctx.Done():
		return false
	}
}

// waitForChange waits until no changing call for the object is running. If ctx ends first, progress
// describes the running call, as [changes.doubt] does without the time.
func (c *Client) waitForChange(
	ctx context.Context, op string, o object,
) (progress string, err error) {
	for running := c.changes.runningOn(o); running != nil; running = c.changes.runningOn(o) {
		if !running.wait(ctx) {
			progress = fmt.Sprintf("the agent has not answered %s %s yet", running.verb, o.noun)
			return progress, timeout(ctx, op, o.id, progress)
		}
	}
	return "", nil
}
