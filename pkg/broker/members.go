// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	inventory "sigs.k8s.io/cluster-inventory-api/apis/v1alpha1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/cluster"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	mcmanager "sigs.k8s.io/multicluster-runtime/pkg/manager"
	"sigs.k8s.io/multicluster-runtime/pkg/multicluster"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/connerror"
)

// Members is the provider of a multicluster manager. It connects to the cluster of each XPUTenant,
// under the XPUTenant's name.
//
// A cluster joins once all of its objects have been read, so that an unresponsive cluster delays no
// other. It leaves when its credentials change or disappear. Safe for concurrent use.
type Members struct {
	Options
	log     logr.Logger
	scheme  *runtime.Scheme
	infra   client.Client
	metrics *metrics
	aware   multicluster.Aware

	wrap func(*rest.Config) // for tests; may be nil

	// onJoin is called after a cluster has joined, onChange after its state has changed.
	onJoin, onChange func(tenant string)

	started chan struct{} // closed once ctx and aware are set
	ctx     context.Context

	mu       sync.Mutex
	byTenant map[string]*member
	engaged  map[multicluster.ClusterName]cluster.Cluster // clusters that the reconcilers know
	indexes  []fieldIndex
}

// fieldIndex is an index that every cluster has.
type fieldIndex struct {
	object  client.Object
	field   string
	extract client.IndexerFunc
}

// member is the cluster of one tenant, joined or not.
type member struct {
	fingerprint [sha256.Size]byte
	stop        context.CancelFunc
	running     sync.WaitGroup // the caches
	stopped     chan struct{}  // closed when everything has ended
	state       memberState
}

// memberState is the source of the condition Connected of an XPUTenant. The reason is empty while
// the state is unknown.
type memberState struct {
	reason, message string
	joined          bool // with the current credentials
}

// NewMembers returns a provider without clusters. [Setup] starts to add them.
func NewMembers() *Members {
	return &Members{
		started: make(chan struct{}), byTenant: map[string]*member{},
		engaged: map[multicluster.ClusterName]cluster.Cluster{},
	}
}

func (m *Members) setup(mgr mcmanager.Manager, o Options) error {
	infra := mgr.GetLocalManager()
	m.metrics = newMetrics(o.Registerer)
	m.Options, m.infra, m.scheme = o, infra.GetClient(), infra.GetScheme()
	m.log = infra.GetLogger().WithName("members")
	ofSecret := func(ctx context.Context, secret client.Object) []reconcile.Request {
		return m.requests(ctx, client.MatchingFields{tenantsBySecret: secret.GetName()})
	}
	ofProfile := func(ctx context.Context, profile client.Object) []reconcile.Request {
		return m.requests(ctx, client.MatchingFields{tenantsByProfile: profile.GetName()})
	}
	c := ctrl.NewControllerManagedBy(infra).Named("member").
		For(&v1alpha1.XPUTenant{}, builder.WithPredicates(predicate.GenerationChangedPredicate{})).
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(ofSecret))
	if o.ProfileAccess != nil {
		c.Watches(&inventory.ClusterProfile{}, handler.EnqueueRequestsFromMapFunc(ofProfile))
	}

	return c.Complete(m)
}

// requests returns requests for the listed tenants.
func (m *Members) requests(
	ctx context.Context, options ...client.ListOption,
) (requests []reconcile.Request) {
	var tenants v1alpha1.XPUTenantList
	if err := m.infra.List(ctx, &tenants, options...); err != nil {
		return nil // the cache is not running
	}

	for i := range tenants.Items {
		requests = append(requests,
			reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&tenants.Items[i])})
	}

	return requests
}

// Start implements [multicluster.ProviderRunnable].
func (m *Members) Start(ctx context.Context, aware multicluster.Aware) error {
	m.ctx, m.aware = ctx, aware
	close(m.started)
	<-ctx.Done()
	m.mu.Lock()
	all := make([]*member, 0, len(m.byTenant))
	for _, known := range m.byTenant {
		all = append(all, known)
	}

	m.mu.Unlock()
	for _, known := range all {
		<-known.stopped
	}

	return nil
}

// Get implements [multicluster.Provider].
func (m *Members) Get(
	_ context.Context, name multicluster.ClusterName,
) (cluster.Cluster, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	cl, ok := m.engaged[name]
	if !ok {
		return nil, fmt.Errorf("tenant %s: %w", name, multicluster.ErrClusterNotFound)
	}
	return cl, nil
}

// IndexField implements [multicluster.Provider].
func (m *Members) IndexField(
	ctx context.Context, object client.Object, field string, extract client.IndexerFunc,
) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.indexes = append(m.indexes, fieldIndex{object, field, extract})
	for _, cl := range m.engaged {
		if err := cl.GetFieldIndexer().IndexField(ctx, object, field, extract); err != nil {
			return err
		}
	}
	return nil
}

// Reconcile makes the tenant's cluster a member with its current credentials.
func (m *Members) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	select {
	case <-m.started:
	case <-ctx.Done():
		return ctrl.Result{}, ctx.Err()
	}

	var tenant v1alpha1.XPUTenant
	exists, err := getIfExists(ctx, m.infra, req.NamespacedName, &tenant)
	if err != nil {
		return ctrl.Result{}, err
	}
	if !exists {
		m.leave(req.Name)
		return ctrl.Result{}, nil
	}

	creds, problem, err := m.credentialsFor(ctx, &tenant)
	if err != nil {
		return ctrl.Result{}, err
	}

	m.join(req.Name, creds, problem)
	return ctrl.Result{}, nil
}

// join makes the cluster a member with these credentials. If there is a problem with them, it only
// records the problem. An unchanged member stays connected.
func (m *Members) join(tenant string, creds credentials, problem string) {
	fingerprint := sha256.Sum256(fmt.Appendf(creds.content, "%s", problem))
	m.mu.Lock()
	before := m.byTenant[tenant]
	if before != nil && before.fingerprint == fingerprint {
		m.mu.Unlock()
		return
	}

	ctx, stop := context.WithCancel(m.ctx)
	next := &member{fingerprint: fingerprint, stop: stop, stopped: make(chan struct{})}
	m.byTenant[tenant] = next
	m.mu.Unlock()

	go func() {
		defer close(next.stopped)
		defer next.running.Wait()

		if before != nil {
			before.stop()
			<-before.stopped
		}

		if problem != "" {
			m.setState(tenant, next,
				memberState{reason: v1alpha1.ReasonMemberNotFound, message: problem})
			return
		}

		m.run(ctx, tenant, next, creds)
	}()
}

// leave ends the membership of the tenant's cluster.
func (m *Members) leave(tenant string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if known := m.byTenant[tenant]; known != nil {
		delete(m.byTenant, tenant)
		known.stop()
		m.metrics.forget(tenant)
	}
}

// state returns what is known about a tenant's cluster.
func (m *Members) state(tenant string) memberState {
	m.mu.Lock()
	defer m.mu.Unlock()
	if known := m.byTenant[tenant]; known != nil {
		return known.state
	}
	return memberState{}
}

// setState records what is known about a cluster.
func (m *Members) setState(tenant string, known *member, state memberState) {
	state.message = cut(connerror.Text(state.message))
	if m.recordState(tenant, known, state) {
		m.log.Info("What is known of a tenant's cluster has changed", "tenant", tenant, "reason",
			state.reason, "message", state.message)
		m.onChange(tenant)
	}
}

// recordState is setState without its report. isNew is false for a member that has left or that was
// replaced, because the state and the metrics of its tenant are another's.
func (m *Members) recordState(tenant string, known *member, state memberState) (isNew bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.byTenant[tenant] != known || known.state == state {
		return false
	}

	known.state = state
	connected := 0.0
	if state.reason == v1alpha1.ReasonConnected {
		connected = 1
	}
	m.metrics.connected.WithLabelValues(tenant).Set(connected)

	return true
}

// observeRenewal counts a renewal of the Lease, unless the member has left or was replaced: see
// recordState.
func (m *Members) observeRenewal(tenant string, known *member, took time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.byTenant[tenant] == known {
		m.metrics.renewal.WithLabelValues(tenant).Observe(took.Seconds())
	}
}

// run renews the Lease of the cluster periodically, and joins the cluster after the first success.
// The cluster stays joined while it is unreachable, and leaves if another infra cluster takes the
// Lease.
func (m *Members) run(ctx context.Context, tenant string, known *member, creds credentials) {
	config, namespace, err := creds.config()
	if err != nil {
		m.setState(tenant, known, memberState{
			reason:  v1alpha1.ReasonInvalidConfig,
			message: fmt.Sprintf("%s cannot be used; correct it: %s", creds.origin, err),
		})
		return
	}

	config = rest.AddUserAgent(config, "xpu-broker")
	if m.wrap != nil {
		m.wrap(config)
	}

	traffic := newTraffic(tenant, m.Limits)
	limiter := newCacheLimiter(traffic)
	lease, err := newLease(traffic.client(ctx, config), cmp.Or(namespace, m.MemberNamespace),
		m.Options)
	if err != nil {
		m.setState(tenant, known, memberState{
			reason:  v1alpha1.ReasonInvalidConfig,
			message: fmt.Sprintf("%s cannot be used: %s", creds.origin, err),
		})
		return
	}

	var leave context.CancelFunc // nil unless joined
	for ctx.Err() == nil {
		began := time.Now()
		err := lease.renew(ctx)
		m.observeRenewal(tenant, known, time.Since(began))

		if err == nil && leave == nil {
			limiter = newCacheLimiter(traffic)
			if leave, err = m.engage(ctx, known, config, limiter); err == nil {
				m.onJoin(tenant)
			}
		}

		if err == nil {
			err = limiter.problem()
		}

		if _, taken := errors.AsType[*heldError](err); taken && leave != nil {
			leave()
			leave = nil
		}

		if ctx.Err() != nil {
			return
		}

		state := stateFor(err, config.Host)
		state.joined = leave != nil
		m.setState(tenant, known, state)
		// with jitter, so that not all clusters are asked at once
		pause := m.RenewPeriod - rand.N(m.RenewPeriod/10+1)
		select {
		case <-ctx.Done():
		case <-limiter.newRefusal:
		case <-time.After(pause):
		}
	}
}

// stateFor returns the state that an error of the cluster at host means.
func stateFor(err error, host string) memberState {
	taken, isTaken := errors.AsType[*heldError](err)
	refused, isRefused := errors.AsType[*refusal](err)
	switch {
	case isRefused:
		return memberState{reason: refused.reason, message: refused.message}
	case err == nil:
		return memberState{
			reason:  v1alpha1.ReasonConnected,
			message: fmt.Sprintf("the cluster at %s answers", host),
		}
	case isTaken:
		return memberState{reason: v1alpha1.ReasonConflict, message: taken.Error()}
	case apierrors.IsUnauthorized(err), apierrors.IsForbidden(err):
		return memberState{reason: v1alpha1.ReasonUnauthorized,
			message: fmt.Sprintf("the cluster at %s refuses the credentials; renew them in "+
				"the Secret, and see what the ServiceAccount may do there: %s", host, err)}
	}

	return memberState{
		reason:  v1alpha1.ReasonUnreachable,
		message: fmt.Sprintf("the cluster at %s does not answer: %s", host, err),
	}
}

// memberKinds returns the kinds that are read in a tenant's cluster.
func memberKinds() []client.Object {
	return []client.Object{
		&v1alpha1.XPUPort{}, &v1alpha1.XPUNetwork{}, &v1alpha1.XPUNode{}, &v1alpha1.XPU{},
	}
}

// engage joins the cluster. It returns once all objects have been read and the reconcilers know the
// cluster. They run until leave is called.
func (m *Members) engage(
	ctx context.Context, known *member, config *rest.Config, limiter *cacheLimiter,
) (leave context.CancelFunc, err error) {
	ctx, leave = context.WithCancel(ctx)
	defer func() {
		if err != nil {
			leave()
			leave = nil
		}
	}()

	cl, err := cluster.New(limiter.client(ctx, config), func(o *cluster.Options) {
		o.Scheme, o.Logger = m.scheme, m.log.WithValues("tenant", limiter.tenant)
		o.MapperProvider = restMapper
		o.Cache = cache.Options{NewInformer: limiter.newInformer, ReaderFailOnMissingInformer: true}
	})

	if err != nil {
		return leave, err
	}

	for _, kind := range memberKinds() {
		if _, err := cl.GetCache().GetInformer(ctx,
			kind, cache.BlockUntilSynced(false)); err != nil {
			return leave, err
		}
	}

	known.running.Go(func() {
		if err := cl.Start(ctx); err != nil {
			m.log.Error(brief(err), "The caches of a tenant's cluster ended",
				"tenant", limiter.tenant)
		}
	})

	if err := m.waitForSync(ctx, cl.GetCache(), limiter); err != nil {
		return leave, err
	}

	m.mu.Lock()
	indexes := m.indexes
	m.mu.Unlock()

	for _, index := range indexes {
		if err := cl.GetFieldIndexer().IndexField(ctx, index.object, index.field,
			index.extract); err != nil {
			return leave, err
		}
	}

	name := multicluster.ClusterName(limiter.tenant)
	m.mu.Lock()
	m.engaged[name] = cl
	m.mu.Unlock()
	context.AfterFunc(ctx, func() { m.forget(name, cl) })

	return leave, m.aware.Engage(ctx, name, cl)
}

// forget hides a cluster from the reconcilers, unless another cluster has its name now.
func (m *Members) forget(name multicluster.ClusterName, cl cluster.Cluster) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.engaged[name] == cl {
		delete(m.engaged, name)
	}
}

// waitForSync waits until all objects of a cluster have been read, or one kind is refused.
func (m *Members) waitForSync(ctx context.Context, from cache.Cache, limiter *cacheLimiter) error {
	ctx, done := context.WithTimeout(ctx, m.JoinTimeout)
	defer done()

	synced := make(chan bool, 1)
	go func() { synced <- from.WaitForCacheSync(ctx) }()

	for {
		select {
		case <-limiter.newRefusal:
			if err := limiter.problem(); err != nil {
				return err
			}
		case all := <-synced:
			if err := limiter.problem(); err != nil || all {
				return err
			}
			return fmt.Errorf("its objects could not be read within %s; see whether it has the "+
				"CustomResourceDefinitions and lets "+
				"the broker list them", m.JoinTimeout)
		}
	}
}

// restMapper returns a fixed mapping of the kinds used in a tenant's cluster, so that no discovery
// is needed.
func restMapper(*rest.Config, *http.Client) (meta.RESTMapper, error) {
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(v1alpha1.SchemeGroupVersion.WithKind("XPUPort"), meta.RESTScopeNamespace)
	mapper.Add(v1alpha1.SchemeGroupVersion.WithKind("XPUNetwork"), meta.RESTScopeRoot)
	mapper.Add(v1alpha1.SchemeGroupVersion.WithKind("XPUNode"), meta.RESTScopeRoot)
	mapper.Add(v1alpha1.SchemeGroupVersion.WithKind("XPU"), meta.RESTScopeRoot)
	mapper.Add(leaseKind, meta.RESTScopeNamespace)
	return mapper, nil
}

// now returns the current time in the format of a Lease.
func now() *metav1.MicroTime { return new(metav1.NowMicro()) }
