// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"sync"

	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// functionQueues holds the claims that wait for a Function, by [model.FunctionKey]. The zero value
// is ready for use. Safe for concurrent use.
type functionQueues struct {
	mu         sync.Mutex
	byFunction map[string]sets.Set[reconcile.Request]
}

func (q *functionQueues) add(function string, claim reconcile.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()

	if q.byFunction == nil {
		q.byFunction = map[string]sets.Set[reconcile.Request]{}
	}

	if q.byFunction[function] == nil {
		q.byFunction[function] = sets.New[reconcile.Request]()
	}
	q.byFunction[function].Insert(claim)
}

func (q *functionQueues) leave(function string, claim reconcile.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.byFunction[function].Delete(claim).Len() == 0 {
		delete(q.byFunction, function)
	}
}

// take empties the queue for a Function and returns its claims. A claim that finds the Function
// taken again rejoins the queue.
func (q *functionQueues) take(function string) []reconcile.Request {
	q.mu.Lock()
	defer q.mu.Unlock()
	claims := q.byFunction[function].UnsortedList()
	delete(q.byFunction, function)
	return claims
}
