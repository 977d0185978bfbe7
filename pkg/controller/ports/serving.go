// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/addresses"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/networks"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/sessions"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/xpus"
	"github.com/opiproject/xpu-device-plugin/pkg/keylock"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/optional"
	"github.com/opiproject/xpu-device-plugin/pkg/queue"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
)

// Options configure the reconciler that has OPI agents serve XPUPorts, and the comparison with what
// agents have.
type Options struct {
	// Infra is whether the XPUPorts were admitted in the clusters of tenants.
	Infra bool
	// Installation marks the ports and networks of this cluster at OPI agents.
	Installation opi.Installation
	// Namespace contains the XPUPorts of node agents.
	Namespace string

	// Ports are the XPUPorts to be served.
	Ports *model.Ports
	// Allocator has the addresses of XPUPorts. It is nil where another cluster assigns them.
	Allocator *addresses.Allocator
	// Catalog finds out whether a network can be used.
	Catalog networks.Catalog
	// Sessions reach the OPI agents.
	Sessions *sessions.Sessions
	// AgentPorts knows the port that an agent must have for an XPUPort.
	AgentPorts xpus.AgentPorts
	// Bridges are woken if an agent does not have their network.
	Bridges *networks.Bridges

	// Provisioning observes the seconds from the creation of an XPUPort until it is up.
	Provisioning prometheus.Observer
	// Orphans counts the deleted orphans, by XPU and kind.
	Orphans *prometheus.CounterVec
	// Tracer records the stages of XPUPorts. It may be nil.
	Tracer *tracing.Tracer

	// ProvisionTimeout is how long after its creation an XPUPort that never was up is refused.
	ProvisionTimeout time.Duration
	// AgentTimeout bounds the calls to an OPI agent for one object.
	AgentTimeout time.Duration
	// OrphanGrace is how long an OPI agent keeps a port or network that no object wants.
	OrphanGrace time.Duration
	// ResyncPeriod is the least time between two comparisons with what an OPI agent has.
	ResyncPeriod time.Duration
	// Concurrency is how many XPUPorts are reconciled at once, and ConcurrencyPerXPU how many of
	// one XPU.
	Concurrency, ConcurrencyPerXPU int
}

// Setup adds the reconcilers that have OPI agents serve XPUPorts to the manager.
func Setup(mgr ctrl.Manager, cluster reconciling.Cluster, o Options) error {
	serving := &reconciler{
		Cluster: cluster, Options: o,
		siblings: siblings{ports: o.Ports, namespace: o.Namespace, infra: o.Infra},
		deadline: deadline(o.ProvisionTimeout),
		turns:    queue.NewTurns[reconcile.Request](o.ConcurrencyPerXPU),
		retries:  reconciling.RetryLimiter[reconcile.Request](),
	}
	resyncs := &resyncs{
		Cluster: cluster, Options: o, serving: serving,
		retries: reconciling.RetryLimiter[reconcile.Request](),
	}
	return errors.Join(serving.setup(mgr), resyncs.setup(mgr))
}

// reconciler has OPI agents serve admitted XPUPorts. An XPUPort keeps its finalizer until the agent
// confirms that the port is gone.
type reconciler struct {
	reconciling.Cluster
	Options
	siblings siblings
	deadline deadline
	retries  workqueue.TypedRateLimiter[reconcile.Request]
	turns    *queue.Turns[reconcile.Request] // by XPU
	// functions are locks by [model.FunctionKey], which are held while a port is created or
	// deleted.
	functions keylock.Locks[string]
	wakeups   queue.Wakeups[reconcile.Request] // by what compares them with what their agents have
	seen      reconciling.Durations[types.UID] // since when Ports are known that are not up yet
}

func (r *reconciler) setup(mgr ctrl.Manager) error {
	enqueue := handler.EnqueueRequestsFromMapFunc
	onNetwork := func(ctx context.Context, network client.Object) []reconcile.Request {
		return r.Ports.RequestsBy(ctx, model.ByNetwork, network.GetName())
	}
	onXPU := func(ctx context.Context, xpu client.Object) []reconcile.Request {
		return r.Ports.RequestsBy(ctx, model.ByXPU, xpu.GetName())
	}

	return reconciling.NewController(mgr, "xpuport", r.Concurrency).
		WatchesRawSource(model.Source(r.Ports, r.portChanged)).
		Watches(&v1alpha1.XPUNetwork{}, enqueue(onNetwork), reconciling.WhenSpecChanged).
		Watches(&v1alpha1.XPU{}, enqueue(onXPU), xpus.WhenServing).
		WatchesRawSource(sessions.Source(r.Sessions, sessions.ConnectionChanged, r.waiting)).
		WatchesRawSource(sessions.Source(r.Sessions, sessions.HealthChanged, r.waitingForLost)).
		WatchesRawSource(r.wakeups.Source()).
		WatchesRawSource(r.turns.Source()).
		Complete(r.Guarded(r))
}

// waiting returns the Ports of an XPU that wait for its agent. Ports that are up are not among
// them, because resyncs compares them with the agent's ports.
func (r *reconciler) waiting(ctx context.Context, xpu string) []reconcile.Request {
	all, err := r.Ports.By(ctx, model.ByXPU, xpu)
	if err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "listing objects to reconcile")
	}

	var requests []reconcile.Request
	for _, port := range all {
		if !isReady(port) || !port.DeletionTimestamp.IsZero() {
			requests = append(requests, reconciling.RequestFor(port))
		}
	}

	return requests
}

// waitingForLost returns the waiting Ports of an XPU whose agent is lost, because an abandoned XPU
// releases its Ports once the agent counts as lost.
func (r *reconciler) waitingForLost(ctx context.Context, xpu string) []reconcile.Request {
	if !r.Sessions.Connection(xpu).Lost() {
		return nil
	}
	return r.waiting(ctx, xpu)
}

func isReady(port *v1alpha1.XPUPort) bool {
	return v1alpha1.ReadyOf(port.Status.Conditions).Status == metav1.ConditionTrue
}

func (r *reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	found, err := r.Ports.Get(ctx, req.NamespacedName)
	if found == nil || err != nil {
		r.retries.Forget(req)
		r.turns.Done(req)
		return ctrl.Result{}, err
	}

	port := found.DeepCopy()
	if !r.turns.Take(port.Spec.XPU, req) {
		return ctrl.Result{}, nil
	}
	defer r.turns.Done(req)

	// A reconciler that waited for the lock finds the other Port of the Function in the model.
	unlock, err := r.functions.Lock(ctx, model.FunctionKeyOf(port))
	if err != nil {
		return ctrl.Result{}, err
	}
	defer unlock()

	if port.DeletionTimestamp.IsZero() {
		if port.Status.BridgePort == "" {
			r.seen.Elapsed(port.UID)
		}
		if !r.Infra && !isAdmitted(port) {
			return ctrl.Result{}, nil // an event comes once it is admitted
		}

		if err := reconciling.ChangeFinalizer(ctx, r.Client, port, controllerutil.AddFinalizer,
			v1alpha1.FinalizerPort); err != nil {
			return ctrl.Result{}, err
		}

		before := port.DeepCopy()
		up, err := r.ensure(ctx, port)
		if !up {
			return r.notUp(ctx, port, before, err)
		}
		return r.conclude(ctx, port, before, nil)
	}

	r.seen.Reset(port.UID)
	if isReleased(port) {
		return ctrl.Result{}, letGo(ctx, r.Client, port)
	}
	if gone, err := r.remove(ctx, port); err != nil {
		return r.conclude(ctx, port, port.DeepCopy(), err)
	} else if !gone {
		return ctrl.Result{}, nil // an event comes once the agent's state is known
	}
	if err := letGo(ctx, r.Client, port); err != nil {
		return ctrl.Result{}, err
	}

	r.retries.Forget(req)
	ctrl.LoggerFrom(ctx).Info("XPUPort is released", "xpu", port.Spec.XPU)

	return ctrl.Result{}, nil
}

// notUp reports why the agent does not serve the Port. err is nil while nothing is known. A Port
// that was up stays up while its agent is away, because the XPU's status reports the agent.
func (r *reconciler) notUp(
	ctx context.Context, port, before *v1alpha1.XPUPort, err error,
) (ctrl.Result, error) {
	refusal, refused := errors.AsType[*reconciling.Refusal](err)
	switch left := r.deadline.left(port); {
	case err == nil && (left > 0 || !isAwaited(port)):
		return ctrl.Result{RequeueAfter: left}, nil
	case err == nil:
		err = r.deadline.late("XPU " + port.Spec.XPU + " is not connected")
	case refused && refusal.Reason == v1alpha1.ReasonXPUUnavailable &&
		port.Status.BridgePort != "":
		return ctrl.Result{RequeueAfter: refusal.Pause}, nil
	}
	return r.conclude(ctx, port, before, r.deadline.apply(port, err))
}

// conclude reports the outcome of an attempt to serve or to remove the Port in the status, the log
// and the metrics.
func (r *reconciler) conclude(
	ctx context.Context, port, before *v1alpha1.XPUPort, err error,
) (ctrl.Result, error) {
	result, err := r.Conclude(ctx, port, before, &port.Status.Conditions,
		"the xPU serves the Port", err)
	ready := v1alpha1.ReadyOf(port.Status.Conditions)
	if err != nil || ready.Reason == v1alpha1.ReadyOf(before.Status.Conditions).Reason {
		return result, err
	}

	log := ctrl.LoggerFrom(ctx).WithValues("xpu", port.Spec.XPU)
	if ready.Status != metav1.ConditionTrue {
		log.Info("XPUPort is not up", "reason", ready.Reason, "message", ready.Message)
		return result, nil
	}

	log.Info("XPUPort is up", "bridgePort", port.Status.BridgePort)
	if before.Status.BridgePort == "" && !port.Spec.Ahead && port.Status.Predecessor == "" {
		took := r.sinceMade(port)
		r.Provisioning.Observe(took.Seconds())
		r.Tracer.Whole(ctx, traced(port), "claim to Ready", time.Now().Add(-took),
			TraceAttributes(port)...)
	}

	r.seen.Reset(port.UID)
	return result, nil
}

// sinceMade returns the age of a Port, or up to a second less. The creation time has whole seconds,
// so that the time since the Port was first seen is more precise. That time is too short if the
// controller started after the Port was created.
func (r *reconciler) sinceMade(port *v1alpha1.XPUPort) time.Duration {
	return max(r.seen.Elapsed(port.UID), time.Since(port.CreationTimestamp.Time)-time.Second)
}

// ensure has the agent serve the Port, and then sets the Port's status. A refusal says why the
// agent does not serve it. Other errors come from the API server. up is false without an error if
// nothing is known yet; an event will come then.
func (r *reconciler) ensure(ctx context.Context, port *v1alpha1.XPUPort) (up bool, err error) {
	before, err := r.siblings.preferred(ctx, port)
	if err != nil {
		return false, err
	}

	switch {
	case before != nil && port.Spec.Ahead:
		return false, nil // the reconciler of admissions deletes it
	case before != nil:
		return false, addresses.Busy(before)
	}

	joined, err := r.networksOf(ctx, port)
	if err != nil {
		return false, err
	}

	xpu, err := r.xpuOf(ctx, port)
	if err != nil {
		return false, err
	}
	if err := r.check(ctx, port, joined, xpu); err != nil {
		return false, err
	}

	if err := xpus.CheckOwnMAC(ctx, r.Client, xpu, port); err != nil && port.Status.BridgePort == "" {
		return false, err
	}

	agent, err := r.serve(ctx, port, joined, xpu)
	if err != nil || agent == nil {
		return false, err
	}

	r.report(port, joined, agent)
	port.Status.Pod = cmp.Or(port.Status.Pod, port.Spec.Claim.Pod,
		ptr.Deref(port.Spec.Pod, v1alpha1.PodRef{}).Name)

	return true, nil
}

// networksOf returns the networks of a Port. A refusal names the first one that cannot be used.
func (r *reconciler) networksOf(
	ctx context.Context, port *v1alpha1.XPUPort,
) (joined []*v1alpha1.XPUNetwork, err error) {
	for _, name := range port.Spec.AllNetworks() {
		network, err := r.Catalog.Usable(ctx, name)
		if err != nil {
			return nil, err
		}
		joined = append(joined, network)
	}
	return joined, nil
}

// report sets what the Port's status has of the networks that the agent serves.
func (r *reconciler) report(
	port *v1alpha1.XPUPort, joined []*v1alpha1.XPUNetwork, agent *opi.Session,
) {
	mtu := func(network *v1alpha1.XPUNetwork) int32 {
		return ptr.Deref(network.Spec.MTU, int32(agent.MTU(r.Installation.NetworkID(network.Name))))
	}
	if !port.Spec.IsTrunk() {
		port.Status.MTU, port.Status.Addresses = mtu(joined[0]), addresses.Of(port)
		return
	}

	port.Status.MTU, port.Status.Networks = mtu(joined[0]), nil
	for i, network := range joined {
		own := mtu(network)
		port.Status.Networks = append(port.Status.Networks, v1alpha1.XPUPortNetworkStatus{
			Name: network.Name, VLAN: network.Spec.VLAN, MTU: own,
			Addresses: port.Spec.Networks[i].Addresses,
		})
		port.Status.MTU = optional.Max(port.Status.MTU, own)
	}
}

// wantedPort returns the port that the agent must have, with the addresses in each network.
func (r *reconciler) wantedPort(
	ctx context.Context, port *v1alpha1.XPUPort, joined []*v1alpha1.XPUNetwork, xpu *v1alpha1.XPU,
) (opi.Port, error) {
	want, err := r.AgentPorts.Of(port, xpu)
	if err != nil {
		return want, err
	}
	if !port.Spec.IsTrunk() {
		if want.Addresses, err = hostAddresses(addresses.Of(port)); err != nil {
			return want, err
		}
		return want, r.shareAddresses(ctx, &want, port, joined[0].Spec.SourceFilter)
	}

	want.AddressesIn = map[string][]netip.Addr{}
	for i, network := range port.Spec.Networks {
		if want.AddressesIn[want.Networks[i]], err = hostAddresses(network.Addresses); err != nil {
			return want, fmt.Errorf("spec.networks[%d]: %w", i, err)
		}
	}
	return want, nil
}

// serve has the XPU's agent serve a Port in these networks, and returns the session with it. The
// session is nil without an error if it is not known yet whether the agent answers.
func (r *reconciler) serve(
	ctx context.Context, port *v1alpha1.XPUPort, joined []*v1alpha1.XPUNetwork, xpu *v1alpha1.XPU,
) (*opi.Session, error) {
	agent, err := r.agent(port.Spec.XPU)
	if err != nil || agent == nil {
		return nil, err
	}

	want, err := r.wantedPort(ctx, port, joined, xpu)
	if err != nil {
		return nil, reconciling.Refuse(v1alpha1.ReasonFailed, "%s", reconciling.OneLine(err))
	}

	timeout := r.AgentTimeout
	if port.Spec.Ahead { // a claim's Port may be waiting for it
		timeout = min(timeout, quickTimeout)
	}

	if left := r.deadline.left(port); left > 0 {
		timeout = min(timeout, left)
	}

	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	bounded, end := r.Tracer.Stage(bounded, traced(port), "serve Port", TraceAttributes(port)...)
	var atAgent []opi.Network
	for _, network := range joined {
		atAgent = append(atAgent, networks.AtAgents(r.Installation, network))
	}
	err = agent.EnsurePort(bounded, want, atAgent...)
	end(err)

	if err != nil {
		ctrl.LoggerFrom(ctx).V(1).Info("the xPU does not serve the Port yet", "xpu", port.Spec.XPU,
			"error", err.Error())
		return nil, r.failure(port, err)
	}

	r.retries.Forget(reconciling.RequestFor(port))
	port.Status.BridgePort = want.ID

	return agent, nil
}

// traced returns the UID of the object whose trace the Port's stages belong to: the claim, or the
// pod if there is no claim.
func traced(port *v1alpha1.XPUPort) types.UID {
	return cmp.Or(port.Spec.Claim.UID, ptr.Deref(port.Spec.Pod, v1alpha1.PodRef{}).UID)
}

// TraceAttributes returns the attributes of the Port's stages in a trace.
func TraceAttributes(port *v1alpha1.XPUPort) []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.String("k8s.namespace.name", port.Namespace),
		attribute.String("k8s.node.name", port.Spec.NodeName),
		attribute.String("xpu.port", port.Name), attribute.String("xpu.name", port.Spec.XPU),
		attribute.String("xpu.network", strings.Join(port.Spec.AllNetworks(), ",")),
	}
}

// hostAddresses returns the addresses without their prefix lengths.
func hostAddresses(prefixes []string) (addresses []netip.Addr, err error) {
	for _, text := range prefixes {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, err
		}
		addresses = append(addresses, prefix.Addr())
	}
	return addresses, nil
}

// xpuOf returns the Port's XPU, nil if it does not exist.
func (r *reconciler) xpuOf(ctx context.Context, port *v1alpha1.XPUPort) (*v1alpha1.XPU, error) {
	var xpu v1alpha1.XPU
	err := r.Client.Get(ctx, client.ObjectKey{Name: port.Spec.XPU}, &xpu)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("XPU %s: %w", port.Spec.XPU, err)
	}
	return &xpu, nil
}

// failure converts an error of the agent to a refusal. No event comes when the agent could serve
// the Port, so that the pauses between calls grow. A Port that the agent refuses is retried after
// LastRetry.
func (r *reconciler) failure(port *v1alpha1.XPUPort, err error) error {
	reason, message := v1alpha1.ReasonFailed, "XPU "+port.Spec.XPU+": "+reconciling.OneLine(err)
	pause := r.retries.When(reconciling.RequestFor(port))
	switch {
	case errors.Is(err, opi.ErrUnavailable):
		reason = v1alpha1.ReasonXPUUnavailable
	case errors.Is(err, opi.ErrTimeout):
		reason = v1alpha1.ReasonProvisioning
	case errors.Is(err, opi.ErrNetworkMissing):
		reason = v1alpha1.ReasonNetworkNotReady
	case errors.Is(err, opi.ErrConflict):
		reason, pause = v1alpha1.ReasonConflict, reconciling.LastRetry
	case errors.Is(err, opi.ErrUnknown):
		reason, pause = v1alpha1.ReasonUnknown, reconciling.LastRetry
		message += "; look at what the OPI agent has there, and delete the port of this id if " +
			"it is not somebody else's"
	case errors.Is(err, opi.ErrNoTrunks):
		reason, pause = v1alpha1.ReasonNoTrunks, reconciling.LastRetry
	case errors.Is(err, opi.ErrInvalid), errors.Is(err, opi.ErrUnsupported):
		pause = reconciling.LastRetry
	}

	return reconciling.RetryAfter(reconciling.Refuse(reason, "%s", message), pause)
}

// agent returns the session with the XPU's agent, or a refusal if the agent cannot be reached. Both
// are nil while the state of the connection is not known.
func (r *reconciler) agent(xpu string) (*opi.Session, error) {
	switch conn := r.Sessions.Connection(xpu); {
	case conn.Agent != nil:
		return conn.Agent, nil
	case !conn.Health.Known:
		return nil, nil
	case conn.Refusal != "":
		return nil, reconciling.Refuse(v1alpha1.ReasonXPUUnavailable,
			"the OPI agent of XPU %s cannot be reached: %s", xpu, conn.Refusal)
	}
	return nil, reconciling.Refuse(v1alpha1.ReasonXPUUnavailable,
		"the OPI agent of XPU %s cannot be reached", xpu)
}
