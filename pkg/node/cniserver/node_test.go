package cniserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// node is a host with Functions, SFs whose netdevs are veth ends with the other end in the xPU's namespace, and a
// server on it that can be ended and started again.
type node struct {
	t         testing.TB
	host, xpu *netns.Namespace
	dir       string
	functions map[function.ID]function.Function
	pools     []pool.Pool
	peers     map[function.ID]int // ifindex of the other end
	xpuAgent  *xpuAgent
	// event, where set, is called at every point where the agent could end.
	event func(what string)
}

// running is one run of the agent.
type running struct {
	*Server
	node      *node
	journal   *journal.Journal
	engine    *netdev.Engine
	lifecycle *lifecycle.Manager
}

func newNode(t testing.TB, functions int) *node {
	t.Helper()
	n := &node{
		t: t, host: netns.New(t), xpu: netns.New(t), dir: t.TempDir(),
		functions: map[function.ID]function.Function{}, peers: map[function.ID]int{},
		xpuAgent: &xpuAgent{ports: map[function.ID]provisioning.Request{}},
	}
	fast := pool.Pool{Name: "fast", Spec: v1alpha1.DevicePoolSpec{Publish: v1alpha1.PublishDevicePlugin}}
	for i := range functions {
		netns.Connect(t, n.host, hostName(i), n.xpu, fmt.Sprintf("pf0sf%d", i))
		n.peers[functionOf(i)] = mustLink(t, n.xpu, fmt.Sprintf("pf0sf%d", i)).Attrs().Index
		f := function.Function{ID: functionOf(i), Kind: function.SF, PF: "0000:3b:00.0", PFName: "ens1f0", Index: i, Driver: "mlx5_core.sf"}
		n.functions[f.ID] = f
		fast.Functions = append(fast.Functions, f)
	}
	n.pools = []pool.Pool{fast}
	return n
}

func hostName(i int) string { return fmt.Sprintf("ens1f0s%d", i) }

func functionOf(i int) function.ID { return function.SubfunctionID("0000:3b:00.0", uint32(i)) }

// Get makes the node the inventory.
func (n *node) Get(id function.ID) (function.Function, bool) {
	f, ok := n.functions[id]
	return f, ok
}

// Pools makes it the tracker of pools.
func (n *node) Pools() ([]pool.Pool, bool) { return n.pools, n.pools != nil }

func (n *node) PoolOf(id function.ID) (pool.Pool, bool) { return poolOf(n.pools, id) }

func (n *node) Considered(function.ID) bool { _, known := n.Pools(); return known }

func poolOf(pools []pool.Pool, id function.ID) (pool.Pool, bool) {
	for _, p := range pools {
		if slices.ContainsFunc(p.Functions, func(f function.Function) bool { return f.ID == id }) {
			return p, true
		}
	}
	return pool.Pool{}, false
}

// Netdev finds a veth by its other end, which stays the same.
func (n *node) Netdev(id function.ID) (string, error) {
	peer, ok := n.peers[id]
	if !ok {
		return "", fmt.Errorf("no Function %s", id)
	}
	links, err := netns.Listed(n.host.Handle().LinkList)
	if err != nil {
		return "", err
	}
	for _, l := range links {
		if l.Type() == "veth" && l.Attrs().ParentIndex == peer {
			return l.Attrs().Name, nil
		}
	}
	return "", nil
}

func (n *node) tell(event string) {
	if n.event != nil {
		n.event(event)
	}
}

// eventJournal tells of each write.
type eventJournal struct {
	*journal.Journal
	node *node
}

func (j eventJournal) Put(a journal.Attachment) error {
	j.node.tell("before " + string(a.State))
	defer j.node.tell("after " + string(a.State))
	return j.Journal.Put(a)
}

func (j eventJournal) Delete(id function.ID) error {
	j.node.tell("before delete")
	defer j.node.tell("after delete")
	return j.Journal.Delete(id)
}

// start runs an agent until stop is called.
func (n *node) start() (r *running, stop func()) {
	n.t.Helper()
	r = &running{node: n}
	var err error
	r.journal, err = journal.Open(filepath.Join(n.dir, "journal.db"))
	must.Succeed(n.t, err)
	r.engine, err = netdev.New(netdev.Options{HostNetNS: n.host.Path(), Trace: n.tell})
	must.Succeed(n.t, err)
	j := eventJournal{r.journal, n}
	queue := &hooks{journal: j, xpu: n.xpuAgent, functions: n.functions}
	r.lifecycle = lifecycle.New(j, r.engine, n, lifecycle.Options{
		BootID: "boot-1", Patience: wait.Backoff{Duration: time.Millisecond, Steps: 3}, Hooks: queue,
	}, logr.Discard())
	r.Server = &Server{
		Socket: filepath.Join(n.dir, "run", "cni.sock"), SpoolDir: filepath.Join(n.dir, "spool"),
		Function: n.Get, Pools: n, Journal: r.journal, Lifecycle: r.lifecycle,
		Provisioner: n.xpuAgent, MAC: func(function.ID) function.MAC { return "02:00:00:00:00:aa" },
		Ready: func() error { return nil }, Reporter: &reporter{},
		Metrics: NewMetrics(prometheus.NewRegistry()), Log: logr.Discard(),
	}
	return r, sync.OnceFunc(func() {
		queue.wait.Wait()
		r.engine.Close()
		r.journal.Close()
	})
}

func (n *node) run(f func(r *running)) {
	n.t.Helper()
	r, stop := n.start()
	defer stop()
	f(r)
}

// serve runs the server itself as well.
func (n *node) serve(f func(r *running)) {
	n.t.Helper()
	n.run(func(r *running) {
		ctx, cancel := context.WithCancel(n.t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		defer func() {
			cancel()
			if err := <-done; err != nil {
				n.t.Error(err)
			}
		}()
		eventually(n.t, func() bool { _, err := r.call(wire.Request{Command: wire.Status}); return err == nil })
		f(r)
	})
}

// call asks over the socket, as the shim does.
func (r *running) call(request wire.Request) (wire.Reply, error) {
	request.Version = wire.Version
	if request.Config == nil {
		request.Config = json.RawMessage(`{}`)
	}
	return wire.Call(r.node.t.Context(), r.Socket, request)
}

// must asks directly, and ends the test if the answer is an error.
func (r *running) must(request wire.Request) wire.Reply {
	r.node.t.Helper()
	reply := r.answer(r.node.t.Context(), request, nil)
	if reply.Error != nil {
		r.node.t.Fatalf("%s: %v (code %d)", request.Command, reply.Error, reply.Error.Code)
	}
	return reply
}

func (r *running) mustFail(request wire.Request, code uint, want string) {
	r.node.t.Helper()
	reply := r.answer(r.node.t.Context(), request, nil)
	if reply.Error == nil || reply.Error.Code != code || !strings.Contains(reply.Error.Error(), want) {
		r.node.t.Errorf("%s: error %+v, want code %d and %q", request.Command, reply.Error, code, want)
	}
}

// settled waits until nothing is being released.
func (r *running) settled() {
	r.node.t.Helper()
	for _, a := range r.journal.All() {
		must.Succeed(r.node.t, loop.Until(r.node.t.Context(), r.journal.Subscribe, func() bool {
			now, _ := r.journal.Get(a.Function)
			return now.State != journal.Releasing
		}))
	}
}

// checkFree is that the Function is as it was before, on both sides.
func (r *running) checkFree(i int, was netdev.Snapshot) {
	r.node.t.Helper()
	r.settled()
	if a, ok := r.journal.Get(functionOf(i)); ok {
		r.node.t.Errorf("Function %s is not free: %+v", functionOf(i), a)
	}
	if port, ok := r.node.xpuAgent.port(functionOf(i)); ok {
		r.node.t.Errorf("Function %s still has a Port: %+v", functionOf(i), port)
	}
	if left := netdev.Diff(was, r.node.snapshot(i)); len(left) > 0 {
		r.node.t.Errorf("Function %s is not as it was: %q", functionOf(i), left)
	}
}

// snapshot is the netdev of a Function as it is on the host.
func (n *node) snapshot(i int) netdev.Snapshot {
	n.t.Helper()
	engine, err := netdev.New(netdev.Options{HostNetNS: n.host.Path()})
	must.Succeed(n.t, err)
	defer engine.Close()
	name, err := n.Netdev(functionOf(i))
	must.Succeed(n.t, err)
	if name == "" {
		n.t.Fatalf("Function %s has no netdev on the host", functionOf(i))
	}
	s, _, err := engine.Plan(n.t.Context(), netdev.Device{Name: name}, netns.New(n.t).Path(), function.Interface{Name: "any0"})
	must.Succeed(n.t, err)
	return s
}

// request is a request about a Function for a container. config has members that replace or join the usual ones.
func request(command wire.Command, i int, container string, ns *netns.Namespace, config map[string]any) wire.Request {
	r := wire.Request{
		Version: wire.Version, Command: command, ContainerID: container, IfName: "net1", At: time.Now(),
		Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=pod-" + container + ";K8S_POD_UID=uid-" + container,
	}
	if ns != nil {
		r.NetNS = ns.Path()
	}
	all := map[string]any{"cniVersion": "1.1.0", "name": "sriov", "type": "xpu-cni", "deviceID": functionOf(i).String()}
	maps.Copy(all, config)
	r.Config, _ = json.Marshal(all)
	return r
}

func with(r wire.Request, change func(*wire.Request)) wire.Request {
	change(&r)
	return r
}

const ipamResult = `{"cniVersion":"1.1.0","ips":[{"address":"10.1.0.5/24","gateway":"10.1.0.1"}],
	"routes":[{"dst":"0.0.0.0/0"},{"dst":"10.2.0.0/16","gw":"10.1.0.9"}],"dns":{"nameservers":["10.1.0.53"]}}`

// xpuAgent plays a provisioner.
type xpuAgent struct {
	mutex   sync.Mutex
	ports   map[function.ID]provisioning.Request
	mtu     int
	err     error
	entered chan struct{} // where set, Provision tells here that it came and then waits for the end of its context
	calls   int
}

func (x *xpuAgent) Provision(ctx context.Context, r provisioning.Request) (provisioning.Port, error) {
	if x.entered != nil {
		x.entered <- struct{}{}
		<-ctx.Done()
		return provisioning.Port{}, context.Cause(ctx)
	}
	x.mutex.Lock()
	defer x.mutex.Unlock()
	x.calls++
	x.ports[r.Function.ID] = r // also where it then says no: nobody knows how far it got
	return provisioning.Port{MTU: x.mtu}, x.err
}

func (x *xpuAgent) Deprovision(_ context.Context, f function.Function) error {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	delete(x.ports, f.ID)
	return nil
}

func (x *xpuAgent) Away(function.Function) string { return "" }

func (x *xpuAgent) port(id function.ID) (provisioning.Request, bool) {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	r, ok := x.ports[id]
	return r, ok
}

// hooks delete Ports, a moment after the release.
type hooks struct {
	journal   eventJournal
	xpu       *xpuAgent
	functions map[function.ID]function.Function
	wait      sync.WaitGroup
	mutex     sync.Mutex
}

func (h *hooks) First(a journal.Attachment) string {
	if a.Port == nil {
		return ""
	}
	return "port"
}

func (h *hooks) Add(id function.ID) {
	h.wait.Go(func() {
		h.mutex.Lock()
		defer h.mutex.Unlock()
		if a, _ := h.journal.Get(id); !a.Restored() {
			return // it was added twice
		}
		_ = h.xpu.Deprovision(context.Background(), h.functions[id])
		_ = h.journal.Journal.Delete(id) // not an event: it is no part of the request
	})
}

// reporter counts.
type reporter struct {
	mutex sync.Mutex
	told  []journal.Claim
}

func (r *reporter) Report(c journal.Claim) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.told = append(r.told, c)
}

func mustLink(t testing.TB, ns *netns.Namespace, name string) netlink.Link {
	t.Helper()
	l, err := ns.Handle().LinkByName(name)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return l
}

func eventually(t testing.TB, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !condition(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("did not happen")
		}
	}
}

// crash is what ends an agent in the tests.
type crash struct{}

// crashes runs what an agent does and ends the agent at the given event. It says whether there were so many.
func (n *node) crashes(at int, do func(r *running)) (crashed bool) {
	r, stop := n.start()
	defer stop()
	defer func() {
		n.event = nil
		if p := recover(); p != nil {
			if _, crashed = p.(crash); !crashed {
				panic(p)
			}
		}
	}()
	count := 0
	n.event = func(string) {
		if count++; count == at {
			panic(crash{})
		}
	}
	do(r)
	return false
}

var errRefused = errors.New("the xPU has no room for another Port")
