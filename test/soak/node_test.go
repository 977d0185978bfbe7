// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/uptime"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/node/nri/nritest"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

const (
	nodeName = "node1"
	// vfsOfPF is how many VFs each of the two PFs has. The VFs of the first PF are claimed, and the
	// VFs of the second PF are extended resources.
	vfsOfPF  = 8
	claimPF  = pci.Address("0000:3b:00.0")
	pluginPF = pci.Address("0000:3b:00.1")
	resource = v1alpha1.GroupName + "/plugged"
	// metricsAddress is the agent's address, in the process's own network namespace.
	metricsAddress = "127.0.0.1:9810"
	// stateSize is the size in bytes of the file system that has the agent's state.
	stateSize = 4 << 20
	// patience bounds every wait for a state that must come, whatever faults happen meanwhile.
	patience = 3 * time.Minute
)

// node is a simulated node with the real xpu-agent, xpu-controller and API server. The test plays
// the kubelet, the container runtime and the xPU's OPI agent, over their real sockets. The methods
// may be called concurrently.
type node struct {
	t     testing.TB
	dir   string
	host  *simulate.Host
	admin client.Client
	opi   *opitest.Agent
	api   *gate // the agent's way to the API server

	// kubelet is locked for reading while a pod uses the kubelet, and for writing while it is away.
	kubelet sync.RWMutex
	plugins *kubelettest.Kubelet
	driver  *kubelettest.DRADriver
	lister  *kubelettest.Pods

	// runtime is locked in the same way.
	runtime sync.RWMutex
	nri     *adaptation.Adaptation
	// nriGate is the runtime's socket, because the runtime's library does not close connections
	// when it stops.
	nriGate *gate

	// vfs are the IDs of the VFs by PF and index.
	vfs   map[pci.Address][]function.ID
	cards cards

	// skew is the error of the simulated clock in nanoseconds.
	skew   atomic.Int64
	bootID string // a change of the clock changes no times within a boot

	mutex     sync.Mutex
	agent     *process
	starts    int
	pods      map[string]*podresourcesapi.PodResources // by pod
	sandboxes map[string]*adaptation.PodSandbox        // by ID
}

// newNode returns a node without an agent.
func newNode(t testing.TB) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "soak") // short, because a socket's path has at most 107 bytes
	must.Succeed(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })

	bootID, err := uptime.BootID("/proc")
	must.Succeed(t, err)

	n := &node{
		t: t, dir: dir, bootID: bootID, pods: map[string]*podresourcesapi.PodResources{},
		sandboxes: map[string]*adaptation.PodSandbox{},
	}

	hostLog, err := os.Create(n.path("host.log"))
	must.Succeed(t, err)
	t.Cleanup(func() { _ = hostLog.Close() })

	n.host, err = simulate.New(t.Context(), simulate.Config{
		Root: dir, HostNS: "/proc/thread-self/ns/net", XPUNS: netns.New(t).Path(),
		Log:   logr.FromSlogHandler(slog.NewTextHandler(hostLog, nil)),
		Cards: []simulate.Card{{PFs: 2, VFs: vfsOfPF, Bus: "3b"}},
	})

	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, n.host.Close()) })

	n.vfs = map[pci.Address][]function.ID{}
	for _, f := range n.host.Functions() {
		if f.Index >= 0 {
			n.vfs[f.PF] = append(n.vfs[f.PF], function.ID{Address: f.Address})
		}
	}

	ctrl.SetLogger(logr.Discard())
	must.Succeed(t, os.MkdirAll(n.path("state"), 0o700))
	must.Succeed(t,
		unix.Mount("tmpfs", n.path("state"), "tmpfs", 0, "size="+strconv.Itoa(stateSize)))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(n.path("state"), unix.MNT_DETACH)) })

	must.Succeed(t, os.MkdirAll(n.path("kubelet/plugins_registry"), 0o750))
	n.opi = opitest.Start(t)
	n.declare()
	n.startController()
	n.startKubelet()
	t.Cleanup(n.stopKubelet)

	n.startRuntime()
	t.Cleanup(n.stopRuntime)

	n.writeKubeconfig()
	return n
}

func (n *node) path(name string) string { return filepath.Join(n.dir, name) }

// declare creates the administrator's objects.
func (n *node) declare() {
	n.t.Helper()
	admin, err := kubeapitest.Client(cluster.Admin())
	must.Succeed(n.t, err)
	n.admin = admin

	pool := func(name string, pf pci.Address, publish v1alpha1.PublishMode) *v1alpha1.DevicePool {
		return &v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: v1alpha1.DevicePoolSpec{
				Selectors: []v1alpha1.FunctionSelector{
					{RootDevices: []string{fmt.Sprintf("%s#0-%d", pf, vfsOfPF-1)}},
				},
				Network: "lab", Publish: publish,
				Allow: []v1alpha1.PrivilegedField{v1alpha1.FieldAddresses},
			}}
	}

	for _, object := range []client.Object{
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}},
		&v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "card"}, Spec: v1alpha1.XPUSpec{
			NodeName: nodeName, PFs: []string{string(claimPF), string(pluginPF)},
			Endpoint: n.opi.Config().Endpoint, Insecure: true,
		}},
		&v1alpha1.XPUNetwork{
			ObjectMeta: metav1.ObjectMeta{Name: "lab"}, Spec: v1alpha1.XPUNetworkSpec{
				VLAN: 100, AllowedNamespaces: v1alpha1.AllowedNamespaces{
					From: v1alpha1.NamespacesFromAll,
				}, MTU: new(int32(1450)),
			},
		},
		pool("claimed", claimPF, v1alpha1.PublishDRA),
		pool("plugged", pluginPF, v1alpha1.PublishDevicePlugin),
	} {
		must.Succeed(n.t, n.admin.Create(n.t.Context(), object))
	}
}

// startController runs the real xpu-controller until the test ends.
func (n *node) startController() {
	n.t.Helper()
	scheme, err := controller.Scheme()
	must.Succeed(n.t, err)

	manager, err := ctrl.NewManager(cluster.Admin(), ctrl.Options{
		Scheme: scheme, Logger: logr.Discard(),
		Cache:      controller.CacheOptions(kubeapitest.AgentNamespace),
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: ctrlconfig.Controller{SkipNameValidation: new(true)},
	})

	must.Succeed(n.t, err)
	must.Succeed(n.t, controller.Setup(n.t.Context(), manager, controller.Options{
		Installation: opitest.Installation, FailedGrace: 50 * time.Millisecond,
		Namespace: kubeapitest.AgentNamespace, Registerer: prometheus.NewRegistry(),
	}))

	must.Run(n.t, manager.Start)
}

// writeKubeconfig writes a kubeconfig with the agent's own rights, whose way leads through the
// gate.
func (n *node) writeKubeconfig() {
	n.t.Helper()
	config := cluster.Agent(nodeName)
	server, err := url.Parse(config.Host)
	must.Succeed(n.t, err)
	n.api, err = openGate("tcp", "127.0.0.1:0", server.Host)
	must.Succeed(n.t, err)
	n.t.Cleanup(n.api.close)

	file := clientcmdapi.NewConfig()
	file.Clusters["api"] = &clientcmdapi.Cluster{
		Server: "https://" + n.api.address(), CertificateAuthorityData: config.CAData,
	}
	file.AuthInfos["agent"] = &clientcmdapi.AuthInfo{
		ClientCertificateData: config.CertData, ClientKeyData: config.KeyData,
		Impersonate:          config.Impersonate.UserName,
		ImpersonateGroups:    config.Impersonate.Groups,
		ImpersonateUserExtra: config.Impersonate.Extra,
	}

	file.Contexts["agent"] = &clientcmdapi.Context{Cluster: "api", AuthInfo: "agent"}
	file.CurrentContext = "agent"
	must.Succeed(n.t, clientcmd.WriteToFile(*file, n.path("kubeconfig")))
}

// startKubelet starts the kubelet and dials the driver at its registered endpoint.
func (n *node) startKubelet() {
	n.t.Helper()
	n.plugins = kubelettest.New(n.path("kubelet"), kubelettest.Options{})
	must.Succeed(n.t, n.restartKubelet())
	driver, err := kubelettest.ConnectDRADriver(n.path("kubelet/plugins/" + v1alpha1.GroupName +
		"/dra.sock"))
	must.Succeed(n.t, err)
	n.t.Cleanup(func() { driver.Close() })
	n.driver = driver
}

func (n *node) restartKubelet() (err error) {
	if err := n.plugins.Start(); err != nil {
		return err
	}
	if n.lister, err = kubelettest.ServePods(n.path("kubelet")); err != nil {
		return err
	}
	n.listPods()
	return nil
}

func (n *node) stopKubelet() {
	n.plugins.Stop()
	n.lister.Stop()
}

// has sets the resources that the kubelet reports for a pod; nil removes the pod.
func (n *node) has(pod string, resources *podresourcesapi.PodResources) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	if resources == nil {
		delete(n.pods, pod)
	} else {
		n.pods[pod] = resources
	}
	n.listPods()
}

func (n *node) listPods() {
	var all []*podresourcesapi.PodResources
	for _, pod := range n.pods {
		all = append(all, pod)
	}
	n.lister.Set(all...)
}

// startRuntime starts the runtime, which reports the existing sandboxes to the plugin.
func (n *node) startRuntime() {
	n.t.Helper()
	must.Succeed(n.t, os.MkdirAll(n.path("nri"), 0o755))
	var err error
	n.nriGate, err = openGate("unix", n.path("nri.sock"), n.path("nri/runtime.sock"))
	must.Succeed(n.t, err)
	n.t.Cleanup(n.nriGate.close)
	must.Succeed(n.t, n.restartRuntime())
}

func (n *node) restartRuntime() (err error) {
	n.nri, err = nritest.Start(n.path("nri/runtime.sock"), n.allSandboxes)
	if err == nil {
		n.nriGate.set(false)
	}
	return err
}

func (n *node) allSandboxes() []*adaptation.PodSandbox {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return slices.Collect(maps.Values(n.sandboxes))
}

func (n *node) stopRuntime() {
	n.nriGate.set(true)
	n.nri.Stop()
}

// process is a running agent.
type process struct {
	*exec.Cmd
	exited chan struct{} // closed when the process has ended
}

// kill kills the agent at once.
func (p *process) kill() {
	_ = p.Process.Kill()
	<-p.exited
}

// startAgent starts the agent of the node.
func (n *node) startAgent() {
	n.t.Helper()
	agent := n.launch()
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.agent = agent
	n.starts++
}

// launch starts the real agent, whose output is appended to a file.
func (n *node) launch() *process {
	n.t.Helper()
	log, err := os.OpenFile(n.path("agent.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	must.Succeed(n.t, err)
	defer log.Close()

	agent := exec.Command(agentProgram,
		"--node-name="+nodeName, "--listen="+metricsAddress, "--kubeconfig="+n.path("kubeconfig"),
		"--sys-root="+n.host.SysRoot(), "--state-dir="+n.path("state"),
		"--kubelet-dir="+n.path("kubelet"),
		"--cdi-dir="+n.path("cdi"), "--nri-socket="+n.path("nri.sock"),
		"--cni-socket="+n.path("run/cni.sock"),
		"--spool-dir="+n.path("spool"), "--devinfo-dir="+n.path("devinfo"),
		"--hooks-dir="+n.path("hooks.d"),
		"--provision-timeout=10s",
	)

	agent.Stdout, agent.Stderr = log, log
	agent.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must.Succeed(n.t, agent.Start())
	p := &process{agent, make(chan struct{})}
	go func() { _ = agent.Wait(); close(p.exited) }()

	return p
}

// killAgent kills the agent of the node.
func (n *node) killAgent() { n.theAgent().kill() }

func (n *node) theAgent() *process {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return n.agent
}

// now returns the time of the simulated clock.
func (n *node) now() time.Time { return time.Now().Add(time.Duration(n.skew.Load())) }

// endAgent ends the agent as Kubernetes does, and returns an error unless it exits with 0.
func (n *node) endAgent() error {
	agent := n.theAgent()
	_ = agent.Process.Signal(syscall.SIGTERM)

	select {
	case <-agent.exited:
	case <-time.After(30 * time.Second):
		return errors.New("the agent did not end within 30 s of SIGTERM")
	}

	if code := agent.ProcessState.ExitCode(); code != 0 {
		return fmt.Errorf("the agent ended with status %d", code)
	}

	return nil
}

// ready waits until the agent reports that it is ready.
func (n *node) ready(ctx context.Context) error {
	return await(ctx, "the agent is ready", func() error {
		_, err := get("/readyz")
		return err
	})
}

// get sends an HTTP request to the agent.
func get(path string) (string, error) {
	client := http.Client{Timeout: 2 * time.Second}
	response, err := client.Get("http://" + metricsAddress + path)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()

	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", response.Status, body)
	}

	return string(body), err
}

// await waits until check returns no error.
func await(ctx context.Context, what string, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()

	if err := must.Retry(ctx, check); err != nil {
		return fmt.Errorf("%s: not within %s: %w", what, patience, err)
	}

	return nil
}

// cards records when a card was last reset.
type cards struct {
	mutex sync.Mutex
	last  time.Time
}

// noticed is how long after a reset a pod may be without its interface. If the agent is away when a
// card is reset, it learns of the reset when it is back.
const noticed = 15 * time.Second

func (c *cards) reset() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.last = time.Now()
}

// justReset reports whether pods may lack their interfaces now.
func (c *cards) justReset() bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return time.Since(c.last) < noticed
}

// gate forwards connections, or refuses and cuts them while it is shut.
type gate struct {
	network, to string
	listener    net.Listener
	working     sync.WaitGroup

	mutex       sync.Mutex
	shut        bool
	connections []net.Conn
}

func openGate(network, from, to string) (*gate, error) {
	listener, err := net.Listen(network, from)
	if err != nil {
		return nil, err
	}
	g := &gate{network: network, to: to, listener: listener}
	g.working.Go(g.accept)
	return g, nil
}

func (g *gate) address() string { return g.listener.Addr().String() }

func (g *gate) accept() {
	for {
		in, err := g.listener.Accept()
		if err != nil {
			return
		}

		out, err := net.Dial(g.network, g.to)
		if err != nil || !g.enter(in, out) {
			in.Close()
			if err == nil {
				out.Close()
			}
			continue
		}

		for _, pair := range [][2]net.Conn{{in, out}, {out, in}} {
			g.working.Go(func() {
				_, _ = io.Copy(pair[0], pair[1])
				pair[0].Close()
				pair[1].Close()
				g.leave(pair[0])
			})
		}
	}
}

func (g *gate) enter(pair ...net.Conn) bool {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	if !g.shut {
		g.connections = append(g.connections, pair...)
	}
	return !g.shut
}

func (g *gate) leave(c net.Conn) {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.connections = slices.DeleteFunc(g.connections, func(other net.Conn) bool {
		return other == c
	})
}

// set opens or shuts the gate.
func (g *gate) set(shut bool) {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.shut = shut
	if shut {
		for _, c := range g.connections {
			c.Close()
		}
	}
}

func (g *gate) close() {
	g.listener.Close()
	g.set(true)
	g.working.Wait()
}
