// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls, takes, release := 0, time.Duration(0), make(chan struct{})
		hang := false
		p := patience[int]{limit: 2 * time.Second, call: func() (int, error) {
			calls++
			n := calls
			if hang {
				<-release
			}
			time.Sleep(takes)
			return n, nil
		}}

		ask := func(want int, wantErr error, within time.Duration) {
			t.Helper()
			begin := time.Now()
			got, err := p.do()
			if took := time.Since(begin); got != want || !errors.Is(err, wantErr) || took > within {
				t.Errorf("got %d, %v after %s, want %d, %v within %s", got, err, took, want,
					wantErr, within)
			}
		}

		ask(1, nil, 0)
		takes = time.Second
		ask(2, nil, time.Second)
		hang = true
		ask(0, errNoAnswer, 2*time.Second)
		ask(0, errNoAnswer, 0) // does not wait again, and does not call again
		close(release)
		time.Sleep(2 * time.Second)
		ask(4, nil, time.Second) // what the call that hung returned is too old
		if calls != 4 {
			t.Errorf("%d calls, want 4", calls)
		}
	})
}
