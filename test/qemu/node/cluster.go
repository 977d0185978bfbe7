// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/node/nri/nritest"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// Cluster is the API server that runs on the machine outside the guest.
type Cluster struct {
	// Admin is the client of a user who may do everything.
	Admin client.Client

	node *Node
}

// connect connects the test to the API server, and creates the Node of the guest.
func connect(n *Node) *Cluster {
	n.t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", plan.AdminKubeconfig)
	must.Succeed(n.t, err)
	admin, err := kubeapitest.Client(config)
	must.Succeed(n.t, err)
	c := &Cluster{Admin: admin, node: n}
	c.Create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: plan.NodeName}})

	n.t.Cleanup(func() {
		for _, slice := range c.Slices() {
			c.Delete(&slice)
		}
	})

	return c
}

// Create creates an object that lives until the test ends.
func (c *Cluster) Create(object client.Object) {
	c.node.t.Helper()
	must.Succeed(c.node.t, c.Admin.Create(c.node.t.Context(), object))
	c.node.t.Cleanup(func() { c.Delete(object) })
}

// Delete deletes an object and its finalizers, because no controller would remove the finalizers
// when the test ends, and no kubelet would end a pod.
func (c *Cluster) Delete(object client.Object) {
	c.node.t.Helper()
	ctx := context.WithoutCancel(c.node.t.Context())
	must.Succeed(c.node.t,
		client.IgnoreNotFound(c.Admin.Delete(ctx, object, client.GracePeriodSeconds(0))))
	final := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
	must.Succeed(c.node.t, client.IgnoreNotFound(c.Admin.Patch(ctx, object, final)))
}

// Slices returns the node's ResourceSlices, by name.
func (c *Cluster) Slices() map[string]resourceapi.ResourceSlice {
	c.node.t.Helper()
	var list resourceapi.ResourceSliceList
	must.Succeed(c.node.t, c.Admin.List(context.WithoutCancel(c.node.t.Context()), &list))
	slices := map[string]resourceapi.ResourceSlice{}
	for _, slice := range list.Items {
		if slice.Spec.Driver == v1alpha1.GroupName {
			slices[slice.Name] = slice
		}
	}

	return slices
}

// Versions returns the resource versions of the node's ResourceSlices, by name. A write changes the
// version.
func (c *Cluster) Versions() map[string]string {
	c.node.t.Helper()
	versions := map[string]string{}
	for name, slice := range c.Slices() {
		versions[name] = slice.ResourceVersion
	}
	return versions
}

// Devices returns the devices in the node's ResourceSlices, by name.
func (c *Cluster) Devices() map[string]resourceapi.Device {
	c.node.t.Helper()
	devices := map[string]resourceapi.Device{}
	for _, slice := range c.Slices() {
		for _, d := range slice.Spec.Devices {
			devices[d.Name] = d
		}
	}
	return devices
}

// Allocate plays the user and the scheduler. It creates the pod, which gets its UID from the API
// server, and an allocated claim for it. The claim has a Function of the DevicePool, and config for
// the interface.
func (c *Cluster) Allocate(
	pod *Pod, devicePool string, pf pci.Address, f function.ID, config v1alpha1.InterfaceConfig,
) *resourceapi.ResourceClaim {
	c.node.t.Helper()
	return c.AllocateEach(pod, devicePool, []pci.Address{pf}, []function.ID{f}, config)
}

// AllocateEach allocates several Functions for one request. pfs has the PF of each Function.
func (c *Cluster) AllocateEach(
	pod *Pod, devicePool string, pfs []pci.Address, functions []function.ID,
	config v1alpha1.InterfaceConfig,
) *resourceapi.ResourceClaim {
	c.node.t.Helper()
	var results []resourceapi.DeviceRequestAllocationResult
	for n, f := range functions {
		results = append(results, resourceapi.DeviceRequestAllocationResult{
			Request: "nic", Driver: v1alpha1.GroupName, Device: f.DeviceName(),
			Pool: claim.PoolID{Node: plan.NodeName, PF: pfs[n], DevicePool: devicePool}.String(),
		})
	}

	config.TypeMeta = metav1.TypeMeta{
		APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "InterfaceConfig",
	}
	parameters, err := json.Marshal(config)
	must.Succeed(c.node.t, err)

	// The pod must exist, because an agent that has to wait asks for it.
	podObject := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: pod.Name},
		Spec: corev1.PodSpec{
			NodeName: plan.NodeName, Containers: []corev1.Container{{Name: "main", Image: "none"}},
		},
	}

	c.Create(podObject)
	pod.UID = string(podObject.UID)
	object := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: pod.Name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: devicePool, Count: int64(len(functions)),
			},
		}}}},
	}

	c.Create(object)
	object.Status = resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: results,
			Config: []resourceapi.DeviceAllocationConfiguration{{
				Source: resourceapi.AllocationConfigSourceClaim,
				DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver: v1alpha1.GroupName, Parameters: kruntime.RawExtension{Raw: parameters},
				}},
			}},
		}, NodeSelector: thisNode()},
		ReservedFor: []resourceapi.ResourceClaimConsumerReference{
			{Resource: "pods", Name: pod.Name, UID: types.UID(pod.UID)},
		},
	}

	must.Succeed(c.node.t, c.Admin.Status().Update(c.node.t.Context(), object))
	return object
}

// thisNode returns the selector by which the API server knows which agent may write a claim's
// status.
func thisNode() *corev1.NodeSelector {
	return &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchFields: []corev1.NodeSelectorRequirement{
			{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn,
				Values: []string{plan.NodeName}},
		},
	}}}
}

// Unallocate plays the control plane when the pod is gone, and waits until the claim is gone, so
// that it can be created again.
func (c *Cluster) Unallocate(object *resourceapi.ResourceClaim) {
	c.node.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: object.Namespace, Name: object.Name},
	}
	c.Delete(pod)
	c.Delete(object)

	must.Eventually(c.node.t, "claim "+object.Name+" is gone", func() bool {
		err := c.Admin.Get(c.node.t.Context(), client.ObjectKeyFromObject(object),
			&resourceapi.ResourceClaim{})
		return apierrors.IsNotFound(err)
	})
}

// Driver is the agent's DRA driver as the kubelet calls it.
type Driver struct {
	node   *Node
	driver *kubelettest.DRADriver
}

// Register plays the kubelet that finds the driver's socket, and returns the driver.
func (n *Node) Register() *Driver {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), Patience)
	defer cancel()
	driver, err := kubelettest.RegisterDRADriver(ctx, n.path("kubelet"), v1alpha1.GroupName)
	must.Succeed(n.t, err)
	n.root.Cleanup(func() { driver.Close() })
	return &Driver{n, driver}
}

// Prepare calls NodePrepareResources for one claim, as the kubelet does. It returns the CDI
// devices.
func (d *Driver) Prepare(object *resourceapi.ResourceClaim) ([]string, error) {
	d.node.t.Helper()
	ctx, cancel := context.WithTimeout(d.node.t.Context(), Patience)
	defer cancel()

	devices, err := d.driver.Prepare(ctx, object)
	var ids []string
	for _, device := range devices {
		ids = append(ids, device.CdiDeviceIds...)
	}
	return ids, err
}

// MustPrepare calls Prepare, and checks that CDI files have all devices except the devices of
// Functions, which are added when the Functions are attached.
func (d *Driver) MustPrepare(object *resourceapi.ResourceClaim) {
	d.node.t.Helper()
	ids, err := d.Prepare(object)
	if err != nil || len(ids) == 0 {
		d.node.t.Fatalf("NodePrepareResources of claim %s: %q, %v; want CDI devices",
			object.Name, ids, err)
	}

	files, err := cdi.NewCache(cdi.WithSpecDirs(d.node.path("cdi")), cdi.WithAutoRefresh(false))
	must.Succeed(d.node.t, err)

	for _, id := range ids {
		if files.GetDevice(id) == nil && !strings.HasPrefix(id, claim.CDIKind+"=") {
			d.node.t.Errorf("no CDI file has device %s", id)
		}
	}
}

// Gives reports whether a CDI file of the agent has the device node of the path for containers.
func (n *Node) Gives(path string) bool {
	n.t.Helper()
	files, err := cdi.NewCache(cdi.WithSpecDirs(n.path("cdi")), cdi.WithAutoRefresh(false))
	must.Succeed(n.t, err)
	return slices.ContainsFunc(files.ListDevices(), func(id string) bool {
		return slices.ContainsFunc(files.GetDevice(id).ContainerEdits.DeviceNodes,
			func(node *specs.DeviceNode) bool { return node.Path == path })
	})
}

// MustUnprepare calls NodeUnprepareResources for one claim, as the kubelet does.
func (d *Driver) MustUnprepare(object *resourceapi.ResourceClaim) {
	d.node.t.Helper()
	ctx, cancel := context.WithTimeout(d.node.t.Context(), Patience)
	defer cancel()
	if err := d.driver.Unprepare(ctx, object); err != nil {
		d.node.t.Fatalf("NodeUnprepareResources of claim %s: %v", object.Name, err)
	}
}

// runtime is the container runtime's side of NRI.
type runtime struct {
	*adaptation.Adaptation

	mutex   sync.Mutex
	running []*Pod
}

// set records whether the pod's sandbox runs.
func (r *runtime) set(p *Pod, running bool) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.running = slices.DeleteFunc(r.running, func(other *Pod) bool { return other == p })
	if running {
		r.running = append(r.running, p)
	}
}

// sandboxes returns the sandboxes of the running pods.
func (r *runtime) sandboxes() []*adaptation.PodSandbox {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	var all []*adaptation.PodSandbox
	for _, p := range r.running {
		all = append(all, p.sandbox())
	}
	return all
}

// runtimePatience is how long the runtime waits for the agent's answer. containerd waits 2 s and
// goes on without the plugin. The plugin takes longer if emulated processors share the machine with
// other work.
const runtimePatience = 10 * time.Second

// StartRuntime plays a container runtime without pods.
func (n *Node) StartRuntime() {
	n.t.Helper()
	n.runtime = &runtime{}
	adaptation.SetPluginRequestTimeout(runtimePatience)
	var err error
	n.runtime.Adaptation, err = nritest.Start(n.path("nri.sock"), n.runtime.sandboxes)
	must.Succeed(n.t, err)
	n.root.Cleanup(n.runtime.Stop)
}

// AwaitRuntime waits until the agent is connected to the runtime.
func (n *Node) AwaitRuntime() {
	n.t.Helper()
	n.Eventually("the agent is connected to the runtime", func() bool {
		_, err := n.get("/readyz")
		return err == nil
	})
}

// Run plays the runtime that starts the pod's sandbox.
func (p *Pod) Run() error {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	err := p.node.runtime.RunPodSandbox(ctx, &adaptation.RunPodSandboxRequest{Pod: p.sandbox()})
	p.node.runtime.set(p, err == nil)
	return err
}

// Container plays the runtime that creates a container in the pod's sandbox.
func (p *Pod) Container() error {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	_, err := p.node.runtime.CreateContainer(ctx, &adaptation.CreateContainerRequest{
		Pod: p.sandbox(), Container: &adaptation.Container{
			Id: p.Name, PodSandboxId: p.Sandbox, Name: "main",
		},
	})
	return err
}

// MustRun calls Run, and checks that the pod has the interface. It tries again for a moment,
// because the runtime may accept a plugin some time after the plugin connected.
func (p *Pod) MustRun(name string) {
	p.node.t.Helper()
	p.node.Eventually(name+" is in "+p.Name, func() bool {
		must.Succeed(p.node.t, p.Run())
		return p.Has(name)
	})
	p.Interface(name)
}

// Stop plays the runtime that stops the pod's sandbox.
func (p *Pod) Stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	p.node.runtime.set(p, false)
	return p.node.runtime.StopPodSandbox(ctx, &adaptation.StopPodSandboxRequest{Pod: p.sandbox()})
}

// MustStop calls Stop, and checks that the pod has no net1.
func (p *Pod) MustStop() {
	p.node.t.Helper()
	must.Succeed(p.node.t, p.Stop())
	p.WantNo("net1")
}

func (p *Pod) sandbox() *adaptation.PodSandbox {
	return nritest.Sandbox(p.Sandbox, p.Name, p.UID, p.Path())
}
