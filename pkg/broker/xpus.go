// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcmanager "sigs.k8s.io/multicluster-runtime/pkg/manager"
	mcreconcile "sigs.k8s.io/multicluster-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// xpus copies XPUs to the clusters of the tenants whose nodes they serve, without endpoints and
// credentials.
type xpus struct{ syncer }

func (r *xpus) setup(mgr mcmanager.Manager) error {
	// The map function is called with the old and the new object of an update, so both owners get a
	// request.
	ofXPU := func(ctx context.Context, xpu *v1alpha1.XPU) []mcreconcile.Request {
		tenants, err := r.tenants(ctx)
		if err != nil {
			return nil // the cache is not running
		}
		if owner := v1alpha1.TenantOf(xpu, tenants); owner != nil {
			return []mcreconcile.Request{request(owner.Name, "", xpu.Name)}
		}
		return nil
	}
	return newController(mgr, "xpu", r.Concurrency).
		For(&v1alpha1.XPU{}).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPU{}, ofXPU)).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUTenant{}, r.requestsOf, whenTenantChanged())).
		WatchesRawSource(r.wakeups.Source()).
		WatchesRawSource(r.turns.Source()).
		Complete(r.reconciler("XPUs", r.reconcile))
}

// enqueueAll enqueues the XPUs that the tenant's spec selects. Copies that already exist in the
// tenant's cluster are enqueued by their own watch.
func (r *xpus) enqueueAll(ctx context.Context, tenant string) {
	var t v1alpha1.XPUTenant
	if err := r.infra.Get(ctx, client.ObjectKey{Name: tenant}, &t); err != nil {
		return // there is no XPUTenant, or the cache is not running
	}
	r.wakeups.Add(0, r.requestsOf(ctx, &t)...)
}

// requestsOf returns requests for the XPUs that the tenant's spec selects, in its own cluster and
// in those of all other tenants that select them.
func (r *xpus) requestsOf(
	ctx context.Context, tenant *v1alpha1.XPUTenant,
) (requests []mcreconcile.Request) {
	var all v1alpha1.XPUList
	if err := r.infra.List(ctx, &all, client.UnsafeDisableDeepCopy); err != nil {
		return nil // the cache is not running
	}

	tenants, err := r.tenants(ctx)
	if err != nil {
		return nil
	}

	for i := range all.Items {
		xpu := &all.Items[i]
		if !selects(tenant, xpu) {
			continue
		}

		requests = append(requests, request(tenant.Name, "", xpu.Name))
		for j := range tenants {
			if selects(&tenants[j], xpu) {
				requests = append(requests, request(tenants[j].Name, "", xpu.Name))
			}
		}
	}

	return requests
}

// selects reports whether the tenant's spec selects the XPU. An older tenant that also selects the
// XPU owns it.
func selects(tenant *v1alpha1.XPUTenant, xpu *v1alpha1.XPU) bool {
	has, err := tenant.Spec.XPUs.Has(xpu)
	return err == nil && has
}

// reconcile copies one XPU to a tenant's cluster, or deletes the copy there.
func (r *xpus) reconcile(
	ctx context.Context, tc *tenantCluster, req mcreconcile.Request,
) (ctrl.Result, error) {
	var xpu, current v1alpha1.XPU
	isCopied, err := getIfExists(ctx, tc.client, req.NamespacedName, &current)
	if err != nil {
		return ctrl.Result{}, err
	}

	exists, err := getIfExists(ctx, r.infra, req.NamespacedName, &xpu)
	if err != nil {
		return ctrl.Result{}, err
	}

	if exists && xpu.DeletionTimestamp.IsZero() && !tc.isLeaving() {
		node, err := r.nodeOf(ctx, tc, &xpu)
		if err != nil {
			return ctrl.Result{}, err
		}
		if node != "" {
			return ctrl.Result{}, r.copyToTenant(ctx, tc, &xpu, &current, node)
		}
	}

	if tc.isLeaving() && tc.Spec.DeletionPolicy == v1alpha1.DeletionRetain {
		return ctrl.Result{}, nil
	}
	if isCopied && current.Labels[v1alpha1.LabelTenant] == tc.Name { // XPUs made by others stay
		return ctrl.Result{}, remove(ctx, tc.client, &current)
	}

	return ctrl.Result{}, nil
}

// nodeOf returns the name in the tenant's cluster of the node that the XPU serves, or "" if the
// tenant owns no such XPU or node.
func (r *xpus) nodeOf(ctx context.Context, tc *tenantCluster, xpu *v1alpha1.XPU) (string, error) {
	if mine, err := r.isOwnedBy(ctx, tc, xpu); err != nil || !mine {
		return "", err
	}

	var node v1alpha1.XPUNode
	if _, err := getIfExists(ctx, r.infra, client.ObjectKey{Name: xpu.Node()}, &node); err != nil {
		return "", err
	}
	// The scoped name may be shortened, so the annotation is preferred.
	if of, ok := originOf(&node); ok && of.ClusterName.String() == tc.Name {
		return of.Name, nil
	}

	name, _ := unscoped(tc.Name, xpu.Node())
	return name, nil
}

// copyToTenant creates or updates the tenant's XPU, without what the tenant must not know.
func (r *xpus) copyToTenant(
	ctx context.Context, tc *tenantCluster, xpu, current *v1alpha1.XPU, node string,
) error {
	want := &v1alpha1.XPU{
		ObjectMeta: metav1.ObjectMeta{
			Name: xpu.Name, Labels: map[string]string{v1alpha1.LabelTenant: tc.Name},
		},
		Spec: v1alpha1.XPUSpec{
			NodeName: node, PFs: xpu.Spec.PFs, Dialect: xpu.Spec.Dialect,
			AbandonedFunctions: xpu.Spec.AbandonedFunctions,
		},
	}

	if !equality.Semantic.DeepEqual(want.Spec, current.Spec) ||
		current.Labels[v1alpha1.LabelTenant] != tc.Name {
		if err := apply(ctx, tc.client, want, "status"); err != nil {
			return err
		}
	}

	status := v1alpha1.XPUStatus{
		NodeName: node, Serial: xpu.Status.Serial, PFs: xpu.Status.PFs,
		AwaySeconds: xpu.Status.AwaySeconds,
	}
	for _, kind := range []string{
		v1alpha1.ConditionReady, v1alpha1.ConditionCard, v1alpha1.ConditionFunctions,
		v1alpha1.ConditionVerified,
	} {
		if condition := meta.FindStatusCondition(xpu.Status.Conditions, kind); condition != nil {
			copied := *condition
			copied.Message = unscopedText(tc.Name, withoutEndpoint(copied.Message, xpu))
			copied.ObservedGeneration = current.Generation
			status.Conditions = append(status.Conditions, copied)
		}
	}

	if equality.Semantic.DeepEqual(status, current.Status) {
		return nil
	}

	copied := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: xpu.Name}, Status: status}
	err := applyStatus(ctx, tc.client, copied)
	if err != nil && strings.Contains(err.Error(), ".status.awaySeconds: "+undeclared) {
		copied.Status.AwaySeconds = 0 // the tenant's CRDs are older
		err = applyStatus(ctx, tc.client, copied)
	}
	return err
}

// undeclared is what an API server says of a field that the schema of a kind does not have
// (sigs.k8s.io/structured-merge-diff/v6/typed).
const undeclared = "field not declared in schema"

// withoutEndpoint replaces the endpoint of an XPU in a text that a tenant reads.
func withoutEndpoint(text string, xpu *v1alpha1.XPU) string {
	if xpu.Spec.Endpoint == "" { // the empty text is between any two characters
		return text
	}
	return strings.ReplaceAll(text, xpu.Spec.Endpoint, "its endpoint")
}
