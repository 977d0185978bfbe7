// SPDX-License-Identifier: Apache-2.0

package keylock_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/keylock"
)

func TestLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var locks keylock.Locks[string]
		var running sync.WaitGroup
		busy := 0
		for range 10 {
			running.Go(func() {
				unlock, err := locks.Lock(t.Context(), "a")
				if err != nil {
					t.Error(err)
					return
				}
				defer unlock()

				if busy++; busy > 1 {
					t.Error("two have the lock")
				}

				time.Sleep(time.Second)
				busy--
			})
		}

		synctest.Wait()
		if _, taken := locks.TryLock("a"); taken {
			t.Error("a lock that somebody has was taken")
		}

		unlock, taken := locks.TryLock("b")
		if !taken {
			t.Fatal("keys are not independent")
		}

		unlock()
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Millisecond,
			errors.New("too late"))
		defer cancel()

		if _, err := locks.Lock(ctx, "a"); err == nil || err.Error() != "too late" {
			t.Errorf("error %v, want the cause", err)
		}

		running.Wait()
		for range 100 {
			if _, err := locks.Lock(ctx, "a"); err == nil {
				t.Fatal("a free lock was taken after ctx ended")
			}
		}

		if unlock, taken := locks.TryLock("a"); !taken {
			t.Error("nobody gave the lock back")
		} else {
			unlock()
		}
	})
}

func TestTakeOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var locks keylock.Locks[string]
		reason := errors.New("superseded")
		first, unlockFirst, err := locks.TakeOver(t.Context(), "a", reason)
		if err != nil || first.Err() != nil {
			t.Fatal(err, first.Err())
		}

		late, cancel := context.WithTimeoutCause(t.Context(), time.Second, errors.New("too late"))
		defer cancel()

		if _, _, err := locks.TakeOver(late, "a", reason); err == nil || err.Error() != "too late" {
			t.Errorf("error %v, want the cause", err)
		}
		if cause := context.Cause(first); !errors.Is(cause, reason) {
			t.Errorf("the context of the holder ended with %v", cause)
		}

		unlockFirst()
		second, unlockSecond, err := locks.TakeOver(t.Context(), "a", reason)
		if err != nil || second.Err() != nil {
			t.Fatal(err, second.Err())
		}

		unlockSecond()
		if second.Err() == nil {
			t.Error("the context lives on without the lock")
		}
	})
}
