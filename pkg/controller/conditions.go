package controller

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Pauses between attempts that fail. They double, from the first to the last.
const (
	firstRetry = 50 * time.Millisecond
	lastRetry  = 30 * time.Second
)

// retryLimiter spaces attempts for one object. Unlike the default of controller-runtime it has no limit over all
// objects, which would have the objects of a healthy xPU wait for those of an unhealthy one.
func retryLimiter[T comparable]() workqueue.TypedRateLimiter[T] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[T](firstRetry, lastRetry)
}

// withConflicts has a reconciler try again after a write that came too late, which is nothing to log as an error: the
// cache just did not have the last change yet.
func withConflicts(r reconcile.Reconciler) reconcile.Reconciler {
	return reconcile.Func(func(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
		result, err := r.Reconcile(ctx, request)
		if apierrors.IsConflict(err) {
			return reconcile.Result{RequeueAfter: firstRetry}, nil
		}
		return result, err
	})
}

// setReady sets the Ready condition, and tells whether that changed anything.
func setReady(conditions *[]metav1.Condition, generation int64, status metav1.ConditionStatus, reason, message string) bool {
	return meta.SetStatusCondition(conditions, metav1.Condition{
		Type: v1alpha1.ConditionReady, Status: status, Reason: reason, Message: message, ObservedGeneration: generation,
	})
}

// patchStatus writes how the status differs from before. An object that has changed meanwhile is not written.
func patchStatus(ctx context.Context, c client.Client, object, before client.Object) error {
	err := c.Status().Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("status of %T %s: %w", object, client.ObjectKeyFromObject(object), err)
	}
	return nil
}

// patch writes how the object differs from before. An object that has changed meanwhile is not written.
func patch(ctx context.Context, c client.Client, object, before client.Object) error {
	err := c.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("%T %s: %w", object, client.ObjectKeyFromObject(object), err)
	}
	return nil
}

// requestsFor has a request for each object that is listed. It is for event handlers, which cannot return an error:
// it is logged, and can only be that the cache is not running.
func requestsFor(ctx context.Context, r client.Reader, objects client.ObjectList, options ...client.ListOption) []reconcile.Request {
	if err := r.List(ctx, objects, append(options, client.UnsafeDisableDeepCopy)...); err != nil {
		log.FromContext(ctx).Error(err, "listing objects to reconcile")
		return nil
	}
	var requests []reconcile.Request
	_ = meta.EachListItem(objects, func(o runtime.Object) error {
		requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(o.(client.Object))})
		return nil
	})
	return requests
}
