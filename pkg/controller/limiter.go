package controller

import (
	"context"
	"sync"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// perXPULimiter bounds how many requests are worked on at once for one XPU, so that an agent that answers slowly does not
// take up all workers and holds up no other xPU. A request that finds no room is put back in the queue once there is
// some. Safe for concurrent use.
type perXPULimiter struct {
	limit int

	mu      sync.Mutex
	queue   workqueue.TypedRateLimitingInterface[reconcile.Request]
	taken   map[string]int                 // by XPU, including those granted
	parked  map[string][]reconcile.Request // by XPU
	granted map[reconcile.Request]string   // the XPU at which the request has a turn when it comes again
}

func newPerXPULimiter(limit int) *perXPULimiter {
	return &perXPULimiter{
		limit: limit, taken: map[string]int{}, parked: map[string][]reconcile.Request{}, granted: map[reconcile.Request]string{},
	}
}

// source is where requests come back from; the controller must have it.
func (t *perXPULimiter) source() source.Source {
	return source.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.queue = queue
		return nil
	})
}

// take tells whether the request may go on; then done must follow. If not, it will come again.
func (t *perXPULimiter) take(xpu string, request reconcile.Request) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.granted[request] == xpu {
		delete(t.granted, request)
		return true
	}
	if t.taken[xpu] < t.limit {
		t.taken[xpu]++
		return true
	}
	t.parked[xpu] = append(t.parked[xpu], request)
	return false
}

// done passes the turn on.
func (t *perXPULimiter) done(xpu string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.release(xpu)
}

// cancel is for a request that needs no turn any more.
func (t *perXPULimiter) cancel(request reconcile.Request) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if xpu, ok := t.granted[request]; ok {
		delete(t.granted, request)
		t.release(xpu)
	}
}

func (t *perXPULimiter) release(xpu string) {
	parked := t.parked[xpu]
	if len(parked) == 0 {
		delete(t.parked, xpu)
		if t.taken[xpu]--; t.taken[xpu] == 0 {
			delete(t.taken, xpu)
		}
		return
	}
	next := parked[0]
	t.parked[xpu] = parked[1:]
	if _, has := t.granted[next]; has {
		t.release(xpu) // it was parked twice
		return
	}
	t.granted[next] = xpu
	t.queue.Add(next)
}
