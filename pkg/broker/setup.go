// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/selection"
	inventory "sigs.k8s.io/cluster-inventory-api/apis/v1alpha1"
	"sigs.k8s.io/cluster-inventory-api/pkg/access"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/source"
	mcbuilder "sigs.k8s.io/multicluster-runtime/pkg/builder"
	mcmanager "sigs.k8s.io/multicluster-runtime/pkg/manager"
	mcreconcile "sigs.k8s.io/multicluster-runtime/pkg/reconcile"
	"sigs.k8s.io/multicluster-runtime/providers/kubeconfig"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/kubecache"
	"github.com/opiproject/xpu-device-plugin/pkg/queue"
)

// Options configure the broker. The zero value of a duration or number means its default.
type Options struct {
	// Namespace holds the Secrets with the tenants' kubeconfigs, and the copies of the tenants'
	// XPUPorts.
	Namespace string
	// MemberNamespace is the namespace of the Lease in a tenant's cluster whose kubeconfig names no
	// namespace. Default xpu-system.
	MemberNamespace string
	// Identity distinguishes this infra cluster from others. A tenant is served by one infra
	// cluster at a time.
	Identity string
	// ProfileAccess lists the programs that provide credentials for ClusterProfiles. It is nil if
	// ClusterProfiles are not used.
	ProfileAccess *access.Config
	// Registerer registers the metrics.
	Registerer prometheus.Registerer

	// RenewPeriod is the time between two renewals of the Lease in a tenant's cluster. Default 10
	// s.
	RenewPeriod time.Duration
	// JoinTimeout bounds the first read of all objects of a tenant's cluster. Default 30 s.
	JoinTimeout time.Duration
	// RequestTimeout bounds one request to a tenant's cluster. Default 10 s.
	RequestTimeout time.Duration

	// Concurrency bounds the parallel reconciliations of each kind. Default 128.
	Concurrency int
	// ConcurrencyPerTenant bounds the parallel reconciliations of each kind for one tenant. Default
	// 16.
	ConcurrencyPerTenant int

	// Limits apply to each tenant.
	Limits Limits
}

func (o *Options) setDefaults() {
	o.MemberNamespace = cmp.Or(o.MemberNamespace, "xpu-system")
	o.RenewPeriod = cmp.Or(o.RenewPeriod, 10*time.Second)
	o.JoinTimeout = cmp.Or(o.JoinTimeout, 30*time.Second)
	o.RequestTimeout = cmp.Or(o.RequestTimeout, 10*time.Second)
	o.Concurrency = cmp.Or(o.Concurrency, 128)
	o.ConcurrencyPerTenant = cmp.Or(o.ConcurrencyPerTenant, 16)
	o.Limits.setDefaults()
}

// CacheOptions restrict the cache of the infra cluster to what the broker reads: Secrets with
// kubeconfigs in the namespace, copies of tenants' objects, and, if profiles is true,
// ClusterProfiles in the namespace. The cluster must have the kind ClusterProfile then.
func CacheOptions(namespace string, profiles bool) cache.Options {
	ofTenants, err := labels.NewRequirement(v1alpha1.LabelTenant, selection.Exists, nil)
	if err != nil {
		panic(err) // the label is a constant
	}

	selector := labels.NewSelector().Add(*ofTenants)
	options := cache.Options{
		DefaultTransform: kubecache.Trim,
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Secret{}: {Namespaces: map[string]cache.Config{namespace: {
				LabelSelector: labels.SelectorFromSet(labels.Set{
					kubeconfig.DefaultKubeconfigSecretLabel: "true",
				}),
			}}},
			&v1alpha1.XPUPort{}: {
				Namespaces: map[string]cache.Config{namespace: {LabelSelector: selector}},
			},
			&v1alpha1.XPUNode{}: {Label: selector},
		},
	}

	if profiles {
		options.ByObject[&inventory.ClusterProfile{}] = cache.ByObject{
			Namespaces: map[string]cache.Config{namespace: {}},
		}
	}

	return options
}

// Indexes of the caches.
const (
	tenantsBySecret  = "secret"  // name of the Secret with the kubeconfig
	tenantsByProfile = "profile" // name of the ClusterProfile
	// label LabelTenant of XPUPorts, XPUNetworks and XPUNodes in the infra cluster
	byTenant       = "tenant"
	portsByNetwork = "network" // name of the XPUNetwork, for XPUPorts in tenants' clusters
	portsByXPU     = "xpu"     // name of the XPU, for XPUPorts in tenants' clusters
)

// Scheme returns a scheme with every kind that the broker works on.
func Scheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	return scheme, errors.Join(
		corev1.AddToScheme(scheme), coordinationv1.AddToScheme(scheme),
		eventsv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme),
		inventory.AddToScheme(scheme),
	)
}

// Setup adds the reconcilers to the manager, whose provider must be tenants. The local client must
// read from the cache.
func Setup(ctx context.Context, mgr mcmanager.Manager, tenants *Members, o Options) error {
	o.setDefaults()
	if err := addIndexes(ctx, mgr.GetLocalManager().GetFieldIndexer()); err != nil {
		return err
	}

	infra := mgr.GetLocalManager()
	limits := newLimitTracker()
	newSyncer := func() syncer {
		return syncer{
			Options: o, manager: mgr, infra: infra.GetClient(), live: infra.GetAPIReader(),
			members: tenants,
			turns:   queue.NewTurns[mcreconcile.Request](o.ConcurrencyPerTenant),
			retries: reconciling.RetryLimiter[mcreconcile.Request](),
			limits:  limits,
		}
	}

	ports := &ports{syncer: newSyncer(), quota: &quota{}}
	networks := &networks{syncer: newSyncer()}
	nodes := &nodes{syncer: newSyncer(), quota: &quota{}}
	xpus := &xpus{syncer: newSyncer()}
	status := &xpuTenants{syncer: newSyncer()}

	tenants.onJoin = func(tenant string) {
		for _, kind := range []interface{ enqueueAll(context.Context, string) }{
			ports, networks, nodes, xpus,
		} {
			kind.enqueueAll(ctx, tenant)
		}
	}

	tenants.onChange, limits.onChange = status.enqueue, status.enqueue
	err := errors.Join(
		tenants.setup(mgr, o),
		ports.setup(ctx, mgr),
		networks.setup(mgr),
		nodes.setup(mgr),
		xpus.setup(mgr),
		status.setup(infra),
	)

	if err != nil {
		return fmt.Errorf("set up controllers: %w", err)
	}

	return nil
}

func addIndexes(ctx context.Context, indexer client.FieldIndexer) error {
	tenant := func(o client.Object) []string {
		return nonEmpty(o.GetLabels()[v1alpha1.LabelTenant])
	}
	secret := func(o client.Object) []string {
		return nonEmpty(o.(*v1alpha1.XPUTenant).Spec.Member.SecretName)
	}
	profile := func(o client.Object) []string {
		return nonEmpty(o.(*v1alpha1.XPUTenant).Spec.Member.ClusterProfile)
	}

	return errors.Join(
		indexer.IndexField(ctx, &v1alpha1.XPUTenant{}, tenantsBySecret, secret),
		indexer.IndexField(ctx, &v1alpha1.XPUTenant{}, tenantsByProfile, profile),
		indexer.IndexField(ctx, &v1alpha1.XPUPort{}, byTenant, tenant),
		indexer.IndexField(ctx, &v1alpha1.XPUNetwork{}, byTenant, tenant),
		indexer.IndexField(ctx, &v1alpha1.XPUNode{}, byTenant, tenant),
	)
}

func nonEmpty(key string) []string {
	if key == "" {
		return nil
	}
	return []string{key}
}

// newController returns a builder of a controller for objects of the tenants' clusters.
func newController(mgr mcmanager.Manager, name string, concurrency int) *mcbuilder.Builder {
	return mcbuilder.ControllerManagedBy(mgr).Named(name).
		WithOptions(controller.TypedOptions[mcreconcile.Request]{
			MaxConcurrentReconciles: concurrency,
			// The builder does not take this option over from the manager.
			SkipNameValidation: mgr.GetControllerOptions().SkipNameValidation,
			RateLimiter:        reconciling.RetryLimiter[mcreconcile.Request](),
		})
}

// fromInfra returns a source that watches objects of the infra cluster and enqueues what toRequests
// returns for them.
func fromInfra[O client.Object](
	mgr mcmanager.Manager, object O, toRequests func(context.Context, O) []mcreconcile.Request,
	when ...predicate.TypedPredicate[O],
) source.TypedSource[mcreconcile.Request] {
	return source.TypedKind(mgr.GetLocalManager().GetCache(), object,
		handler.TypedEnqueueRequestsFromMapFunc(toRequests), when...)
}

// whenSpecChanged ignores changes of only the status.
var whenSpecChanged = builder.WithPredicates(predicate.GenerationChangedPredicate{})
