// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/multicluster-runtime/providers/kubeconfig"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

// tenantsNamespace is the broker's namespace.
const tenantsNamespace = "xpu-tenants"

// federation is an infra cluster with an xPU for each of many tenants. The tenants' API servers are
// real ones of CustomResourceDefinitions only (test/devcluster/cmd/crdservers). The benchmark does
// there what the tenants' controllers would do.
type federation struct {
	*site
	servers *process
	tenants []*tenantCluster
	infra   *observer
	control *scaled // controller of the infra cluster

	brokerKubeconfig string
	broker           *scaled
}

// tenantCluster is the cluster of one tenant.
type tenantCluster struct {
	name     string
	client   client.Client
	observer *observer
	ports    []*v1alpha1.XPUPort
}

// measureTenants measures the broker with a growing number of tenants and the same total of
// XPUPorts.
func measureTenants(ctx context.Context, b *bench) (out []Measurement, err error) {
	tenants, ports, more, samples := []int{20, 200}, 10_000, 1000, 300
	if b.quick {
		tenants, ports, more, samples = []int{2}, 8, 4, 2
	}

	for _, n := range tenants {
		rows, err := b.measureFederation(ctx, n, ports, more, samples)
		if err != nil {
			return nil, fmt.Errorf("%d tenants: %w", n, err)
		}
		out = append(out, rows...)
	}

	return out, nil
}

func (b *bench) measureFederation(
	ctx context.Context, tenants, ports, more, samples int,
) (out []Measurement, err error) {
	f, err := b.newFederation(ctx, tenants)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.end()) }()

	if err := f.fill(ctx, f.tenants, tenants); err != nil { // this also creates XPUs and networks
		return nil, err
	}

	filled, err := f.brokerWrites(ctx, func() error {
		return f.fill(ctx, f.tenants, ports-tenants)
	})
	if err != nil {
		return nil, err
	}

	quiet, err := f.propagations(ctx, samples)
	if err != nil {
		return nil, err
	}

	flooded, err := f.whileOneFloods(ctx, more, samples)
	if err != nil {
		return nil, err
	}

	gone, err := f.brokerWrites(ctx, func() error { return f.drain(ctx, f.tenants[0], more) })
	if err != nil {
		return nil, err
	}

	start, err := f.restartBroker(ctx)
	if err != nil {
		return nil, err
	}

	const relay = "bare relay"
	return []Measurement{
		{What: fmt.Sprintf("XPUPort to infra and status back, %d tenants, %d there, p50", tenants,
			ports), Unit: Seconds,
			Samples: []float64{percentile(quiet.broker, 50)}, Reference: relay,
			ReferenceSamples: []float64{percentile(quiet.relay, 50)}, Goal: atMostTimes(2)},
		{What: "  p99", Unit: Seconds,
			Samples: []float64{percentile(quiet.broker, 99)}, Reference: relay,
			ReferenceSamples: []float64{percentile(quiet.relay, 99)}},
		{What: fmt.Sprintf("  while another tenant makes %d, p50", more), Unit: Seconds,
			Samples: []float64{percentile(flooded.broker, 50)}, Reference: relay + " meanwhile",
			ReferenceSamples: []float64{percentile(flooded.relay, 50)},
			Goal:             atMostTimes(2)},
		{What: "  while another tenant does, p99", Unit: Seconds,
			Samples: []float64{percentile(flooded.broker, 99)}, Reference: relay + " meanwhile",
			ReferenceSamples: []float64{percentile(flooded.relay, 99)}},
		{What: "  the broker's writes for each", Unit: PerPod,
			Samples: []float64{filled/float64(ports-tenants) + gone/float64(more)},
			Goal:    atMost(4.05)},
		{What: "  broker, memory (RSS)", Unit: Bytes, Samples: []float64{start.memory},
			Goal: atMost(256e6)},
		{What: "  start of a broker with all there", Unit: Seconds,
			Samples: []float64{start.took.Seconds()}, Goal: atMost(60)},
		{What: "  writes of one that starts, but for Leases", Unit: Count,
			Samples: []float64{start.writes}, Goal: atMost(0)},
	}, nil
}

func (b *bench) newFederation(ctx context.Context, tenants int) (f *federation, err error) {
	name := fmt.Sprintf("of%d", tenants)
	c, err := b.newCluster(ctx, name)
	if err != nil {
		return nil, err
	}

	f = &federation{
		site: &site{cluster: c, b: b, name: name}, tenants: make([]*tenantCluster, tenants),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.end())
		}
	}()

	if err := f.startRoles(ctx); err != nil {
		return f, err
	}
	if err := f.startServers(ctx); err != nil {
		return f, err
	}
	if f.infra, err = observe(ctx, c.config, c.client.Scheme(), &v1alpha1.XPUPort{},
		&corev1.ConfigMap{}); err != nil {
		return f, err
	}

	for range tenants {
		agent, err := opitest.New()
		if err != nil {
			return f, err
		}
		f.agents = append(f.agents, agent)
	}

	// the started processes go on when all have joined
	join := func(_ context.Context, i int) error { return f.join(ctx, i) }
	if err := f.each(ctx, tenants, join); err != nil {
		return f, err
	}

	return f, f.awaitConnected(ctx)
}

// startRoles starts the infra cluster's controller and broker, with the permissions of deploy/.
func (f *federation) startRoles(ctx context.Context) (err error) {
	if err := os.Mkdir(f.tenantsDir(), 0o700); err != nil {
		return err
	}

	for _, file := range []string{
		"namespace/namespace.yaml", "infra/rbac.yaml", "infra/broker-rbac.yaml",
	} {
		if err := f.apply(ctx, filepath.Join(f.b.source, "deploy", file)); err != nil {
			return err
		}
	}

	if f.controllerKubeconfig, err = f.kubeconfig(ctx, namespace, "xpu-controller"); err != nil {
		return err
	}
	if f.brokerKubeconfig, err = f.kubeconfig(ctx, tenantsNamespace, "xpu-broker"); err != nil {
		return err
	}
	if f.control, err = f.b.startRole(f.dir, "infra", f.controllerKubeconfig,
		namespace); err != nil {
		return err
	}

	f.broker, err = f.startBroker()
	return err
}

// tenantsDir returns the directory of the tenants' kubeconfigs and the broker's output.
func (f *federation) tenantsDir() string { return filepath.Join(f.dir, "tenants") }

// startServers starts the tenants' API servers.
func (f *federation) startServers(ctx context.Context) (err error) {
	dir := f.tenantsDir()
	f.servers, err = f.b.start(dir, "crdservers",
		"--etcd="+f.environment.ControlPlane.Etcd.URL.String(),
		"--count="+strconv.Itoa(len(f.tenants)),
		"--crds="+filepath.Join(f.b.source, "deploy", "crds"), "--out="+dir)
	if err != nil {
		return err
	}

	for {
		if _, err := os.Stat(filepath.Join(dir, "ready")); err == nil {
			return nil
		}
		if err := pauseWith(ctx, f.servers, 100*time.Millisecond); err != nil {
			return fmt.Errorf("API servers of %d tenants: %w", len(f.tenants), err)
		}
	}
}

func (f *federation) startBroker() (*scaled, error) {
	return f.b.startRole(f.tenantsDir(), "broker", f.brokerKubeconfig, tenantsNamespace)
}

// join adds a tenant with a node, an xPU and a network.
func (f *federation) join(ctx context.Context, i int) error {
	t := &tenantCluster{name: fmt.Sprintf("%s-%d", f.name, i)}
	f.tenants[i] = t
	file := filepath.Join(f.tenantsDir(), strconv.Itoa(i)+".kubeconfig")
	config, err := clientcmd.BuildConfigFromFlags("", file)
	if err != nil {
		return err
	}

	config.QPS = -1
	if t.client, err = client.New(config, client.Options{Scheme: f.client.Scheme()}); err != nil {
		return err
	}
	if t.observer, err = observe(ctx, config, f.client.Scheme(), &v1alpha1.XPUPort{},
		&v1alpha1.DevicePool{}); err != nil {
		return err
	}

	go f.relay(ctx, t)
	if err := f.tell(ctx, i, file); err != nil {
		return err
	}

	return t.client.Create(ctx,
		&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "blue"},
			Spec: v1alpha1.XPUNetworkSpec{
				AllowedNamespaces: v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromAll},
			}})
}

// tell creates the tenant and its xPU in the infra cluster.
func (f *federation) tell(ctx context.Context, i int, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}

	t, first := f.tenants[i], int32(1+i*10)
	for _, o := range []client.Object{
		&corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: tenantsNamespace, Name: t.name,
				Labels: map[string]string{kubeconfig.DefaultKubeconfigSecretLabel: "true"},
			},
			Data: map[string][]byte{kubeconfig.DefaultKubeconfigSecretKey: text},
		},
		&v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: t.name}, Spec: v1alpha1.XPUSpec{
			NodeName: t.name + ".node1", Endpoint: f.agents[i].Config().Endpoint, Insecure: true,
		}},
		&v1alpha1.XPUTenant{ObjectMeta: metav1.ObjectMeta{Name: t.name},
			Spec: v1alpha1.XPUTenantSpec{
				Member:         v1alpha1.TenantMember{SecretName: t.name},
				XPUs:           v1alpha1.TenantXPUs{Names: []string{t.name}},
				VLANs:          v1alpha1.VLANRange{First: first, Last: first + 9},
				DeletionPolicy: v1alpha1.DeletionDelete,
			}},
	} {
		if err := f.client.Create(ctx, o); err != nil {
			return err
		}
	}

	return nil
}

// awaitConnected waits until all tenants have joined.
func (f *federation) awaitConnected(ctx context.Context) error {
	for {
		connected, err := f.broker.sum(ctx, func(series string) bool {
			return strings.HasPrefix(series, "xpu_broker_tenant_connected{")
		})
		if err != nil || int(connected) == len(f.tenants) {
			return err
		}
		if err := pauseWith(ctx, f.broker.process, 100*time.Millisecond); err != nil {
			return fmt.Errorf("%.0f of %d tenants are connected: %w", connected,
				len(f.tenants), err)
		}
	}
}

// port returns the next XPUPort of a tenant, as its controller makes it for a claim.
func (t *tenantCluster) port() *v1alpha1.XPUPort {
	n := len(t.ports)
	vf := function.ID{
		Address: pci.Address(fmt.Sprintf("0000:%02x:%02x.%d", 0x40+n/256, n%256/8, n%8)),
	}
	p := claim.NewPort("default", vf, "fast", v1alpha1.XPUPortSpec{
		NodeName: "node1", XPU: t.name, Network: "blue",
		MAC: string(claim.DerivedMAC("", "node1", vf)),
		Claim: v1alpha1.ClaimRef{
			Name: fmt.Sprintf("claim-%d", n), UID: types.UID(fmt.Sprintf("uid-%d", n)),
		},
	})

	t.ports = append(t.ports, p)
	return p
}

// fill creates n XPUPorts, distributed among tenants, and waits until all are up and the tenants
// know.
func (f *federation) fill(ctx context.Context, tenants []*tenantCluster, n int) error {
	ports, of := make([]*v1alpha1.XPUPort, n), make([]*tenantCluster, n)
	for i := range n {
		of[i] = tenants[i%len(tenants)]
		ports[i] = of[i].port()
	}

	if err := f.each(ctx, n, func(ctx context.Context, i int) error {
		return of[i].client.Create(ctx, ports[i])
	}); err != nil {
		return err
	}

	return f.each(ctx, n, func(ctx context.Context, i int) error {
		_, err := of[i].observer.await(ctx, ports[i].Name)
		return err
	})
}

// drain deletes the last n XPUPorts of a tenant.
func (f *federation) drain(ctx context.Context, t *tenantCluster, n int) error {
	going := t.ports[len(t.ports)-n:]
	t.ports = t.ports[:len(t.ports)-n]
	if err := f.each(ctx, n, func(ctx context.Context, i int) error {
		return t.client.Delete(ctx, going[i])
	}); err != nil {
		return err
	}

	for {
		var left v1alpha1.XPUPortList
		if err := t.client.List(ctx, &left); err != nil || len(left.Items) == len(t.ports) {
			return err
		}
		if err := pauseWith(ctx, f.broker.process, 500*time.Millisecond); err != nil {
			return fmt.Errorf("%d XPUPorts are left, want %d: %w", len(left.Items),
				len(t.ports), err)
		}
	}
}

// brokerWrites returns how many writing requests the broker sends meanwhile, except for Leases,
// which are the only ones with PUT.
func (f *federation) brokerWrites(ctx context.Context, during func() error) (float64, error) {
	before, err := f.broker.patches(ctx)
	if err != nil {
		return 0, err
	}
	if err := errors.Join(during(), pauseWith(ctx, f.broker.process, settling)); err != nil {
		return 0, err
	}

	after, err := f.broker.patches(ctx)
	return after - before, err
}

func (p *scaled) patches(ctx context.Context) (n float64, err error) {
	return p.sum(ctx, func(series string) bool {
		return strings.HasPrefix(series, `rest_client_requests_total{code="2`) &&
			!strings.Contains(series, `method="GET"`) &&
			!strings.Contains(series, `method="PUT"`)
	})
}

// propagation is the time in seconds from a tenant to the infra cluster and back: from the answer
// to the creation until the copy is seen in the infra cluster, plus from the copy's new status
// there until it is seen in the tenant's cluster.
type propagation struct{ broker, relay []float64 }

// propagations measures XPUPorts of all tenants but the first through the broker, alternating with
// DevicePools through the bare relay.
func (f *federation) propagations(ctx context.Context, samples int) (p propagation, err error) {
	for i := range samples {
		t := f.tenants[1+i%(len(f.tenants)-1)]
		port := t.port()
		took, err := f.propagate(ctx, t, port, t.name+".default."+port.Name, port.Name)
		if err != nil {
			return p, err
		}

		p.broker = append(p.broker, took)
		pool := &v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: "relayed-" + port.Name},
			Spec: v1alpha1.DevicePoolSpec{
				Selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}},
			}}
		if took, err = f.propagate(ctx, t, pool, t.name+"."+pool.Name, pool.Name); err != nil {
			return p, err
		}

		p.relay = append(p.relay, took)
	}
	return p, nil
}

func (f *federation) propagate(
	ctx context.Context, t *tenantCluster, o client.Object, there, here string,
) (float64, error) {
	if err := t.client.Create(ctx, o); err != nil {
		return 0, err
	}

	created := time.Now()
	there1, err := f.infra.await(ctx, there)
	if err != nil {
		return 0, err
	}

	back, err := t.observer.await(ctx, here)
	if err != nil {
		return 0, err
	}

	return (there1.seen.Sub(created) + back.ready.Sub(there1.ready)).Seconds(), nil
}

// whileOneFloods measures the propagation for the other tenants while the first creates n XPUPorts.
func (f *federation) whileOneFloods(
	ctx context.Context, n, samples int,
) (p propagation, err error) {
	group, ctx := errgroup.WithContext(ctx)
	flooded := make(chan struct{})
	group.Go(func() error {
		defer close(flooded)
		return f.fill(ctx, f.tenants[:1], n)
	})

	group.Go(func() error {
		for len(p.broker) < samples {
			select {
			case <-flooded:
				return nil
			default:
			}

			few, err := f.propagations(ctx, 1)
			if err != nil {
				return err
			}

			p.broker, p.relay = append(p.broker, few.broker...), append(p.relay, few.relay...)
		}
		return nil
	})

	return p, group.Wait()
}

// brokerStart is the cost of a broker's start.
type brokerStart struct {
	took           time.Duration
	writes, memory float64
}

// restartBroker starts another broker in a settled federation.
func (f *federation) restartBroker(ctx context.Context) (s brokerStart, err error) {
	if err := f.broker.end(); err != nil {
		return s, err
	}

	begin := time.Now()
	if f.broker, err = f.startBroker(); err != nil {
		return s, err
	}

	if err := f.broker.await(ctx, "metrics", func(ctx context.Context) error {
		_, err := f.broker.patches(ctx)
		return err
	}); err != nil {
		return s, err
	}

	if err := f.awaitConnected(ctx); err != nil {
		return s, err
	}

	// The start is over once the broker reconciles nothing more.
	last := -1.0
	for quiet := time.Now(); time.Since(quiet) < 2*time.Second; {
		looked, err := f.broker.sum(ctx, func(series string) bool {
			return strings.HasPrefix(series, "controller_runtime_reconcile_total{")
		})
		if err != nil {
			return s, err
		}

		if looked != last {
			quiet, last = time.Now(), looked
			s.took = quiet.Sub(begin)
		}
		if err := pauseWith(ctx, f.broker.process, 200*time.Millisecond); err != nil {
			return s, err
		}
	}

	if s.writes, err = f.broker.patches(ctx); err != nil {
		return s, err
	}

	s.memory, err = f.broker.resident()
	return s, err
}

func (f *federation) end() error {
	var errs []error
	for _, p := range []*scaled{f.broker, f.control} {
		if p != nil {
			errs = append(errs, p.end())
		}
	}

	for _, t := range f.tenants {
		if t != nil && t.observer != nil {
			t.observer.stop()
		}
	}

	if f.infra != nil {
		f.infra.stop()
	}

	if f.servers != nil {
		errs = append(errs, f.servers.end())
	}

	for _, agent := range f.agents {
		agent.Kill()
	}

	return errors.Join(append(errs, f.stop())...)
}

// relay does for a tenant's DevicePools what a minimal broker would do for XPUPorts, until ctx
// ends: it creates a ConfigMap in the infra cluster for each, and writes a status once the
// ConfigMap is seen there.
func (f *federation) relay(ctx context.Context, t *tenantCluster) {
	for {
		name, err := t.observer.nextPool(ctx)
		if err != nil {
			return
		}

		there := &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: tenantsNamespace, Name: t.name + "." + name},
		}
		if err := f.client.Create(ctx, there); err != nil {
			return // the waiting caller reports it
		}
		if _, err := f.infra.await(ctx, there.Name); err != nil {
			return
		}

		pool := &v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: name}}
		told := client.RawPatch(types.MergePatchType, []byte(`{"status":{"nodeCount":1}}`))
		if err := t.client.Status().Patch(ctx, pool, told); err != nil {
			return
		}
	}
}

// observer records when objects were first seen, and when they were ready. Safe for concurrent use.
type observer struct {
	stop  context.CancelFunc
	pools chan string // names of new DevicePools

	mu      sync.Mutex
	changed *sync.Cond
	objects map[string]observed // by name
}

type observed struct{ seen, ready time.Time }

// observe watches objects of some kinds until stop is called.
func observe(
	ctx context.Context, config *rest.Config, scheme *runtime.Scheme, kinds ...client.Object,
) (*observer, error) {
	ctx, stop := context.WithCancel(ctx)
	o := &observer{stop: stop, objects: map[string]observed{}, pools: make(chan string, 16)}
	o.changed = sync.NewCond(&o.mu)
	context.AfterFunc(ctx, o.changed.Broadcast)
	objects, err := cache.New(config,
		cache.Options{Scheme: scheme, DefaultTransform: cache.TransformStripManagedFields()})
	if err != nil {
		return o, err
	}

	for _, kind := range kinds {
		informer, err := objects.GetInformer(ctx, kind, cache.BlockUntilSynced(false))
		if err != nil {
			return o, err
		}

		_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
			AddFunc: func(object any) {
				o.note(object)
				if pool, ok := object.(*v1alpha1.DevicePool); ok {
					o.pools <- pool.Name
				}
			},
			UpdateFunc: func(_, object any) { o.note(object) },
		})

		if err != nil {
			return o, err
		}
	}

	go func() {
		if err := objects.Start(ctx); err != nil {
			stop()
		}
	}()

	if !objects.WaitForCacheSync(ctx) {
		return o, fmt.Errorf("watch %s: %w", config.Host, context.Cause(ctx))
	}

	return o, nil
}

func (o *observer) nextPool(ctx context.Context) (string, error) {
	select {
	case name := <-o.pools:
		return name, nil
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func (o *observer) note(object any) {
	now, ready := time.Now(), true
	var name string
	switch of := object.(type) {
	case *v1alpha1.XPUPort:
		name, ready = of.Name, v1alpha1.ReadyOf(of.Status.Conditions).Status == metav1.ConditionTrue
	case *v1alpha1.DevicePool:
		name, ready = of.Name, of.Status.NodeCount > 0
	case *corev1.ConfigMap:
		name = of.Name
	default:
		return
	}

	o.mu.Lock()
	defer o.mu.Unlock()

	known := o.objects[name]
	if known.seen.IsZero() {
		known.seen = now
	}

	if ready && known.ready.IsZero() {
		known.ready = now
	}

	o.objects[name] = known
	o.changed.Broadcast()
}

// await waits until an object is ready.
func (o *observer) await(ctx context.Context, name string) (observed, error) {
	defer context.AfterFunc(ctx, o.changed.Broadcast)()
	o.mu.Lock()
	defer o.mu.Unlock()

	for o.objects[name].ready.IsZero() {
		if ctx.Err() != nil {
			return observed{}, fmt.Errorf("%s is not ready: %w", name, ctx.Err())
		}
		o.changed.Wait()
	}

	return o.objects[name], nil
}
