// SPDX-License-Identifier: Apache-2.0

package claims

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
	"github.com/opiproject/xpu-device-plugin/pkg/controller/addresses"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/gangs"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/networks"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/pools"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/xpus"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/optional"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
)

// Options configure the reconciler of ResourceClaims.
type Options struct {
	// Ports are the XPUPorts of claims and of pods.
	Ports *model.Ports
	// Allocator reserves what a new XPUPort needs.
	Allocator *addresses.Allocator
	// Catalog finds out whether a network can be used.
	Catalog networks.Catalog
	// Gangs decides when claims of gangs may report.
	Gangs *gangs.Gangs
	// Tracer records the stages of XPUPorts. It may be nil.
	Tracer *tracing.Tracer

	// CollectGrace is how long the garbage collector has for the XPUPorts of a deleted claim.
	CollectGrace time.Duration
	// BusyGrace is how long a claim waits for a Function, or for its gang, before its condition says
	// so.
	BusyGrace time.Duration
	// TaintGrace is how long the taint of a failed device may take before the failure is reported
	// to the claim.
	TaintGrace time.Duration
	// Concurrency is how many claims are reconciled at once.
	Concurrency int
}

// Setup adds the reconciler of ResourceClaims to the manager.
func Setup(mgr ctrl.Manager, cluster reconciling.Cluster, o Options) error {
	return (&reconciler{Cluster: cluster, Options: o}).setup(mgr)
}

// reconciler creates an XPUPort for every Function that is allocated to a ResourceClaim, and
// deletes it when the Function is no longer allocated. It reports to the scheduler and the user in
// the claim's status.
type reconciler struct {
	reconciling.Cluster
	Options

	// how long the claim of a Port is gone that the garbage collector has not deleted yet
	gone   reconciling.Durations[types.UID]
	busy   reconciling.Durations[reconcile.Request] // by claim: it waits for a Function
	queues functionQueues                           // of the claims that wait
	// how long a Port is refused whose device has no taint yet
	tainted reconciling.Durations[types.UID]
	held    reconciling.Durations[reconcile.Request] // by claim: it waits for its gang
}

func (r *reconciler) setup(mgr ctrl.Manager) error {
	enqueue := handler.EnqueueRequestsFromMapFunc
	return reconciling.NewController(mgr, "resourceclaim", r.Concurrency).
		For(&resourceapi.ResourceClaim{}, builder.WithPredicates(predicate.Funcs{
			CreateFunc: func(e event.CreateEvent) bool { return ours(e.Object) },
			UpdateFunc: func(e event.UpdateEvent) bool {
				return ours(e.ObjectOld) ||
					ours(e.ObjectNew)
			},
		})).
		WatchesRawSource(model.Source(r.Ports, r.portChanged)).
		WatchesRawSource(r.Gangs.Decided()).
		Watches(&v1alpha1.XPUNetwork{}, enqueue(r.waitingForNetwork), reconciling.WhenSpecChanged).
		Watches(&v1alpha1.DevicePool{},
			enqueue(func(ctx context.Context, o client.Object) []reconcile.Request {
				return r.dependents(ctx, onPool(o.GetName()))
			}), reconciling.WhenSpecChanged).
		Watches(&v1alpha1.XPU{},
			enqueue(func(ctx context.Context, o client.Object) []reconcile.Request {
				return r.dependents(ctx, onNode(o.(*v1alpha1.XPU).Node()))
			}), xpus.WhenServing).
		Watches(&v1alpha1.XPUNode{},
			enqueue(func(ctx context.Context, o client.Object) []reconcile.Request {
				return r.dependents(ctx, onNode(o.GetName()))
			}), xpus.WhenVFMACs).
		Watches(&corev1.ResourceQuota{},
			enqueue(func(ctx context.Context, o client.Object) []reconcile.Request {
				return r.dependents(ctx, onQuota(o.GetNamespace()))
			}), addresses.WhenLimitsChanged).
		WatchesMetadata(&corev1.Namespace{},
			enqueue(func(ctx context.Context, o client.Object) []reconcile.Request {
				return reconciling.Requests(ctx, r.Client, &resourceapi.ResourceClaimList{},
					client.InNamespace(o.GetName()))
			}), builder.WithPredicates(predicate.LabelChangedPredicate{})).
		Complete(r.Guarded(r))
}

// ours reports whether a claim has a Function of this driver.
func ours(o client.Object) bool {
	allocation := o.(*resourceapi.ResourceClaim).Status.Allocation
	return allocation != nil && slices.ContainsFunc(allocation.Devices.Results,
		func(r resourceapi.DeviceRequestAllocationResult) bool {
			return r.Driver == v1alpha1.GroupName
		})
}

// portChanged enqueues the claim of a Port. If the Port is gone, it also enqueues claims that wait
// for its Function, its addresses, or its part of a quota.
func (r *reconciler) portChanged(
	ctx context.Context, change model.Change, queue model.Queue[reconcile.Request],
) {
	port := change.Port()
	enqueueClaim(port, queue)
	if change.Gone() {
		woken := slices.Concat(r.waitingForPort(ctx, port),
			r.waitingForQuota(ctx, model.NamespaceOf(port)))
		for _, request := range woken {
			queue.Add(request)
		}
	}
}

// enqueueClaim enqueues the claim of a Port, if it has one.
func enqueueClaim(port *v1alpha1.XPUPort, queue model.Queue[reconcile.Request]) {
	if port.Spec.Claim.Name != "" {
		queue.Add(reconcile.Request{NamespacedName: types.NamespacedName{
			Namespace: port.Namespace, Name: port.Spec.Claim.Name,
		}})
	}
}

// waitingForPort returns the claims that wait for the Function or an address of a deleted Port.
func (r *reconciler) waitingForPort(
	ctx context.Context, port *v1alpha1.XPUPort,
) []reconcile.Request {
	r.gone.Reset(port.UID)
	r.tainted.Reset(port.UID)
	woken := r.queues.take(model.FunctionKeyOf(port))
	for _, network := range r.networkKeys(ctx, port.Spec.AllNetworks()...) {
		woken = append(woken, r.dependents(ctx, onConflict(network))...)
		waiting := r.dependents(ctx, onAddresses(network))
		woken = append(woken, waiting[:min(len(waiting), wokenForAddress)]...)
	}

	return woken
}

// wokenForAddress is how many claims are enqueued that wait for any address of a network when one
// is free. One of them gets the address, and some may be about to end. If all were enqueued, the
// cost of a full network would be the square of the number of waiting claims.
const wokenForAddress = 4

// waitingForNetwork returns the claims that join the network, or a network whose conflict with this
// one the change may have ended.
func (r *reconciler) waitingForNetwork(ctx context.Context, o client.Object) []reconcile.Request {
	networks := []string{o.GetName()}
	for _, rival := range r.Catalog.Rivals(ctx, o) {
		networks = append(networks, rival.Name)
	}
	return r.dependents(ctx, r.networkKeys(ctx, networks...)...)
}

// networkKeys are the keys of byDependency of claims that name one of the networks, or whose
// DevicePool does.
func (r *reconciler) networkKeys(ctx context.Context, networks ...string) []string {
	var keys []string
	for _, network := range networks {
		keys = append(keys, onNetwork(network))
		for _, pool := range reconciling.Requests(ctx, r.Client, &v1alpha1.DevicePoolList{},
			client.MatchingFields{pools.ByNetwork: network}) {
			keys = append(keys, onPool(pool.Name))
		}
	}

	return keys
}

// dependents returns the claims with any of these keys of byDependency.
func (r *reconciler) dependents(ctx context.Context, keys ...string) []reconcile.Request {
	var requests []reconcile.Request
	for _, key := range keys {
		found := reconciling.Requests(ctx, r.Client, &resourceapi.ResourceClaimList{},
			client.MatchingFields{byDependency: key})
		requests = append(requests, found...)
	}
	return requests
}

func (r *reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var c resourceapi.ResourceClaim // stays empty if the claim is gone
	if err := r.Client.Get(ctx, req.NamespacedName, &c); client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, fmt.Errorf("ResourceClaim %s: %w", req, err)
	}

	devices, err := claim.Devices(&c)
	if err != nil {
		// No Port is touched, because it is unknown what is allocated.
		r.Events.Eventf(&c, nil, "Warning", v1alpha1.ReasonInvalidConfig, "Provision", "%s",
			reconciling.OneLine(err))
		return ctrl.Result{}, reconcile.TerminalError(err)
	}

	ports, err := r.Ports.By(ctx, model.ByClaim, req.String())
	if err != nil {
		return ctrl.Result{}, err
	}

	after, err := r.retire(ctx, &c, devices, ports)
	if err != nil || len(devices) == 0 {
		r.busy.Reset(req)
		r.leaveGang(req)
		return ctrl.Result{RequeueAfter: after}, err
	}

	before := c.DeepCopy()
	conditions := make([][]metav1.Condition, len(devices))
	for i := range devices {
		switch {
		case devices[i].Admin: // the scheduler may wait for its binding conditions all the same
			conditions[i] = provisioned(&c, v1alpha1.ReasonNoPortNeeded, onlySeen)
			continue
		case devices[i].Function == (function.ID{}):
			continue // a share, for which the agent has not chosen a VF yet
		}

		var again time.Duration
		conditions[i], again, err = r.device(ctx, &c, &devices[i], ports)
		if err != nil {
			return ctrl.Result{}, err
		}
		after = optional.Min(after, again)
	}

	again, err := r.askGang(ctx, &c, devices, conditions)
	if err != nil {
		return ctrl.Result{}, err
	}
	for i := range devices {
		if devices[i].Admin || devices[i].Function != (function.ID{}) {
			setConditions(&c, &devices[i], conditions[i])
		}
	}

	return ctrl.Result{RequeueAfter: optional.Min(after, again)},
		r.report(ctx, &c, before, devices)
}

// onlySeen is the message for claims with adminAccess.
const onlySeen = "adminAccess: the pod sees the Function's attributes and counters, and takes " +
	"nothing"

// retire deletes the claim's Ports whose Functions it no longer has. For a claim that is gone or
// ending, the garbage collector gets CollectGrace to delete the Ports itself, because it learns of
// new kinds late. after is the time until the first such period ends, 0 if there is none.
func (r *reconciler) retire(
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
			if waited := r.gone.Elapsed(port.UID); waited < r.CollectGrace {
				after = optional.Min(after, r.CollectGrace-waited)
				continue
			}
		}

		if err := r.deletePort(ctx, port, "the claim no longer has the Function"); err != nil {
			return 0, err
		}

		r.gone.Reset(port.UID)
	}
	return after, nil
}

// ending reports whether the claim is being deleted. A claim that was generated for a pod loses its
// allocation just before its deletion.
func ending(c *resourceapi.ResourceClaim) bool {
	owner := metav1.GetControllerOf(c)
	generated := owner != nil && owner.Kind == "Pod"
	return !c.DeletionTimestamp.IsZero() || generated && c.Status.Allocation == nil &&
		len(c.Status.ReservedFor) == 0
}

func (r *reconciler) deletePort(ctx context.Context, port *v1alpha1.XPUPort, why string) error {
	ctrl.LoggerFrom(ctx).Info("deleting XPUPort", "port", client.ObjectKeyFromObject(port),
		"why", why)
	err := r.Client.Delete(ctx, port.DeepCopy(), client.Preconditions{UID: &port.UID})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete XPUPort %s/%s: %w", port.Namespace, port.Name, err)
	}
	return nil
}

// device creates the Port of a device if there is none. It returns the claim's conditions for the
// device, of the types in claimConditions, and the pause before the next attempt. A pause of 0
// means that an event will come.
func (r *reconciler) device(
	ctx context.Context, c *resourceapi.ResourceClaim, d *claim.Device, ports []*v1alpha1.XPUPort,
) ([]metav1.Condition, time.Duration, error) {
	name := claim.PortName(d.ID.Node, d.Function)
	i := slices.IndexFunc(ports, func(p *v1alpha1.XPUPort) bool {
		return p.Name == name && p.Spec.Claim.UID == c.UID
	})
	if i >= 0 {
		return r.existing(ctx, c, d, ports[i])
	}

	// The claim joins the queue first. It therefore either finds the Function free, or is enqueued
	// when the Function becomes free.
	key := model.FunctionKey(d.ID.Node, d.Function)
	r.queues.add(key, reconciling.RequestFor(c))
	needed, err := r.create(ctx, c, d)
	refusal, refused := errors.AsType[*reconciling.Refusal](err)
	if !refused || refusal.Reason != v1alpha1.ReasonFunctionBusy {
		r.queues.leave(key, reconciling.RequestFor(c))
	}

	if refused {
		// A claim may wait for a moment when its Function passes from one pod to the next.
		if refusal.Reason == v1alpha1.ReasonFunctionBusy {
			if waited := r.busy.Elapsed(reconciling.RequestFor(c)); waited < r.BusyGrace {
				return nil, r.BusyGrace - waited, nil
			}
		}
		// An event enqueues the claim, except if its obstacle was only a reservation.
		pause := cmp.Or(refusal.Pause, addresses.AssumedFor)
		return provisioned(c, refusal.Reason, refusal.Message), pause, nil
	}

	if err == nil && !needed && d.BeforeBind {
		return provisioned(c, v1alpha1.ReasonNoPortNeeded, "the interface joins no network"), 0, nil
	}

	return nil, 0, err
}

// provisioned returns the condition Provisioned of a device.
func provisioned(c *resourceapi.ResourceClaim, reason, message string) []metav1.Condition {
	return []metav1.Condition{
		reconciling.NewCondition(v1alpha1.ConditionProvisioned, c.Generation, reason, message),
	}
}

// existing is device for a device that has a Port.
func (r *reconciler) existing(
	ctx context.Context, c *resourceapi.ResourceClaim, d *claim.Device, port *v1alpha1.XPUPort,
) ([]metav1.Condition, time.Duration, error) {
	if !port.DeletionTimestamp.IsZero() {
		return nil, 0, nil // made anew once it is gone
	}
	if port.Annotations[addresses.AnnotationAllocation] != allocationStamp(c) {
		return nil, 0, r.deletePort(ctx, port, "it is of an earlier allocation of the claim")
	}

	r.busy.Reset(reconciling.RequestFor(c))
	ready := v1alpha1.ReadyOf(port.Status.Conditions)
	everUp := ready.Status == metav1.ConditionTrue || port.Status.BridgePort != ""
	switch {
	case ready.Reason == "", everUp && !d.BeforeBind,
		!everUp && ready.Reason == v1alpha1.ReasonProvisioning:
		return nil, 0, nil
	case everUp: // the claim does not report what happens to the Port later
		return provisioned(c, v1alpha1.ReasonUp, "the xPU serves the Port"), 0, nil
	}

	conditions := provisioned(c, ready.Reason, ready.Message)
	if !d.BeforeBind || !v1alpha1.Refused(ready.Reason) {
		return conditions, 0, nil
	}

	wait, err := r.untilTainted(ctx, c, d, port)
	if err != nil || wait > 0 {
		return conditions, wait, err
	}

	failed := conditions[0]
	failed.Type, failed.Status = v1alpha1.ConditionProvisionFailed, metav1.ConditionTrue
	return append(conditions, failed), 0, nil
}

// taintPause is the pause between two reads of the node's ResourceSlices. Failures are too rare to
// watch all slices of the cluster.
const taintPause = 200 * time.Millisecond

// untilTainted returns the pause before the claim may get the condition that its device failed, 0
// if it may get it now. The node's agent taints the device of a refused Port. Without the taint,
// the scheduler would choose the same device again.
func (r *reconciler) untilTainted(
	ctx context.Context, c *resourceapi.ResourceClaim, d *claim.Device, port *v1alpha1.XPUPort,
) (time.Duration, error) {
	reported := deviceCondition(c, d, v1alpha1.ConditionProvisionFailed)
	if reported.Status == metav1.ConditionTrue || r.tainted.Elapsed(port.UID) >= r.TaintGrace {
		return 0, nil
	}

	var found resourceapi.ResourceSliceList
	err := r.Live.List(ctx, &found, client.MatchingFields{
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
