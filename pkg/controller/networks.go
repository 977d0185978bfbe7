// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/queue"
)

// networks writes the state of an XPUNetwork's bridges to its status. It keeps an XPUNetwork that
// is being deleted until no XPUPort needs it.
type networks struct {
	base
	bridges *bridges
	wakeups queue.Wakeups[reconcile.Request]
}

// statusPause is the least time between two updates of a network's status, so that hundreds of xPUs
// that connect at once cost few writes.
const statusPause = 500 * time.Millisecond

func (r *networks) setup(mgr ctrl.Manager) error {
	enqueue := handler.EnqueueRequestsFromMapFunc
	return reconciling.NewController(mgr, "xpunetwork", r.Concurrency).
		For(&v1alpha1.XPUNetwork{}, reconciling.WhenSpecChanged).
		Watches(&v1alpha1.XPUNetwork{}, enqueue(r.networkRivals), reconciling.WhenGone).
		WatchesRawSource(model.Source(r.store, model.Requests(model.Change.Gone, r.waitsFor))).
		WatchesRawSource(r.wakeups.Source()).
		Complete(r.Guarded(r))
}

// changed enqueues a network one of whose bridges changed.
func (r *networks) changed(network string) {
	r.wakeups.Add(statusPause,
		reconcile.Request{NamespacedName: types.NamespacedName{Name: network}})
}

// waitsFor returns the network of a deleted Port if the network is being deleted too, because it
// waits until its Ports are gone.
func (r *networks) waitsFor(ctx context.Context, port *v1alpha1.XPUPort) []reconcile.Request {
	var network v1alpha1.XPUNetwork
	key := client.ObjectKey{Name: port.Spec.Network}
	if err := r.Client.Get(ctx, key, &network); err != nil || network.DeletionTimestamp.IsZero() {
		return nil
	}
	return []reconcile.Request{{NamespacedName: key}}
}

// networkRivals returns the networks that have a VLAN or VNI in common with this one, including
// this one.
func (r *base) networkRivals(ctx context.Context, o client.Object) []reconcile.Request {
	var requests []reconcile.Request
	if r.Role == RoleTenant {
		return nil
	}

	for _, key := range segmentKeys(o.(*v1alpha1.XPUNetwork)) {
		requests = append(requests,
			reconciling.Requests(ctx, r.Client, &v1alpha1.XPUNetworkList{},
				client.MatchingFields{networksByID: key})...)
	}

	return requests
}

// checkSegment returns a refusal if the network has no VLAN, or if an older network has its VLAN
// or VNI. It checks nothing in a tenant cluster, where VLAN and VNI have no meaning.
func (r *base) checkSegment(ctx context.Context, n *v1alpha1.XPUNetwork) error {
	if r.Role == RoleTenant {
		return nil
	}
	if n.Spec.VLAN == 0 {
		return reconciling.Refuse(v1alpha1.ReasonInvalidConfig,
			"spec.vlan is not set; make another XPUNetwork with it")
	}

	for _, key := range segmentKeys(n) {
		var same v1alpha1.XPUNetworkList
		if err := r.Client.List(ctx, &same, client.MatchingFields{networksByID: key}); err != nil {
			return fmt.Errorf("list XPUNetworks with %s: %w", key, err)
		}

		for i := range same.Items {
			if other := &same.Items[i]; other.Name != n.Name && reconciling.Older(other, n) {
				return reconciling.Refuse(v1alpha1.ReasonConflict,
					"%s is that of XPUNetwork %s, which is older; delete one of them", key,
					other.Name)
			}
		}
	}

	return nil
}

func (r *networks) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
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

	return ctrl.Result{}, reconciling.ChangeFinalizer(ctx, r.Client, &network, controllerutil.RemoveFinalizer,
		v1alpha1.FinalizerNetwork)
}

// sumUp sets the counts of the status, and returns the message if all is well. The message is ""
// while the state of some agent is not known yet. A refusal says why an agent does not serve the
// network.
func (r *networks) sumUp(
	ctx context.Context, network *v1alpha1.XPUNetwork,
) (success string, err error) {
	status := &network.Status
	before := *status
	status.XPUs, status.ReadyXPUs, status.Failures = 0, 0, nil
	if err := r.checkSegment(ctx, network); err != nil {
		return "", err
	}

	states := r.bridges.reports(network.Name)
	var failure error
	for _, xpu := range slices.Sorted(maps.Keys(states)) {
		state := states[xpu]
		if !state.needed {
			continue
		}
		if !state.known {
			status.XPUs, status.ReadyXPUs, status.Failures = before.XPUs, before.ReadyXPUs, before.Failures
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
		return "no XPUPort needs it; an xPU serves it from the first to the last of its XPUPorts there", nil
	case status.ReadyXPUs == 0:
		return "", reconciling.Refuse(v1alpha1.ReasonXPUUnavailable,
			"none of the %d XPUs that need it can be reached", status.XPUs)
	}

	return fmt.Sprintf("%d of %d XPUs that need it serve it", status.ReadyXPUs, status.XPUs), nil
}

// release has agents delete a network that is being deleted. unused reports whether none of them
// has the network any more. A refusal says what keeps the network. An agent that is away deletes
// the network when it is back.
func (r *networks) release(
	ctx context.Context, network *v1alpha1.XPUNetwork,
) (unused bool, err error) {
	ports, err := r.store.By(ctx, model.ByNetwork, network.Name)
	if err != nil {
		return false, err
	}

	if len(ports) > 0 {
		return false, reconciling.Refuse(v1alpha1.ReasonInUse,
			"%d XPUPorts use it, such as %s/%s; it is deleted once they are gone",
			len(ports), ports[0].Namespace, ports[0].Name)
	}

	states := r.bridges.reports(network.Name)
	for _, xpu := range slices.Sorted(maps.Keys(states)) {
		switch err := states[xpu].err; {
		case isAway(err), errors.Is(err, errNoXPU):
		case err != nil:
			return false, reconciling.Refuse(v1alpha1.ReasonReleasing,
				"XPU %s still serves it: %s", xpu, reconciling.OneLine(err))
		default:
			r.bridges.release(bridge{network.Name, xpu})
			return false, nil // about to go
		}
	}

	return true, nil
}

// admit returns a refusal if pods of the namespace may not join the network. The namespace is ""
// if the pod is not known yet.
func (r *base) admit(ctx context.Context, network *v1alpha1.XPUNetwork, namespace string) error {
	allowed := network.Spec.AllowedNamespaces
	if allowed.From == v1alpha1.NamespacesFromAll {
		return nil
	}

	if namespace == "" {
		return reconciling.Refuse(v1alpha1.ReasonForbidden,
			"XPUNetwork %s is not for pods of all namespaces, and the kubelet does not say which "+
				"pod it allocates for; use provisionAt: Add in the DevicePool", network.Name)
	}

	pods := namespaceMetadata()
	err := r.Client.Get(ctx, client.ObjectKey{Name: namespace}, pods)
	if apierrors.IsNotFound(err) {
		return reconciling.Refuse(v1alpha1.ReasonForbidden,
			"namespace %s, which XPUNetwork %s must allow, "+
				"is not known yet", namespace, network.Name)
	}
	if err != nil {
		return fmt.Errorf("namespace %s: %w", namespace, err)
	}

	ok, err := allowed.Allows(pods.Labels)
	switch {
	case err != nil:
		return reconciling.Refuse(v1alpha1.ReasonForbidden,
			"XPUNetwork %s: allowedNamespaces.selector: %s",
			network.Name, err)
	case !ok:
		return reconciling.Refuse(v1alpha1.ReasonForbidden,
			"XPUNetwork %s does not let pods of namespace "+
				"%s join; ask its administrator to allow "+
				"the namespace in spec.allowedNamespaces, or name another network",
			network.Name, namespace)
	}

	return nil
}

// namespaceMetadata is an empty Namespace for reads of metadata, because only the labels matter.
func namespaceMetadata() *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
	}
}

// usableNetwork returns the network, or a refusal if no Port can join it.
func (r *base) usableNetwork(ctx context.Context, name string) (*v1alpha1.XPUNetwork, error) {
	var network v1alpha1.XPUNetwork
	err := r.Client.Get(ctx, client.ObjectKey{Name: name}, &network)
	if apierrors.IsNotFound(err) {
		return nil, reconciling.Refuse(v1alpha1.ReasonNetworkNotFound,
			"XPUNetwork %s does not exist; create it, "+
				"or name another one in the InterfaceConfig, the CNI configuration or the "+
				"DevicePool", name)
	}

	if err != nil {
		return nil, fmt.Errorf("XPUNetwork %s: %w", name, err)
	}

	err = r.checkSegment(ctx, &network)
	if refusal, ok := errors.AsType[*reconciling.Refusal](err); ok {
		return nil, reconciling.Refuse(v1alpha1.ReasonNetworkNotReady,
			"XPUNetwork %s cannot be used: %s", name, refusal.Message)
	}

	return &network, err
}
