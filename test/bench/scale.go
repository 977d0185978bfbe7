// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

// scaleBenchmarks measure the cost of the control plane as clusters grow, with OPI agents and nodes
// in memory.
func scaleBenchmarks() []benchmark {
	return []benchmark{
		{"flap", measureFlap},
		{"start", measureStart},
		{"ports", measurePortRate},
		{"nodes", measureNodes},
		{"tenants", measureTenants},
		{"largest", measureLargest},
	}
}

// requestsAtOnce is how many requests to the API server the benchmark runs in parallel.
const requestsAtOnce = 32

// site is a cluster with xPUs, networks and claims.
type site struct {
	*cluster
	b        *bench
	name     string
	agents   []*opitest.Agent
	networks []string
	claims   []*resourceapi.ResourceClaim
}

// newSite creates xPUs, each with an agent, and networks.
func (b *bench) newSite(ctx context.Context, name string, xpus, networks int) (s *site, err error) {
	c, err := b.startCluster(ctx)
	if err != nil {
		return nil, err
	}

	s = &site{cluster: c, b: b, name: name}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.end(ctx))
		}
	}()

	for range xpus {
		agent, err := opitest.New()
		if err != nil {
			return s, err
		}
		s.agents = append(s.agents, agent)
	}

	var objects []client.Object
	for i, agent := range s.agents {
		objects = append(objects,
			&v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: s.node(i)}, Spec: v1alpha1.XPUSpec{
				NodeName: s.node(i), Endpoint: agent.Config().Endpoint, Insecure: true,
			}})
	}

	for i := range networks {
		s.networks = append(s.networks, fmt.Sprintf("%s-%d", name, i))
		objects = append(objects,
			&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: s.networks[i]},
				Spec: v1alpha1.XPUNetworkSpec{
					VLAN:              int32(i + 1),
					AllowedNamespaces: v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromAll},
					Subnets:           []string{fmt.Sprintf("10.%d.0.0/16", i)},
				}})
	}

	return s, s.each(ctx, len(objects), func(ctx context.Context, i int) error {
		return s.client.Create(ctx, objects[i])
	})
}

func (s *site) node(i int) string { return fmt.Sprintf("%s-n%d", s.name, i) }

// each calls do for 0 to n-1, some in parallel.
func (s *site) each(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(requestsAtOnce)
	for i := range n {
		group.Go(func() error { return do(ctx, i) })
	}
	return group.Wait()
}

// claim creates and allocates n more claims, spread over xPUs and networks.
func (s *site) claim(ctx context.Context, n int) error {
	first := len(s.claims)
	s.claims = append(s.claims, make([]*resourceapi.ResourceClaim, n)...)
	return s.each(ctx, n, func(ctx context.Context, i int) error {
		c := s.claimNumber(first + i)
		status := c.Status
		if err := s.client.Create(ctx, c); err != nil {
			return err
		}
		s.claims[first+i] = c
		c.Status = status
		return s.client.Status().Update(ctx, c)
	})
}

// bare measures the time to create and allocate n claims like claim does, but for another driver,
// so that no controller handles them. It deletes them before it returns.
func (s *site) bare(ctx context.Context, n int) (seconds float64, err error) {
	claims := make([]*resourceapi.ResourceClaim, n)
	begin := time.Now()

	err = s.each(ctx, n, func(ctx context.Context, i int) error {
		c := s.claimNumber(len(s.claims) + i)
		c.Name += "-bare"
		c.Status.Allocation.Devices.Config = nil
		c.Status.Allocation.Devices.Results[0].Driver = "other.example.com"
		status := c.Status
		if err := s.client.Create(ctx, c); err != nil {
			return err
		}

		claims[i], c.Status = c, status
		return s.client.Status().Update(ctx, c)
	})

	seconds = time.Since(begin).Seconds()
	if err != nil {
		return 0, err
	}

	return seconds, s.each(ctx, n, func(ctx context.Context, i int) error {
		return s.client.Delete(ctx, claims[i])
	})
}

func (s *site) claimNumber(number int) *resourceapi.ResourceClaim {
	xpu, index := number%len(s.agents), number/len(s.agents)
	id := claim.PoolID{Node: s.node(xpu), PF: "0000:3b:00.0", DevicePool: s.name}

	vf := function.ID{
		Address: pci.Address(fmt.Sprintf("0000:%02x:%02x.%d", 0x40+index/256,
			index%256/8, index%8)),
	}

	c := claimtest.Allocated(fmt.Sprintf("%s-%d", s.name, number),
		claimtest.Result("nic", id.String(), vf.DeviceName()),
		claimtest.FromClaim(fmt.Sprintf(`"network": %q`,
			s.networks[(number/len(s.agents)+number)%len(s.networks)])))

	c.UID = ""
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{
		{Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "xpu"}},
	}
	return c
}

// up waits until n Ports are at the agents, and all Ports in the API server are Ready.
func (s *site) up(ctx context.Context, controller *process, n int) error {
	for {
		have := 0
		for _, agent := range s.agents {
			have += len(agent.Ports())
		}

		if have == n {
			return s.allReady(ctx, controller, n)
		}
		if err := pauseWith(ctx, controller, 200*time.Millisecond); err != nil {
			return fmt.Errorf("%d of %d Ports are at the agents: %w", have, n, err)
		}
	}
}

// atAgents waits until the agents have received requests for n Ports in total. Its cost does not
// depend on n.
func (s *site) atAgents(ctx context.Context, controller *process, n int) error {
	for {
		have := 0
		for _, agent := range s.agents {
			have += agent.Calls("CreateBridgePort")
		}

		if have >= n {
			return nil
		}
		if err := pauseWith(ctx, controller, 10*time.Millisecond); err != nil {
			return fmt.Errorf("%d of %d Ports are at the agents: %w", have, n, err)
		}
	}
}

// allReady waits until all n Ports in the API server are Ready.
func (s *site) allReady(ctx context.Context, controller *process, n int) error {
	for {
		var ports v1alpha1.XPUPortList
		if err := s.client.List(ctx, &ports); err != nil {
			return err
		}

		ready := 0
		for i := range ports.Items {
			if v1alpha1.ReadyOf(ports.Items[i].Status.Conditions).Status == metav1.ConditionTrue {
				ready++
			}
		}

		if ready == n {
			return nil
		}
		if err := pauseWith(ctx, controller, time.Second); err != nil {
			return fmt.Errorf("%d of %d Ports are Ready: %w", ready, n, err)
		}
	}
}

// pauseWith sleeps, but at most as long as the controller runs.
func pauseWith(ctx context.Context, controller *process, pause time.Duration) error {
	select {
	case <-controller.ended:
		return controller.died()
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(pause):
		return nil
	}
}

// end deletes everything without the controller.
func (s *site) end(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	errs := []error{
		s.client.DeleteAllOf(ctx, &resourceapi.ResourceClaim{}, client.InNamespace("default")),
	}
	for _, list := range []client.ObjectList{
		&v1alpha1.XPUPortList{}, &v1alpha1.XPUNetworkList{}, &v1alpha1.XPUList{},
		&v1alpha1.XPUNodeList{}, &v1alpha1.DevicePoolList{},
	} {
		errs = append(errs, s.clear(ctx, list))
	}

	for _, agent := range s.agents {
		agent.Kill()
	}

	return errors.Join(errs...)
}

// clear deletes all objects of a kind, including their finalizers.
func (s *site) clear(ctx context.Context, list client.ObjectList) error {
	if err := s.client.List(ctx, list); err != nil {
		return err
	}

	items, err := meta.ExtractList(list)
	if err != nil {
		return err
	}

	free := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
	return s.each(ctx, len(items), func(ctx context.Context, i int) error {
		o := items[i].(client.Object)
		if len(o.GetFinalizers()) > 0 {
			if err := s.client.Patch(ctx, o, free); client.IgnoreNotFound(err) != nil {
				return err
			}
		}
		return client.IgnoreNotFound(s.client.Delete(ctx, o))
	})
}

// scaled is a controller whose metrics are read.
type scaled struct {
	*process
	metrics string
}

// asDeployed are the variables that determine a program's memory, by the file in deploy that sets
// them.
var asDeployed = map[string]string{
	"controller/deployment.yaml": "GOMEMLIMIT=150MiB",
	"infra/broker.yaml":          "GOMEMLIMIT=210MiB",
}

func (b *bench) startScaled(c *cluster) (*scaled, error) {
	return b.startRole(b.dir, "all", c.controllerKubeconfig, namespace)
}

// startRole starts a controller with a role. Its output goes to a file in dir.
func (b *bench) startRole(dir, role, kubeconfig, namespace string) (*scaled, error) {
	metrics, err := freeAddress()
	if err != nil {
		return nil, err
	}

	deployment := "controller/deployment.yaml"
	if role == "broker" {
		deployment = "infra/broker.yaml"
	}

	p, err := b.startWith([]string{asDeployed[deployment]}, dir, "xpu-controller", "--role="+role,
		"--kubeconfig="+kubeconfig, "--namespace="+namespace,
		"--metrics-bind-address="+metrics, "--health-probe-bind-address=0", "--resync-period=1h",
		"--provision-timeout=1h",
		"--kube-api-qps=5000", "--kube-api-burst=10000", "--log-verbosity=-1")

	if err != nil {
		return nil, err
	}

	return &scaled{p, metrics}, nil
}

// writes returns how many writing requests the controller has sent to the API server.
func (p *scaled) writes(ctx context.Context) (n float64, err error) {
	return p.sum(ctx, func(series string) bool {
		return strings.HasPrefix(series, "rest_client_requests_total{") &&
			!strings.Contains(series, `method="GET"`)
	})
}

// awaitUp waits until the controller reports that n Ports are up. Unlike [site.allReady] it sends
// no requests to the API server, which would disturb the next measurement.
func (p *scaled) awaitUp(ctx context.Context, n int) error {
	for {
		up, err := p.sum(ctx, func(series string) bool {
			return strings.HasPrefix(series, "xpu_ports{") && strings.Contains(series, `state="up"`)
		})
		if err != nil || int(up) == n {
			return err
		}
		if err := pauseWith(ctx, p.process, 200*time.Millisecond); err != nil {
			return fmt.Errorf("%.0f of %d Ports are up: %w", up, n, err)
		}
	}
}

// sum adds up the controller's metrics for which wanted is true.
func (p *scaled) sum(ctx context.Context, wanted func(series string) bool) (n float64, err error) {
	text, err := fetch(ctx, "http://"+p.metrics+"/metrics")
	if err != nil {
		return 0, err
	}

	for line := range strings.Lines(text) {
		series, value, _ := strings.Cut(line, "} ")
		if !wanted(series) {
			continue
		}

		count, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil {
			return 0, err
		}
		n += count
	}

	return n, nil
}

// rpcs returns the number of calls to each agent so far.
func (s *site) rpcs() (calls []int) {
	for _, agent := range s.agents {
		n := 0
		for _, rpc := range []string{
			"CreateBridgePort", "GetBridgePort", "ListBridgePorts", "UpdateBridgePort",
			"DeleteBridgePort",
			"CreateLogicalBridge", "GetLogicalBridge", "ListLogicalBridges", "UpdateLogicalBridge",
			"DeleteLogicalBridge",
		} {
			n += agent.Calls(rpc)
		}

		calls = append(calls, n)
	}
	return calls
}

// measureFlap makes one agent of many lose everything and come back.
func measureFlap(ctx context.Context, b *bench) (out []Measurement, err error) {
	xpus, networks, ports, window := 200, 20, 2000, 20*time.Second
	if b.quick {
		xpus, networks, ports, window = 4, 2, 16, time.Second
	}

	s, err := b.newSite(ctx, "flap", xpus, networks)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.end(ctx)) }()

	controller, err := b.startScaled(s.cluster)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, controller.end()) }()

	if err := s.claim(ctx, ports); err != nil {
		return nil, err
	}
	if err := s.up(ctx, controller.process, ports); err != nil {
		return nil, err
	}

	// count returns the calls to the first agent and to all others in the window, and the writes.
	count := func(during func() error) (first, others, writes float64, err error) {
		// let earlier work finish
		if err := pauseWith(ctx, controller.process, window); err != nil {
			return 0, 0, 0, err
		}

		before := s.rpcs()
		written, err := controller.writes(ctx)
		if err != nil {
			return 0, 0, 0, err
		}
		if err := errors.Join(during(), pauseWith(ctx, controller.process, window)); err != nil {
			return 0, 0, 0, err
		}

		after := s.rpcs()
		for i := 1; i < len(after); i++ {
			others += float64(after[i] - before[i])
		}

		now, err := controller.writes(ctx)
		return float64(after[0] - before[0]), others, now - written, err
	}

	_, quietOthers, quietWrites, err := count(func() error { return nil })
	if err != nil {
		return nil, err
	}

	agent := s.agents[0]
	first, others, writes, err := count(func() error { agent.Kill(); return agent.Run() })
	if err != nil {
		return nil, err
	}
	if err := s.up(ctx, controller.process, ports); err != nil {
		return nil, err
	}

	size := fmt.Sprintf("%d xPUs x %d networks, %d Ports", xpus, networks, ports)
	const quiet = "in the same time without"
	return []Measurement{
		{What: "xPU flaps: RPCs to it; " + size, Unit: Count, Samples: []float64{first},
			Goal: atMost(float64(ports/xpus+networks) * 8)},
		{What: "xPU flaps: RPCs to others", Unit: Count, Samples: []float64{others},
			Reference:        quiet,
			ReferenceSamples: []float64{max(quietOthers, 1)}, Goal: atMostTimes(1.1)},
		{What: "xPU flaps: API writes", Unit: Count, Samples: []float64{writes - quietWrites},
			Goal: atMost(float64(ports/xpus) + float64(networks) + 4)},
	}, nil
}

// measureStart measures the start of a controller in a settled cluster, at three sizes.
func measureStart(ctx context.Context, b *bench) (out []Measurement, err error) {
	sizes := []struct{ xpus, networks, ports int }{{100, 5, 1000}, {1000, 50, 10_000}}
	if b.quick {
		sizes = sizes[:1]
		sizes[0].xpus, sizes[0].networks, sizes[0].ports = 4, 2, 16
	}

	var reference float64
	for i, size := range sizes {
		took, writes, memory, err := b.startOnce(ctx, fmt.Sprintf("start%d", i), size.xpus,
			size.networks, size.ports)
		if err != nil {
			return nil, err
		}

		what := fmt.Sprintf("start: %d xPUs x %d networks x %d Ports", size.xpus, size.networks,
			size.ports)
		m := Measurement{
			What: what, Unit: Seconds, Samples: []float64{took.Seconds()}, Goal: atMost(60),
		}
		if i > 0 {
			m.Reference, m.ReferenceSamples = "a tenth of it", []float64{reference}
			m.Goal = atMostTimes(15)
		}

		reference = took.Seconds()
		out = append(out, m,
			Measurement{
				What: "  API writes", Unit: Count, Samples: []float64{writes}, Goal: atMost(0),
			},
			Measurement{What: "  memory (RSS)", Unit: Bytes, Samples: []float64{memory}})
	}

	return out, nil
}

// settling is the time for delayed writes of a controller, such as the status of networks.
const settling = 3 * time.Second

func (b *bench) startOnce(
	ctx context.Context, name string, xpus, networks, ports int,
) (took time.Duration, writes, memory float64, err error) {
	s, err := b.newSite(ctx, name, xpus, networks)
	if err != nil {
		return 0, 0, 0, err
	}
	defer func() { err = errors.Join(err, s.end(ctx)) }()

	first, err := b.startScaled(s.cluster)
	if err != nil {
		return 0, 0, 0, err
	}
	if err := s.claim(ctx, ports); err != nil {
		return 0, 0, 0, errors.Join(err, first.end())
	}
	if err := s.up(ctx, first.process, ports); err != nil {
		return 0, 0, 0, err
	}
	if err := errors.Join(pauseWith(ctx, first.process, settling), first.end()); err != nil {
		return 0, 0, 0, err
	}

	before := s.rpcs()
	begin := time.Now()
	second, err := b.startScaled(s.cluster)
	if err != nil {
		return 0, 0, 0, err
	}
	defer func() { err = errors.Join(err, second.end()) }()

	// The start is over once the controller has asked every agent for all its objects and sends no
	// more calls.
	last := before
	for quiet := time.Now(); time.Since(quiet) < time.Second; {
		if err := pauseWith(ctx, second.process, 20*time.Millisecond); err != nil {
			return 0, 0, 0, err
		}

		now, asked := s.rpcs(), true
		for i := range now {
			asked = asked && now[i] > before[i]
		}

		if !asked || !slices.Equal(now, last) {
			quiet = time.Now()
			took = quiet.Sub(begin)
		}

		last = now
	}

	if err := pauseWith(ctx, second.process, settling); err != nil {
		return 0, 0, 0, err
	}
	if writes, err = second.writes(ctx); err != nil {
		return 0, 0, 0, err
	}

	memory, err = second.resident()
	return took, writes, memory, err
}

// measurePortRate measures how many Ports come up per second in one network with few or many Ports.
func measurePortRate(ctx context.Context, b *bench) (out []Measurement, err error) {
	few, many, batch, batches, xpus := 100, 20_000, 200, 5, 100
	if b.quick {
		few, many, batch, batches, xpus = 4, 16, 8, 1, 2
	}

	s, err := b.newSite(ctx, "ports", xpus, 1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.end(ctx)) }()

	controller, err := b.startScaled(s.cluster)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, controller.end()) }()

	// batchesTake creates more Ports in batches and measures them.
	batchesTake := func() (took portTimes, err error) {
		for range batches {
			bare, err := s.bare(ctx, batch)
			if err != nil {
				return took, err
			}

			before, err := controller.writes(ctx)
			if err != nil {
				return took, err
			}

			begin := time.Now()
			if err := s.claim(ctx, batch); err != nil {
				return took, err
			}
			if err := s.atAgents(ctx, controller.process, len(s.claims)); err != nil {
				return took, err
			}

			seconds := time.Since(begin).Seconds()
			if err := controller.awaitUp(ctx, len(s.claims)); err != nil {
				return took, err
			}

			after, err := controller.writes(ctx)
			if err != nil {
				return took, err
			}

			took.seconds = append(took.seconds, seconds/float64(batch))
			took.bare = append(took.bare, seconds/bare)
			took.writes = append(took.writes, (after-before)/float64(batch))
		}
		return took, nil
	}

	fill := func(n int) error {
		if err := s.claim(ctx, n-len(s.claims)); err != nil {
			return err
		}
		return s.up(ctx, controller.process, n)
	}

	if err := fill(few); err != nil {
		return nil, err
	}

	atFew, err := batchesTake()
	if err != nil {
		return nil, err
	}
	if err := fill(many); err != nil {
		return nil, err
	}

	atMany, err := batchesTake()
	if err != nil {
		return nil, err
	}

	memory, err := controller.resident()
	if err != nil {
		return nil, err
	}

	reference := fmt.Sprintf("%d there", few)
	return []Measurement{
		{What: fmt.Sprintf("a Port more, %d there in its network", many), Unit: Seconds,
			Samples:   atMany.seconds,
			Reference: reference, ReferenceSamples: atFew.seconds},
		{What: "  in the time of a claim that nobody serves", Unit: PerPod, Samples: atMany.bare,
			Reference:        reference,
			ReferenceSamples: atFew.bare, Goal: atMostTimes(1.2)},
		{What: "  API writes for each", Unit: PerPod, Samples: atMany.writes, Reference: reference,
			ReferenceSamples: atFew.writes, Goal: atMostTimes(1.05)},
		{What: fmt.Sprintf("controller, memory (RSS), %d Ports and claims", len(s.claims)),
			Unit: Bytes, Samples: []float64{memory}, Goal: atMost(200e6)},
	}, nil
}

// portTimes are measurements of Ports, one value for each batch.
type portTimes struct {
	seconds []float64 // per Port
	// relative to a claim that no controller handles, measured just before, because API server and
	// machine change over time
	bare   []float64
	writes []float64 // of the controller, per Port
}

// measureNodes makes the agents of many nodes report their Functions, and counts what another agent
// receives of it.
func measureNodes(ctx context.Context, b *bench) (out []Measurement, err error) {
	few, many, more := 100, 5000, 1000
	if b.quick {
		few, many, more = 4, 16, 8
	}

	s, err := b.newSite(ctx, "nodes", 1, 1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.end(ctx)) }()

	controller, err := b.startScaled(s.cluster)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, controller.end()) }()

	pool := &v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: "nodes"},
		Spec: v1alpha1.DevicePoolSpec{
			Selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}},
		}}
	if err := s.client.Create(ctx, pool); err != nil {
		return nil, err
	}

	heard, stop, err := s.listenAsAgent(ctx)
	if err != nil {
		return nil, err
	}
	defer stop()

	nodes := 0
	start := func(n int) (bytes float64, err error) {
		first, before := nodes, heard.Load()
		nodes += n

		if err := s.each(ctx, n, func(ctx context.Context, i int) error {
			return s.client.Create(ctx, xpuNode(first+i))
		}); err != nil {
			return 0, err
		}

		for pool.Status.NodeCount != int32(nodes) {
			if err := pauseWith(ctx, controller.process, 100*time.Millisecond); err != nil {
				return 0, err
			}
			if err := s.client.Get(ctx, client.ObjectKeyFromObject(pool), pool); err != nil {
				return 0, err
			}
		}

		return float64(heard.Load() - before), nil
	}

	if _, err := start(few); err != nil {
		return nil, err
	}

	fewBytes, err := start(more)
	if err != nil {
		return nil, err
	}
	if _, err := start(many - nodes); err != nil {
		return nil, err
	}

	manyBytes, err := start(more)
	if err != nil {
		return nil, err
	}

	largest, err := s.largest(ctx)
	if err != nil {
		return nil, err
	}

	return []Measurement{
		{What: fmt.Sprintf("bytes to an agent while %d nodes start, %d there", more, many),
			Unit: KiloBytes, Samples: []float64{manyBytes},
			Reference: fmt.Sprintf("%d there", few), ReferenceSamples: []float64{fewBytes},
			Goal: atMostTimes(1.5)},
		{What: fmt.Sprintf("largest object, %d nodes", nodes), Unit: KiloBytes,
			Samples: []float64{largest}, Goal: lessThan(100e3)},
	}, nil
}

// xpuNode returns the XPUNode of a node with two PFs of 64 VFs each.
func xpuNode(i int) *v1alpha1.XPUNode {
	n := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("nodes-n%d", i)}}
	n.Status.Functions = 130
	for pf := range 2 {
		n.Status.PFs = append(n.Status.PFs, v1alpha1.XPUNodePF{
			Address: fmt.Sprintf("0000:3b:00.%d", pf), Name: fmt.Sprintf("ens3f%d", pf),
			Vendor: "15b3", Device: "a2dc", Driver: "mlx5_core", VFs: 64,
		})
	}

	n.Status.Pools = []v1alpha1.XPUNodePool{
		{Name: "nodes", ObservedGeneration: 1, Functions: 128, Healthy: 128},
	}
	return n
}

// listenAsAgent counts the bytes of an agent's watches, except those restricted to its own node by
// a field selector.
func (s *site) listenAsAgent(ctx context.Context) (heard *atomic.Int64, stop func(), err error) {
	ctx, stop = context.WithCancel(ctx)
	heard = &atomic.Int64{}
	stream, err := s.clientset.CoreV1().RESTClient().Get().
		AbsPath("/apis/xpu.opiproject.org/v1alpha1/devicepools").
		Param("watch", "true").Stream(ctx)
	if err != nil {
		return nil, stop, err
	}

	go func() {
		defer stream.Close()
		for lines := bufio.NewReader(stream); ; {
			line, err := lines.ReadBytes('\n')
			heard.Add(int64(len(line)))
			if err != nil {
				return
			}
		}
	}()

	return heard, stop, nil
}

// largest returns the size of the project's largest object, as JSON.
func (s *site) largest(ctx context.Context) (most float64, err error) {
	for _, list := range []client.ObjectList{
		&v1alpha1.DevicePoolList{}, &v1alpha1.XPUNodeList{}, &v1alpha1.XPUNetworkList{},
		&v1alpha1.XPUList{}, &v1alpha1.XPUPortList{},
	} {
		if err := s.client.List(ctx, list); err != nil {
			return 0, err
		}

		items, err := meta.ExtractList(list)
		if err != nil {
			return 0, err
		}

		for _, item := range items {
			text, err := json.Marshal(item)
			if err != nil {
				return 0, err
			}
			most = max(most, float64(len(text)))
		}
	}
	return most, nil
}
