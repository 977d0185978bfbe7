package controller

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
)

// xpus keeps a session with the OPI agent of every XPU, and says in the XPU's status whether the agent answers.
type xpus struct{ base }

func (r *xpus) setup(mgr ctrl.Manager) error {
	onSecret := func(ctx context.Context, secret client.Object) []reconcile.Request {
		return r.requests(ctx, &v1alpha1.XPUList{}, client.MatchingFields{xpusBySecret: secret.GetName()})
	}
	return newController(mgr, "xpu", r.Concurrency).
		For(&v1alpha1.XPU{}, whenSpecChanged).
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(onSecret)).
		WatchesRawSource(r.sessions.source(healthChanged, theXPU)).
		Complete(withConflicts(r))
}

func (r *xpus) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var xpu v1alpha1.XPU
	err := r.client.Get(ctx, req.NamespacedName, &xpu)
	if apierrors.IsNotFound(err) {
		r.sessions.forget(req.Name)
		r.metrics.errors.DeletePartialMatch(prometheus.Labels{"xpu": req.Name})
		return ctrl.Result{}, nil
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("XPU %s: %w", req.Name, err)
	}
	err = r.connect(ctx, &xpu)
	p, isProblem := errors.AsType[*problem](err)
	health := r.sessions.connection(req.Name).health
	switch {
	case isProblem:
		r.sessions.refuse(req.Name, p.message)
	case err != nil:
		return ctrl.Result{}, fmt.Errorf("XPU %s: %w", req.Name, err)
	case health.Connected:
		p = problemf(v1alpha1.ReasonConnected, "the OPI agent at %s answers", xpu.Spec.Endpoint)
	case health.Err != nil:
		const silent = "the OPI agent at %s does not answer: %s"
		p = problemf(v1alpha1.ReasonXPUUnavailable, silent, xpu.Spec.Endpoint, oneLine(health.Err))
	default:
		return ctrl.Result{}, nil // not known yet: another event comes
	}
	before := xpu.DeepCopy()
	meta.SetStatusCondition(&xpu.Status.Conditions, newCondition(v1alpha1.ConditionReady, xpu.Generation, p.reason, p.message))
	return ctrl.Result{}, r.writeStatus(ctx, &xpu, before)
}

// connect has a session with the XPU's configuration.
func (r *xpus) connect(ctx context.Context, xpu *v1alpha1.XPU) error {
	dialect, err := dialects.Named(string(xpu.Spec.Dialect))
	if err != nil {
		return problemf(v1alpha1.ReasonInvalidConfig, "spec.dialect: %s", err)
	}
	config := opi.Config{Endpoint: xpu.Spec.Endpoint, Dialect: dialect, Installation: r.Installation}
	// The fingerprint changes with everything that a connection depends on.
	fingerprint := fmt.Appendf(nil, "%q %q %t", xpu.Spec.Endpoint, xpu.Spec.Dialect, xpu.Spec.Insecure)
	if xpu.Spec.TLS != nil {
		var secret corev1.Secret
		key := client.ObjectKey{Namespace: r.Namespace, Name: xpu.Spec.TLS.SecretName}
		err := r.client.Get(ctx, key, &secret)
		if apierrors.IsNotFound(err) {
			return problemf(v1alpha1.ReasonInvalidTLSSecret,
				"spec.tls.secretName: Secret %s does not exist; create it with tls.crt, tls.key and ca.crt", key)
		}
		if err != nil {
			return fmt.Errorf("Secret %s: %w", key, err)
		}
		cert, private := secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey]
		authorities, server := secret.Data[corev1.ServiceAccountRootCAKey], xpu.Spec.TLS.ServerName
		config.TLS, err = opi.TLSConfig(cert, private, authorities, server)
		if err != nil {
			return problemf(v1alpha1.ReasonInvalidTLSSecret, "Secret %s needs PEM in tls.crt, tls.key and ca.crt: %s", key, err)
		}
		fingerprint = fmt.Appendf(fingerprint, " %q %q %q %q", cert, private, authorities, server)
	}
	if err := r.sessions.open(xpu.Name, sha256.Sum256(fingerprint), config); err != nil {
		return problemf(v1alpha1.ReasonInvalidConfig, "%s", err)
	}
	return nil
}
