// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/artifact"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/control"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/lifecycle"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/preflight"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/state"
)

// TestMain runs the devcluster command if the test binary is called as devcluster. A cluster's
// supervisor and nodes run this binary again.
func TestMain(m *testing.M) {
	if os.Args[0] == "devcluster" {
		main()
		return
	}
	os.Exit(m.Run())
}

// bench is an environment for clusters, with names that no other test or person uses.
type bench struct {
	*testing.T
	root string // state directory
	set  artifact.Set
}

func newBench(t *testing.T) bench {
	root := filepath.Join(t.TempDir(), "state")
	if err := preflight.Run(root, true); err != nil {
		t.Skipf("this machine cannot run a cluster: %v", err)
	}

	cache, err := (&options{cache: defaultCache()}).artifacts()
	if err != nil {
		t.Fatal(err)
	}

	set, err := cache.Find(t.Context())
	if errors.Is(err, artifact.ErrMissing) {
		t.Skipf("%v", err)
	}

	if err != nil {
		t.Fatal(err)
	}

	return bench{T: t, root: root, set: set}
}

func (b bench) name(suffix string) string { return fmt.Sprintf("t%d-%s", os.Getpid(), suffix) }

func (b bench) command(args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", append([]string{"--state", b.root}, args...)...)
	cmd.Args[0] = "devcluster"
	return cmd
}

// try runs devcluster and returns its standard output and exit code.
func (b bench) try(args ...string) (string, int) {
	b.Helper()
	var stdout, stderr bytes.Buffer
	cmd := b.command(args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		b.Fatal(err)
	}

	if stderr.Len() > 0 {
		b.Logf("devcluster %s:\n%s", strings.Join(args, " "), stderr.String())
	}

	return stdout.String(), cmd.ProcessState.ExitCode()
}

func (b bench) run(args ...string) string {
	b.Helper()
	out, code := b.try(args...)
	if code != 0 {
		b.Fatalf("devcluster %s: exit code %d\n%s", strings.Join(args, " "), code, out)
	}
	return out
}

func (b bench) up(name string, flags ...string) {
	b.Helper()
	b.Cleanup(func() { b.run("down", "--name", name) })
	b.run(append([]string{"up", "--name", name}, flags...)...)
}

func (b bench) inspect(name string) control.Cluster {
	b.Helper()
	var c control.Cluster
	if err := json.Unmarshal([]byte(b.run("inspect", "--name", name)), &c); err != nil {
		b.Fatal(err)
	}
	return c
}

func (b bench) kubectl(name string, args ...string) string {
	b.Helper()
	return b.run(append([]string{"kubectl", "--name", name, "--"}, args...)...)
}

func (b bench) apply(name, manifest string) {
	b.Helper()
	file := filepath.Join(b.TempDir(), "manifest.yaml")
	if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
		b.Fatal(err)
	}
	b.kubectl(name, "apply", "--filename", file)
}

const pods = `
apiVersion: v1
kind: Pod
metadata: {name: a}
spec:
  nodeName: node1
  terminationGracePeriodSeconds: 1
  containers: [{name: c, image: "devcluster.local/pause:1", imagePullPolicy: Never, args: [serve]}]
---
apiVersion: v1
kind: Pod
metadata: {name: b}
spec:
  nodeName: node2
  terminationGracePeriodSeconds: 1
  containers: [{name: c, image: "devcluster.local/pause:1", imagePullPolicy: Never, args: [serve]}]
`

func TestCluster(t *testing.T) {
	b := newBench(t)
	name := b.name("one")
	before := takeSnapshot(t, b)
	b.up(name, "--nodes", "2", "--multus", "--kube-proxy")
	if _, code := b.try("up", "--name", name); code == 0 {
		t.Error("a second up of the same cluster succeeded")
	}

	b.apply(name, pods)
	b.kubectl(name, "wait", "--for=condition=Ready", "pod/a", "pod/b", "--timeout=60s")

	for _, test := range []struct {
		name string
		run  func(*testing.T, bench, string)
	}{
		{"inspect tells where everything is", testInspect},
		{"pods reach pods on other nodes", testPodNetwork},
		{"pods reach the API server", testInClusterClient},
		{"pods reach pods by the address of a Service", testService},
		{"Multus gives pods more networks", testMultus},
		{"exec passes standard output and exit code", testExec},
		{"load brings an image to all nodes", testLoad},
		{"a privileged pod mounts for its node", testBidirectionalMount},
		{"the audit log tells who wrote", testAudit},
		{"programs restart under running containers", testRestart},
		{"a cut node is silent until it joins", testCut},
		{"a stopped node comes back with its disk", testStop},
		{"a second cluster runs beside", testSecond},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.run(t, bench{T: t, root: b.root, set: b.set}, name)
		})
	}

	namespaces := namespacesOf(t, b.inspect(name))
	b.run("down", "--name", name)
	b.run("down", "--name", name)

	for pid, ns := range processesIn(t, namespaces) {
		t.Errorf("process %s is still in %s", pid, ns)
	}

	if diff := cmp.Diff(before, takeSnapshot(t, b)); diff != "" {
		t.Errorf("down left something behind (-before +after):\n%s", diff)
	}
}

func testInspect(t *testing.T, b bench, name string) {
	c := b.inspect(name)
	if c.Name != name || c.KubernetesVersion != b.set.KubernetesVersion || len(c.Nodes) != 2 {
		t.Errorf("inspect: %+v", c)
	}

	for _, n := range c.Nodes {
		if n.State != control.NodeRunning || !n.Connected {
			t.Errorf("%s: state %s, connected %t", n.Name, n.State, n.Connected)
		}
		if _, err := os.Stat(n.Root + "/run/containerd/containerd.sock"); err != nil {
			t.Errorf("%s: %v", n.Name, err)
		}
		if n.NetNS != fmt.Sprintf("/proc/%d/ns/net", n.PID) {
			t.Errorf("%s: PID %d but netns %s", n.Name, n.PID, n.NetNS)
		}
	}

	if got := strings.TrimSpace(b.run("kubeconfig", "--name", name)); got != c.Kubeconfig {
		t.Errorf("kubeconfig prints %s, inspect %s", got, c.Kubeconfig)
	}
}

func (b bench) get(name, pod string) (string, int) {
	b.Helper()
	ip := b.kubectl(name, "get", "pod", pod, "--output=jsonpath={.status.podIP}")
	return b.try("kubectl", "--name", name, "--", "exec", "a", "--", "/pause", "get",
		"http://"+ip+":8080")
}

func testPodNetwork(t *testing.T, b bench, name string) {
	if out, code := b.get(name, "b"); code != 0 || !strings.HasPrefix(out, "b to 10.88.1.") {
		t.Errorf("a to b: exit code %d, %q; want an answer from b to an address of node1", code,
			out)
	}
}

func testInClusterClient(t *testing.T, b bench, name string) {
	out := b.kubectl(name, "exec", "a", "--", "/pause", "api", "/version")
	if !strings.Contains(out, b.set.KubernetesVersion) {
		t.Errorf("the API server says %s, want %s", out, b.set.KubernetesVersion)
	}
}

const service = `
apiVersion: v1
kind: Service
metadata: {name: b}
spec:
  selector: {name: b}
  ports: [{port: 80, targetPort: 8080}]
`

// testService checks that pod b can be reached through a Service from its own node and the other
// one.
func testService(t *testing.T, b bench, name string) {
	b.kubectl(name, "label", "pod", "b", "name=b")
	b.apply(name, service)
	b.kubectl(name, "wait", "--for=jsonpath={.endpoints[0].conditions.ready}=true", "endpointslice",
		"--selector=kubernetes.io/service-name=b", "--timeout=30s")
	ip := b.kubectl(name, "get", "service", "b", "--output=jsonpath={.spec.clusterIP}")
	for _, from := range []string{"a", "b"} {
		err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, 30*time.Second,
			true, func(context.Context) (bool, error) {
				out, code := b.try("kubectl", "--name", name, "--", "exec", from, "--", "/pause",
					"get", "http://"+ip)
				return code == 0 && strings.HasPrefix(out, "b to 10."), nil
			})
		if err != nil {
			t.Errorf("pod %s does not reach Service b at %s", from, ip)
		}
	}

	b.kubectl(name, "delete", "service/b")
}

const networks = `
apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata: {name: given}
spec:
  config: |
    {"cniVersion": "1.1.0", "name": "given", "type": "bridge", "bridge": "given0",
     "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.99.0.0/24"}]]}}
---
apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata: {name: chosen}
spec:
  config: |
    {"cniVersion": "1.1.0", "name": "chosen", "type": "bridge", "bridge": "chosen0",
     "capabilities": {"ips": true}, "ipam": {"type": "static"}}
---
apiVersion: v1
kind: Pod
metadata:
  name: networked
  annotations:
    k8s.v1.cni.cncf.io/networks: '[{"name": "given"}, {"name": "chosen", "interface": "storage", "ips": ["10.98.0.7/24"]}]'
spec:
  nodeName: node1
  terminationGracePeriodSeconds: 1
  containers: [{name: c, image: "devcluster.local/pause:1", imagePullPolicy: Never, args: [show]}]
`

func testMultus(t *testing.T, b bench, name string) {
	b.apply(name, networks)
	b.kubectl(name, "wait", "--for=condition=Ready", "pod/networked", "--timeout=60s")

	type network struct {
		Name      string
		Interface string
		IPs       []string
		Default   bool
	}

	var got []network
	status := b.kubectl(name, "get", "pod", "networked",
		`--output=jsonpath={.metadata.annotations.k8s\.v1\.cni\.cncf\.io/network-status}`)
	if err := json.Unmarshal([]byte(status), &got); err != nil {
		t.Fatalf("network-status %q: %v", status, err)
	}

	podIP := b.kubectl(name, "get", "pod", "networked", "--output=jsonpath={.status.podIP}")
	want := []network{
		{"pods", "eth0", []string{podIP}, true},
		{"default/given", "net1", []string{"10.99.0.2"}, false},
		{"default/chosen", "storage", []string{"10.98.0.7"}, false},
	}

	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("network-status (-want +got):\n%s", diff)
	}
	if out := b.kubectl(name, "logs", "networked"); !strings.Contains(out, "interface storage") ||
		!strings.Contains(out, "10.99.0.2/24") {
		t.Errorf("the pod sees\n%s", out)
	}

	b.kubectl(name, "delete", "pod/networked")
	if out := b.run("exec", "--name", name, "node1", "--", "ls",
		"/var/lib/cni/networks/given"); strings.Contains(out, "10.99.") {
		t.Errorf("an address is still taken after the pod: %s", out)
	}
}

func testExec(t *testing.T, b bench, name string) {
	out, code := b.try("exec", "--name", name, "node2", "--", "sh", "-c",
		"hostname; readlink /proc/1/exe; exit 7")
	if code != 7 || !strings.HasPrefix(out, "node2\n") {
		t.Errorf("exit code %d, output %q; want 7 and the node's name", code, out)
	}
	if _, code := b.try("exec", "--name", name, "node3", "--", "true"); code != 1 {
		t.Errorf("exec in a node that does not exist: exit code %d", code)
	}
}

func testLoad(t *testing.T, b bench, name string) {
	dir := t.TempDir()
	file, containerfile := filepath.Join(dir, "app.tar"), filepath.Join(dir, "Containerfile")
	const ref, text = "devcluster.local/app:1", "FROM scratch\nCOPY exe /app\nUSER " +
		"65532\nENTRYPOINT [\"/app\"]\n"
	if err := os.WriteFile(containerfile, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}

	b.run("image", file, "--name", ref, "--file", containerfile, "/proc/self")
	b.run("load", "--name", name, file)

	for _, node := range []string{"node1", "node2"} {
		if out := b.run("exec", "--name", name, node, "--", "ctr", "--namespace=k8s.io", "images",
			"list", "-q"); !strings.Contains(out, ref) {
			t.Errorf("%s has %s, want %s", node, out, ref)
		}
	}

	bad := filepath.Join(t.TempDir(), "bad.tar")
	if err := os.WriteFile(bad, []byte("no archive"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, code := b.try("load", "--name", name, bad); code == 0 {
		t.Error("a file that is no archive was loaded")
	}
}

func testBidirectionalMount(t *testing.T, b bench, name string) {
	b.apply(name, `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: mounter}
spec:
  selector: {matchLabels: {app: mounter}}
  template:
    metadata: {labels: {app: mounter}}
    spec:
      hostNetwork: true
      terminationGracePeriodSeconds: 1
      containers:
      - name: c
        image: devcluster.local/pause:1
        imagePullPolicy: Never
        args: [mount, /host/mounted]
        securityContext: {privileged: true}
        volumeMounts: [{name: host, mountPath: /host/mounted, mountPropagation: Bidirectional}]
      volumes:
      - name: host
        hostPath: {path: /var/lib/mounter, type: DirectoryOrCreate}
`)

	b.kubectl(name, "rollout", "status", "daemonset/mounter", "--timeout=60s")
	for _, node := range []string{"node1", "node2"} {
		out := b.run("exec", "--name", name, node, "--", "cat", "/proc/self/mounts")
		if !strings.Contains(out, "devcluster /var/lib/mounter tmpfs") {
			t.Errorf("%s does not see the mount:\n%s", node, out)
		}
	}

	b.kubectl(name, "delete", "daemonset/mounter")
}

func testAudit(t *testing.T, b bench, name string) {
	content, err := os.ReadFile(filepath.Join(b.inspect(name).Logs, "audit.log"))
	if err != nil {
		t.Fatal(err)
	}

	var writes int
	for line := range bytes.Lines(content) {
		var event struct {
			Verb string
			User struct{ Username string }
			// The administrator creates the pods of this test.
			ObjectRef struct{ Resource, Namespace, Name string }
		}

		if err := json.Unmarshal(line, &event); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		if slices.Contains([]string{"get", "list", "watch"}, event.Verb) {
			t.Errorf("a read is in the log: %s", line)
		}

		if event.Verb == "create" && event.User.Username == "admin" &&
			event.ObjectRef.Resource == "pods" && event.ObjectRef.Name == "a" {
			writes++
		}
	}

	if writes != 1 {
		t.Errorf("admin created pod a %d times, want 1", writes)
	}
}

func (b bench) restarts(name, pod string) string {
	b.Helper()
	return b.kubectl(name, "get", "pod", pod,
		"--output=jsonpath={.status.containerStatuses[0].restartCount}")
}

func testRestart(t *testing.T, b bench, name string) {
	pids := func() string {
		return b.run("exec", "--name", name, "node2", "--", "pidof", "kubelet", "containerd")
	}
	before, restarts := pids(), b.restarts(name, "b")
	b.run("node", "restart-kubelet", "--name", name, "node2")
	b.run("node", "restart-runtime", "--name", name, "node2")
	if after := pids(); after == before {
		t.Errorf("kubelet and containerd are still the processes %s", after)
	}
	if _, code := b.get(name, "b"); code != 0 {
		t.Error("pod b does not answer")
	}
	if after := b.restarts(name, "b"); after != restarts {
		t.Errorf("pod b restarted %s times, before %s", after, restarts)
	}
}

func testCut(t *testing.T, b bench, name string) {
	b.run("node", "cut", "--name", name, "node2")
	if b.inspect(name).Nodes[1].Connected {
		t.Error("inspect says connected")
	}
	if _, code := b.get(name, "b"); code == 0 {
		t.Error("pod b answers")
	}

	b.run("node", "join", "--name", name, "node2")
	if _, code := b.get(name, "b"); code != 0 {
		t.Error("pod b does not answer after its node joined again")
	}
}

func testStop(t *testing.T, b bench, name string) {
	b.run("exec", "--name", name, "node2", "--", "sh",
		"-c", "echo kept > /var/lib/kept; echo kept > /etc/kept; echo lost > /run/lost")
	restarts := b.restarts(name, "b")
	node := b.inspect(name).Nodes[1]
	namespaces := namespacesOf(t, control.Cluster{Nodes: []control.Node{node}})
	b.run("node", "stop", "--name", name, "node2")

	for pid, ns := range processesIn(t, namespaces) {
		t.Errorf("process %s is still in %s of node2", pid, ns)
	}

	if got := b.inspect(name).Nodes[1]; got.State != control.NodeStopped || got.PID != 0 {
		t.Errorf("node2 is %s with PID %d", got.State, got.PID)
	}
	if _, code := b.try("exec", "--name", name, "node2", "--", "true"); code != 1 {
		t.Errorf("exec in a stopped node: exit code %d, want 1", code)
	}

	b.kubectl(name, "wait", "--for=condition=Ready=Unknown", "node/node2", "--timeout=60s")

	b.run("node", "start", "--name", name, "node2")
	b.kubectl(name, "wait", "--for=condition=Ready", "node/node2", "--timeout=10s")
	out := b.run("exec", "--name", name, "node2", "--", "sh",
		"-c", "cat /var/lib/kept /etc/kept; ls /run/lost || true")
	if out != "kept\nkept\n" {
		t.Errorf("after the start the node has %q; want what was on disk and not what was in /run",
			out)
	}
	if _, err := os.Stat("/etc/kept"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the node's /etc is the machine's: %v", err)
	}

	b.kubectl(name, "wait", "--for=jsonpath={.status.containerStatuses[0].restartCount}="+
		increment(t, restarts), "pod/b", "--timeout=60s")
	b.kubectl(name, "wait", "--for=condition=Ready", "pod/b", "--timeout=60s")
	if _, code := b.get(name, "b"); code != 0 {
		t.Error("pod b does not answer")
	}
}

func increment(t *testing.T, number string) string {
	var n int
	if _, err := fmt.Sscan(number, &n); err != nil {
		t.Fatalf("%q: %v", number, err)
	}
	return fmt.Sprint(n + 1)
}

func testSecond(t *testing.T, b bench, name string) {
	second := b.name("two")
	b.up(second)
	if one, two := b.inspect(name).API, b.inspect(second).API; one == two {
		t.Errorf("both clusters are at %s", one)
	}

	uid := func(cluster string) string {
		return b.kubectl(cluster, "get", "namespace", "default",
			"--output=jsonpath={.metadata.uid}")
	}

	first := uid(name)
	if first == uid(second) {
		t.Error("both clusters are one")
	}

	b.run("down", "--name", second)
	if uid(name) != first {
		t.Error("the first cluster changed")
	}
}

func TestUpFails(t *testing.T) {
	b := newBench(t)
	before := takeSnapshot(t, b)
	broken := t.TempDir()
	if err := os.Symlink(filepath.Join(b.set.Kubernetes, "kubernetes"),
		filepath.Join(broken, "etcd")); err != nil {
		t.Fatal(err)
	}

	script := "#!/bin/sh\necho this is why\nexit 3\n"
	if err := os.WriteFile(filepath.Join(broken, "kube-apiserver"), []byte(script),
		0o755); err != nil {
		t.Fatal(err)
	}

	b.set.Kubernetes = broken
	manager := lifecycle.Manager{Store: state.Store{Root: b.root}, Log: t.Output()}
	err := manager.Up(t.Context(), b.name("broken"), lifecycle.Options{Nodes: 1}, b.set)
	if err == nil {
		t.Fatal("a cluster with a broken API server is up")
	}

	for _, want := range []string{"kube-apiserver", "exited with 3", "this is why"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not say %q: %v", want, err)
		}
	}

	if diff := cmp.Diff(before, takeSnapshot(t, b)); diff != "" {
		t.Errorf("the failed start left something behind (-before +after):\n%s", diff)
	}
}

func TestUpInterrupted(t *testing.T) {
	b := newBench(t)
	before := takeSnapshot(t, b)
	cmd := b.command("up", "--name", b.name("interrupted"))
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// The first line means that the namespaces exist.
	if _, err := stderr.Read(make([]byte, 4096)); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}

	rest := new(bytes.Buffer)
	if _, err := rest.ReadFrom(stderr); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Errorf("up succeeded although it was interrupted:\n%s", rest)
	}
	if diff := cmp.Diff(before, takeSnapshot(t, b)); diff != "" {
		t.Errorf("the interrupted start left something behind (-before +after):\n%s", diff)
	}
}

// snapshot is the state that a cluster must leave unchanged: everything named after a cluster of
// this test, and the links.
type snapshot struct {
	Mounts, Links, Cgroups, State []string
}

func takeSnapshot(t *testing.T, b bench) snapshot {
	t.Helper()
	var s snapshot
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}

	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, b.root) || strings.Contains(line, "devcluster") {
			s.Mounts = append(s.Mounts, line)
		}
	}

	links, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}

	for _, l := range links {
		if strings.HasPrefix(l.Name, "node") || l.Name == "br0" || l.Name == "cni0" {
			s.Links = append(s.Links, l.Name)
		}
	}

	groups, err := filepath.Glob("/sys/fs/cgroup/*/devcluster-" + b.name("*"))
	if err != nil {
		t.Fatal(err)
	}

	unified, err := filepath.Glob("/sys/fs/cgroup/devcluster-" + b.name("*"))
	if err != nil {
		t.Fatal(err)
	}

	s.Cgroups = append(groups, unified...)
	entries, err := os.ReadDir(b.root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}

	for _, e := range entries {
		s.State = append(s.State, e.Name())
	}

	return s
}

// namespacesOf returns the namespaces of a running cluster in the form of /proc:
// "net:[4026532000]".
func namespacesOf(t *testing.T, c control.Cluster) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	pids := []int{}
	if c.InitPID != 0 {
		pids = append(pids, c.InitPID)
	}

	for _, n := range c.Nodes {
		pids = append(pids, n.PID)
	}

	for _, pid := range pids {
		for _, kind := range []string{"pid", "net", "mnt"} {
			ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
			if err != nil {
				t.Fatal(err)
			}
			found[ns] = true
		}
	}

	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	if found[own] {
		t.Fatal("the cluster is in the network namespace of the machine")
	}

	return found
}

// ended reports whether a process has ended, possibly as a zombie. After up, its parent is the
// machine's init.
func ended(pid string) bool {
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	return err != nil || bytes.Contains(stat, []byte(") Z "))
}

// processesIn returns the processes in any of the namespaces.
func processesIn(t *testing.T, namespaces map[string]bool) map[string]string {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/ns/*")
	if err != nil {
		t.Fatal(err)
	}

	found := map[string]string{}
	for _, link := range links {
		ns, err := os.Readlink(link)
		if err != nil {
			continue // it has ended meanwhile
		}
		if pid := strings.Split(link, "/")[2]; namespaces[ns] && !ended(pid) {
			found[pid] = ns
		}
	}

	return found
}

func TestCancelledUpNeverStarts(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()

	<-ctx.Done()
	before := takeSnapshot(t, b)
	manager := lifecycle.Manager{Store: state.Store{Root: b.root}, Log: t.Output()}
	if err := manager.Up(ctx, b.name("late"), lifecycle.Options{Nodes: 1}, b.set); !errors.Is(err,
		context.DeadlineExceeded) {
		t.Errorf("Up with an ended context: %v, want %v", err, context.DeadlineExceeded)
	}
	if diff := cmp.Diff(before, takeSnapshot(t, b)); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
}
