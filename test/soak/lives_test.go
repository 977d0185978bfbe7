// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/cni"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/uptime"
	"github.com/opiproject/xpu-device-plugin/pkg/node/nri/nritest"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// The ways in which a pod lives. Faults of the node come in addition.
const (
	ordinary = iota
	// sandboxAgain means that the pod's sandbox dies and the pod gets another one.
	sandboxAgain
	// namespaceGone means that the network namespace ends before the agent learns of the pod's end.
	namespaceGone
	// neverRuns means that the pod is deleted after it got its Function and before it has a
	// sandbox.
	neverRuns
	// unheard means that the runtime does not report the end of the sandbox.
	unheard
	// twice means that every start and every end of the pod is reported two times.
	twice
	// hostile means that the pod harms its interface as NET_ADMIN allows; see [life.harm].
	hostile
	ways
)

// way returns a random way in which a pod lives.
func way(random *rand.Rand) int {
	return random.IntN(ways)
}

// life is one pod from its creation to its end. Every step is repeated as kubelet and runtime do.
type life struct {
	*node
	random   *rand.Rand
	way      int
	name     string
	function function.ID
	address  netip.Prefix
	uid      string
	made     int // number of sandboxes so far

	started, ended time.Duration

	accomplice *netns.Namespace // belongs to a hostile pod and outlives it
}

// sandbox is the pod's current sandbox.
type sandbox struct {
	*netns.Namespace
	id string
}

// newSandbox makes a sandbox with a network namespace, which is closed when the sandbox ends.
func (l *life) newSandbox() (sandbox, error) {
	l.made++
	id := fmt.Sprintf("%s-sandbox-%d", l.name, l.made)
	ns, err := netns.Make(l.path("ns-" + id))
	return sandbox{ns, id}, err
}

// claimed runs the life of a pod whose Function is allocated by the scheduler.
func (l *life) claimed(ctx context.Context) error {
	begin := time.Now()
	object, err := l.allocate(ctx)
	if err != nil {
		return err
	}
	defer l.has(l.name, nil)

	l.has(l.name, kubelettest.ClaimPod(l.name, v1alpha1.GroupName, l.function.DeviceName()))
	prepared := l.prepare(ctx, object)
	if prepared == nil && l.way != neverRuns {
		prepared = l.runClaimed(ctx, object, begin)
	}

	end := time.Now()
	if err := await(ctx, "claim is unprepared", func() error {
		return l.unprepare(ctx, object)
	}); err != nil {
		return errors.Join(prepared, err)
	}

	if l.way == twice {
		prepared = errors.Join(prepared, await(ctx, "claim is unprepared again", func() error {
			return l.unprepare(ctx, object)
		}))
	}

	l.ended = time.Since(end)
	return errors.Join(prepared, l.forget(ctx, object))
}

// allocate plays the user and the scheduler.
func (l *life) allocate(ctx context.Context) (*resourceapi.ResourceClaim, error) {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: l.name},
		Spec: corev1.PodSpec{
			NodeName: nodeName, Containers: []corev1.Container{{Name: "main", Image: "none"}},
		},
	}

	if err := l.admin.Create(ctx, pod); err != nil {
		return nil, err
	}

	l.uid = string(pod.UID)
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: l.name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "any"},
		}}}},
	}

	if err := l.admin.Create(ctx, c); err != nil {
		return nil, err
	}

	c.Status = resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{
				Results: []resourceapi.DeviceRequestAllocationResult{{
					Request: "nic", Driver: v1alpha1.GroupName, Device: l.function.DeviceName(),
					Pool: claim.PoolID{Node: nodeName, PF: claimPF, DevicePool: "claimed"}.String(),
				}},
				Config: []resourceapi.DeviceAllocationConfiguration{{
					Source: resourceapi.AllocationConfigSourceClaim,
					DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
						Driver: v1alpha1.GroupName,
						Parameters: runtime.RawExtension{Raw: fmt.Appendf(nil,
							`{"apiVersion": "xpu.opiproject.org/v1alpha1", "kind": "InterfaceConfig", "interfaceName": "net1", "addresses": [%q]}`, l.address)},
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
			{Resource: "pods", Name: l.name, UID: pod.UID},
		},
	}

	return c, l.admin.Status().Update(ctx, c)
}

// prepare plays the kubelet, which tries again until the pod can start.
func (l *life) prepare(ctx context.Context, c *resourceapi.ResourceClaim) error {
	return await(ctx, "claim is prepared", func() error {
		l.kubelet.RLock()
		defer l.kubelet.RUnlock()

		ctx, cancel := context.WithTimeout(ctx, 45*time.Second)
		defer cancel()

		if l.way == neverRuns && l.random.IntN(2) == 0 {
			ctx, cancel = context.WithTimeout(ctx,
				time.Duration(l.random.IntN(100))*time.Millisecond)
			defer cancel()
		}

		_, err := l.driver.Prepare(ctx, c)
		if err != nil && l.way == neverRuns {
			return nil // the pod is deleted before the kubelet tries again
		}

		return err
	})
}

func (l *life) unprepare(ctx context.Context, c *resourceapi.ResourceClaim) error {
	l.kubelet.RLock()
	defer l.kubelet.RUnlock()
	ctx, cancel := context.WithTimeout(ctx, 45*time.Second)
	defer cancel()
	return l.driver.Unprepare(ctx, c)
}

// forget plays the control plane when the pod is gone, and waits until the claim is gone.
func (l *life) forget(ctx context.Context, c *resourceapi.ResourceClaim) error {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: l.name}}
	if err := l.admin.Delete(ctx,
		pod, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
		return err
	}

	return await(ctx, "claim is deleted", func() error {
		if err := l.admin.Get(ctx, client.ObjectKeyFromObject(c), c); err != nil {
			return client.IgnoreNotFound(err)
		}

		c.Status.Allocation, c.Status.ReservedFor, c.Status.Devices = nil, nil, nil
		if err := l.admin.Status().Update(ctx, c); err != nil {
			return client.IgnoreNotFound(err)
		}
		if err := l.admin.Delete(ctx, c); err != nil {
			return client.IgnoreNotFound(err)
		}

		return errors.New("it is being deleted")
	})
}

// runClaimed takes the pod through its sandboxes.
func (l *life) runClaimed(
	ctx context.Context, c *resourceapi.ResourceClaim, begin time.Time,
) error {
	sandboxes := 1
	if l.way == sandboxAgain {
		sandboxes = 2
	}

	for range sandboxes {
		s, err := l.start(ctx, c)
		if err != nil {
			return err
		}

		if l.started == 0 {
			l.started = time.Since(begin)
		}

		l.work(ctx)
		err = l.workedWell(ctx, s)
		if stopped := l.stop(ctx, s); err == nil {
			err = stopped
		}
		if err != nil {
			return err
		}
	}

	return nil
}

// work waits for a moment, as a pod at work.
func (l *life) work(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(time.Duration(l.random.IntN(50)) * time.Millisecond):
	}
}

// start plays the runtime, which makes sandboxes until one has a container. No container may start
// without the interface.
func (l *life) start(ctx context.Context, c *resourceapi.ResourceClaim) (s sandbox, err error) {
	err = await(ctx, "pod "+l.name+" runs", func() error {
		var failed error
		if s, failed = l.newSandbox(); failed != nil {
			return failed
		}

		if failed = l.runPodSandbox(ctx, s); failed == nil {
			failed = await(ctx, "container starts", func() error {
				return l.createContainer(ctx, s, c)
			})
		}

		if failed == nil {
			return nil
		}

		_ = l.stop(ctx, s)
		return failed
	})
	return s, err
}

// runPodSandbox has the runtime notify its plugins of a new sandbox. It succeeds without plugins.
func (l *life) runPodSandbox(ctx context.Context, s sandbox) error {
	l.runtime.RLock()
	defer l.runtime.RUnlock()

	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()

	pod := l.sandboxOf(s)
	// as containerd does, so that a plugin that connects now learns of the sandbox only once
	defer l.nri.BlockPluginSync().Unblock()

	l.mutex.Lock()
	l.sandboxes[s.id] = pod
	l.mutex.Unlock()

	return l.nri.RunPodSandbox(ctx, &adaptation.RunPodSandboxRequest{Pod: pod})
}

func (l *life) sandboxOf(s sandbox) *adaptation.PodSandbox {
	return nritest.Sandbox(s.id, l.name, l.uid, s.Path())
}

// createContainer plays the runtime that injects CDI devices and asks its plugins. A container that
// starts must have the pod's interface, unless the card is being reset at that moment.
func (l *life) createContainer(ctx context.Context, s sandbox, c *resourceapi.ResourceClaim) error {
	l.runtime.RLock()
	defer l.runtime.RUnlock()

	name := v1alpha1.GroupName + "/function=" + string(c.UID) + "-" + l.function.DeviceName()
	files, err := cdi.NewCache(cdi.WithSpecDirs(l.path("cdi")), cdi.WithAutoRefresh(false))
	if err != nil {
		return err
	}

	device := files.GetDevice(name)
	if device == nil {
		return fmt.Errorf("unresolvable CDI device %s", name)
	}

	for _, mount := range device.ContainerEdits.Mounts {
		if _, err := os.Stat(mount.HostPath); err != nil {
			return err
		}
	}

	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()

	_, err = l.nri.CreateContainer(ctx,
		&adaptation.CreateContainerRequest{Pod: l.sandboxOf(s), Container: &adaptation.Container{
			Id: s.id + "-main", PodSandboxId: s.id, Name: "main",
			CDIDevices: []*adaptation.CDIDevice{{Name: name}},
		}})

	if err != nil {
		return err
	}
	if err := l.inPod(s); err != nil && !l.cards.justReset() {
		l.t.Errorf("a container of %s starts without its interface: %v", l.name, err)
	}

	return nil
}

// stop plays the runtime that ends the sandbox.
func (l *life) stop(ctx context.Context, s sandbox) error {
	if l.way == namespaceGone {
		if err := s.Close(); err != nil {
			return err
		}
	}

	l.mutex.Lock()
	delete(l.sandboxes, s.id)
	l.mutex.Unlock()
	l.runtime.RLock()
	defer l.runtime.RUnlock()

	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()

	pod := l.sandboxOf(s)
	if l.way != unheard {
		// the runtime ignores errors of plugins
		_ = l.nri.StopPodSandbox(ctx, &adaptation.StopPodSandboxRequest{Pod: pod})
		_ = l.nri.RemovePodSandbox(ctx, &adaptation.RemovePodSandboxRequest{Pod: pod})
	}

	return s.Close()
}

// inPod returns an error if the pod lacks its interface.
func (l *life) inPod(s sandbox) error {
	net1, err := s.Handle().LinkByName("net1")
	if err != nil {
		return fmt.Errorf("net1: %w", err)
	}
	if a := net1.Attrs(); a.MTU != 1450 || a.RawFlags&unix.IFF_UP == 0 {
		return fmt.Errorf("net1 has MTU %d and flags %s", a.MTU, a.Flags)
	}

	addresses, err := s.Handle().AddrList(net1, netlink.FAMILY_V4)
	if err != nil {
		return err
	}

	if !slices.ContainsFunc(addresses, func(a netlink.Addr) bool {
		return a.IPNet.String() == l.address.String()
	}) {
		return fmt.Errorf("net1 has addresses %v, want %s", addresses, l.address)
	}

	return nil
}

// workedWell checks that the pod has its interface. A hostile pod then does harm.
func (l *life) workedWell(ctx context.Context, s sandbox) error {
	if l.way == hostile {
		return l.harm(s)
	}
	return l.stillThere(ctx, s)
}

// stillThere checks that the pod has its interface, which it gets back after a reset of the card.
func (l *life) stillThere(ctx context.Context, s sandbox) error {
	return await(ctx, "the pod has its interface", func() error { return l.inPod(s) })
}

// plugIn runs the life of a pod to which the kubelet gives the Function.
func (l *life) plugIn(ctx context.Context) error {
	begin := time.Now()
	l.uid = l.name + "-uid"
	defer l.has(l.name, nil)

	given, err := l.give(ctx)
	if err != nil || !given || l.way == neverRuns {
		return err
	}

	sandboxes := 1
	if l.way == sandboxAgain {
		sandboxes = 2
	}

	for range sandboxes {
		s, err := l.add(ctx)
		if err != nil {
			return err
		}

		if l.started == 0 {
			l.started = time.Since(begin)
		}

		l.work(ctx)
		if err := l.workedWell(ctx, s); err != nil {
			return err
		}

		end := time.Now()
		if err := l.del(ctx, s); err != nil {
			return err
		}

		l.ended = time.Since(end)
	}

	return nil
}

// give plays the scheduler, which waits until the Function is offered, and the kubelet. A pod whose
// Allocate fails has failed, and the kubelet forgets it.
func (l *life) give(ctx context.Context) (given bool, err error) {
	err = await(ctx, "Function is offered", func() error {
		l.kubelet.RLock()
		defer l.kubelet.RUnlock()

		if !slices.Contains(l.plugins.Healthy(resource), l.function.String()) {
			return fmt.Errorf("%s is not healthy", l.function)
		}

		l.has(l.name, kubelettest.Pod(l.name, resource, l.function.String()))
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()

		_, failed := l.plugins.Allocate(ctx, resource, l.function.String())
		given = failed == nil

		return nil
	})
	return given, err
}

// add plays the runtime, whose sandboxes fail until one gets its interface.
func (l *life) add(ctx context.Context) (s sandbox, err error) {
	err = await(ctx, "pod "+l.name+" runs", func() error {
		var failed error
		if s, failed = l.newSandbox(); failed != nil {
			return failed
		}

		failed = l.shim().Add(l.arguments(s))
		if failed == nil && l.way == twice {
			failed = l.shim().Add(l.arguments(s))
		}

		if failed == nil {
			if missing := l.inPod(s); missing != nil && !l.cards.justReset() {
				l.t.Errorf("ADD of %s succeeded without its interface: %v", l.name, missing)
			}
		}

		if failed == nil {
			return nil
		}

		_ = l.del(ctx, s)
		return failed
	})
	return s, err
}

func (l *life) del(ctx context.Context, s sandbox) error {
	arguments := l.arguments(s)
	if l.way == namespaceGone {
		if err := s.Close(); err != nil {
			return err
		}
		if l.random.IntN(2) == 0 {
			arguments.Netns = ""
		}
	}

	if err := await(ctx, "DEL", func() error { return l.shim().Del(arguments) }); err != nil {
		return err
	}

	if l.way == twice {
		if err := l.shim().Del(arguments); err != nil {
			return fmt.Errorf("DEL again: %w", err)
		}
	}

	return s.Close()
}

func (l *life) shim() skel.CNIFuncs {
	paths := func() (cni.Paths, error) {
		return cni.Paths{Socket: l.path("run/cni.sock"), SpoolDir: l.path("spool")}, nil
	}
	return cni.Plugin{
		DeviceInfoDir: l.path("devinfo/cni"), Paths: paths, Stdout: io.Discard, Stderr: io.Discard,
		Now: l.now, Asked: func() uptime.Moment { return uptime.Of(l.bootID) },
	}.Funcs()
}

func (l *life) arguments(s sandbox) *skel.CmdArgs {
	config, err := json.Marshal(map[string]any{
		"cniVersion": "1.1.0", "name": "fast-net", "type": "xpu-cni",
		"deviceID": l.function.String(),
		"timeout":  "20s",
		"runtimeConfig": map[string]any{
			"ips": []string{l.address.String()}, "CNIDeviceInfoFile": l.path("devinfo/cni/" + s.id),
		},
	})

	if err != nil {
		l.t.Error(err)
	}

	return &skel.CmdArgs{
		ContainerID: s.id, Netns: s.Path(), IfName: "net1", Path: l.path("bin"), StdinData: config,
		Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=" + l.name +
			";K8S_POD_UID=" + l.uid,
	}
}
