package controller

import (
	"context"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// wakeups puts requests into the queue of the controller that watches its source. Safe for concurrent use.
type wakeups[R comparable] struct {
	mu    sync.Mutex
	queue workqueue.TypedRateLimitingInterface[R] // nil until the controller starts
}

func (w *wakeups[R]) source() source.TypedSource[R] {
	return source.TypedFunc[R](func(_ context.Context, queue workqueue.TypedRateLimitingInterface[R]) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.queue = queue
		return nil
	})
}

// add wakes the controller after the delay. Requests that come before the controller starts are dropped: its first look is at
// everything.
func (w *wakeups[R]) add(delay time.Duration, requests ...R) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.queue == nil {
		return
	}
	for _, request := range requests {
		w.queue.AddAfter(request, delay)
	}
}
