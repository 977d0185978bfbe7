// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// Indexes of the cache.
const (
	ByNetwork   = "network" // of DevicePools: name of the XPUNetwork
	nodesByPool = "pool"    // of XPUNodes: names of DevicePools
)

// AddIndexes adds the indexes of the cache that this package reads, and [ByNetwork].
func AddIndexes(ctx context.Context, indexer client.FieldIndexer) error {
	network := func(p *v1alpha1.DevicePool) []string { return []string{p.Spec.Network} }
	pools := func(n *v1alpha1.XPUNode) []string { return slices.Collect(maps.Keys(poolsOf(n))) }
	return errors.Join(
		reconciling.AddIndex(ctx, indexer, &v1alpha1.DevicePool{}, ByNetwork, network),
		reconciling.AddIndex(ctx, indexer, &v1alpha1.XPUNode{}, nodesByPool, pools),
	)
}

// Setup adds the reconciler of DevicePools to the manager. pause is the least time between two
// writes of a DevicePool's status.
func Setup(mgr ctrl.Manager, cluster reconciling.Cluster, pause time.Duration) error {
	return (&reconciler{cluster, pause}).setup(mgr)
}

// reconciler sums up in a DevicePool's status what the nodes' agents found for it.
type reconciler struct {
	reconciling.Cluster
	pause time.Duration
}

// requestQueue is the controller's queue.
type requestQueue = workqueue.TypedRateLimitingInterface[reconcile.Request]

func (r *reconciler) setup(mgr ctrl.Manager) error {
	ofNetwork := func(ctx context.Context, network client.Object) []reconcile.Request {
		return reconciling.Requests(ctx, r.Client, &v1alpha1.DevicePoolList{},
			client.MatchingFields{ByNetwork: network.GetName()})
	}

	return reconciling.NewController(mgr, "devicepool", 1).
		For(&v1alpha1.DevicePool{}, reconciling.WhenSpecChanged).
		Watches(&v1alpha1.XPUNetwork{}, handler.EnqueueRequestsFromMapFunc(ofNetwork),
			reconciling.WhenMadeOrGone).
		Watches(&v1alpha1.XPUNode{}, handler.Funcs{
			CreateFunc: func(_ context.Context, e event.CreateEvent, queue requestQueue) {
				r.changed(nil, e.Object, queue)
			},
			UpdateFunc: func(_ context.Context, e event.UpdateEvent, queue requestQueue) {
				r.changed(e.ObjectOld, e.ObjectNew, queue)
			},
			DeleteFunc: func(_ context.Context, e event.DeleteEvent, queue requestQueue) {
				r.changed(e.Object, nil, queue)
			},
		}).
		Complete(r.Guarded(reconcile.AsReconciler(r.Client, r)))
}

// changed enqueues the pools whose entries differ between two versions of an XPUNode. A pool is
// written once in each pause at most, because every agent watches DevicePools, and a thousand nodes
// may start at once.
func (r *reconciler) changed(before, after client.Object, queue requestQueue) {
	was, is := entriesOf(before), entriesOf(after)
	for name, entry := range was {
		if now, stays := is[name]; !stays || !entry.equal(now) {
			queue.AddAfter(requestFor(name), r.pause)
		}
	}

	for name := range is {
		if _, had := was[name]; !had {
			queue.AddAfter(requestFor(name), r.pause)
		}
	}
}

// poolsOf returns the entries of an XPUNode by the name of the DevicePool. The XPUNode may be nil.
func poolsOf(o client.Object) map[string]v1alpha1.XPUNodePool {
	entries := map[string]v1alpha1.XPUNodePool{}
	if node, ok := o.(*v1alpha1.XPUNode); ok {
		for _, entry := range node.Status.Pools {
			entries[entry.Name] = entry
		}
	}
	return entries
}

// entriesOf returns the entries of an XPUNode by the name of the DevicePool, with whether the agent
// that wrote them is away. The XPUNode may be nil.
func entriesOf(o client.Object) map[string]poolEntry {
	entries := map[string]poolEntry{}
	for name, entry := range poolsOf(o) {
		conditions := o.(*v1alpha1.XPUNode).Status.Conditions
		entries[name] = poolEntry{
			node:        o.GetName(),
			away:        meta.IsStatusConditionFalse(conditions, v1alpha1.ConditionAgentReady),
			XPUNodePool: entry,
		}
	}
	return entries
}

// requestFor returns the request for a DevicePool.
func requestFor(name string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Name: name}}
}

// Reconcile writes the status of the pool.
func (r *reconciler) Reconcile(
	ctx context.Context, pool *v1alpha1.DevicePool,
) (ctrl.Result, error) {
	before := pool.DeepCopy()
	entries, err := r.entries(ctx, pool.Name)
	if err != nil {
		return ctrl.Result{}, err
	}

	hasNetwork := true
	if name := pool.Spec.Network; name != "" {
		err := r.Client.Get(ctx, client.ObjectKey{Name: name}, &v1alpha1.XPUNetwork{})
		if client.IgnoreNotFound(err) != nil {
			return ctrl.Result{}, fmt.Errorf("XPUNetwork %s: %w", name, err)
		}
		hasNetwork = err == nil
	}

	sumUp(pool, entries, hasNetwork)
	if err := r.namePFs(ctx, pool); err != nil {
		return ctrl.Result{}, err
	}

	sumUpSupply(pool, entries)
	sumUpFallbacks(pool, entries)

	return ctrl.Result{}, reconciling.WriteStatus(ctx, r.Client, pool, before)
}

// entries returns the entries of a pool, sorted by node.
func (r *reconciler) entries(ctx context.Context, pool string) ([]poolEntry, error) {
	var nodes v1alpha1.XPUNodeList
	if err := r.Client.List(ctx, &nodes, client.MatchingFields{nodesByPool: pool},
		client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list XPUNodes: %w", err)
	}

	var entries []poolEntry
	for i := range nodes.Items {
		entries = append(entries, entriesOf(&nodes.Items[i])[pool])
	}

	slices.SortFunc(entries, func(a, b poolEntry) int { return cmp.Compare(a.node, b.node) })
	return entries, nil
}

// namePFs adds the existing PFs to the message of a pool that has no Functions.
func (r *reconciler) namePFs(ctx context.Context, pool *v1alpha1.DevicePool) error {
	ready := meta.FindStatusCondition(pool.Status.Conditions, v1alpha1.ConditionReady)
	if ready == nil || ready.Reason != v1alpha1.ReasonNoFunctions {
		return nil
	}

	var nodes v1alpha1.XPUNodeList
	if err := r.Client.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("list XPUNodes: %w", err)
	}

	var pfs []string
	for _, node := range nodes.Items {
		for _, pf := range node.Status.PFs {
			pfs = append(pfs,
				fmt.Sprintf("%s %s (%s, %s:%s)", node.Name, pf.Name, pf.Address, pf.Vendor,
					pf.Device))
		}
	}

	slices.Sort(pfs)
	found := "no agent has reported a PF: see whether xpu-agent runs on the nodes"
	if len(pfs) > 0 {
		found = "PFs of nodes are " + strings.Join(firstOf(pfs), ", ")
	}

	ready.Message = opi.Short(ready.Message + "; " + found)
	return nil
}
