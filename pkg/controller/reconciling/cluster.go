// SPDX-License-Identifier: Apache-2.0

package reconciling

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Cluster is the Kubernetes cluster as reconcilers read and write it.
type Cluster struct {
	Client client.Client // reads come from the cache
	Live   client.Reader // reads come from the API server
	Events events.EventRecorder
	// CheckLeader returns an error if this process is no longer the leader, or if that is unknown.
	CheckLeader func(context.Context) error
}

// Guarded wraps a reconciler, so that it does nothing once another leader was elected, and tries
// again after a write conflict, which only means that the cache was out of date. The pauses grow
// from FirstRetry to LastRetry, because a cache can be out of date for long when the API server is
// busy.
func (c Cluster) Guarded(inner reconcile.Reconciler) reconcile.Reconciler {
	conflicts := RetryLimiter[reconcile.Request]()
	return reconcile.Func(func(
		ctx context.Context, request reconcile.Request,
	) (reconcile.Result, error) {
		if err := c.CheckLeader(ctx); err != nil {
			return reconcile.Result{}, err
		}
		result, err := inner.Reconcile(ctx, request)
		if apierrors.IsConflict(err) {
			return reconcile.Result{RequeueAfter: conflicts.When(request)}, nil
		}

		conflicts.Forget(request)
		return result, err
	})
}

// Requests returns a request for each listed object. The only possible error is that the cache is
// not running, which is logged.
func Requests(
	ctx context.Context, c client.Reader, objects client.ObjectList, options ...client.ListOption,
) []reconcile.Request {
	if err := c.List(ctx, objects,
		append(options, client.UnsafeDisableDeepCopy)...); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "listing objects to reconcile")
		return nil
	}

	var requests []reconcile.Request
	_ = meta.EachListItem(objects, func(o runtime.Object) error {
		requests = append(requests, RequestFor(o.(client.Object)))
		return nil
	})

	return requests
}

// RequestFor returns the request for an object.
func RequestFor(o client.Object) reconcile.Request {
	return reconcile.Request{NamespacedName: client.ObjectKeyFromObject(o)}
}

// Since returns a patch of the differences from before. The API server refuses it if the object has
// changed meanwhile.
func Since(before client.Object) client.Patch {
	return client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
}

// WriteStatus writes the differences of the status from before, if there are any.
func WriteStatus(ctx context.Context, c client.Client, object, before client.Object) error {
	if equality.Semantic.DeepEqual(object, before) {
		return nil
	}
	if err := c.Status().Patch(ctx,
		object, Since(before)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("status of %T %s: %w", object, client.ObjectKeyFromObject(object), err)
	}
	return nil
}

// ChangeFinalizer writes what [controllerutil.AddFinalizer] or [controllerutil.RemoveFinalizer]
// changes.
func ChangeFinalizer(
	ctx context.Context, c client.Client, object client.Object,
	change func(client.Object, string) bool, finalizer string,
) error {
	before := object.DeepCopyObject().(client.Object)
	if !change(object, finalizer) {
		return nil
	}
	if err := c.Patch(ctx, object, Since(before)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("finalizer of %T %s: %w", object, client.ObjectKeyFromObject(object), err)
	}
	return nil
}

// Conclude sets the Ready condition of an object, and writes its status if that differs from
// before. If err is nil, the condition is True with the message success. A refusal gives the
// condition its reason and message, a new reason is also reported by an event, and the result has
// the pause before the next attempt. Other errors are returned.
func (c Cluster) Conclude(
	ctx context.Context, object, before client.Object, conditions *[]metav1.Condition,
	success string, err error,
) (ctrl.Result, error) {
	refusal, refused := errors.AsType[*Refusal](err)
	if err != nil && !refused {
		return ctrl.Result{}, err
	}
	if !refused {
		refusal = &Refusal{Reason: v1alpha1.ReasonUp, Message: success}
	}

	was := v1alpha1.ReadyOf(*conditions)
	meta.SetStatusCondition(conditions, NewCondition(v1alpha1.ConditionReady,
		object.GetGeneration(), refusal.Reason, refusal.Message))
	if err := WriteStatus(ctx, c.Client, object, before); err != nil {
		return ctrl.Result{}, err
	}

	if refused && was.Reason != refusal.Reason {
		kind := corev1.EventTypeWarning
		if refusal.Reason == v1alpha1.ReasonStandby {
			kind = corev1.EventTypeNormal
		}
		c.Events.Eventf(object, nil, kind, refusal.Reason, "Provision", "%s", refusal.Message)
	}

	return ctrl.Result{RequeueAfter: refusal.Pause}, nil
}

// NewCondition returns a condition that is True if the reason means success.
func NewCondition(conditionType string, generation int64, reason, message string) metav1.Condition {
	status := metav1.ConditionFalse
	switch reason {
	case v1alpha1.ReasonUp, v1alpha1.ReasonNoPortNeeded, v1alpha1.ReasonConnected,
		v1alpha1.ReasonPublished, v1alpha1.ReasonAllMade,
		v1alpha1.ReasonFound, v1alpha1.ReasonSupported, v1alpha1.ReasonRunning:
		status = metav1.ConditionTrue
	}

	return metav1.Condition{Type: conditionType, Status: status, Reason: reason, Message: message,
		ObservedGeneration: generation}
}
