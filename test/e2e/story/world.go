// SPDX-License-Identifier: Apache-2.0

// Package story is the life of a few pods on a real cluster, step by step. "make demo" and the
// end-to-end test run the same code. Every step fails with a sentence about what did not hold.
package story

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// World is a cluster with simulated cards, and everything that was started for it.
type World struct {
	// Cluster is the cluster of the story.
	Cluster Devcluster
	// Source is the root directory of the project.
	Source string
	// Bin is the directory of the project's programs and images.
	Bin string
	// BeforeBin is the directory of the previous version's programs, images and chart, for
	// [World.SkewSteps].
	BeforeBin string
	// StateDir holds logs and the list of processes, in a directory for each cluster.
	StateDir string
	// Detail prints the lines below a step.
	Detail func(format string, args ...any)

	dir                string
	product            string // directory of the images, chart and opi-bridge in use; "" means Bin
	cluster            Cluster
	client             client.WithWatch
	xpus               []*xpu
	fabric             *fabric
	authority          *authority
	baseline           Snapshot
	pods               []podSpec           // of the story
	connectivityChecks []connectivityCheck // of these to reach each other
	direct             bool                // the product runs in direct mode
	processes          []process
	running            []*exec.Cmd
}

// process is a process that the story started.
type process struct {
	Name string `json:"name"`
	PID  int    `json:"pid"`
}

// Step is a step of the story.
type Step struct {
	Title string
	Run   func(context.Context) error
}

// Act is a chapter of the story: the steps of the demo, and the failures that only tests add to
// them.
type Act struct {
	Title   string
	Steps   []Step
	Trouble []Step
}

// Acts returns the story. Each act needs the ones before it.
func (w *World) Acts() []Act {
	return []Act{
		{"Claims: the scheduler chooses VFs", w.claimSteps(), w.claimTrouble()},
		{"Extended resources: the kubelet chooses VFs, Multus and xpu-cni attach them",
			w.resourceSteps(), w.resourceTrouble()},
		{"Direct mode: the same pods without custom resources and without a controller",
			w.directSteps(), w.directTrouble()},
	}
}

func (w *World) claimSteps() []Step {
	return []Step{
		{"A real cluster: etcd, API server, scheduler, controllers, two nodes with kubelet, " +
			"container runtime and Multus", w.bringUp},
		{"A simulated SmartNIC in each node, and an xPU behind it that runs opi-bridge",
			w.insertCards},
		{"xpu-device-plugin, by its Helm chart", w.install},
		{"Pools, networks and classes; the VFs appear in ResourceSlices", w.declare},
		{"Pods claim VFs on networks; the xPU is ready before they run", w.runPods},
		{"Packets: VF - representor - bridge - VXLAN - bridge - representor - VF, and none " +
			"between networks", w.exchange},
		{"What an administrator sees: xpuctl explains a pod, and shows a host", w.inspectPods},
		{"Pods are deleted, and everything is as it was", w.deletePods},
		{"Interfaces as claims ask for them: rules, a neighbor, sysctls and settings of the driver; " +
			"a bond of two VFs", w.shapeInterfaces},
		{"What an administrator of any cluster can do: test it, and keep pods away from a card", w.testAndService},
		{"Other device models: a PF that claims share, and a PF as a whole or its VFs",
			w.chooseModels},
		{"A job: the pods of a gang are bound together, or not at all", w.runGangs},
	}
}

// poll calls check until it succeeds. Its error is the last one of check.
func poll(
	ctx context.Context, patience time.Duration, what string, check func(context.Context) error,
) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, patience, true,
		func(ctx context.Context) (bool, error) {
			if err := check(ctx); err == nil || ctx.Err() == nil {
				last = err // not the timeout
			}
			return last == nil, nil
		})

	if err != nil {
		return fmt.Errorf("%s: not within %s: %w", what, patience,
			errors.Join(last, context.Cause(ctx)))
	}

	return nil
}

func (w *World) log(name string) string { return filepath.Join(w.dir, name+".log") }

// bringUp starts the cluster with two nodes and connects to it.
func (w *World) bringUp(ctx context.Context) error {
	w.pods, w.connectivityChecks = pods, connectivityChecks
	return w.bringUpNodes(ctx, 2)
}

func (w *World) bringUpNodes(ctx context.Context, nodes int) error {
	w.dir = filepath.Join(w.StateDir, w.Cluster.Name)
	if err := os.MkdirAll(w.dir, 0o700); err != nil {
		return err
	}

	out, err := w.Cluster.Run(ctx, "up", "--nodes", strconv.Itoa(nodes), "--multus", "--kube-proxy",
		"--kubernetes="+w.Cluster.Kubernetes, "--runtime="+w.Cluster.Runtime,
		"--multus-version="+w.Cluster.Multus)
	if err != nil {
		return err
	}

	for line := range strings.Lines(out) {
		w.Detail("%s", strings.TrimSpace(line))
	}

	// The examples' image: the nodes reach no registry.
	if _, err := w.Cluster.Run(ctx, "load",
		filepath.Join(w.Bin, "images", "pause.tar")); err != nil {
		return err
	}
	if w.cluster, err = w.Cluster.Inspect(ctx); err != nil {
		return err
	}

	config, err := clientcmd.BuildConfigFromFlags("", w.cluster.Kubeconfig)
	if err != nil {
		return err
	}

	config.QPS = -1
	scheme := runtime.NewScheme()
	if err := errors.Join(clientscheme.AddToScheme(scheme),
		v1alpha1.AddToScheme(scheme)); err != nil {
		return err
	}
	if w.client, err = client.NewWithWatch(config, client.Options{Scheme: scheme}); err != nil {
		return err
	}

	return w.printVersions(ctx)
}

// printVersions prints the versions on the nodes, and the feature gates that are off.
func (w *World) printVersions(ctx context.Context) error {
	var nodes corev1.NodeList
	if err := w.client.List(ctx, &nodes); err != nil {
		return err
	}
	metrics, err := w.Cluster.Kubectl(ctx, "get", "--raw", "/metrics")
	if err != nil {
		return err
	}

	for _, node := range nodes.Items[:1] {
		info := node.Status.NodeInfo
		w.Detail("Kubernetes %s, %s", info.KubeletVersion,
			strings.Replace(info.ContainerRuntimeVersion, "://", " ", 1))
	}
	for _, gate := range gatesOff(metrics) {
		w.Detail("feature gate %s is off", gate)
	}

	return nil
}

// gatesOff returns the feature gates that DevicePools may need and that are off, or not there,
// according to the metrics of kube-apiserver.
func gatesOff(metrics string) (off []string) {
	for _, gate := range []string{"DRAConsumableCapacity", "DRADeviceBindingConditions",
		"DRADeviceTaints", "DRAExtendedResource", "DRAPartitionableDevices"} {
		on := regexp.MustCompile(`(?m)^kubernetes_feature_enabled\{name="` + gate + `",[^}]*\} 1$`)
		if !on.MatchString(metrics) {
			off = append(off, gate)
		}
	}
	return off
}

// insertCards gives every node its card and every xPU its agent, and creates the fabric between the
// xPUs.
func (w *World) insertCards(ctx context.Context) error {
	var err error
	if w.authority, err = newAuthority(); err != nil {
		return err
	}
	if w.fabric, err = newFabric(w.cluster); err != nil {
		return err
	}

	for i, node := range w.cluster.Nodes {
		x, err := w.startCard(ctx, i, node)
		if err != nil {
			return err
		}

		w.xpus = append(w.xpus, x)
		if err := x.connect(w.cluster); err != nil {
			return err
		}
		if err := w.fabric.plug(x, fmt.Sprintf("192.168.77.%d/24", i+1)); err != nil {
			return err
		}
	}

	for _, x := range w.xpus {
		if err := w.startBridge(ctx, x); err != nil {
			return err
		}
		w.Detail("%s: 2 PFs x %d VFs at 0000:3b, xPU at %s", x.node.Name, vfsOfPF, x.address)
	}

	return nil
}

// giveIdentity stores the certificate with which OPI agents authenticate their client, where the
// product reads it.
func (w *World) giveIdentity(ctx context.Context, name string) error {
	id, err := w.authority.issue(name, "")
	if err != nil {
		return err
	}
	return w.client.Create(ctx, id.secret("opi-client"))
}

// secret returns a Secret with the identity in the product's format.
func (id identity) secret(name string) *corev1.Secret {
	secret := &corev1.Secret{
		Type: corev1.SecretTypeTLS,
		Data: map[string][]byte{"tls.crt": id.cert, "tls.key": id.key, "ca.crt": id.ca},
	}
	secret.Namespace, secret.Name = namespace, name
	return secret
}

// controllers is the number of replicas in deploy/.
const controllers = 2

// waitForProduct waits until the agents are ready, and the controllers if there are any.
func (w *World) waitForProduct(ctx context.Context) error {
	want := len(w.cluster.Nodes)
	if !w.direct {
		want += controllers
	}
	return w.waitForPods(ctx, namespace, want)
}

func (w *World) waitForPods(ctx context.Context, namespace string, want int) error {
	return poll(ctx, 60*time.Second, "the product is ready", func(ctx context.Context) error {
		var pods corev1.PodList
		if err := w.client.List(ctx, &pods, client.InNamespace(namespace)); err != nil {
			return err
		}

		ready := 0
		for _, pod := range pods.Items {
			if podReady(pod) {
				ready++
			}
		}

		if ready != want || len(pods.Items) != want {
			return fmt.Errorf("%d of %d pods in %[3]s are ready; kubectl -n %[3]s get pods",
				ready, want, namespace)
		}

		return nil
	})
}

// saveProcesses writes down the started processes, so that another process can end them.
func (w *World) saveProcesses() error {
	content, err := json.Marshal(w.processes)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(w.dir, "processes.json"), content, 0o600)
}

// End stops everything that the story started and deletes the cluster. It also works for a world
// that another process started.
func (w *World) End(ctx context.Context) error {
	dir := filepath.Join(w.StateDir, w.Cluster.Name)
	processes := w.processes
	if content, err := os.ReadFile(filepath.Join(dir, "processes.json")); err == nil &&
		len(processes) == 0 {
		if err := json.Unmarshal(content, &processes); err != nil {
			return fmt.Errorf("%s/processes.json: %w", dir, err)
		}
	}

	var errs []error
	for _, p := range processes {
		errs = append(errs, p.end(ctx, w.Bin, w.BeforeBin))
	}

	for _, cmd := range w.running {
		_ = cmd.Wait()
	}

	if w.fabric != nil {
		errs = append(errs, w.fabric.close())
	}

	for _, x := range w.xpus {
		x.links.Close()
		errs = append(errs, x.ns.Close())
	}

	_, err := w.Cluster.Run(ctx, "down")
	return errors.Join(append(errs, err, os.RemoveAll(dir))...)
}

// end stops the process if its pid still belongs to it.
func (p process) end(ctx context.Context, directories ...string) error {
	if !p.runs(directories) {
		return nil
	}
	if err := syscall.Kill(p.PID, syscall.SIGTERM); err != nil {
		return nil
	}

	return poll(ctx, 30*time.Second, p.Name+" ends", func(context.Context) error {
		status, err := os.ReadFile("/proc/" + strconv.Itoa(p.PID) + "/stat")
		if err != nil || strings.Contains(string(status), ") Z ") {
			return nil
		}
		return errors.New("still runs")
	})
}

// runs reports whether the process runs a program of one of the directories. Both the directories and
// the programs in them may be symbolic links, and the kernel names a program without them.
func (p process) runs(directories []string) bool {
	exe, err := os.Readlink("/proc/" + strconv.Itoa(p.PID) + "/exe")
	if err != nil {
		return false
	}

	exe = strings.TrimSuffix(exe, " (deleted)")
	return slices.ContainsFunc(directories, func(dir string) bool {
		if dir == "" {
			return false
		}
		real, err := filepath.EvalSymlinks(dir)
		program, missing := filepath.EvalSymlinks(filepath.Join(dir, filepath.Base(exe)))
		return err == nil && filepath.Dir(exe) == real || missing == nil && exe == program
	})
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}
