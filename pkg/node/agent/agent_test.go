// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/node/nri/nritest"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

const nodeName = "node1"

// world is a node with simulated cards and an API server, and plays the kubelet and the runtime for
// the agent.
type world struct {
	t       *testing.T
	admin   client.Client
	host    *simulate.Host
	config  Config
	runtime *adaptation.Adaptation
	starts  int
	// The following fields belong to the running agent.
	end     func() // ends the agent
	metrics prometheus.Gatherer
}

// newWorld returns a world with a DevicePool of all VFs and the node's Functions as the
// configuration says. It sets the directory of the configuration.
func newWorld(t *testing.T, functions simulate.Config) *world {
	t.Helper()
	w := newNode(t, functions)
	w.connect()
	w.create(&v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: "fast"},
		Spec: v1alpha1.DevicePoolSpec{
			Selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}}, Network: "lab",
		}})
	return w
}

// newNode returns a world without an API server.
func newNode(t *testing.T, functions simulate.Config) *world {
	t.Helper()
	if !netns.Isolated() {
		t.Skip("needs root, for a network namespace of its own")
	}

	dir := must.SocketDir(t)
	functions.Root, functions.Log = dir, testr.New(t)
	host, err := simulate.New(t.Context(), functions)
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		if err := host.Close(); err != nil {
			t.Error(err)
		}
	})

	registry := filepath.Join(dir, "kubelet", "plugins_registry")
	if err := os.MkdirAll(registry, 0o750); err != nil {
		t.Fatal(err)
	}

	return &world{t: t, host: host, config: Config{
		Identity: Identity{NodeName: nodeName},
		Host: Host{
			SysRoot: host.SysRoot(), ProcRoot: "/proc", DevRoot: "/dev",
			StateDir:   filepath.Join(dir, "state"),
			KubeletDir: filepath.Join(dir, "kubelet"), CDIDir: filepath.Join(dir, "cdi"),
			NRISocket: filepath.Join(dir, "nri.sock"),
		},
		Servers: Servers{ListenAddress: "127.0.0.1:0"},
		Attaching: Attaching{
			CNISocket:     filepath.Join(dir, "run", "cni.sock"),
			SpoolDir:      filepath.Join(dir, "state", "spool"),
			DeviceInfoDir: filepath.Join(dir, "devinfo"),
			HooksDir:      filepath.Join(dir, "hooks.d"), HookTimeout: time.Minute, HookAttempts: 3,
		},
		Provisioning: Provisioning{
			Provisioner: ProvisionerDirect, ProvisionTimeout: 200 * time.Millisecond,
		},
	}}
}

// connect adds the API server, with the node's Node.
func (w *world) connect() {
	w.t.Helper()
	cluster.Need(w.t)
	admin, err := kubeapitest.Client(cluster.Admin())
	if err != nil {
		w.t.Fatal(err)
	}

	w.admin = admin
	w.config.Provisioner, w.config.Namespace = ProvisionerCRD, kubeapitest.AgentNamespace
	w.config.Kubernetes = cluster.Agent(nodeName)
	w.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}})

	w.t.Cleanup(func() {
		for _, slice := range w.slices() {
			w.delete(&slice)
		}
	})
}

// create creates an object that exists until the test ends.
func (w *world) create(object client.Object) {
	w.t.Helper()
	if err := w.admin.Create(w.t.Context(), object); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { w.delete(object) })
}

// delete deletes an object with its finalizers, because no controller removes them when the test
// ends.
func (w *world) delete(object client.Object) {
	w.t.Helper()
	ctx := context.WithoutCancel(w.t.Context())
	if err := w.admin.Delete(ctx, object); client.IgnoreNotFound(err) != nil {
		w.t.Fatal(err)
	}

	final := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
	if err := w.admin.Patch(ctx, object, final); client.IgnoreNotFound(err) != nil {
		w.t.Fatal(err)
	}
}

// start starts an agent. It runs until end is called or the test ends.
func (w *world) start() {
	w.t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	registry := prometheus.NewRegistry()
	w.metrics = registry
	// A forked child may hold the port of the previous agent for a moment.
	w.starts++
	w.config.ListenAddress = fmt.Sprintf("127.0.0.1:%d", 9810+w.starts)
	config := w.config
	go func() { done <- Run(ctx, config, registry, testr.New(w.t)) }()
	ended := false
	w.end = func() {
		if ended {
			return
		}
		ended = true
		stop()
		if err := <-done; err != nil {
			w.t.Errorf("Run = %v, want nil when its context ends", err)
		}
	}

	w.t.Cleanup(w.end)
}

func (w *world) eventually(what string, condition func() bool) {
	w.t.Helper()
	must.Eventually(w.t, what, condition)
}

// slices returns the node's ResourceSlices, by name.
func (w *world) slices() map[string]resourceapi.ResourceSlice {
	w.t.Helper()
	var list resourceapi.ResourceSliceList
	err := w.admin.List(context.WithoutCancel(w.t.Context()),
		&list, &client.ListOptions{FieldSelector: fields.SelectorFromSet(fields.Set{
			resourceapi.ResourceSliceSelectorDriver:   v1alpha1.GroupName,
			resourceapi.ResourceSliceSelectorNodeName: nodeName,
		})})

	if err != nil {
		w.t.Fatal(err)
	}

	out := map[string]resourceapi.ResourceSlice{}
	for _, slice := range list.Items {
		out[slice.Name] = slice
	}

	return out
}

func (w *world) devices() int {
	w.t.Helper()
	count := 0
	for _, slice := range w.slices() {
		count += len(slice.Spec.Devices)
	}
	return count
}

func versions(slices map[string]resourceapi.ResourceSlice) map[string]string {
	out := map[string]string{}
	for name, slice := range slices {
		out[name] = slice.ResourceVersion
	}
	return out
}

// wantUntouched fails the test if one of the slices was written or replaced.
func (w *world) wantUntouched(what string, before map[string]string) {
	w.t.Helper()
	now := versions(w.slices())
	maps.DeleteFunc(now, func(name, _ string) bool { return before[name] == "" })
	if diff := cmp.Diff(before, now); diff != "" {
		w.t.Errorf("%s: slices were written: -before +now\n%s", what, diff)
	}
}

// shake makes the kernel report a netdev, as it does when VFs appear and disappear.
func (w *world) shake() {
	w.t.Helper()
	attributes := netlink.NewLinkAttrs()
	attributes.Name = "shake0"
	veth := &netlink.Veth{LinkAttrs: attributes, PeerName: "shake1"}
	if err := errors.Join(netlink.LinkAdd(veth), netlink.LinkDel(veth)); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) readyz() (int, string) {
	response, err := http.Get("http://" + w.config.ListenAddress + "/readyz")
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close()

	body, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err.Error()
	}

	return response.StatusCode, string(body)
}

// startRuntime starts a container runtime that has sandboxes.
func (w *world) startRuntime(sandboxes ...*adaptation.PodSandbox) {
	w.t.Helper()
	runtime, err := nritest.Start(w.config.NRISocket, func() []*adaptation.PodSandbox {
		return sandboxes
	})
	must.Succeed(w.t, err)
	w.t.Cleanup(runtime.Stop)
	w.runtime = runtime
}

// register plays the kubelet that finds the driver's socket, and returns the driver.
func (w *world) register() *kubelettest.DRADriver {
	w.t.Helper()
	driver, err := kubelettest.RegisterDRADriver(w.t.Context(), w.config.KubeletDir,
		v1alpha1.GroupName)
	must.Succeed(w.t, err)
	w.t.Cleanup(func() { driver.Close() })
	return driver
}

// allocate plays the scheduler, and returns a claim of the Function for pod1.
func (w *world) allocate(name string, function function.ID) *resourceapi.ResourceClaim {
	w.t.Helper()
	return w.allocateFor("pod1", "fast", name, function)
}

// allocateFor plays the scheduler, and returns a claim of a Function of the DevicePool, or of a
// share of a PF, for the pod.
func (w *world) allocateFor(
	pod, devicePool, name string, function function.ID, share ...types.UID,
) *resourceapi.ResourceClaim {
	w.t.Helper()
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "fast"},
		}}}},
	}

	w.create(c)
	c.Status = resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{
				Results: []resourceapi.DeviceRequestAllocationResult{{
					Request: "nic", Driver: v1alpha1.GroupName, Device: function.DeviceName(),
					Pool: claim.PoolID{
						Node: nodeName, PF: "0000:3b:00.0", DevicePool: devicePool,
					}.String(),
				}},
				Config: []resourceapi.DeviceAllocationConfiguration{{
					Source: resourceapi.AllocationConfigSourceClaim,
					DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
						Driver: v1alpha1.GroupName, Parameters: runtime.RawExtension{
							Raw: []byte(
								`{"apiVersion": "xpu.opiproject.org/v1alpha1", "kind": "InterfaceConfig", "interfaceName": "fast0"}`,
							),
						},
					}},
				}},
			},
			NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchFields: []corev1.NodeSelectorRequirement{
					{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn,
						Values: []string{nodeName}},
				},
			}}},
		},
		ReservedFor: []resourceapi.ResourceClaimConsumerReference{
			{Resource: "pods", Name: pod, UID: types.UID(pod + "-uid")},
		},
	}

	for i := range share {
		result := &c.Status.Allocation.Devices.Results[i]
		result.ShareID = &share[i]
		result.ConsumedCapacity = map[resourceapi.QualifiedName]apiresource.Quantity{
			claim.CapacityPorts: apiresource.MustParse("1"),
		}
	}

	if err := w.admin.Status().Update(w.t.Context(), c); err != nil {
		w.t.Fatal(err)
	}

	return c
}

// provision plays the controller: the xPU serves the Function's Port.
func (w *world) provision(c *resourceapi.ResourceClaim, function function.ID) {
	w.t.Helper()
	port := &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: c.Namespace, Name: claim.PortName(nodeName, function),
		},
		Spec: v1alpha1.XPUPortSpec{
			NodeName: nodeName, Function: claim.FunctionRef(function), XPU: "card", Network: "lab",
			MAC:       "02:00:00:00:00:01",
			Addresses: []string{"10.1.0.2/24"}, Claim: v1alpha1.ClaimRef{
				Name: c.Name, UID: c.UID, Request: "nic",
			},
		},
	}

	w.create(port)
	port.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonUp,
		LastTransitionTime: metav1.Now(),
	}}
	if err := w.admin.Status().Update(w.t.Context(), port); err != nil {
		w.t.Fatal(err)
	}
}

// wantPrepared prepares the claim. A container may get the Function only once the Function is in
// the pod.
func (w *world) wantPrepared(
	driver *kubelettest.DRADriver, c *resourceapi.ResourceClaim, function function.ID,
	attached bool,
) {
	w.t.Helper()
	got, err := driver.Prepare(w.t.Context(), c)
	device := v1alpha1.GroupName + "/function=" + string(c.UID) + "-" + function.DeviceName()
	if err != nil || len(got) != 1 || !slices.Contains(got[0].CdiDeviceIds, device) {
		w.t.Fatalf("NodePrepareResources = %v, %v, want CDI device %s", got, err, device)
	}

	files, err := cdi.NewCache(cdi.WithSpecDirs(w.config.CDIDir), cdi.WithAutoRefresh(false))
	if err != nil {
		w.t.Fatal(err)
	}

	for _, id := range got[0].CdiDeviceIds {
		if has := files.GetDevice(id) != nil; has != (attached || id != device) {
			w.t.Errorf("a CDI file has device %s: %t, attached: %t", id, has, attached)
		}
	}

	if d := files.GetDevice(device); d != nil &&
		!slices.Contains(d.ContainerEdits.Env, "XPU_INTERFACE_NIC=fast0") {
		w.t.Errorf("environment of the container is %q, want the interface's name",
			d.ContainerEdits.Env)
	}
}

func (w *world) unprepare(driver *kubelettest.DRADriver, c *resourceapi.ResourceClaim) {
	w.t.Helper()
	must.Succeed(w.t, driver.Unprepare(w.t.Context(), c))
}

// TestAgent runs an agent on a node with many Functions, from its first start on.
func TestAgent(t *testing.T) {
	w := newWorld(t,
		simulate.Config{Cards: []simulate.Card{{PFs: 4, VFs: 256, Bus: "3b"}, {PFs: 1, Bus: "c0"}}})
	w.start()
	w.eventually("1024 devices are published", func() bool { return w.devices() == 1024 })
	first := w.slices()
	if len(first) != 16 {
		t.Errorf("%d slices, want 16", len(first))
	}

	for name, slice := range first {
		if len(slice.Spec.Devices) > 64 || slice.Spec.Pool.ResourceSliceCount != 4 ||
			slice.Spec.Pool.Generation != 1 {
			t.Errorf("slice %s of pool %+v has %d devices, want up to 64 and the first "+
				"generation of 4 slices", name, slice.Spec.Pool, len(slice.Spec.Devices))
		}
	}

	w.eventually("the XPUNode says so", func() bool {
		var node v1alpha1.XPUNode
		if err := w.admin.Get(t.Context(), client.ObjectKey{Name: nodeName},
			&node); client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
		return len(node.Status.PFs) == 5 && len(node.Status.Pools) == 1 &&
			cmp.Equal(node.Status.Pools[0], v1alpha1.XPUNodePool{
				Name: "fast", ObservedGeneration: 1, Functions: 1024, Healthy: 1024,
			})
	})

	w.eventually("it is not ready without a runtime", func() bool {
		code, text := w.readyz()
		return code == http.StatusServiceUnavailable && strings.Contains(text, w.config.NRISocket)
	})

	w.startRuntime()
	w.eventually("it is ready", func() bool { code, _ := w.readyz(); return code == http.StatusOK })

	vf := function.ID{Address: w.functions("0000:3b:00.0")[7]}
	driver := w.register()
	c := w.allocate("net", vf)
	if got, err := driver.Prepare(t.Context(), c); err == nil ||
		!strings.Contains(err.Error(), "xpu-controller has not made XPUPort default/"+
			claim.PortName(nodeName, vf)) {
		t.Errorf("NodePrepareResources = %v, %v, want an error that says what is missing", got, err)
	}

	w.provision(c, vf)
	w.wantPrepared(driver, c, vf, false)
	w.wantFilesRestored(1, false)

	// The agent is restarted, and sees new VFs. It writes none of the existing slices.
	before := versions(w.slices())
	w.end()
	w.start()
	driver = w.register()
	w.wantPrepared(driver, c, vf, false)
	w.wantFilesRestored(1, true)
	if err := w.host.AddVFs("0000:c0:00.0", 8); err != nil {
		t.Fatal(err)
	}

	w.shake()
	w.eventually("the new VFs are published", func() bool { return w.devices() == 1032 })
	w.wantUntouched("the restart, and new VFs", before)
	if err := w.host.RemoveVFs("0000:c0:00.0"); err != nil {
		t.Fatal(err)
	}

	w.shake()
	w.eventually("the VFs that went are no longer published", func() bool {
		return w.devices() == 1024
	})
	w.wantUntouched("VFs that went", before)

	// A kubelet that starts deletes the slices of its node.
	for _, slice := range w.slices() {
		w.delete(&slice)
	}

	w.eventually("the slices are there again", func() bool { return w.devices() == 1024 })

	w.unprepare(driver, c)
	if files := w.cdiFiles(); len(files) != 0 {
		t.Errorf("CDI directory has %v; want nothing", files)
	}
}

// cdiFiles returns the names of the CDI files.
func (w *world) cdiFiles() (names []string) {
	w.t.Helper()
	files, err := os.ReadDir(w.config.CDIDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		w.t.Fatal(err)
	}
	for _, file := range files {
		if !strings.HasPrefix(file.Name(), ".") {
			names = append(names, file.Name())
		}
	}
	return names
}

// wantFilesRestored empties the directory of CDI files, or moves it away, and waits until the files
// are there again.
func (w *world) wantFilesRestored(number int, away bool) {
	w.t.Helper()
	before := w.cdiFiles()
	if len(before) != number {
		w.t.Fatalf("CDI directory has %q, want %d files", before, number)
	}

	if away {
		must.Succeed(w.t, os.Rename(w.config.CDIDir, filepath.Join(w.t.TempDir(), "away")))
	} else {
		for _, file := range before {
			must.Succeed(w.t, os.Remove(filepath.Join(w.config.CDIDir, file)))
		}
	}

	w.eventually("the CDI files are there again", func() bool {
		return slices.Equal(w.cdiFiles(), before)
	})
}

// functions returns the addresses of a PF's VFs, by index.
func (w *world) functions(pf pci.Address) []pci.Address {
	w.t.Helper()
	var out []pci.Address
	for _, f := range w.host.Functions() {
		if f.PF == pf && f.Index == len(out) {
			out = append(out, f.Address)
		}
	}

	if len(out) == 0 {
		w.t.Fatal(fmt.Errorf("PF %s has no VFs", pf))
	}

	return out
}

// TestPod attaches a Function to a pod and releases it, across a restart of the agent, with the
// kernel's netdevs.
func TestPod(t *testing.T) {
	pod, xpu := netns.New(t), netns.New(t)
	w := newWorld(t, simulate.Config{
		Cards: []simulate.Card{{PFs: 1, VFs: 2, Bus: "3b"}}, HostNS: "/proc/thread-self/ns/net",
		XPUNS: xpu.Path(),
	})

	sandbox := nritest.Sandbox("sandbox1", "pod1", "pod1-uid", pod.Path())
	w.startRuntime(sandbox)
	w.start()
	driver := w.register()
	vf := function.ID{Address: w.functions("0000:3b:00.0")[1]}
	c := w.allocate("pod-net", vf)
	w.provision(c, vf)

	w.eventually("the Port is known", func() bool {
		_, err := driver.Prepare(t.Context(), c)
		return err == nil
	})

	w.wantPrepared(driver, c, vf, false)
	w.eventually("the runtime is connected", func() bool {
		code, _ := w.readyz()
		return code == http.StatusOK
	})

	// The runtime may register the plugin a moment after the plugin is connected.
	w.eventually("the interface is in the pod", func() bool {
		if err := w.runtime.RunPodSandbox(t.Context(),
			&adaptation.RunPodSandboxRequest{Pod: sandbox}); err != nil {
			t.Fatal(err)
		}
		_, err := pod.Handle().LinkByName("fast0")
		return err == nil
	})

	l, err := pod.Handle().LinkByName("fast0")
	if err != nil {
		t.Fatal(err)
	}

	addresses, err := pod.Handle().AddrList(l, netlink.FAMILY_V4)
	if err != nil || len(addresses) != 1 || addresses[0].IPNet.String() != "10.1.0.2/24" ||
		l.Attrs().HardwareAddr.String() != "02:00:00:00:00:01" {
		t.Errorf("fast0 has MAC %s and addresses %v, %v; want those of the Port",
			l.Attrs().HardwareAddr, addresses, err)
	}

	w.eventually("the claim says so", func() bool {
		if err := w.admin.Get(t.Context(), client.ObjectKeyFromObject(c), c); err != nil {
			t.Fatal(err)
		}
		return len(c.Status.Devices) == 1
	})

	want := &resourceapi.NetworkDeviceData{
		InterfaceName: "fast0", HardwareAddress: "02:00:00:00:00:01", IPs: []string{"10.1.0.2/24"},
	}
	if diff := cmp.Diff(want, c.Status.Devices[0].NetworkData); diff != "" {
		t.Errorf("status of the claim: -want +got\n%s", diff)
	}

	w.wantFilesRestored(2, false)

	// The pod runs on while the agent is restarted, and its Function is taken back afterwards.
	w.end()
	w.start()
	driver = w.register()
	w.wantPrepared(driver, c, vf, true)
	w.wantFilesRestored(2, true)
	if _, err := pod.Handle().LinkByName("fast0"); err != nil {
		t.Errorf("the agent's restart took the pod's interface: %v", err)
	}

	w.unprepare(driver, c)
	if _, err := pod.Handle().LinkByName("fast0"); err == nil {
		t.Error("fast0 is still in the pod after NodeUnprepareResources")
	}

	for _, f := range w.host.Functions() {
		if f.Netdev == "" {
			continue
		}
		if _, err := netlink.LinkByName(f.Netdev); err != nil {
			t.Errorf("netdev of Function %s is not back on the host: %v", f.Address, err)
		}
	}
}
