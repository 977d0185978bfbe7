// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/queue"
)

// tenantPorts admits XPUPorts in a tenant cluster. Those of claims were admitted when they were
// made. From then on the broker says how they are; while it is away, those that wait for it say so.
type tenantPorts struct {
	admission
	brokerAway func() bool
	wakeups    queue.Wakeups[reconcile.Request]
}

func (r *tenantPorts) setup(mgr ctrl.Manager) error {
	enqueue := handler.EnqueueRequestsFromMapFunc
	onNetwork := func(ctx context.Context, network client.Object) []reconcile.Request {
		return r.portsBy(ctx, model.ByNetwork, network.GetName())
	}

	return newController(mgr, "xpuport", r.Concurrency).
		WatchesRawSource(model.Source(r.store, r.portChanged)).
		Watches(&v1alpha1.XPUNetwork{}, enqueue(onNetwork), whenSpecChanged).
		Watches(&v1alpha1.DevicePool{}, enqueue(r.madeAhead), whenSpecChanged).
		WatchesRawSource(r.wakeups.Source()).
		Complete(r.guarded(r))
}

// portChanged also enqueues a Port that the broker has let go.
func (r *tenantPorts) portChanged(
	ctx context.Context, change model.Change, queue queueOf[reconcile.Request],
) {
	r.admission.portChanged(ctx, change, queue)
	if !change.Gone() && isReleased(change.New) {
		queue.Add(requestFor(change.New))
	}
}

func (r *tenantPorts) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	found, err := r.store.Get(ctx, req.NamespacedName)
	if found == nil || err != nil {
		return ctrl.Result{}, err
	}

	port := found.DeepCopy()
	switch {
	case isReleased(port):
		return ctrl.Result{}, r.letGo(ctx, port)
	case !port.DeletionTimestamp.IsZero(): // the broker lets it go
		return ctrl.Result{}, nil
	}

	before := port.DeepCopy()
	err = r.admitNew(ctx, port)
	if err == nil && r.brokerAway() && port.Status.BridgePort == "" {
		err = problemf(v1alpha1.ReasonBrokerAway, "%s", brokerAwayMessage(r.Namespace))
	}
	if err != nil {
		return r.conclude(ctx, port, before, &port.Status.Conditions, "", err)
	}

	return ctrl.Result{}, r.writeStatus(ctx, port, before)
}

// isReleased says whether a Port is being deleted that no xPU serves any more.
func isReleased(port client.Object) bool {
	return !port.GetDeletionTimestamp().IsZero() &&
		!controllerutil.ContainsFinalizer(port, v1alpha1.FinalizerPort)
}

// admitNew sets the condition Admitted of a Port without a claim. Who was admitted stays so.
func (r *tenantPorts) admitNew(ctx context.Context, port *v1alpha1.XPUPort) error {
	other, err := r.first(ctx, port)
	if err != nil {
		return err
	}

	if port.Spec.Ahead {
		if err := r.admitAhead(ctx, port, other); err != nil {
			return err
		}
	}

	if v1alpha1.IsAdmitted(port) {
		return nil
	}
	if other != nil {
		return busy(other)
	}

	network, err := r.usableNetwork(ctx, port.Spec.Network)
	if p, ok := errors.AsType[*problem](err); ok {
		p.retry = lastRetry
	}

	if err != nil {
		return err
	}

	addresses, err := r.admit(ctx, port, network)
	if err != nil {
		return err
	}

	port.Status.MTU, port.Status.Addresses = ptr.Deref(network.Spec.MTU, 0), addresses
	meta.SetStatusCondition(&port.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionAdmitted, Status: metav1.ConditionTrue,
		ObservedGeneration: port.Generation,
		Reason:             v1alpha1.ReasonAdmitted, Message: "the network lets it join",
	})

	return nil
}
