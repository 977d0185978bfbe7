// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// patience is how long tests wait for events that should happen at once.
const patience = 20 * time.Second

// node has a node's pools, their health and the xPU. It is safe for concurrent use.
type node struct {
	mutex    sync.Mutex
	pools    []pool.Pool
	known    bool
	problems map[string]function.Problem // by Function
	ready    func(context.Context, function.Function, pool.Pool) error
	reserve  func(function.Function) (function.Function, error)
	givenUp  []string // Functions
	changed  notify.Signal
}

func (n *node) Pools() ([]pool.Pool, bool) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return n.pools, n.known
}

func (n *node) Problems(f function.Function) []function.Problem {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	if problem, ok := n.problems[f.ID.String()]; ok {
		return []function.Problem{problem}
	}
	return nil
}

func (n *node) Reserve(
	_ context.Context, f function.Function, _ pool.Pool,
) (function.Function, error) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	if n.reserve == nil {
		return f, nil
	}
	return n.reserve(f)
}

func (n *node) GiveUp(_ context.Context, f function.Function, _ pool.Pool) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.givenUp = append(n.givenUp, f.ID.String())
	slices.Sort(n.givenUp)
}

func (n *node) Ready(ctx context.Context, f function.Function, p pool.Pool) error {
	n.mutex.Lock()
	ready := n.ready
	n.mutex.Unlock()
	return ready(ctx, f, p)
}

// set replaces the pools.
func (n *node) set(pools ...pool.Pool) {
	n.mutex.Lock()
	n.pools, n.known = pools, true
	n.mutex.Unlock()
	n.changed.Notify()
}

// hurt gives Functions a problem. Without a taint it heals them.
func (n *node) hurt(taint, message string, ids ...string) {
	n.mutex.Lock()
	for _, id := range ids {
		if n.problems == nil {
			n.problems = map[string]function.Problem{}
		}
		if delete(n.problems, id); taint != "" {
			n.problems[id] = function.Problem{Taint: taint, Message: message}
		}
	}

	n.mutex.Unlock()
	n.changed.Notify()
}

// scene is a node with a kubelet and a manager.
type scene struct {
	*testing.T
	*node
	// dir is the kubelet's directory.
	dir     string
	kubelet *kubelettest.Kubelet
	manager *Manager
}

// newManager returns a complete manager, which tests can change.
func newManager(t testing.TB, dir string, n *node, log logr.Logger) *Manager {
	return &Manager{
		KubeletDir: dir, Pools: n.Pools, Problems: n.Problems, Allocator: n,
		InUse:      func(function.ID) bool { return false },
		Nodes:      devnode.Finder{SysRoot: t.TempDir(), DevRoot: t.TempDir()},
		DeviceInfo: NewDeviceInfo(filepath.Join(dir, "devinfo/dp"), filepath.Join(dir, "copies")),
		Metrics:    NewMetrics(prometheus.NewRegistry()), Log: log,
	}
}

// newScene starts a kubelet.
func newScene(t *testing.T, options kubelettest.Options) *scene {
	t.Helper()
	dir := must.SocketDir(t)
	s := &scene{T: t, node: &node{}, dir: dir, kubelet: kubelettest.New(dir, options)}
	if err := s.kubelet.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.kubelet.Stop)

	s.manager = newManager(t, dir, s.node, testr.New(t))
	return s
}

// run runs the manager until the test ends or stop is called.
func (s *scene) run() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	changes := s.changed.Subscribe(ctx)
	go func() { done <- s.manager.Run(ctx, changes) }()

	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			s.Errorf("Run = %v, want nil when its context ends", err)
		}
	})

	s.Cleanup(stop)
	return stop
}

// await waits until a condition about the kubelet is true.
func (s *scene) await(what string, condition func() bool) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), patience)
	defer cancel()
	if err := s.kubelet.Wait(ctx, condition); err != nil {
		s.Fatalf("%s: %v", what, err)
	}
}

// awaitHealthy waits until the kubelet may allocate exactly these Functions.
func (s *scene) awaitHealthy(what, resource string, ids ...string) {
	s.Helper()
	s.await(fmt.Sprintf("%s: want %q", what, ids), func() bool {
		return slices.Equal(s.kubelet.Healthy(resource), ids)
	})
}

const (
	fast = "xpu.opiproject.org/fast"
	vf0  = "0000:3b:00.2"
	vf1  = "0000:3b:00.3"
	vf2  = "0000:3b:00.4"
)

func TestManager(t *testing.T) {
	s := newScene(t, kubelettest.Options{})
	s.run()
	s.set(poolOf("fast", vfs("3b:0-1")...),
		pool.Pool{Name: "dra", Functions: vfs("5e:0"),
			Spec: v1alpha1.DevicePoolSpec{Publish: v1alpha1.PublishDRA}}, poolOf("none"))
	s.awaitHealthy("registered", fast, vf0, vf1)

	want := []*pluginapi.Device{
		{ID: vf0, Health: "Healthy",
			Topology: &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: 0}}}},
		{ID: vf1, Health: "Healthy",
			Topology: &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: 0}}}},
	}

	if diff := cmp.Diff(want, s.kubelet.Devices(fast), protocmp.Transform()); diff != "" {
		t.Errorf("devices: -want +got\n%s", diff)
	}
	if info, err := os.Stat(s.kubelet.Endpoints(fast)[0]); err != nil ||
		info.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v, want mode 0600", info, err)
	}

	s.hurt(v1alpha1.TaintLinkDown, "no link", vf0, vf1)
	s.awaitHealthy("both unhealthy", fast)
	s.hurt("", "", vf1)
	s.awaitHealthy("one is healthy again", fast, vf1)

	lists := s.kubelet.Lists(fast)
	s.hurt(v1alpha1.TaintXPUAway, "another reason", vf0)
	excluded := poolOf("fast", vfs("3b:0-2")...)
	excluded.Spec.DevicePlugin.ExcludeTopology = true
	time.Sleep(2 * debounce)
	s.set(excluded)
	s.awaitHealthy("a Function came", fast, vf1, vf2)
	if got := s.kubelet.Lists(fast); got != lists+1 {
		t.Errorf("%d lists were sent, want 1: another reason is no change for the kubelet",
			got-lists)
	}
	if topology := s.kubelet.Devices(fast)[0].Topology; topology != nil {
		t.Errorf("topology is %v, want none", topology)
	}
	if got := s.kubelet.Registrations(fast); got != 1 {
		t.Errorf("registered %d times, want once", got)
	}

	for health, want := range map[string]float64{"Healthy": 2, "Unhealthy": 1} {
		if got := testutil.ToFloat64(s.manager.Metrics.devices.WithLabelValues(fast,
			health)); got != want {
			t.Errorf("metric of devices that are %s = %v, want %v", health, got, want)
		}
	}

	s.set(poolOf("fast"))
	s.await("all Functions went", func() bool { return len(s.kubelet.Devices(fast)) == 0 })

	if len(s.kubelet.Endpoints(fast)) != 1 {
		t.Error(
			"the server of a pool that had Functions is gone, want it to say that there are none",
		)
	}

	s.set(excluded, poolOf("slow", vfs("5e:0")...))
	s.awaitHealthy("they are back", fast, vf1, vf2)
	s.awaitHealthy("another pool", "xpu.opiproject.org/slow", "0000:5e:00.2")

	s.set(poolOf("slow", vfs("5e:0")...))
	s.await("the pool went", func() bool { return len(s.kubelet.Endpoints(fast)) == 0 })
	if devices := s.kubelet.Devices(fast); len(devices) != 0 {
		t.Errorf("the kubelet still has %v: its Node would show capacity for minutes", devices)
	}

	for _, other := range []string{"xpu.opiproject.org/none", "xpu.opiproject.org/dra"} {
		if got := s.kubelet.Registrations(other); got != 0 {
			t.Errorf("%s was registered", other)
		}
	}
}

// TestManagerKeepsServers: a server stays when its DevicePool is renamed, or when another
// DevicePool claims its resource.
func TestManagerKeepsServers(t *testing.T) {
	s := newScene(t, kubelettest.Options{})
	s.run()

	named := func(p pool.Pool) pool.Pool {
		p.Spec.DevicePlugin.ResourcePrefix, p.Spec.DevicePlugin.ResourceName = "intel.com", "sriov_dpdk"
		return p
	}

	s.set(named(poolOf("old", vfs("3b:0")...)))
	s.awaitHealthy("registered", "intel.com/sriov_dpdk", vf0)
	broken := named(poolOf("broken"))
	broken.Err = errors.New("DevicePool broken: resource intel.com/sriov_dpdk belongs to " +
		"DevicePool new")
	s.set(broken, named(poolOf("new", vfs("3b:0-1")...)))
	s.awaitHealthy("renamed", "intel.com/sriov_dpdk", vf0, vf1)
	s.set(broken)
	s.await("only the broken one is left", func() bool {
		return len(s.kubelet.Devices("intel.com/sriov_dpdk")) == 0
	})
	s.set(named(poolOf("new", vfs("3b:0")...)))
	s.awaitHealthy("repaired", "intel.com/sriov_dpdk", vf0)
	if got := s.kubelet.Registrations("intel.com/sriov_dpdk"); got != 1 {
		t.Errorf("registered %d times, want once", got)
	}
}

func TestKubeletRestarts(t *testing.T) {
	s := newScene(t, kubelettest.Options{})
	s.set(poolOf("fast", vfs("3b:0")...), poolOf("slow", vfs("5e:0")...))
	s.run()

	for i := range 10 {
		s.awaitHealthy(fmt.Sprint("start ", i), fast, vf0)
		s.awaitHealthy(fmt.Sprint("start ", i), "xpu.opiproject.org/slow", "0000:5e:00.2")
		if err := s.kubelet.Restart(); err != nil {
			t.Fatal(err)
		}
	}

	s.awaitHealthy("the last start", fast, vf0)
	if _, err := s.kubelet.Allocate(t.Context(), fast, vf0); err != nil {
		t.Errorf("Allocate: %v", err)
	}
}

// TestSocketsRemoved: a removed socket is replaced, whether or not a kubelet had a stream, and
// again before the kubelet can find the new one.
func TestSocketsRemoved(t *testing.T) {
	for _, blind := range []bool{false, true} {
		t.Run(fmt.Sprintf("blind %t", blind), func(t *testing.T) {
			s := newScene(t, kubelettest.Options{Blind: blind})
			s.set(poolOf("fast", vfs("3b:0")...))
			s.run()

			for i := range 10 {
				s.await(fmt.Sprint("registration ", i), func() bool {
					return len(s.kubelet.Endpoints(fast)) == 1
				})
				if err := s.kubelet.RemoveSockets(); err != nil {
					t.Fatal(err)
				}

				if i%2 == 1 {
					if err := s.kubelet.RemoveSockets(); err != nil {
						t.Fatal(err)
					}
				}
			}

			s.await("the last registration", func() bool {
				return len(s.kubelet.Endpoints(fast)) == 1
			})
			if blind {
				return
			}

			s.awaitHealthy("after all", fast, vf0)
		})
	}
}

// TestSocketRenamed: a new endpoint is opened because the directory of the sockets is watched. The
// stream stays open, and the fallback for a kubelet that does not connect would take an hour.
func TestSocketRenamed(t *testing.T) {
	t.Parallel()
	s := newScene(t, kubelettest.Options{})
	s.manager.unwatchedFor = time.Hour
	s.set(poolOf("fast", vfs("3b:0")...))
	s.run()
	s.awaitHealthy("registered", fast, vf0)

	registrations := s.kubelet.Registrations(fast)
	must.Succeed(t, os.Rename(s.kubelet.Endpoints(fast)[0], filepath.Join(s.dir, "elsewhere")))
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := s.kubelet.Wait(ctx, func() bool {
		return s.kubelet.Registrations(fast) > registrations
	}); err != nil {
		t.Fatalf("no new endpoint was registered: %v", err)
	}
}

// TestSocketRemoved: only the end of a server's current socket counts.
func TestSocketRemoved(t *testing.T) {
	m := &Manager{servers: map[string]*server{
		"opens": {}, fast: {endpoint: &endpoint{path: "/dir/current.sock"}},
	}}
	for _, test := range []struct {
		event fsnotify.Event
		want  bool
	}{
		{fsnotify.Event{Name: "/dir/current.sock", Op: fsnotify.Remove}, true},
		{fsnotify.Event{Name: "/dir/current.sock", Op: fsnotify.Rename}, true},
		{fsnotify.Event{Name: "/dir/current.sock", Op: fsnotify.Create}, false},
		{fsnotify.Event{Name: "/dir/current.sock", Op: fsnotify.Chmod}, false},
		{fsnotify.Event{Name: "/dir/old.sock", Op: fsnotify.Remove}, false},
		{fsnotify.Event{Name: "/dir/old.sock", Op: fsnotify.Rename}, false},
	} {
		if got := m.socketRemoved(test.event); got != test.want {
			t.Errorf("%s: %t, want %t", test.event, got, test.want)
		}
	}
}

// TestDirectoryRemoved: the whole directory is removed, and comes back.
func TestDirectoryRemoved(t *testing.T) {
	s := newScene(t, kubelettest.Options{})
	s.set(poolOf("fast", vfs("3b:0")...))
	s.run()

	for range 3 {
		s.awaitHealthy("registered", fast, vf0)
		s.kubelet.Stop()

		// The server may be putting a socket there.
		for os.RemoveAll(filepath.Join(s.dir, pluginsRegistry)) != nil {
			time.Sleep(time.Millisecond)
		}
		if err := s.kubelet.Start(); err != nil {
			t.Fatal(err)
		}
	}

	s.awaitHealthy("after all", fast, vf0)
}

// TestStreamLost: a kubelet that only lost its stream does not reconnect by itself.
func TestStreamLost(t *testing.T) {
	s := newScene(t, kubelettest.Options{})
	s.manager.unwatchedFor = 100 * time.Millisecond
	s.set(poolOf("fast", vfs("3b:0")...))
	s.run()

	for range 3 {
		s.awaitHealthy("registered", fast, vf0)
		s.kubelet.EndStreams(fast)
		s.await("the stream ended", func() bool { return len(s.kubelet.Healthy(fast)) == 0 })
	}

	s.awaitHealthy("found again", fast, vf0)
}

// TestRetired: a server whose pool is gone opens no endpoint any more, because its empty list would
// replace the list of the resource's next server.
func TestRetired(t *testing.T) {
	s := newScene(t, kubelettest.Options{})
	s.set(poolOf("fast", vfs("3b:0")...))
	s.run()
	s.awaitHealthy("registered", fast, vf0)

	server := func() *server {
		s.manager.mutex.Lock()
		defer s.manager.mutex.Unlock()
		return s.manager.servers[fast]
	}

	retired := server()
	s.set()
	s.awaitHealthy("retired", fast)
	must.Eventually(t, "the server is gone", func() bool { return server() == nil })
	s.manager.mutex.Lock()
	endpoint := retired.endpoint
	retired.lostAt = time.Now()
	s.manager.mutex.Unlock()
	if pause, err := retired.register(); pause != 0 || err != nil || retired.endpoint != endpoint {
		t.Errorf("register = %s, %v, with a new endpoint: %t", pause, err,
			retired.endpoint != endpoint)
	}
}

// TestKubeletIsLate: a server waits for the kubelet, and registers as soon as the kubelet runs.
func TestKubeletIsLate(t *testing.T) {
	s := newScene(t, kubelettest.Options{})
	s.kubelet.Stop()
	s.set(poolOf("fast", vfs("3b:0")...))
	s.run()
	time.Sleep(2 * debounce)
	if err := s.kubelet.Start(); err != nil {
		t.Fatal(err)
	}
	s.awaitHealthy("registered", fast, vf0)
}

// TestRefused: the plugin leaves it to a kubelet that refused a resource to try again, and notices
// when the kubelet succeeds.
func TestRefused(t *testing.T) {
	var options kubelettest.Options
	var mutex sync.Mutex
	reason := "the name is not to my liking"
	options.Refuse = func(string) string {
		mutex.Lock()
		defer mutex.Unlock()
		return reason
	}

	s := newScene(t, options)
	s.set(poolOf("fast", vfs("3b:0")...))
	s.run()
	refused := s.manager.Metrics.registrations.WithLabelValues(fast, "error")
	for begin := time.Now(); testutil.ToFloat64(refused) < 2; time.Sleep(time.Millisecond) {
		if time.Since(begin) > patience {
			t.Fatal("the refusal was not noticed, or not tried again")
		}
	}

	mutex.Lock()
	reason = ""
	mutex.Unlock()
	s.awaitHealthy("registered", fast, vf0)
}

// TestLeftovers: the sockets of a killed agent are removed, and those of a running agent stay.
func TestLeftovers(t *testing.T) {
	s := newScene(t, kubelettest.Options{})
	dir := filepath.Join(s.dir, pluginsRegistry)
	listen := func(name string, alive bool) string {
		path := filepath.Join(dir, name)
		listener, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}

		listener.(*net.UnixListener).SetUnlinkOnClose(false)
		if alive {
			t.Cleanup(func() { listener.Close() })
		} else {
			listener.Close()
		}

		return path
	}

	dead, alive, other := listen("xpu-dp-fast-00000001.sock",
		false), listen("xpu-dp-fast-00000002.sock", true), listen("other.sock", false)
	s.set(poolOf("fast", vfs("3b:0")...))
	stop := s.run()
	s.awaitHealthy("registered", fast, vf0)

	for path, want := range map[string]bool{dead: false, alive: true, other: true} {
		if got := exists(path); got != want {
			t.Errorf("%s is there: %t, want %t", path, got, want)
		}
	}

	endpoint := s.kubelet.Endpoints(fast)[0]
	stop()
	if exists(endpoint) {
		t.Errorf("%s is still there after the end", endpoint)
	}

	s.await("the end", func() bool { return len(s.kubelet.Endpoints(fast)) == 0 })
	if devices := s.kubelet.Devices(fast); len(devices) != 1 {
		t.Errorf("the kubelet has %v, want it to keep the Function: only the agent ended", devices)
	}
}

func TestAllocate(t *testing.T) {
	s := newScene(t, kubelettest.Options{})
	s.set(poolOf("fast", vfs("3b:0-3 5e:0-1")...))
	s.run()
	s.await("registered", func() bool { return len(s.kubelet.Healthy(fast)) == 6 })
	got, err := s.kubelet.Allocate(t.Context(), fast, vf1, vf0)
	if err != nil {
		t.Fatal(err)
	}

	want := &pluginapi.ContainerAllocateResponse{Envs: map[string]string{
		"PCIDEVICE_XPU_OPIPROJECT_ORG_FAST":      vf1 + "," + vf0,
		"PCIDEVICE_XPU_OPIPROJECT_ORG_FAST_INFO": `{"0000:3b:00.2":{"generic":{"deviceID":"0000:3b:00.2"}},"0000:3b:00.3":{"generic":{"deviceID":"0000:3b:00.3"}}}`,
	}}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("response: -want +got\n%s", diff)
	}

	names, err := filepath.Glob(filepath.Join(s.dir, "devinfo/dp/*"))
	if err != nil || len(names) != 2 ||
		filepath.Base(names[0]) != "xpu.opiproject.org-fast-0000:3b:00.2-device.json" {
		t.Errorf("device-info files are %q, %v", names, err)
	}

	preferred, err := s.kubelet.Prefer(t.Context(),
		fast, []string{vf0, vf1, vf2, "0000:5e:00.2", "0000:99:00.0"}, []string{"0000:5e:00.3"}, 2)
	if diff := cmp.Diff([]string{"0000:5e:00.3", "0000:5e:00.2"}, preferred); diff != "" ||
		err != nil {
		t.Errorf("preferred, %v: -want +got\n%s", err, diff)
	}

	s.hurt(v1alpha1.TaintLinkDown, "PF pf3b has no link", vf2)
	for _, test := range []struct {
		ids  []string
		code codes.Code
		want []string
	}{
		{[]string{vf0, "0000:99:00.1"}, codes.NotFound, []string{"0000:99:00.1", fast}},
		{[]string{vf0, vf0}, codes.NotFound, []string{vf0, "twice"}},
		{[]string{vf0, vf2}, codes.FailedPrecondition, []string{vf2, fast, "PF pf3b has no link"}},
	} {
		_, err := s.kubelet.Allocate(t.Context(), fast, test.ids...)
		if status.Code(err) != test.code {
			t.Errorf("Allocate(%q) = %v, want %s", test.ids, err, test.code)
			continue
		}

		for _, text := range test.want {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("Allocate(%q): error %q, want %q in it", test.ids, err, text)
			}
		}
	}

	m := s.manager.Metrics
	if got := testutil.ToFloat64(m.allocations.WithLabelValues(fast)); got != 2 {
		t.Errorf("metric of allocations = %v, want 2", got)
	}
	if got := testutil.ToFloat64(m.allocateErrors.WithLabelValues(fast)); got != 3 {
		t.Errorf("metric of errors = %v, want 3", got)
	}
}

// TestAllocateWaitsForRelease: Allocate waits for a Function whose release began after the kubelet
// had chosen it.
// releasing is a scene in which vf0 is not back from its last pod.
func releasing(t *testing.T, timeout time.Duration) *scene {
	t.Helper()
	s := newScene(t, kubelettest.Options{})
	s.manager.AllocateTimeout = timeout
	s.set(poolOf("fast", vfs("3b:0")...))
	s.run()
	s.awaitHealthy("registered", fast, vf0)
	s.hurt(v1alpha1.TaintReleasePending, "is not back yet", vf0)
	s.awaitHealthy("being released", fast)
	return s
}

func TestAllocateWaitsForRelease(t *testing.T) {
	s := releasing(t, time.Minute)
	go func() {
		time.Sleep(2 * debounce) // Allocate most likely waits by then
		s.hurt("", "", vf0)
	}()

	if _, err := s.kubelet.Allocate(t.Context(), fast, vf0); err != nil {
		t.Errorf("Allocate = %v, want success once it is back", err)
	}
}

func TestAllocateGivesUpOnRelease(t *testing.T) {
	s := releasing(t, 200*time.Millisecond)
	_, err := s.kubelet.Allocate(t.Context(), fast, vf0)
	if status.Code(err) != codes.DeadlineExceeded ||
		!strings.Contains(err.Error(), "is not back yet") || !strings.Contains(err.Error(), vf0) {
		t.Errorf("Allocate = %v, want that it gave up on %s, which is not back yet", err, vf0)
	}
}

// TestAllocateLooksFirst: the xPU is not asked for a Function that the container could not use,
// because no call would undo the request.
func TestAllocateLooksFirst(t *testing.T) {
	s := newScene(t, kubelettest.Options{})
	p := poolOf("fast", vfs("3b:0")...)
	p.Spec.Network, p.Spec.DevicePlugin.ProvisionAt = "blue", v1alpha1.ProvisionAtAllocate
	p.Spec.DevicePlugin.NeedVhostNet = true

	s.ready = func(context.Context, function.Function, pool.Pool) error {
		t.Error("the xPU was asked")
		return nil
	}

	s.set(p)
	s.run()
	s.awaitHealthy("registered", fast, vf0)
	_, err := s.kubelet.Allocate(t.Context(), fast, vf0)
	if err == nil || !strings.Contains(err.Error(), "/dev/vhost-net") {
		t.Errorf("Allocate = %v, want an error that names /dev/vhost-net", err)
	}
}

func TestAllocateProvisions(t *testing.T) {
	s := newScene(t, kubelettest.Options{})
	s.manager.AllocateTimeout = 500 * time.Millisecond
	p := poolOf("fast", vfs("3b:0-1")...)
	p.Spec.Network, p.Spec.DevicePlugin.ProvisionAt = "blue", v1alpha1.ProvisionAtAllocate
	var mutex sync.Mutex
	var asked []string
	both := make(chan struct{})
	s.ready = func(ctx context.Context, f function.Function, p pool.Pool) error {
		mutex.Lock()
		asked = append(asked, p.Spec.Network+" "+f.ID.String())
		if len(asked) == 2 {
			close(both)
		}

		mutex.Unlock()
		select {
		case <-both: // one after the other would never get here
			return nil
		case <-ctx.Done():
			return fmt.Errorf("XPUPort of %s: %w", f.ID, ctx.Err())
		}
	}

	s.set(p)
	s.run()
	s.awaitHealthy("registered", fast, vf0, vf1)
	if _, err := s.kubelet.Allocate(t.Context(), fast, vf0, vf1); err != nil {
		t.Fatal(err)
	}

	slices.Sort(asked)
	if diff := cmp.Diff([]string{"blue " + vf0, "blue " + vf1}, asked); diff != "" {
		t.Errorf("asked for: -want +got\n%s", diff)
	}

	both = make(chan struct{})
	_, err := s.kubelet.Allocate(t.Context(), fast, vf0)
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "XPUPort of "+vf0) {
		t.Errorf("Allocate = %v, want the reason of the xPU", err)
	}

	p.Spec.DevicePlugin = &v1alpha1.DevicePluginSpec{
		ProvisionAt: v1alpha1.ProvisionAtAdd, ExcludeTopology: true,
	}
	s.set(p)
	s.await("changed", func() bool { return s.kubelet.Devices(fast)[0].Topology == nil })
	if _, err := s.kubelet.Allocate(t.Context(), fast, vf0); err != nil {
		t.Errorf("Allocate without provisioning: %v", err)
	}
	if len(asked) != 3 {
		t.Errorf("the xPU was asked for %q, want nothing after the pool provisions at ADD", asked)
	}
}

// assigned has the Functions of pods.
type assigned map[string]podresources.Assignment

func (a assigned) Assigned(context.Context) (map[string]podresources.Assignment, error) {
	if a == nil {
		return nil, errors.New("the kubelet is away")
	}
	return a, nil
}

// hanging is a kubelet that accepts calls and does not answer.
type hanging struct{ asked atomic.Int32 }

func (h *hanging) Assigned(ctx context.Context) (map[string]podresources.Assignment, error) {
	h.asked.Add(1)
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestSweepDoesNotHold: the manager follows pools and health while the kubelet does not answer.
func TestSweepDoesNotHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var looked atomic.Int32
		kubelet := &hanging{}
		m := &Manager{Pools: func() ([]pool.Pool, bool) {
			looked.Add(1)
			return nil, true
		}, Assigned: kubelet.Assigned, Log: testr.New(t)}

		m.reset()
		ctx, stop := context.WithCancel(t.Context())
		defer stop()

		changes := make(chan struct{}, 1)
		var loops sync.WaitGroup
		loops.Go(func() { m.followPools(ctx, changes) })
		loops.Go(func() { m.sweepRegularly(ctx) })

		for i := range 3 {
			time.Sleep(sweepEvery)
			synctest.Wait()
			if got := kubelet.asked.Load(); int(got) != i+1 {
				t.Errorf("the kubelet was asked %d times, want %d", got, i+1)
			}

			before := looked.Load()
			changes <- struct{}{}
			time.Sleep(2 * debounce)
			synctest.Wait()
			if looked.Load() == before {
				t.Error("a change is not followed while the kubelet does not answer")
			}
		}

		stop()
		loops.Wait()
	})
}

func TestDeviceInfoRemoved(t *testing.T) {
	n := &node{}
	m := newManager(t, must.SocketDir(t), n, testr.New(t))
	// This file belongs to another device plugin, with the resource intel.com/dpdk-sf.
	if err := os.MkdirAll(m.DeviceInfo.dir, 0o755); err != nil {
		t.Fatal(err)
	}

	foreign := filepath.Join(m.DeviceInfo.dir, "intel.com-dpdk-sf-mlx5_core.sf.2-device.json")
	if err := os.WriteFile(foreign, nil, 0o644); err != nil {
		t.Fatal(err)
	}

	other := NewDeviceInfo(m.DeviceInfo.dir, t.TempDir()) // stands for another device plugin
	for resource, info := range map[string]*DeviceInfo{
		fast: m.DeviceInfo, "intel.com/dpdk": m.DeviceInfo, "other.com/nic": other,
	} {
		for _, f := range vfs("3b:0-1") {
			must.Succeed(t, info.write(resource, content{function: f}))
		}
	}

	changedAt := func(at time.Time) {
		paths, err := filepath.Glob(filepath.Join(m.DeviceInfo.dir, "*"))
		copies, err2 := filepath.Glob(filepath.Join(m.KubeletDir, "copies", "*"))
		err = errors.Join(err, err2)
		for _, path := range append(paths, copies...) {
			err = errors.Join(err, os.Chtimes(path, at, at))
		}
		if err != nil {
			t.Fatal(err)
		}
	}

	changedAt(time.Now().Add(-2 * minAge))
	left := func() string {
		entries, err := os.ReadDir(m.DeviceInfo.dir)
		if err != nil {
			t.Fatal(err)
		}

		var names []string
		for _, entry := range entries {
			names = append(names,
				strings.TrimSuffix(strings.ReplaceAll(entry.Name(), "0000:3b:00.", ""),
					"-device.json"))
		}

		return strings.Join(names, " ")
	}

	m.reset()
	m.resources.Insert("intel.com/dpdk")
	const all = "intel.com-dpdk-2 intel.com-dpdk-3 intel.com-dpdk-sf-mlx5_core.sf.2 " +
		"other.com-nic-2 other.com-nic-3 xpu.opiproject.org-fast-2 xpu.opiproject.org-fast-3"
	m.sweep(t.Context())
	if got := left(); got != all {
		t.Errorf("without podresources, files are %q, want all", got)
	}

	m.Assigned = assigned(nil).Assigned
	m.sweep(t.Context())
	if got := left(); got != all {
		t.Errorf("while the kubelet is away, files are %q, want all", got)
	}

	m.Assigned = assigned{
		vf0: {Resource: fast, Pod: "a"}, vf1: {Resource: "intel.com/dpdk", Pod: "b"},
	}.Assigned
	changedAt(time.Now())
	m.sweep(t.Context())
	if got := left(); got != all {
		t.Errorf("when they are new, files are %q, want all: the kubelet may not have written "+
			"down the pod yet", got)
	}

	changedAt(time.Now().Add(-2 * minAge))
	m.sweep(t.Context())
	if got, want := left(), "intel.com-dpdk-3 intel.com-dpdk-sf-mlx5_core.sf.2 other.com-nic-2 "+
		"other.com-nic-3 xpu.opiproject.org-fast-2"; got != want {
		t.Errorf("files are %q, want %q", got, want)
	}

	must.Succeed(t, os.RemoveAll(m.DeviceInfo.dir))
	_, err := m.DeviceInfo.Restore()
	must.Succeed(t, err)
	if got, want := left(), "intel.com-dpdk-3 xpu.opiproject.org-fast-2"; got != want {
		t.Errorf("files that are there again are %q, want %q: not those that were removed", got, want)
	}
}

// TestDeviceInfoOfRetiredResource: the files of a resource go that an agent before this one served,
// because they have copies. A file that another device plugin has written since is left to it.
func TestDeviceInfoOfRetiredResource(t *testing.T) {
	const retired = "intel.com/dpdk"
	dir := must.SocketDir(t)
	before := newManager(t, dir, &node{}, testr.New(t))
	for _, f := range vfs("3b:0-2") {
		must.Succeed(t, before.DeviceInfo.write(retired, content{function: f}))
	}
	path := func(id string) string {
		return filepath.Join(before.DeviceInfo.dir, "intel.com-dpdk-"+id+"-device.json")
	}
	const foreign = "of another device plugin"
	must.Succeed(t, os.WriteFile(path(vf0), []byte(foreign), 0o644))
	copies, err := filepath.Glob(filepath.Join(dir, "copies", "*"))
	must.Succeed(t, err)
	old := time.Now().Add(-2 * minAge)
	for _, file := range append(copies, path(vf0), path(vf1), path(vf2)) {
		must.Succeed(t, os.Chtimes(file, old, old))
	}

	m := newManager(t, dir, &node{}, testr.New(t))
	m.reset()
	m.Assigned = assigned{vf0: {Resource: retired}, vf1: {Resource: retired}}.Assigned
	m.sweep(t.Context())
	text, err := os.ReadFile(path(vf0))
	if err != nil || string(text) != foreign {
		t.Errorf("the other plugin's file is %q, %v", text, err)
	}
	if _, err := os.Stat(path(vf2)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file of a Function that no pod has is there: %v", err)
	}

	must.Succeed(t, os.RemoveAll(m.DeviceInfo.dir))
	restored, err := m.DeviceInfo.Restore()
	must.Succeed(t, err)
	if want := filepath.Base(path(vf1)); len(restored) != 1 || restored[0] != want {
		t.Errorf("restored %q, want %s, which a pod of the agent before has", restored, want)
	}
}

// TestDeviceInfoOfOtherPlugin: a pool gets a resource of which another device plugin has given
// Functions to pods. Its files stay as they are. Those of an agent that kept no copies get one.
func TestDeviceInfoOfOtherPlugin(t *testing.T) {
	const resource, text = "intel.com/dpdk", "of who knows whom"
	m := newManager(t, must.SocketDir(t), &node{}, testr.New(t))
	functions := vfs("3b:0-1")
	must.Succeed(t, os.MkdirAll(m.DeviceInfo.dir, 0o755))
	var contents []content
	for _, f := range functions {
		contents = append(contents, content{function: f})
		for _, of := range []string{resource, fast} {
			path := filepath.Join(m.DeviceInfo.dir, deviceInfoName(of, f.ID))
			must.Succeed(t, os.WriteFile(path, []byte(text), 0o644))
		}
	}

	gave := func(id function.ID) bool { return id == functions[1].ID }
	must.Succeed(t, m.DeviceInfo.refresh(resource, contents, gave))
	must.Succeed(t, m.DeviceInfo.refresh(fast, contents, func(function.ID) bool { return false }))
	for name, isOurs := range map[string]bool{
		deviceInfoName(resource, functions[0].ID): false, // the other plugin's
		deviceInfoName(resource, functions[1].ID): true,  // the journal says so
		deviceInfoName(fast, functions[0].ID):     true,  // the resource is this project's
	} {
		now, err := os.ReadFile(filepath.Join(m.DeviceInfo.dir, name))
		must.Succeed(t, err)
		has, err := m.DeviceInfo.kept.Has(name)
		if (string(now) != text) != isOurs || has != isOurs || err != nil {
			t.Errorf("%s is %q, with copy %t, %v; is it ours: %t", name, now, has, err, isOurs)
		}
	}
}

// TestDeviceInfoAfterReboot: the files of Functions that pods have are there before the kubelet can
// start the pods, and describe vDPA devices as they are numbered now.
func TestDeviceInfoAfterReboot(t *testing.T) {
	dir := t.TempDir()
	info := NewDeviceInfo(filepath.Join(dir, "dp"), filepath.Join(dir, "copies"))
	f := vfs("3b:0")[0]
	of := func(device string) content {
		c := content{function: f}
		c.function.VDPA = function.VDPA{Name: device, Driver: "vhost_vdpa", CharDevice: "vhost-" + device}
		c.Info = map[string]map[string]string{"vdpa": {}}
		return c
	}
	read := func() string {
		text, err := os.ReadFile(filepath.Join(dir, "dp", deviceInfoName(fast, f.ID)))
		must.Succeed(t, err)
		return string(text)
	}

	must.Succeed(t, info.write(fast, of("vdpa0")))
	must.Succeed(t, os.RemoveAll(filepath.Join(dir, "dp")))
	next := NewDeviceInfo(filepath.Join(dir, "dp"), filepath.Join(dir, "copies"))
	restored, err := next.Restore()
	must.Succeed(t, err)
	if len(restored) != 1 || !strings.Contains(read(), `"vdpa0"`) {
		t.Errorf("restored %q: %s", restored, read())
	}

	other := of("vdpa7")
	other.function.ID.Address = "0000:3b:00.7"
	nobody := func(function.ID) bool { return false }
	must.Succeed(t, next.refresh(fast, []content{of("vdpa1"), other}, nobody))
	if !strings.Contains(read(), `"vdpa1"`) || !strings.Contains(read(), "/dev/vhost-vdpa1") {
		t.Errorf("the file is that of before the reboot: %s", read())
	}
	if entries, err := os.ReadDir(filepath.Join(dir, "dp")); err != nil || len(entries) != 1 {
		t.Errorf("files %v, %v, want none of a Function that no pod has", entries, err)
	}
}
