// SPDX-License-Identifier: Apache-2.0

package reconciling

import (
	"testing"
	"time"
)

func TestDurations(t *testing.T) {
	var s Durations[string]
	if got := s.Elapsed("a"); got != 0 {
		t.Errorf("%s at first", got)
	}

	first, _ := s.since.Load("a")
	s.since.Store("a", first.(time.Time).Add(-time.Minute))
	s.Elapsed("b")
	if got := s.Elapsed("a"); got < time.Minute {
		t.Errorf("%s after a minute", got)
	}

	s.Retain(func(key string) bool { return key == "b" })
	if got := s.Elapsed("a"); got != 0 {
		t.Errorf("%s after it was dropped", got)
	}

	s.Reset("a")
	left := 0
	for range s.since.Range {
		left++
	}

	if _, ok := s.since.Load("a"); ok || left != 1 {
		t.Errorf("%d left, want b", left)
	}
}
