// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

func (w *World) claimTrouble() []Step {
	return []Step{
		{"Parameters that cannot be: the API server or the pod's events name the field",
			w.refuseParameters},
		{"A network that is not there yet: the pod waits, and starts when it is made",
			w.waitForNetwork},
		{"Two interfaces in one pod: two claims work, the same name twice is refused",
			w.twoInterfaces},
		{"A monitoring pod sees Functions that others have, and takes none", w.monitorAll},
		{"A GPU of another driver and a VF below one PCIe root", w.gpuBesideVF},
		{"A DevicePool that matches nothing, and one that overlaps: the status says so",
			w.poolStatus},
		{"An OPI agent that is down: the pod waits, and starts when it is back", w.waitForAgent},
		{"An OPI agent that forgets its ports: they come back, and the packets with them",
			w.forgetPorts},
		{"An xPU that refuses a Function: it is tainted, and the scheduler takes another before " +
			"the pod binds", w.refuseFunction},
		{"Ports made ahead: pods take them one after the other, and none waits for binding " +
			"conditions", w.takePortsMadeAhead},
		{"Agent, kubelet and runtime restart under a running pod, and the product is upgraded: " +
			"it is not disturbed, and what comes after works", w.restartUnderPods},
		{"Agents killed while pods come and go: nothing leaks", w.killAgents},
		{"VFs that vanish and return: the slices follow within a second", w.hotplug},
		{"A card that resets under a running pod: it has its interface again, and packets go on",
			w.resetUnderClaim},
	}
}

// createPodWithClaims creates a pod on a node with a claim for each set of parameters, which are
// fields of an InterfaceConfig in JSON.
func (w *World) createPodWithClaims(
	ctx context.Context, name, node string, parameters ...string,
) error {
	return w.createPodWithClaimsOfClass(ctx, "xpu-fast", name, node, parameters...)
}

// createPodWithClaimsOfClass is like createPodWithClaims, with a DeviceClass.
func (w *World) createPodWithClaimsOfClass(
	ctx context.Context, class, name, node string, parameters ...string,
) error {
	pod, err := w.buildPodWithClaims(ctx, class, name, node, parameters...)
	if err != nil {
		return err
	}
	return w.client.Create(ctx, pod)
}

// buildPodWithClaims creates the claims of a pod, and returns the pod for the caller to create.
func (w *World) buildPodWithClaims(
	ctx context.Context, class, name, node string, parameters ...string,
) (*corev1.Pod, error) {
	pod := podSpec{name: name, node: node, template: ""}.pod()
	pod.Spec.ResourceClaims, pod.Spec.Containers[0].Resources.Claims = nil, nil
	for i, fields := range parameters {
		claim := &resourceapi.ResourceClaim{}
		claim.Namespace, claim.Name = "default", fmt.Sprintf("%s-nic-%d", name, i)
		claim.Spec.Devices = resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{
				{Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class}},
			},
			Config: []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver: v1alpha1.GroupName,
				// Neither sorted nor compact: the text of a user's client must be kept unchanged.
				Parameters: runtime.RawExtension{
					Raw: []byte(
						`{"kind": "InterfaceConfig", "apiVersion": "xpu.opiproject.org/v1alpha1", ` + fields + `}`,
					),
				},
			}}}},
		}

		if err := w.client.Create(ctx, claim); err != nil {
			return nil, err
		}

		reference := fmt.Sprintf("nic-%d", i)
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims,
			corev1.PodResourceClaim{Name: reference, ResourceClaimName: &claim.Name})
		pod.Spec.Containers[0].Resources.Claims = append(pod.Spec.Containers[0].Resources.Claims,
			corev1.ResourceClaim{Name: reference})
	}

	return pod, nil
}

// deletePodsAndWait deletes pods with their claims and waits for the baseline.
func (w *World) deletePodsAndWait(ctx context.Context, names ...string) error {
	for _, name := range names {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
		if err := w.client.Delete(ctx, pod); client.IgnoreNotFound(err) != nil {
			return err
		}
	}

	if err := w.client.DeleteAllOf(ctx, &resourceapi.ResourceClaim{},
		client.InNamespace("default")); err != nil {
		return err
	}

	return w.waitForBaseline(ctx)
}

// startTime is how long a pod may take until it is ready. While a machine has much other work,
// Multus' own requests run out of time, and the kubelet makes the sandbox again, with longer and
// longer pauses. goneTime is how long the kubelet may take to end a pod: on such a machine it was
// seen to take 24 s after the agent had released the pod's Function.
const startTime, goneTime = 4 * time.Minute, 90 * time.Second

// waitForPod waits until a pod is ready.
func (w *World) waitForPod(ctx context.Context, name string) error {
	err := poll(ctx, startTime, "pod "+name+" is Ready", func(ctx context.Context) error {
		var pod corev1.Pod
		if err := w.client.Get(ctx, types.NamespacedName{Namespace: "default", Name: name},
			&pod); err != nil {
			return err
		}
		if !podReady(pod) {
			return fmt.Errorf("it is %s", pod.Status.Phase)
		}
		return nil
	})

	if err != nil {
		return errors.Join(err, w.explain(ctx, name))
	}

	return nil
}

func podReady(pod corev1.Pod) bool {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return false
}

// waitForEvent waits until an event of the pod contains all these words.
func (w *World) waitForEvent(ctx context.Context, pod string, words ...string) error {
	return poll(ctx, 45*time.Second, fmt.Sprintf("an event of pod %s tells of %q", pod, words),
		func(ctx context.Context) error {
			var events corev1.EventList
			if err := w.client.List(ctx, &events, client.InNamespace("default")); err != nil {
				return err
			}

			var messages []string
			for _, event := range events.Items {
				if event.InvolvedObject.Kind != "Pod" || event.InvolvedObject.Name != pod {
					continue
				}
				messages = append(messages, event.Reason+": "+event.Message)
				if containsAll(event.Message, words) {
					w.Detail("%s: %s", pod, event.Message)
					return nil
				}
			}

			return fmt.Errorf("its events are:\n%s", strings.Join(messages, "\n"))
		})
}

func containsAll(text string, words []string) bool {
	for _, word := range words {
		if !strings.Contains(text, word) {
			return false
		}
	}
	return true
}

// refuseParameters has wrong parameters refused: by the API server when the claim is written, or by
// the agent when the pod starts.
func (w *World) refuseParameters(ctx context.Context) error {
	for fields, words := range map[string][]string{
		`"network": "blue", "mtuu": 9000`:     {"config[0].opaque.parameters", `unknown field "mtuu"`},
		`"network": "blue", "mtu": "large"`:   {"config[0].opaque.parameters.mtu"},
		`"interfaceName": "sixteen-bytes-xx"`: {"config[0].opaque.parameters.interfaceName", "15 bytes"},
	} {
		err := w.createPodWithClaims(ctx, "wrong", "node1", fields)
		if !apierrors.IsInvalid(err) || !containsAll(err.Error(), words) {
			return fmt.Errorf("a claim with %s: error %w, want %q", fields, err, words)
		}
		w.Detail("%v", err)
	}

	cases := []struct {
		pod, fields string
		words       []string
	}{
		{"taken-name", `"network": "blue", "interfaceName": "eth0"`, []string{"eth0", "taken"}},
		{"outside", `"network": "blue", "addresses": ["192.168.3.4/24"]`,
			[]string{"192.168.3.4", "10.10.0.0/24", "blue"}},
	}

	var names []string
	for _, c := range cases {
		names = append(names, c.pod)
		if err := w.createPodWithClaims(ctx, c.pod, "node1", c.fields); err != nil {
			return err
		}
	}

	for _, c := range cases {
		if err := w.waitForEvent(ctx, c.pod, c.words...); err != nil {
			return err
		}
	}

	return w.deletePodsAndWait(ctx, names...)
}

func (w *World) waitForNetwork(ctx context.Context) error {
	if err := w.createPodWithClaims(ctx, "green-1", "node1", `"network": "green"`); err != nil {
		return err
	}
	if err := w.waitForEvent(ctx, "green-1", "green", "not exist"); err != nil {
		return err
	}

	green := &v1alpha1.XPUNetwork{
		ObjectMeta: metav1.ObjectMeta{Name: "green"}, Spec: v1alpha1.XPUNetworkSpec{
			VLAN: 30, AllowedNamespaces: v1alpha1.AllowedNamespaces{
				From: v1alpha1.NamespacesFromAll,
			}, VNI: ptr.To(int32(10030)), Subnets: []string{"10.30.0.0/24"},
		},
	}

	if err := w.client.Create(ctx, green); err != nil {
		return err
	}
	if err := w.waitForPod(ctx, "green-1"); err != nil {
		return err
	}
	if err := w.deletePodsAndWait(ctx, "green-1"); err != nil {
		return err
	}
	if err := w.client.Delete(ctx, green); err != nil {
		return err
	}

	return poll(ctx, 20*time.Second, "XPUNetwork green is gone", func(ctx context.Context) error {
		if err := w.client.Get(ctx, types.NamespacedName{Name: "green"},
			green); !apierrors.IsNotFound(err) {
			return errors.Join(errors.New("it is still there"), err)
		}
		return nil
	})
}

func (w *World) twoInterfaces(ctx context.Context) error {
	if err := w.createPodWithClaims(ctx, "two", "node1",
		`"network": "blue", "interfaceName": "storage"`,
		`"network": "red"`); err != nil {
		return err
	}
	if err := w.createPodWithClaims(ctx, "twice", "node2",
		`"network": "blue", "interfaceName": "data"`,
		`"network": "red", "interfaceName": "data"`); err != nil {
		return err
	}
	if err := w.waitForPod(ctx, "two"); err != nil {
		return err
	}
	if err := w.interfaces(ctx, "two", "net1", "storage"); err != nil {
		return err
	}
	if err := w.waitForEvent(ctx, "twice", "data", "same pod"); err != nil {
		return err
	}

	return w.deletePodsAndWait(ctx, "two", "twice")
}

// interfaces checks the names in the status of a pod's claims.
func (w *World) interfaces(ctx context.Context, pod string, want ...string) error {
	var names []string
	for i := range want {
		var claim resourceapi.ResourceClaim
		if err := w.client.Get(ctx, types.NamespacedName{
			Namespace: "default", Name: fmt.Sprintf("%s-nic-%d", pod, i),
		}, &claim); err != nil {
			return err
		}

		for _, device := range claim.Status.Devices {
			names = append(names, device.NetworkData.InterfaceName)
		}
	}

	slices.Sort(names)
	if !slices.Equal(names, want) {
		return fmt.Errorf("pod %s has interfaces %q, want %q", pod, names, want)
	}

	w.Detail("%s has %s", pod, strings.Join(names, " and "))
	return nil
}

func (w *World) poolStatus(ctx context.Context) error {
	nothing := &v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: "nothing"},
		Spec: v1alpha1.DevicePoolSpec{
			Selectors: []v1alpha1.FunctionSelector{{PFNames: []string{"no-such-pf"}}},
		}}

	overlapping := &v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: "overlapping"},
		Spec: v1alpha1.DevicePoolSpec{
			Selectors: []v1alpha1.FunctionSelector{{PFNames: []string{"enp59s0f0#0-1"}}},
		}}

	reasons := map[string]string{
		"nothing": v1alpha1.ReasonNoFunctions, "overlapping": v1alpha1.ReasonOverlap,
	}
	if err := errors.Join(w.client.Create(ctx, nothing),
		w.client.Create(ctx, overlapping)); err != nil {
		return err
	}

	for name, reason := range reasons {
		err := poll(ctx, 10*time.Second, "DevicePool "+name+" is not Ready with reason "+reason,
			func(ctx context.Context) error {
				var pool v1alpha1.DevicePool
				if err := w.client.Get(ctx, types.NamespacedName{Name: name}, &pool); err != nil {
					return err
				}

				condition := meta.FindStatusCondition(pool.Status.Conditions,
					v1alpha1.ConditionReady)
				if condition == nil || condition.Status != metav1.ConditionFalse ||
					condition.Reason != reason {
					return fmt.Errorf("its condition is %+v", condition)
				}

				w.Detail("%s: %s", name, condition.Message)
				return nil
			})
		if err != nil {
			return err
		}
	}

	if err := errors.Join(w.client.Delete(ctx, nothing),
		w.client.Delete(ctx, overlapping)); err != nil {
		return err
	}

	return w.waitForBaseline(ctx)
}

func (w *World) waitForAgent(ctx context.Context) error {
	x := w.xpus[0]
	if err := w.stopProcess(ctx, "opi-bridge-"+x.node.Name, syscall.SIGKILL); err != nil {
		return err
	}
	if err := w.createPodWithClaims(ctx, "patient", x.node.Name, `"network": "blue"`); err != nil {
		return err
	}
	if err := w.waitForEvent(ctx, "patient", "xpu-1"); err != nil {
		return err
	}
	if err := w.startBridge(ctx, x); err != nil {
		return err
	}
	if err := w.waitForPod(ctx, "patient"); err != nil {
		return err
	}

	return w.deletePodsAndWait(ctx, "patient")
}

// startClaimedPeerPods starts two pods with claims on two nodes and one network: steady has
// 10.10.0.21, witness 10.10.0.22.
func (w *World) startClaimedPeerPods(ctx context.Context) error {
	err := errors.Join(
		w.createPodWithClaims(ctx, "steady", "node1",
			`"network": "blue", "addresses": ["10.10.0.21/24"]`),
		w.createPodWithClaims(ctx, "witness", "node2",
			`"network": "blue", "addresses": ["10.10.0.22/24"]`),
	)
	if err != nil {
		return err
	}
	return errors.Join(w.waitForPod(ctx, "steady"), w.waitForPod(ctx, "witness"))
}

// forgetPorts reboots a card while pods communicate.
func (w *World) forgetPorts(ctx context.Context) error {
	if err := w.startClaimedPeerPods(ctx); err != nil {
		return err
	}

	reaches := connectivityCheck{"steady", "witness", true}
	if err := w.checkConnectivity(ctx, reaches, "10.10.0.22"); err != nil {
		return err
	}
	if err := w.rebootCard(ctx, w.xpus[0]); err != nil {
		return err
	}

	err := poll(ctx, 60*time.Second, "steady reaches witness again",
		func(ctx context.Context) error {
			return w.checkConnectivity(ctx, reaches, "10.10.0.22")
		})
	if err != nil {
		return err
	}

	return w.deletePodsAndWait(ctx, "steady", "witness")
}

// refuseFunction removes the representor of the first VF, by its name, from the OPI agent.
func (w *World) refuseFunction(ctx context.Context) error {
	x := w.xpus[1]
	const refusedDevice, representor, portID = "0000-3b-03-0", "pf1vf0", "vf-0000-3b-03-0"
	link, err := x.links.LinkByName(representor)
	if err != nil {
		return err
	}
	if err := x.links.LinkDelAltName(link, portID); err != nil {
		return err
	}
	if err := w.createPodWithClaimsOfClass(ctx, "xpu-careful", "choosy", x.node.Name,
		`"network": "blue"`); err != nil {
		return err
	}
	if err := w.waitForEvent(ctx, "choosy", portID); err != nil {
		return err
	}
	if err := w.waitForPod(ctx, "choosy"); err != nil {
		return err
	}

	var claim resourceapi.ResourceClaim
	if err := w.client.Get(ctx, types.NamespacedName{Namespace: "default", Name: "choosy-nic-0"},
		&claim); err != nil {
		return err
	}

	device := claim.Status.Allocation.Devices.Results[0].Device
	if device == refusedDevice {
		return fmt.Errorf("pod choosy has Function %s, which the xPU refused", device)
	}

	w.Detail("choosy got %s in place of %s", device, refusedDevice)
	if err := x.links.LinkAddAltName(link, portID); err != nil {
		return err
	}

	return w.deletePodsAndWait(ctx, "choosy")
}

func (w *World) restartUnderPods(ctx context.Context) error {
	if err := w.startClaimedPeerPods(ctx); err != nil {
		return err
	}

	for _, restart := range []struct {
		what string
		do   func() error
	}{
		{"xpu-agent", func() error { return w.killAgent(ctx, "node1") }},
		{"kubelet", func() error {
			_, err := w.Cluster.Run(ctx, "node restart-kubelet", "node1")
			return err
		}},
		{"container runtime", func() error {
			_, err := w.Cluster.Run(ctx, "node restart-runtime", "node1")
			return err
		}},
		{"product, by an upgrade", func() error { return w.upgrade(ctx, 0) }},
	} {
		if err := restart.do(); err != nil {
			return fmt.Errorf("restart of the %s: %w", restart.what, err)
		}
		if err := w.checkConnectivity(ctx, connectivityCheck{"witness", "steady", true},
			"10.10.0.21"); err != nil {
			return fmt.Errorf("while the %s restarts: %w", restart.what, err)
		}
		if err := w.waitForProduct(ctx); err != nil {
			return fmt.Errorf("after a restart of the %s: %w", restart.what, err)
		}
		if err := w.createPodWithClaims(ctx, "after", "node1", `"network": "blue"`); err != nil {
			return err
		}
		if err := w.waitForPod(ctx, "after"); err != nil {
			return fmt.Errorf("after a restart of the %s: %w", restart.what, err)
		}
		if err := w.checkConnectivity(ctx, connectivityCheck{"witness", "steady", true},
			"10.10.0.21"); err != nil {
			return fmt.Errorf("after a restart of the %s: %w", restart.what, err)
		}
		if err := w.removePod(ctx, "after"); err != nil {
			return fmt.Errorf("after a restart of the %s: %w", restart.what, err)
		}

		w.Detail("%s restarted", restart.what)
	}

	return w.deletePodsAndWait(ctx, "steady", "witness")
}

// killAgents kills the agents at moments when pods are starting and ending.
func (w *World) killAgents(ctx context.Context) error {
	for n, delay := range []time.Duration{
		50 * time.Millisecond, 200 * time.Millisecond, 400 * time.Millisecond,
	} {
		name := fmt.Sprintf("hurried-%d", n)
		if err := w.createPodWithClaims(ctx, name, "node1", `"network": "blue"`); err != nil {
			return err
		}
		if err := w.killAfter(ctx, delay); err != nil {
			return err
		}
		if err := w.waitForPod(ctx, name); err != nil {
			return fmt.Errorf("agent killed %s after the pod was made: %w", delay, err)
		}

		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
		if err := w.client.Delete(ctx, pod); err != nil {
			return err
		}
		if err := w.killAfter(ctx, delay); err != nil {
			return err
		}
		if err := w.deletePodsAndWait(ctx, name); err != nil {
			return fmt.Errorf("agent killed %s after the pod was deleted: %w", delay, err)
		}

		w.Detail("agent killed %s into start and end of a pod", delay)
	}
	return nil
}

func (w *World) killAfter(ctx context.Context, delay time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(delay): // a fixed moment, whatever has happened by then
	}
	return w.killAgent(ctx, "node1")
}

// numVFsOf returns the sriov_numvfs file of a PF on node1.
func (w *World) numVFsOf(pf string) string {
	return filepath.Join(w.cluster.Nodes[0].Root, "var/lib/simhost/sys/bus/pci/devices", pf,
		"sriov_numvfs")
}

// resetCard removes all VFs of node1's PFs, also from pods, and creates them again, like a reset
// does.
func (w *World) resetCard(ctx context.Context) error {
	for _, pf := range []string{"0000:3b:00.0", "0000:3b:00.1"} {
		file := w.numVFsOf(pf)
		if err := os.WriteFile(file, []byte("0"), 0o644); err != nil {
			return err
		}

		err := poll(ctx, 5*time.Second, "PF "+pf+" has no VFs", func(context.Context) error {
			if _, err := os.Lstat(filepath.Join(filepath.Dir(file), "virtfn0")); !errors.Is(err,
				fs.ErrNotExist) {
				return errors.Join(errors.New("VF 0 is there"), err)
			}
			return nil
		})

		if err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte(strconv.Itoa(vfsOfPF)), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// resetUnderClaim resets the card of a pod with a claim. The pod on the other node must be able to
// reach it afterwards.
func (w *World) resetUnderClaim(ctx context.Context) error {
	if err := w.startClaimedPeerPods(ctx); err != nil {
		return err
	}

	reaches := connectivityCheck{"witness", "steady", true}
	if err := w.checkConnectivity(ctx, reaches, "10.10.0.21"); err != nil {
		return fmt.Errorf("before the reset: %w", err)
	}

	begin := time.Now()
	if err := w.resetCard(ctx); err != nil {
		return err
	}
	if err := w.waitForEvent(ctx, "steady", "is in the pod again"); err != nil {
		return err
	}

	err := poll(ctx, 20*time.Second, "packets go on", func(ctx context.Context) error {
		return w.checkConnectivity(ctx, reaches, "10.10.0.21")
	})
	if err != nil {
		return err
	}

	w.Detail("packets go on %s after the card was reset", time.Since(begin).Round(time.Millisecond))
	return w.deletePodsAndWait(ctx, "steady", "witness")
}

func (w *World) hotplug(ctx context.Context) error {
	for _, step := range []struct {
		numVFs  string
		devices int
	}{{"0", 24}, {strconv.Itoa(vfsOfPF), 32}} {
		begin := time.Now()
		if err := os.WriteFile(w.numVFsOf("0000:3b:00.1"), []byte(step.numVFs), 0o644); err != nil {
			return err
		}

		err := poll(ctx, 5*time.Second, fmt.Sprintf("%d devices are published", step.devices),
			func(ctx context.Context) error {
				return w.devicesPublished(ctx, step.devices)
			})
		if err != nil {
			return err
		}

		w.Detail("sriov_numvfs = %s: slices right after %s", step.numVFs,
			time.Since(begin).Round(time.Millisecond))
	}
	return nil
}
