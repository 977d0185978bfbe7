package controller

import (
	"context"
	"crypto/sha256"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
)

// xpus keeps a session with the OPI agent of every XPU, and says in the XPU's status whether the agent answers.
type xpus struct {
	client    client.Client
	sessions  *sessions
	metrics   *metrics
	namespace string // of the TLS Secrets
}

func (r *xpus) setup(mgr ctrl.Manager, concurrency int) error {
	return ctrl.NewControllerManagedBy(mgr).
		Named("xpu").
		For(&v1alpha1.XPU{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(r.withSecret)).
		WatchesRawSource(r.sessions.healths()).
		WithOptions(controller.Options{MaxConcurrentReconciles: concurrency, RateLimiter: retryLimiter[reconcile.Request]()}).
		Complete(withConflicts(r))
}

func (r *xpus) withSecret(ctx context.Context, secret client.Object) []reconcile.Request {
	if secret.GetNamespace() != r.namespace {
		return nil
	}
	return requestsFor(ctx, r.client, &v1alpha1.XPUList{}, client.MatchingFields{xpusBySecret: secret.GetName()})
}

func (r *xpus) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var xpu v1alpha1.XPU
	err := r.client.Get(ctx, req.NamespacedName, &xpu)
	if apierrors.IsNotFound(err) {
		r.sessions.forget(req.Name)
		r.metrics.forget(req.Name)
		return ctrl.Result{}, nil
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("XPU %s: %w", req.Name, err)
	}
	if err := r.connect(ctx, &xpu); err != nil {
		p, ok := err.(*problem)
		if !ok {
			return ctrl.Result{}, fmt.Errorf("XPU %s: %w", req.Name, err)
		}
		r.sessions.refuse(req.Name, p.message)
		return ctrl.Result{}, r.updateStatus(ctx, &xpu, metav1.ConditionFalse, p.reason, p.message)
	}
	return ctrl.Result{}, r.tell(ctx, &xpu)
}

// connect has a session with the XPU's configuration.
func (r *xpus) connect(ctx context.Context, xpu *v1alpha1.XPU) error {
	dialect, err := dialects.Named(string(xpu.Spec.Dialect))
	if err != nil {
		return problemf(v1alpha1.ReasonInvalidConfig, "spec.dialect: %s", err)
	}
	config := opi.Config{Endpoint: xpu.Spec.Endpoint, Dialect: dialect}
	var secret corev1.Secret
	if xpu.Spec.TLS != nil {
		key := client.ObjectKey{Namespace: r.namespace, Name: xpu.Spec.TLS.SecretName}
		err := r.client.Get(ctx, key, &secret)
		if apierrors.IsNotFound(err) {
			return problemf(v1alpha1.ReasonInvalidTLSSecret, "spec.tls.secretName: Secret %s does not exist; create it with tls.crt, tls.key and ca.crt", key)
		}
		if err != nil {
			return fmt.Errorf("Secret %s: %w", key, err)
		}
		config.TLS, err = opi.TLSConfig(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey], secret.Data[corev1.ServiceAccountRootCAKey], xpu.Spec.TLS.ServerName)
		if err != nil {
			return problemf(v1alpha1.ReasonInvalidTLSSecret, "Secret %s needs PEM in tls.crt, tls.key and ca.crt: %s", key, err)
		}
	}
	if err := r.sessions.open(xpu.Name, fingerprint(&xpu.Spec, &secret), config); err != nil {
		return problemf(v1alpha1.ReasonInvalidConfig, "%s", err)
	}
	return nil
}

// fingerprint changes with everything that a connection depends on.
func fingerprint(spec *v1alpha1.XPUSpec, secret *corev1.Secret) string {
	hash := sha256.New()
	fmt.Fprintf(hash, "%q %q %t", spec.Endpoint, spec.Dialect, spec.Insecure)
	if spec.TLS != nil {
		fmt.Fprintf(hash, " %q", spec.TLS.ServerName)
		for _, key := range []string{corev1.TLSCertKey, corev1.TLSPrivateKeyKey, corev1.ServiceAccountRootCAKey} {
			fmt.Fprintf(hash, " %q", secret.Data[key])
		}
	}
	return string(hash.Sum(nil))
}

// tell says in the status whether the agent answers. Until that is known the status stays as it is: another event comes.
func (r *xpus) tell(ctx context.Context, xpu *v1alpha1.XPU) error {
	switch health := r.sessions.health(xpu.Name); {
	case health.Answers:
		return r.updateStatus(ctx, xpu, metav1.ConditionTrue, v1alpha1.ReasonConnected, "the OPI agent at "+xpu.Spec.Endpoint+" answers")
	case health.Err != nil:
		message := "the OPI agent at " + xpu.Spec.Endpoint + " does not answer: " + oneLine(health.Err)
		return r.updateStatus(ctx, xpu, metav1.ConditionFalse, v1alpha1.ReasonXPUUnavailable, message)
	}
	return nil
}

func (r *xpus) updateStatus(ctx context.Context, xpu *v1alpha1.XPU, status metav1.ConditionStatus, reason, message string) error {
	before := xpu.DeepCopy()
	if !setReady(&xpu.Status.Conditions, xpu.Generation, status, reason, message) {
		return nil
	}
	return patchStatus(ctx, r.client, xpu, before)
}
