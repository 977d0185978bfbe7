package broker

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	mcreconcile "sigs.k8s.io/multicluster-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// quota counts the XPUPorts of the infra cluster that stand for one of a tenant. It is a handler of their events, and knows of those
// that were made before the event of that comes. Safe for concurrent use.
type quota struct {
	mu      sync.Mutex
	names   map[string]sets.Set[string]              // by tenant
	waiting map[string]sets.Set[mcreconcile.Request] // by tenant: those that it may have no more of
}

func newQuota() *quota {
	return &quota{names: map[string]sets.Set[string]{}, waiting: map[string]sets.Set[mcreconcile.Request]{}}
}

// wokenForQuota is how many XPUPorts that wait hear that a tenant may have one more: some may be about to go.
const wokenForQuota = 4

// take counts an XPUPort that is about to be made, once, unless the tenant has as many as it may have, which is total then: the request
// waits for one to go. There is no limit if most is nil.
func (q *quota) take(tenant, name string, most *int32, req mcreconcile.Request) (total int, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	names := q.names[tenant]
	if most != nil && names.Len() >= int(*most) && !names.Has(name) {
		insert(q.waiting, tenant, req)
		return names.Len(), false
	}
	insert(q.names, tenant, name)
	return names.Len(), true
}

// give ends the count of an XPUPort that is gone, and returns requests that waited for that.
func (q *quota) give(tenant, name string) (woken []mcreconcile.Request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.names[tenant].Delete(name); q.names[tenant].Len() == 0 {
		delete(q.names, tenant)
	}
	for range wokenForQuota {
		if next, ok := q.waiting[tenant].PopAny(); ok {
			woken = append(woken, next)
		}
	}
	if q.waiting[tenant].Len() == 0 {
		delete(q.waiting, tenant)
	}
	return woken
}

// handler counts what is in the infra cluster.
func (q *quota) handler() handler.TypedEventHandler[*v1alpha1.XPUPort, mcreconcile.Request] {
	type requests = workqueue.TypedRateLimitingInterface[mcreconcile.Request]
	return handler.TypedFuncs[*v1alpha1.XPUPort, mcreconcile.Request]{
		CreateFunc: func(_ context.Context, e event.TypedCreateEvent[*v1alpha1.XPUPort], _ requests) {
			q.mu.Lock()
			defer q.mu.Unlock()
			insert(q.names, e.Object.Labels[v1alpha1.LabelTenant], e.Object.Name)
		},
		DeleteFunc: func(_ context.Context, e event.TypedDeleteEvent[*v1alpha1.XPUPort], queue requests) {
			for _, req := range q.give(e.Object.Labels[v1alpha1.LabelTenant], e.Object.Name) {
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
