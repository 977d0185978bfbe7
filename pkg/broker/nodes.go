// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"errors"

	"k8s.io/apimachinery/pkg/api/equality"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/source"
	mcmanager "sigs.k8s.io/multicluster-runtime/pkg/manager"
	mcreconcile "sigs.k8s.io/multicluster-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// nodes copies XPUNodes to the infra cluster, because their PFs identify the node of each card.
type nodes struct {
	syncer
	quota *quota
}

func (r *nodes) setup(mgr mcmanager.Manager) error {
	return newController(mgr, "node", r.Concurrency).
		For(&v1alpha1.XPUNode{}).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUNode{}, originRequests)).
		WatchesRawSource(source.TypedKind(mgr.GetLocalManager().GetCache(), &v1alpha1.XPUNode{},
			quotaHandler[*v1alpha1.XPUNode](r.quota))).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUTenant{}, r.requestsOf, whenTenantChanged())).
		WatchesRawSource(r.wakeups.Source()).
		WatchesRawSource(r.turns.Source()).
		Complete(r.reconciler("XPUNodes", r.reconcile))
}

func (r *nodes) enqueueAll(ctx context.Context, tenant string) {
	r.enqueueOrigins(ctx, tenant, &v1alpha1.XPUNodeList{})
}

// requestsOf returns requests for all XPUNodes of a tenant. Its limit may have been raised.
func (r *nodes) requestsOf(ctx context.Context, tenant *v1alpha1.XPUTenant) []mcreconcile.Request {
	return r.requestsIn(ctx, tenant.Name, &v1alpha1.XPUNodeList{})
}

// reconcile copies one XPUNode of a tenant's cluster, named by the request.
func (r *nodes) reconcile(
	ctx context.Context, tc *tenantCluster, req mcreconcile.Request,
) (ctrl.Result, error) {
	var node, copied v1alpha1.XPUNode
	exists, err := getIfExists(ctx, tc.client, req.NamespacedName, &node)
	if err != nil {
		return ctrl.Result{}, err
	}

	name := scoped(tc.Name, req.Name)
	has, err := getIfExists(ctx, r.infra, client.ObjectKey{Name: name}, &copied)
	switch {
	case err != nil:
		return ctrl.Result{}, err
	case tc.isLeaving():
		return ctrl.Result{}, nil
	case exists:
		err := r.allow(tc, &node, name, req)
		// The XPUTenant's status names the limit, because an XPUNode has no conditions.
		if _, ok := errors.AsType[*problem](err); ok {
			return ctrl.Result{RequeueAfter: reconciling.LastRetry}, nil
		}
		return ctrl.Result{}, r.copyToInfra(ctx, tc, &node, &copied)
	case !has:
		r.quota.cancelWait(tc.Name, req)
		// The quota may have counted a copy that was never created.
		r.wakeups.Add(0, r.quota.release(tc.Name, name)...)
		return ctrl.Result{}, nil
	}

	if exists, err = getIfExists(ctx, tc.live, req.NamespacedName, &node); err != nil || exists {
		return cacheStale, err
	}

	return ctrl.Result{}, remove(ctx, r.infra, &copied)
}

// allow reserves quota for the XPUNode. It returns a *problem if the tenant may not have it.
func (r *nodes) allow(
	tc *tenantCluster, node *v1alpha1.XPUNode, name string, req mcreconcile.Request,
) error {
	if err := tc.tooLarge(node, r.Limits.ObjectBytes); err != nil {
		return err
	}
	most := maxNodes(tc.XPUTenant, r.Limits)
	if r.quota.reserve(tc.Name, name, v1alpha1.PortSum{Ports: 1}, allowance{count: most},
		limitNodes, req) != limitNone {
		tc.waitsFor = limitNodes
		return problemf(v1alpha1.ReasonQuotaExceeded, "the tenant has %d XPUNodes", most)
	}
	return nil
}

// copyToInfra creates or updates the copy of the node.
func (r *nodes) copyToInfra(
	ctx context.Context, tc *tenantCluster, node, copied *v1alpha1.XPUNode,
) error {
	want := &v1alpha1.XPUNode{
		ObjectMeta: copyMeta(tc.Name, node, "", scoped(tc.Name, node.Name)),
		Status:     v1alpha1.XPUNodeStatus{Functions: node.Status.Functions, PFs: node.Status.PFs},
	}
	if equality.Semantic.DeepEqual(want.Status, copied.Status) && isCopyOf(copied, node) {
		return nil
	}
	return apply(ctx, r.infra, want)
}
