// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// base holds the dependencies of all reconcilers.
type base struct {
	Options
	client   client.Client // reads come from the cache
	live     client.Reader // reads come from the API server
	events   events.EventRecorder
	sessions *sessions
	metrics  *metrics

	store   *model.Ports
	retries workqueue.TypedRateLimiter[reconcile.Request] // each reconciler has its own
}

// Filters of events for a controller.
var (
	whenSpecChanged = builder.WithPredicates(predicate.GenerationChangedPredicate{})
	// servingChanged selects changes of what an XPU serves.
	servingChanged = predicate.Or(predicate.GenerationChangedPredicate{}, predicate.Funcs{
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, after := e.ObjectOld.(*v1alpha1.XPU).Status, e.ObjectNew.(*v1alpha1.XPU).Status
			return before.NodeName != after.NodeName || !slices.Equal(before.PFs, after.PFs)
		},
	})
	whenServing = builder.WithPredicates(servingChanged)
	// anotherOfTheName selects updates that replace an object by a new one of the same name. A
	// watch that was restarted leaves out the deletion in between.
	anotherOfTheName = func(e event.UpdateEvent) bool {
		return e.ObjectOld.GetUID() != e.ObjectNew.GetUID()
	}
	whenMadeOrGone = builder.WithPredicates(predicate.Funcs{UpdateFunc: anotherOfTheName})
	whenGone       = builder.WithPredicates(predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false }, UpdateFunc: anotherOfTheName,
	})
)

// newController begins to build a controller.
func newController(mgr ctrl.Manager, name string, concurrency int) *ctrl.Builder {
	options := controller.Options{
		MaxConcurrentReconciles: concurrency,
		RateLimiter:             reconciling.RetryLimiter[reconcile.Request](),
	}
	return ctrl.NewControllerManagedBy(mgr).Named(name).WithOptions(options)
}

// guarded wraps a reconciler, so that it does nothing once another leader was elected, and tries
// again soon after a write conflict, which only means that the cache was out of date.
func (r *base) guarded(inner reconcile.Reconciler) reconcile.Reconciler {
	return reconcile.Func(func(
		ctx context.Context, request reconcile.Request,
	) (reconcile.Result, error) {
		if err := r.Fence.Check(ctx); err != nil {
			return reconcile.Result{}, err
		}
		result, err := inner.Reconcile(ctx, request)
		if apierrors.IsConflict(err) {
			return reconcile.Result{RequeueAfter: reconciling.FirstRetry}, nil
		}
		return result, err
	})
}

// requests returns a request for each listed object. The only possible error is that the cache is
// not running.
func (r *base) requests(
	ctx context.Context, objects client.ObjectList, options ...client.ListOption,
) []reconcile.Request {
	if err := r.client.List(ctx, objects,
		append(options, client.UnsafeDisableDeepCopy)...); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "listing objects to reconcile")
		return nil
	}

	var requests []reconcile.Request
	_ = meta.EachListItem(objects, func(o runtime.Object) error {
		requests = append(requests, requestFor(o.(client.Object)))
		return nil
	})

	return requests
}

func requestFor(o client.Object) reconcile.Request {
	return reconcile.Request{NamespacedName: client.ObjectKeyFromObject(o)}
}

// portsBy returns a request for each Port under a key of an index. The only possible error is that
// the controller ends before the store is complete.
func (r *base) portsBy(ctx context.Context, index model.Index, key string) []reconcile.Request {
	found, err := r.store.By(ctx, index, key)
	if err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "listing objects to reconcile")
		return nil
	}

	var requests []reconcile.Request
	for _, port := range found {
		requests = append(requests, requestFor(port))
	}

	return requests
}

// since returns a patch of the differences from before. The API server refuses it if the object has
// changed meanwhile.
func since(before client.Object) client.Patch {
	return client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
}

// writeStatus writes the differences of the status from before, if there are any.
func (r *base) writeStatus(ctx context.Context, object, before client.Object) error {
	if equality.Semantic.DeepEqual(object, before) {
		return nil
	}
	if err := r.client.Status().Patch(ctx,
		object, since(before)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("status of %T %s: %w", object, client.ObjectKeyFromObject(object), err)
	}
	return nil
}

// changeFinalizer writes what [controllerutil.AddFinalizer] or [controllerutil.RemoveFinalizer]
// changes.
func (r *base) changeFinalizer(
	ctx context.Context, object client.Object, change func(client.Object, string) bool,
	finalizer string,
) error {
	before := object.DeepCopyObject().(client.Object)
	if !change(object, finalizer) {
		return nil
	}
	if err := r.client.Patch(ctx, object, since(before)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("finalizer of %T %s: %w", object, client.ObjectKeyFromObject(object), err)
	}
	return nil
}

// letGo removes all finalizers of a Port that no xPU serves any more, except for those of the
// garbage collector. The finalizer of another program would keep the Function from all pods.
func (r *base) letGo(ctx context.Context, port *v1alpha1.XPUPort) error {
	before := port.DeepCopy()
	ofCollector := []string{metav1.FinalizerDeleteDependents, metav1.FinalizerOrphanDependents}
	var strangers []string
	port.Finalizers = slices.DeleteFunc(slices.Clone(port.Finalizers), func(f string) bool {
		if f != v1alpha1.FinalizerPort && !slices.Contains(ofCollector, f) {
			strangers = append(strangers, f)
		}
		return !slices.Contains(ofCollector, f)
	})

	if len(port.Finalizers) == len(before.Finalizers) {
		return nil
	}

	if err := r.client.Patch(ctx, port, since(before)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("finalizers of XPUPort %s: %w", client.ObjectKeyFromObject(port), err)
	}

	if len(strangers) > 0 {
		ctrl.LoggerFrom(ctx).Info("removed finalizers of others, which kept the Function of an "+
			"XPUPort from being used",
			"finalizers", strangers)
	}

	return nil
}

// older reports whether a was created before b. If both were created in the same second, the object
// whose name sorts first counts as older.
func older(a, b client.Object) bool {
	made, other := a.GetCreationTimestamp(), b.GetCreationTimestamp()
	if !made.Equal(&other) {
		return made.Before(&other)
	}
	return cmp.Less(client.ObjectKeyFromObject(a).String(), client.ObjectKeyFromObject(b).String())
}

// smaller returns the smaller of two values, where 0 means that there is no value.
func smaller[T ~int32 | ~int64](a, b T) T {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

// oneLine makes a joined error fit a condition's message.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// newCondition returns a condition that is True if the reason means success.
func newCondition(conditionType string, generation int64, reason, message string) metav1.Condition {
	status := metav1.ConditionFalse
	switch reason {
	case v1alpha1.ReasonUp, v1alpha1.ReasonNoPortNeeded, v1alpha1.ReasonConnected,
		v1alpha1.ReasonPublished, v1alpha1.ReasonAllMade,
		v1alpha1.ReasonFound, v1alpha1.ReasonSupported:
		status = metav1.ConditionTrue
	}

	return metav1.Condition{Type: conditionType, Status: status, Reason: reason, Message: message,
		ObservedGeneration: generation}
}

// conclude sets the Ready condition of an object, and writes its status if that differs from
// before. If err is nil, the condition is True with the message success. A refusal gives the
// condition its reason and message, a new reason is also reported by an event, and the result has
// the pause before the next attempt. Other errors are returned.
func (r *base) conclude(
	ctx context.Context, object, before client.Object, conditions *[]metav1.Condition,
	success string, err error,
) (ctrl.Result, error) {
	refusal, refused := errors.AsType[*reconciling.Refusal](err)
	if err != nil && !refused {
		return ctrl.Result{}, err
	}
	if !refused {
		refusal = &reconciling.Refusal{Reason: v1alpha1.ReasonUp, Message: success}
	}

	was := v1alpha1.ReadyOf(*conditions)
	meta.SetStatusCondition(conditions, newCondition(v1alpha1.ConditionReady,
		object.GetGeneration(), refusal.Reason, refusal.Message))
	if err := r.writeStatus(ctx, object, before); err != nil {
		return ctrl.Result{}, err
	}

	if refused && was.Reason != refusal.Reason {
		kind := corev1.EventTypeWarning
		if refusal.Reason == v1alpha1.ReasonStandby {
			kind = corev1.EventTypeNormal
		}
		r.events.Eventf(object, nil, kind, refusal.Reason, "Provision", "%s", refusal.Message)
	}

	return ctrl.Result{RequeueAfter: refusal.Pause}, nil
}

// durations measures how long something has been the case. Its zero value is ready for use. Safe
// for concurrent use.
type durations[K comparable] struct{ since sync.Map } // time.Time by K

// elapsed returns the time since the first call for the key.
func (d *durations[K]) elapsed(key K) time.Duration {
	now := time.Now()
	since, _ := d.since.LoadOrStore(key, now)
	return now.Sub(since.(time.Time))
}

// reset lets the next call of elapsed for the key return 0.
func (d *durations[K]) reset(key K) { d.since.Delete(key) }

// retain resets all keys except for those to be kept.
func (d *durations[K]) retain(keep func(K) bool) {
	for key := range d.since.Range {
		if !keep(key.(K)) {
			d.since.Delete(key)
		}
	}
}
