// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/multicluster-runtime/pkg/multicluster"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/queue"
)

// xpuTenants says in the status of XPUTenants how their clusters are, and has what they have here
// go when they leave.
type xpuTenants struct {
	base
	news queue.Wakeups[reconcile.Request]
}

// whenTenantChanged is when what a tenant may have is different.
func whenTenantChanged() predicate.TypedPredicate[*v1alpha1.XPUTenant] {
	return predicate.TypedFuncs[*v1alpha1.XPUTenant]{UpdateFunc: func(
		e event.TypedUpdateEvent[*v1alpha1.XPUTenant],
	) bool {
		before, after := e.ObjectOld, e.ObjectNew
		return before.Generation != after.Generation ||
			before.DeletionTimestamp.IsZero() != after.DeletionTimestamp.IsZero()
	}}
}

func (r *xpuTenants) setup(mgr manager.Manager) error {
	ofLeaving := func(ctx context.Context, copied client.Object) []reconcile.Request {
		key := client.ObjectKey{Name: copied.GetLabels()[v1alpha1.LabelTenant]}
		var tenant v1alpha1.XPUTenant
		if err := r.infra.Get(ctx, key, &tenant); err != nil || tenant.DeletionTimestamp.IsZero() {
			return nil
		}
		return []reconcile.Request{{NamespacedName: key}}
	}

	// a younger one may have waited for its ranges
	others := func(ctx context.Context, _ client.Object) (requests []reconcile.Request) {
		all, err := r.tenants(ctx)
		if err != nil {
			return nil // the cache is not running
		}

		for i := range all {
			requests = append(requests,
				reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&all[i])})
		}

		return requests
	}

	return ctrl.NewControllerManagedBy(mgr).Named("xputenant").
		For(&v1alpha1.XPUTenant{}).
		Watches(&v1alpha1.XPUTenant{}, handler.EnqueueRequestsFromMapFunc(others), whenSpecChanged).
		Watches(&v1alpha1.XPUPort{}, handler.EnqueueRequestsFromMapFunc(ofLeaving)).
		Watches(&v1alpha1.XPUNetwork{}, handler.EnqueueRequestsFromMapFunc(ofLeaving)).
		WatchesRawSource(r.news.Source()).
		Complete(r)
}

// wake has the status of a tenant written.
func (r *xpuTenants) wake(tenant string) {
	r.news.Add(0, reconcile.Request{NamespacedName: client.ObjectKey{Name: tenant}})
}

func (r *xpuTenants) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var tenant v1alpha1.XPUTenant
	exists, err := found(ctx, r.infra, req.NamespacedName, &tenant)
	if err != nil {
		return ctrl.Result{}, err
	}
	if !exists {
		r.reached.forget(req.Name)
		return ctrl.Result{}, nil
	}

	if tenant.DeletionTimestamp.IsZero() {
		if err := changeFinalizer(ctx, r.infra, &tenant, controllerutil.AddFinalizer,
			v1alpha1.FinalizerTenant); err != nil {
			return later(err)
		}
		return later(r.tell(ctx, &tenant, ""))
	}

	left, err := r.left(ctx, &tenant)
	if err != nil {
		return later(err)
	}

	if left != "" {
		// What is left in the tenant's cluster comes with no event.
		return ctrl.Result{RequeueAfter: time.Second},
			client.IgnoreNotFound(ignoreConflict(r.tell(ctx, &tenant, left)))
	}

	return later(changeFinalizer(ctx, r.infra, &tenant, controllerutil.RemoveFinalizer,
		v1alpha1.FinalizerTenant))
}

// later tries again soon after a write conflict, which only means that the cache was old.
func later(err error) (ctrl.Result, error) {
	if apierrors.IsConflict(err) {
		return ctrl.Result{RequeueAfter: firstRetry}, nil
	}
	return ctrl.Result{}, client.IgnoreNotFound(err)
}

func ignoreConflict(err error) error {
	if apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// tell writes the conditions of a tenant, of which something is left to delete if it says so.
func (r *xpuTenants) tell(ctx context.Context, tenant *v1alpha1.XPUTenant, left string) error {
	state := r.members.state(tenant.Name)
	if state.reason == "" {
		return nil // not known yet: another event comes
	}

	changed := tenant.DeepCopy()
	set := func(kind, reason, message string, good bool) {
		status := metav1.ConditionFalse
		if good {
			status = metav1.ConditionTrue
		}
		meta.SetStatusCondition(&changed.Status.Conditions, metav1.Condition{
			Type: kind, Status: status, ObservedGeneration: tenant.Generation, Reason: reason,
			Message: message,
		})
	}

	connected := state.reason == v1alpha1.ReasonConnected
	switch limits := r.reached.message(tenant, r.Limits); {
	case state.reason == v1alpha1.ReasonLimitExceeded:
		set(v1alpha1.ConditionWithinLimits, state.reason, state.message, false)
	case limits != "":
		set(v1alpha1.ConditionWithinLimits, v1alpha1.ReasonQuotaExceeded, limits, false)
	default:
		set(v1alpha1.ConditionWithinLimits, v1alpha1.ReasonWithinLimits,
			"nothing of it waits because of a limit", true)
	}

	set(v1alpha1.ConditionConnected, state.reason, state.message, connected)
	err := r.checkRanges(ctx, tenant)
	p, isProblem := errors.AsType[*problem](err)
	switch {
	case left != "":
		set(v1alpha1.ConditionSynced, v1alpha1.ReasonLeaving, left, false)
	case isProblem:
		set(v1alpha1.ConditionSynced, p.reason, p.message, false)
	case err != nil:
		return err
	case connected && state.joined:
		set(v1alpha1.ConditionSynced, v1alpha1.ReasonSynced, "what its cluster has is carried over",
			true)
	default:
		set(v1alpha1.ConditionSynced, v1alpha1.ReasonFrozen,
			"what it has here stays as it is until its cluster answers", false)
	}

	if equality.Semantic.DeepEqual(changed.Status, tenant.Status) {
		return nil
	}
	if err := r.infra.Status().Patch(ctx, changed,
		client.MergeFromWithOptions(tenant, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("status of XPUTenant %s: %w", tenant.Name, err)
	}

	return nil
}

// left deletes what a tenant that leaves has, and says what is left of it; "" if nothing is.
func (r *xpuTenants) left(ctx context.Context, tenant *v1alpha1.XPUTenant) (string, error) {
	if tenant.Spec.DeletionPolicy == v1alpha1.DeletionRetain {
		return "", nil
	}

	for _, kind := range []struct {
		list      client.ObjectList
		name      string
		namespace string
	}{
		{&v1alpha1.XPUPortList{}, "XPUPorts", r.Namespace},
		{&v1alpha1.XPUNetworkList{}, "XPUNetworks", ""}, {&v1alpha1.XPUNodeList{}, "XPUNodes", ""},
	} {
		// From the API server: the cache may not have what was made a moment ago.
		err := r.live.List(ctx, kind.list, client.InNamespace(kind.namespace),
			client.MatchingLabels{v1alpha1.LabelTenant: tenant.Name})
		if err != nil {
			return "", fmt.Errorf("list %s of the tenant: %w", kind.name, err)
		}

		items, err := objects(kind.list)
		if err != nil {
			return "", err
		}

		for _, o := range items {
			if err := remove(ctx, r.infra, o); err != nil {
				return "", err
			}
		}

		if len(items) > 0 {
			return fmt.Sprintf("%d %s of it are being deleted, such as %s", len(items), kind.name,
				items[0].GetName()), nil
		}
	}

	return r.leftThere(ctx, tenant)
}

// leftThere says what the tenant's cluster still has that waits for this one. A cluster that does
// not answer is not waited for.
func (r *xpuTenants) leftThere(ctx context.Context, tenant *v1alpha1.XPUTenant) (string, error) {
	s, err := r.site(ctx, request(tenant.Name, "", ""))
	if errors.Is(err, multicluster.ErrClusterNotFound) ||
		r.members.state(tenant.Name).reason != v1alpha1.ReasonConnected {
		return "", nil
	}
	if err != nil {
		return "", err
	}

	waiting := map[string]func(client.Object) bool{
		"XPUPorts": func(o client.Object) bool {
			return controllerutil.ContainsFinalizer(o, v1alpha1.FinalizerPort)
		},
		"XPUNetworks": func(o client.Object) bool {
			return controllerutil.ContainsFinalizer(o, v1alpha1.FinalizerNetwork)
		},
		"XPUs": func(o client.Object) bool {
			return o.GetLabels()[v1alpha1.LabelTenant] == tenant.Name
		},
	}

	for name, list := range map[string]client.ObjectList{
		"XPUPorts": &v1alpha1.XPUPortList{}, "XPUNetworks": &v1alpha1.XPUNetworkList{},
		"XPUs": &v1alpha1.XPUList{},
	} {
		if err := s.client.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return "", fmt.Errorf("list %s of the tenant's cluster: %w", name, err)
		}

		items, err := objects(list)
		if err != nil {
			return "", err
		}

		for _, o := range items {
			if waiting[name](o) {
				return fmt.Sprintf("%s of its cluster are being let go, such as %s",
					name, o.GetName()), nil
			}
		}
	}

	return "", nil
}

// objects are those of a list.
func objects(list client.ObjectList) ([]client.Object, error) {
	items, err := meta.ExtractList(list)
	if err != nil {
		return nil, err
	}

	all := make([]client.Object, 0, len(items))
	for _, item := range items {
		all = append(all, item.(client.Object))
	}
	return all, nil
}
