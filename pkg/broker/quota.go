// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"sync"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	mcreconcile "sigs.k8s.io/multicluster-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/multimap"
)

// quota counts the copies of one kind in the infra cluster, by tenant. It counts a copy when it is
// reserved, before the event of its creation arrives. The zero value is ready for use. Safe for
// concurrent use.
type quota struct {
	mu      sync.Mutex
	names   multimap.Sets[string, string]              // by tenant
	waiting multimap.Sets[string, mcreconcile.Request] // by tenant: requests over the quota
}

// wokenForQuota is how many waiting requests are retried when a copy is deleted. It is more than
// one because the objects of some may be about to be deleted.
const wokenForQuota = 4

// reserve counts a copy that is about to be created; counting it again has no effect. If the tenant
// already has most copies, reserve returns false and the request waits until one is deleted.
func (q *quota) reserve(tenant, name string, most int, req mcreconcile.Request) (ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()

	if len(q.names[tenant]) >= most && !q.names.Has(tenant, name) {
		q.waiting.Add(tenant, req)
		return false
	}

	q.names.Add(tenant, name)
	q.waiting.Remove(tenant, req)

	return true
}

// release stops counting a deleted copy, and returns waiting requests to retry. They keep waiting
// until reserve succeeds for them.
func (q *quota) release(tenant, name string) (woken []mcreconcile.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()

	q.names.Remove(tenant, name)
	for req := range q.waiting.All(tenant) { // random order, so that each is woken at some time
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
	q.waiting.Remove(tenant, req)
}

// quotaHandler returns a handler that counts the copies in the infra cluster.
func quotaHandler[O client.Object](q *quota) handler.TypedEventHandler[O, mcreconcile.Request] {
	type requests = workqueue.TypedRateLimitingInterface[mcreconcile.Request]
	return handler.TypedFuncs[O, mcreconcile.Request]{
		CreateFunc: func(_ context.Context, e event.TypedCreateEvent[O], _ requests) {
			q.mu.Lock()
			defer q.mu.Unlock()
			q.names.Add(e.Object.GetLabels()[v1alpha1.LabelTenant], e.Object.GetName())
		},
		DeleteFunc: func(_ context.Context, e event.TypedDeleteEvent[O], queue requests) {
			for _, req := range q.release(e.Object.GetLabels()[v1alpha1.LabelTenant],
				e.Object.GetName()) {
				queue.Add(req)
			}
		},
	}
}
