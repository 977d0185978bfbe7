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
	"github.com/opiproject/xpu-device-plugin/pkg/queue"
)

// base is what all reconcilers depend on. Each works on requests for objects of a tenant's cluster,
// by their names there.
type base struct {
	Options
	manager mcmanager.Manager
	members *Members
	infra   client.Client // reads come from the cache
	live    client.Reader // reads come from the infra cluster's API server
	wakeups queue.Wakeups[mcreconcile.Request]
	// by tenant: one that has much to do holds up no other
	turns   *queue.Turns[mcreconcile.Request]
	again   workqueue.TypedRateLimiter[mcreconcile.Request]
	reached *reached
}

// site is where a request is worked at.
type site struct {
	*v1alpha1.XPUTenant // must not be changed
	client              client.Client
	live                client.Reader
	member              cluster.Cluster

	waitsFor limit // what keeps the request's object from being carried over
}

// site returns the tenant of a request and its cluster. An error that is
// [multicluster.ErrClusterNotFound] means that there is none, or that it has not answered yet: all
// stays as it is, and once it is joined each of its objects is looked at.
func (b *base) site(ctx context.Context, req mcreconcile.Request) (*site, error) {
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

	return &site{XPUTenant: &tenant, client: member.GetClient(), live: member.GetAPIReader(),
		member: member}, nil
}

// look sees to a request where its tenant is.
type look func(context.Context, *site, mcreconcile.Request) (reconcile.Result, error)

// at is a reconciler that has look see to a request within RequestTimeout, when it is the tenant's
// turn. After a write conflict, which mostly means that a cache was old, it tries again soon, and
// later each time: an API server can say so forever.
func (b *base) at(kind string, look look) reconcile.TypedReconciler[mcreconcile.Request] {
	return reconcile.TypedFunc[mcreconcile.Request](func(
		ctx context.Context, req mcreconcile.Request,
	) (reconcile.Result, error) {
		if !b.turns.Take(req.ClusterName.String(), req) {
			return reconcile.Result{}, nil
		}
		defer b.turns.Done(req)

		s, err := b.site(ctx, req)
		if err != nil {
			b.again.Forget(req)
			return reconcile.Result{}, err
		}

		ctx, cancel := context.WithTimeout(ctx, b.RequestTimeout)
		defer cancel()

		result, err := look(ctx, s, req)
		if apierrors.IsConflict(err) || err == nil && result == behind {
			return reconcile.Result{RequeueAfter: b.again.When(req)}, nil
		}

		b.again.Forget(req)
		if err == nil {
			b.reached.set(s.Name, objectOfKind{kind, req}, s.waitsFor)
		}

		return result, brief(err)
	})
}

// behind is what look returns where the API server says other than the cache of it, which is
// behind.
var behind = reconcile.Result{RequeueAfter: firstRetry}

// tenants are all that there are. They must not be changed.
func (b *base) tenants(ctx context.Context) ([]v1alpha1.XPUTenant, error) {
	var all v1alpha1.XPUTenantList
	if err := b.infra.List(ctx, &all, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list XPUTenants: %w", err)
	}
	return all.Items, nil
}

// leaving says whether what the tenant has in the infra cluster is to go.
func (s *site) leaving() bool { return !s.DeletionTimestamp.IsZero() }

// request is for an object of a tenant's cluster.
func request(tenant, namespace, name string) mcreconcile.Request {
	req := mcreconcile.Request{ClusterName: multicluster.ClusterName(tenant)}
	req.NamespacedName = types.NamespacedName{Namespace: namespace, Name: name}
	return req
}

// original is the request for the object of a tenant's cluster that this object of the infra
// cluster stands for.
func original(copied client.Object) (_ mcreconcile.Request, ok bool) {
	tenant, origin := copied.GetLabels()[v1alpha1.LabelTenant], copied.GetAnnotations()[v1alpha1.AnnotationOrigin]
	if tenant == "" || origin == "" {
		return mcreconcile.Request{}, false
	}

	namespace, name, found := strings.Cut(origin, "/")
	if !found {
		namespace, name = "", origin
	}
	return request(tenant, namespace, name), true
}

// originals are the requests for an object of the infra cluster, as a map function of a source.
func originals[O client.Object](_ context.Context, copied O) []mcreconcile.Request {
	if req, ok := original(copied); ok {
		return []mcreconcile.Request{req}
	}
	return nil
}

// copyMeta is the metadata of what stands for an object of a tenant's cluster.
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

// isCopyOf says whether the one stands for the other, and not for an earlier one of its name.
func isCopyOf(copied, of client.Object) bool {
	return copied.GetAnnotations()[v1alpha1.AnnotationOriginUID] == string(of.GetUID())
}

// found says whether there is the object that it reads.
func found(
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

// wakeAll has all objects of the list looked at, which are of the infra cluster.
func (b *base) wakeAll(ctx context.Context, tenant string, list client.ObjectList) {
	if err := b.infra.List(ctx, list, client.MatchingFields{byTenant: tenant},
		client.UnsafeDisableDeepCopy); err != nil {
		return // the cache is not running
	}
	_ = meta.EachListItem(list, func(o runtime.Object) error {
		if req, ok := original(o.(client.Object)); ok {
			b.wakeups.Add(0, req)
		}
		return nil
	})
}

// there are the requests for all objects of the list, which are of the tenant's cluster.
func (b *base) there(
	ctx context.Context, tenant string, list client.ObjectList, options ...client.ListOption,
) (requests []mcreconcile.Request) {
	s, err := b.site(ctx, request(tenant, "", ""))
	if err != nil {
		return nil // each is looked at once it is joined
	}
	if err := s.client.List(ctx,
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

// taken is a *problem if the infra cluster's API server refuses what was made of a tenant's object,
// because a field of it is not as it must be.
func taken(err error) error {
	if apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) ||
		apierrors.IsRequestEntityTooLargeError(err) {
		return problemf(v1alpha1.ReasonInvalidConfig,
			"the infra cluster does not take it; make another one: %s", brief(err))
	}
	return err
}

// remove deletes an object, unless it is another one by now.
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

// changeFinalizer writes what [controllerutil.AddFinalizer] or [controllerutil.RemoveFinalizer]
// changes.
func changeFinalizer(
	ctx context.Context, c client.Client, o client.Object, change func(client.Object, string) bool,
	finalizer string,
) error {
	before := o.DeepCopyObject().(client.Object)
	changed := o.DeepCopyObject().(client.Object)
	if !change(changed, finalizer) {
		return nil
	}

	err := c.Patch(ctx, changed,
		client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("finalizer of %T %s: %w", o, client.ObjectKeyFromObject(o), err)
	}

	return nil
}

// notReady is a condition Ready that is False.
func notReady(o client.Object, reason, message string) metav1.Condition {
	return metav1.Condition{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse,
		ObservedGeneration: o.GetGeneration(),
		Reason:             reason, Message: message,
	}
}

// readyOf is the condition Ready of the infra cluster as the tenant is told of it, nil if there is
// none.
func readyOf(tenant string, conditions []metav1.Condition, of client.Object) *metav1.Condition {
	condition := meta.FindStatusCondition(conditions, v1alpha1.ConditionReady)
	if condition == nil {
		return nil
	}
	told := *condition
	told.Message, told.ObservedGeneration = localText(tenant, told.Message), of.GetGeneration()
	return &told
}

// dated gives a condition the time of the one that is there, if that says the same, and otherwise
// that of now.
func dated(condition metav1.Condition, there []metav1.Condition) metav1.Condition {
	condition.LastTransitionTime = metav1.Now()
	if was := meta.FindStatusCondition(there, condition.Type); was != nil &&
		was.Status == condition.Status {
		condition.LastTransitionTime = was.LastTransitionTime
	}
	return condition
}

// has says whether a condition is there, with the same words.
func has(conditions []metav1.Condition, condition metav1.Condition) bool {
	there := meta.FindStatusCondition(conditions, condition.Type)
	return there != nil && equality.Semantic.DeepEqual(*there, condition)
}
