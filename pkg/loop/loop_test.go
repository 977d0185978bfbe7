// SPDX-License-Identifier: Apache-2.0

package loop_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

func TestUntil(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errors.New("too late"))
		defer cancel()

		changes := make(chan struct{}, 1)
		var waiting context.Context
		subscribe := func(ctx context.Context) <-chan struct{} { waiting = ctx; return changes }
		if err := loop.Until(ctx, subscribe, func() bool { return true }); err != nil {
			t.Errorf("what is done already: %v", err)
		}

		asked := 0
		time.AfterFunc(time.Second, func() { changes <- struct{}{} })
		time.AfterFunc(2*time.Second, func() { changes <- struct{}{} })

		if err := loop.Until(ctx, subscribe, func() bool {
			asked++
			return asked == 3
		}); err != nil {
			t.Errorf("after two changes: %v", err)
		}

		if waiting.Err() == nil {
			t.Error("it is still subscribed")
		}
		if err := loop.Until(ctx, subscribe, func() bool { return false }); err == nil ||
			err.Error() != "too late" {
			t.Errorf("error %v, want the cause", err)
		}
	})
}

func TestDebounce(t *testing.T) {
	for name, test := range map[string]struct {
		every time.Duration // between changes; 0 for none
		n     int
		want  time.Duration
	}{
		"no change":      {0, 0, 100 * time.Millisecond},
		"a few":          {50 * time.Millisecond, 4, 300 * time.Millisecond},
		"without an end": {50 * time.Millisecond, 1000, time.Second},
		"too slow":       {200 * time.Millisecond, 4, 100 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				changes := make(chan struct{}, test.n)
				begin := time.Now()

				for n := range test.n {
					time.AfterFunc(time.Duration(n+1)*test.every, func() { changes <- struct{}{} })
				}

				loop.Debounce(t.Context(), changes, 100*time.Millisecond, time.Second)
				if took := time.Since(begin); took != test.want {
					t.Errorf("took %s, want %s", took, test.want)
				}
			})
		})
	}
}

func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()

		changes := make(chan struct{}, 1)
		begin := time.Now()
		if !loop.Wait(ctx, changes, time.Second) || time.Since(begin) != time.Second {
			t.Errorf("waited %s for a pause", time.Since(begin))
		}

		changes <- struct{}{}
		if !loop.Wait(ctx, changes, 0) || time.Since(begin) != time.Second {
			t.Errorf("waited %s for a change", time.Since(begin))
		}
		if loop.Wait(ctx, changes, 0) || time.Since(begin) != time.Hour {
			t.Errorf("waited %s although ctx ended", time.Since(begin))
		}
	})
}

func TestSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()

		begin := time.Now()
		if !loop.Sleep(ctx, time.Second) || time.Since(begin) != time.Second {
			t.Errorf("slept %s", time.Since(begin))
		}
		if loop.Sleep(ctx, time.Hour) || time.Since(begin) != time.Minute {
			t.Errorf("slept %s although ctx ended", time.Since(begin))
		}
	})
}

func TestRetry(t *testing.T) {
	fails := errors.New("not now")
	for name, test := range map[string]struct {
		lasts  []time.Duration // of each failing call of work; the next succeeds
		during time.Duration
		pauses []time.Duration // approximate
	}{
		"succeeds": {nil, time.Hour, nil},
		"fails twice": {
			make([]time.Duration, 2), time.Hour, []time.Duration{time.Second, 2 * time.Second},
		},
		"fails always": {
			make([]time.Duration, 100), 27 * time.Second,
			[]time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second,
				8 * time.Second, 8 * time.Second},
		},
		"works long": {
			[]time.Duration{0, time.Minute, 0}, time.Hour,
			[]time.Duration{time.Second, time.Second, 2 * time.Second},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), test.during)
				defer cancel()

				calls := 0
				var pauses []time.Duration
				loop.Retry(ctx, time.Second, 8*time.Second, func(context.Context) error {
					if calls == len(test.lasts) {
						return nil
					}
					time.Sleep(test.lasts[calls])
					calls++
					return fails
				}, func(err error, pause time.Duration) {
					if !errors.Is(err, fails) {
						t.Errorf("error %v", err)
					}
					pauses = append(pauses, pause)
				})

				if !slices.EqualFunc(pauses, test.pauses, func(got, want time.Duration) bool {
					return got >= want && got <= want+want/10
				}) {
					t.Errorf("pauses %s, want about %s", pauses, test.pauses)
				}
			})
		})
	}
}
