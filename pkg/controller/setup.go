// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/selection"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/addresses"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/claims"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/gangs"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/networks"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/nodes"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/pools"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/ports"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/sessions"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/xpus"
	"github.com/opiproject/xpu-device-plugin/pkg/eventnote"
	"github.com/opiproject/xpu-device-plugin/pkg/kubecache"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
)

// Role selects the reconcilers of a controller.
type Role string

const (
	// RoleAll is for one cluster that has both nodes and xPUs.
	RoleAll Role = "all"
	// RoleTenant serves ResourceClaims and admits XPUPorts, and leaves the xPUs to the broker of an
	// infra cluster. It needs no credentials for OPI agents.
	RoleTenant Role = "tenant"
	// RoleInfra has OPI agents serve the XPUPorts that the broker creates.
	RoleInfra Role = "infra"
)

// Options configure the reconcilers. The zero value of a duration means its default.
type Options struct {
	// Role is which reconcilers there are. Default RoleAll.
	Role Role
	// Installation marks the ports and networks of this cluster at OPI agents. See [Installation].
	Installation opi.Installation
	// Namespace contains the Secrets that XPUs name, the Ports of node agents, and in a tenant
	// cluster the broker's Lease.
	Namespace string
	// Fence checks whether this process is still the leader. It is nil without leader election.
	Fence *Fence
	// Registerer registers the metrics.
	Registerer prometheus.Registerer
	// Tracer records the stages of XPUPorts. It may be nil.
	Tracer *tracing.Tracer

	// ProvisionTimeout is how long after its creation an XPUPort that never was up is refused.
	// Default 60 s.
	ProvisionTimeout time.Duration
	// AheadGrace is how long an XPUPort made ahead may exist before its DevicePool is known.
	// Default 10 s.
	AheadGrace time.Duration
	// AgentTimeout bounds the calls to an OPI agent for one object. Default 15 s.
	AgentTimeout time.Duration
	// CollectGrace is how long the garbage collector has for the XPUPorts of a deleted claim.
	// Default 2 s.
	CollectGrace time.Duration
	// BusyGrace is how long a claim waits for a Function before its condition says so. Default 2 s.
	BusyGrace time.Duration
	// TaintGrace is how long the controller waits for the taint of a failed device before it
	// reports the failure to the claim. Default 30 s.
	TaintGrace time.Duration
	// GangTimeout is how long after the first allocation the claims of a PodGroup wait for each
	// other. Default 5 min. It should be less than the scheduler's bindingTimeout, which is 10 min.
	GangTimeout time.Duration
	// Debounce is how long an OPI agent may be away before its XPU is not ready. Default 500 ms.
	Debounce time.Duration
	// OrphanGrace is how long an OPI agent keeps a port or network of the installation that no
	// object wants. Default 30 s.
	OrphanGrace time.Duration
	// BridgeGrace is how long an OPI agent keeps a network after the last XPUPort there, unless the
	// network is deleted. Default 10 s.
	BridgeGrace time.Duration
	// ResyncPeriod is the time between two comparisons of all ports and networks of an OPI agent
	// with the wanted ones. It is extended by up to a quarter, so that not all agents are asked at
	// once. Default 3 min.
	ResyncPeriod time.Duration
	// PoolPause is the least time between two writes of a DevicePool's status. Default 1 s.
	PoolPause time.Duration
	// AgentAwayGrace is how long no pod of an xpu-agent may be ready on a node before the agent
	// counts as away. Default 30 s.
	AgentAwayGrace time.Duration
	// BrokerGrace is how long the broker may leave its Lease without renewal before a tenant
	// cluster reports that it is away. Default 40 s.
	BrokerGrace time.Duration
	// TaintRulesAfter is how long an OPI agent must have been away before a controller of RoleAll or
	// RoleTenant taints the devices of its XPU by DeviceTaintRules. 0 deletes the rules. With nil the
	// controller leaves rules alone, and needs no rights for them.
	TaintRulesAfter *time.Duration
	// AwayStep is the least time between two writes of a controller of RoleInfra that say for how
	// long an OPI agent has been away. Default 1 min.
	AwayStep time.Duration
	// FailedGrace is [opi.Config.FailedGrace].
	FailedGrace time.Duration
	// CheckInterval is [opi.SessionOptions.CheckInterval].
	CheckInterval time.Duration

	// Concurrency is how many objects of each kind are reconciled at once. Most wait for an OPI
	// agent. Default 256.
	Concurrency int
	// ConcurrencyPerXPU is how many XPUPorts of one XPU are reconciled at once. Default 32.
	ConcurrencyPerXPU int
}

func (o *Options) setDefaults() {
	o.Role = cmp.Or(o.Role, RoleAll)
	o.ProvisionTimeout = cmp.Or(o.ProvisionTimeout, 60*time.Second)
	o.AheadGrace = cmp.Or(o.AheadGrace, 10*time.Second)
	o.AgentTimeout = cmp.Or(o.AgentTimeout, 15*time.Second)
	o.CollectGrace = cmp.Or(o.CollectGrace, 2*time.Second)
	o.BusyGrace = cmp.Or(o.BusyGrace, 2*time.Second)
	o.TaintGrace = cmp.Or(o.TaintGrace, 30*time.Second)
	o.GangTimeout = cmp.Or(o.GangTimeout, 5*time.Minute)
	o.Debounce = cmp.Or(o.Debounce, 500*time.Millisecond)
	o.OrphanGrace = cmp.Or(o.OrphanGrace, 30*time.Second)
	o.BridgeGrace = cmp.Or(o.BridgeGrace, 10*time.Second)
	o.BrokerGrace = cmp.Or(o.BrokerGrace, 40*time.Second)
	o.AwayStep = cmp.Or(o.AwayStep, time.Minute)
	o.AgentAwayGrace = cmp.Or(o.AgentAwayGrace, 30*time.Second)
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

// Installation returns the mark of the cluster, which is derived from the UID of its namespace
// kube-system.
func Installation(ctx context.Context, r client.Reader) (opi.Installation, error) {
	var system corev1.Namespace
	if err := r.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, &system); err != nil {
		return "", fmt.Errorf("namespace %s, whose UID is the installation's identity: %w",
			metav1.NamespaceSystem, err)
	}
	return opi.NewInstallation(string(system.UID)), nil
}

// CacheOptions keep the cache small. It has the Secrets of the namespace only, and of kinds with
// many objects it has only what the reconcilers read. See [kubecache].
func CacheOptions(namespace string) cache.Options {
	agents := labels.NewSelector().Add(hasLabel(v1alpha1.LabelAgents))
	return cache.Options{
		DefaultTransform: kubecache.Trim,
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Secret{}: {Namespaces: map[string]cache.Config{namespace: {}}},
			&corev1.Pod{}: {
				Namespaces: map[string]cache.Config{
					namespace: {LabelSelector: labels.SelectorFromSet(labels.Set(nodes.PodLabels()))},
				},
				Transform: nodes.TrimPod,
			},
			&corev1.Service{}: {
				Namespaces: map[string]cache.Config{namespace: {LabelSelector: agents}},
			},
			&discoveryv1.EndpointSlice{}: {
				Namespaces: map[string]cache.Config{namespace: {LabelSelector: agents}},
			},
			&coordinationv1.Lease{}: {
				Namespaces: map[string]cache.Config{namespace: {}},
				Field:      fields.OneTermEqualSelector("metadata.name", v1alpha1.BrokerLease),
			},
			&v1alpha1.XPUPort{}:          {Transform: trimPort},
			&resourceapi.ResourceClaim{}: {Transform: kubecache.TrimClaim},
		},
	}
}

// hasLabel matches objects with the label, whatever its value.
func hasLabel(label string) labels.Requirement {
	requirement, err := labels.NewRequirement(label, selection.Exists, nil)
	if err != nil {
		panic(err) // labels are constants
	}
	return *requirement
}

// trimPort leaves out fields that only people and the garbage collector read. XPUPorts are written
// by patches, which do not change these fields.
func trimPort(o any) (any, error) {
	if port, ok := o.(*v1alpha1.XPUPort); ok {
		port.OwnerReferences = nil
		if !port.Spec.Ahead { // the pool of a Port made ahead is a label
			port.Labels = nil
		}
	}
	return kubecache.Trim(o)
}

// Setup adds the reconcilers of the role to the manager. Its client must read from the cache.
func Setup(ctx context.Context, mgr ctrl.Manager, o Options) error {
	o.setDefaults()
	if err := addIndexes(ctx, mgr.GetFieldIndexer(), o.Role); err != nil {
		return err
	}
	ports, err := model.WatchPorts(ctx, mgr.GetCache())
	if err != nil {
		return err
	}

	s := &setup{
		Options: o,
		manager: mgr,
		cluster: reconciling.Cluster{
			Client: mgr.GetClient(), Live: mgr.GetAPIReader(),
			Events:      eventnote.Recorder{EventRecorder: mgr.GetEventRecorder("xpu-controller")},
			CheckLeader: o.Fence.Check,
		},
		ports:     ports,
		allocator: addresses.NewAllocator(ports),
		catalog:   networks.Catalog{Client: mgr.GetClient(), Segments: o.Role != RoleTenant},
		metrics:   newMetrics(o.Registerer, mgr.GetCache(), ports, mgr.Elected()),
	}

	parts := map[Role][]func() error{
		RoleAll:    {s.claims, s.admissions, s.xPUs},
		RoleTenant: {s.claims, s.tenant},
		RoleInfra:  {s.xPUs},
	}[o.Role]

	if parts == nil {
		return fmt.Errorf("role %q: must be %s, %s or %s", o.Role, RoleAll, RoleTenant, RoleInfra)
	}

	for _, part := range parts {
		if err := part(); err != nil {
			return fmt.Errorf("set up controllers: %w", err)
		}
	}

	return nil
}

// addIndexes adds the indexes of the cache. It leaves out kinds that the role does not read.
func addIndexes(ctx context.Context, indexer client.FieldIndexer, role Role) error {
	err := xpus.AddNodeIndex(ctx, indexer)
	if role != RoleInfra {
		err = errors.Join(err, nodes.AddIndexes(ctx, indexer), pools.AddIndexes(ctx, indexer),
			claims.AddIndexes(ctx, indexer))
	}
	if role != RoleTenant {
		err = errors.Join(err, xpus.AddIndexes(ctx, indexer), networks.AddIndexes(ctx, indexer))
	}
	return err
}

// setup adds groups of reconcilers.
type setup struct {
	Options
	manager   ctrl.Manager
	cluster   reconciling.Cluster
	ports     *model.Ports
	allocator *addresses.Allocator
	catalog   networks.Catalog
	metrics   *metrics
}

// claims adds the reconcilers of claims, XPUNodes and DevicePools.
func (s *setup) claims() error {
	together, err := gangs.Setup(s.manager, s.cluster, s.GangTimeout)
	if err != nil {
		return fmt.Errorf("gangs: %w", err)
	}
	return errors.Join(
		claims.Setup(s.manager, s.cluster, claims.Options{
			Ports: s.ports, Allocator: s.allocator, Catalog: s.catalog, Gangs: together,
			Tracer:       s.Tracer,
			CollectGrace: s.CollectGrace, BusyGrace: s.BusyGrace, TaintGrace: s.TaintGrace,
			Concurrency: s.Concurrency,
		}),
		nodes.Setup(s.manager, s.cluster,
			nodes.Options{Namespace: s.Namespace, Grace: s.AgentAwayGrace}),
		pools.Setup(s.manager, s.cluster, s.PoolPause),
	)
}

// xPUs adds the reconcilers that call OPI agents.
func (s *setup) xPUs() error {
	agents := sessions.New(sessions.Options{
		Debounce: s.Debounce, CheckInterval: s.CheckInterval, CheckTimeout: s.AgentTimeout,
		Failed: s.metrics.failed, Log: s.manager.GetLogger().WithName("agents"),
	})
	if err := s.manager.Add(agents); err != nil {
		return fmt.Errorf("sessions with OPI agents: %w", err)
	}

	bridges, err := networks.Setup(s.manager, s.cluster, networks.Options{
		Ports: s.ports, Sessions: agents, Catalog: s.catalog, Installation: s.Installation,
		AgentTimeout: s.AgentTimeout, BridgeGrace: s.BridgeGrace, Concurrency: s.Concurrency,
	})
	if err != nil {
		return err
	}

	agentPorts := xpus.AgentPorts{
		Client: s.cluster.Client, Ports: s.ports, Installation: s.Installation,
	}
	ofXPUs := xpus.Options{
		Infra: s.Role == RoleInfra, Installation: s.Installation, Namespace: s.Namespace,
		Ports: s.ports, AgentPorts: agentPorts, Sessions: agents, Bridges: bridges,
		Forget: s.metrics.forget, Tracer: s.Tracer,
		AgentTimeout: s.AgentTimeout, ResyncPeriod: s.ResyncPeriod, FailedGrace: s.FailedGrace,
		AwayStep: s.AwayStep, Concurrency: s.Concurrency,
	}
	ofPorts := ports.Options{
		Infra: s.Role == RoleInfra, Installation: s.Installation, Namespace: s.Namespace,
		Ports: s.ports, Catalog: s.catalog, Sessions: agents, AgentPorts: agentPorts,
		Bridges: bridges, Provisioning: s.metrics.provisioning, Orphans: s.metrics.orphans,
		Tracer: s.Tracer, ProvisionTimeout: s.ProvisionTimeout, AgentTimeout: s.AgentTimeout,
		OrphanGrace: s.OrphanGrace, ResyncPeriod: s.ResyncPeriod,
		Concurrency: s.Concurrency, ConcurrencyPerXPU: s.ConcurrencyPerXPU,
	}
	var rules error
	if s.Role == RoleAll { // the nodes are in this cluster
		ofPorts.Allocator = s.allocator
		rules = s.taintRules(xpus.TaintOptions{Sessions: agents})
	}

	return errors.Join(rules,
		xpus.Setup(s.manager, s.cluster, ofXPUs),
		ports.Setup(s.manager, s.cluster, ofPorts),
	)
}

// taintRules adds the reconciler of DeviceTaintRules, if they are wanted.
func (s *setup) taintRules(o xpus.TaintOptions) error {
	if s.TaintRulesAfter == nil {
		return nil
	}
	o.After = *s.TaintRulesAfter
	return xpus.SetupTaintRules(s.manager, s.cluster, o)
}

// admissions adds the reconciler that admits XPUPorts in a single cluster.
func (s *setup) admissions() error {
	_, err := s.admit(nil)
	return err
}

// tenant adds the reconcilers of a tenant cluster, which depend on a broker.
func (s *setup) tenant() error {
	watch := &brokerWatch{
		Cluster: s.cluster, ports: s.ports, namespace: s.Namespace, grace: s.BrokerGrace,
	}
	var err error
	watch.wake, err = s.admit(watch.awayMessage)
	return errors.Join(err, watch.setup(s.manager),
		s.taintRules(xpus.TaintOptions{BrokerAway: watch.awayMessage}))
}

// admit adds the reconciler that admits XPUPorts, and returns what has it look at XPUPorts again.
// brokerAway is nil in a single cluster.
func (s *setup) admit(brokerAway func() string) (func(...reconcile.Request), error) {
	return ports.SetupAdmissions(s.manager, s.cluster, ports.AdmissionOptions{
		Namespace: s.Namespace, Ports: s.ports, Allocator: s.allocator, Catalog: s.catalog,
		BrokerAway: brokerAway, ProvisionTimeout: s.ProvisionTimeout,
		AheadGrace: s.AheadGrace, Concurrency: s.Concurrency,
	})
}
