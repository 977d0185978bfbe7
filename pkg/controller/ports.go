package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// ports has the XPUs serve XPUPorts. An XPUPort keeps its finalizer until the agent says that the Port is gone.
type ports struct {
	base
	retries workqueue.TypedRateLimiter[reconcile.Request]
	limiter *perXPULimiter
}

func (r *ports) setup(mgr ctrl.Manager) error {
	by := func(index string) handler.EventHandler {
		return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			return r.requests(ctx, &v1alpha1.XPUPortList{}, client.MatchingFields{index: o.GetName()})
		})
	}
	return newController(mgr, "xpuport", r.Concurrency).
		For(&v1alpha1.XPUPort{}, whenSpecChanged).
		Watches(&v1alpha1.XPUPort{}, handler.EnqueueRequestsFromMapFunc(r.rivals), whenMadeOrGone).
		Watches(&v1alpha1.XPUNetwork{}, by(portsByNetwork), whenSpecChanged).
		Watches(&v1alpha1.XPU{}, by(portsByXPU), whenSpecChanged).
		WatchesRawSource(r.sessions.source(r.onChange)).
		WatchesRawSource(r.limiter.source()).
		Complete(withConflicts(r))
}

// sameFunction selects the Ports of a Port's Function, that Port included.
func sameFunction(port *v1alpha1.XPUPort) client.MatchingFields {
	return client.MatchingFields{portsByFunction: functionKey(port.Spec.NodeName, port.Spec.Function)}
}

// rivals are the other Ports of a Port's Function.
func (r *ports) rivals(ctx context.Context, o client.Object) []reconcile.Request {
	all := r.requests(ctx, &v1alpha1.XPUPortList{}, sameFunction(o.(*v1alpha1.XPUPort)))
	return slices.DeleteFunc(all, func(request reconcile.Request) bool { return request == requestFor(o) })
}

// ahead is the Port of the same Function that comes before this one, nil if none does. There can only be one if a claim
// and an agent made theirs at the same time, or somebody made one by hand: an agent has a single Port for a Function.
func (r *ports) ahead(ctx context.Context, port *v1alpha1.XPUPort) (*v1alpha1.XPUPort, error) {
	all, err := listPorts(ctx, r.client, sameFunction(port))
	if err != nil {
		return nil, err
	}
	var first *v1alpha1.XPUPort
	for i := range all {
		if all[i].UID != port.UID && comesBefore(&all[i], cmp.Or(first, port)) {
			first = &all[i]
		}
	}
	return first, nil
}

// comesBefore prefers the Port that was up, then the older one.
func comesBefore(a, b *v1alpha1.XPUPort) bool {
	if up := a.Status.BridgePort != ""; up != (b.Status.BridgePort != "") {
		return up
	}
	return older(a, b)
}

// onChange has every Port of an agent that came back verified: it may have forgotten them. When an agent goes, those
// that are up stay so, as far as anyone knows.
func (r *ports) onChange(ctx context.Context, xpu string, c change) []reconcile.Request {
	if c == healthChanged {
		return nil
	}
	found, err := listPorts(ctx, r.client, client.MatchingFields{portsByXPU: xpu})
	if err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "listing Ports of an XPU", "xpu", xpu)
	}
	var requests []reconcile.Request
	for i := range found {
		up := meta.IsStatusConditionTrue(found[i].Status.Conditions, v1alpha1.ConditionReady)
		if c == cameUp || !up || !found[i].DeletionTimestamp.IsZero() {
			requests = append(requests, requestFor(&found[i]))
		}
	}
	return requests
}

func (r *ports) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var port v1alpha1.XPUPort
	if err := r.client.Get(ctx, req.NamespacedName, &port); err != nil {
		r.retries.Forget(req)
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

// provision has the agent serve the Port, and says in the Port's status what came of it.
func (r *ports) provision(ctx context.Context, port *v1alpha1.XPUPort) (ctrl.Result, error) {
	before := port.DeepCopy()
	err := r.ensure(ctx, port)
	if err == nil {
		return ctrl.Result{}, r.updateStatus(ctx, port, before, v1alpha1.ReasonUp, "the xPU serves the Port")
	}
	p, ok := errors.AsType[*problem](err)
	if !ok {
		return ctrl.Result{}, err
	}
	result := ctrl.Result{RequeueAfter: p.retry}
	everUp := port.Status.BridgePort != ""
	if everUp && p.reason == v1alpha1.ReasonXPUUnavailable {
		return result, nil // as far as anyone knows the xPU still serves it; the XPU's status tells of the agent
	}
	if !everUp && !refused(p.reason) {
		if left := r.left(port); left > 0 {
			result.RequeueAfter = smaller(p.retry, left)
		} else {
			p = problemf(v1alpha1.ReasonFailed, "not up %s after its creation: %s",
				r.ProvisionTimeout, cmp.Or(p.message, "XPU "+port.Spec.XPU+" is not connected"))
		}
	}
	if p.reason == "" {
		return result, nil
	}
	return result, r.updateStatus(ctx, port, before, p.reason, p.message)
}

// left is the time until a Port that never was up is refused; 0 or less if it is past, or if the Port was up.
func (r *ports) left(port *v1alpha1.XPUPort) time.Duration {
	if port.Status.BridgePort != "" {
		return 0
	}
	return time.Until(port.CreationTimestamp.Add(r.ProvisionTimeout))
}

// ensure has the agent serve the Port, and then sets the Port's status. A *problem says why the agent does not; one
// without a reason means that nothing is known yet. Other errors are those of the API server.
func (r *ports) ensure(ctx context.Context, port *v1alpha1.XPUPort) error {
	first, err := r.ahead(ctx, port)
	if err != nil {
		return err
	}
	if first != nil {
		return busy(first)
	}
	network, err := usableNetwork(ctx, r.client, port.Spec.Network)
	if p, ok := errors.AsType[*problem](err); ok {
		p.retry = lastRetry
	}
	if err != nil {
		return err
	}
	xpu, err := r.xpu(ctx, port.Spec.XPU)
	switch {
	case err != nil:
		return err
	case xpu == nil:
		return problemf(v1alpha1.ReasonNoXPU, "XPU %s does not exist", port.Spec.XPU)
	case foreign(port, xpu):
		return problemf(v1alpha1.ReasonNoXPU,
			"XPU %s is that of node %s, not of node %s", xpu.Name, xpu.Spec.NodeName, port.Spec.NodeName)
	}
	agent, p := r.agent(port.Spec.XPU)
	if p != nil {
		return p
	}
	want, err := opiPort(port)
	if err != nil {
		return problemf(v1alpha1.ReasonFailed, "%s", oneLine(err))
	}
	timeout := r.AgentTimeout
	if left := r.left(port); left > 0 {
		timeout = min(timeout, left)
	}
	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := agent.EnsurePort(bounded, want, opiNetwork(network)); err != nil {
		ctrl.LoggerFrom(ctx).V(1).Info("the xPU does not serve the Port yet", "xpu", port.Spec.XPU, "error", err.Error())
		return r.failure(port, err)
	}
	r.retries.Forget(requestFor(port))
	port.Status.BridgePort, port.Status.MTU = want.ID, ptr.Deref(network.Spec.MTU, 0)
	return nil
}

// failure is the problem for an error of the agent. A Port that the agent refuses is not tried again soon.
func (r *ports) failure(port *v1alpha1.XPUPort, err error) *problem {
	p := problemf(v1alpha1.ReasonFailed, "XPU %s: %s", port.Spec.XPU, oneLine(err))
	p.retry = r.retries.When(requestFor(port))
	switch {
	case errors.Is(err, opi.ErrUnavailable):
		p.reason = v1alpha1.ReasonXPUUnavailable
	case errors.Is(err, opi.ErrTimeout):
		p.reason = v1alpha1.ReasonProvisioning
	case errors.Is(err, opi.ErrNetworkMissing):
		p.reason = v1alpha1.ReasonNetworkNotReady
	case errors.Is(err, opi.ErrConflict):
		p.reason, p.retry = v1alpha1.ReasonConflict, lastRetry
	case errors.Is(err, opi.ErrInvalid), errors.Is(err, opi.ErrUnsupported):
		p.retry = lastRetry
	}
	return p
}

// updateStatus sets the Ready condition and writes the status, if it differs from before.
func (r *ports) updateStatus(ctx context.Context, port, before *v1alpha1.XPUPort, reason, message string) error {
	news, err := r.setReady(ctx, port, before, &port.Status.Conditions, reason, message)
	if err != nil || !news {
		return err
	}
	log := ctrl.LoggerFrom(ctx).WithValues("xpu", port.Spec.XPU)
	if reason != v1alpha1.ReasonUp {
		log.Info("XPUPort is not up", "reason", reason, "message", message)
		return nil
	}
	log.Info("XPUPort is up", "bridgePort", port.Status.BridgePort)
	if before.Status.BridgePort == "" {
		r.metrics.provisioned(port)
	}
	return nil
}

// release takes the Port from its xPU, and lets go of the XPUPort once the agent says that it is gone.
func (r *ports) release(ctx context.Context, port *v1alpha1.XPUPort) (ctrl.Result, error) {
	if !controllerutil.ContainsFinalizer(port, v1alpha1.FinalizerPort) {
		return ctrl.Result{}, nil
	}
	err := r.remove(ctx, port)
	p, isProblem := errors.AsType[*problem](err)
	switch {
	case isProblem && p.reason == "":
		return ctrl.Result{}, nil
	case isProblem:
		return ctrl.Result{RequeueAfter: p.retry}, r.updateStatus(ctx, port, port.DeepCopy(), v1alpha1.ReasonReleasing, p.message)
	case err != nil:
		return ctrl.Result{}, err
	}
	if err := r.changeFinalizer(ctx, port, controllerutil.RemoveFinalizer, v1alpha1.FinalizerPort); err != nil {
		return ctrl.Result{}, err
	}
	r.retries.Forget(requestFor(port))
	ctrl.LoggerFrom(ctx).Info("XPUPort is released", "xpu", port.Spec.XPU)
	return ctrl.Result{}, nil
}

// remove has the agent delete the Port. Its errors are like those of ensure.
func (r *ports) remove(ctx context.Context, port *v1alpha1.XPUPort) error {
	first, err := r.ahead(ctx, port)
	if err != nil || first != nil {
		return err // what the agent has is the other's
	}
	xpu, err := r.xpu(ctx, port.Spec.XPU)
	if err != nil {
		return err
	}
	if xpu == nil {
		r.events.Eventf(port, nil, corev1.EventTypeWarning, v1alpha1.ReasonNoXPU, "Release",
			"XPU %s was deleted, so the Port is taken to be gone with it", port.Spec.XPU)
		return nil
	}
	if foreign(port, xpu) && port.Status.BridgePort == "" {
		return nil // the XPU never had it; what it has by this id is its own node's
	}
	agent, p := r.agent(port.Spec.XPU)
	if p != nil {
		p.message += "; the Function is free again once it says that the Port is gone"
		return p
	}
	id, err := opi.PortID(claim.FunctionOf(port.Spec.Function))
	if err != nil {
		return nil // such a Port was never made
	}
	bounded, cancel := context.WithTimeout(ctx, r.AgentTimeout)
	defer cancel()
	if err := agent.DeletePort(bounded, id); err != nil {
		p := problemf(v1alpha1.ReasonReleasing, "XPU %s still has the Port: %s", port.Spec.XPU, oneLine(err))
		p.retry = r.retries.When(requestFor(port))
		return p
	}
	return nil
}

// agent is the session with the agent of the XPU, or the problem why it cannot be asked. A problem without a reason
// means that this is not known yet.
func (r *ports) agent(xpu string) (*opi.Session, *problem) {
	way := r.sessions.connection(xpu)
	switch {
	case way.state == connected:
		return way.agent, nil
	case way.state == unknown:
		return nil, &problem{}
	case way.refusal != "":
		return nil, problemf(v1alpha1.ReasonXPUUnavailable, "the OPI agent of XPU %s cannot be reached: %s", xpu, way.refusal)
	}
	return nil, problemf(v1alpha1.ReasonXPUUnavailable, "the OPI agent of XPU %s cannot be reached", xpu)
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

func opiPort(port *v1alpha1.XPUPort) (opi.Port, error) {
	mac, err := function.ParseMAC(port.Spec.MAC)
	if err != nil {
		return opi.Port{}, fmt.Errorf("spec.mac: %w", err)
	}
	return opi.FunctionPort(claim.FunctionOf(port.Spec.Function), mac, port.Spec.Network)
}
