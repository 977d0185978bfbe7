package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	toolscache "k8s.io/client-go/tools/cache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// Options are what the reconcilers depend on. The zero value of a duration means its default.
type Options struct {
	// Installation marks what is this cluster's at OPI agents. See [Installation].
	Installation opi.Installation
	// Namespace has the Secrets that XPUs name.
	Namespace string
	// Registerer takes the metrics.
	Registerer prometheus.Registerer

	// ProvisionTimeout is how long after its creation an XPUPort that never was up is refused. Default 60 s.
	ProvisionTimeout time.Duration
	// AgentTimeout bounds what an OPI agent is asked to do for one object. Default 15 s.
	AgentTimeout time.Duration
	// CollectGrace is how long the garbage collector has for the XPUPorts of a deleted claim. Default 2 s.
	CollectGrace time.Duration
	// BusyGrace is how long a claim waits for a Function before it is told so. Default 2 s.
	BusyGrace time.Duration
	// TaintGrace is how long a claim is not told that its device failed while the device has no taint. Default 30 s.
	TaintGrace time.Duration
	// Debounce is how long an OPI agent may be away before its XPU is not ready. Default 500 ms.
	Debounce time.Duration
	// OrphanGrace is how long an OPI agent keeps a port or network of the installation that no object wants. Default 30 s.
	OrphanGrace time.Duration
	// BridgeGrace is how long an OPI agent keeps a network after the last XPUPort there. Default 10 s.
	BridgeGrace time.Duration
	// ResyncPeriod is how often all that an OPI agent has is compared with what is wanted; up to a quarter longer, so that not
	// all agents are asked at once. Default 3 min.
	ResyncPeriod time.Duration
	// PoolPause is the least time between two writes of a DevicePool's status. Default 1 s.
	PoolPause time.Duration
	// FailedGrace is [opi.Config.FailedGrace].
	FailedGrace time.Duration
	// CheckInterval is that of [opi.SessionOptions].
	CheckInterval time.Duration

	// Concurrency is how many objects of each kind are reconciled at once. Most wait for an OPI agent. Default 256.
	Concurrency int
	// ConcurrencyPerXPU is how many XPUPorts of one XPU are reconciled at once. Default 32.
	ConcurrencyPerXPU int
}

func (o *Options) setDefaults() {
	o.ProvisionTimeout = cmp.Or(o.ProvisionTimeout, 60*time.Second)
	o.AgentTimeout = cmp.Or(o.AgentTimeout, 15*time.Second)
	o.CollectGrace = cmp.Or(o.CollectGrace, 2*time.Second)
	o.BusyGrace = cmp.Or(o.BusyGrace, 2*time.Second)
	o.TaintGrace = cmp.Or(o.TaintGrace, 30*time.Second)
	o.Debounce = cmp.Or(o.Debounce, 500*time.Millisecond)
	o.OrphanGrace = cmp.Or(o.OrphanGrace, 30*time.Second)
	o.BridgeGrace = cmp.Or(o.BridgeGrace, 10*time.Second)
	o.PoolPause = cmp.Or(o.PoolPause, time.Second)
	o.ResyncPeriod = cmp.Or(o.ResyncPeriod, 3*time.Minute)
	o.Concurrency = cmp.Or(o.Concurrency, 256)
	o.ConcurrencyPerXPU = cmp.Or(o.ConcurrencyPerXPU, 32)
}

// Scheme has every kind that the reconcilers work on.
func Scheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	return scheme, errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme))
}

// Installation returns the mark of the cluster: that of the UID of its namespace kube-system.
func Installation(ctx context.Context, r client.Reader) (opi.Installation, error) {
	var system corev1.Namespace
	if err := r.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, &system); err != nil {
		return "", fmt.Errorf("namespace %s, whose UID is the installation's identity: %w", metav1.NamespaceSystem, err)
	}
	return opi.NewInstallation(string(system.UID)), nil
}

// CacheOptions keep the cache small: only Secrets of the namespace, no managed fields, and nothing that the reconcilers do not read
// of the kinds of which there are many.
func CacheOptions(namespace string) cache.Options {
	strip := cache.TransformStripManagedFields()
	return cache.Options{
		DefaultTransform: strip,
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Secret{}:             {Namespaces: map[string]cache.Config{namespace: {}}},
			&v1alpha1.XPUPort{}:          {Transform: trimPort(strip)},
			&resourceapi.ResourceClaim{}: {Transform: trimClaim(strip)},
		},
	}
}

// trimPort leaves out what only people and the garbage collector read. XPUPorts are written by patches, which leave it as it is.
func trimPort(strip toolscache.TransformFunc) toolscache.TransformFunc {
	return func(o any) (any, error) {
		if port, ok := o.(*v1alpha1.XPUPort); ok {
			port.OwnerReferences = nil
			if !port.Spec.Ahead { // of which the pool must be known
				port.Labels = nil
			}
		}
		return strip(o)
	}
}

// trimClaim leaves out what was asked for: the allocation has all that matters of it. Only the status of claims is written, and the
// API server leaves the rest as it is then.
func trimClaim(strip toolscache.TransformFunc) toolscache.TransformFunc {
	return func(o any) (any, error) {
		if c, ok := o.(*resourceapi.ResourceClaim); ok {
			c.Spec = resourceapi.ResourceClaimSpec{}
		}
		return strip(o)
	}
}

// Setup adds the reconcilers to the manager. Its client must read from the cache.
func Setup(ctx context.Context, mgr ctrl.Manager, o Options) error {
	o.setDefaults()
	if err := addIndexes(ctx, mgr.GetFieldIndexer()); err != nil {
		return err
	}
	m := newMetrics(o.Registerer, mgr.GetCache(), mgr.Elected())
	sessions := &sessions{Options: o, metrics: m, log: mgr.GetLogger().WithName("agents"), byXPU: map[string]*session{}}
	if err := mgr.Add(sessions); err != nil {
		return fmt.Errorf("sessions with OPI agents: %w", err)
	}
	events := mgr.GetEventRecorder("xpu-controller")
	newBase := func() base {
		return base{
			Options: o, client: mgr.GetClient(), live: mgr.GetAPIReader(), events: events,
			sessions: sessions, metrics: m, retries: retryLimiter[reconcile.Request](),
		}
	}
	allocator := newAllocator(mgr.GetClient())
	ports := &ports{base: newBase(), allocator: allocator, limiter: newPerXPULimiter(o.ConcurrencyPerXPU)}
	bridges := &bridges{base: newBase()}
	networks := &networks{base: newBase(), bridges: bridges}
	bridges.changed = networks.changed
	err := errors.Join(
		(&claims{base: newBase(), allocator: allocator}).setup(mgr),
		ports.setup(mgr),
		bridges.setup(mgr),
		networks.setup(mgr),
		(&resyncs{base: newBase(), bridges: bridges, ports: ports}).setup(mgr),
		(&xpus{base: newBase(), bridges: bridges}).setup(mgr),
		(&cards{base: newBase()}).setup(mgr),
		(&devicePools{newBase()}).setup(mgr),
	)
	if err != nil {
		return fmt.Errorf("set up controllers: %w", err)
	}
	return nil
}
