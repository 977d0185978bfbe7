package provision

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/link"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// ports has the XPUs serve XPUPorts. An XPUPort keeps its finalizer until the agent says that the Port is gone.
type ports struct {
	client  client.Client
	clients *Clients
	events  events.EventRecorder
	metrics *metrics
	retries workqueue.TypedRateLimiter[types.NamespacedName]
	turns   *turns

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
	return ctrl.NewControllerManagedBy(mgr).
		Named("xpuport").
		For(&v1alpha1.XPUPort{}, changed).
		Watches(&v1alpha1.XPUNetwork{}, by(portsByNetwork), changed).
		Watches(&v1alpha1.XPU{}, by(portsByXPU), changed).
		WatchesRawSource(r.clients.source(r.onConnection)).
		WatchesRawSource(r.turns.source()).
		WithOptions(controller.Options{MaxConcurrentReconciles: concurrency, RateLimiter: retryLimiter[reconcile.Request]()}).
		Complete(withConflicts(r))
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
		r.turns.forfeit(req)
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !r.turns.take(port.Spec.XPU, req) {
		return ctrl.Result{}, nil
	}
	defer r.turns.done(port.Spec.XPU)
	if !port.DeletionTimestamp.IsZero() {
		return r.release(ctx, &port)
	}
	return r.provision(ctx, &port)
}

// outcome is what an attempt came to. Without a reason nothing is known that would be worth telling.
type outcome struct {
	reason, message string
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
	return result, r.settle(ctx, port, o)
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
	network, err := usableNetwork(ctx, r.client, port.Spec.Network, func(string) {})
	var p *problem
	if errors.As(err, &p) {
		return outcome{reason: p.reason, message: p.message, retry: lastRetry}, nil
	}
	if err != nil {
		return outcome{}, err
	}
	exists, err := r.xpuExists(ctx, port.Spec.XPU)
	if err != nil {
		return outcome{}, err
	}
	if !exists {
		return outcome{reason: v1alpha1.ReasonNoXPU, message: fmt.Sprintf("XPU %s does not exist", port.Spec.XPU)}, nil
	}
	way := r.clients.contact(port.Spec.XPU)
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
	err = r.ensure(ctx, timeout, way.agent, want, network)
	if err == nil {
		r.retries.Forget(key)
		return outcome{reason: v1alpha1.ReasonUp, message: "the xPU serves the Port"}, nil
	}
	ctrl.LoggerFrom(ctx).V(1).Info("the xPU does not serve the Port yet", "xpu", port.Spec.XPU, "error", err.Error())
	reason, slow := reasonOf(err)
	o := outcome{reason: reason, message: fmt.Sprintf("XPU %s: %s", port.Spec.XPU, oneLine(err)), retry: r.retries.When(key)}
	if slow {
		o.retry = lastRetry
	}
	return o, nil
}

func (r *ports) ensure(ctx context.Context, timeout time.Duration, agent Agent, want opi.Port, network *v1alpha1.XPUNetwork) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err := agent.EnsurePort(ctx, want)
	if !errors.Is(err, opi.ErrNetworkMissing) {
		return err
	}
	// Usually it is there. An agent that was just restarted may not have it again yet.
	if err := agent.EnsureNetwork(ctx, opiNetwork(network)); err != nil {
		return err
	}
	return agent.EnsurePort(ctx, want)
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

// settle writes the status if it differs, and tells of bad news.
func (r *ports) settle(ctx context.Context, port *v1alpha1.XPUPort, o outcome) error {
	before := port.DeepCopy()
	status := metav1.ConditionFalse
	if o.reason == v1alpha1.ReasonUp {
		status = metav1.ConditionTrue
		id, err := portID(port)
		if err != nil {
			return err
		}
		port.Status.BridgePort = id
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
	exists, err := r.xpuExists(ctx, port.Spec.XPU)
	if err != nil {
		return ctrl.Result{}, err
	}
	if !exists {
		r.events.Eventf(port, nil, corev1.EventTypeWarning, v1alpha1.ReasonNoXPU, "Release", "XPU %s was deleted, so the Port is taken to be gone with it", port.Spec.XPU)
		return r.done(ctx, log, port)
	}
	way := r.clients.contact(port.Spec.XPU)
	switch way.state {
	case unknown:
		return ctrl.Result{}, nil
	case disconnected:
		return ctrl.Result{}, r.settle(ctx, port, outcome{reason: v1alpha1.ReasonReleasing, message: unreachable(port, way) + "; the Function is free again once it says that the Port is gone"})
	}
	id, err := portID(port)
	if err != nil {
		return r.done(ctx, log, port) // such a Port was never made
	}
	deleteCtx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	if err := way.agent.DeletePort(deleteCtx, id); err != nil && !errors.Is(err, opi.ErrNotFound) {
		return ctrl.Result{RequeueAfter: r.retries.When(client.ObjectKeyFromObject(port))},
			r.settle(ctx, port, outcome{reason: v1alpha1.ReasonReleasing, message: fmt.Sprintf("XPU %s still has the Port: %s", port.Spec.XPU, oneLine(err))})
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

func (r *ports) xpuExists(ctx context.Context, name string) (bool, error) {
	var xpu v1alpha1.XPU
	err := r.client.Get(ctx, client.ObjectKey{Name: name}, &xpu)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("XPU %s: %w", name, err)
	}
	return true, nil
}

func unreachable(port *v1alpha1.XPUPort, way contact) string {
	if way.why != "" {
		return fmt.Sprintf("the OPI agent of XPU %s cannot be reached: %s", port.Spec.XPU, way.why)
	}
	return fmt.Sprintf("the OPI agent of XPU %s cannot be reached", port.Spec.XPU)
}

func portID(port *v1alpha1.XPUPort) (string, error) {
	var sfnum *int
	if port.Spec.Function.Subfunction != nil {
		n := int(*port.Spec.Function.Subfunction)
		sfnum = &n
	}
	return opi.PortID(port.Spec.Function.PCIAddress, sfnum)
}

func opiPort(port *v1alpha1.XPUPort) (opi.Port, error) {
	id, err := portID(port)
	if err != nil {
		return opi.Port{}, err
	}
	mac, err := link.ParseMAC(port.Spec.MAC)
	if err != nil {
		return opi.Port{}, fmt.Errorf("spec.mac: %w", err)
	}
	return opi.Port{ID: id, MAC: mac.HardwareAddr(), Networks: []string{opi.NetworkID(port.Spec.Network)}}, nil
}
