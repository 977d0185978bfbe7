package controller

import (
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// perXPULimiter bounds how many requests for one XPU run at once, so that a slow agent does not occupy all workers. It puts
// a request that finds no room back in the queue when there is some: the controller must watch wakeups. Safe for concurrent use.
type perXPULimiter struct {
	limit int

	wakeups wakeups[reconcile.Request]

	mu     sync.Mutex
	holds  map[reconcile.Request]string   // the XPU at which the request has a turn: it runs, or is in the queue again
	taken  map[string]int                 // turns by XPU
	parked map[string][]reconcile.Request // by XPU
}

func newPerXPULimiter(limit int) *perXPULimiter {
	return &perXPULimiter{
		limit: limit, holds: map[reconcile.Request]string{}, taken: map[string]int{}, parked: map[string][]reconcile.Request{},
	}
}

// take says whether the request may run now; the caller then calls done. Otherwise the request is queued again later.
func (t *perXPULimiter) take(xpu string, request reconcile.Request) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if held, ok := t.holds[request]; ok && held == xpu {
		return true
	}
	t.release(request) // its turn at the XPU of an earlier Port of this name
	if t.taken[xpu] >= t.limit {
		t.parked[xpu] = append(t.parked[xpu], request)
		return false
	}
	t.taken[xpu]++
	t.holds[request] = xpu
	return true
}

// done passes the request's turn on, if it has one.
func (t *perXPULimiter) done(request reconcile.Request) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.release(request)
}

func (t *perXPULimiter) release(request reconcile.Request) {
	xpu, ok := t.holds[request]
	if !ok {
		return
	}
	delete(t.holds, request)
	for len(t.parked[xpu]) > 0 {
		next := t.parked[xpu][0]
		t.parked[xpu] = t.parked[xpu][1:]
		if _, parkedTwice := t.holds[next]; !parkedTwice {
			t.holds[next] = xpu
			t.wakeups.add(0, next)
			return
		}
	}
	delete(t.parked, xpu)
	if t.taken[xpu]--; t.taken[xpu] == 0 {
		delete(t.taken, xpu)
	}
}
