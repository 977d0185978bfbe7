// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// claims creates an XPUPort for every Function that is allocated to a ResourceClaim, deletes it
// when the Function is no longer allocated, and writes what the scheduler or the user must know
// into the claim's status.
type claims struct {
	base
	allocator *allocator

	// by Port: its claim is gone, and the garbage collector has not deleted it yet
	gone   durations[types.UID]
	busy   durations[reconcile.Request] // by claim: it waits for a Function
	queues functionQueues               // of the claims that wait
	// by Port: it is refused, and the device is not tainted yet
	tainted durations[types.UID]
}

func (r *claims) setup(mgr ctrl.Manager) error {
	enqueue := handler.EnqueueRequestsFromMapFunc
	return newController(mgr, "resourceclaim", r.Concurrency).
		For(&resourceapi.ResourceClaim{}, builder.WithPredicates(predicate.Funcs{
			CreateFunc: func(e event.CreateEvent) bool { return ours(e.Object) },
			UpdateFunc: func(e event.UpdateEvent) bool {
				return ours(e.ObjectOld) ||
					ours(e.ObjectNew)
			},
		})).
		WatchesRawSource(model.Source(r.store, r.portChanged)).
		Watches(&v1alpha1.XPUNetwork{}, enqueue(r.waitingForNetwork), whenSpecChanged).
		Watches(&v1alpha1.DevicePool{},
			enqueue(func(ctx context.Context, o client.Object) []reconcile.Request {
				return r.dependents(ctx, onPool(o.GetName()))
			}), whenSpecChanged).
		Watches(&v1alpha1.XPU{},
			enqueue(func(ctx context.Context, o client.Object) []reconcile.Request {
				return r.dependents(ctx, onNode(o.(*v1alpha1.XPU).Node()))
			}), whenServing).
		WatchesMetadata(&corev1.Namespace{},
			enqueue(func(ctx context.Context, o client.Object) []reconcile.Request {
				return r.requests(ctx, &resourceapi.ResourceClaimList{},
					client.InNamespace(o.GetName()))
			}), builder.WithPredicates(predicate.LabelChangedPredicate{})).
		Complete(r.guarded(r))
}

// ours tells whether a claim has a Function of this driver.
func ours(o client.Object) bool {
	allocation := o.(*resourceapi.ResourceClaim).Status.Allocation
	return allocation != nil && slices.ContainsFunc(allocation.Devices.Results,
		func(r resourceapi.DeviceRequestAllocationResult) bool {
			return r.Driver == v1alpha1.GroupName
		})
}

// portChanged enqueues the claim of a Port, and the claims that may have waited for one that is
// gone.
func (r *claims) portChanged(
	ctx context.Context, change model.Change, queue queueOf[reconcile.Request],
) {
	port := change.Port()
	enqueueClaim(port, queue)
	if change.Gone() {
		for _, request := range r.waitingForPort(ctx, port) {
			queue.Add(request)
		}
	}
}

// enqueueClaim enqueues the claim of a Port, if it has one.
func enqueueClaim(port *v1alpha1.XPUPort, queue queueOf[reconcile.Request]) {
	if port.Spec.Claim.Name != "" {
		queue.Add(reconcile.Request{NamespacedName: types.NamespacedName{
			Namespace: port.Namespace, Name: port.Spec.Claim.Name,
		}})
	}
}

// waitingForPort returns the claims that wait for the Function or an address of a deleted Port.
func (r *claims) waitingForPort(ctx context.Context, port *v1alpha1.XPUPort) []reconcile.Request {
	r.gone.reset(port.UID)
	r.tainted.reset(port.UID)
	woken := r.queues.take(model.FunctionKeyOf(port))
	for _, network := range r.networkKeys(ctx, port.Spec.Network) {
		woken = append(woken, r.dependents(ctx, onConflict(network))...)
		waiting := r.dependents(ctx, onAddresses(network))
		woken = append(woken, waiting[:min(len(waiting), wokenForAddress)]...)
	}

	return woken
}

// wokenForAddress is how many claims that wait for any address of a network hear that one is free:
// one of them takes it, and others may be about to go. Were it all, a full network would cost the
// square of what waits.
const wokenForAddress = 4

// waitingForNetwork returns the claims that join the network, or one whose conflict with it the
// change may have ended.
func (r *claims) waitingForNetwork(ctx context.Context, o client.Object) []reconcile.Request {
	networks := []string{o.GetName()}
	for _, rival := range r.networkRivals(ctx, o) {
		networks = append(networks, rival.Name)
	}
	return r.dependents(ctx, r.networkKeys(ctx, networks...)...)
}

// networkKeys are the keys of claimsByDependency of claims that name one of the networks, or whose
// DevicePool does.
func (r *claims) networkKeys(ctx context.Context, networks ...string) []string {
	var keys []string
	for _, network := range networks {
		keys = append(keys, onNetwork(network))
		for _, pool := range r.requests(ctx, &v1alpha1.DevicePoolList{},
			client.MatchingFields{poolsByNetwork: network}) {
			keys = append(keys, onPool(pool.Name))
		}
	}

	return keys
}

// dependents are the claims with any of these keys of claimsByDependency.
func (r *claims) dependents(ctx context.Context, keys ...string) []reconcile.Request {
	var requests []reconcile.Request
	for _, key := range keys {
		found := r.requests(ctx, &resourceapi.ResourceClaimList{},
			client.MatchingFields{claimsByDependency: key})
		requests = append(requests, found...)
	}
	return requests
}

func (r *claims) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var c resourceapi.ResourceClaim // stays empty if the claim is gone
	if err := r.client.Get(ctx, req.NamespacedName, &c); client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, fmt.Errorf("ResourceClaim %s: %w", req, err)
	}

	devices, err := claim.Devices(&c)
	if err != nil {
		// No Port is touched, as it is unknown what is allocated.
		r.events.Eventf(&c, nil, "Warning", v1alpha1.ReasonInvalidConfig, "Provision", "%s",
			oneLine(err))
		return ctrl.Result{}, reconcile.TerminalError(err)
	}

	ports, err := r.store.By(ctx, model.ByClaim, req.String())
	if err != nil {
		return ctrl.Result{}, err
	}

	after, err := r.retire(ctx, &c, devices, ports)
	if err != nil || len(devices) == 0 {
		r.busy.reset(req)
		return ctrl.Result{RequeueAfter: after}, err
	}

	before := c.DeepCopy()
	for i := range devices {
		switch {
		case devices[i].Admin: // the scheduler may wait for its binding conditions all the same
			setConditions(&c, &devices[i], provisioned(&c, v1alpha1.ReasonNoPortNeeded, onlySeen))
			continue
		case devices[i].Function == (function.ID{}):
			continue // a share, for which the agent has not chosen a VF yet
		}

		told, again, err := r.device(ctx, &c, &devices[i], ports)
		if err != nil {
			return ctrl.Result{}, err
		}

		setConditions(&c, &devices[i], told)
		after = smaller(after, again)
	}

	return ctrl.Result{RequeueAfter: after}, r.report(ctx, &c, before, devices)
}

// onlySeen is told to claims with adminAccess.
const onlySeen = "adminAccess: the pod sees the Function's attributes and counters, and takes " +
	"nothing"

// retire deletes the Ports that the claim no longer backs. The garbage collector has CollectGrace
// to delete those of a claim that is gone or ending; it learns of new kinds late. after is the
// pause until the first such period ends, 0 if there is none.
func (r *claims) retire(
	ctx context.Context, c *resourceapi.ResourceClaim, devices []claim.Device,
	ports []*v1alpha1.XPUPort,
) (after time.Duration, err error) {
	for _, port := range ports {
		current := c.UID != "" && port.Spec.Claim.UID == c.UID
		backed := current && slices.ContainsFunc(devices, func(d claim.Device) bool {
			return !d.Admin && claim.PortName(d.ID.Node, d.Function) == port.Name
		})
		if backed || !port.DeletionTimestamp.IsZero() {
			continue
		}

		if !current || ending(c) {
			if waited := r.gone.elapsed(port.UID); waited < r.CollectGrace {
				after = smaller(after, r.CollectGrace-waited)
				continue
			}
		}

		if err := r.deletePort(ctx, port, "the claim no longer has the Function"); err != nil {
			return 0, err
		}

		r.gone.reset(port.UID)
	}
	return after, nil
}

// ending says whether the claim is being deleted, or was generated for a pod and has been given
// back, which happens just before its deletion.
func ending(c *resourceapi.ResourceClaim) bool {
	owner := metav1.GetControllerOf(c)
	generated := owner != nil && owner.Kind == "Pod"
	return !c.DeletionTimestamp.IsZero() || generated && c.Status.Allocation == nil &&
		len(c.Status.ReservedFor) == 0
}

func (r *claims) deletePort(ctx context.Context, port *v1alpha1.XPUPort, why string) error {
	ctrl.LoggerFrom(ctx).Info("deleting XPUPort", "port", client.ObjectKeyFromObject(port),
		"why", why)
	err := r.client.Delete(ctx, port.DeepCopy(), client.Preconditions{UID: &port.UID})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete XPUPort %s/%s: %w", port.Namespace, port.Name, err)
	}
	return nil
}

// device creates the Port of a device if there is none. It returns the conditions, of the types in
// claimConditions, that the claim is to have for the device, and the pause before the next look; 0
// means that an event will come.
func (r *claims) device(
	ctx context.Context, c *resourceapi.ResourceClaim, d *claim.Device, ports []*v1alpha1.XPUPort,
) ([]metav1.Condition, time.Duration, error) {
	name := claim.PortName(d.ID.Node, d.Function)
	i := slices.IndexFunc(ports, func(p *v1alpha1.XPUPort) bool {
		return p.Name == name && p.Spec.Claim.UID == c.UID
	})
	if i >= 0 {
		return r.existing(ctx, c, d, ports[i])
	}

	// The claim is in the queue before it looks, so that it finds the Function free or hears when
	// it is.
	key := model.FunctionKey(d.ID.Node, d.Function)
	r.queues.add(key, requestFor(c))
	needed, err := r.create(ctx, c, d)
	p, ok := errors.AsType[*problem](err)
	if !ok || p.reason != v1alpha1.ReasonFunctionBusy {
		r.queues.leave(key, requestFor(c))
	}

	if ok {
		// A Function that just changed hands is no news.
		if p.reason == v1alpha1.ReasonFunctionBusy {
			if waited := r.busy.elapsed(requestFor(c)); waited < r.BusyGrace {
				return nil, r.BusyGrace - waited, nil
			}
		}
		// Events wake the claim, except when something was only assumed to be taken.
		return provisioned(c, p.reason, p.message), cmp.Or(p.retry, assumedFor), nil
	}

	if err == nil && !needed && d.BeforeBind {
		return provisioned(c, v1alpha1.ReasonNoPortNeeded, "the interface joins no network"), 0, nil
	}

	return nil, 0, err
}

// provisioned is the condition Provisioned of a device.
func provisioned(c *resourceapi.ResourceClaim, reason, message string) []metav1.Condition {
	return []metav1.Condition{
		newCondition(v1alpha1.ConditionProvisioned, c.Generation, reason, message),
	}
}

// existing is device for a device that has a Port.
func (r *claims) existing(
	ctx context.Context, c *resourceapi.ResourceClaim, d *claim.Device, port *v1alpha1.XPUPort,
) ([]metav1.Condition, time.Duration, error) {
	if !port.DeletionTimestamp.IsZero() {
		return nil, 0, nil // made anew once it is gone
	}
	if port.Annotations[annotationAllocation] != allocationStamp(c) {
		return nil, 0, r.deletePort(ctx, port, "it is of an earlier allocation of the claim")
	}

	r.busy.reset(requestFor(c))
	ready := v1alpha1.ReadyOf(port.Status.Conditions)
	everUp := ready.Status == metav1.ConditionTrue || port.Status.BridgePort != ""
	switch {
	case ready.Reason == "", everUp && !d.BeforeBind,
		!everUp && ready.Reason == v1alpha1.ReasonProvisioning:
		return nil, 0, nil
	case everUp: // what happens to the Port later is not told to the claim
		return provisioned(c, v1alpha1.ReasonUp, "the xPU serves the Port"), 0, nil
	}

	told := provisioned(c, ready.Reason, ready.Message)
	if !d.BeforeBind || !v1alpha1.Refused(ready.Reason) {
		return told, 0, nil
	}

	wait, err := r.untilTainted(ctx, c, d, port)
	if err != nil || wait > 0 {
		return told, wait, err
	}

	failed := told[0]
	failed.Type, failed.Status = v1alpha1.ConditionProvisionFailed, metav1.ConditionTrue
	return append(told, failed), 0, nil
}

// taintPause is between looks at the node's ResourceSlices. Failures are too rare to watch all
// slices of the cluster.
const taintPause = 200 * time.Millisecond

// untilTainted is the pause before the claim may be told that the device of a refused Port failed,
// 0 if it may at once. Without the taint, by which the node's agent publishes that, the scheduler
// would pick the same device again.
func (r *claims) untilTainted(
	ctx context.Context, c *resourceapi.ResourceClaim, d *claim.Device, port *v1alpha1.XPUPort,
) (time.Duration, error) {
	told := deviceCondition(c, d, v1alpha1.ConditionProvisionFailed).Status == metav1.ConditionTrue
	if told || r.tainted.elapsed(port.UID) >= r.TaintGrace {
		return 0, nil
	}

	var found resourceapi.ResourceSliceList
	err := r.live.List(ctx, &found, client.MatchingFields{
		resourceapi.ResourceSliceSelectorDriver:   v1alpha1.GroupName,
		resourceapi.ResourceSliceSelectorNodeName: d.ID.Node,
	})
	if err != nil {
		return 0, fmt.Errorf("list ResourceSlices of node %s: %w", d.ID.Node, err)
	}

	var pause time.Duration // a device that is not offered any more cannot be picked again either
	for _, slice := range found.Items {
		for _, device := range slice.Spec.Devices {
			if slice.Spec.Pool.Name != d.Pool || device.Name != d.Name {
				continue
			}

			if slices.ContainsFunc(device.Taints, func(t resourceapi.DeviceTaint) bool {
				return t.Key == v1alpha1.TaintProvisionFailed
			}) {
				return 0, nil
			}

			pause = taintPause
		}
	}

	return pause, nil
}
