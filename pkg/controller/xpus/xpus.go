// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/networks"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/sessions"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
)

// Options configure the reconcilers of XPUs.
type Options struct {
	// Infra is whether the XPUs serve nodes of tenants' clusters.
	Infra bool
	// Installation marks the ports and networks of this cluster at OPI agents.
	Installation opi.Installation
	// Namespace contains the Secrets that XPUs name and the Services of OPI agents.
	Namespace string

	// Ports keep an XPU that is being deleted.
	Ports *model.Ports
	// AgentPorts finds the XPUPort of a port.
	AgentPorts AgentPorts
	// Sessions are opened with the agents of XPUs.
	Sessions *sessions.Sessions
	// Bridges keep an XPU that is being deleted.
	Bridges *networks.Bridges
	// Forget is called with the name of an XPU that is gone.
	Forget func(xpu string)
	// Tracer records calls to OPI agents. It may be nil.
	Tracer *tracing.Tracer

	// AgentTimeout bounds the call that asks an OPI agent for its PFs.
	AgentTimeout time.Duration
	// ResyncPeriod is the time between two such calls.
	ResyncPeriod time.Duration
	// FailedGrace is [opi.Config.FailedGrace].
	FailedGrace time.Duration
	// AwayStep is the least time between two writes of how long an OPI agent has been away.
	AwayStep time.Duration
	// Concurrency is how many XPUs are reconciled at once.
	Concurrency int
}

// Setup adds the reconcilers of XPUs, of their cards, and of agents that are pods to the manager.
func Setup(mgr ctrl.Manager, cluster reconciling.Cluster, o Options) error {
	return errors.Join(
		(&reconciler{Cluster: cluster, Options: o}).setup(mgr),
		(&cards{
			Cluster: cluster, Options: o,
			retries: reconciling.RetryLimiter[reconcile.Request](),
		}).setup(mgr),
		(&registrations{Cluster: cluster, namespace: o.Namespace}).setup(mgr),
	)
}

// reconciler keeps a session with the OPI agent of every XPU, and reports in the XPU's status
// whether the agent answers. It keeps an XPU that is being deleted until it has no XPUPorts.
type reconciler struct {
	reconciling.Cluster
	Options
	away reconciling.Durations[string] // by XPU: its OPI agent cannot be reached
}

func (r *reconciler) setup(mgr ctrl.Manager) error {
	enqueue := handler.EnqueueRequestsFromMapFunc
	onSecret := func(ctx context.Context, secret client.Object) []reconcile.Request {
		return reconciling.Requests(ctx, r.Client, &v1alpha1.XPUList{},
			client.MatchingFields{bySecret: secret.GetName()})
	}

	ofPort := func(ctx context.Context, port *v1alpha1.XPUPort) []reconcile.Request {
		return sessions.RequestFor(ctx, port.Spec.XPU)
	}
	return reconciling.NewController(mgr, "xpu", r.Concurrency).
		For(&v1alpha1.XPU{}, reconciling.WhenSpecChanged).
		Watches(&v1alpha1.XPU{}, enqueue(r.refused), reconciling.WhenSpecChanged).
		WatchesRawSource(model.Source(r.Ports, model.Requests(model.Change.Gone, ofPort))).
		Watches(&corev1.Secret{}, enqueue(onSecret)).
		WatchesRawSource(sessions.Source(r.Sessions, sessions.HealthChanged, sessions.RequestFor)).
		Complete(r.Guarded(r))
}

// refused returns the XPUs that are in conflict with another XPU.
func (r *reconciler) refused(ctx context.Context, _ client.Object) []reconcile.Request {
	return reconciling.Requests(ctx, r.Client, &v1alpha1.XPUList{},
		client.MatchingFields{byReason: v1alpha1.ReasonConflict})
}

func (r *reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var xpu v1alpha1.XPU
	err := r.Client.Get(ctx, req.NamespacedName, &xpu)
	if apierrors.IsNotFound(err) {
		r.Sessions.Forget(req.Name)
		r.Forget(req.Name)
		r.away.Reset(req.Name)
		return ctrl.Result{}, nil
	}

	if err != nil {
		return ctrl.Result{}, fmt.Errorf("XPU %s: %w", req.Name, err)
	}

	if xpu.DeletionTimestamp.IsZero() {
		if err := reconciling.ChangeFinalizer(ctx, r.Client, &xpu, controllerutil.AddFinalizer,
			v1alpha1.FinalizerXPU); err != nil {
			return ctrl.Result{}, err
		}
	}

	before := xpu.DeepCopy()
	reason, message, err := r.state(ctx, &xpu)
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("XPU %s: %w", req.Name, err)
	}

	if !xpu.DeletionTimestamp.IsZero() {
		uses, err := r.uses(ctx, &xpu)
		if err != nil {
			return ctrl.Result{}, err
		}
		if uses == "" {
			return ctrl.Result{}, reconciling.ChangeFinalizer(ctx, r.Client, &xpu,
				controllerutil.RemoveFinalizer, v1alpha1.FinalizerXPU)
		}
		reason, message = v1alpha1.ReasonInUse, uses
	}

	setFunctionsCondition(&xpu)
	setVerifiedCondition(&xpu)
	again := ctrl.Result{RequeueAfter: r.recordAway(&xpu)}
	if reason == "" { // not known yet: another event comes
		return again, reconciling.WriteStatus(ctx, r.Client, &xpu, before)
	}

	meta.SetStatusCondition(&xpu.Status.Conditions,
		reconciling.NewCondition(v1alpha1.ConditionReady, xpu.Generation, reason, message))
	return again, reconciling.WriteStatus(ctx, r.Client, &xpu, before)
}

// state opens a session with the agent, and returns the reason and message of the condition Ready.
// The reason is "" while nothing is known. It also records in the status whether the XPU has the
// agent.
func (r *reconciler) state(
	ctx context.Context, xpu *v1alpha1.XPU,
) (reason, message string, err error) {
	err = r.checkSameEndpoint(ctx, xpu)
	if err == nil {
		err = r.connect(ctx, xpu)
	}

	if err == nil {
		err = r.checkSamePeer(ctx, xpu)
	}

	if refusal, ok := errors.AsType[*reconciling.Refusal](err); ok {
		r.Sessions.Refuse(xpu.Name, refusal.Message)
		if refusal.Reason == v1alpha1.ReasonConflict {
			xpu.Status.Endpoint = ""
		}
		return refusal.Reason, refusal.Message, nil
	}

	if err != nil {
		return "", "", err
	}

	conn := r.Sessions.Connection(xpu.Name)
	if conn.Health.Connected {
		xpu.Status.Endpoint = opi.NormalEndpoint(xpu.Spec.Endpoint)
	}

	traits, _ := traitsOf(xpu)
	switch {
	case conn.Health.Connected && xpu.Spec.Abandon && !traits.Verifies:
		return v1alpha1.ReasonAbandoned, fmt.Sprintf("the OPI agent at %s is back, and does not "+
			"report its ports; see that the card has none of abandoned XPUPorts, for example by a "+
			"restart of the card, and then delete the XPU and make it anew",
			xpu.Spec.Endpoint), nil
	case conn.Health.Connected && xpu.Spec.Abandon && !conn.Clean:
		return v1alpha1.ReasonAbandoned, fmt.Sprintf("the OPI agent at %s is back; its ports of "+
			"abandoned XPUPorts are being deleted",
			xpu.Spec.Endpoint), nil
	case conn.Health.Connected:
		return v1alpha1.ReasonConnected, fmt.Sprintf("the OPI agent at %s answers",
			xpu.Spec.Endpoint), nil
	case conn.Health.Err == nil:
		return "", "", nil
	case xpu.Spec.Abandon:
		return v1alpha1.ReasonAbandoned, fmt.Sprintf("spec.abandon is set, and the OPI agent at "+
			"%s does not answer, so the xPU may still "+
			"serve its ports; delete the XPU if the card is gone: %s", xpu.Spec.Endpoint,
			reconciling.OneLine(conn.Health.Err)), nil
	}

	return v1alpha1.ReasonXPUUnavailable, fmt.Sprintf("the OPI agent at %s does not answer: %s",
		xpu.Spec.Endpoint, reconciling.OneLine(conn.Health.Err)), nil
}

// uses says what keeps an XPU that is being deleted, "" if nothing does.
func (r *reconciler) uses(ctx context.Context, xpu *v1alpha1.XPU) (string, error) {
	ports, err := r.Ports.By(ctx, model.ByXPU, xpu.Name)
	if err != nil {
		return "", err
	}

	if len(ports) > 0 {
		return fmt.Sprintf("%d XPUPorts are served by it, such as %s/%s; it is deleted once they "+
			"are gone. If the card never answers "+
			"again, set spec.abandon", len(ports), ports[0].Namespace, ports[0].Name), nil
	}

	left := r.Bridges.OfXPU(ctx, xpu.Name)
	if len(left) > 0 && !xpu.Spec.Abandon && r.Sessions.Connection(xpu.Name).Agent != nil {
		r.Bridges.Wake(left...)
		return fmt.Sprintf("it still has %d networks, which are being deleted", len(left)), nil
	}

	return "", nil
}

// checkSameEndpoint returns a refusal if another XPU has the agent at the same endpoint. Two XPUs
// at one agent would undo each other's work, because their nodes have Functions with the same
// addresses.
func (r *reconciler) checkSameEndpoint(ctx context.Context, xpu *v1alpha1.XPU) error {
	if xpu.Spec.Endpoint == "" {
		return nil
	}

	var same v1alpha1.XPUList
	err := r.Client.List(ctx, &same,
		client.MatchingFields{byEndpoint: opi.NormalEndpoint(xpu.Spec.Endpoint)},
		client.UnsafeDisableDeepCopy)
	if err != nil {
		return fmt.Errorf("list XPUs with its endpoint: %w", err)
	}

	for i := range same.Items {
		if err := checkAgentOf(xpu, &same.Items[i]); err != nil {
			return err
		}
	}

	return nil
}

// checkSamePeer returns a refusal if another XPU has the same agent under another name.
func (r *reconciler) checkSamePeer(ctx context.Context, xpu *v1alpha1.XPU) error {
	for _, name := range r.Sessions.Peers(xpu.Name) {
		var other v1alpha1.XPU
		err := r.Client.Get(ctx, client.ObjectKey{Name: name}, &other)
		if err == nil {
			err = checkAgentOf(xpu, &other)
		}
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("XPU %s: %w", name, err)
		}
	}
	return nil
}

// checkAgentOf returns a refusal if the agent belongs to the other XPU, which names the same
// agent. The agent belongs to the XPU that had it before, or else to the older one.
func checkAgentOf(xpu, other *v1alpha1.XPU) error {
	has := func(x *v1alpha1.XPU) bool {
		return x.Status.Endpoint != "" && x.Status.Endpoint == opi.NormalEndpoint(x.Spec.Endpoint)
	}
	switch {
	case other.Name == xpu.Name, has(xpu) && !has(other):
		return nil
	case has(xpu) == has(other) && !reconciling.Older(other, xpu):
		return nil
	}

	return reconciling.Refuse(v1alpha1.ReasonConflict,
		"XPU %s has the OPI agent at %s already; delete one of them, "+
			"or correct spec.endpoint", other.Name, xpu.Spec.Endpoint)
}

// connect opens a session with the XPU's configuration.
func (r *reconciler) connect(ctx context.Context, xpu *v1alpha1.XPU) error {
	config, fingerprint, err := r.configOf(ctx, xpu)
	if err != nil {
		return err
	}

	opened, err := r.Sessions.Open(xpu.Name, sha256.Sum256(fingerprint), config)
	if err != nil {
		return reconciling.Refuse(v1alpha1.ReasonInvalidConfig, "%s", err)
	}
	if opened && config.TLS == nil {
		r.Events.Eventf(xpu, nil, corev1.EventTypeWarning, "Insecure", "Connect",
			"the connection to the OPI agent at %s has no TLS, as spec.insecure says: whoever "+
				"reaches the agent or the link to it can change and read the ports of this xPU",
			xpu.Spec.Endpoint)
	}

	return nil
}

// configOf returns the configuration of an XPU's session. The fingerprint changes with everything
// that a connection depends on. A refusal names the field of the spec that is wrong.
func (r *reconciler) configOf(
	ctx context.Context, xpu *v1alpha1.XPU,
) (config opi.Config, fingerprint []byte, err error) {
	service := xpu.Labels[v1alpha1.LabelAgents]
	switch {
	case xpu.Spec.Endpoint == "" && service != "": // see registrations
		return config, nil, reconciling.Refuse(v1alpha1.ReasonXPUUnavailable,
			"no agent of Service %s is ready on node %s, and another node's agent has its address now",
			service, xpu.Name)
	case xpu.Spec.Endpoint == "":
		return config, nil, reconciling.Refuse(v1alpha1.ReasonInvalidConfig,
			"spec.endpoint is not set, and this is no "+
				"tenant cluster: set the address of the OPI agent")
	}

	dialect, err := dialects.Named(string(xpu.Spec.Dialect))
	if err != nil {
		return config, nil, reconciling.Refuse(v1alpha1.ReasonInvalidConfig, "spec.dialect: %s", err)
	}

	name := xpu.Name
	config = opi.Config{
		Endpoint: xpu.Spec.Endpoint, Dialect: dialect, Installation: r.Installation,
		FailedGrace: r.FailedGrace,
		Stats:       r.Tracer.ClientHandler(),
		Claimed: func(port opi.PortStatus) string {
			return r.AgentPorts.ClaimedElsewhere(context.Background(), name, port)
		},
	}

	if text := xpu.Spec.VTEP; text != "" {
		if config.VTEP, err = netip.ParseAddr(text); err != nil {
			return config, nil, reconciling.Refuse(v1alpha1.ReasonInvalidConfig,
				"spec.vtep: %q must be an address, such as 198.51.100.1", text)
		}
	}

	fingerprint = fmt.Appendf(nil, "%q %q %t %q", xpu.Spec.Endpoint, xpu.Spec.Dialect,
		xpu.Spec.Insecure, xpu.Spec.VTEP)
	if xpu.Spec.TLS == nil {
		return config, fingerprint, nil
	}

	var secrets []byte
	config.TLS, secrets, err = r.tlsOf(ctx, xpu.Spec.TLS)
	return config, append(fingerprint, secrets...), err
}

// tlsOf returns the TLS configuration of the Secret that an XPU names, and a text that changes with
// it.
func (r *reconciler) tlsOf(
	ctx context.Context, spec *v1alpha1.XPUTLS,
) (config *tls.Config, fingerprint []byte, err error) {
	var secret corev1.Secret
	key := client.ObjectKey{Namespace: r.Namespace, Name: spec.SecretName}
	err = r.Client.Get(ctx, key, &secret)
	if apierrors.IsNotFound(err) {
		return nil, nil, reconciling.Refuse(v1alpha1.ReasonInvalidTLSSecret,
			"spec.tls.secretName: Secret %s does not exist; create it with tls.crt, tls.key "+
				"and ca.crt", key)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("Secret %s: %w", key, err)
	}

	cert, private := secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey]
	authorities := secret.Data[corev1.ServiceAccountRootCAKey]
	config, err = opi.TLSConfig(cert, private, authorities, spec.ServerName)
	if err != nil {
		return nil, nil, reconciling.Refuse(v1alpha1.ReasonInvalidTLSSecret,
			"Secret %s needs PEM in tls.crt, tls.key and ca.crt: %s", key, err)
	}

	return config, fmt.Appendf(nil, " %q %q %q %q", cert, private, authorities, spec.ServerName), nil
}
