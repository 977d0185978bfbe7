// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"slices"
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/pkg/multimap"
)

// functionQueues holds the claims that wait for a Function, by [model.FunctionKey]. The zero value
// is ready for use. Safe for concurrent use.
type functionQueues struct {
	mu         sync.Mutex
	byFunction multimap.Sets[string, reconcile.Request]
}

func (q *functionQueues) add(function string, claim reconcile.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.byFunction.Add(function, claim)
}

func (q *functionQueues) leave(function string, claim reconcile.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.byFunction.Remove(function, claim)
}

// take empties the queue for a Function and returns its claims. A claim that finds the Function
// taken again rejoins the queue.
func (q *functionQueues) take(function string) []reconcile.Request {
	q.mu.Lock()
	defer q.mu.Unlock()
	claims := slices.Collect(q.byFunction.All(function))
	delete(q.byFunction, function)
	return claims
}
