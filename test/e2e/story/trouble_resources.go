// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

func (w *World) resourceTrouble() []Step {
	return []Step{
		{
			"Kubelet restarted 10 times in a row, then the agent killed 10 times: pods are not " +
				"disturbed, nothing leaks",
			w.restartTenTimes,
		},
		{"Agents killed while pods come and go: nothing leaks", w.killAgentsOfResources},
		{"Agents away while pods are deleted: what xpu-cni spooled is done when they are back",
			w.deleteWithoutAgents},
		{"An OPI agent that is away: its Functions are not offered until it is back", w.xpuAway},
		{
			"A pool that moves from the device plugin to claims under a running pod: no Function " +
				"is given twice",
			w.movePool,
		},
		{"Multus and a claim: xpu-cni attaches the claim's Function", w.claimByMultus},
		{"A virtual machine that is migrated: it keeps MAC address, addresses and network",
			w.migrate},
		{"A card that resets under a running pod: it has its interface again, and packets go on",
			w.resetUnderResource},
	}
}

// directTrouble has what differs from the act with the controller: the agent calls OPI agents itself.
func (w *World) directTrouble() []Step {
	return []Step{
		{"Agents killed while pods come and go: nothing leaks", w.killAgentsOfResources},
		{"Agents away while pods are deleted: what xpu-cni spooled is done when they are back",
			w.deleteWithoutAgents},
		{"An OPI agent that is away: its Functions are not offered until it is back", w.xpuAway},
		{"An OPI agent that forgets its ports: they come back, and the packets with them",
			w.forgetPortsOfResources},
	}
}

// resetUnderResource resets the card of a pod with a Function from the device plugin.
func (w *World) resetUnderResource(ctx context.Context) error {
	if err := w.startPeerPods(ctx); err != nil {
		return err
	}
	if err := w.checkPeerConnectivity(ctx); err != nil {
		return fmt.Errorf("before the reset: %w", err)
	}

	begin := time.Now()
	if err := w.resetCard(ctx); err != nil {
		return err
	}
	if err := poll(ctx, 20*time.Second, "packets go on", w.checkPeerConnectivity); err != nil {
		return err
	}

	w.Detail("packets go on %s after the card was reset", time.Since(begin).Round(time.Millisecond))
	return w.endResourcePods(ctx, "here", "there")
}

// startPeerPods starts a pod on each node that can reach the other: "here" on node1 at 10.10.0.61
// and "there" on node2 at 10.10.0.62.
func (w *World) startPeerPods(ctx context.Context) error {
	return errors.Join(
		w.startResourcePod(ctx, onNetwork("blue", "here", "node1", 61)),
		w.startResourcePod(ctx, onNetwork("blue", "there", "node2", 62)),
	)
}

func (w *World) checkPeerConnectivity(ctx context.Context) error {
	return errors.Join(
		w.checkConnectivity(ctx, connectivityCheck{"there", "here", true}, "10.10.0.61"),
		w.checkConnectivity(ctx, connectivityCheck{"here", "there", true}, "10.10.0.62"),
	)
}

func (w *World) restartTenTimes(ctx context.Context) error {
	if err := w.startPeerPods(ctx); err != nil {
		return err
	}

	before, err := w.containersOf(ctx, "here")
	if err != nil {
		return err
	}

	for _, restart := range []struct {
		what string
		do   func() error
	}{
		{"kubelet", func() error {
			_, err := w.Cluster.Run(ctx, "node restart-kubelet", "node1")
			return err
		}},
		{"xpu-agent", func() error { return w.killStartedAgent(ctx, "node1") }},
	} {
		for n := range 10 {
			if err := restart.do(); err != nil {
				return fmt.Errorf("restart %d of the %s: %w", n+1, restart.what, err)
			}
			// Not from here to there: a kubelet that has just started cannot exec.
			if err := w.checkConnectivity(ctx, connectivityCheck{"there", "here", true},
				"10.10.0.61"); err != nil {
				return fmt.Errorf("after restart %d of the %s: %w", n+1, restart.what, err)
			}
		}

		if err := w.checkPodsUntouched(ctx, before); err != nil {
			return fmt.Errorf("after 10 restarts of the %s: %w", restart.what, err)
		}

		w.Detail("%s restarted 10 times", restart.what)
	}

	return w.endResourcePods(ctx, "here", "there")
}

// killStartedAgent kills a node's agent once it is running.
func (w *World) killStartedAgent(ctx context.Context, node string) error {
	err := poll(ctx, 30*time.Second, "an agent runs on "+node, func(context.Context) error {
		pids, err := w.agentsOf(node)
		if err == nil && len(pids) == 0 {
			err = errors.New("none does")
		}
		return err
	})

	if err != nil {
		return err
	}

	return w.killAgent(ctx, node)
}

// checkPodsUntouched checks that the peer pods were not restarted and that another pod can be
// started.
func (w *World) checkPodsUntouched(ctx context.Context, containers string) error {
	if err := w.waitForProduct(ctx); err != nil {
		return err
	}

	err := poll(ctx, 30*time.Second, "the resources are still there",
		func(ctx context.Context) error {
			return w.checkResources(ctx, poolSize, poolPlain, poolEarly)
		})
	if err != nil {
		return err
	}

	now, err := w.containersOf(ctx, "here")
	if err != nil {
		return err
	}
	if now != containers {
		return fmt.Errorf("pod here has containers %s, before %s", now, containers)
	}
	if err := w.startResourcePod(ctx, onNetwork("blue", "after", "node1", 63)); err != nil {
		return err
	}
	if err := w.checkPeerConnectivity(ctx); err != nil {
		return err
	}

	return w.deletePod(ctx, "after")
}

// containersOf identifies the current runs of a pod's containers.
func (w *World) containersOf(ctx context.Context, name string) (string, error) {
	var pod corev1.Pod
	if err := w.client.Get(ctx, types.NamespacedName{Namespace: "default", Name: name},
		&pod); err != nil {
		return "", err
	}

	var all []string
	for _, s := range pod.Status.ContainerStatuses {
		all = append(all, fmt.Sprintf("%s restarted %d times", s.ContainerID, s.RestartCount))
	}
	return string(pod.UID) + " " + strings.Join(all, ", "), nil
}

// deletePod deletes a pod and waits until it is gone.
func (w *World) deletePod(ctx context.Context, name string) error {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	if err := w.client.Delete(ctx, pod); client.IgnoreNotFound(err) != nil {
		return err
	}

	return poll(ctx, goneTime, "pod "+name+" is gone", func(ctx context.Context) error {
		if err := w.client.Get(ctx, types.NamespacedName{Namespace: "default", Name: name},
			pod); !apierrors.IsNotFound(err) {
			return errors.Join(errors.New("it is still there"), err)
		}
		return nil
	})
}

// killAgentsOfResources kills the agent at moments when a pod is starting and ending.
func (w *World) killAgentsOfResources(ctx context.Context) error {
	for n, delay := range []time.Duration{
		50 * time.Millisecond, 200 * time.Millisecond, 400 * time.Millisecond,
	} {
		p := onNetwork("blue", fmt.Sprintf("rushed-%d", n), "node1", 71+n)
		pod, err := p.pod()
		if err != nil {
			return err
		}
		if err := w.client.Create(ctx, pod); err != nil {
			return err
		}
		if err := w.killAfter(ctx, delay); err != nil {
			return err
		}
		if err := w.waitOrRecreatePod(ctx, p); err != nil {
			return fmt.Errorf("agent killed %s after the pod was made: %w", delay, err)
		}
		if _, err := w.networkStatuses(ctx, p); err != nil {
			return err
		}
		if err := w.client.Delete(ctx, pod); err != nil {
			return err
		}
		if err := w.killAfter(ctx, delay); err != nil {
			return err
		}
		if err := w.endResourcePods(ctx, p.name); err != nil {
			return fmt.Errorf("agent killed %s after the pod was deleted: %w", delay, err)
		}

		w.Detail("agent killed %s into start and end of a pod", delay)
	}
	return nil
}

// waitOrRecreatePod waits until a pod is ready. The kubelet calls Allocate only once. A pod fails
// for good if its call ended with the agent, or if the kubelet had to admit it before the next
// agent registered its Functions. The owner of such a pod creates another, as is done here.
func (w *World) waitOrRecreatePod(ctx context.Context, p resourcePod) error {
	return poll(ctx, startTime, "pod "+p.name+" is Ready", func(ctx context.Context) error {
		var pod corev1.Pod
		err := w.client.Get(ctx, types.NamespacedName{Namespace: "default", Name: p.name}, &pod)
		if apierrors.IsNotFound(err) {
			return errors.Join(err, w.recreatePod(ctx, p))
		}
		if err != nil {
			return err
		}

		if pod.Status.Reason == "UnexpectedAdmissionError" {
			w.Detail("there was no agent for the kubelet, which refused the pod: it is made again")
			return errors.Join(fmt.Errorf("it was refused: %s", pod.Status.Message),
				w.recreatePod(ctx, p))
		}

		if !podReady(pod) {
			return fmt.Errorf("it is %s", pod.Status.Phase)
		}

		return nil
	})
}

// recreatePod replaces a pod by another one with the same name.
func (w *World) recreatePod(ctx context.Context, p resourcePod) error {
	if err := w.deletePod(ctx, p.name); err != nil {
		return err
	}
	pod, err := p.pod()
	if err != nil {
		return err
	}
	return w.client.Create(ctx, pod)
}

// deleteWithoutAgents deletes a pod while no agent runs on any node.
func (w *World) deleteWithoutAgents(ctx context.Context) error {
	if err := w.startPeerPods(ctx); err != nil {
		return err
	}
	if err := w.selectAgentNodes(ctx, `{"away": "yes"}`); err != nil {
		return err
	}

	err := poll(ctx, 60*time.Second, "the agents are gone", func(context.Context) error {
		for _, node := range w.cluster.Nodes {
			if pids, err := w.agentsOf(node.Name); err != nil || len(pids) > 0 {
				return errors.Join(fmt.Errorf("%s has agents %v", node.Name, pids), err)
			}
		}
		return nil
	})

	if err != nil {
		return err
	}

	for _, name := range []string{"here", "there"} {
		if err := w.deletePod(ctx, name); err != nil {
			return fmt.Errorf("without agents: %w", err)
		}
	}

	for _, node := range w.cluster.Nodes {
		files, err := filepath.Glob(filepath.Join(node.Root, "var/lib/xpu-agent/spool/*.json"))
		if err != nil || len(files) == 0 {
			return errors.Join(fmt.Errorf("%s has no request in its spool", node.Name), err)
		}
		w.Detail("%s: pod deleted without an agent, %d requests spooled", node.Name, len(files))
	}

	if err := w.selectAgentNodes(ctx, `{"away": null}`); err != nil {
		return err
	}
	if err := w.waitForProduct(ctx); err != nil {
		return err
	}

	return w.waitForBaseline(ctx)
}

// selectAgentNodes sets the node labels that the agents require; no node has any.
func (w *World) selectAgentNodes(ctx context.Context, nodeSelector string) error {
	_, err := w.Cluster.Kubectl(ctx, "-n", namespace, "patch", "daemonset", "xpu-agent",
		"--type=merge",
		"--patch", `{"spec": {"template": {"spec": {"nodeSelector": `+nodeSelector+`}}}}`)
	return err
}

func (w *World) xpuAway(ctx context.Context) error {
	x := w.xpus[0]
	if err := w.startPeerPods(ctx); err != nil {
		return err
	}
	if err := w.stopProcess(ctx, "opi-bridge-"+x.node.Name, syscall.SIGKILL); err != nil {
		return err
	}

	begin := time.Now()
	err := poll(ctx, 60*time.Second, "nothing is offered of "+x.node.Name,
		func(ctx context.Context) error {
			return w.checkResourcesOf(ctx, x.node.Name, 0, poolPlain, poolEarly)
		})
	if err != nil {
		return err
	}

	took := time.Since(begin).Round(time.Millisecond)
	w.Detail("%s: nothing to give %s after its OPI agent was killed", x.node.Name, took)

	if !w.direct {
		if err := w.waitForTaint(ctx, x.node.Name, v1alpha1.TaintXPUAway); err != nil {
			return err
		}
	}

	if err := w.checkPeerConnectivity(ctx); err != nil {
		return fmt.Errorf("while the OPI agent is away: %w", err)
	}
	if err := w.startBridge(ctx, x); err != nil {
		return err
	}

	begin = time.Now()
	err = poll(ctx, 60*time.Second, "all of "+x.node.Name+" is offered again",
		func(ctx context.Context) error {
			return w.checkResourcesOf(ctx, x.node.Name, poolSize, poolPlain, poolEarly)
		})
	if err != nil {
		return err
	}

	w.Detail("%s: everything to give %s after it was back", x.node.Name,
		time.Since(begin).Round(time.Millisecond))
	return w.endResourcePods(ctx, "here", "there")
}

// waitForTaint waits until all devices of a node have a taint.
func (w *World) waitForTaint(ctx context.Context, node, key string) error {
	return poll(ctx, 30*time.Second, "the devices of "+node+" have taint "+key,
		func(ctx context.Context) error {
			devices, err := w.devicesOf(ctx, node)
			if err != nil {
				return err
			}

			for _, device := range devices {
				if !hasTaint(device, key) {
					return fmt.Errorf("device %s has taints %+v", device.Name, device.Taints)
				}
			}

			return nil
		})
}

func hasTaint(device resourceapi.Device, key string) bool {
	return slices.ContainsFunc(device.Taints, func(t resourceapi.DeviceTaint) bool {
		return t.Key == key
	})
}

// devicesOf returns the devices that a node publishes in ResourceSlices.
func (w *World) devicesOf(ctx context.Context, node string) ([]resourceapi.Device, error) {
	var list resourceapi.ResourceSliceList
	if err := w.client.List(ctx, &list); err != nil {
		return nil, err
	}

	var all []resourceapi.Device
	for _, slice := range list.Items {
		if slice.Spec.NodeName != nil && *slice.Spec.NodeName == node {
			all = append(all, slice.Spec.Devices...)
		}
	}

	return all, nil
}

// forgetPortsOfResources reboots a card while pods communicate.
func (w *World) forgetPortsOfResources(ctx context.Context) error {
	if err := w.startPeerPods(ctx); err != nil {
		return err
	}
	if err := w.rebootCard(ctx, w.xpus[0]); err != nil {
		return err
	}
	if err := poll(ctx, 60*time.Second, "the pods reach each other again",
		w.checkPeerConnectivity); err != nil {
		return err
	}

	return w.endResourcePods(ctx, "here", "there")
}

// movePool publishes pool plain through DRA while a pod uses one of its Functions from the device
// plugin.
func (w *World) movePool(ctx context.Context) error {
	if err := w.startPeerPods(ctx); err != nil {
		return err
	}

	attached, err := w.networkStatuses(ctx, onNetwork("blue", "here", "node1", 61))
	if err != nil {
		return err
	}

	taken := strings.NewReplacer(":", "-", ".", "-").Replace(attached[0].DeviceInfo.PCI.Address)
	containers, err := w.containersOf(ctx, "here")
	if err != nil {
		return err
	}
	if err := w.publish(ctx, poolPlain, v1alpha1.PublishDRA); err != nil {
		return err
	}
	if err := w.waitForOfferedExcept(ctx, taken); err != nil {
		return err
	}
	// every available Function of the pool on the node
	if err := w.claimRest(ctx, poolSize-1); err != nil {
		return err
	}
	if now, err := w.containersOf(ctx, "here"); err != nil || now != containers {
		return errors.Join(fmt.Errorf("pod here has containers %s, before %s", now, containers),
			err)
	}
	if err := errors.Join(w.checkPeerConnectivity(ctx), w.checkNoSharedFunctions(ctx)); err != nil {
		return err
	}

	return w.moveBack(ctx, taken)
}

// publish changes how a pool is published.
func (w *World) publish(ctx context.Context, pool string, mode v1alpha1.PublishMode) error {
	patch := fmt.Sprintf(`{"spec": {"publish": %q, "devicePlugin": null}}`, mode)
	_, err := w.Cluster.Kubectl(ctx, "patch", "devicepool", pool, "--type=merge", "--patch", patch)
	return err
}

// waitForOfferedExcept waits until pool plain of node1 is in ResourceSlices, with a taint on the
// device that a pod uses.
func (w *World) waitForOfferedExcept(ctx context.Context, taken string) error {
	err := poll(ctx, 30*time.Second, "pool plain is offered to claims",
		func(ctx context.Context) error {
			devices, err := w.devicesOf(ctx, "node1")
			if err != nil {
				return err
			}

			i := slices.IndexFunc(devices, func(d resourceapi.Device) bool {
				return d.Name == taken
			})
			if i < 0 {
				return fmt.Errorf("device %s is not among the %d of node1", taken, len(devices))
			}
			if !hasTaint(devices[i], v1alpha1.TaintInUse) {
				return fmt.Errorf("device %s, which pod here has, has taints %+v", taken,
					devices[i].Taints)
			}

			return w.checkResources(ctx, 0, poolPlain)
		})

	if err == nil {
		w.Detail("%s is tainted: %s", taken, v1alpha1.TaintInUse)
	}

	return err
}

// claimRest starts a pod that claims that many Functions of pool plain on node1.
func (w *World) claimRest(ctx context.Context, count int) error {
	class := &resourceapi.DeviceClass{}
	class.Name = "xpu-plain"
	const expression = "device.driver == %[1]q && device.attributes[%[1]q].pool == %[2]q"
	ofPool := fmt.Sprintf(expression, v1alpha1.GroupName, poolPlain)
	class.Spec.Selectors = []resourceapi.DeviceSelector{
		{CEL: &resourceapi.CELDeviceSelector{Expression: ofPool}},
	}
	if err := w.client.Create(ctx, class); err != nil {
		return err
	}

	claims := make([]string, count)
	for i := range claims {
		claims[i] = `"network": "red"`
	}
	if err := w.createPodWithClaimsOfClass(ctx, class.Name, "rest", "node1",
		claims...); err != nil {
		return err
	}
	if err := w.waitForPod(ctx, "rest"); err != nil {
		return err
	}

	w.Detail("a pod claims the other %d", count)
	if err := w.createPodWithClaimsOfClass(ctx, class.Name, "too-many", "node1",
		`"network": "red"`); err != nil {
		return err
	}
	if err := w.waitForEvent(ctx, "too-many", "cannot allocate all claims"); err != nil {
		return err
	}

	return w.client.Delete(ctx, class)
}

// moveBack ends the claims and returns the pool to the device plugin.
func (w *World) moveBack(ctx context.Context, taken string) error {
	for _, name := range []string{"too-many", "rest", "here", "there"} {
		if err := w.deletePod(ctx, name); err != nil {
			return err
		}
	}

	if err := w.client.DeleteAllOf(ctx, &resourceapi.ResourceClaim{},
		client.InNamespace("default")); err != nil {
		return err
	}

	err := poll(ctx, 60*time.Second, "device "+taken+" is free for claims",
		func(ctx context.Context) error {
			devices, err := w.devicesOf(ctx, "node1")
			if err != nil {
				return err
			}

			for _, device := range devices {
				if device.Name == taken && len(device.Taints) > 0 {
					return fmt.Errorf("it has taints %+v", device.Taints)
				}
			}

			return nil
		})

	if err != nil {
		return err
	}
	if err := w.publish(ctx, poolPlain, v1alpha1.PublishDevicePlugin); err != nil {
		return err
	}

	return w.waitForBaseline(ctx)
}

// claimByMultus makes Multus pass the Function of a claim to xpu-cni.
func (w *World) claimByMultus(ctx context.Context) error {
	const name = "by-both"
	if _, err := w.Cluster.Kubectl(ctx, "apply", "-f",
		filepath.Join(w.Source, "test/e2e/manifests/claimed.yaml")); err != nil {
		return err
	}

	pod, err := w.buildPodWithClaims(ctx, "xpu-fast", name, "node1",
		`"network": "blue", "addresses": ["10.10.0.81/24"]`)
	if err != nil {
		return err
	}

	p := resourcePod{
		name: name, node: "node1",
		networks: []selection{{Name: "claimed", IPs: []string{"10.10.0.81/24"}}},
	}

	pod.Annotations = map[string]string{"k8s.v1.cni.cncf.io/networks": "claimed"}
	if err := w.client.Create(ctx, pod); err != nil {
		return err
	}

	there := onNetwork("blue", "there", "node2", 62)
	if err := errors.Join(w.waitForPod(ctx, name), w.startResourcePod(ctx, there)); err != nil {
		return err
	}

	attached, err := w.networkStatuses(ctx, p)
	if err != nil {
		return err
	}

	w.Detail("%s: claim %s-nic-0, VF %s, %s %s",
		name, name, attached[0].DeviceInfo.PCI.Address, attached[0].Interface,
		strings.Join(attached[0].IPs, " "))
	if err := w.checkConnectivity(ctx, connectivityCheck{"there", name, true},
		"10.10.0.81"); err != nil {
		return err
	}

	return w.deletePodsAndWait(ctx, name, "there")
}
