// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

// TestOnChange: a part learns of a change that came before the part runs.
func TestOnChange(t *testing.T) {
	var signal notify.Signal
	run := onChange(t.Context(), &signal, func(_ context.Context, changes <-chan struct{}) error {
		select {
		case <-changes:
			return nil
		default:
			return errors.New("no change")
		}
	})

	signal.Notify()
	if err := run(t.Context()); err != nil {
		t.Errorf("the part was not notified: %v", err)
	}
}

// TestLasting: a part that outlives others ends them if it fails, and ends when it is asked to.
func TestLasting(t *testing.T) {
	failure := errors.New("no socket")
	var signal notify.Signal
	fails := newLasting(t.Context(), &signal, func(context.Context, <-chan struct{}) error {
		return failure
	})
	fails.start()
	if err := runAll(t.Context(), []part{fails.watch}); !errors.Is(err, failure) {
		t.Errorf("the other parts ended by %v, want the error of the part", err)
	}

	outer, end := context.WithCancel(t.Context())
	lasts := newLasting(t.Context(), &signal, func(ctx context.Context, _ <-chan struct{}) error {
		<-ctx.Done()
		return nil
	})
	lasts.start()
	end()
	if err := runAll(outer, []part{lasts.watch}); err != nil || lasts.ctx.Err() != nil {
		t.Errorf("the other parts ended by %v; the part ended too: %v", err, lasts.ctx.Err())
	}
	if err := lasts.end(); err != nil {
		t.Errorf("the part ended by %v", err)
	}
}
