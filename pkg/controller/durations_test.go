package controller

import (
	"testing"
	"time"
)

func TestDurations(t *testing.T) {
	var s durations[string]
	if got := s.elapsed("a"); got != 0 {
		t.Errorf("%s at first", got)
	}
	first := s.since["a"]
	s.since["a"] = first.Add(-time.Minute)
	s.elapsed("b")
	if got := s.elapsed("a"); got < time.Minute {
		t.Errorf("%s after a minute", got)
	}
	s.retain(func(key string) bool { return key == "b" })
	if got := s.elapsed("a"); got != 0 {
		t.Errorf("%s after it was dropped", got)
	}
	s.reset("a")
	if _, ok := s.since["a"]; ok || len(s.since) != 1 {
		t.Errorf("left: %v", s.since)
	}
}
