// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/source"
)

// Turns bounds how many requests for one key run at once, such as for one XPU, so that a slow one
// does not occupy all workers. It puts a request that finds no room back in the queue when there is
// some: the controller must watch the source. Safe for concurrent use.
type Turns[R comparable] struct {
	limit int

	wakeups Wakeups[R]

	mu sync.Mutex
	// the key for which the request has a turn: it runs, or is in the queue again
	holds  map[R]string
	taken  map[string]int // turns by key
	parked map[string][]R // by key
	at     map[R]string   // the key for which the request was parked last
}

// NewTurns returns turns of which each key has as many as the limit says.
func NewTurns[R comparable](limit int) *Turns[R] {
	return &Turns[R]{
		limit: limit, holds: map[R]string{}, taken: map[string]int{}, parked: map[string][]R{},
		at: map[R]string{},
	}
}

// Source is for the controller.
func (t *Turns[R]) Source() source.TypedSource[R] { return t.wakeups.Source() }

// Take says whether the request may run now; the caller then calls Done. Otherwise the request is
// queued again later.
func (t *Turns[R]) Take(key string, request R) bool {
	t.mu.Lock()
	defer t.mu.Unlock()

	if held, ok := t.holds[request]; ok && held == key {
		return true
	}

	t.release(request) // its turn for another key
	if t.taken[key] >= t.limit {
		t.park(key, request)
		return false
	}

	t.taken[key]++
	t.holds[request] = key

	return true
}

// park has the request wait, once however often it comes.
func (t *Turns[R]) park(key string, request R) {
	if at, ok := t.at[request]; ok && at == key {
		return
	}
	t.at[request] = key
	t.parked[key] = append(t.parked[key], request)
}

// Done passes the request's turn on, if it has one.
func (t *Turns[R]) Done(request R) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.release(request)
}

func (t *Turns[R]) release(request R) {
	key, ok := t.holds[request]
	if !ok {
		return
	}

	delete(t.holds, request)
	for len(t.parked[key]) > 0 {
		next := t.parked[key][0]
		t.parked[key] = t.parked[key][1:]
		if t.at[next] == key {
			delete(t.at, next)
		}
		if _, isAtWork := t.holds[next]; !isAtWork {
			t.holds[next] = key
			t.wakeups.Add(0, next)
			return
		}
	}

	delete(t.parked, key)
	if t.taken[key]--; t.taken[key] == 0 {
		delete(t.taken, key)
	}
}
