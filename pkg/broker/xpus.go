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

// xpus tells the tenant which XPUs serve its nodes, and how they are: without endpoints and
// credentials.
type xpus struct{ base }

func (r *xpus) setup(mgr mcmanager.Manager) error {
	// an update is of what it was and what it is
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
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUTenant{}, r.ofTenant, whenTenantChanged())).
		WatchesRawSource(r.wakeups.Source()).
		WatchesRawSource(r.turns.Source()).
		Complete(r.at("XPUs", r.look))
}

// wake has the XPUs looked at that are to be told of. Those that are in the tenant's cluster come
// by themselves.
func (r *xpus) wake(ctx context.Context, tenant string) {
	var t v1alpha1.XPUTenant
	if err := r.infra.Get(ctx, client.ObjectKey{Name: tenant}, &t); err != nil {
		return // it has none, or the cache is not running
	}
	r.wakeups.Add(0, r.ofTenant(ctx, &t)...)
}

// ofTenant are the requests for the XPUs that a tenant says that it has, of it and of all others
// that say so.
func (r *xpus) ofTenant(
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
		if !claims(tenant, xpu) {
			continue
		}

		requests = append(requests, request(tenant.Name, "", xpu.Name))
		for j := range tenants {
			if claims(&tenants[j], xpu) {
				requests = append(requests, request(tenants[j].Name, "", xpu.Name))
			}
		}
	}

	return requests
}

// claims says whether a tenant has the XPU, unless an older one does.
func claims(tenant *v1alpha1.XPUTenant, xpu *v1alpha1.XPU) bool {
	has, err := tenant.Spec.XPUs.Has(xpu)
	return err == nil && has
}

// look is for an XPU of a tenant's cluster, by its name there.
func (r *xpus) look(ctx context.Context, s *site, req mcreconcile.Request) (ctrl.Result, error) {
	var xpu, told v1alpha1.XPU
	has, err := found(ctx, s.client, req.NamespacedName, &told)
	if err != nil {
		return ctrl.Result{}, err
	}

	exists, err := found(ctx, r.infra, req.NamespacedName, &xpu)
	if err != nil {
		return ctrl.Result{}, err
	}

	if exists && xpu.DeletionTimestamp.IsZero() && !s.leaving() {
		node, err := r.nodeOf(ctx, s, &xpu)
		if err != nil {
			return ctrl.Result{}, err
		}
		if node != "" {
			return ctrl.Result{}, r.tell(ctx, s, &xpu, &told, node)
		}
	}

	if s.leaving() && s.Spec.DeletionPolicy == v1alpha1.DeletionRetain {
		return ctrl.Result{}, nil
	}
	if has && told.Labels[v1alpha1.LabelTenant] == s.Name { // XPUs that somebody else made stay
		return ctrl.Result{}, remove(ctx, s.client, &told)
	}

	return ctrl.Result{}, nil
}

// nodeOf is the name in the tenant's cluster of the node that the XPU serves; "" if the XPU or the
// node is not the tenant's.
func (r *xpus) nodeOf(ctx context.Context, s *site, xpu *v1alpha1.XPU) (string, error) {
	if mine, err := r.isOf(ctx, s, xpu); err != nil || !mine {
		return "", err
	}

	var node v1alpha1.XPUNode
	if _, err := found(ctx, r.infra, client.ObjectKey{Name: xpu.Node()}, &node); err != nil {
		return "", err
	}
	// whose name here may have been shortened
	if of, ok := original(&node); ok && of.ClusterName.String() == s.Name {
		return of.Name, nil
	}

	name, _ := local(s.Name, xpu.Node())
	return name, nil
}

// tell has the tenant's XPU be as the infra cluster's, without what the tenant must not know.
func (r *xpus) tell(ctx context.Context, s *site, xpu, told *v1alpha1.XPU, node string) error {
	want := &v1alpha1.XPU{
		ObjectMeta: metav1.ObjectMeta{
			Name: xpu.Name, Labels: map[string]string{v1alpha1.LabelTenant: s.Name},
		},
		Spec: v1alpha1.XPUSpec{
			NodeName: node, PFs: xpu.Spec.PFs, Dialect: xpu.Spec.Dialect,
			AbandonedFunctions: xpu.Spec.AbandonedFunctions,
		},
	}

	if !equality.Semantic.DeepEqual(want.Spec, told.Spec) ||
		told.Labels[v1alpha1.LabelTenant] != s.Name {
		if err := apply(ctx, s.client, want, "status"); err != nil {
			return err
		}
	}

	status := v1alpha1.XPUStatus{NodeName: node, Serial: xpu.Status.Serial, PFs: xpu.Status.PFs}
	for _, kind := range []string{
		v1alpha1.ConditionReady, v1alpha1.ConditionCard, v1alpha1.ConditionFunctions,
	} {
		if condition := meta.FindStatusCondition(xpu.Status.Conditions, kind); condition != nil {
			copied := *condition
			copied.Message = localText(s.Name,
				strings.ReplaceAll(copied.Message, xpu.Spec.Endpoint, "its endpoint"))
			copied.ObservedGeneration = told.Generation
			status.Conditions = append(status.Conditions, copied)
		}
	}

	if equality.Semantic.DeepEqual(status, told.Status) {
		return nil
	}

	return applyStatus(ctx, s.client,
		&v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: xpu.Name}, Status: status})
}
