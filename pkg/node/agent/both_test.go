// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/nri/nritest"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// offered returns the devices of the node's ResourceSlices: those that are free, and those with a
// taint because a pod has them in another way.
func (s *site) offered() (free, inUse []string) {
	s.t.Helper()
	for _, slice := range s.slices() {
		for _, device := range slice.Spec.Devices {
			switch {
			case len(device.Taints) == 0:
				free = append(free, device.Name)
			case has(device, v1alpha1.TaintInUse):
				inUse = append(inUse, device.Name)
			}
		}
	}

	slices.Sort(free)
	return free, inUse
}

// has reports whether the device has a taint.
func has(device resourceapi.Device, taint string) bool {
	return slices.ContainsFunc(device.Taints, func(t resourceapi.DeviceTaint) bool {
		return t.Key == taint
	})
}

func (s *site) awaitOffer(what string, free, inUse []function.ID) {
	s.t.Helper()
	names := func(ids []function.ID) []string {
		var list []string
		for _, id := range ids {
			list = append(list, id.DeviceName())
		}
		return list
	}

	s.eventually(what, func() bool {
		nowFree, nowInUse := s.offered()
		return slices.Equal(nowFree, names(free)) && slices.Equal(nowInUse, names(inUse))
	})
}

// prepareUntil plays the kubelet, which tries again until a claim is prepared.
func (s *site) prepareUntil(driver *kubelettest.DRADriver, c *resourceapi.ResourceClaim) {
	s.t.Helper()
	s.eventually("the claim is prepared", func() bool {
		_, err := driver.Prepare(s.t.Context(), c)
		return err == nil
	})
}

// nri returns a pod as the runtime reports it to NRI plugins.
func (p pod) nri() *adaptation.PodSandbox {
	return nritest.Sandbox(p.sandbox, p.name, p.name+"-uid", p.Path())
}

func (s *site) awaitRuntime() {
	s.t.Helper()
	s.eventually("the runtime is connected", func() bool {
		code, _ := s.readyz()
		return code == 200
	})
}

func (s *site) runSandbox(p pod) {
	s.t.Helper()
	if err := s.runtime.RunPodSandbox(s.t.Context(),
		&adaptation.RunPodSandboxRequest{Pod: p.nri()}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) stopSandbox(p pod) {
	s.t.Helper()
	if err := s.runtime.StopPodSandbox(s.t.Context(),
		&adaptation.StopPodSandboxRequest{Pod: p.nri()}); err != nil {
		s.t.Fatal(err)
	}
}

// portOf returns the claim's XPUPort.
func (s *site) portOf(c *resourceapi.ResourceClaim) v1alpha1.XPUPort {
	s.t.Helper()
	var ports v1alpha1.XPUPortList
	if err := s.admin.List(s.t.Context(), &ports, client.InNamespace(c.Namespace)); err != nil ||
		len(ports.Items) != 1 {
		s.t.Fatalf("XPUPorts %+v, %v; want that of the claim", ports.Items, err)
	}
	return ports.Items[0]
}

// TestMoveToDRA: a pod keeps its Function while its pool moves to DRA, and no other pod gets the
// Function.
func TestMoveToDRA(t *testing.T) {
	s := newCRDSite(t)
	s.config.times.conflict = 50 * time.Millisecond
	vf, other := s.vfs[0], s.vfs[1]
	p := newPod(t, "pod0")
	s.startRuntime()
	s.start()
	s.wantHealthy(vf, other)
	if _, err := s.give(p.name, vf); err != nil {
		t.Fatal(err)
	}

	s.mustAdd(p, vf)

	s.declare(byDRA())
	s.awaitOffer("the Function of the pod is tainted, the other is offered", []function.ID{other},
		[]function.ID{vf})
	s.wantHealthy()
	s.wantInPod(p, vf)
	s.del(p, vf) // the pod's sandbox died, and the pod gets another one
	p.sandbox = "another-sandbox"
	s.mustAdd(p, vf)
	driver := s.register()
	c := s.allocate("net", vf)
	if got, err := driver.Prepare(t.Context(), c); err == nil ||
		!strings.Contains(err.Error(), "pod default/pod0") {
		t.Errorf("NodePrepareResources = %v, %v, want an error that names the pod that has the "+
			"Function", got, err)
	}

	s.wantInPod(p, vf)

	// Both the runtime and the kubelet must say that the pod is gone.
	s.del(p, vf)
	s.awaitHooks()
	s.awaitOffer("the kubelet says that the pod has it still", []function.ID{other},
		[]function.ID{vf})
	s.pods.Set()
	s.awaitOffer("all are offered", []function.ID{vf, other}, nil)
	s.prepareUntil(driver, c)
	s.unprepare(driver, c)
	s.delete(c)
	s.eventually("the xPU does not serve the claim any more", func() bool {
		return len(s.opi.Ports()) == 0
	})
	s.endClean()
}

// TestMoveToDevicePlugin is the opposite of TestMoveToDRA.
func TestMoveToDevicePlugin(t *testing.T) {
	s := newCRDSite(t)
	s.config.times.conflict = 50 * time.Millisecond
	vf, other := s.vfs[0], s.vfs[1]
	s.declare(byDRA())
	s.startRuntime()
	s.start()
	s.awaitOffer("both are offered", []function.ID{vf, other}, nil)
	driver := s.register()
	first, second := s.allocate("net", vf), s.allocateFor("pod4", "fast", "late", other)
	s.prepareUntil(driver, first)

	s.declare(byDevicePlugin(v1alpha1.ProvisionAtAdd))
	s.wantHealthy(other)
	_, err := s.kubelet.Allocate(t.Context(), resource, vf.String())
	if err == nil || !strings.Contains(err.Error(), "claim default/net has it") {
		t.Errorf("Allocate: %v, want an error that names the claim", err)
	}

	// This claim was allocated before the pool moved. The first owner that asks gets the Function.
	s.prepareUntil(driver, second)
	s.wantHealthy()
	s.unprepare(driver, second)
	s.wantHealthy(other)
	if _, err := s.give("pod2", other); err != nil {
		t.Fatal(err)
	}

	if got, err := driver.Prepare(t.Context(), second); err == nil ||
		!strings.Contains(err.Error(), "pod default/pod2") {
		t.Errorf("NodePrepareResources = %v, %v, want an error that names the pod that has the "+
			"Function", got, err)
	}

	s.pods.Set()

	s.unprepare(driver, first)
	s.wantHealthy(vf, other)

	// The claim's Port must be deleted before the next pod's Port is made.
	p := newPod(t, "pod3")
	if _, err := s.give(p.name, vf); err != nil {
		t.Fatal(err)
	}

	done := make(chan error, 1)
	go func() { _, err := s.add(p, vf); done <- err }()
	s.delete(first)
	s.delete(second)
	if err := <-done; err != nil {
		t.Fatalf("ADD: %v", err)
	}

	s.eventually("the xPU does not serve the claims any more", func() bool {
		return len(s.opi.Ports()) == 1
	})
	s.wantInPod(p, vf)
	s.del(p, vf)
	s.endClean()
}

// giveBoth starts the agent with two pools, gives the pod vf by the device plugin and claimed by a
// claim, and returns when both are attached.
func (s *site) giveBoth(
	p pod, vf, claimed function.ID,
) (driver *kubelettest.DRADriver, c *resourceapi.ResourceClaim) {
	s.t.Helper()
	fast, byClaim := byDevicePlugin(v1alpha1.ProvisionAtAdd), byDRA()
	fast.Selectors = []v1alpha1.FunctionSelector{{PCIAddresses: []string{vf.String()}}}
	byClaim.Selectors = []v1alpha1.FunctionSelector{{PCIAddresses: []string{claimed.String()}}}
	s.declare(fast)
	s.create(&v1alpha1.DevicePool{ObjectMeta: metav1.ObjectMeta{Name: "claimed"}, Spec: byClaim})
	s.startRuntime(p.nri())
	s.start()
	s.wantHealthy(vf)
	s.awaitOffer("the other Function is offered by DRA", []function.ID{claimed}, nil)
	s.awaitRuntime()

	driver = s.register()
	c = s.allocateFor(p.name, "claimed", "net", claimed)
	s.prepareUntil(driver, c)
	if _, err := s.give(p.name, vf); err != nil {
		s.t.Fatal(err)
	}

	resources := kubelettest.Pod(p.name, resource, vf.String())
	ofClaim := kubelettest.ClaimPod(p.name, v1alpha1.GroupName, claimed.DeviceName())
	resources.Containers[0].DynamicResources = ofClaim.Containers[0].DynamicResources
	s.pods.Set(resources)
	if _, err := s.add(p, vf); err != nil {
		s.t.Fatal(err)
	}

	s.eventually("the runtime's plugin attached the claim's interface", func() bool {
		s.runSandbox(p)
		_, err := p.Handle().LinkByName("fast0")
		return err == nil
	})
	return driver, c
}

// TestBothOnOnePod: a pod has an extended resource and a claim, from two pools of one PF.
func TestBothOnOnePod(t *testing.T) {
	s := newCRDSite(t)
	vf, claimed := s.vfs[0], s.vfs[1]
	p := newPod(t, "pod1")
	driver, c := s.giveBoth(p, vf, claimed)

	if _, err := p.Handle().LinkByName("net1"); err != nil {
		t.Errorf("net1 of the CNI plugin: %v", err)
	}

	s.wantPorts(vf, claimed)

	s.stopSandbox(p)
	s.wantGone(p, "fast0")
	if _, err := p.Handle().LinkByName("net1"); err != nil {
		t.Errorf("net1 went with the claim's interface, before DEL: %v", err)
	}

	s.del(p, vf)
	s.unprepare(driver, c)
	s.delete(c)
	s.pods.Set()
	s.wantHealthy(vf)
	s.awaitOffer("the other Function is offered by DRA", []function.ID{claimed}, nil)
	s.eventually("the xPU serves nothing", func() bool { return len(s.opi.Ports()) == 0 })
	s.endClean()
}

// TestClaimByCNI: the CNI plugin attaches a Function of a claim of the same pod.
func TestClaimByCNI(t *testing.T) {
	s := newCRDSite(t)
	vf, other := s.vfs[0], s.vfs[1]
	p, stranger := newPod(t, "pod1"), newPod(t, "pod2")
	s.declare(byDRA())
	s.startRuntime(p.nri())
	s.start()
	s.awaitOffer("both are offered", []function.ID{vf, other}, nil)
	s.awaitRuntime()
	driver := s.register()
	c := s.allocate("net", vf)
	s.prepareUntil(driver, c)

	if _, err := s.add(stranger, vf); err == nil ||
		!strings.Contains(err.Error(), "belongs to claim default/net") {
		t.Errorf("ADD of another pod: %v, want an error that names the claim", err)
	}
	if _, err := s.add(stranger, other); err == nil ||
		!strings.Contains(err.Error(), "the pod must have a claim to it") {
		t.Errorf("ADD without a claim: %v, want an error that says what is missing", err)
	}
	if _, err := s.add(p, vf); err != nil {
		t.Fatal(err)
	}

	mac := function.MAC(s.portOf(c).Spec.MAC)
	s.wantInterface(p, "net1", mac, podAddress)
	s.wantPorts(vf)
	s.runSandbox(p)
	s.wantInterface(p, "net1", mac, podAddress)
	s.wantGone(p, "fast0")

	s.eventually("the claim says so", func() bool {
		if err := s.admin.Get(t.Context(), client.ObjectKeyFromObject(c), c); err != nil {
			t.Fatal(err)
		}
		if len(c.Status.Devices) != 1 {
			return false
		}
		data := c.Status.Devices[0].NetworkData
		return data != nil && data.InterfaceName == "net1"
	})

	s.end()
	s.start() // the runtime reports its sandbox
	s.awaitRuntime()
	s.wantInterface(p, "net1", mac, podAddress)

	s.del(p, vf)
	s.wantGone(p, "net1")
	s.wantOnHost()
	s.wantPorts(vf)
	s.stopSandbox(p)
	driver = s.register()
	s.unprepare(driver, c)
	s.delete(c)
	s.eventually("the xPU serves nothing", func() bool { return len(s.opi.Ports()) == 0 })
	s.endClean()
}

// TestXPUAwayByDRA: Functions whose xPU does not answer are tainted.
func TestXPUAwayByDRA(t *testing.T) {
	s := newCRDSite(t)
	s.declare(byDRA())
	s.start()
	s.awaitOffer("both are offered", s.vfs, nil)
	s.opi.Kill()

	s.eventually("both are tainted", func() bool {
		tainted := 0
		for _, slice := range s.slices() {
			for _, device := range slice.Spec.Devices {
				if has(device, v1alpha1.TaintXPUAway) {
					tainted++
				}
			}
		}

		return tainted == len(s.vfs)
	})

	if err := s.opi.Run(); err != nil {
		t.Fatal(err)
	}

	s.awaitOffer("both are offered again", s.vfs, nil)
}

// cordon sets the cordons of the node as an administrator does.
func (s *site) cordon(cordons ...v1alpha1.Cordon) {
	s.t.Helper()
	var node v1alpha1.XPUNode
	s.eventually("the XPUNode exists", func() bool {
		return s.admin.Get(s.t.Context(), client.ObjectKey{Name: nodeName}, &node) == nil
	})
	before := node.DeepCopy()
	node.Spec.Cordons = cordons
	must.Succeed(s.t, s.admin.Patch(s.t.Context(), &node, client.MergeFrom(before)))
}

// TestCordon checks that the Functions of a cordoned PF are not given to pods, by neither way, until
// the cordon is taken back, and that an agent that restarts does not forget it.
func TestCordon(t *testing.T) {
	cordon := v1alpha1.Cordon{PF: "0000:3b:00.0", Reason: "new firmware"}
	tainted := func(s *site) (number int) {
		for _, slice := range s.slices() {
			for _, device := range slice.Spec.Devices {
				if has(device, v1alpha1.TaintCordoned) {
					number++
				}
			}
		}
		return number
	}

	t.Run("DRA", func(t *testing.T) {
		s := newCRDSite(t)
		s.declare(byDRA())
		s.start()
		s.awaitOffer("both are offered", s.vfs, nil)
		s.cordon(cordon, v1alpha1.Cordon{PF: "0000:ff:00.0"}) // one of a card that is not there
		s.eventually("both are tainted", func() bool { return tainted(s) == len(s.vfs) })

		s.end()
		s.start()
		s.eventually("they still are", func() bool { return tainted(s) == len(s.vfs) })
		s.cordon()
		s.awaitOffer("both are offered again", s.vfs, nil)
	})

	t.Run("device plugin", func(t *testing.T) {
		s := newCRDSite(t)
		s.start()
		s.wantHealthy(s.vfs...)
		s.cordon(cordon)
		s.wantHealthy()
		s.cordon(v1alpha1.Cordon{PF: "0000:3b:00.1"})
		s.wantHealthy(s.vfs...)
	})
}
