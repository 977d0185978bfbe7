// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/queue"
)

// xpuTenants reports in the status of each XPUTenant how its cluster is, and deletes the copies of
// a tenant that leaves.
type xpuTenants struct {
	syncer
	changes queue.Wakeups[reconcile.Request]
}

// whenTenantChanged passes updates that change what a tenant may have.
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

	// A younger tenant may have waited for the ranges of this one.
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
		WatchesRawSource(r.changes.Source()).
		Complete(r)
}

// enqueue has the status of the tenant updated.
func (r *xpuTenants) enqueue(tenant string) {
	r.changes.Add(0, reconcile.Request{NamespacedName: client.ObjectKey{Name: tenant}})
}

func (r *xpuTenants) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var tenant v1alpha1.XPUTenant
	exists, err := getIfExists(ctx, r.infra, req.NamespacedName, &tenant)
	if err != nil {
		return ctrl.Result{}, err
	}
	if !exists {
		r.limits.forget(req.Name)
		return ctrl.Result{}, nil
	}

	if tenant.DeletionTimestamp.IsZero() {
		if err := reconciling.ChangeFinalizer(ctx, r.infra, &tenant, controllerutil.AddFinalizer,
			v1alpha1.FinalizerTenant); err != nil {
			return retryConflict(err)
		}
		return retryConflict(r.updateStatus(ctx, &tenant, ""))
	}

	remaining, err := r.deleteObjects(ctx, &tenant)
	if err != nil {
		return retryConflict(err)
	}

	if remaining != "" {
		// There are no events for objects in the tenant's cluster, so poll.
		return ctrl.Result{RequeueAfter: time.Second},
			client.IgnoreNotFound(ignoreConflict(r.updateStatus(ctx, &tenant, remaining)))
	}

	return retryConflict(reconciling.ChangeFinalizer(ctx, r.infra, &tenant,
		controllerutil.RemoveFinalizer, v1alpha1.FinalizerTenant))
}

// retryConflict retries soon after a write conflict, which only means that the cache was stale.
func retryConflict(err error) (ctrl.Result, error) {
	if apierrors.IsConflict(err) {
		return ctrl.Result{RequeueAfter: reconciling.FirstRetry}, nil
	}
	return ctrl.Result{}, client.IgnoreNotFound(err)
}

func ignoreConflict(err error) error {
	if apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// updateStatus writes the conditions of a tenant. remaining describes what a leaving tenant still
// has, "" otherwise.
func (r *xpuTenants) updateStatus(
	ctx context.Context, tenant *v1alpha1.XPUTenant, remaining string,
) error {
	state := r.members.state(tenant.Name)
	if state.reason == "" {
		return nil // not known yet: onChange enqueues the tenant again
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
	switch limits := r.limits.message(tenant, r.Limits); {
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
	case remaining != "":
		set(v1alpha1.ConditionSynced, v1alpha1.ReasonLeaving, remaining, false)
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

// deleteObjects deletes the copies of a tenant that leaves. It describes what remains, or returns
// "" if nothing does.
func (r *xpuTenants) deleteObjects(
	ctx context.Context, tenant *v1alpha1.XPUTenant,
) (string, error) {
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
		// The API server is asked, because the cache may not have a copy made a moment ago.
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

	return r.remainingInTenant(ctx, tenant)
}

// remainingInTenant describes the objects in the tenant's cluster that the broker must still
// release, or returns "". It does not wait for an unreachable cluster. It waits until a broker that
// was just started knows whether the cluster answers.
func (r *xpuTenants) remainingInTenant(
	ctx context.Context, tenant *v1alpha1.XPUTenant,
) (string, error) {
	switch r.members.state(tenant.Name).reason {
	case "":
		return "it is not known yet whether its cluster answers", nil
	case v1alpha1.ReasonConnected:
	default:
		return "", nil
	}

	tc, err := r.tenantCluster(ctx, request(tenant.Name, "", ""))
	if errors.Is(err, multicluster.ErrClusterNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}

	return remainingIn(ctx, tc.client, tenant.Name)
}

// remainingIn is remainingInTenant for the tenant's cluster. It names the first object of the first
// kind, so that the text, which is written to the status, stays the same while nothing changes.
func remainingIn(ctx context.Context, cluster client.Reader, tenant string) (string, error) {
	for _, kind := range []struct {
		name  string
		list  client.ObjectList
		waits func(client.Object) bool
	}{
		{"XPUPorts", &v1alpha1.XPUPortList{}, func(o client.Object) bool {
			return controllerutil.ContainsFinalizer(o, v1alpha1.FinalizerPort)
		}},
		{"XPUNetworks", &v1alpha1.XPUNetworkList{}, func(o client.Object) bool {
			return controllerutil.ContainsFinalizer(o, v1alpha1.FinalizerNetwork)
		}},
		{"XPUs", &v1alpha1.XPUList{}, func(o client.Object) bool {
			return o.GetLabels()[v1alpha1.LabelTenant] == tenant
		}},
	} {
		if err := cluster.List(ctx, kind.list, client.UnsafeDisableDeepCopy); err != nil {
			return "", fmt.Errorf("list %s of the tenant's cluster: %w", kind.name, err)
		}
		items, err := objects(kind.list)
		if err != nil {
			return "", err
		}

		var names []string
		for _, o := range items {
			if kind.waits(o) {
				names = append(names, o.GetName())
			}
		}
		if len(names) > 0 {
			return fmt.Sprintf("%s of its cluster are being let go, such as %s", kind.name,
				slices.Min(names)), nil
		}
	}

	return "", nil
}

// objects returns the items of a list.
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
