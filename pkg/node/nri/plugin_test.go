// SPDX-License-Identifier: Apache-2.0

package nri

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/net/multiplex"
	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/nri/nritest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// node has Functions that are reserved for pods. It records the calls that move them.
type node struct {
	journal *journal.Journal

	mutex sync.Mutex
	calls []string
	errs  map[string]error // by call
	// blocks has a channel for a call. It is closed when the call was made. The call then waits
	// until its context ends.
	blocks map[string]chan struct{}
	// slow has a channel for a call. The call waits until it is closed, even if its context ends.
	slow map[string]chan struct{}

	// takes is how long each move of a Function takes, unless its context ends.
	takes time.Duration

	// claimed is the answer of the kubelet.
	claimed func(ctx context.Context, namespace, pod string) ([]function.ID, error)
}

func newNode(t *testing.T) *node {
	t.Helper()
	j, err := journal.Open(filepath.Join(t.TempDir(), "journal.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	return &node{journal: j, errs: map[string]error{}, blocks: map[string]chan struct{}{},
		slow: map[string]chan struct{}{}}
}

// reserve reserves VF 0000:3b:00.<function> for a pod, by a claim that is named after the pod.
func (n *node) reserve(t *testing.T, f, pod string) {
	t.Helper()
	if err := n.journal.Put(journal.Attachment{
		Function: function.ID{Address: pci.Address("0000:3b:00." + f)}, State: journal.Reserved,
		Claim: journal.Claim{
			Namespace: "default", Name: pod + "-claim", UID: types.UID(pod + "-claim-uid"),
			Request: f,
		},
		Pod: journal.Pod{Namespace: "default", Name: pod, UID: types.UID(pod + "-uid")},
	}); err != nil {
		t.Fatal(err)
	}
}

func (n *node) record(ctx context.Context, call string) error {
	n.mutex.Lock()
	n.calls = append(n.calls, call)
	err, block, slow := n.errs[call], n.blocks[call], n.slow[call]
	n.mutex.Unlock()
	if n.takes > 0 && !strings.HasPrefix(call, "report") && !loop.Sleep(ctx, n.takes) {
		return ctx.Err()
	}

	if slow != nil {
		<-slow
	}

	if block != nil {
		close(block)
		<-ctx.Done()
		return ctx.Err()
	}

	return err
}

func (n *node) Attach(
	ctx context.Context, id function.ID, sandbox lifecycle.Sandbox,
) (netdev.Observed, error) {
	call := "attach " + id.String()[len("0000:3b:00."):] + " " + sandbox.ID + " " + sandbox.NetNS +
		" " + sandbox.Pod.Name
	if err := n.record(ctx, call); err != nil {
		return netdev.Observed{}, err
	}
	a, _ := n.journal.Get(id)
	a.State, a.Sandbox, a.Before, a.Observed = journal.Attached, sandbox.ID, &netdev.Snapshot{}, &netdev.Observed{Name: "net1"}
	return *a.Observed, n.journal.Put(a)
}

func (n *node) Detach(ctx context.Context, id function.ID, sandbox string) error {
	if err := n.record(ctx, "detach "+id.String()[len("0000:3b:00."):]+" "+sandbox); err != nil {
		return err
	}
	a, _ := n.journal.Get(id)
	if a.Sandbox != sandbox {
		return nil
	}
	return n.journal.Put(a.BackToReserved())
}

func (n *node) Report(c journal.Claim) { _ = n.record(context.Background(), "report "+c.Name) }

// wantCalls compares the calls since the last comparison. A pod's Functions are moved in parallel,
// in any order.
func (n *node) wantCalls(t *testing.T, want ...string) {
	t.Helper()
	n.mutex.Lock()
	defer n.mutex.Unlock()

	verb := func(call string) string { return strings.Fields(call)[0] }
	for i := 0; i < len(n.calls); {
		j := i + 1
		for j < len(n.calls) && verb(n.calls[j]) == verb(n.calls[i]) {
			j++
		}
		slices.Sort(n.calls[i:j])
		i = j
	}

	if diff := cmp.Diff(want, n.calls); diff != "" {
		t.Errorf("calls: -want +got\n%s", diff)
	}

	n.calls = nil
}

// start runs a plugin for the runtime at the socket until the test ends.
func (n *node) start(t *testing.T, socket string) *Plugin {
	t.Helper()
	p := &Plugin{Socket: socket, Journal: n.journal, Lifecycle: n, Claimed: n.claimed,
		Report: n.Report, Log: testr.New(t)}
	must.Run(t, p.Run)
	return p
}

// runtime is the runtime's side of NRI, with the library that containerd and CRI-O use.
type runtime struct {
	noMetrics
	*adaptation.Adaptation
	// plugins receives the number of plugins after each change.
	plugins chan int
	wire    *wire
}

// noMetrics passes only the number of plugins to runtime.
type noMetrics struct{}

func (noMetrics) RecordPluginInvocation(
	string, string, error,
) {
}
func (noMetrics) RecordPluginLatency(
	string, string, time.Duration,
) {
}
func (noMetrics) RecordPluginAdjustments(
	string, string, *adaptation.ContainerAdjustment, int, int,
) {
}

func (r *runtime) UpdatePluginCount(count int) {
	select {
	case r.plugins <- count:
	default:
	}
}

// startRuntime starts a runtime that has sandboxes. kill ends it, as if its process had been
// killed.
func startRuntime(t *testing.T, socket string, sandboxes ...*api.PodSandbox) *runtime {
	t.Helper()
	r := &runtime{plugins: make(chan int, 100)}
	own := filepath.Join(must.SocketDir(t), "nri.sock")
	var err error
	r.Adaptation, err = nritest.Start(own, func() []*adaptation.PodSandbox {
		return sandboxes
	}, adaptation.WithMetrics(r))
	if err != nil {
		t.Fatal(err)
	}

	r.wire = newWire(t, socket, own)
	t.Cleanup(r.kill)

	return r
}

func (r *runtime) kill() {
	r.Stop()
	r.wire.cut()
}

// waitForPlugin returns when the runtime calls the plugin for every sandbox.
func (r *runtime) waitForPlugin(t *testing.T) {
	t.Helper()
	for {
		select {
		case count := <-r.plugins:
			if count == 1 {
				return
			}
		case <-time.After(20 * time.Second):
			t.Fatal("the plugin did not connect within 20 s")
		}
	}
}

func (r *runtime) run(t *testing.T, sandbox *api.PodSandbox) error {
	t.Helper()
	return r.RunPodSandbox(t.Context(), &api.RunPodSandboxRequest{Pod: sandbox})
}

func (r *runtime) stop(t *testing.T, sandbox *api.PodSandbox) {
	t.Helper()
	if err := r.StopPodSandbox(t.Context(), &api.StopPodSandboxRequest{Pod: sandbox}); err != nil {
		t.Errorf("StopPodSandbox: %v", err)
	}
}

// wire passes connections on to a runtime in the same process. It can be cut as if that process had
// ended.
type wire struct {
	listener net.Listener
	mutex    sync.Mutex
	ends     []net.Conn
	workers  sync.WaitGroup
}

func newWire(t *testing.T, from, to string) *wire {
	t.Helper()
	listener, err := net.Listen("unix", from)
	if err != nil {
		t.Fatal(err)
	}

	w := &wire{listener: listener}
	w.workers.Go(func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}

			far, err := net.Dial("unix", to)
			if err != nil {
				near.Close()
				return
			}

			w.mutex.Lock()
			w.ends = append(w.ends, near, far)
			w.mutex.Unlock()

			for _, pair := range [][2]net.Conn{{near, far}, {far, near}} {
				w.workers.Go(func() { // an error is the end of the connection
					_, _ = io.Copy(pair[0], pair[1])
					pair[0].Close()
				})
			}
		}
	})

	return w
}

func (w *wire) cut() {
	w.listener.Close()
	w.mutex.Lock()
	for _, end := range w.ends {
		end.Close()
	}
	w.mutex.Unlock()
	w.workers.Wait()
}

// sandbox returns a sandbox of a pod with a network namespace of its own.
func sandbox(pod, id string) *api.PodSandbox {
	return &api.PodSandbox{Id: id, Namespace: "default", Name: pod, Uid: pod + "-uid",
		Linux: &api.LinuxPodSandbox{
			Namespaces: []*api.LinuxNamespace{
				{Type: "ipc", Path: "/proc/1/ns/ipc"}, {Type: "network", Path: "/run/netns/" + id},
			},
		}}
}

func TestLife(t *testing.T) {
	n, socket := newNode(t), filepath.Join(must.SocketDir(t), "nri.sock")
	n.reserve(t, "2", "pod1")
	n.reserve(t, "3", "pod1")
	n.reserve(t, "4", "pod2")
	r := startRuntime(t, socket)
	p := n.start(t, socket)
	r.waitForPlugin(t)
	if !p.Connected() {
		t.Error("Connected = false with a runtime that calls")
	}
	if err := r.run(t, sandbox("pod1", "s1")); err != nil {
		t.Fatal(err)
	}

	n.wantCalls(t, "attach 2 s1 /run/netns/s1 pod1", "attach 3 s1 /run/netns/s1 pod1",
		"report pod1-claim")
	if err := r.run(t, sandbox("stranger", "s9")); err != nil {
		t.Errorf("a pod without claims: %v", err)
	}

	n.wantCalls(t)

	// A failure to take a Function back does not stop the runtime. RemovePodSandbox tries it again.
	n.errs["detach 2 s1"] = errors.New("busy")
	r.stop(t, sandbox("pod1", "s1"))
	n.wantCalls(t, "detach 2 s1", "detach 3 s1")
	if err := r.RemovePodSandbox(t.Context(),
		&api.RemovePodSandboxRequest{Pod: sandbox("pod1", "s1")}); err != nil {
		t.Errorf("RemovePodSandbox: %v", err)
	}

	n.wantCalls(t, "detach 2 s1", "detach 3 s1")
}

func TestAttachFails(t *testing.T) {
	n, socket := newNode(t), filepath.Join(must.SocketDir(t), "nri.sock")
	n.reserve(t, "2", "pod1")
	n.reserve(t, "3", "pod1")
	r := startRuntime(t, socket)
	n.start(t, socket)
	r.waitForPlugin(t)
	n.errs["attach 3 s1 /run/netns/s1 pod1"] = errors.New("no such netdev")
	err := r.run(t, sandbox("pod1", "s1"))
	if err == nil ||
		!strings.Contains(err.Error(), "pod default/pod1, claim pod1-claim: no such netdev") {
		t.Errorf("error %v, want the pod, the claim and the reason", err)
	}

	n.wantCalls(t, "attach 2 s1 /run/netns/s1 pod1", "attach 3 s1 /run/netns/s1 pod1",
		"detach 2 s1", "detach 3 s1")

	for _, a := range n.journal.All() {
		if a.State != journal.Reserved {
			t.Errorf("Function %s is %s, want it back", a.Function, a.State)
		}
	}

	// The kubelet makes another sandbox.
	if err := r.run(t, sandbox("pod1", "s2")); err != nil {
		t.Errorf("the next sandbox: %v", err)
	}
}

// TestAttachTakesTooLong: the runtime gets its reply in time. The sandbox keeps the Functions that
// it has. Its containers are refused until it has the others, and start then.
func TestAttachTakesTooLong(t *testing.T) {
	n, socket := newNode(t), filepath.Join(must.SocketDir(t), "nri.sock")
	n.reserve(t, "2", "pod1")
	n.reserve(t, "3", "pod1")
	slow := make(chan struct{})
	n.slow["attach 2 s1 /run/netns/s1 pod1"] = slow
	r := startRuntime(t, socket)
	p := n.start(t, socket)
	r.waitForPlugin(t)
	if err := r.run(t, sandbox("pod1", "s1")); err != nil {
		t.Errorf("RunPodSandbox: %v, want that the sandbox stays", err)
	}
	if !p.Connected() {
		t.Error("the runtime gave the plugin up")
	}

	err := r.create(t, sandbox("pod1", "s1"))
	if err == nil ||
		!strings.Contains(err.Error(),
			"Function 0000:3b:00.2 of its claim pod1-claim is not attached") {
		t.Errorf("error %v, want that the container has to wait", err)
	}

	close(slow)
	must.Eventually(t, "the pod has all that it claimed", func() bool {
		return r.create(t, sandbox("pod1", "s1")) == nil && p.attempt("s1") == nil
	})
	n.wantCalls(t, "attach 2 s1 /run/netns/s1 pod1", "attach 3 s1 /run/netns/s1 pod1",
		"report pod1-claim")
}

func TestHostNetworkIsRefused(t *testing.T) {
	n, socket := newNode(t), filepath.Join(must.SocketDir(t), "nri.sock")
	n.reserve(t, "2", "pod1")
	r := startRuntime(t, socket)
	n.start(t, socket)
	r.waitForPlugin(t)
	host := sandbox("pod1", "s1")
	host.Linux.Namespaces = host.Linux.Namespaces[:1]
	if err := r.run(t, host); err == nil ||
		!strings.Contains(err.Error(), "remove hostNetwork") {
		t.Errorf("error %v, want what to do", err)
	}

	stranger := sandbox("stranger", "s2")
	stranger.Linux = nil
	if err := r.run(t, stranger); err != nil {
		t.Errorf("a pod without claims that uses the node's network: %v", err)
	}
}

// TestSynchronize: the plugin does the work that was missed while the agent did not run.
func TestSynchronize(t *testing.T) {
	n, socket := newNode(t), filepath.Join(must.SocketDir(t), "nri.sock")
	n.reserve(t, "2", "ended")
	n.reserve(t, "3", "stays")
	n.reserve(t, "4", "started")
	n.reserve(t, "5", "waiting")

	for pod, function := range map[string]function.ID{
		"ended": {Address: "0000:3b:00.2"}, "stays": {Address: "0000:3b:00.3"},
	} {
		if _, err := n.Attach(t.Context(), function,
			lifecycle.Sandbox{ID: "s-" + pod}); err != nil {
			t.Fatal(err)
		}
	}

	n.calls = nil
	// A failure for one pod does not affect the others.
	n.errs["attach 3 s-stays /run/netns/s-stays stays"] = errors.New("busy")
	r := startRuntime(t, socket, sandbox("stays", "s-stays"), sandbox("stranger", "s-stranger"),
		sandbox("started", "s-started"))
	n.start(t, socket)
	r.waitForPlugin(t)
	n.awaitCalls(t, "attach 3 s-stays /run/netns/s-stays stays",
		"attach 4 s-started /run/netns/s-started started", "detach 2 s-ended",
		"report started-claim")
}

// awaitCalls waits until these calls were made, in any order.
func (n *node) awaitCalls(t *testing.T, want ...string) {
	t.Helper()
	must.EventuallySucceed(t, "calls", func() error {
		n.mutex.Lock()
		defer n.mutex.Unlock()
		if diff := cmp.Diff(want, slices.Sorted(slices.Values(n.calls))); diff != "" {
			return errors.New("-want +got\n" + diff)
		}
		return nil
	})
}

// TestSynchronizeAnswersAtOnce: pods whose netdevs are missing delay neither the connection nor
// other pods.
func TestSynchronizeAnswersAtOnce(t *testing.T) {
	n, socket := newNode(t), filepath.Join(must.SocketDir(t), "nri.sock")
	n.reserve(t, "2", "stuck")
	n.reserve(t, "3", "also")
	n.reserve(t, "4", "next")
	stuck := []chan struct{}{make(chan struct{}), make(chan struct{})}
	n.blocks["attach 2 s-stuck /run/netns/s-stuck stuck"] = stuck[0]
	n.blocks["attach 3 s-also /run/netns/s-also also"] = stuck[1]
	r := startRuntime(t, socket, sandbox("stuck", "s-stuck"), sandbox("also", "s-also"))
	p := n.start(t, socket)
	r.waitForPlugin(t)
	<-stuck[0]
	<-stuck[1]
	if !p.Connected() {
		t.Error("Connected = false with a runtime that calls")
	}
	if err := r.run(t, sandbox("next", "s-next")); err != nil {
		t.Errorf("a pod whose netdev is there: %v", err)
	}
}

// TestStopTakesTooLong: the runtime gets its reply in time and keeps the plugin. The Function comes
// back later.
func TestStopTakesTooLong(t *testing.T) {
	n, socket := newNode(t), filepath.Join(must.SocketDir(t), "nri.sock")
	n.reserve(t, "2", "pod1")
	n.reserve(t, "3", "pod2")
	r := startRuntime(t, socket)
	p := n.start(t, socket)
	r.waitForPlugin(t)
	if err := r.run(t, sandbox("pod1", "s1")); err != nil {
		t.Fatal(err)
	}

	n.slow["detach 2 s1"] = make(chan struct{})
	r.stop(t, sandbox("pod1", "s1"))
	if err := r.run(t, sandbox("pod2", "s2")); err != nil || !p.Connected() {
		t.Errorf("the next pod: %v, connected: %t", err, p.Connected())
	}

	close(n.slow["detach 2 s1"])
	must.Eventually(t, "the Function is back", func() bool {
		a, _ := n.journal.Get(function.ID{Address: "0000:3b:00.2"})
		return a.State == journal.Reserved
	})
}

// create makes the runtime create a container with these CDI devices.
func (r *runtime) create(t *testing.T, sandbox *api.PodSandbox, devices ...string) error {
	t.Helper()
	container := &api.Container{Id: "c", PodSandboxId: sandbox.Id, Name: "app"}
	for _, device := range devices {
		container.CDIDevices = append(container.CDIDevices, &api.CDIDevice{Name: device})
	}
	_, err := r.CreateContainer(t.Context(),
		&api.CreateContainerRequest{Pod: sandbox, Container: container})
	return err
}

// TestCreateContainer: a container does not start without a Function of its pod's claims, or with a
// Function of another pod.
func TestCreateContainer(t *testing.T) {
	n, socket := newNode(t), filepath.Join(must.SocketDir(t), "nri.sock")
	r := startRuntime(t, socket)
	n.start(t, socket)
	r.waitForPlugin(t)
	n.reserve(t, "2", "pod1")
	a, _ := n.journal.Get(function.ID{Address: "0000:3b:00.2"})
	a.Claim.UID = "0f0e0d0c-0b0a-0908-0706-050403020100"
	if err := n.journal.Put(a); err != nil {
		t.Fatal(err)
	}

	device := claim.CDIKind + "=" + claim.CDIDeviceName(a.Claim.UID, a.Function.DeviceName())
	want := func(text string, err error) {
		t.Helper()
		if text == "" && err != nil || text != "" &&
			(err == nil || !strings.Contains(err.Error(), text)) {
			t.Errorf("error %v, want %q", err, text)
		}
	}

	const missing = "container app of pod default/pod1: Function 0000:3b:00.2 of its claim " +
		"pod1-claim is not attached to the pod"
	want(missing, r.create(t, sandbox("pod1", "s1"), device))
	// the pod has the claim, although the container does not name it
	want(missing, r.create(t, sandbox("pod1", "s1")))
	want("", r.run(t, sandbox("pod1", "s1")))
	want("", r.create(t, sandbox("pod1", "s1"), device, "nvidia.com/gpu=0"))
	want("pod default/pod1 has it; an interface can be in one pod only",
		r.create(t, sandbox("pod2", "s2"), device))
	want("", r.create(t, sandbox("pod2", "s2")))
}

// TestContainersOfOnePod: several containers of a pod may name its claim, init containers and
// sidecars among them. They share the pod's network namespace, and so the interface.
func TestContainersOfOnePod(t *testing.T) {
	n, socket := newNode(t), filepath.Join(must.SocketDir(t), "nri.sock")
	r := startRuntime(t, socket)
	n.start(t, socket)
	r.waitForPlugin(t)
	n.reserve(t, "2", "pod1")
	must.Succeed(t, r.run(t, sandbox("pod1", "s1")))

	a, _ := n.journal.Get(function.ID{Address: "0000:3b:00.2"})
	device := claim.CDIKind + "=" + claim.CDIDeviceName(a.Claim.UID, a.Function.DeviceName())
	for _, container := range []string{"init", "app", "sidecar"} {
		if err := r.create(t, sandbox("pod1", "s1"), device); err != nil {
			t.Errorf("container %s: %v", container, err)
		}
	}
}

// kubelet has the Functions that pods have by claims.
type kubelet map[string][]function.ID

func (k kubelet) Claimed(_ context.Context, namespace, pod string) ([]function.ID, error) {
	return k[namespace+"/"+pod], nil
}

// TestSharedClaim: a second pod of a claim, for which the kubelet does not call Prepare, is
// attached or refused like the first pod, and does not run without its interface.
func TestSharedClaim(t *testing.T) {
	n, socket := newNode(t), filepath.Join(must.SocketDir(t), "nri.sock")
	n.reserve(t, "2", "pod1")
	vf := function.ID{Address: "0000:3b:00.2"}
	r := startRuntime(t, socket)
	n.claimed = kubelet{"default/pod2": {vf}}.Claimed
	n.start(t, socket)
	r.waitForPlugin(t)
	if err := r.run(t, sandbox("stranger", "s9")); err != nil {
		t.Errorf("a pod without claims: %v", err)
	}

	n.errs["attach 2 s2 /run/netns/s2 pod2"] = errors.New("is Attached in pod default/pod1")
	err := r.run(t, sandbox("pod2", "s2"))
	if err == nil ||
		!strings.Contains(err.Error(),
			"is Attached in pod default/pod1; an interface can be in one pod only") {
		t.Errorf("error %v, want who has it and what to do", err)
	}

	n.calls = nil
	if err := r.run(t, sandbox("pod2", "s3")); err != nil {
		t.Error(err)
	}

	n.wantCalls(t, "attach 2 s3 /run/netns/s3 pod2", "report pod1-claim")
}

// asked counts the questions to the kubelet. The answer is that every pod has VF 0000:3b:00.2 by a
// claim.
type asked int

func (k *asked) Claimed(context.Context, string, string) ([]function.ID, error) {
	*k++
	return []function.ID{{Address: "0000:3b:00.2"}}, nil
}

// TestSharedClaimIsLookedFor: the kubelet is asked only if another pod of the namespace has a claim
// by NRI, and not about every pod of the node.
func TestSharedClaimIsLookedFor(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*journal.Attachment)
		asks   int
		calls  []string
	}{
		"another pod's claim": {
			func(*journal.Attachment) {},
			1, []string{"attach 2 s2 /run/netns/s2 pod2", "report pod1-claim"},
		},
		"of another namespace": {func(a *journal.Attachment) {
			a.Claim.Namespace = "other"
		}, 0, nil},
		"the pod's own": {func(a *journal.Attachment) {
			a.Pod.UID = "pod2-uid"
		}, 0, []string{"attach 2 s2 /run/netns/s2 pod2", "report pod1-claim"}},
		"no claim": {func(a *journal.Attachment) {
			a.Claim = journal.Claim{}
			a.Resource = "r"
		}, 0, nil},
		"attached by a CNI request": {func(a *journal.Attachment) {
			a.CNI = &journal.CNI{ContainerID: "s1", IfName: "net1"}
		}, 0, nil},
		"being released": {func(a *journal.Attachment) {
			a.State = journal.Releasing
		}, 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.reserve(t, "2", "pod1")
			a, _ := n.journal.Get(function.ID{Address: "0000:3b:00.2"})
			test.change(&a)
			if err := n.journal.Put(a); err != nil {
				t.Fatal(err)
			}

			var kubelet asked
			p := &Plugin{Journal: n.journal, Lifecycle: n, Claimed: kubelet.Claimed,
				Report: n.Report, Log: testr.New(t), ctx: t.Context()}
			if err := p.RunPodSandbox(t.Context(), sandbox("pod2", "s2")); err != nil {
				t.Fatal(err)
			}
			if int(kubelet) != test.asks {
				t.Errorf("the kubelet was asked %d times, want %d", kubelet, test.asks)
			}

			n.wantCalls(t, test.calls...)
		})
	}
}

func TestAwaitConnected(t *testing.T) {
	n, socket := newNode(t), filepath.Join(must.SocketDir(t), "nri.sock")
	p := n.start(t, socket)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()

	if err := p.AwaitConnected(ctx); err == nil || !strings.Contains(err.Error(), socket) {
		t.Errorf("error %v, want one that names the socket", err)
	}

	r := startRuntime(t, socket)
	if err := p.AwaitConnected(t.Context()); err != nil {
		t.Error(err)
	}

	r.waitForPlugin(t)
}

func TestRuntimeRestarts(t *testing.T) {
	n, socket := newNode(t), filepath.Join(must.SocketDir(t), "nri.sock")
	n.reserve(t, "2", "pod1")
	p := n.start(t, socket) // before there is a runtime
	if p.Connected() {
		t.Error("Connected = true without a runtime")
	}

	r := startRuntime(t, socket)
	r.waitForPlugin(t)
	if err := r.run(t, sandbox("pod1", "s1")); err != nil {
		t.Fatal(err)
	}

	n.wantCalls(t, "attach 2 s1 /run/netns/s1 pod1", "report pod1-claim")
	r.kill()
	must.Eventually(t, "the end of the connection", func() bool { return !p.Connected() })

	r = startRuntime(t, socket) // this runtime does not have the sandbox
	r.waitForPlugin(t)
	p.background.Wait() // the end of catchUp
	n.wantCalls(t, "detach 2 s1")
	if err := r.run(t, sandbox("pod1", "s2")); err != nil {
		t.Fatal(err)
	}

	n.wantCalls(t, "attach 2 s2 /run/netns/s2 pod1", "report pod1-claim")
}

// endAtConfigure passes on what a runtime sends, up to its first call of the plugin, and then
// closes the connection. It stands for a runtime that ends after it registered the plugin, and
// before it configures the plugin.
func endAtConfigure(near, far net.Conn) {
	defer near.Close()
	defer far.Close()

	go func() { _, _ = io.Copy(far, near) }()
	for {
		// the number of the multiplexed connection, and the length of the data
		var header [8]byte
		if _, err := io.ReadFull(far, header[:]); err != nil {
			return
		}
		if multiplex.ConnID(binary.BigEndian.Uint32(header[:4])) == multiplex.PluginServiceConn {
			return
		}
		if _, err := near.Write(header[:]); err != nil {
			return
		}
		if _, err := io.CopyN(near, far, int64(binary.BigEndian.Uint32(header[4:]))); err != nil {
			return
		}
	}
}

// TestRuntimeEndsBeforeConfigure: the plugin connects to the next runtime, although the NRI stub
// would wait for the first one for ever.
func TestRuntimeEndsBeforeConfigure(t *testing.T) {
	n, socket := newNode(t), filepath.Join(must.SocketDir(t), "nri.sock")
	startRuntime(t, socket+".real")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}

	p := n.start(t, socket)
	near, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}

	far, err := net.Dial("unix", socket+".real")
	if err != nil {
		t.Fatal(err)
	}

	endAtConfigure(near, far)
	listener.Close()
	r := startRuntime(t, socket)
	r.waitForPlugin(t)
	if err := p.AwaitConnected(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestSandboxWithoutUID checks that a Function that the kubelet has allocated, to a pod that is not
// known yet, does not go to a sandbox of which the runtime says no UID.
func TestSandboxWithoutUID(t *testing.T) {
	n := newNode(t)
	must.Succeed(t, n.journal.Put(journal.Attachment{
		Function: function.ID{Address: "0000:3b:00.1"}, State: journal.Reserved,
		Resource: "xpu.opiproject.org/fast",
	}))
	p := &Plugin{
		Journal: n.journal, Lifecycle: n, Report: n.Report, Log: testr.New(t), ctx: t.Context(),
	}

	pod := sandbox("pod", "s1")
	pod.Uid = ""
	must.Succeed(t, p.RunPodSandbox(t.Context(), pod))
	n.wantCalls(t)
}

// Functions of CNI requests are attached and released by CNI only. Other Functions of the pod's
// claims are not affected.
func TestLeavesCNIAlone(t *testing.T) {
	n := newNode(t)
	n.reserve(t, "1", "pod")

	for f, claim := range map[string]journal.Claim{
		"2": {}, "3": {Name: "pod-claim", UID: "pod-claim-uid"},
	} {
		if err := n.journal.Put(journal.Attachment{
			Function: function.ID{Address: pci.Address("0000:3b:00." + f)}, State: journal.Attached,
			Claim: claim,
			Pod:   journal.Pod{Namespace: "default", Name: "pod", UID: "pod-uid"}, Sandbox: "s1",
			CNI: &journal.CNI{
				ContainerID: "s1", IfName: "net" + f, Claimed: &function.Interface{Name: "claimed"},
			},
			Before: &netdev.Snapshot{}, Observed: &netdev.Observed{},
		}); err != nil {
			t.Fatal(err)
		}
	}

	p := &Plugin{
		Journal: n.journal, Lifecycle: n, Report: n.Report, Log: testr.New(t), ctx: t.Context(),
	}

	pod := &api.PodSandbox{
		Id: "s1", Name: "pod", Namespace: "default", Uid: "pod-uid",
		Linux: &api.LinuxPodSandbox{
			Namespaces: []*api.LinuxNamespace{{Type: "network", Path: "/run/netns/x"}},
		},
	}

	if err := p.RunPodSandbox(t.Context(), pod); err != nil {
		t.Fatal(err)
	}

	n.wantCalls(t, "attach 1 s1 /run/netns/x pod", "report pod-claim")
	if _, err := p.Synchronize(t.Context(), nil, nil); err != nil { // the runtime has no sandbox
		t.Fatal(err)
	}

	p.background.Wait()
	n.wantCalls(t, "detach 1 s1")
	if err := p.StopPodSandbox(t.Context(), pod); err != nil {
		t.Fatal(err)
	}

	n.wantCalls(t, "detach 1 s1", "detach 3 s1")
}
