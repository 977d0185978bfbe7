// SPDX-License-Identifier: Apache-2.0

// Package scenarios compares the predictions of xpuctl schedule for the scenarios in this directory
// with the decisions of the Kubernetes scheduler.
package scenarios

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/pkg/controlplane"
	"github.com/opiproject/xpu-device-plugin/pkg/generate"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/report"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
	"github.com/opiproject/xpu-device-plugin/test/needs"
)

// world is an API server with a scheduler.
type world struct {
	client.Client
	clientset kubernetes.Interface
}

func start(t *testing.T) *world {
	t.Helper()
	assets := needs.Kubernetes(t)

	ctx, stop := context.WithCancel(context.Background())
	plane, err := controlplane.Start(ctx, assets, t.TempDir())
	if err != nil {
		stop()
		t.Fatal(err)
	}

	t.Cleanup(func() {
		stop()
		if err := plane.Wait(); err != nil {
			t.Error(err)
		}
	})

	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), resourceapi.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}

	api, err := client.New(plane.Config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}

	clientset, err := kubernetes.NewForConfig(plane.Config)
	if err != nil {
		t.Fatal(err)
	}

	return &world{api, clientset}
}

func (w *world) clients() snapshot.Clients {
	return snapshot.Clients{
		Core: w.clientset.CoreV1(), Resource: w.clientset.ResourceV1(),
		ResourceV1beta2: w.clientset.ResourceV1beta2(),
	}
}

// TestScheduler has the Kubernetes scheduler place the pods of each scenario, one after the other.
// Each pod must be pending, or have the devices, as xpuctl schedule predicts from the same API
// server just before.
func TestScheduler(t *testing.T) {
	w := start(t)
	files, err := filepath.Glob("*.yaml")
	if err != nil || len(files) < 41 {
		t.Fatalf("%d scenarios, want at least 41: %v", len(files), err)
	}

	for _, file := range files {
		t.Run(strings.TrimSuffix(file, ".yaml"), func(t *testing.T) {
			objects := objectsOf(t, file)
			pods := objects.Pods
			objects.Pods = nil
			t.Cleanup(func() { w.clear(t) })

			if err := controlplane.Load(t.Context(), w, objects); err != nil {
				t.Fatal(err)
			}

			for _, pod := range pods {
				w.compare(t, pod)
			}
		})
	}
}

// objectsOf reads the objects that the command in the file's header reads.
func objectsOf(t *testing.T, file string) *snapshot.Snapshot {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}

	_, rest, _ := strings.Cut(string(content), "# Run: ")
	line, _, _ := strings.Cut(rest, "\n")
	reader, err := snapshot.NewReader(strings.NewReader(""), report.GroupVersionKind())
	if err != nil {
		t.Fatal(err)
	}

	var paths []string
	for i, words := 0, strings.Fields(line); i < len(words)-1; i++ {
		if words[i] == "-f" && words[i+1] != "-" {
			paths = append(paths, filepath.Join("../..", words[i+1]))
		}
	}

	objects, err := reader.Read(paths...)
	if err != nil {
		t.Fatal(err)
	}

	if command, _, piped := strings.Cut(line, "|"); piped {
		for _, object := range generated(t, strings.Fields(command)).Objects() {
			if err := objects.Put(object); err != nil {
				t.Fatal(err)
			}
		}
	}

	return objects
}

// generated returns the output of xpuctl generate SHAPE [--FLAG N]...
func generated(t *testing.T, words []string) *generate.Cluster {
	t.Helper()
	shape, err := generate.Find(words[2])
	if err != nil {
		t.Fatal(err)
	}

	o := generate.Options{Nodes: 1}
	flags := map[string]*int{"--nodes": &o.Nodes, "--pfs": &o.PFs, "--vfs": &o.VFs}
	for i := 3; i < len(words)-1; i++ {
		if value, is := flags[words[i]]; is {
			if *value, err = strconv.Atoi(words[i+1]); err != nil {
				t.Fatal(err)
			}
		}
	}

	cluster, err := generate.Generate(shape, o)
	if err != nil {
		t.Fatal(err)
	}

	return cluster
}

// compare creates a pod, and compares its placement with the prediction.
func (w *world) compare(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	foretold := w.foretell(t, pod)
	made := pod.DeepCopy()
	if err := w.Create(t.Context(), made); err != nil {
		t.Fatal(err)
	}

	node := w.settle(t, made, foretold)
	want, fits := foretold[node]
	switch {
	case node == "" && len(foretold) > 0:
		t.Fatalf("pod %s is pending, and was to be on one of %v: %+v", pod.Name, foretold,
			made.Status.Conditions)
	case node == "": // the pod is deleted, so that it does not take devices of the next pods
		if err := w.Delete(t.Context(), made, client.GracePeriodSeconds(0)); err != nil {
			t.Fatal(err)
		}
	case !fits:
		t.Fatalf("pod %s is on node %s, and was to be on one of %v", pod.Name, node, foretold)
	default:
		if diff := gocmp.Diff(want, w.devices(t, made)); diff != "" {
			t.Errorf("pod %s on %s (-foretold +has):\n%s", pod.Name, node, diff)
		}
	}
}

// foretell returns, for each node that the scheduler may choose, the devices of the pod there. If
// several nodes serve the pod equally well, the scheduler takes any of them, so each is computed as
// if the others were cordoned. Nodes that serve the pod less well are left out.
func (w *world) foretell(t *testing.T, pod *corev1.Pod) map[string][]string {
	t.Helper()
	nodes := map[string][]string{}
	var best int64
	for {
		from, err := snapshot.List(t.Context(), w.clients())
		if err != nil {
			t.Fatal(err)
		}

		for _, node := range from.Nodes {
			_, told := nodes[node.Name]
			node.Spec.Unschedulable = told
		}

		decision := decide(t, from, pod)
		if decision.Node == "" || decision.Score < best {
			return nodes
		}

		best = decision.Score
		var devices []string
		for _, c := range decision.Claims {
			devices = append(devices, told(c.Claim)...)
		}

		nodes[decision.Node] = devices
	}
}

func decide(t *testing.T, from *snapshot.Snapshot, pod *corev1.Pod) *schedule.Decision {
	t.Helper()
	features, err := schedule.NewFeatures(schedule.NewestKubernetes, "")
	if err != nil {
		t.Fatal(err)
	}

	decision, err := schedule.New(t.Context(), from, features).Schedule(t.Context(), pod)
	if err != nil {
		t.Fatal(err)
	}

	return decision
}

// The result lists the devices of a claim: the request, the device and the consumed capacity.
func told(claim *resourceapi.ResourceClaim) []string {
	if claim.Status.Allocation == nil {
		return nil
	}

	var devices []string
	for _, r := range claim.Status.Allocation.Devices.Results {
		var takes []string
		for name, quantity := range r.ConsumedCapacity {
			takes = append(takes, fmt.Sprintf("%s %s", quantity.String(), name))
		}
		slices.Sort(takes)
		devices = append(devices,
			fmt.Sprintf("%s=%s/%s/%s %v", r.Request, r.Driver, r.Pool, r.Device, takes))
	}

	return devices
}

// settle waits until the scheduler has decided, and returns the pod's node. A pod that waits for
// binding conditions has its devices and is nominated to its node. A pod with a foretold node may
// be refused at first, until the scheduler has seen all objects.
func (w *world) settle(t *testing.T, pod *corev1.Pod, foretold map[string][]string) (node string) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, time.Minute, true,
		func(ctx context.Context) (bool, error) {
			if err := w.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil {
				return false, err
			}

			node = pod.Spec.NodeName
			if want := foretold[pod.Status.NominatedNodeName]; node == "" && len(want) > 0 &&
				len(w.devices(t, pod)) == len(want) {
				node = pod.Status.NominatedNodeName
			}

			refused := slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse
			})
			return node != "" || refused && len(foretold) == 0, nil
		})

	if err != nil && len(foretold) == 0 {
		t.Fatalf("pod %s: the scheduler says nothing: %v", pod.Name, err)
	}

	return node
}

// devices returns the devices of the pod's claims, in their order.
func (w *world) devices(t *testing.T, pod *corev1.Pod) []string {
	t.Helper()
	var names, devices []string
	for _, entry := range pod.Spec.ResourceClaims {
		if entry.ResourceClaimName != nil {
			names = append(names, *entry.ResourceClaimName)
		}
		for _, status := range pod.Status.ResourceClaimStatuses {
			if status.Name == entry.Name && status.ResourceClaimName != nil {
				names = append(names, *status.ResourceClaimName)
			}
		}
	}

	if extended := pod.Status.ExtendedResourceClaimStatus; extended != nil {
		names = append(names, extended.ResourceClaimName)
	}

	for _, name := range names {
		var claim resourceapi.ResourceClaim
		if err := w.Get(t.Context(), client.ObjectKey{Namespace: pod.Namespace, Name: name},
			&claim); err != nil {
			t.Fatal(err)
		}
		devices = append(devices, told(&claim)...)
	}

	return devices
}

// clear deletes all objects of a scenario.
func (w *world) clear(t *testing.T) {
	ctx := context.Background()
	in := client.InNamespace("default")
	for _, kind := range []struct {
		object  client.Object
		options []client.DeleteAllOfOption
	}{
		{&corev1.Pod{}, []client.DeleteAllOfOption{in, client.GracePeriodSeconds(0)}},
		{&resourceapi.ResourceClaimTemplate{}, []client.DeleteAllOfOption{in}},
		{&resourceapi.ResourceClaim{}, []client.DeleteAllOfOption{in}},
		{&resourceapi.DeviceTaintRule{}, nil}, {&resourceapi.ResourceSlice{}, nil},
		{&resourceapi.DeviceClass{}, nil}, {&corev1.Node{}, nil},
	} {
		if err := w.DeleteAllOf(ctx, kind.object, kind.options...); err != nil {
			t.Fatal(err)
		}
	}

	err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, time.Minute, true,
		func(ctx context.Context) (bool, error) {
			var claims resourceapi.ResourceClaimList // their controller removes the finalizers
			err := w.List(ctx, &claims)
			return len(claims.Items) == 0, err
		})

	if err != nil {
		t.Fatalf("claims stay: %v", err)
	}
}
