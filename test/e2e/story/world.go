// SPDX-License-Identifier: Apache-2.0

// Package story is the life of a few pods on a real cluster, step by step: what "make demo" shows
// and what the end-to-end test asserts are the same code. Every step fails with a sentence about
// what did not hold.
package story

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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
	// Cluster is where the story happens.
	Cluster Devcluster
	// Source is the root of the project.
	Source string
	// Bin has the project's programs and images.
	Bin string
	// BeforeBin has the programs, images and chart of the version before, for [World.SkewSteps].
	BeforeBin string
	// StateDir keeps logs and the list of processes, below it a directory for each cluster.
	StateDir string
	// Detail takes the lines below a step.
	Detail func(format string, args ...any)

	dir       string
	product   string // the directory whose images, chart and opi-bridge are used; "" is Bin
	cluster   Cluster
	client    client.WithWatch
	xpus      []*xpu
	fabric    *fabric
	authority *authority
	before    Snapshot
	pods      []podSpec // of the story
	tries     []try     // of these to reach each other
	direct    bool      // whether the product runs in direct mode
	processes []process
	running   []*exec.Cmd
}

// process is one that the story started.
type process struct {
	Name string `json:"name"`
	PID  int    `json:"pid"`
}

// Step is a part of the story.
type Step struct {
	Title string
	Run   func(context.Context) error
}

// Act is a chapter of the story: what is told, and what goes wrong in the same world after it and
// is told in tests alone.
type Act struct {
	Title   string
	Steps   []Step
	Trouble []Step
}

// Acts are the story. Each act stands on those before it.
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
		{"Other device models: a PF that claims share, and a PF as a whole or its VFs",
			w.chooseModels},
	}
}

// poll calls check until it succeeds; the error is the last one of check.
func poll(
	ctx context.Context, patience time.Duration, what string, check func(context.Context) error,
) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, patience, true,
		func(ctx context.Context) (bool, error) {
			if err := check(ctx); err == nil || ctx.Err() == nil {
				last = err // and not that time is up
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
	w.pods, w.tries = pods, tries
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

	return w.tellVersions(ctx)
}

// tellVersions says what the nodes run.
func (w *World) tellVersions(ctx context.Context) error {
	var nodes corev1.NodeList
	if err := w.client.List(ctx, &nodes); err != nil {
		return err
	}

	for _, node := range nodes.Items[:1] {
		info := node.Status.NodeInfo
		w.Detail("Kubernetes %s, %s", info.KubeletVersion,
			strings.Replace(info.ContainerRuntimeVersion, "://", " ", 1))
	}

	return nil
}

// insertCards gives every node its card, every xPU its agent, and a fabric between the xPUs.
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

// giveIdentity puts the certificate by which OPI agents know their client where the product looks
// for it.
func (w *World) giveIdentity(ctx context.Context, name string) error {
	id, err := w.authority.issue(name, "")
	if err != nil {
		return err
	}
	return w.client.Create(ctx, id.secret("opi-client"))
}

// secret has the identity where the product looks for it.
func (id identity) secret(name string) *corev1.Secret {
	secret := &corev1.Secret{
		Type: corev1.SecretTypeTLS,
		Data: map[string][]byte{"tls.crt": id.cert, "tls.key": id.key, "ca.crt": id.ca},
	}
	secret.Namespace, secret.Name = namespace, name
	return secret
}

// controllers is how many replicas deploy/ has.
const controllers = 2

// waitForProduct waits until the agents are ready, and the controllers where there are any.
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

// remember writes down what was started, for an end that somebody else brings about.
func (w *World) remember() error {
	content, err := json.Marshal(w.processes)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(w.dir, "processes.json"), content, 0o600)
}

// End stops everything that the story started and takes the cluster down. It works for a world that
// another process made, too.
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

// end stops the process if it still is the one that was started.
func (p process) end(ctx context.Context, directories ...string) error {
	exe, err := os.Readlink("/proc/" + strconv.Itoa(p.PID) + "/exe")
	if err != nil ||
		!slices.Contains(directories, filepath.Dir(strings.TrimSuffix(exe, " (deleted)"))) {
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

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}
