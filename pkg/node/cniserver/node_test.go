// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle/lifecycletest"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// node is a host with Functions, and a server that can be ended and started again.
type node struct {
	*lifecycletest.Node
	t         testing.TB
	dir       string
	functions map[function.ID]function.Function
	pools     []pool.Pool
	xpuAgent  *xpuAgent
}

// running is one run of the agent.
type running struct {
	*Server
	node    *node
	engine  *netdev.Engine
	reports reporter
}

func newNode(t testing.TB, functions int) *node {
	t.Helper()
	n := &node{
		Node: lifecycletest.New(t, functions), t: t, dir: t.TempDir(),
		functions: map[function.ID]function.Function{},
		xpuAgent:  &xpuAgent{ports: map[function.ID]journal.Attachment{}},
	}

	fast := pool.Pool{
		Name: "fast", Spec: v1alpha1.DevicePoolSpec{
			Publish: v1alpha1.PublishDevicePlugin, Allow: v1alpha1.PrivilegedFields(),
		},
	}

	for i := range functions {
		f := function.Function{
			ID: lifecycletest.ID(i), Kind: function.SF, PF: "0000:3b:00.0", PFName: "ens1f0",
			Index: i, Driver: "mlx5_core.sf",
		}
		n.functions[f.ID] = f
		fast.Functions = append(fast.Functions, f)
	}

	n.pools = []pool.Pool{fast}
	return n
}

// Get makes the node an inventory.
func (n *node) Get(id function.ID) (function.Function, bool) {
	f, ok := n.functions[id]
	return f, ok
}

// Pools makes the node a tracker of pools.
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

// start starts an agent, which runs until stop is called.
func (n *node) start() (r *running, stop func()) {
	n.t.Helper()
	queue := &hooks{xpu: n.xpuAgent}
	agent, end := n.Start(func(a *lifecycletest.Agent) lifecycle.Queue {
		queue.journal = a.Journal
		return queue
	})

	r = &running{node: n, engine: agent.Engine}
	r.Server = &Server{
		BootID: n.BootID, Path: filepath.Join(n.dir, "run", "cni.sock"),
		SpoolDir: filepath.Join(n.dir, "spool"),
		Function: n.Get, Pools: n, Journal: agent.Journal, Lifecycle: agent.Lifecycle,
		Provisioner: n.xpuAgent, MAC: func(function.ID) function.MAC { return "02:00:00:00:00:aa" },
		PortID: func(function.ID) string { return "" },
		Ready:  func() error { return nil }, Report: r.reports.Report,
		Metrics: NewMetrics(prometheus.NewRegistry()), Log: logr.Discard(),
	}

	return r, sync.OnceFunc(func() {
		queue.wait.Wait()
		end()
	})
}

func (n *node) run(f func(r *running)) {
	n.t.Helper()
	r, stop := n.start()
	defer stop()
	f(r)
}

// serve runs the server too.
func (n *node) serve(f func(r *running)) {
	n.t.Helper()
	n.run(func(r *running) {
		defer must.Run(n.t, r.Run)()
		must.Eventually(n.t, "the server answers", func() bool {
			_, err := r.call(wire.Request{Command: wire.Status})
			return err == nil
		})
		f(r)
	})
}

// call sends a request over the socket, as the shim does.
func (r *running) call(request wire.Request) (wire.Reply, error) {
	request.Version = wire.Version
	if request.Config == nil {
		request.Config = json.RawMessage(`{}`)
	}
	return wire.Call(r.node.t.Context(), r.Path, request)
}

// must handles a request directly, and ends the test if the reply is an error.
func (r *running) must(request wire.Request) wire.Reply {
	r.node.t.Helper()
	reply := r.handle(r.node.t.Context(), request, nil)
	if reply.Error != nil {
		r.node.t.Fatalf("%s: %v (code %d)", request.Command, reply.Error, reply.Error.Code)
	}
	return reply
}

func (r *running) mustFail(request wire.Request, code uint, want string) {
	r.node.t.Helper()
	reply := r.handle(r.node.t.Context(), request, nil)
	if reply.Error == nil || reply.Error.Code != code ||
		!strings.Contains(reply.Error.Error(), want) {
		r.node.t.Errorf("%s: error %+v, want code %d and %q", request.Command, reply.Error,
			code, want)
	}
}

// settled waits until no Function is being released.
func (r *running) settled() {
	r.node.t.Helper()
	for _, a := range r.Journal.All() {
		must.Succeed(r.node.t, loop.Until(r.node.t.Context(), r.Journal.Subscribe, func() bool {
			now, _ := r.Journal.Get(a.Function)
			return now.State != journal.Releasing
		}))
	}
}

// checkFree fails the test unless the Function is as it was before, on both sides.
func (r *running) checkFree(i int, was netdev.Snapshot) {
	r.node.t.Helper()
	r.settled()
	if a, ok := r.Journal.Get(lifecycletest.ID(i)); ok {
		r.node.t.Errorf("Function %s is not free: %+v", lifecycletest.ID(i), a)
	}
	if port, ok := r.node.xpuAgent.port(lifecycletest.ID(i)); ok {
		r.node.t.Errorf("Function %s still has a Port: %+v", lifecycletest.ID(i), port)
	}
	r.node.WantAsBefore(i, was)
}

// request returns a request about a Function for a container. config has members that replace or
// extend the usual ones.
func request(
	command wire.Command, i int, container string, ns *netns.Namespace, config map[string]any,
) wire.Request {
	r := wire.Request{
		Version: wire.Version, Command: command, ContainerID: container, IfName: "net1",
		At: time.Now(),
		Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=pod-" + container +
			";K8S_POD_UID=uid-" + container,
	}

	if ns != nil {
		r.NetNS = ns.Path()
	}

	all := map[string]any{"cniVersion": "1.1.0", "name": "sriov", "type": "xpu-cni",
		"deviceID": lifecycletest.ID(i).String()}
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

// xpuAgent stands for a provisioner.
type xpuAgent struct {
	mutex     sync.Mutex
	ports     map[function.ID]journal.Attachment
	mtu       int
	addresses []netip.Prefix
	err       error
	// entered, if set, receives a value when Provision is called. Provision then waits for the end
	// of its context.
	entered chan struct{}
	calls   int
}

func (x *xpuAgent) Provision(
	ctx context.Context, a journal.Attachment,
) (done provisioning.Provisioned, err error) {
	if x.entered != nil {
		x.entered <- struct{}{}
		<-ctx.Done()
		return done, context.Cause(ctx)
	}

	x.mutex.Lock()
	defer x.mutex.Unlock()

	x.calls++
	// The provisioner has read this. It is kept even if the answer is an error, because an agent
	// that failed may have done part of it.
	x.ports[a.Function] = journal.Attachment{
		Function: a.Function, PF: a.PF, Pod: a.Pod, Port: a.Port,
	}
	return provisioning.Provisioned{MTU: x.mtu, Addresses: x.addresses}, x.err
}

func (x *xpuAgent) Deprovision(_ context.Context, a journal.Attachment) error {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	delete(x.ports, a.Function)
	return nil
}

func (x *xpuAgent) Away(function.Function) string { return "" }

func (x *xpuAgent) PortID(function.Function) string { return "" }

func (x *xpuAgent) NeedsOwnMAC(pci.Address) bool { return false }

func (x *xpuAgent) port(id function.ID) (journal.Attachment, bool) {
	x.mutex.Lock()
	defer x.mutex.Unlock()
	a, ok := x.ports[id]
	return a, ok
}

// hooks deletes Ports, a moment after the release.
type hooks struct {
	journal *journal.Journal
	xpu     *xpuAgent
	wait    sync.WaitGroup
	mutex   sync.Mutex
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
		a, _ := h.journal.Get(id)
		if !a.Restored() {
			return // the Function was added twice
		}
		_ = h.xpu.Deprovision(context.Background(), a)
		_ = h.journal.Delete(id) // not an event, because it is not part of the request
	})
}

// reporter counts reports.
type reporter struct {
	mutex    sync.Mutex
	reported []journal.Claim
}

func (r *reporter) Report(c journal.Claim) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.reported = append(r.reported, c)
}

func mustLink(t testing.TB, ns *netns.Namespace, name string) netlink.Link {
	t.Helper()
	l, err := ns.Handle().LinkByName(name)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return l
}

// crashes runs what an agent does and ends the agent at the given event. It returns false if there
// were fewer events.
func (n *node) crashes(at int, do func(r *running)) (crashed bool) {
	r, stop := n.start()
	defer stop()
	return n.Crashes(at, func() { do(r) })
}

var errRefused = errors.New("the xPU has no room for another Port")
