package controller

import (
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"
)

// dependents knows which claims wait for which objects. A claim that is about to look at an object says so first, so a
// change between looking and waiting is not lost. Safe for concurrent use.
type dependents[K, T comparable] struct {
	mu      sync.Mutex
	byTopic map[T]sets.Set[K]
	byKey   map[K]sets.Set[T]
}

func newDependents[K, T comparable]() *dependents[K, T] {
	return &dependents[K, T]{byTopic: map[T]sets.Set[K]{}, byKey: map[K]sets.Set[T]{}}
}

// await has the key woken by the topic until it is forgotten.
func (w *dependents[K, T]) await(key K, topic T) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.byTopic[topic] == nil {
		w.byTopic[topic] = sets.New[K]()
	}
	if w.byKey[key] == nil {
		w.byKey[key] = sets.New[T]()
	}
	w.byTopic[topic].Insert(key)
	w.byKey[key].Insert(topic)
}

// forget has the key wait for nothing any more.
func (w *dependents[K, T]) forget(key K) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for topic := range w.byKey[key] {
		w.byTopic[topic].Delete(key)
		if w.byTopic[topic].Len() == 0 {
			delete(w.byTopic, topic)
		}
	}
	delete(w.byKey, key)
}

// woken are the keys that wait for the topic, in no order.
func (w *dependents[K, T]) of(topic T) []K {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.byTopic[topic].UnsortedList()
}

// durations measures for how long something has been the case. Safe for concurrent use.
type durations[K comparable] struct {
	mu    sync.Mutex
	since map[K]time.Time
}

func newDurations[K comparable]() *durations[K] {
	return &durations[K]{since: map[K]time.Time{}}
}

// elapsed is the time since the first call for the key.
func (s *durations[K]) elapsed(key K) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	since, ok := s.since[key]
	if !ok {
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
