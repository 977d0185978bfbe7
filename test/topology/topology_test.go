// SPDX-License-Identifier: Apache-2.0

// Package topology tests that a claim gets devices of several drivers that are beside each other,
// with the scheduler of Kubernetes and with xpuctl schedule. The machine is a directory.
package topology

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devicemodel"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

const (
	node      = "node1"
	namespace = "default"
	gate      = "DRAListTypeAttributes=true"
	gpuDriver = "gpu.example.com" // as test/e2e/cmd/gpudriver has it
	gpuCount  = 4
)

// TestGPUBesideConnectX8 checks that each claim for a GPU and a Function gets the GPU behind the
// Function's own ConnectX-8, which has another PCIe root than the PF and its VFs.
func TestGPUBesideConnectX8(t *testing.T) {
	objects, pairs := machine(t, devicemodel.AllFeatures(), true)
	t.Run("xpuctl schedule", func(t *testing.T) {
		for i, d := range decide(t, gate, objects, gpuCount) {
			if d.Node == "" {
				t.Fatalf("pod %d: %+v", i, d.Refusals)
			}
			checkPair(t, pairs, d.Claims[0].Claim)
		}
	})

	t.Run("kube-scheduler", func(t *testing.T) {
		c := newCluster(t)
		for _, o := range slices.Concat(objects, claimsAndPods(t, gpuCount)) {
			must.Succeed(t, c.Create(t.Context(), o))
		}
		for i := range gpuCount {
			allocated := &resourceapi.ResourceClaim{}
			must.EventuallySucceed(t, "the scheduler allocates", func() error {
				key := client.ObjectKey{Namespace: namespace, Name: claimName(i)}
				if err := c.Get(t.Context(), key, allocated); err != nil {
					return err
				}
				if allocated.Status.Allocation == nil {
					return fmt.Errorf("claim %s is not allocated", allocated.Name)
				}
				return nil
			})
			checkPair(t, pairs, allocated)
		}
	})
}

// TestGPUBesidePF checks that a GPU below the PF's own root belongs to the NIC too.
func TestGPUBesidePF(t *testing.T) {
	objects, _ := machine(t, devicemodel.AllFeatures(), true)
	for _, o := range objects {
		if s, isSlice := o.(*resourceapi.ResourceSlice); isSlice && s.Spec.Driver == gpuDriver {
			s.Spec.Devices = []resourceapi.Device{gpu("other", "pci0012:01"), gpu("own", "pci0010:00")}
		}
	}

	d := decide(t, gate, objects, 1)[0]
	if d.Node == "" {
		t.Fatalf("%+v", d.Refusals)
	}
	for _, result := range d.Claims[0].Claim.Status.Allocation.Devices.Results {
		want := map[string]string{"gpu": "own", "nic": "0010-03-01-0"}[result.Request]
		if result.Device != want {
			t.Errorf("%s is %s, want %s", result.Request, result.Device, want)
		}
	}
}

// TestGPUWithoutLists checks that a claim waits, and says for what, where the scheduler or the pool
// has only the PF's own PCIe root.
func TestGPUWithoutLists(t *testing.T) {
	for name, tt := range map[string]struct {
		features   devicemodel.Features
		dataDirect bool
		gates      string
	}{
		"API server without lists":      {devicemodel.DefaultFeatures(), true, ""},
		"VFs that do not use the other": {devicemodel.AllFeatures(), false, gate},
		"scheduler without lists":       {devicemodel.AllFeatures(), true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			objects, _ := machine(t, tt.features, tt.dataDirect)
			d := decide(t, tt.gates, objects, 1)[0]
			if d.Node != "" || len(d.Refusals) != 1 || d.Refusals[0].Reasons[0].Code !=
				schedule.ConstraintImpossible {
				t.Errorf("on node %q, refused for %+v", d.Node, d.Refusals)
			}
		})
	}
}

// machine returns what the two drivers publish for a machine like a GB300, and the name of the GPU
// that belongs to each Function.
func machine(
	t *testing.T, features devicemodel.Features, dataDirect bool,
) (objects []client.Object, pairs map[string]string) {
	host, err := simulate.New(t.Context(),
		simulate.Config{Root: t.TempDir(), Cards: simulate.GB300(2), Log: testr.New(t)})
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, host.Close()) })

	p := pooltest.DRA("fast", functionsOf(t, host)...)
	p.Spec.DataDirect = dataDirect
	nics := features.Reduce(devicemodel.Resources(node, []pool.Pool{p},
		func(function.Function) []function.Problem { return nil },
		func(function.ID, string) bool { return false }))
	objects = append(slicesOf(v1alpha1.GroupName, nics.Pools), slicesOf(gpuDriver, gpus(host))...)

	pairs = map[string]string{}
	for i, g := range host.GPUs() {
		for _, f := range p.Functions {
			if slices.Contains(f.DataDirectRoots, g.PCIeRoot) {
				pairs[f.ID.DeviceName()] = fmt.Sprint("gpu-", i)
			}
		}
	}
	if len(pairs) != len(p.Functions) || len(host.GPUs()) != gpuCount {
		t.Fatalf("%d of %d Functions have one of %d GPUs", len(pairs), len(p.Functions),
			len(host.GPUs()))
	}

	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}
	n.Status.Allocatable = corev1.ResourceList{
		corev1.ResourcePods: resource.MustParse("50"), corev1.ResourceCPU: resource.MustParse("8"),
	}
	for name, driver := range map[string]string{
		"gpu.nvidia.com": gpuDriver, "xpu-fast": v1alpha1.GroupName,
	} {
		objects = append(objects, &resourceapi.DeviceClass{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{
				CEL: &resourceapi.CELDeviceSelector{
					Expression: fmt.Sprintf("device.driver == %q", driver),
				},
			}}},
		})
	}

	return append(objects, n), pairs
}

// functionsOf returns the VFs of a host, as the agent's inventory finds them after the cards have
// answered.
func functionsOf(t *testing.T, host *simulate.Host) []function.Function {
	found := inventory.New(inventory.Options{
		SysRoot: host.SysRoot(), Log: testr.New(t),
		HostNetdevs: func() (hostuse.Netdevs, error) { return nil, nil },
	})
	must.Run(t, found.Run)

	unanswered := func(f function.Function) bool { return len(f.DataDirectRoots) == 0 }
	must.Eventually(t, "all Functions have the root of their Data Direct function", func() bool {
		all := found.Snapshot()
		return len(all) > 0 && !slices.ContainsFunc(all, unanswered)
	})
	return slices.DeleteFunc(found.Snapshot(), func(f function.Function) bool {
		return f.Kind != function.VF
	})
}

// gpus returns what a driver of GPUs publishes. Their order is not the cards', so that the first
// suitable GPU is not the right one.
func gpus(host *simulate.Host) map[string]resourceslice.Pool {
	var devices []resourceapi.Device
	for i, g := range slices.Backward(host.GPUs()) {
		devices = append(devices, gpu(fmt.Sprint("gpu-", i), g.PCIeRoot))
	}
	return map[string]resourceslice.Pool{node: {Slices: []resourceslice.Slice{{Devices: devices}}}}
}

func gpu(name, root string) resourceapi.Device {
	return resourceapi.Device{Name: name,
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			deviceattribute.StandardDeviceAttributePCIeRoot: {StringValue: &root},
		}}
}

func slicesOf(driver string, pools map[string]resourceslice.Pool) (all []client.Object) {
	for name, p := range pools {
		for i, s := range p.Slices {
			all = append(all, &resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{
					Name: strings.ReplaceAll(fmt.Sprint(driver, "-", name, "-", i), "/", "-"),
				},
				Spec: resourceapi.ResourceSliceSpec{
					Driver: driver, NodeName: new(node), Devices: s.Devices,
					Pool: resourceapi.ResourcePool{
						Name: name, Generation: 1, ResourceSliceCount: int64(len(p.Slices)),
					},
				},
			})
		}
	}
	return all
}

func claimName(i int) string { return fmt.Sprint("gpu-and-nic-", i) }

// claimsAndPods returns pods, and a claim for each as examples/gpu-and-nic.yaml makes it.
func claimsAndPods(t *testing.T, pods int) (objects []client.Object) {
	text, err := os.ReadFile(filepath.Join("..", "..", "examples", "gpu-and-nic.yaml"))
	must.Succeed(t, err)
	template := &resourceapi.ResourceClaimTemplate{}
	first, _, _ := strings.Cut(string(text), "\n---\n")
	must.Succeed(t, yaml.UnmarshalStrict([]byte(first), template))

	for i := range pods {
		name := claimName(i)
		objects = append(objects,
			&resourceapi.ResourceClaim{
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
				Spec:       template.Spec.Spec,
			},
			&corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprint("pod-", i)},
				Spec: corev1.PodSpec{
					Containers: []corev1.Container{{Name: "main", Image: "pause"}},
					ResourceClaims: []corev1.PodResourceClaim{
						{Name: "devices", ResourceClaimName: &name},
					},
				},
			})
	}
	return objects
}

// decide asks xpuctl schedule's scheduler where the pods go.
func decide(
	t *testing.T, gates string, objects []client.Object, pods int,
) (all []*schedule.Decision) {
	features, err := schedule.NewFeatures(schedule.NewestKubernetes, gates)
	must.Succeed(t, err)
	from := &snapshot.Snapshot{}
	for _, o := range slices.Concat(objects, claimsAndPods(t, pods)) {
		o = o.DeepCopyObject().(client.Object)
		clientgoscheme.Scheme.Default(o)
		must.Succeed(t, from.Put(o))
	}

	s := schedule.New(t.Context(), from, features)
	for _, pod := range from.Pods {
		d, err := s.Schedule(t.Context(), pod)
		must.Succeed(t, err)
		all = append(all, d)
	}
	return all
}

// checkPair checks that a claim has a Function and its GPU.
func checkPair(t *testing.T, pairs map[string]string, claim *resourceapi.ResourceClaim) {
	t.Helper()
	got := map[string]string{}
	for _, result := range claim.Status.Allocation.Devices.Results {
		got[result.Request] = result.Device
	}
	want := map[string]string{"nic": got["nic"], "gpu": pairs[got["nic"]]}
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("claim %s: -want +got\n%s", claim.Name, diff)
	}
	t.Logf("claim %s has %v", claim.Name, got)
}

// newCluster starts an API server and a scheduler with lists.
func newCluster(t *testing.T) client.Client {
	assets := needs.Kubernetes(t)
	environment := &envtest.Environment{ControlPlaneStartTimeout: time.Minute}
	environment.ControlPlane.GetAPIServer().Configure().Append("feature-gates", gate).
		Append("disable-admission-plugins", "ServiceAccount")
	config, err := environment.Start()
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, environment.Stop()) })

	admin, err := environment.AddUser(
		envtest.User{Name: "admin", Groups: []string{"system:masters"}}, nil)
	must.Succeed(t, err)
	kubeconfig, err := admin.KubeConfig()
	must.Succeed(t, err)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	must.Succeed(t, os.WriteFile(path, kubeconfig, 0o600))

	scheduler := exec.Command(filepath.Join(assets, "kube-scheduler"), "--kubeconfig="+path,
		"--leader-elect=false", "--secure-port=0", "--feature-gates="+gate)
	must.Succeed(t, scheduler.Start())
	t.Cleanup(func() {
		_ = scheduler.Process.Kill()
		_ = scheduler.Wait() // it was killed
	})

	c, err := client.New(config, client.Options{Scheme: clientgoscheme.Scheme})
	must.Succeed(t, err)
	return nodes{c}
}

// nodes is a client that creates nodes that are ready.
type nodes struct{ client.Client }

func (c nodes) Create(ctx context.Context, o client.Object, _ ...client.CreateOption) error {
	n, isNode := o.(*corev1.Node)
	if !isNode {
		return c.Client.Create(ctx, o.DeepCopyObject().(client.Object))
	}

	made, status := n.DeepCopy(), n.Status
	if err := c.Client.Create(ctx, made); err != nil {
		return err
	}
	made.Spec.Taints = nil // no controller of nodes runs
	if err := c.Client.Update(ctx, made); err != nil {
		return err
	}
	made.Status = status
	return c.Client.Status().Update(ctx, made)
}
