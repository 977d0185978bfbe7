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
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Millisecond, errors.New("too late"))
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
