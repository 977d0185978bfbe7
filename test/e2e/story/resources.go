// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

func (w *World) resourceSteps() []Step {
	return []Step{
		{"Pools for the device plugin beside those for claims; the kubelet counts extended " +
			"resources", w.declareResources},
		{"Pods ask for extended resources and name networks", w.runResourcePods},
		{"Packets, as before", w.exchangeResources},
		{"What an administrator sees, as before", w.inspectResourcePods},
		{
			"Both worlds on one node: by the device plugin, by a claim, and by a claim that the " +
				"scheduler writes",
			w.runBothWorlds,
		},
		{"A VF as the pods' only interface: probes, a Service and a scrape", w.runOnVFAlone},
		{"Pods are deleted, and everything is as it was", w.deleteResourcePods},
		{"xpuctl test, with extended resources", w.testByResources},
	}
}

// Pools of the device plugin, and the number of Functions that each has on a node.
const (
	poolPlain = "plain"
	poolEarly = "early"
	poolSize  = vfsOfPF / 2
)

// resourcePod is a pod that requests extended resources.
type resourcePod struct {
	name, node string
	// resources is the number of requested Functions by pool.
	resources map[string]int
	networks  []selection
	// program is the command of the probe image; "serve" if empty.
	program string
	// machineUID is the UID of the virtual machine that controls the pod; "" for none.
	machineUID types.UID
}

// selection selects a network, in the form that Multus reads.
type selection struct {
	Name      string   `json:"name"`
	Interface string   `json:"interface,omitempty"`
	IPs       []string `json:"ips,omitempty"`
	MAC       string   `json:"mac,omitempty"`
}

// definition is the part of a NetworkAttachmentDefinition that the story needs.
type definition struct{ network, pool string }

var definitions = map[string]definition{
	"blue":         {"blue", poolPlain},
	"blue-given":   {"blue", poolPlain},
	"red":          {"red", poolPlain},
	"yellow":       {"yellow", poolPlain},
	"yellow-early": {"yellow", poolEarly},
}

// resourcePods of the story: two on blue that can reach each other, one on red that cannot, one
// with two Functions of a pool on a network each, and one with Functions of two pools.
var resourcePods = []resourcePod{
	{name: "plain-1", node: "node1", resources: map[string]int{poolPlain: 1}, networks: []selection{
		{Name: "blue", IPs: []string{"10.10.0.41/24"}, MAC: "02:00:00:00:00:41"},
	}},
	onNetwork("blue", "plain-2", "node2", 42),
	onNetwork("red", "plain-red", "node2", 43),
	{name: "double", node: "node1", resources: map[string]int{poolPlain: 2}, networks: []selection{
		{Name: "blue", IPs: []string{"10.10.0.44/24"}},
		{Name: "yellow"},
	}},
	{name: "mixed", node: "node1", resources: map[string]int{poolPlain: 1, poolEarly: 1},
		networks: []selection{
			{Name: "blue", Interface: "storage", IPs: []string{"10.10.0.45/24"}},
			{Name: "yellow-early"},
		}, program: "show"},
}

// onNetwork returns a pod with one Function on network blue or red, with the address
// 10.10.0.<host>.
func onNetwork(network, name, node string, host int) resourcePod {
	return resourcePod{name: name, node: node, resources: map[string]int{poolPlain: 1},
		networks: []selection{
			{Name: network, IPs: []string{fmt.Sprintf("10.10.0.%d/24", host)}},
		}}
}

// declareResources applies an administrator's objects for the device plugin, and waits until the
// kubelets advertise it.
func (w *World) declareResources(ctx context.Context) error {
	for _, file := range []string{
		"manifests/device-plugin.yaml", "manifests/networks.yaml", "direct/pools.yaml",
	} {
		if _, err := w.Cluster.Kubectl(ctx, "apply",
			"-f", filepath.Join(w.Source, "test/e2e", file)); err != nil {
			return err
		}
	}
	return w.expectResources(ctx)
}

// expectResources waits until all Functions of the device plugin are available, and takes the
// baseline snapshot.
func (w *World) expectResources(ctx context.Context) error {
	const what = "the nodes have extended resources, and the networks are up"
	err := poll(ctx, 30*time.Second, what, func(ctx context.Context) error {
		if !w.direct {
			if err := w.networksReady(ctx); err != nil {
				return err
			}
		}
		return w.checkResources(ctx, poolSize, poolPlain, poolEarly)
	})

	if err != nil {
		return err
	}
	if err := w.describe(ctx, "node1"); err != nil {
		return err
	}

	w.baseline, err = w.snapshot(ctx)
	return err
}

// checkResources returns an error if a node does not have that many available Functions of each
// pool.
func (w *World) checkResources(ctx context.Context, want int, pools ...string) error {
	for _, node := range w.cluster.Nodes {
		if err := w.checkResourcesOf(ctx, node.Name, want, pools...); err != nil {
			return err
		}
	}
	return nil
}

func (w *World) checkResourcesOf(
	ctx context.Context, name string, want int, pools ...string,
) error {
	var node corev1.Node
	if err := w.client.Get(ctx, types.NamespacedName{Name: name}, &node); err != nil {
		return err
	}

	for _, pool := range pools {
		allocatable := node.Status.Allocatable[resourceName(pool)]
		if got := int(allocatable.Value()); got != want {
			return fmt.Errorf("%s has %d of %s to give, want %d", name,
				got, resourceName(pool), want)
		}
	}

	return nil
}

func resourceName(pool string) corev1.ResourceName {
	return corev1.ResourceName(v1alpha1.GroupName + "/" + pool)
}

// describe prints the extended resources in the output of kubectl describe for a node.
func (w *World) describe(ctx context.Context, node string) error {
	out, err := w.Cluster.Kubectl(ctx, "describe", "node", node)
	if err != nil {
		return err
	}

	section, numbers := "", map[string][]string{}
	for line := range strings.Lines(out) {
		if !strings.HasPrefix(line, " ") {
			section, _, _ = strings.Cut(strings.TrimSpace(line), ":")
		}
		if fields := strings.Fields(line); len(fields) > 1 &&
			strings.HasPrefix(fields[0], v1alpha1.GroupName+"/") {
			name := strings.TrimSuffix(fields[0], ":")
			numbers[name] = append(numbers[name], strings.ToLower(section)+" "+fields[1])
		}
	}

	for _, name := range slices.Sorted(maps.Keys(numbers)) {
		w.Detail("%s has %s: %s", node, name, strings.Join(numbers[name], ", "))
	}

	return nil
}

// pod returns the pod: one container that requests the resources, and the annotation that Multus
// reads.
func (p resourcePod) pod() (*corev1.Pod, error) {
	networks, err := json.Marshal(p.networks)
	if err != nil {
		return nil, err
	}

	pod := podSpec{name: p.name, node: p.node}.pod()
	if p.machineUID != "" {
		pod.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: "kubevirt.io/v1", Kind: "VirtualMachineInstance", Name: "vm",
			UID: p.machineUID, Controller: new(true),
		}}
	}

	pod.Annotations = map[string]string{"k8s.v1.cni.cncf.io/networks": string(networks)}
	pod.Spec.ResourceClaims = nil
	container := &pod.Spec.Containers[0]
	container.Resources = corev1.ResourceRequirements{Limits: corev1.ResourceList{}}
	for pool, count := range p.resources {
		container.Resources.Limits[resourceName(pool)] = *resource.NewQuantity(int64(count),
			resource.DecimalSI)
	}

	if p.program != "" {
		container.Args = []string{p.program}
	}

	return pod, nil
}

// runResourcePods starts the pods one after the other, so that each is timed alone, and shows what
// each got.
func (w *World) runResourcePods(ctx context.Context) error {
	for _, p := range resourcePods {
		if err := w.startResourcePod(ctx, p); err != nil {
			return err
		}
	}
	return w.describe(ctx, "node1")
}

// startResourcePod starts a pod, waits for it, and checks what it got.
func (w *World) startResourcePod(ctx context.Context, p resourcePod) error {
	pod, err := p.pod()
	if err != nil {
		return err
	}

	begin := time.Now()
	// The baseline may be reached while the API server still has a pod of the same name.
	err = poll(ctx, 30*time.Second, "pod "+p.name+" is made", func(ctx context.Context) error {
		return w.client.Create(ctx, pod)
	})
	if err != nil {
		return err
	}
	if err := w.waitForPod(ctx, p.name); err != nil {
		return err
	}

	took := time.Since(begin).Round(time.Millisecond)
	attached, err := w.networkStatuses(ctx, p)
	if err != nil {
		return err
	}

	w.Detail("%s on %s: Ready %s", p.name, p.node, took)
	devices := map[string][]string{}
	for i, a := range attached {
		d := definitions[p.networks[i].Name]
		address := a.DeviceInfo.PCI.Address
		devices[d.pool] = append(devices[d.pool], address)
		port, err := w.portOf(ctx, p, a, d)
		if err != nil {
			return err
		}
		w.Detail("  %s on %s: VF %s of pool %s%s, %s %s",
			a.Interface, d.network, address, d.pool, port, strings.Join(a.IPs, " "), a.MAC)
	}

	return w.checkEnvironment(ctx, p, devices)
}

// status is the status of a network in the annotation that Multus writes.
type status struct {
	Name       string     `json:"name"`
	Interface  string     `json:"interface"`
	IPs        []string   `json:"ips"`
	MAC        string     `json:"mac"`
	DeviceInfo deviceInfo `json:"device-info"`
}

// deviceInfo is the information of the device plugin or CNI plugin about the device of an
// interface.
type deviceInfo struct {
	Type    string `json:"type"`
	Version string `json:"version"`
	PCI     struct {
		Address   string `json:"pci-address"`
		PFAddress string `json:"pf-pci-address"`
	} `json:"pci"`
}

// networkStatuses returns and checks Multus's status of a pod's networks, in the order in which the
// pod lists them.
func (w *World) networkStatuses(ctx context.Context, p resourcePod) ([]status, error) {
	var pod corev1.Pod
	if err := w.client.Get(ctx, types.NamespacedName{Namespace: "default", Name: p.name},
		&pod); err != nil {
		return nil, err
	}

	text := pod.Annotations["k8s.v1.cni.cncf.io/network-status"]
	var all []status
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, fmt.Errorf("pod %s: network-status %q: %w", p.name, text, err)
	}
	if len(all) != len(p.networks)+1 {
		return nil, fmt.Errorf("pod %s: network-status has %d networks, want eth0 and %d more: %s",
			p.name, len(all), len(p.networks), text)
	}

	for i, s := range all[1:] {
		if err := s.check(p.networks[i], i); err != nil {
			return nil, fmt.Errorf("pod %s: network-status: network %d %w: %s", p.name,
				i+1, err, text)
		}
	}

	return all[1:], nil
}

// check compares the status with the pod's selection number index.
func (s status) check(asked selection, index int) error {
	name := asked.Interface
	if name == "" {
		name = fmt.Sprintf("net%d", index+1)
	}

	var addresses []string
	for _, prefix := range asked.IPs {
		address, _, _ := strings.Cut(prefix, "/")
		addresses = append(addresses, address)
	}

	switch {
	case s.Name != "default/"+asked.Name:
		return fmt.Errorf("is %s, want default/%s", s.Name, asked.Name)
	case s.Interface != name:
		return fmt.Errorf("is interface %s, want %s", s.Interface, name)
	case addresses != nil && !slices.Equal(s.IPs, addresses):
		return fmt.Errorf("has addresses %q, want %q", s.IPs, addresses)
	case len(s.IPs) == 0:
		return errors.New("has no address")
	case s.MAC == "" || asked.MAC != "" && s.MAC != asked.MAC:
		return fmt.Errorf("has MAC %q, want %q", s.MAC, asked.MAC)
	case !s.DeviceInfo.complete():
		return fmt.Errorf("has device-info %+v, want a PCI device of version 1.1.0 with its PF",
			s.DeviceInfo)
	}

	return nil
}

func (d deviceInfo) complete() bool {
	return d.Type == "pci" && d.Version == "1.1.0" && d.PCI.Address != "" && d.PCI.PFAddress != ""
}

// portOf checks the XPUPort of a pod's interface and returns its name on the xPU. In direct mode
// there is no XPUPort.
func (w *World) portOf(ctx context.Context, p resourcePod, s status, d definition) (string, error) {
	if w.direct {
		return "", nil
	}

	function := function.ID{Address: pci.Address(s.DeviceInfo.PCI.Address)}
	var port v1alpha1.XPUPort
	key := types.NamespacedName{Namespace: namespace, Name: claim.PortName(p.node, function)}
	if err := w.client.Get(ctx, key, &port); err != nil {
		return "", err
	}

	podName := ""
	if port.Spec.Pod != nil {
		podName = port.Spec.Pod.Name
	}

	switch {
	case port.Spec.Network != d.network || port.Spec.NodeName != p.node:
		return "", fmt.Errorf("pod %s: XPUPort %s is on network %s of %s",
			p.name, port.Name, port.Spec.Network, port.Spec.NodeName)
	case port.Spec.MAC != s.MAC:
		return "", fmt.Errorf("pod %s: MAC %s, but the xPU expects %s", p.name, s.MAC,
			port.Spec.MAC)
	case podName != p.name && d.pool != poolEarly:
		return "", fmt.Errorf("pod %s: XPUPort %s is for pod %q", p.name, port.Name, podName)
	}

	return ", port " + port.Status.BridgePort, nil
}

// checkEnvironment checks the variables that name the devices, for a pod that prints its
// environment.
func (w *World) checkEnvironment(
	ctx context.Context, p resourcePod, devices map[string][]string,
) error {
	if p.program != "show" {
		return nil
	}

	var want []string
	for _, pool := range slices.Sorted(maps.Keys(devices)) {
		want = append(want, "PCIDEVICE_XPU_OPIPROJECT_ORG_"+strings.ToUpper(pool)+"="+
			strings.Join(devices[pool], ","))
	}

	// A pod is Ready when its container has started, which may be before the program prints.
	err := poll(ctx, time.Minute, "pod "+p.name+" prints its environment",
		func(ctx context.Context) error {
			logs, err := w.Cluster.Kubectl(ctx, "logs", p.name)
			if err != nil {
				return err
			}
			for _, line := range want {
				if !strings.Contains(logs, line+"\n") {
					return fmt.Errorf("no %s in\n%s", line, logs)
				}
			}
			return nil
		})
	if err != nil {
		return err
	}

	for _, line := range want {
		w.Detail("  %s", line)
	}
	return nil
}

// exchangeResources checks connectivity between the pods.
func (w *World) exchangeResources(ctx context.Context) error {
	double, err := w.networkStatuses(ctx, resourcePods[3])
	if err != nil {
		return err
	}

	tries := []struct {
		connectivityCheck
		address string
	}{
		{connectivityCheck{"plain-1", "plain-2", true}, "10.10.0.42"},
		{connectivityCheck{"plain-2", "plain-1", true}, "10.10.0.41"},
		{connectivityCheck{"double", "plain-2", true}, "10.10.0.42"},
		{connectivityCheck{"mixed", "plain-2", true}, "10.10.0.42"},
		{connectivityCheck{"mixed", "double", true}, double[1].IPs[0]},
		{connectivityCheck{"plain-red", "plain-1", false}, "10.10.0.41"},
		{connectivityCheck{"plain-red", "plain-2", false}, "10.10.0.42"},
	}

	group, ctx := errgroup.WithContext(ctx)
	for _, t := range tries {
		group.Go(func() error { return w.checkConnectivity(ctx, t.connectivityCheck, t.address) })
	}

	return group.Wait()
}

// runBothWorlds runs pods that got their Functions in each way on one node, and checks that all
// reach a pod on the other node and that they share no Function.
func (w *World) runBothWorlds(ctx context.Context) error {
	const byClass = "by-class"
	if err := w.createPodWithClaims(ctx, "by-claim", "node1",
		`"network": "blue", "addresses": ["10.10.0.52/24"]`); err != nil {
		return err
	}

	byPlugin := resourcePod{
		name: "by-plugin", node: "node1", resources: map[string]int{poolPlain: 1},
		networks: []selection{{Name: "blue-given"}},
	}
	if err := w.startResourcePod(ctx, byPlugin); err != nil {
		return err
	}

	attached, err := w.networkStatuses(ctx, byPlugin)
	if err != nil {
		return err
	}
	if err := w.waitForPod(ctx, "by-claim"); err != nil {
		return err
	}

	addresses := map[string]string{"by-claim": "10.10.0.52", byPlugin.name: attached[0].IPs[0]}
	var class resourceapi.DeviceClass
	if err := w.client.Get(ctx, types.NamespacedName{Name: "xpu-fast-blue"}, &class); err != nil {
		return err
	}

	if class.Spec.ExtendedResourceName == nil {
		w.Detail("the cluster lacks feature gate DRAExtendedResource: no claim is written for " +
			"extended resources")
	} else if addresses[byClass], err = w.runByClass(ctx, byClass); err != nil {
		return err
	}

	if err := w.checkNoSharedFunctions(ctx); err != nil {
		return err
	}

	for pod, address := range addresses {
		if err := w.checkConnectivity(ctx, connectivityCheck{"plain-2", pod, true},
			address); err != nil {
			return err
		}
	}

	return nil
}

// runByClass starts a pod with an extended resource for which the scheduler creates a claim.
func (w *World) runByClass(ctx context.Context, name string) (address string, err error) {
	pod := podSpec{name: name, node: "node1"}.pod()
	pod.Spec.ResourceClaims = nil
	pod.Spec.Containers[0].Resources = corev1.ResourceRequirements{
		Limits: corev1.ResourceList{resourceName("fast"): resource.MustParse("1")},
	}
	if err := w.client.Create(ctx, pod); err != nil {
		return "", err
	}
	if err := w.waitForPod(ctx, name); err != nil {
		return "", err
	}

	return w.addressByClass(ctx, name)
}

// addressByClass returns the address of a pod whose claim the scheduler created.
func (w *World) addressByClass(ctx context.Context, name string) (address string, err error) {
	what := "pod " + name + " has an address in the status of its claim"
	err = poll(ctx, 10*time.Second, what, func(ctx context.Context) error {
		var pod corev1.Pod
		if err := w.client.Get(ctx, types.NamespacedName{Namespace: "default", Name: name},
			&pod); err != nil {
			return err
		}
		if pod.Status.ExtendedResourceClaimStatus == nil {
			return errors.New("it has no claim")
		}

		var c resourceapi.ResourceClaim
		key := types.NamespacedName{
			Namespace: "default", Name: pod.Status.ExtendedResourceClaimStatus.ResourceClaimName,
		}
		if err := w.client.Get(ctx, key, &c); err != nil {
			return err
		}
		if len(c.Status.Devices) != 1 {
			return fmt.Errorf("claim %s has devices %+v", c.Name, c.Status.Devices)
		}

		device := c.Status.Devices[0]
		data := device.NetworkData
		if data == nil || len(data.IPs) == 0 {
			return fmt.Errorf("claim %s has device %+v", c.Name, device)
		}

		w.Detail("%s on node1: claim %s, VF %s, %s %s",
			name, c.Name, device.Device, data.InterfaceName, strings.Join(data.IPs, " "))
		address, _, _ = strings.Cut(data.IPs[0], "/")

		return nil
	})

	return address, err
}

// checkNoSharedFunctions checks that no Function is allocated twice: each pod has its own XPUPort
// for each of its interfaces.
func (w *World) checkNoSharedFunctions(ctx context.Context) error {
	var ports v1alpha1.XPUPortList
	if err := w.client.List(ctx, &ports); err != nil {
		return err
	}

	owners := map[string]string{}
	for _, port := range ports.Items {
		key := port.Spec.NodeName + "/" + claim.FunctionOf(port.Spec.Function).String()
		if other := owners[key]; other != "" {
			return fmt.Errorf("Function %s has two XPUPorts: %s and %s/%s", key, other,
				port.Namespace, port.Name)
		}
		owners[key] = port.Namespace + "/" + port.Name
	}

	w.Detail("%d Functions in use, each once", len(owners))
	return nil
}

// deleteResourcePods deletes all pods and waits for the baseline.
func (w *World) deleteResourcePods(ctx context.Context) error {
	begin := time.Now()
	if err := w.client.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace("default")); err != nil {
		return err
	}

	if !w.direct {
		if err := w.client.DeleteAllOf(ctx, &resourceapi.ResourceClaim{},
			client.InNamespace("default")); err != nil {
			return err
		}
	}

	if err := w.waitForBaseline(ctx); err != nil {
		return err
	}

	w.Detail("after %s: VFs back in their nodes with name, MAC and MTU; bridge ports, journals' "+
		"entries and addresses gone",
		time.Since(begin).Round(time.Millisecond))

	return nil
}

// endResourcePods deletes pods and waits for the baseline.
func (w *World) endResourcePods(ctx context.Context, names ...string) error {
	for _, name := range names {
		if err := w.deletePod(ctx, name); err != nil {
			return err
		}
	}
	return w.waitForBaseline(ctx)
}
