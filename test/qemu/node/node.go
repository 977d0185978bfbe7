// SPDX-License-Identifier: Apache-2.0

// Package node makes the guest of test/qemu a node on which the project's programs run: the real
// xpu-agent, xpu-cni and opi-bridge on the guest's own PCI devices. The test plays the kubelet and
// the runtime, so that it sees all calls.
package node

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/cni"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// Patience bounds every wait of tests; a test waits that long only if something is wrong. Emulated
// processors are slow, and igb needs seconds for a carrier.
const Patience = 30 * time.Second

// The project's programs in the guest.
const (
	agentProgram  = plan.Programs + "/xpu-agent"
	shimProgram   = plan.Programs + "/xpu-cni"
	bridgeProgram = plan.Programs + "/opi-bridge"
)

const agentAddress = "127.0.0.1:9810"

// Options are the options of a [Node].
type Options struct {
	// Pools are the DevicePools of the agent's configuration file.
	Pools []v1alpha1.DevicePool
	// Direct is the configuration of direct mode with the xPUs, and the networks of pools. It may
	// be empty.
	Direct string
	// Cluster means that the agent uses the API server that the guest reaches. Otherwise the agent
	// is in direct mode.
	Cluster bool
}

// Node is the guest with a kubelet, and an agent while it is started. Its methods end the test if
// something fails that is not under test.
type Node struct {
	// Kubelet has the device plugins, and Pods has the pods with their devices.
	Kubelet *kubelettest.Kubelet
	Pods    *kubelettest.Pods
	// Cluster is nil in direct mode.
	Cluster *Cluster

	root    *testing.T // programs beside the test live as long as this test
	t       *testing.T // root, or its subtest that runs now
	dir     string
	options Options
	agent   *process
	runtime *runtime

	mutex sync.Mutex
	// resources are the resources by which Functions were allocated. given is what pods have by
	// them, as in Pods.
	resources map[function.ID]string
	given     map[function.ID]*podresourcesapi.PodResources
}

// New returns a node without an agent. All that it makes is removed when the test ends.
func New(t *testing.T, options Options) *Node {
	t.Helper()
	dir := must.SocketDir(t)
	n := &Node{
		root: t, t: t, dir: dir, options: options,
		resources: map[function.ID]string{}, given: map[function.ID]*podresourcesapi.PodResources{},
	}

	n.Kubelet = kubelettest.New(n.path("kubelet"), kubelettest.Options{})
	must.Succeed(t, n.Kubelet.Start())
	t.Cleanup(n.Kubelet.Stop)

	var err error
	n.Pods, err = kubelettest.ServePods(n.path("kubelet"))
	must.Succeed(t, err)
	t.Cleanup(n.Pods.Stop)

	n.installPaths()
	n.Declare(options.Pools...)

	if options.Direct != "" {
		must.Succeed(t, os.WriteFile(n.path("direct.yaml"), []byte(options.Direct), 0o600))
	}

	if options.Cluster {
		n.Cluster = connect(n)
	}

	return n
}

// installPaths writes the agent's paths into a file beside the plugin. A test has one node at a
// time.
func (n *Node) installPaths() {
	n.t.Helper()
	paths, err := json.Marshal(cni.Paths{Socket: n.path("cni.sock"), SpoolDir: n.path("spool")})
	must.Succeed(n.t, err)
	must.Succeed(n.t, os.WriteFile(cni.PathsFile(shimProgram), paths, 0o644))
}

// Run runs a subtest, which the node's methods end until it returns.
func (n *Node) Run(name string, test func(t *testing.T)) bool {
	before := n.t
	defer func() { n.t = before }()
	return before.Run(name, func(t *testing.T) {
		n.t = t
		test(t)
	})
}

func (n *Node) path(name string) string { return filepath.Join(n.dir, name) }

// Declare replaces the DevicePools of the agent's configuration file.
func (n *Node) Declare(pools ...v1alpha1.DevicePool) {
	n.t.Helper()
	var text bytes.Buffer
	for _, p := range pools {
		p.TypeMeta = metav1.TypeMeta{
			APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "DevicePool",
		}
		one, err := yaml.Marshal(p)
		must.Succeed(n.t, err)
		text.WriteString("---\n")
		text.Write(one)
	}

	file := n.path("pools.yaml")
	must.Succeed(n.t, os.WriteFile(file+".new", text.Bytes(), 0o600))
	must.Succeed(n.t, os.Rename(file+".new", file))
}

// flags returns the flags of the agent.
func (n *Node) flags() []string {
	flags := []string{
		"--node-name=" + plan.NodeName, "--listen=" + agentAddress, "-v=1",
		"--state-dir=" + n.path("state"), "--kubelet-dir=" + n.path("kubelet"), "--cdi-dir=" +
			n.path("cdi"),
		"--nri-socket=" + n.path("nri.sock"), "--cni-socket=" + n.path("cni.sock"), "--spool-dir=" +
			n.path("spool"),
		"--devinfo-dir=" + n.path("devinfo"), "--hooks-dir=" + n.path("hooks.d"),
	}

	if len(n.options.Pools) > 0 {
		flags = append(flags, "--config-file="+n.path("pools.yaml"))
	}

	if n.options.Direct != "" {
		flags = append(flags, "--direct-config="+n.path("direct.yaml"))
	}
	if n.Cluster == nil {
		return append(flags, "--provisioner=direct")
	}

	return append(flags, "--provision-timeout=5s", "--kubeconfig="+plan.AgentKubeconfig)
}

// Start starts the agent and waits until it has read Functions and pools. The agent ends with the
// test.
func (n *Node) Start() {
	n.t.Helper()
	n.Launch()
	n.Eventually("the agent knows Functions and pools", func() bool {
		text, err := n.get("/readyz")
		// in cluster mode the agent is ready only when the runtime is there, too
		return err == nil || strings.Contains(text, "not connected to the container runtime")
	})
}

// Launch starts the agent and does not wait.
func (n *Node) Launch() {
	n.t.Helper()
	n.agent = launch(n.root, n.path("agent.log"), agentProgram, n.flags()...)
}

// End ends the agent as Kubernetes does, and fails the test unless it exits with 0.
func (n *Node) End() {
	n.t.Helper()
	if err := n.agent.end(); err != nil {
		n.t.Errorf("xpu-agent: %v", err)
	}
}

// Kill ends the agent by SIGKILL, wherever it is.
func (n *Node) Kill() { n.agent.kill() }

// Admin returns a client of the agent for an administrator of the node.
func (n *Node) Admin() nodestate.Client {
	return nodestate.Client{Socket: n.path("state/admin.sock")}
}

// get returns the answer of the agent's HTTP server. A status other than 200 is an error.
func (n *Node) get(path string) (string, error) {
	client := http.Client{
		Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true},
	}
	response, err := client.Get("http://" + agentAddress + path)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()

	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = errors.New(response.Status)
	}

	return string(body), err
}

// Log returns what the agents of the test have logged so far.
func (n *Node) Log() string {
	n.t.Helper()
	text, err := os.ReadFile(n.path("agent.log"))
	must.Succeed(n.t, err)
	return string(text)
}

// Eventually waits until the condition holds.
func (n *Node) Eventually(what string, condition func() bool) {
	n.t.Helper()
	must.Eventually(n.t, what, condition)
}

// WantHealthy waits until exactly these Functions of the resource are healthy at the kubelet.
func (n *Node) WantHealthy(resource string, functions ...function.ID) {
	n.t.Helper()
	var want []string
	for _, f := range functions {
		want = append(want, f.String())
	}

	slices.Sort(want)
	ctx, cancel := context.WithTimeout(n.t.Context(), Patience)
	defer cancel()

	healthy := func() []string { return slices.Sorted(slices.Values(n.Kubelet.Healthy(resource))) }
	if err := n.Kubelet.Wait(ctx, func() bool {
		return slices.Equal(healthy(), want)
	}); err != nil {
		n.t.Fatalf("healthy Functions of %s are %q, want %q: %v", resource, healthy(), want,
			n.Kubelet.Devices(resource))
	}
}

// Allocate plays the kubelet that gives a container of the pod a Function.
func (n *Node) Allocate(resource string, f function.ID) (map[string]string, error) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), Patience)
	defer cancel()
	n.mutex.Lock()
	n.resources[f] = resource
	n.mutex.Unlock()
	response, err := n.Kubelet.Allocate(ctx, resource, f.String())
	return response.GetEnvs(), err
}

// give makes the kubelet report that the pod has the Function, by the resource by which it was
// allocated, or by the resource of pool fast.
func (n *Node) give(pod string, f function.ID) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.given[f] = kubelettest.Pod(pod, cmp.Or(n.resources[f], Resource("fast")), f.String())
	n.Pods.Set(slices.Collect(maps.Values(n.given))...)
}

// takeBack makes the kubelet report that no pod has the Function, if this pod had it.
func (n *Node) takeBack(pod string, f function.ID) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	if n.given[f].GetName() == pod {
		delete(n.given, f)
	}
	n.Pods.Set(slices.Collect(maps.Values(n.given))...)
}

// MustAllocate calls Allocate, and checks that the container gets the Function's address.
func (n *Node) MustAllocate(resource string, f function.ID) {
	n.t.Helper()
	env, err := n.Allocate(resource, f)
	variable := "PCIDEVICE_" +
		strings.ToUpper(strings.NewReplacer(".", "_", "/", "_").Replace(resource))
	if err != nil || env[variable] != f.String() {
		n.t.Fatalf("Allocate %s: environment %q, %v; want %s in %s", f, env, err, f, variable)
	}
}

// Records returns the records of the journal while no agent runs.
func (n *Node) Records() []journal.Attachment {
	n.t.Helper()
	j, err := journal.Open(n.path("state/journal.db"))
	must.Succeed(n.t, err)
	defer j.Close()
	return j.All()
}

// WantNothingLeft checks, while no agent runs, that the journal has no attachment and the spool has
// no request.
func (n *Node) WantNothingLeft() {
	n.t.Helper()
	if left := n.Records(); len(left) > 0 {
		n.t.Errorf("the journal still has %+v", left)
	}
	if spooled, err := filepath.Glob(n.path("spool/*.json")); err != nil || len(spooled) > 0 {
		n.t.Errorf("the spool has %q, %v; want nothing", spooled, err)
	}
}

// Pool returns a DevicePool whose Functions the device plugin offers as
// "xpu.opiproject.org/<name>".
func Pool(name string, selector v1alpha1.FunctionSelector) v1alpha1.DevicePool {
	return v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1alpha1.DevicePoolSpec{
			Selectors: []v1alpha1.FunctionSelector{selector}, Publish: v1alpha1.PublishDevicePlugin,
			Allow: v1alpha1.PrivilegedFields(),
		}}
}

// Resource returns the extended resource of a pool that [Pool] returned.
func Resource(pool string) string { return fmt.Sprintf("%s/%s", v1alpha1.GroupName, pool) }
