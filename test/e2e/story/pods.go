// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// probeImage is present on every node of a development cluster.
const probeImage = "devcluster.local/pause:1"

// podSpec specifies a pod of the story.
type podSpec struct{ name, node, template, network string }

// pods of the story: two on blue that can reach each other, one on red that cannot, and one that is
// bound only after its xPU is ready.
var pods = []podSpec{
	{"blue-1", "node1", "blue", "blue"},
	{"blue-2", "node2", "blue", "blue"},
	{"red-1", "node1", "red", "red"},
	{"blue-3", "node2", "blue-careful", "blue"},
}

// connectivityChecks of the story.
var connectivityChecks = []connectivityCheck{
	{"blue-1", "blue-2", true},
	{"blue-2", "blue-1", true},
	{"blue-1", "blue-3", true},
	{"red-1", "blue-2", false},
	{"red-1", "blue-3", false},
}

// declare applies an administrator's objects, and waits until they take effect.
func (w *World) declare(ctx context.Context) error {
	for i, x := range w.xpus {
		object := &v1alpha1.XPU{Spec: v1alpha1.XPUSpec{
			NodeName: x.node.Name,
			Endpoint: x.address + ":" + opiPort,
			Dialect:  v1alpha1.DialectEVPNGW,
			TLS:      &v1alpha1.XPUTLS{SecretName: "opi-client"},
		}}

		object.Name = fmt.Sprintf("xpu-%d", i+1)
		if err := w.client.Create(ctx, object); err != nil {
			return err
		}
	}
	return w.declarePools(ctx, 32)
}

// declarePools applies an administrator's objects other than XPUs, and waits until that many
// devices are published.
func (w *World) declarePools(ctx context.Context, devices int) error {
	if _, err := w.Cluster.Kubectl(ctx, "apply", "-f",
		filepath.Join(w.Source, "test/e2e/manifests/pools.yaml")); err != nil {
		return err
	}

	err := poll(ctx, 30*time.Second, "the VFs are in ResourceSlices, and the networks are up",
		func(ctx context.Context) error {
			return errors.Join(w.devicesPublished(ctx, devices), w.networksReady(ctx))
		})
	if err != nil {
		return err
	}

	w.baseline, err = w.snapshot(ctx)
	w.Detail("%d ResourceSlices; snapshot of %d netdevs and %d representors",
		len(w.baseline.SliceVersions), len(w.baseline.Netdevs), len(w.baseline.Representors))

	return err
}

func (w *World) devicesPublished(ctx context.Context, want int) error {
	var list resourceapi.ResourceSliceList
	if err := w.client.List(ctx, &list); err != nil {
		return err
	}

	devices := 0
	for _, slice := range list.Items {
		devices += len(slice.Spec.Devices)
	}

	if devices != want {
		return fmt.Errorf("%d devices in %d ResourceSlices, want %d", devices,
			len(list.Items), want)
	}

	return nil
}

func (w *World) networksReady(ctx context.Context) error {
	var list v1alpha1.XPUNetworkList
	if err := w.client.List(ctx, &list); err != nil {
		return err
	}

	for _, network := range list.Items {
		if ready := v1alpha1.ReadyOf(network.Status.Conditions); ready.Status != "True" {
			return fmt.Errorf("XPUNetwork %s: %s: %s", network.Name, ready.Reason, ready.Message)
		}
	}

	return nil
}

// pod returns the pod for a spec: one container that serves HTTP, and one claim.
func (p podSpec) pod() *corev1.Pod {
	pod := &corev1.Pod{Spec: corev1.PodSpec{
		NodeSelector:                  map[string]string{corev1.LabelHostname: p.node},
		TerminationGracePeriodSeconds: ptr.To(int64(1)),
		ResourceClaims: []corev1.PodResourceClaim{
			{Name: "nic", ResourceClaimTemplateName: &p.template},
		},
		Containers: []corev1.Container{{
			Name: "server", Image: probeImage, ImagePullPolicy: corev1.PullNever,
			Args:      []string{"serve"},
			Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "nic"}}},
		}},
	}}

	pod.Namespace, pod.Name = "default", p.name
	return pod
}

// runPods starts the pods one after the other, so that each is timed alone, and shows what each
// got.
func (w *World) runPods(ctx context.Context) error {
	watching, stop := context.WithTimeout(ctx, 90*time.Second)
	defer stop()

	watcher, err := newWatcher(watching, w.client, "default")
	if err != nil {
		return err
	}
	defer watcher.stop()

	for _, p := range w.pods {
		created := time.Now()
		if err := w.client.Create(ctx, p.pod()); err != nil {
			return err
		}

		err := watcher.wait(watching, "Ready with its status in the claim", []string{p.name},
			readyAndAttached)
		if err != nil {
			return errors.Join(err, w.explain(ctx, p.name))
		}

		life := *watcher.lives[p.name]
		life.Created = created
		if err := w.show(ctx, p, life); err != nil {
			return err
		}
	}

	return nil
}

func readyAndAttached(_ corev1.Pod, _ bool, life Life) bool {
	return !life.Ready.IsZero() && !life.Attached.IsZero()
}

// explain returns the events of a pod that does not start.
func (w *World) explain(ctx context.Context, pod string) error {
	out, err := w.Cluster.Kubectl(ctx, "events", "--for", "pod/"+pod, "-n", "default")
	if err != nil {
		return err
	}
	return errors.New("its events:\n" + strings.TrimSpace(out))
}

// show checks and prints the interface and the timing of a pod.
func (w *World) show(ctx context.Context, p podSpec, life Life) error {
	c, device, err := w.claimOf(ctx, p.name)
	if err != nil {
		return err
	}

	devices, err := claim.Devices(c)
	if err != nil {
		return err
	}

	var port v1alpha1.XPUPort
	key := types.NamespacedName{
		Namespace: "default", Name: claim.PortName(devices[0].ID.Node, devices[0].Function),
	}
	if err := w.client.Get(ctx, key, &port); err != nil {
		return err
	}

	data := device.NetworkData
	switch {
	case data == nil || data.InterfaceName == "" || len(data.IPs) == 0:
		return fmt.Errorf("pod %s: claim %s has no network data: %+v", p.name, c.Name, data)
	case data.HardwareAddress != port.Spec.MAC:
		return fmt.Errorf("pod %s: MAC %s, but the xPU expects %s", p.name, data.HardwareAddress,
			port.Spec.MAC)
	case port.Spec.Network != p.network || port.Spec.NodeName != p.node:
		return fmt.Errorf("pod %s: XPUPort %s is on network %s of %s", p.name, port.Name,
			port.Spec.Network, port.Spec.NodeName)
	case devices[0].BeforeBind && life.Bound.Before(life.Provisioned):
		return fmt.Errorf("pod %s: bound %s before its xPU was ready", p.name,
			life.Provisioned.Sub(life.Bound))
	}

	mode := "OnPrepare"
	if devices[0].BeforeBind {
		mode = "BeforeBind"
	}

	w.Detail("%s on %s (%s): VF %s, port %s, %s %s %s", p.name, p.node, mode,
		devices[0].Function, port.Status.BridgePort, data.InterfaceName,
		strings.Join(data.IPs, " "), data.HardwareAddress)
	since := func(t time.Time) time.Duration { return t.Sub(life.Created).Round(time.Millisecond) }
	w.Detail("  allocated %s, xPU up %s, bound %s, attached %s, Ready %s",
		since(life.Allocated), since(life.Provisioned), since(life.Bound), since(life.Attached),
		since(life.Ready))

	return nil
}

// claimOf returns the claim that was generated for a pod, and its only device.
func (w *World) claimOf(
	ctx context.Context, pod string,
) (*resourceapi.ResourceClaim, resourceapi.AllocatedDeviceStatus, error) {
	var list resourceapi.ResourceClaimList
	if err := w.client.List(ctx, &list, client.InNamespace("default")); err != nil {
		return nil, resourceapi.AllocatedDeviceStatus{}, err
	}

	for _, c := range list.Items {
		if podOfClaim(c.Name) == pod && len(c.Status.Devices) == 1 {
			return &c, c.Status.Devices[0], nil
		}
	}

	return nil, resourceapi.AllocatedDeviceStatus{},
		fmt.Errorf("pod %s has no claim with one device in its status", pod)
}

// exchange checks connectivity between the pods. The networks have the same subnet, so that red-1
// looks for the blue pods on its own network, and only the xPUs separate them.
func (w *World) exchange(ctx context.Context) error {
	addresses := map[string]string{}
	for _, p := range w.pods {
		_, device, err := w.claimOf(ctx, p.name)
		if err != nil {
			return err
		}
		addresses[p.name], _, _ = strings.Cut(device.NetworkData.IPs[0], "/")
	}

	group, ctx := errgroup.WithContext(ctx)
	for _, t := range w.connectivityChecks {
		group.Go(func() error { return w.checkConnectivity(ctx, t, addresses[t.to]) })
	}

	return group.Wait()
}

// connectivityCheck is the attempt of one pod to reach another.
type connectivityCheck struct {
	from, to string
	passes   bool
}

func (w *World) checkConnectivity(ctx context.Context, t connectivityCheck, address string) error {
	begin := time.Now()
	answer, err := w.httpGet(ctx, t.from, address)
	switch {
	case t.passes && err != nil:
		return fmt.Errorf("%s cannot reach %s at %s: %w", t.from, t.to, address, err)
	case t.passes && !strings.Contains(answer, t.to):
		return fmt.Errorf("%s asked %s at %s, and %q answered", t.from, t.to, address, answer)
	case !t.passes && err == nil:
		return fmt.Errorf("%s reached %s at %s, though they are on different networks: %q",
			t.from, t.to, address, answer)
	case !t.passes && !strings.Contains(err.Error(), "no route to host") &&
		!strings.Contains(err.Error(), "deadline exceeded"):
		return fmt.Errorf("%s could not look for %s at %s: %w", t.from, t.to, address, err)
	}

	verb := "reaches"
	if !t.passes {
		verb = "does not reach"
	}

	w.Detail("%s %s %s at %s (%s)", t.from, verb, t.to, address,
		time.Since(begin).Round(time.Millisecond))
	return nil
}

// httpGet requests a page from inside a pod.
func (w *World) httpGet(ctx context.Context, pod, address string) (string, error) {
	return w.Cluster.Kubectl(ctx, "exec", pod, "--", "/pause", "get", "http://"+address+":8080/")
}

// deletePods deletes the pods and waits for the baseline.
func (w *World) deletePods(ctx context.Context) error {
	for _, p := range w.pods {
		if err := w.client.Delete(ctx, p.pod()); err != nil {
			return err
		}
	}

	var difference string
	err := poll(ctx, 60*time.Second, "everything is as it was", func(ctx context.Context) error {
		now, err := w.snapshot(ctx)
		if err != nil {
			return err
		}
		if difference = w.baseline.Diff(now); difference != "" {
			return fmt.Errorf("differs (- before, + now):\n%s", difference)
		}
		return nil
	})

	if err != nil {
		return err
	}

	w.Detail("VFs back in their nodes with name, MAC and MTU; bridge ports, XPUPorts and claims " +
		"gone; slices not even rewritten")
	return nil
}
