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

// quota counts the copies of one kind in the infra cluster, by tenant. It counts a copy when it is
// reserved, before the event of its creation arrives. Safe for concurrent use.
type quota struct {
	mu      sync.Mutex
	names   map[string]sets.Set[string]              // by tenant
	waiting map[string]sets.Set[mcreconcile.Request] // by tenant: requests over the quota
}

func newQuota() *quota {
	return &quota{
		names: map[string]sets.Set[string]{}, waiting: map[string]sets.Set[mcreconcile.Request]{},
	}
}

// wokenForQuota is how many waiting requests are retried when a copy is deleted. It is more than
// one because the objects of some may be about to be deleted.
const wokenForQuota = 4

// reserve counts a copy that is about to be created; counting it again has no effect. If the tenant
// already has most copies, reserve returns false and the request waits until one is deleted.
func (q *quota) reserve(tenant, name string, most int, req mcreconcile.Request) (ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()

	if names := q.names[tenant]; names.Len() >= most && !names.Has(name) {
		insert(q.waiting, tenant, req)
		return false
	}

	insert(q.names, tenant, name)
	q.removeWaiter(tenant, req)

	return true
}

// release stops counting a deleted copy, and returns waiting requests to retry. They keep waiting
// until reserve succeeds for them.
func (q *quota) release(tenant, name string) (woken []mcreconcile.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()

	if q.names[tenant].Delete(name); q.names[tenant].Len() == 0 {
		delete(q.names, tenant)
	}

	for req := range q.waiting[tenant] { // random order, so that each is woken at some time
		if woken = append(woken, req); len(woken) == wokenForQuota {
			break
		}
	}

	return woken
}

// cancelWait drops a waiting request, because its object no longer exists.
func (q *quota) cancelWait(tenant string, req mcreconcile.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.removeWaiter(tenant, req)
}

func (q *quota) removeWaiter(tenant string, req mcreconcile.Request) {
	if q.waiting[tenant].Delete(req); q.waiting[tenant].Len() == 0 {
		delete(q.waiting, tenant)
	}
}

// quotaHandler returns a handler that counts the copies in the infra cluster.
func quotaHandler[O client.Object](q *quota) handler.TypedEventHandler[O, mcreconcile.Request] {
	type requests = workqueue.TypedRateLimitingInterface[mcreconcile.Request]
	return handler.TypedFuncs[O, mcreconcile.Request]{
		CreateFunc: func(_ context.Context, e event.TypedCreateEvent[O], _ requests) {
			q.mu.Lock()
			defer q.mu.Unlock()
			insert(q.names, e.Object.GetLabels()[v1alpha1.LabelTenant], e.Object.GetName())
		},
		DeleteFunc: func(_ context.Context, e event.TypedDeleteEvent[O], queue requests) {
			for _, req := range q.release(e.Object.GetLabels()[v1alpha1.LabelTenant],
				e.Object.GetName()) {
				queue.Add(req)
			}
		},
	}
}

// insert adds a value to the set at key, which it creates if needed.
func insert[K, V comparable](all map[K]sets.Set[V], key K, value V) {
	if all[key] == nil {
		all[key] = sets.New[V]()
	}
	all[key].Insert(value)
}
