package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// ports has the XPUs serve XPUPorts. An XPUPort keeps its finalizer until the agent says that the Port is gone.
type ports struct {
	client   client.Client
	sessions *sessions
	events   events.EventRecorder
	metrics  *metrics
	retries  workqueue.TypedRateLimiter[types.NamespacedName]
	limiter  *perXPULimiter

	deadline time.Duration // from creation; a Port that never was up by then is refused
	timeout  time.Duration // for what an agent is asked
}

func (r *ports) setup(mgr ctrl.Manager, concurrency int) error {
	by := func(index string) handler.EventHandler {
		return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			return requestsFor(ctx, r.client, &v1alpha1.XPUPortList{}, client.MatchingFields{index: o.GetName()})
		})
	}
	changed := builder.WithPredicates(predicate.GenerationChangedPredicate{})
	comeOrGone := predicate.Funcs{UpdateFunc: func(event.UpdateEvent) bool { return false }}
	return ctrl.NewControllerManagedBy(mgr).
		Named("xpuport").
		For(&v1alpha1.XPUPort{}, changed).
		Watches(&v1alpha1.XPUPort{}, handler.EnqueueRequestsFromMapFunc(r.rivals), builder.WithPredicates(comeOrGone)).
		Watches(&v1alpha1.XPUNetwork{}, by(portsByNetwork), changed).
		Watches(&v1alpha1.XPU{}, by(portsByXPU), changed).
		WatchesRawSource(r.sessions.connections(r.onConnection)).
		WatchesRawSource(r.limiter.source()).
		WithOptions(controller.Options{MaxConcurrentReconciles: concurrency, RateLimiter: retryLimiter[reconcile.Request]()}).
		Complete(withConflicts(r))
}

// rivals are the other Ports of a Port's Function.
func (r *ports) rivals(ctx context.Context, o client.Object) []reconcile.Request {
	port := o.(*v1alpha1.XPUPort)
	of := client.MatchingFields{portsByFunction: functionKey(port.Spec.NodeName, port.Spec.Function)}
	return slices.DeleteFunc(requestsFor(ctx, r.client, &v1alpha1.XPUPortList{}, of), func(request reconcile.Request) bool {
		return request.NamespacedName == client.ObjectKeyFromObject(port)
	})
}

// ahead is the Port of the same Function that comes before this one, nil if none does. There can only be one if a claim
// and an agent made theirs at the same time, or somebody made one by hand: an agent has a single Port for a Function.
func (r *ports) ahead(ctx context.Context, port *v1alpha1.XPUPort) (*v1alpha1.XPUPort, error) {
	all, err := listPorts(ctx, r.client, client.MatchingFields{portsByFunction: functionKey(port.Spec.NodeName, port.Spec.Function)})
	if err != nil {
		return nil, err
	}
	first := port
	for i := range all {
		if all[i].UID != port.UID && comesBefore(&all[i], first) {
			first = &all[i]
		}
	}
	if first == port {
		return nil, nil
	}
	return first, nil
}

// comesBefore prefers the Port that was up, then the older one, and of equals the one whose name sorts first.
func comesBefore(a, b *v1alpha1.XPUPort) bool {
	if up := a.Status.BridgePort != ""; up != (b.Status.BridgePort != "") {
		return up
	}
	if !a.CreationTimestamp.Equal(&b.CreationTimestamp) {
		return a.CreationTimestamp.Before(&b.CreationTimestamp)
	}
	return cmp.Less(client.ObjectKeyFromObject(a).String(), client.ObjectKeyFromObject(b).String())
}

// onConnection has every Port of an agent that came back verified: it may have forgotten them. When an agent goes,
// those that are up stay so, as far as anyone knows.
func (r *ports) onConnection(ctx context.Context, xpu string, up bool) []reconcile.Request {
	all := client.MatchingFields{portsByXPU: xpu}
	if up {
		return requestsFor(ctx, r.client, &v1alpha1.XPUPortList{}, all)
	}
	found, err := listPorts(ctx, r.client, all)
	if err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "listing Ports of an XPU that went away", "xpu", xpu)
	}
	var requests []reconcile.Request
	for i := range found {
		if !found[i].DeletionTimestamp.IsZero() || !meta.IsStatusConditionTrue(found[i].Status.Conditions, v1alpha1.ConditionReady) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&found[i])})
		}
	}
	return requests
}

func (r *ports) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var port v1alpha1.XPUPort
	if err := r.client.Get(ctx, req.NamespacedName, &port); err != nil {
		r.retries.Forget(req.NamespacedName)
		r.limiter.cancel(req)
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !r.limiter.take(port.Spec.XPU, req) {
		return ctrl.Result{}, nil
	}
	defer r.limiter.done(port.Spec.XPU)
	if !port.DeletionTimestamp.IsZero() {
		return r.release(ctx, &port)
	}
	return r.provision(ctx, &port)
}

// outcome is what an attempt came to. Without a reason nothing is known that would be worth telling.
type outcome struct {
	reason, message string
	mtu             int32         // of the network, in bytes; only with ReasonUp
	retry           time.Duration // 0: an event will come
}

func (r *ports) provision(ctx context.Context, port *v1alpha1.XPUPort) (ctrl.Result, error) {
	o, err := r.attempt(ctx, port)
	if err != nil {
		return ctrl.Result{}, err
	}
	everUp := port.Status.BridgePort != ""
	result := ctrl.Result{RequeueAfter: o.retry}
	if everUp && o.reason == v1alpha1.ReasonXPUUnavailable {
		return result, nil // as far as anyone knows the xPU still serves it; the XPU's status tells of the agent
	}
	if !everUp && o.reason != v1alpha1.ReasonUp && !refused(o.reason) {
		if left := r.left(port); left > 0 {
			result.RequeueAfter = sooner(o.retry, left)
		} else {
			o = outcome{reason: v1alpha1.ReasonFailed, message: fmt.Sprintf("not up %s after its creation: %s", r.deadline, cmp.Or(o.message, "XPU "+port.Spec.XPU+" is not connected"))}
		}
	}
	if o.reason == "" {
		return result, nil
	}
	return result, r.updateStatus(ctx, port, o)
}

// left is the time until a Port that never was up is refused; 0 or less if it is past, or if the Port was up.
func (r *ports) left(port *v1alpha1.XPUPort) time.Duration {
	if port.Status.BridgePort != "" {
		return 0
	}
	return time.Until(port.CreationTimestamp.Add(r.deadline))
}

// attempt has the agent serve the Port. Only errors of the API server are errors.
func (r *ports) attempt(ctx context.Context, port *v1alpha1.XPUPort) (outcome, error) {
	key := client.ObjectKeyFromObject(port)
	first, err := r.ahead(ctx, port)
	if err != nil {
		return outcome{}, err
	}
	if first != nil {
		p := busy(first)
		return outcome{reason: p.reason, message: p.message}, nil
	}
	network, err := usableNetwork(ctx, r.client, port.Spec.Network)
	var p *problem
	if errors.As(err, &p) {
		return outcome{reason: p.reason, message: p.message, retry: lastRetry}, nil
	}
	if err != nil {
		return outcome{}, err
	}
	xpu, err := r.xpu(ctx, port.Spec.XPU)
	if err != nil {
		return outcome{}, err
	}
	if xpu == nil {
		return outcome{reason: v1alpha1.ReasonNoXPU, message: fmt.Sprintf("XPU %s does not exist", port.Spec.XPU)}, nil
	}
	if foreign(port, xpu) {
		return outcome{
			reason:  v1alpha1.ReasonNoXPU,
			message: fmt.Sprintf("XPU %s is that of node %s, not of node %s", xpu.Name, xpu.Spec.NodeName, port.Spec.NodeName),
		}, nil
	}
	way := r.sessions.connection(port.Spec.XPU)
	switch way.state {
	case unknown:
		return outcome{}, nil
	case disconnected:
		return outcome{reason: v1alpha1.ReasonXPUUnavailable, message: unreachable(port, way)}, nil
	}
	want, err := opiPort(port)
	if err != nil {
		return outcome{reason: v1alpha1.ReasonFailed, message: oneLine(err)}, nil
	}
	timeout := r.timeout
	if left := r.left(port); left > 0 {
		timeout = min(timeout, left)
	}
	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err = way.agent.EnsurePort(bounded, want, opiNetwork(network))
	if err == nil {
		r.retries.Forget(key)
		return outcome{reason: v1alpha1.ReasonUp, message: "the xPU serves the Port", mtu: ptr.Deref(network.Spec.MTU, 0)}, nil
	}
	ctrl.LoggerFrom(ctx).V(1).Info("the xPU does not serve the Port yet", "xpu", port.Spec.XPU, "error", err.Error())
	reason, slow := reasonOf(err)
	o := outcome{reason: reason, message: fmt.Sprintf("XPU %s: %s", port.Spec.XPU, oneLine(err)), retry: r.retries.When(key)}
	if slow {
		o.retry = lastRetry
	}
	return o, nil
}

// reasonOf is the reason for a failure, and whether trying again soon is of no use.
func reasonOf(err error) (reason string, slow bool) {
	switch {
	case errors.Is(err, opi.ErrUnavailable):
		return v1alpha1.ReasonXPUUnavailable, false
	case errors.Is(err, opi.ErrTimeout):
		return v1alpha1.ReasonProvisioning, false
	case errors.Is(err, opi.ErrNetworkMissing):
		return v1alpha1.ReasonNetworkNotReady, false
	case errors.Is(err, opi.ErrConflict):
		return v1alpha1.ReasonConflict, true
	case errors.Is(err, opi.ErrInvalid), errors.Is(err, opi.ErrUnsupported):
		return v1alpha1.ReasonFailed, true
	}
	return v1alpha1.ReasonFailed, false
}

// updateStatus writes the status if it differs, and tells of bad news.
func (r *ports) updateStatus(ctx context.Context, port *v1alpha1.XPUPort, o outcome) error {
	before := port.DeepCopy()
	status := metav1.ConditionFalse
	if o.reason == v1alpha1.ReasonUp {
		status = metav1.ConditionTrue
		id, err := portID(port)
		if err != nil {
			return err
		}
		port.Status.BridgePort, port.Status.MTU = id, o.mtu
	}
	setReady(&port.Status.Conditions, port.Generation, status, o.reason, o.message)
	if equality.Semantic.DeepEqual(port.Status, before.Status) {
		return nil
	}
	if err := patchStatus(ctx, r.client, port, before); err != nil {
		return err
	}
	log := ctrl.LoggerFrom(ctx)
	if status == metav1.ConditionTrue {
		log.Info("XPUPort is up", "xpu", port.Spec.XPU, "bridgePort", port.Status.BridgePort)
		if before.Status.BridgePort == "" {
			r.metrics.provisioned(port)
		}
		return nil
	}
	was := meta.FindStatusCondition(before.Status.Conditions, v1alpha1.ConditionReady)
	if was == nil || was.Reason != o.reason {
		log.Info("XPUPort is not up", "xpu", port.Spec.XPU, "reason", o.reason, "message", o.message)
		r.events.Eventf(port, nil, corev1.EventTypeWarning, o.reason, "Provision", "%s", o.message)
	}
	return nil
}

// release takes the Port from its xPU, and lets go of the XPUPort once the agent says that it is gone.
func (r *ports) release(ctx context.Context, port *v1alpha1.XPUPort) (ctrl.Result, error) {
	if !controllerutil.ContainsFinalizer(port, v1alpha1.FinalizerPort) {
		return ctrl.Result{}, nil
	}
	log := ctrl.LoggerFrom(ctx)
	first, err := r.ahead(ctx, port)
	if err != nil {
		return ctrl.Result{}, err
	}
	if first != nil {
		return r.done(ctx, log, port) // what the agent has is the other's
	}
	xpu, err := r.xpu(ctx, port.Spec.XPU)
	if err != nil {
		return ctrl.Result{}, err
	}
	if xpu != nil && foreign(port, xpu) && port.Status.BridgePort == "" {
		return r.done(ctx, log, port) // the XPU never had it; what it has by this id is its own node's
	}
	if xpu == nil {
		r.events.Eventf(port, nil, corev1.EventTypeWarning, v1alpha1.ReasonNoXPU, "Release", "XPU %s was deleted, so the Port is taken to be gone with it", port.Spec.XPU)
		return r.done(ctx, log, port)
	}
	way := r.sessions.connection(port.Spec.XPU)
	switch way.state {
	case unknown:
		return ctrl.Result{}, nil
	case disconnected:
		return ctrl.Result{}, r.updateStatus(ctx, port, outcome{reason: v1alpha1.ReasonReleasing, message: unreachable(port, way) + "; the Function is free again once it says that the Port is gone"})
	}
	id, err := portID(port)
	if err != nil {
		return r.done(ctx, log, port) // such a Port was never made
	}
	deleteCtx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	if err := way.agent.DeletePort(deleteCtx, id); err != nil {
		return ctrl.Result{RequeueAfter: r.retries.When(client.ObjectKeyFromObject(port))},
			r.updateStatus(ctx, port, outcome{reason: v1alpha1.ReasonReleasing, message: fmt.Sprintf("XPU %s still has the Port: %s", port.Spec.XPU, oneLine(err))})
	}
	return r.done(ctx, log, port)
}

func (r *ports) done(ctx context.Context, log logr.Logger, port *v1alpha1.XPUPort) (ctrl.Result, error) {
	before := port.DeepCopy()
	controllerutil.RemoveFinalizer(port, v1alpha1.FinalizerPort)
	if err := patch(ctx, r.client, port, before); err != nil {
		return ctrl.Result{}, fmt.Errorf("finalizer of %w", err)
	}
	r.retries.Forget(client.ObjectKeyFromObject(port))
	log.Info("XPUPort is released", "xpu", port.Spec.XPU)
	return ctrl.Result{}, nil
}

// xpu is nil if there is none of this name.
func (r *ports) xpu(ctx context.Context, name string) (*v1alpha1.XPU, error) {
	var xpu v1alpha1.XPU
	err := r.client.Get(ctx, client.ObjectKey{Name: name}, &xpu)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("XPU %s: %w", name, err)
	}
	return &xpu, nil
}

// foreign says whether the Port asks for the XPU of another node. Functions of two nodes can have the same address, and so
// their ports the same id: an agent that names another node's XPU would get hold of that node's ports.
func foreign(port *v1alpha1.XPUPort, xpu *v1alpha1.XPU) bool {
	return port.Spec.NodeName != xpu.Spec.NodeName
}

func unreachable(port *v1alpha1.XPUPort, way connection) string {
	if way.why != "" {
		return fmt.Sprintf("the OPI agent of XPU %s cannot be reached: %s", port.Spec.XPU, way.why)
	}
	return fmt.Sprintf("the OPI agent of XPU %s cannot be reached", port.Spec.XPU)
}

func portID(port *v1alpha1.XPUPort) (string, error) {
	return opi.PortID(claim.FunctionOf(port.Spec.Function))
}

func opiPort(port *v1alpha1.XPUPort) (opi.Port, error) {
	mac, err := function.ParseMAC(port.Spec.MAC)
	if err != nil {
		return opi.Port{}, fmt.Errorf("spec.mac: %w", err)
	}
	return opi.FunctionPort(claim.FunctionOf(port.Spec.Function), mac, port.Spec.Network)
}
