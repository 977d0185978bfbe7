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

// xpus tells the tenant which XPUs serve its nodes, and how they are: without endpoints and credentials.
type xpus struct{ base }

func (r *xpus) setup(mgr mcmanager.Manager) error {
	ofXPU := func(ctx context.Context, xpu *v1alpha1.XPU) (requests []mcreconcile.Request) {
		for _, tenant := range r.members.ClusterNames() { // it may have been another's
			requests = append(requests, request(tenant.String(), "", xpu.Name))
		}
		return requests
	}
	ofTenant := func(ctx context.Context, _ *v1alpha1.XPUTenant) (requests []mcreconcile.Request) {
		for _, tenant := range r.members.ClusterNames() { // what it names may have been another's
			requests = append(requests, r.all(ctx, tenant.String())...)
		}
		return requests
	}
	return newController(mgr, "xpu", r.Concurrency).
		For(&v1alpha1.XPU{}).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPU{}, ofXPU)).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUTenant{}, ofTenant, whenTenantChanged())).
		WatchesRawSource(r.wakeups.Source()).
		Complete(r.at(r.look))
}

func (r *xpus) wake(ctx context.Context, tenant string) { r.wakeups.Add(0, r.all(ctx, tenant)...) }

// all are the requests for all XPUs of the infra cluster.
func (r *xpus) all(ctx context.Context, tenant string) (requests []mcreconcile.Request) {
	var all v1alpha1.XPUList
	if err := r.infra.List(ctx, &all, client.UnsafeDisableDeepCopy); err != nil {
		return nil // the cache is not running
	}
	for i := range all.Items {
		requests = append(requests, request(tenant, "", all.Items[i].Name))
	}
	return requests
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
		mine, err := r.isOf(ctx, s, &xpu)
		if err != nil {
			return ctrl.Result{}, err
		}
		if node, ok := local(s.Name, xpu.Node()); ok && mine {
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

// tell has the tenant's XPU be as the infra cluster's, without what the tenant must not know.
func (r *xpus) tell(ctx context.Context, s *site, xpu, told *v1alpha1.XPU, node string) error {
	want := &v1alpha1.XPU{
		ObjectMeta: metav1.ObjectMeta{Name: xpu.Name, Labels: map[string]string{v1alpha1.LabelTenant: s.Name}},
		Spec:       v1alpha1.XPUSpec{NodeName: node, PFs: xpu.Spec.PFs, Dialect: xpu.Spec.Dialect},
	}
	if !equality.Semantic.DeepEqual(want.Spec, told.Spec) || told.Labels[v1alpha1.LabelTenant] != s.Name {
		if err := apply(ctx, s.client, want); err != nil {
			return err
		}
	}
	status := v1alpha1.XPUStatus{NodeName: node, Serial: xpu.Status.Serial, PFs: xpu.Status.PFs}
	for _, kind := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionCard} {
		if condition := meta.FindStatusCondition(xpu.Status.Conditions, kind); condition != nil {
			copied := *condition
			copied.Message = localText(s.Name, strings.ReplaceAll(copied.Message, xpu.Spec.Endpoint, "its endpoint"))
			copied.ObservedGeneration = told.Generation
			status.Conditions = append(status.Conditions, copied)
		}
	}
	if equality.Semantic.DeepEqual(status, told.Status) {
		return nil
	}
	return applyStatus(ctx, s.client, &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: xpu.Name}, Status: status})
}
