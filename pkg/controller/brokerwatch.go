// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// brokerWatch reports in the status of a tenant cluster's XPUs that no broker of an infra cluster
// is connected. The broker renews a Lease, and writes the status of the XPUs itself when it is
// back. The time since the last renewal is measured by this process, so that the clocks of both may
// differ.
type brokerWatch struct {
	reconciling.Cluster
	ports     *model.Ports
	wake      func(ports ...reconcile.Request) // has them admitted or refused
	namespace string                           // of the Lease
	grace     time.Duration                    // how long the Lease may be without a renewal

	mu   sync.Mutex
	last string    // the renewal that was seen last
	seen time.Time // when it was seen first; when the controller started, if there was none
	away bool
}

func (r *brokerWatch) setup(mgr ctrl.Manager) error {
	lease := types.NamespacedName{Namespace: r.namespace, Name: v1alpha1.BrokerLease}
	onLease := builder.WithPredicates(predicate.NewPredicateFuncs(func(o client.Object) bool {
		return o.GetName() == lease.Name
	}))

	begin := source.Func(func(
		_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request],
	) error {
		queue.Add(reconcile.Request{NamespacedName: lease}) // there may be none
		return nil
	})

	return reconciling.NewController(mgr, "broker", 1).
		Watches(&coordinationv1.Lease{}, &handler.EnqueueRequestForObject{}, onLease).
		WatchesRawSource(begin).
		Complete(r.Guarded(r))
}

// awayMessage says that the broker is away and what to look at, "" if the broker is there.
func (r *brokerWatch) awayMessage() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.away {
		return ""
	}
	return brokerAwayMessage(r.namespace)
}

func (r *brokerWatch) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var lease coordinationv1.Lease // stays empty if it does not exist
	if err := r.Client.Get(ctx, req.NamespacedName, &lease); client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, fmt.Errorf("Lease %s: %w", req, err)
	}

	left, changed := r.observe(&lease)
	if changed {
		ctrl.LoggerFrom(ctx).Info("Whether a broker asks this cluster has changed",
			"away", left <= 0)
		r.wake(r.allPorts(ctx)...)
	}

	if left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}

	return ctrl.Result{}, r.reportBrokerAway(ctx)
}

func (r *brokerWatch) allPorts(ctx context.Context) (requests []reconcile.Request) {
	ports, err := r.ports.All(ctx)
	if err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "listing objects to reconcile")
	}
	for _, port := range ports {
		requests = append(requests, reconciling.RequestFor(port))
	}
	return requests
}

// observe returns the time that the broker has left to renew the Lease, 0 or less if it is away.
// changed reports whether the broker went away or came back since the last call.
func (r *brokerWatch) observe(lease *coordinationv1.Lease) (left time.Duration, changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()

	if renewal := fmt.Sprint(lease.UID, lease.Spec.RenewTime); renewal != r.last {
		r.last, r.seen = renewal, time.Now()
	}

	left = r.grace - time.Since(r.seen)
	changed = r.away != (left <= 0)
	r.away = left <= 0

	return left, changed
}

// reportBrokerAway sets the condition Ready of all XPUs.
func (r *brokerWatch) reportBrokerAway(ctx context.Context) error {
	var xpus v1alpha1.XPUList
	if err := r.Client.List(ctx, &xpus); err != nil {
		return fmt.Errorf("list XPUs: %w", err)
	}

	for i := range xpus.Items {
		xpu := &xpus.Items[i]
		before := xpu.DeepCopy()
		away := reconciling.NewCondition(v1alpha1.ConditionReady, xpu.Generation,
			v1alpha1.ReasonBrokerAway, brokerAwayMessage(r.namespace))
		meta.SetStatusCondition(&xpu.Status.Conditions, away)
		if err := reconciling.WriteStatus(ctx, r.Client, xpu, before); err != nil {
			return err
		}
	}

	return nil
}

func brokerAwayMessage(namespace string) string {
	return fmt.Sprintf("no broker of an infra cluster renews Lease %s/%s; see whether it runs "+
		"there and reaches this cluster",
		namespace, v1alpha1.BrokerLease)
}
