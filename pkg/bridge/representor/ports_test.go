// SPDX-License-Identifier: Apache-2.0

package representor

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

// TestListTimeout checks that a call that hangs delays callers no longer than the timeout, and that
// its late result is never returned.
func TestListTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls, takes, release := 0, time.Duration(0), make(chan struct{})
		hang := false
		lister := NewPortLister(func() ([]devlink.Port, error) {
			calls++
			n := calls
			if hang {
				<-release
			}
			time.Sleep(takes)
			return make([]devlink.Port, n), nil
		})

		list := func(want int, wantErr error, within time.Duration) {
			t.Helper()
			begin := time.Now()
			got, err := lister.List()
			took := time.Since(begin)
			if len(got) != want || !errors.Is(err, wantErr) || took > within {
				t.Errorf("got %d ports, %v after %s, want %d, %v within %s", len(got), err, took,
					want, wantErr, within)
			}
		}

		list(1, nil, 0)
		takes = time.Second
		list(2, nil, time.Second)
		hang = true
		list(0, errTimeout, listTimeout)
		list(0, errTimeout, 0) // does not wait again, and does not call again
		close(release)
		time.Sleep(2 * time.Second)
		list(4, nil, time.Second) // the result of the call that hung is too old
		if calls != 4 {
			t.Errorf("%d calls, want 4", calls)
		}
	})
}
