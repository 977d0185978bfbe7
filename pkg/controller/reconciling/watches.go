// SPDX-License-Identifier: Apache-2.0

package reconciling

import (
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Filters of events for a controller.
var (
	WhenSpecChanged = builder.WithPredicates(predicate.GenerationChangedPredicate{})
	WhenMadeOrGone  = builder.WithPredicates(predicate.Funcs{UpdateFunc: anotherOfTheName})
	WhenGone        = builder.WithPredicates(predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false }, UpdateFunc: anotherOfTheName,
	})
)

// anotherOfTheName selects updates that replace an object by a new one of the same name. A watch
// that was restarted leaves out the deletion in between.
func anotherOfTheName(e event.UpdateEvent) bool {
	return e.ObjectOld.GetUID() != e.ObjectNew.GetUID()
}

// NewController begins to build a controller. concurrency is how many objects it reconciles at
// once.
func NewController(mgr ctrl.Manager, name string, concurrency int) *ctrl.Builder {
	options := controller.Options{
		MaxConcurrentReconciles: concurrency,
		RateLimiter:             RetryLimiter[reconcile.Request](),
	}
	return ctrl.NewControllerManagedBy(mgr).Named(name).WithOptions(options)
}
