// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/cluster"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	mcmanager "sigs.k8s.io/multicluster-runtime/pkg/manager"
	"sigs.k8s.io/multicluster-runtime/pkg/multicluster"
	mcreconcile "sigs.k8s.io/multicluster-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/queue"
)

// syncer has what all reconcilers of tenants' objects depend on. Their requests name objects of a
// tenant's cluster.
type syncer struct {
	Options
	manager mcmanager.Manager
	members *Members
	infra   client.Client // reads come from the cache
	live    client.Reader // reads come from the infra cluster's API server
	wakeups queue.Wakeups[mcreconcile.Request]
	// limits parallel work per tenant, so that a busy tenant does not delay others
	turns   *queue.Turns[mcreconcile.Request]
	retries workqueue.TypedRateLimiter[mcreconcile.Request]
	limits  *limitTracker
}

// tenantCluster is the tenant of a request, with clients of its cluster.
type tenantCluster struct {
	*v1alpha1.XPUTenant // must not be changed
	client              client.Client
	live                client.Reader
	member              cluster.Cluster

	waitsFor limit // why the request's object is not copied; set by a reconciler
}

// tenantCluster returns the tenant of a request and its cluster. The error is
// [multicluster.ErrClusterNotFound] if there is no such tenant or its cluster has not joined yet.
// Nothing changes then, and all of its objects are enqueued when it joins.
func (b *syncer) tenantCluster(
	ctx context.Context, req mcreconcile.Request,
) (*tenantCluster, error) {
	member, err := b.manager.GetCluster(ctx, req.ClusterName)
	if err != nil {
		return nil, err
	}

	var tenant v1alpha1.XPUTenant
	err = b.infra.Get(ctx, client.ObjectKey{Name: req.ClusterName.String()}, &tenant)
	if apierrors.IsNotFound(err) {
		return nil, multicluster.ErrClusterNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("XPUTenant %s: %w", req.ClusterName, err)
	}

	return &tenantCluster{XPUTenant: &tenant, client: member.GetClient(),
		live:   member.GetAPIReader(),
		member: member}, nil
}

// reconcileFunc reconciles one object of a tenant's cluster.
type reconcileFunc func(
	context.Context, *tenantCluster, mcreconcile.Request,
) (reconcile.Result, error)

// reconciler returns a reconciler that calls do, at most RequestTimeout long, when it is the
// tenant's turn. It retries a write conflict soon, because that mostly means a stale cache, but
// with growing pauses, because an API server can answer Conflict forever.
func (b *syncer) reconciler(
	kind string, do reconcileFunc,
) reconcile.TypedReconciler[mcreconcile.Request] {
	return reconcile.TypedFunc[mcreconcile.Request](func(
		ctx context.Context, req mcreconcile.Request,
	) (reconcile.Result, error) {
		if !b.turns.Take(req.ClusterName.String(), req) {
			return reconcile.Result{}, nil
		}
		defer b.turns.Done(req)

		tc, err := b.tenantCluster(ctx, req)
		if err != nil {
			b.retries.Forget(req)
			return reconcile.Result{}, err
		}

		ctx, cancel := context.WithTimeout(ctx, b.RequestTimeout)
		defer cancel()

		result, err := do(ctx, tc, req)
		if apierrors.IsConflict(err) || err == nil && result == cacheStale {
			return reconcile.Result{RequeueAfter: b.retries.When(req)}, nil
		}

		b.retries.Forget(req)
		if err == nil {
			b.limits.set(tc.Name, objectOfKind{kind, req}, tc.waitsFor)
		}

		return result, brief(err)
	})
}

// cacheStale is the result of a reconcileFunc if the API server and its cache disagree.
var cacheStale = reconcile.Result{RequeueAfter: reconciling.FirstRetry}

// tenants returns all XPUTenants. They must not be changed.
func (b *syncer) tenants(ctx context.Context) ([]v1alpha1.XPUTenant, error) {
	var all v1alpha1.XPUTenantList
	if err := b.infra.List(ctx, &all, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list XPUTenants: %w", err)
	}
	return all.Items, nil
}

// isLeaving reports whether the tenant is being deleted.
func (tc *tenantCluster) isLeaving() bool { return !tc.DeletionTimestamp.IsZero() }

// request returns the request for an object of a tenant's cluster.
func request(tenant, namespace, name string) mcreconcile.Request {
	req := mcreconcile.Request{ClusterName: multicluster.ClusterName(tenant)}
	req.NamespacedName = types.NamespacedName{Namespace: namespace, Name: name}
	return req
}

// originOf returns the request for the tenant's object that copied is a copy of.
func originOf(copied client.Object) (_ mcreconcile.Request, ok bool) {
	tenant := copied.GetLabels()[v1alpha1.LabelTenant]
	origin := copied.GetAnnotations()[v1alpha1.AnnotationOrigin]
	if tenant == "" || origin == "" {
		return mcreconcile.Request{}, false
	}

	namespace, name, found := strings.Cut(origin, "/")
	if !found {
		namespace, name = "", origin
	}
	return request(tenant, namespace, name), true
}

// originRequests is originOf as a map function of a source.
func originRequests[O client.Object](_ context.Context, copied O) []mcreconcile.Request {
	if req, ok := originOf(copied); ok {
		return []mcreconcile.Request{req}
	}
	return nil
}

// copyMeta returns the metadata of the copy of a tenant's object.
func copyMeta(tenant string, of client.Object, namespace, name string) metav1.ObjectMeta {
	origin := of.GetName()
	if of.GetNamespace() != "" {
		origin = of.GetNamespace() + "/" + origin
	}

	return metav1.ObjectMeta{
		Namespace: namespace, Name: name,
		Labels: map[string]string{v1alpha1.LabelTenant: tenant},
		Annotations: map[string]string{
			v1alpha1.AnnotationOrigin: origin, v1alpha1.AnnotationOriginUID: string(of.GetUID()),
		},
	}
}

// isCopyOf reports whether copied is the copy of this object, and not of an earlier one with its
// name.
func isCopyOf(copied, of client.Object) bool {
	return copied.GetAnnotations()[v1alpha1.AnnotationOriginUID] == string(of.GetUID())
}

// getIfExists reads an object and reports whether it exists.
func getIfExists(
	ctx context.Context, r client.Reader, key types.NamespacedName, object client.Object,
) (bool, error) {
	err := r.Get(ctx, key, object)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("%T %s: %w", object, key, err)
	}
	return true, nil
}

// enqueueOrigins enqueues the tenant's object of each copy of the list's kind in the infra cluster.
func (b *syncer) enqueueOrigins(ctx context.Context, tenant string, list client.ObjectList) {
	if err := b.infra.List(ctx, list, client.MatchingFields{byTenant: tenant},
		client.UnsafeDisableDeepCopy); err != nil {
		return // the cache is not running
	}
	_ = meta.EachListItem(list, func(o runtime.Object) error {
		if req, ok := originOf(o.(client.Object)); ok {
			b.wakeups.Add(0, req)
		}
		return nil
	})
}

// requestsIn returns requests for all objects of the list's kind in the tenant's cluster.
func (b *syncer) requestsIn(
	ctx context.Context, tenant string, list client.ObjectList, options ...client.ListOption,
) (requests []mcreconcile.Request) {
	tc, err := b.tenantCluster(ctx, request(tenant, "", ""))
	if err != nil {
		return nil // the objects are enqueued when the cluster joins
	}
	if err := tc.client.List(ctx,
		list, append(options, client.UnsafeDisableDeepCopy)...); err != nil {
		return nil // the cache is not running
	}

	_ = meta.EachListItem(list, func(item runtime.Object) error {
		o := item.(client.Object)
		requests = append(requests, request(tenant, o.GetNamespace(), o.GetName()))
		return nil
	})

	return requests
}

// asProblem turns the error of an infra cluster's API server that rejects a copy as invalid into a
// *problem. It returns other errors unchanged.
func asProblem(err error) error {
	if apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) ||
		apierrors.IsRequestEntityTooLargeError(err) {
		return problemf(v1alpha1.ReasonInvalidConfig,
			"the infra cluster does not take it; make another one: %s", brief(err))
	}
	return err
}

// remove deletes an object, unless another one with its name has replaced it.
func remove(ctx context.Context, c client.Client, o client.Object) error {
	if !o.GetDeletionTimestamp().IsZero() {
		return nil
	}

	uid := o.GetUID()
	err := c.Delete(ctx, o.DeepCopyObject().(client.Object), client.Preconditions{UID: &uid})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete %T %s: %w", o, client.ObjectKeyFromObject(o), err)
	}
	return nil
}

// changeFinalizer is [reconciling.ChangeFinalizer] for an object of the tenant's cluster. The
// object stays as it was read and checked, because the tenant's API server may answer with another
// one.
func (tc *tenantCluster) changeFinalizer(
	ctx context.Context, o client.Object, change func(client.Object, string) bool, finalizer string,
) error {
	return reconciling.ChangeFinalizer(ctx, tc.client, o.DeepCopyObject().(client.Object), change,
		finalizer)
}

// notReady returns a condition Ready with status False.
func notReady(o client.Object, reason, message string) metav1.Condition {
	return metav1.Condition{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse,
		ObservedGeneration: o.GetGeneration(),
		Reason:             reason, Message: message,
	}
}

// readyForTenant returns the condition Ready of a copy as it is shown to the tenant, or nil if the
// copy has none.
func readyForTenant(
	tenant string, conditions []metav1.Condition, of client.Object,
) *metav1.Condition {
	condition := meta.FindStatusCondition(conditions, v1alpha1.ConditionReady)
	if condition == nil {
		return nil
	}
	reported := *condition
	reported.Message = unscopedText(tenant, reported.Message)
	reported.ObservedGeneration = of.GetGeneration()
	return &reported
}

// withTransitionTime sets the transition time of a condition. It is the time of the current
// condition if the status is unchanged, and now otherwise.
func withTransitionTime(condition metav1.Condition, current []metav1.Condition) metav1.Condition {
	condition.LastTransitionTime = metav1.Now()
	if previous := meta.FindStatusCondition(current, condition.Type); previous != nil &&
		previous.Status == condition.Status {
		condition.LastTransitionTime = previous.LastTransitionTime
	}
	return condition
}

// hasCondition reports whether exactly this condition is present.
func hasCondition(conditions []metav1.Condition, condition metav1.Condition) bool {
	current := meta.FindStatusCondition(conditions, condition.Type)
	return current != nil && equality.Semantic.DeepEqual(*current, condition)
}
