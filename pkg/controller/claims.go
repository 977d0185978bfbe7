package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// claims makes an XPUPort for every Function that is allocated to a ResourceClaim, deletes those that are not
// allocated any more, and tells the claim what the scheduler or its user must know.
type claims struct {
	client    client.Client
	live      client.Reader // reads that must not come from the cache
	builder   portBuilder
	allocator *allocator
	events    events.EventRecorder

	gone    *durations[types.UID]            // UIDs of claims that are gone but whose Ports are not deleted yet
	busy    *durations[types.NamespacedName] // claims that wait for a Function
	tainted *durations[types.UID]            // Ports that are refused, until the device is tainted

	collectGrace, busyGrace, taintGrace time.Duration
}

func (r *claims) setup(mgr ctrl.Manager, concurrency int) error {
	changed := builder.WithPredicates(predicate.GenerationChangedPredicate{})
	return ctrl.NewControllerManagedBy(mgr).
		Named("resourceclaim").
		For(&resourceapi.ResourceClaim{}, builder.WithPredicates(ourClaims())).
		Watches(&v1alpha1.XPUPort{}, r.onPort()).
		Watches(&v1alpha1.XPUNetwork{}, handler.EnqueueRequestsFromMapFunc(r.onNetwork), changed).
		Watches(&v1alpha1.DevicePool{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			return r.dependents(ctx, onPool(o.GetName()))
		}), changed).
		Watches(&v1alpha1.XPU{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			return r.dependents(ctx, onNode(o.(*v1alpha1.XPU).Spec.NodeName))
		}), changed).
		WithOptions(controller.Options{MaxConcurrentReconciles: concurrency, RateLimiter: retryLimiter[reconcile.Request]()}).
		Complete(withConflicts(r))
}

// ourClaims lets claims pass that have, or had, a Function of ours.
func ourClaims() predicate.Predicate {
	ours := func(o client.Object) bool {
		c, ok := o.(*resourceapi.ResourceClaim)
		return ok && c.Status.Allocation != nil &&
			slices.ContainsFunc(c.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
				return r.Driver == v1alpha1.GroupName
			})
	}
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return ours(e.Object) },
		DeleteFunc: func(event.DeleteEvent) bool { return true },
		UpdateFunc: func(e event.UpdateEvent) bool { return ours(e.ObjectOld) || ours(e.ObjectNew) },
	}
}

// onPort wakes the claim that a Port is for, if it is for one, and once a Port is gone those that wait for what it had.
func (r *claims) onPort() handler.EventHandler {
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	owner := func(q queue, o client.Object) {
		port := o.(*v1alpha1.XPUPort)
		if port.Spec.Claim.Name == "" {
			return
		}
		r.allocator.seen(port)
		q.Add(reconcile.Request{NamespacedName: types.NamespacedName{Namespace: port.Namespace, Name: port.Spec.Claim.Name}})
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) { owner(q, e.Object) },
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) { owner(q, e.ObjectNew) },
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) {
			owner(q, e.Object)
			port := e.Object.(*v1alpha1.XPUPort)
			r.gone.reset(port.UID)
			r.tainted.reset(port.UID)
			free := []string{onFunction(functionKey(port.Spec.NodeName, port.Spec.Function))}
			for _, network := range r.namesOf(ctx, port.Spec.Network) {
				free = append(free, onAddresses(network))
			}
			for _, request := range r.dependents(ctx, free...) {
				q.Add(request)
			}
		},
	}
}

// onNetwork are the claims that join the network, or one that is in conflict with it: the change may have ended that.
func (r *claims) onNetwork(ctx context.Context, o client.Object) []reconcile.Request {
	networks := sets.New(o.GetName())
	for _, segment := range segmentKeys(o.(*v1alpha1.XPUNetwork)) {
		for _, rival := range requestsFor(ctx, r.client, &v1alpha1.XPUNetworkList{}, client.MatchingFields{networksByID: segment}) {
			networks.Insert(rival.Name)
		}
	}
	return r.dependents(ctx, r.namesOf(ctx, networks.UnsortedList()...)...)
}

// namesOf are the keys of claimsByDependency by which claims name the networks: by themselves, or by a DevicePool.
func (r *claims) namesOf(ctx context.Context, networks ...string) []string {
	var keys []string
	for _, network := range networks {
		keys = append(keys, onNetwork(network))
		for _, pool := range requestsFor(ctx, r.client, &v1alpha1.DevicePoolList{}, client.MatchingFields{poolsByNetwork: network}) {
			keys = append(keys, onPool(pool.Name))
		}
	}
	return keys
}

// dependents are the claims with any of these keys of claimsByDependency.
func (r *claims) dependents(ctx context.Context, keys ...string) []reconcile.Request {
	var requests []reconcile.Request
	for _, key := range keys {
		requests = append(requests, requestsFor(ctx, r.client, &resourceapi.ResourceClaimList{}, client.MatchingFields{claimsByDependency: key})...)
	}
	return requests
}

// result is what came of a device.
type result struct {
	problem *problem      // what stands in the way; nil if nothing does
	ready   string        // reason why the pod may bind; empty as long as it may not
	failed  bool          // the device is to be given back
	after   time.Duration // look again by then; 0 means an event will come
}

func (r *claims) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	log := ctrl.LoggerFrom(ctx)
	var c resourceapi.ResourceClaim
	err := r.client.Get(ctx, req.NamespacedName, &c)
	if client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, fmt.Errorf("ResourceClaim %s: %w", req, err)
	}
	exists := err == nil
	devices, err := claim.Devices(&c)
	if err != nil {
		// Nothing is touched, as it is not known what is allocated.
		r.events.Eventf(&c, nil, "Warning", v1alpha1.ReasonInvalidConfig, "Provision", "%s", oneLine(err))
		return ctrl.Result{}, reconcile.TerminalError(err)
	}
	ports, err := listPorts(ctx, r.client, client.InNamespace(req.Namespace), client.MatchingFields{portsByClaim: req.Name})
	if err != nil {
		return ctrl.Result{}, err
	}
	after, err := r.retire(ctx, log, &c, exists, devices, ports)
	if err != nil || len(devices) == 0 {
		r.busy.reset(req.NamespacedName)
		return ctrl.Result{RequeueAfter: after}, err
	}
	results := make([]result, len(devices))
	for i := range devices {
		if results[i], err = r.device(ctx, log, &c, &devices[i], ports); err != nil {
			return ctrl.Result{}, err
		}
		after = sooner(after, results[i].after)
	}
	return ctrl.Result{RequeueAfter: after}, r.report(ctx, &c, devices, results)
}

// retire deletes the Ports that the claim no longer backs. If the claim itself is gone, or about to go, the garbage
// collector does so; only if it has not after a grace period, because it learns of new kinds late, we do.
func (r *claims) retire(ctx context.Context, log logr.Logger, c *resourceapi.ResourceClaim, exists bool, devices []claim.Device, ports []v1alpha1.XPUPort) (time.Duration, error) {
	var after time.Duration
	for i := range ports {
		port := &ports[i]
		if !port.DeletionTimestamp.IsZero() {
			r.gone.reset(port.UID)
			continue
		}
		current := exists && port.Spec.Claim.UID == c.UID
		if current && slices.ContainsFunc(devices, func(d claim.Device) bool { return claim.PortName(d.ID.Node, d.Function) == port.Name }) {
			continue
		}
		if !current || ending(c) {
			if waited := r.gone.elapsed(port.UID); waited < r.collectGrace {
				after = sooner(after, r.collectGrace-waited)
				continue
			}
		}
		if err := r.deletePort(ctx, log, port, "the claim no longer has the Function"); err != nil {
			return 0, err
		}
		r.gone.reset(port.UID)
	}
	return after, nil
}

// ending says whether the claim is about to go: it is being deleted, or it was generated for a pod and given back, which
// is what happens just before it is deleted. One that is only allocated anew gets its new allocation in an instant.
func ending(c *resourceapi.ResourceClaim) bool {
	owner := metav1.GetControllerOf(c)
	generated := owner != nil && owner.Kind == "Pod"
	return !c.DeletionTimestamp.IsZero() || generated && c.Status.Allocation == nil && len(c.Status.ReservedFor) == 0
}

func (r *claims) deletePort(ctx context.Context, log logr.Logger, port *v1alpha1.XPUPort, why string) error {
	log.Info("deleting XPUPort", "port", client.ObjectKeyFromObject(port), "why", why)
	err := r.client.Delete(ctx, port.DeepCopy(), client.Preconditions{UID: &port.UID})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete XPUPort %s/%s: %w", port.Namespace, port.Name, err)
	}
	return nil
}

// device sees to the Port of one device. Errors are only those worth an immediate retry.
func (r *claims) device(ctx context.Context, log logr.Logger, c *resourceapi.ResourceClaim, d *claim.Device, ports []v1alpha1.XPUPort) (result, error) {
	name := claim.PortName(d.ID.Node, d.Function)
	i := slices.IndexFunc(ports, func(p v1alpha1.XPUPort) bool { return p.Name == name && p.Spec.Claim.UID == c.UID })
	if i >= 0 {
		return r.existing(ctx, log, c, d, &ports[i])
	}
	v, err := r.create(ctx, log, c, d)
	var p *problem
	if !errors.As(err, &p) {
		return v, err
	}
	// Events wake the claim, except when something was only assumed to be taken.
	v.after = assumedFor
	// A Function that just changed hands is no news.
	if p.reason == v1alpha1.ReasonFunctionBusy {
		if waited := r.busy.elapsed(client.ObjectKeyFromObject(c)); waited < r.busyGrace {
			v.after = r.busyGrace - waited
			return v, nil
		}
	}
	v.problem = p
	return v, nil
}

// existing says what came of a Port that the claim has.
func (r *claims) existing(ctx context.Context, log logr.Logger, c *resourceapi.ResourceClaim, d *claim.Device, port *v1alpha1.XPUPort) (result, error) {
	if !port.DeletionTimestamp.IsZero() {
		return result{}, nil // made anew once it is gone
	}
	if port.Annotations[annotationAllocation] != allocationStamp(c) {
		return result{}, r.deletePort(ctx, log, port, "it is of an earlier allocation of the claim")
	}
	r.busy.reset(client.ObjectKeyFromObject(c))
	ready := meta.FindStatusCondition(port.Status.Conditions, v1alpha1.ConditionReady)
	switch {
	case ready == nil:
		return result{}, nil
	case ready.Status == metav1.ConditionTrue || port.Status.BridgePort != "":
		// Once it was up, what happens to it is the Port's own story.
		return result{ready: v1alpha1.ReasonUp}, nil
	case ready.Reason == v1alpha1.ReasonProvisioning:
		return result{}, nil
	}
	v := result{problem: &problem{reason: ready.Reason, message: ready.Message}}
	if !d.BeforeBind || !refused(ready.Reason) {
		return v, nil
	}
	if told := deviceCondition(c, d, v1alpha1.ConditionProvisionFailed); told != nil && told.Status == metav1.ConditionTrue {
		v.failed = true
		return v, nil
	}
	tainted, err := r.isTainted(ctx, d)
	if err != nil {
		return v, err
	}
	// Without the taint the scheduler would pick the same device again.
	if waited := r.tainted.elapsed(port.UID); !tainted && waited < r.taintGrace {
		v.after = taintPause
		return v, nil
	}
	r.tainted.reset(port.UID)
	v.failed = true
	return v, nil
}

// taintPause is how long to wait between looks at the node's ResourceSlices. They are looked at only while a device
// is known to have failed, which is too rare to watch all slices of the cluster for.
const taintPause = 200 * time.Millisecond

// isTainted tells whether the node's agent has published that provisioning of the device failed.
func (r *claims) isTainted(ctx context.Context, d *claim.Device) (bool, error) {
	var found resourceapi.ResourceSliceList
	err := r.live.List(ctx, &found, client.MatchingFields{
		resourceapi.ResourceSliceSelectorDriver:   v1alpha1.GroupName,
		resourceapi.ResourceSliceSelectorNodeName: d.ID.Node,
	})
	if err != nil {
		return false, fmt.Errorf("list ResourceSlices of node %s: %w", d.ID.Node, err)
	}
	offered := false
	for _, slice := range found.Items {
		if slice.Spec.Pool.Name != d.Pool {
			continue
		}
		for _, device := range slice.Spec.Devices {
			if device.Name != d.Name {
				continue
			}
			if slices.ContainsFunc(device.Taints, func(t resourceapi.DeviceTaint) bool { return t.Key == v1alpha1.TaintProvisionFailed }) {
				return true, nil
			}
			offered = true
		}
	}
	// A device that is not offered any more cannot be picked again either.
	return !offered, nil
}

// create makes the Port of a device. A *problem says why it cannot be made now.
func (r *claims) create(ctx context.Context, log logr.Logger, c *resourceapi.ResourceClaim, d *claim.Device) (result, error) {
	name, err := r.builder.network(ctx, d)
	if err != nil {
		return result{}, err
	}
	if name == "" {
		return result{ready: v1alpha1.ReasonNoPortNeeded}, nil
	}
	network, err := r.builder.segment(ctx, d, name)
	if err != nil {
		return result{}, err
	}
	port, err := r.builder.port(ctx, c, d, network)
	if err != nil {
		return result{}, err
	}
	if err := r.allocator.assume(ctx, port, network, d.Interface.Addresses); err != nil {
		return result{}, err
	}
	err = r.client.Create(ctx, port)
	if err == nil {
		log.Info("created XPUPort", "port", client.ObjectKeyFromObject(port), "device", d.Name, "network", name, "xpu", port.Spec.XPU, "addresses", port.Spec.Addresses)
		return result{}, nil
	}
	if apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
		r.allocator.drop(port)
	}
	if apierrors.IsAlreadyExists(err) {
		return result{}, nil // the cache is behind: its event is on the way
	}
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return result{}, nil // the claim goes with its namespace
	}
	if apierrors.IsInvalid(err) {
		return result{}, problemf(v1alpha1.ReasonInvalidConfig, "request %s: %s", d.Request, oneLine(err))
	}
	return result{}, fmt.Errorf("create XPUPort %s/%s: %w", port.Namespace, port.Name, err)
}

// sooner is the smaller of two durations of which 0 means never.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}
