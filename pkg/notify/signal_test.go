// SPDX-License-Identifier: Apache-2.0

package notify

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
)

// woken reports whether the channel has a value, and receives it.
func woken(subscriber <-chan struct{}) bool {
	select {
	case <-subscriber:
		return true
	default:
		return false
	}
}

func TestSignal(t *testing.T) {
	var signal Signal
	signal.Notify() // no subscriber yet
	first := signal.Subscribe(t.Context())
	if woken(first) {
		t.Error("woken by what was before the subscription")
	}

	second := signal.Subscribe(t.Context())
	signal.Notify()
	signal.Notify()

	for name, subscriber := range map[string]<-chan struct{}{"first": first, "second": second} {
		if !woken(subscriber) {
			t.Errorf("%s: not woken", name)
		}
		if woken(subscriber) {
			t.Errorf("%s: woken twice by changes before it looked", name)
		}
	}

	signal.Notify()
	if !woken(first) {
		t.Error("not woken by a change after it looked")
	}
}

func TestSubscriptionEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var signal Signal
		ctx, end := context.WithCancel(t.Context())
		ended, other := signal.Subscribe(ctx), signal.Subscribe(t.Context())
		end()
		synctest.Wait()
		signal.Notify()
		if woken(ended) {
			t.Error("woken after its context ended")
		}
		if !woken(other) {
			t.Error("another subscriber was not woken")
		}

		kept := 0
		for range signal.subscribers.Range {
			kept++
		}

		if kept != 1 {
			t.Errorf("%d subscribers are kept, want 1", kept)
		}
	})
}

// TestNothingIsMissed checks that a subscriber which reads the state after it is woken sees the
// last change, however notifiers, subscribers and ends of subscriptions interleave.
func TestNothingIsMissed(t *testing.T) {
	var signal Signal
	var mutex sync.Mutex
	state, last := 0, 1000
	var watchers, others sync.WaitGroup
	for range 4 {
		changes := signal.Subscribe(t.Context())
		watchers.Go(func() {
			for seen := 0; seen < last; {
				<-changes
				mutex.Lock()
				seen = state
				mutex.Unlock()
			}
		})

		others.Go(func() { // subscribes and ends
			for range 100 {
				ctx, end := context.WithCancel(t.Context())
				signal.Subscribe(ctx)
				end()
			}
		})
	}

	for range last {
		mutex.Lock()
		state++
		mutex.Unlock()
		signal.Notify()
	}

	watchers.Wait()
	others.Wait()
}
