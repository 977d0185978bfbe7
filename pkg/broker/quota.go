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

// quota sums up the copies of one kind in the infra cluster, by tenant. It counts a copy when it is
// reserved, before the event of its creation arrives. The zero value is ready for use. Safe for
// concurrent use.
type quota struct {
	mu      sync.Mutex
	costs   map[string]map[string]v1alpha1.PortSum     // by tenant and name
	sums    map[string]v1alpha1.PortSum                // by tenant
	waiting multimap.Sets[string, mcreconcile.Request] // by tenant: requests over the quota
}

// wokenForQuota is how many waiting requests are retried when a copy is deleted. It is more than
// one because the objects of some may be about to be deleted.
const wokenForQuota = 4

// allowance bounds what a tenant's copies of one kind cost together; nil is no bound.
type allowance struct {
	count               int
	maximum, guaranteed *int64 // Mbit/s
}

// exceeded returns the limit that keeps a copy with this cost from being added to the others,
// or [limitNone] if the copy fits. A copy that is guaranteed nothing fits although the others are
// guaranteed too much, because the limit may have been lowered. count is the limit of the number of
// copies.
func (a allowance) exceeded(others, cost v1alpha1.PortSum, count limit) limit {
	sum := others.Plus(cost)
	switch {
	case sum.Ports > a.count:
		return count
	case a.maximum != nil && (sum.Unlimited > 0 || sum.Maximum > *a.maximum):
		return limitBandwidth
	case a.guaranteed != nil && cost.Guaranteed > 0 && sum.Guaranteed > *a.guaranteed:
		return limitGuaranteed
	}
	return limitNone
}

// reserve counts a copy that is about to be created; counting it again has no effect. If the tenant
// has no room for it, reserve returns the limit, and the request waits until a copy is deleted.
// count is the limit of the number of copies.
func (q *quota) reserve(
	tenant, name string, cost v1alpha1.PortSum, most allowance, count limit,
	req mcreconcile.Request,
) limit {
	q.mu.Lock()
	defer q.mu.Unlock()

	if _, counted := q.costs[tenant][name]; !counted {
		if by := most.exceeded(q.sums[tenant], cost, count); by != limitNone {
			q.waiting.Add(tenant, req)
			return by
		}
		q.add(tenant, name, cost)
	}
	q.waiting.Remove(tenant, req)

	return limitNone
}

// used returns what the tenant's copies cost.
func (q *quota) used(tenant string) v1alpha1.PortSum {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.sums[tenant]
}

// add counts a copy. It needs the lock.
func (q *quota) add(tenant, name string, cost v1alpha1.PortSum) {
	q.remove(tenant, name)
	if q.costs == nil {
		q.costs, q.sums = map[string]map[string]v1alpha1.PortSum{}, map[string]v1alpha1.PortSum{}
	}
	if q.costs[tenant] == nil {
		q.costs[tenant] = map[string]v1alpha1.PortSum{}
	}
	q.costs[tenant][name] = cost
	q.sums[tenant] = q.sums[tenant].Plus(cost)
}

// remove stops counting a copy. It needs the lock.
func (q *quota) remove(tenant, name string) {
	cost, counted := q.costs[tenant][name]
	if !counted {
		return
	}
	delete(q.costs[tenant], name)
	q.sums[tenant] = q.sums[tenant].Minus(cost)
	if len(q.costs[tenant]) == 0 {
		delete(q.costs, tenant)
		delete(q.sums, tenant)
	}
}

// release stops counting a deleted copy, and returns waiting requests to retry. They keep waiting
// until reserve succeeds for them.
func (q *quota) release(tenant, name string) (woken []mcreconcile.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()

	q.remove(tenant, name)
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
			q.add(e.Object.GetLabels()[v1alpha1.LabelTenant], e.Object.GetName(), costOf(e.Object))
		},
		DeleteFunc: func(_ context.Context, e event.TypedDeleteEvent[O], queue requests) {
			for _, req := range q.release(e.Object.GetLabels()[v1alpha1.LabelTenant],
				e.Object.GetName()) {
				queue.Add(req)
			}
		},
	}
}

// costOf returns what a copy costs. A copy that is no XPUPort counts as one.
func costOf(copied client.Object) v1alpha1.PortSum {
	if port, isPort := copied.(*v1alpha1.XPUPort); isPort {
		return v1alpha1.CostOf(port)
	}
	return v1alpha1.PortSum{Ports: 1}
}
