// Package loop has what the loops of a daemon are made of: waiting until something changed, waiting until changes have
// settled, and trying again after longer and longer pauses.
package loop

import (
	"context"
	"math"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// Until returns nil once done says so. It asks at once and after every change, for which it subscribes as long as it
// waits. If ctx ends before, it returns [context.Cause].
func Until(ctx context.Context, subscribe func(context.Context) <-chan struct{}, done func() bool) error {
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

// Wait returns true after a change, or after the pause; one of 0 never ends. It returns false when ctx ends before.
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

// Debounce returns when no change has come for as long as quiet says, but after most in any case, and when ctx ends.
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

// Sleep pauses. It returns false, at once, when ctx ends before.
func Sleep(ctx context.Context, pause time.Duration) bool {
	return Wait(ctx, nil, max(pause, 1)) // one of 0 would never end
}

// Backoff gives pauses that begin with first and double until they are slowest, a tenth longer or less so that nodes do
// not try together.
func Backoff(first, slowest time.Duration) *wait.Backoff {
	return &wait.Backoff{Duration: first, Factor: 2, Jitter: 0.1, Cap: slowest, Steps: math.MaxInt32}
}

// Retry calls work again and again until ctx ends or work returns nil. The pauses between are those of [Backoff], which
// begins anew when work went on for longer than slowest. failed is told of each error and of the pause that follows.
func Retry(
	ctx context.Context, first, slowest time.Duration, work func(context.Context) error, failed func(err error, pause time.Duration),
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
