// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// Wakeups adds requests to the queue of the controller that watches its source. The zero value is
// ready for use. Safe for concurrent use.
type Wakeups[R comparable] struct {
	mu    sync.Mutex
	queue workqueue.TypedRateLimitingInterface[R] // nil until the controller starts
	early sets.Set[R]                             // requests added before the start
}

// Source returns the source that the controller must watch.
func (w *Wakeups[R]) Source() source.TypedSource[R] {
	return source.TypedFunc[R](func(
		_ context.Context, queue workqueue.TypedRateLimitingInterface[R],
	) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.queue = queue
		for request := range w.early {
			queue.Add(request)
		}
		w.early = nil
		return nil
	})
}

// Add adds the requests to the queue after the delay. Requests added before the controller starts
// are queued when it starts.
func (w *Wakeups[R]) Add(delay time.Duration, requests ...R) {
	w.mu.Lock()
	defer w.mu.Unlock()

	if w.queue == nil {
		if w.early == nil {
			w.early = sets.New[R]()
		}
		w.early.Insert(requests...)
		return
	}

	for _, request := range requests {
		w.queue.AddAfter(request, delay)
	}
}
