package controller

import (
	"maps"
	"sync"
	"time"
)

// durations measures for how long something has been the case. Its zero value is ready for use. Safe for concurrent use.
type durations[K comparable] struct {
	mu    sync.Mutex
	since map[K]time.Time
}

// elapsed is the time since the first call for the key.
func (s *durations[K]) elapsed(key K) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	since, ok := s.since[key]
	if !ok {
		if s.since == nil {
			s.since = map[K]time.Time{}
		}
		s.since[key] = time.Now()
		return 0
	}
	return time.Since(since)
}

// reset has the next call of elapsed start anew.
func (s *durations[K]) reset(key K) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.since, key)
}

// retain resets all keys but these.
func (s *durations[K]) retain(keep func(K) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.since, func(key K, _ time.Time) bool { return !keep(key) })
}
