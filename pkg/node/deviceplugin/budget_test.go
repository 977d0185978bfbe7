// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// TestAllocateBudget: pods that wait for an xPU that does not answer do not block the kubelet one
// after the other.
func TestAllocateBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p allocateBudget
		refused := errors.New("refused")
		allocate := func(works bool, takes time.Duration) (waited time.Duration) {
			begin := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), p.timeout(allocateTimeout))
			defer cancel()

			select {
			case <-ctx.Done():
			case <-time.After(takes):
			}

			if works && ctx.Err() == nil {
				p.ended(ctx, nil)
			} else {
				p.ended(ctx, refused)
			}

			return time.Since(begin)
		}

		for i, want := range []time.Duration{
			2500 * time.Millisecond, 500 * time.Millisecond, 500 * time.Millisecond,
		} {
			if got := allocate(false, time.Hour); got != want {
				t.Errorf("Allocate %d waited %s, want %s", i, got, want)
			}
		}

		allocate(true, 100*time.Millisecond)
		if got := allocate(false, time.Second); got != time.Second {
			t.Errorf("after one that worked, Allocate had %s, want the usual time", got)
		}

		allocate(false, time.Hour)
		time.Sleep(impatience)
		if got := allocate(false, time.Hour); got != allocateTimeout {
			t.Errorf("after a while, Allocate waited %s, want %s", got, allocateTimeout)
		}
	})
}
