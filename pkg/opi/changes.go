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

const (
	// changeTimeout bounds a call that changes something. Agents were seen to take 40 s for a port.
	changeTimeout = 2 * time.Minute
	// doubtTime is for how long an agent may still carry out a call whose answer was lost. Agents
	// that answer late do so after several seconds, and a connection that is lost ends what they
	// have not begun.
	doubtTime = 10 * time.Second
)

// What a change does. An error says "create port".
const (
	creation = "create"
	update   = "update"
	deletion = "delete"
)

// changes are the calls to an agent that change something, of which the outcome is not known yet.
// An object has one that runs at a time, because an agent may carry out the second one first. The
// zero value is ready for use, by several goroutines at once.
type changes struct {
	mu      sync.Mutex
	running map[object]*change
	// the last one whose answer was lost, until it is seen what came of it
	lost map[object]*change
}

// object names a port or a network.
type object struct{ noun, id string }

// change is a call that changes an object.
type change struct {
	verb  string
	since time.Time // it runs; or its answer was lost
	done  chan struct{}
	err   error // once done is closed
}

// begin returns the change, or the one that runs already.
func (c *changes) begin(o object, verb string) (own, other *change) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if running := c.running[o]; running != nil {
		return nil, running
	}

	if c.running == nil {
		c.running, c.lost = map[object]*change{}, map[object]*change{}
	}

	own = &change{verb: verb, since: time.Now(), done: make(chan struct{})}
	c.running[o] = own

	return own, nil
}

func (c *changes) end(o object, ended *change, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	delete(c.running, o)
	if answerLost(err) {
		c.lost[o] = &change{verb: ended.verb, since: time.Now()}
	} else if err == nil {
		delete(c.lost, o)
	}

	ended.err = err
	close(ended.done)
}

// of is the change of the object that runs, nil for none.
func (c *changes) of(o object) *change {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.running[o]
}

// seen takes note of what the agent says of an object: whether it is there, and stays.
func (c *changes) seen(o object, there bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if lost := c.lost[o]; lost != nil && there == (lost.verb == creation) {
		delete(c.lost, o)
	}
}

// doubt says why it is not known whether the object stays as it is, "" if it is.
func (c *changes) doubt(o object, verb string) string {
	c.mu.Lock()
	defer c.mu.Unlock()

	lost := c.lost[o]
	if lost == nil || lost.verb != verb {
		return ""
	}

	age := time.Since(lost.since)
	if age >= doubtTime {
		delete(c.lost, o)
		return ""
	}

	const format = "the agent may still %s %s: its answer was lost %s ago, and is believed to have " +
		"come to nothing after %s"
	return fmt.Sprintf(format, verb, o.noun, age.Round(time.Second), doubtTime)
}

// answerLost says whether a call ended without an answer of the agent.
func answerLost(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return outcomeUnknown(err)
	}
	return false
}

// change makes a call that changes an object. If ctx ends first, the call goes on as the agent
// does, and [Client.answered] waits for it.
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

		go func() { c.changes.end(o, own, bounded(ctx, call)) }()
		if !own.wait(ctx) {
			return status.FromContextError(ctx.Err()).Err()
		}

		return own.err
	}
}

// bounded makes a call that does not end with ctx.
func bounded(ctx context.Context, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTimeout)
	defer cancel()
	err := call(ctx)
	if err != nil && ctx.Err() != nil {
		const format = "the agent has not answered within %s; it may still be at it"
		return &Error{Kind: ErrTimeout, Detail: fmt.Sprintf(format, changeTimeout), Err: err}
	}
	return err
}

// wait returns false if ctx ended first.
func (c *change) wait(ctx context.Context) bool {
	select {
	case <-c.done:
		return true
	case <-ctx.Done():
		return false
	}
}

// answered waits until no call runs that changes the object. If ctx ends first, said is what is
// waited for.
func (c *Client) answered(ctx context.Context, op string, o object) (said string, err error) {
	for running := c.changes.of(o); running != nil; running = c.changes.of(o) {
		if !running.wait(ctx) {
			const format = "the agent has not answered %s %s for %s"
			age := time.Since(running.since).Round(time.Millisecond)
			said = fmt.Sprintf(format, running.verb, o.noun, age)
			return said, timeout(ctx, op, o.id, said)
		}
	}
	return "", nil
}
