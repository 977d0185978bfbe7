// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	mcreconcile "sigs.k8s.io/multicluster-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// quota counts the objects of a kind in the infra cluster that stand for one of a tenant. It knows
// of those that were made before the event of that comes. Safe for concurrent use.
type quota struct {
	mu      sync.Mutex
	names   map[string]sets.Set[string]              // by tenant
	waiting map[string]sets.Set[mcreconcile.Request] // by tenant: those that it may have no more of
}

func newQuota() *quota {
	return &quota{
		names: map[string]sets.Set[string]{}, waiting: map[string]sets.Set[mcreconcile.Request]{},
	}
}

// wokenForQuota is how many requests that wait hear that a tenant may have one object more: some
// may be about to go.
const wokenForQuota = 4

// take counts an object that is about to be made, once, unless the tenant has as many as it may
// have: the request waits for one to go then.
func (q *quota) take(tenant, name string, most int, req mcreconcile.Request) (ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()

	if names := q.names[tenant]; names.Len() >= most && !names.Has(name) {
		insert(q.waiting, tenant, req)
		return false
	}

	insert(q.names, tenant, name)
	q.stopWaiting(tenant, req)

	return true
}

// give ends the count of an object that is gone, and returns requests that waited for that. They
// wait on until they take one.
func (q *quota) give(tenant, name string) (woken []mcreconcile.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()

	if q.names[tenant].Delete(name); q.names[tenant].Len() == 0 {
		delete(q.names, tenant)
	}

	for req := range q.waiting[tenant] { // in any order, so that each is woken at some time
		if woken = append(woken, req); len(woken) == wokenForQuota {
			break
		}
	}

	return woken
}

// leave has a request wait no more, since its object is gone.
func (q *quota) leave(tenant string, req mcreconcile.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.stopWaiting(tenant, req)
}

func (q *quota) stopWaiting(tenant string, req mcreconcile.Request) {
	if q.waiting[tenant].Delete(req); q.waiting[tenant].Len() == 0 {
		delete(q.waiting, tenant)
	}
}

// counted is a handler that has the quota count what is in the infra cluster.
func counted[O client.Object](q *quota) handler.TypedEventHandler[O, mcreconcile.Request] {
	type requests = workqueue.TypedRateLimitingInterface[mcreconcile.Request]
	return handler.TypedFuncs[O, mcreconcile.Request]{
		CreateFunc: func(_ context.Context, e event.TypedCreateEvent[O], _ requests) {
			q.mu.Lock()
			defer q.mu.Unlock()
			insert(q.names, e.Object.GetLabels()[v1alpha1.LabelTenant], e.Object.GetName())
		},
		DeleteFunc: func(_ context.Context, e event.TypedDeleteEvent[O], queue requests) {
			for _, req := range q.give(e.Object.GetLabels()[v1alpha1.LabelTenant],
				e.Object.GetName()) {
				queue.Add(req)
			}
		},
	}
}

// insert adds to one of several sets, which it makes where there is none.
func insert[K, V comparable](all map[K]sets.Set[V], key K, value V) {
	if all[key] == nil {
		all[key] = sets.New[V]()
	}
	all[key].Insert(value)
}
