// SPDX-License-Identifier: Apache-2.0

// Package loop provides the waits of a daemon's loops: until something changes, until changes have
// settled, and between attempts.
package loop

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// Until returns nil once done returns true. It calls done at once, and after every change from the
// subscription, which lasts as long as the call. If ctx ends first, it returns [context.Cause].
func Until(
	ctx context.Context, subscribe func(context.Context) <-chan struct{}, done func() bool,
) error {
	waiting, stop := context.WithCancel(ctx)
	defer stop()

	changes := subscribe(waiting)
	for !done() {
		select {
		case <-changes:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}

	return nil
}

// Wait returns true after a change or after the pause, where 0 means an infinite pause. It returns
// false if ctx ends first.
func Wait(ctx context.Context, changes <-chan struct{}, pause time.Duration) bool {
	var elapsed <-chan time.Time
	if pause > 0 {
		elapsed = time.After(pause)
	}

	select {
	case <-changes:
	case <-elapsed:
	case <-ctx.Done():
		return false
	}

	return true
}

// Debounce returns when no change has come for the time quiet, at the latest after the time most,
// or when ctx ends.
func Debounce(ctx context.Context, changes <-chan struct{}, quiet, most time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()

	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(quiet):
			return
		case <-changes:
		}
	}
}

// Sleep returns true after the pause, or false as soon as ctx ends.
func Sleep(ctx context.Context, pause time.Duration) bool {
	return Wait(ctx, nil, max(pause, 1)) // 0 would be infinite
}

// Backoff returns pauses that start with first and double up to slowest. Each has a random jitter
// of up to a tenth, so that nodes do not retry at the same time.
func Backoff(first, slowest time.Duration) *wait.Backoff {
	return &wait.Backoff{
		Duration: first, Factor: 2, Jitter: 0.1, Cap: slowest, Steps: math.MaxInt32,
	}
}

// Retry calls work until it returns nil or ctx ends. The pauses are those of [Backoff], which
// restarts if work took longer than slowest. failed is called with each error and the pause that
// follows.
func Retry(
	ctx context.Context, first, slowest time.Duration, work func(context.Context) error,
	failed func(err error, pause time.Duration),
) {
	pauses := Backoff(first, slowest)
	for {
		begin := time.Now()
		err := work(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}

		if time.Since(begin) > slowest {
			pauses = Backoff(first, slowest)
		}

		pause := pauses.Step()
		failed(err, pause)
		if !Sleep(ctx, pause) {
			return
		}
	}
}

// WithCause adds the cause of the end of ctx, if it has ended, to an error.
func WithCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w (%w)", err, cause)
	}
	return err
}
