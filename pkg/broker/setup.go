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
	"k8s.io/client-go/util/workqueue"
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
	"github.com/opiproject/xpu-device-plugin/pkg/kubecache"
	"github.com/opiproject/xpu-device-plugin/pkg/queue"
)

// Options are what the broker depends on. The zero value of a duration or number means its default.
type Options struct {
	// Namespace has the Secrets with the tenants' kubeconfigs, and the XPUPorts of tenants.
	Namespace string
	// MemberNamespace is where the Lease is in a tenant's cluster whose kubeconfig names no
	// namespace. Default xpu-system.
	MemberNamespace string
	// Identity tells this infra cluster from others: two of them do not have the same tenant.
	Identity string
	// ProfileAccess knows the programs that give credentials for ClusterProfiles; nil if these are
	// not used.
	ProfileAccess *access.Config
	// Registerer takes the metrics.
	Registerer prometheus.Registerer

	// RenewPeriod is how often the Lease of a tenant's cluster is renewed, by which each side knows
	// that the other is there. Default 10 s.
	RenewPeriod time.Duration
	// JoinTimeout is how long all objects of a tenant's cluster may take to be read. Default 30 s.
	JoinTimeout time.Duration
	// RequestTimeout bounds one request to a tenant's cluster. Default 10 s.
	RequestTimeout time.Duration

	// Concurrency is how many objects of each kind are carried over at once. Default 128.
	Concurrency int
	// ConcurrencyPerTenant is how many of one tenant are, of each kind. Default 16.
	ConcurrencyPerTenant int

	// Limits are those of each tenant.
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

// CacheOptions keep the cache of the infra cluster to what the broker reads: Secrets with
// kubeconfigs in the namespace, and what stands for objects of tenants; and ClusterProfiles there
// if they are used, whose kind the cluster must have.
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
	// the label LabelTenant, of the infra cluster's XPUPorts, XPUNetworks and XPUNodes
	byTenant       = "tenant"
	portsByNetwork = "network" // name of the XPUNetwork, of the tenants' XPUPorts
	portsByXPU     = "xpu"     // name of the XPU, of the tenants' XPUPorts
)

// Scheme has every kind that the broker works on.
func Scheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	return scheme, errors.Join(
		corev1.AddToScheme(scheme), coordinationv1.AddToScheme(scheme),
		eventsv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme),
		inventory.AddToScheme(scheme),
	)
}

// Setup adds the reconcilers to the manager, whose provider must be the tenants. The local client
// must read from the cache.
func Setup(ctx context.Context, mgr mcmanager.Manager, tenants *Members, o Options) error {
	o.setDefaults()
	if err := addIndexes(ctx, mgr.GetLocalManager().GetFieldIndexer()); err != nil {
		return err
	}

	infra := mgr.GetLocalManager()
	reached := newReached()
	newBase := func() base {
		return base{
			Options: o, manager: mgr, infra: infra.GetClient(), live: infra.GetAPIReader(),
			members: tenants,
			turns:   queue.NewTurns[mcreconcile.Request](o.ConcurrencyPerTenant),
			again:   newRetries(),
			reached: reached,
		}
	}

	ports := &ports{base: newBase(), quota: newQuota()}
	networks := &networks{base: newBase()}
	nodes := &nodes{base: newBase(), quota: newQuota()}
	xpus := &xpus{base: newBase()}
	leaving := &xpuTenants{base: newBase()}

	tenants.joined = func(tenant string) {
		for _, carrier := range []interface{ wake(context.Context, string) }{
			ports, networks, nodes, xpus,
		} {
			carrier.wake(ctx, tenant)
		}
	}

	tenants.changed, reached.changed = leaving.wake, leaving.wake
	err := errors.Join(
		tenants.setup(mgr, o),
		ports.setup(ctx, mgr),
		networks.setup(mgr),
		nodes.setup(mgr),
		xpus.setup(mgr),
		leaving.setup(infra),
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

// The pauses between failed attempts double from firstRetry to lastRetry.
const (
	firstRetry = 50 * time.Millisecond
	lastRetry  = 30 * time.Second
)

func newRetries() workqueue.TypedRateLimiter[mcreconcile.Request] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[mcreconcile.Request](firstRetry,
		lastRetry)
}

// newController begins to build a controller of objects of the tenants' clusters.
func newController(mgr mcmanager.Manager, name string, concurrency int) *mcbuilder.Builder {
	return mcbuilder.ControllerManagedBy(mgr).Named(name).
		WithOptions(controller.TypedOptions[mcreconcile.Request]{
			MaxConcurrentReconciles: concurrency,
			// which it does not take over by itself
			SkipNameValidation: mgr.GetControllerOptions().SkipNameValidation,
			RateLimiter:        newRetries(),
		})
}

// fromInfra is a source of the requests that toRequests has for an object of the infra cluster.
func fromInfra[O client.Object](
	mgr mcmanager.Manager, object O, toRequests func(context.Context, O) []mcreconcile.Request,
	when ...predicate.TypedPredicate[O],
) source.TypedSource[mcreconcile.Request] {
	return source.TypedKind(mgr.GetLocalManager().GetCache(), object,
		handler.TypedEnqueueRequestsFromMapFunc(toRequests), when...)
}

// whenSpecChanged leaves out changes of the status.
var whenSpecChanged = builder.WithPredicates(predicate.GenerationChangedPredicate{})
