package node

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerpb "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// Cluster is the API server that runs on the machine outside of the guest.
type Cluster struct {
	// Admin may do everything.
	Admin client.Client

	node *Node
}

// connect gives the test the API server, with the node's Node.
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

// Delete deletes an object for good: when the test ends there is nobody any more who would take finalizers away.
func (c *Cluster) Delete(object client.Object) {
	c.node.t.Helper()
	ctx := context.WithoutCancel(c.node.t.Context())
	must.Succeed(c.node.t, client.IgnoreNotFound(c.Admin.Delete(ctx, object)))
	final := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
	must.Succeed(c.node.t, client.IgnoreNotFound(c.Admin.Patch(ctx, object, final)))
}

// Slices are the node's ResourceSlices, by name.
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

// Versions are those of the node's ResourceSlices, by name: one that is written gets another.
func (c *Cluster) Versions() map[string]string {
	c.node.t.Helper()
	versions := map[string]string{}
	for name, slice := range c.Slices() {
		versions[name] = slice.ResourceVersion
	}
	return versions
}

// Devices are those of the node's ResourceSlices, by name.
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

// Allocate plays the scheduler: a claim of a Function of the DevicePool for the pod, with the interface as config says.
func (c *Cluster) Allocate(
	pod *Pod, devicePool string, pf pci.Address, f function.ID, config v1alpha1.InterfaceConfig,
) *resourceapi.ResourceClaim {
	c.node.t.Helper()
	config.TypeMeta = metav1.TypeMeta{APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "InterfaceConfig"}
	parameters, err := json.Marshal(config)
	must.Succeed(c.node.t, err)
	object := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: pod.Name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: devicePool},
		}}}},
	}
	c.Create(object)
	object.Status = resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{
				Request: "nic", Driver: v1alpha1.GroupName, Device: f.DeviceName(),
				Pool: claim.PoolID{Node: plan.NodeName, PF: pf, DevicePool: devicePool}.String(),
			}},
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

// thisNode is by what the API server knows whose agent may write the status of a claim.
func thisNode() *corev1.NodeSelector {
	return &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchFields: []corev1.NodeSelectorRequirement{
			{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{plan.NodeName}},
		},
	}}}
}

// Unallocate plays the control plane when the pod is gone, and waits until the claim may be made anew.
func (c *Cluster) Unallocate(object *resourceapi.ResourceClaim) {
	c.node.t.Helper()
	c.Delete(object)
	Eventually(c.node.t, "claim "+object.Name+" is gone", func() bool {
		err := c.Admin.Get(c.node.t.Context(), client.ObjectKeyFromObject(object), &resourceapi.ResourceClaim{})
		return apierrors.IsNotFound(err)
	})
}

// Driver is the agent's DRA driver as the kubelet calls it.
type Driver struct {
	node   *Node
	client drapb.DRAPluginClient
}

// Register plays the kubelet that finds the driver's socket, and returns the driver. The sockets of an agent that was
// killed are there until the next one is: what is not answered is tried again.
func (n *Node) Register() *Driver {
	n.t.Helper()
	registrar := n.path("kubelet/plugins_registry/" + v1alpha1.GroupName + "-reg.sock")
	registration := registerpb.NewRegistrationClient(n.dial(registrar))
	ctx, cancel := context.WithTimeout(n.t.Context(), Patience)
	defer cancel()
	info, err := registration.GetInfo(ctx, &registerpb.InfoRequest{}, grpc.WaitForReady(true))
	must.Succeed(n.t, err)
	if !slices.Contains(info.SupportedVersions, drapb.DRAPluginService) {
		n.t.Errorf("DRA driver %+v, want one with %s", info, drapb.DRAPluginService)
	}
	_, err = registration.NotifyRegistrationStatus(ctx, &registerpb.RegistrationStatus{PluginRegistered: true})
	must.Succeed(n.t, err)
	return &Driver{n, drapb.NewDRAPluginClient(n.dial(info.Endpoint))}
}

func (n *Node) dial(socket string) *grpc.ClientConn {
	n.t.Helper()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second}))
	must.Succeed(n.t, err)
	n.root.Cleanup(func() { conn.Close() })
	return conn
}

// Prepare is the kubelet's NodePrepareResources for one claim. It returns the CDI devices.
func (d *Driver) Prepare(object *resourceapi.ResourceClaim) ([]string, error) {
	d.node.t.Helper()
	ctx, cancel := context.WithTimeout(d.node.t.Context(), Patience)
	defer cancel()
	response, err := d.client.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{
		Claims: []*drapb.Claim{{Namespace: object.Namespace, Name: object.Name, Uid: string(object.UID)}},
	}, grpc.WaitForReady(true))
	if err != nil {
		return nil, err
	}
	prepared := response.Claims[string(object.UID)]
	if prepared.GetError() != "" {
		return nil, errors.New(prepared.GetError())
	}
	var ids []string
	for _, device := range prepared.GetDevices() {
		ids = append(ids, device.CdiDeviceIds...)
	}
	return ids, nil
}

// MustPrepare is Prepare, after which CDI files have all devices but those of Functions, which come when those are
// attached.
func (d *Driver) MustPrepare(object *resourceapi.ResourceClaim) {
	d.node.t.Helper()
	ids, err := d.Prepare(object)
	if err != nil || len(ids) == 0 {
		d.node.t.Fatalf("NodePrepareResources of claim %s: %q, %v; want CDI devices", object.Name, ids, err)
	}
	files, err := cdi.NewCache(cdi.WithSpecDirs(d.node.path("cdi")), cdi.WithAutoRefresh(false))
	must.Succeed(d.node.t, err)
	for _, id := range ids {
		if files.GetDevice(id) == nil && !strings.HasPrefix(id, claim.CDIKind+"=") {
			d.node.t.Errorf("no CDI file has device %s", id)
		}
	}
}

// MustUnprepare is the kubelet's NodeUnprepareResources for one claim.
func (d *Driver) MustUnprepare(object *resourceapi.ResourceClaim) {
	d.node.t.Helper()
	ctx, cancel := context.WithTimeout(d.node.t.Context(), Patience)
	defer cancel()
	response, err := d.client.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{
		Claims: []*drapb.Claim{{Namespace: object.Namespace, Name: object.Name, Uid: string(object.UID)}},
	}, grpc.WaitForReady(true))
	if err != nil || response.Claims[string(object.UID)].GetError() != "" {
		d.node.t.Fatalf("NodeUnprepareResources of claim %s: %v, %v", object.Name, response, err)
	}
}

// runtime is the container runtime's side of NRI.
type runtime struct {
	*adaptation.Adaptation

	mutex   sync.Mutex
	running []*Pod
}

// set says that the pod's sandbox runs, or does not.
func (r *runtime) set(p *Pod, running bool) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.running = slices.DeleteFunc(r.running, func(other *Pod) bool { return other == p })
	if running {
		r.running = append(r.running, p)
	}
}

// synchronize tells a plugin that has just connected what runs.
func (r *runtime) synchronize(ctx context.Context, plugin adaptation.SyncCB) error {
	r.mutex.Lock()
	var sandboxes []*adaptation.PodSandbox
	for _, p := range r.running {
		sandboxes = append(sandboxes, p.sandbox())
	}
	r.mutex.Unlock()
	_, err := plugin(ctx, sandboxes, nil)
	return err
}

// StartRuntime plays the container runtime, which has no pods yet.
func (n *Node) StartRuntime() {
	n.t.Helper()
	directory := n.path("nri")
	must.Succeed(n.t, os.MkdirAll(directory, 0o755))
	r := &runtime{}
	update := func(context.Context, []*adaptation.ContainerUpdate) ([]*adaptation.ContainerUpdate, error) {
		return nil, nil
	}
	var err error
	r.Adaptation, err = adaptation.New("runtime", "v1", r.synchronize, update,
		adaptation.WithSocketPath(n.path("nri.sock")), adaptation.WithPluginPath(directory),
		adaptation.WithPluginConfigPath(filepath.Join(directory, "conf")))
	must.Succeed(n.t, err)
	must.Succeed(n.t, r.Adaptation.Start())
	n.root.Cleanup(r.Adaptation.Stop)
	n.runtime = r
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

// MustRun is Run, after which the pod has the interface. The runtime may take a plugin in a moment after it connected.
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

// MustStop is Stop, after which the pod has no net1.
func (p *Pod) MustStop() {
	p.node.t.Helper()
	must.Succeed(p.node.t, p.Stop())
	p.WantNo("net1")
}

func (p *Pod) sandbox() *adaptation.PodSandbox {
	return &adaptation.PodSandbox{
		Id: p.Sandbox, Namespace: "default", Name: p.Name, Uid: p.UID, Linux: &adaptation.LinuxPodSandbox{
			Namespaces: []*adaptation.LinuxNamespace{{Type: "network", Path: p.Path()}},
		},
	}
}
