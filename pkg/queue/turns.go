// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/source"
)

// Turns limits how many requests for one key, such as an XPU, run at once, so that a slow key does
// not occupy all workers. It parks a request that exceeds the limit, and puts it back into the
// controller's queue when it may run. The controller must watch the source. Safe for concurrent
// use.
type Turns[R comparable] struct {
	limit int

	wakeups Wakeups[R]

	mu sync.Mutex
	// key of the turn that the request has: it is running, or queued to run
	holders   map[R]string
	turns     map[string]int // number by key
	parked    map[string][]R // requests by key, oldest first
	parkedFor map[R]string   // the key for which the request was last parked
}

// NewTurns returns Turns with this limit of running requests for each key.
func NewTurns[R comparable](limit int) *Turns[R] {
	return &Turns[R]{
		limit: limit, holders: map[R]string{}, turns: map[string]int{}, parked: map[string][]R{},
		parkedFor: map[R]string{},
	}
}

// Source returns the source that the controller must watch.
func (t *Turns[R]) Source() source.TypedSource[R] { return t.wakeups.Source() }

// Take reports whether the request may run now. If so, the caller must call Done afterwards.
// Otherwise the request is parked and queued again later.
func (t *Turns[R]) Take(key string, request R) bool {
	t.mu.Lock()
	defer t.mu.Unlock()

	if held, ok := t.holders[request]; ok && held == key {
		return true
	}

	t.release(request) // a turn for another key
	if t.turns[key] >= t.limit {
		t.park(key, request)
		return false
	}

	t.turns[key]++
	t.holders[request] = key

	return true
}

// park makes the request wait, once however often it comes.
func (t *Turns[R]) park(key string, request R) {
	if at, ok := t.parkedFor[request]; ok && at == key {
		return
	}
	t.parkedFor[request] = key
	t.parked[key] = append(t.parked[key], request)
}

// Done ends the request's turn, if it has one, and passes it to a parked request.
func (t *Turns[R]) Done(request R) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.release(request)
}

func (t *Turns[R]) release(request R) {
	key, ok := t.holders[request]
	if !ok {
		return
	}

	delete(t.holders, request)
	for len(t.parked[key]) > 0 {
		next := t.parked[key][0]
		t.parked[key] = t.parked[key][1:]
		if t.parkedFor[next] == key {
			delete(t.parkedFor, next)
		}
		if _, isAtWork := t.holders[next]; !isAtWork {
			t.holders[next] = key
			t.wakeups.Add(0, next)
			return
		}
	}

	delete(t.parked, key)
	if t.turns[key]--; t.turns[key] == 0 {
		delete(t.turns, key)
	}
}
