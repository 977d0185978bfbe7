// SPDX-License-Identifier: Apache-2.0

package networks

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/sessions"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/queue"
)

// Options configure the reconcilers of networks.
type Options struct {
	// Ports need networks at their xPUs.
	Ports *model.Ports
	// Sessions reach the OPI agents.
	Sessions *sessions.Sessions
	// Catalog finds out whether a network can be used.
	Catalog Catalog
	// Installation marks the networks at OPI agents.
	Installation opi.Installation

	// AgentTimeout bounds the calls to an OPI agent for one network.
	AgentTimeout time.Duration
	// BridgeGrace is how long an OPI agent keeps a network after the last Port there, unless the
	// network is deleted.
	BridgeGrace time.Duration
	// Concurrency is how many networks, and how many bridges, are reconciled at once.
	Concurrency int
}

// Setup adds the reconcilers of XPUNetworks and of their bridges to the manager.
func Setup(mgr ctrl.Manager, cluster reconciling.Cluster, o Options) (*Bridges, error) {
	bridges := newBridges(cluster, o)
	r := &reconciler{Cluster: cluster, Options: o, bridges: bridges}
	bridges.changed = r.changed
	return bridges, errors.Join(bridges.setup(mgr), r.setup(mgr))
}

// reconciler writes the state of an XPUNetwork's bridges to its status. It keeps an XPUNetwork that
// is being deleted until no XPUPort needs it.
type reconciler struct {
	reconciling.Cluster
	Options
	bridges *Bridges
	wakeups queue.Wakeups[reconcile.Request]
}

// statusPause is the least time between two updates of a network's status, so that hundreds of xPUs
// that connect at once cost few writes.
const statusPause = 500 * time.Millisecond

func (r *reconciler) setup(mgr ctrl.Manager) error {
	enqueue := handler.EnqueueRequestsFromMapFunc
	return reconciling.NewController(mgr, "xpunetwork", r.Concurrency).
		For(&v1alpha1.XPUNetwork{}, reconciling.WhenSpecChanged).
		Watches(&v1alpha1.XPUNetwork{}, enqueue(r.Catalog.Rivals), reconciling.WhenGone).
		Watches(&v1alpha1.XPUNetwork{}, enqueue(r.Catalog.Rivals), reconciling.WhenSpecChanged).
		WatchesRawSource(model.Source(r.Ports, model.Requests(model.Change.Gone, r.waitsFor))).
		WatchesRawSource(r.wakeups.Source()).
		Complete(r.Guarded(r))
}

// changed enqueues a network one of whose bridges changed.
func (r *reconciler) changed(network string) {
	r.wakeups.Add(statusPause,
		reconcile.Request{NamespacedName: types.NamespacedName{Name: network}})
}

// waitsFor returns the networks of a deleted Port that are being deleted too, because they wait
// until their Ports are gone.
func (r *reconciler) waitsFor(
	ctx context.Context, port *v1alpha1.XPUPort,
) (waiting []reconcile.Request) {
	for _, name := range port.Spec.AllNetworks() {
		var network v1alpha1.XPUNetwork
		key := client.ObjectKey{Name: name}
		if err := r.Client.Get(ctx, key, &network); err == nil && !network.DeletionTimestamp.IsZero() {
			waiting = append(waiting, reconcile.Request{NamespacedName: key})
		}
	}
	return waiting
}

func (r *reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var network v1alpha1.XPUNetwork
	if err := r.Client.Get(ctx, req.NamespacedName, &network); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}

	if network.DeletionTimestamp.IsZero() {
		if err := reconciling.ChangeFinalizer(ctx, r.Client, &network, controllerutil.AddFinalizer,
			v1alpha1.FinalizerNetwork); err != nil {
			return ctrl.Result{}, err
		}
		before := network.DeepCopy()
		message, err := r.sumUp(ctx, &network)
		if err == nil && message == "" {
			return ctrl.Result{}, nil // the bridges wake it
		}
		return r.Conclude(ctx, &network, before, &network.Status.Conditions, message, err)
	}

	if !controllerutil.ContainsFinalizer(&network, v1alpha1.FinalizerNetwork) {
		return ctrl.Result{}, nil
	}
	unused, err := r.release(ctx, &network)
	if err != nil {
		return r.Conclude(ctx, &network, network.DeepCopy(), &network.Status.Conditions, "", err)
	}
	if !unused {
		return ctrl.Result{}, nil // the bridges wake it
	}

	r.bridges.forget(&network)
	return ctrl.Result{}, reconciling.ChangeFinalizer(ctx, r.Client, &network,
		controllerutil.RemoveFinalizer, v1alpha1.FinalizerNetwork)
}

// sumUp sets the counts of the status, and returns the message if all is well. The message is ""
// while the state of some agent is not known yet. A refusal says why an agent does not serve the
// network.
func (r *reconciler) sumUp(
	ctx context.Context, network *v1alpha1.XPUNetwork,
) (success string, err error) {
	status := &network.Status
	before := *status
	status.XPUs, status.ReadyXPUs, status.Failures = 0, 0, nil
	if err := r.Catalog.check(ctx, network); err != nil {
		return "", err
	}

	states, err := r.bridges.reports(ctx, network.Name)
	if err != nil {
		return "", err
	}

	var failure error
	var leftOut []string
	for _, xpu := range slices.Sorted(maps.Keys(states)) {
		state := states[xpu]
		if !state.needed {
			continue
		}
		if isLeftOut(state) {
			leftOut = append(leftOut, xpu)
			continue
		}
		if !state.known {
			*status = before
			return "", nil
		}

		status.XPUs++
		if state.err == nil {
			status.ReadyXPUs++
			continue
		}

		if !isAway(state.err) && failure == nil {
			failure = reconciling.Refuse(v1alpha1.ReasonFailed, "XPU %s does not serve it: %s",
				xpu, reconciling.OneLine(state.err))
		}

		if len(status.Failures) < v1alpha1.MaxNetworkFailures {
			status.Failures = append(status.Failures,
				v1alpha1.XPUNetworkFailure{XPU: xpu, Message: reconciling.OneLine(state.err)})
		}
	}

	switch {
	case failure != nil:
		return "", failure
	case status.XPUs == 0:
		return "no XPUPort needs it; an xPU serves it from the first to the last of its XPUPorts " +
			"there", nil
	case status.ReadyXPUs == 0:
		return "", reconciling.Refuse(v1alpha1.ReasonXPUUnavailable,
			"none of the %d XPUs that need it can be reached", status.XPUs)
	}

	success = fmt.Sprintf("%d of %d XPUs that need it serve it", status.ReadyXPUs, status.XPUs)
	if len(leftOut) > 0 {
		success += fmt.Sprintf("; %d XPUs with XPUPorts in other networks of VRF %s have no route to "+
			"it, such as %s: %s", len(leftOut), network.Spec.Routed.VRF, leftOut[0],
			reconciling.OneLine(states[leftOut[0]].err))
	}
	if alone, err := r.bridges.isTooYoung(ctx, network); err != nil || !alone {
		return success, err
	}

	return success + fmt.Sprintf("; VRF %s has more than %d networks with a vni, and XPUs route to "+
		"XPUPorts of other XPUs in the oldest of them only, not in this one",
		network.Spec.Routed.VRF, MostRouted), nil
}

// release has agents delete a network that is being deleted. unused reports whether none of them
// has the network any more. A refusal says what keeps the network. An agent that is away, or that
// refuses this client, deletes the network when it is back or lets the client in.
func (r *reconciler) release(
	ctx context.Context, network *v1alpha1.XPUNetwork,
) (unused bool, err error) {
	ports, err := r.Ports.By(ctx, model.ByNetwork, network.Name)
	if err != nil {
		return false, err
	}

	if len(ports) > 0 {
		return false, reconciling.Refuse(v1alpha1.ReasonInUse,
			"%d XPUPorts use it, such as %s/%s; it is deleted once they are gone",
			len(ports), ports[0].Namespace, ports[0].Name)
	}

	if err := r.bridges.beginLeft(ctx, network); err != nil {
		return false, err
	}
	states, err := r.bridges.reports(ctx, network.Name)
	if err != nil {
		return false, err
	}

	for _, xpu := range slices.Sorted(maps.Keys(states)) {
		switch err := states[xpu].err; {
		case isAway(err), opi.IsDenied(err), errors.Is(err, errNoXPU):
		case err != nil:
			return false, reconciling.Refuse(v1alpha1.ReasonReleasing,
				"XPU %s still serves it: %s", xpu, reconciling.OneLine(err))
		default:
			r.bridges.Wake(Bridge{network.Name, xpu})
			return false, nil // about to go
		}
	}

	return true, nil
}
