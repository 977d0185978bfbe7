// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/host"
	"github.com/opiproject/xpu-device-plugin/test/qemu/node"
)

// cardLost is a node whose first card is unplugged and plugged again while pods have all of its
// VFs: four by claims, three by the device plugin. Another pod is on the second card.
type cardLost struct {
	*field
	driver  *node.Driver
	claimed map[*node.Pod]*resourceapi.ResourceClaim
	plugged map[*node.Pod]function.ID
	other   *node.Pod
	otherVF function.ID
	// had is the description of each pod's interface before.
	had map[*node.Pod]string
}

// lostConf is the configuration of the pods by the device plugin. The claims ask for the same.
var lostConf = node.NetConf{"vlan": 100, "trust": "on"}

// TestCardLost unplugs a card under eight running pods and plugs it again. It checks that every pod
// gets back its interface, with the properties that the PF enforces, and that its traffic goes on.
// In the end the host is as before the pods.
func TestCardLost(t *testing.T) {
	c := newCardLost(t)
	c.Start()
	c.AwaitRuntime()
	c.driver = c.Register()
	c.WantHealthy(resource, append(c.vfs[0][4:7:7], c.otherVF)...)
	c.start(t)
	c.wantTraffic(t)
	enforced := node.HostState(t)[string(c.pfs[0])].VFs

	must.Succeed(t, host.Unplug(t.Context(), 0))
	c.Eventually("all that the card's pods had is lost", func() bool {
		return strings.Count(c.Log(), "has lost its Function") == 7
	})

	for pod := range c.had {
		if pod != c.other {
			pod.WantNo("net1")
		}
	}

	c.wantReady(t, metav1.ConditionFalse, v1alpha1.ReasonLost)
	if !c.other.Has("net1") {
		t.Error("the pod on the other card lost its interface")
	}

	begin := time.Now()
	must.Succeed(t, host.Plug(t.Context(), 0))
	c.Eventually("the PF is back", func() bool { return card.Netdev(c.pfs[0]) != "" })
	pf, err := netlink.LinkByName(card.Netdev(c.pfs[0]))
	must.Succeed(t, err)
	must.Succeed(t, netlink.LinkSetUp(pf))

	for pod := range c.had {
		c.Eventually(pod.Name+" has its interface again", pod.Ready)
	}

	t.Logf("all pods had their interfaces %s after the card was plugged", since(time.Now(), begin))
	c.wantSame(t, enforced)
	c.wantReady(t, metav1.ConditionTrue, v1alpha1.ReasonAttached)
	node.Carrier(t, c.pfs[0])
	c.wantTraffic(t)
	c.wantEvents(t)

	c.end(t)
	node.WantState(t, c.before)
	c.End()
	c.WantNothingLeft()
}

func newCardLost(t *testing.T) *cardLost {
	t.Helper()
	card.InGuest(t, "igb")
	pfs := card.PFs(t)
	const vfs = 7

	setVFs := func(n int) {
		card.SetAttribute(t, pfs[0], "sriov_numvfs", "0")
		card.SetAttribute(t, pfs[0], "sriov_numvfs", strconv.Itoa(n))
	}

	had := card.Number(t, pfs[0], "sriov_numvfs")
	setVFs(vfs)
	t.Cleanup(func() { setVFs(had) })

	plugged := node.Pool("fast", v1alpha1.FunctionSelector{RootDevices: []string{
		string(pfs[0]) + "#4-6", string(pfs[1]) + "#0",
	}})
	c := &cardLost{
		field: newFieldWith(t,
			node.Options{Cluster: true, Pools: []v1alpha1.DevicePool{plugged}}),
		claimed: map[*node.Pod]*resourceapi.ResourceClaim{}, plugged: map[*node.Pod]function.ID{},
		had: map[*node.Pod]string{},
	}

	c.otherVF = c.vfs[1][0]
	c.Cluster.Create(&v1alpha1.DevicePool{
		ObjectMeta: metav1.ObjectMeta{Name: "claims"},
		Spec: v1alpha1.DevicePoolSpec{
			Selectors: []v1alpha1.FunctionSelector{
				{RootDevices: []string{string(pfs[0]) + "#0-3"}},
			},
			Allow:  v1alpha1.PrivilegedFields(),
			NumVFs: new(int32(vfs)), // so that the agent makes the VFs again
		},
	})

	c.StartRuntime()
	return c
}

// start starts the pods.
func (c *cardLost) start(t *testing.T) {
	t.Helper()
	for i, vf := range c.vfs[0][:4] {
		pod := c.NewPod(fmt.Sprintf("claimed%d", i), byte(i+1))
		c.Cluster.Create(&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: pod.Name},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "none"}}},
		})

		c.claimed[pod] = c.Cluster.Allocate(pod, "claims", c.pfs[0], vf, v1alpha1.InterfaceConfig{
			InterfaceName: "net1", Addresses: []string{pod.IP.String() + "/24"},
			MTU: new(int32(1400)),
			VF:  &v1alpha1.VFConfig{VLAN: new(int32(100)), Trust: new(true)},
		})

		c.driver.MustPrepare(c.claimed[pod])
		pod.MustRun("net1")
	}

	for i, vf := range append(c.vfs[0][4:7:7], c.otherVF) {
		pod := c.pod(fmt.Sprintf("plugged%d", i), byte(10+i), vf)
		pod.MustAdd(vf, lostConf)
		c.plugged[pod] = vf
		if vf == c.otherVF {
			c.other = pod
		}
	}

	for pod := range c.claimed {
		c.had[pod] = interfaceOf(t, pod)
	}

	for pod := range c.plugged {
		c.had[pod] = interfaceOf(t, pod)
	}
}

// interfaceOf describes a pod's net1, without the numbers that the kernel chooses.
func interfaceOf(t *testing.T, pod *node.Pod) string {
	t.Helper()
	a := pod.Interface("net1")
	l, err := pod.Handle().LinkByName("net1")
	must.Succeed(t, err)
	addresses, err := pod.Handle().AddrList(l, netlink.FAMILY_V4)
	must.Succeed(t, err)
	return fmt.Sprintf("%s, MTU %d, %s", a.HardwareAddr, a.MTU, addresses)
}

// wantTraffic checks that the pod on the other card reaches all others.
func (c *cardLost) wantTraffic(t *testing.T) {
	t.Helper()
	for pod := range c.had {
		if pod != c.other {
			c.other.WantReach(t, pod)
		}
	}
}

// wantSame checks that the pods and the PF have what they had before.
func (c *cardLost) wantSame(t *testing.T, enforced map[int]node.VFState) {
	t.Helper()
	for pod, had := range c.had {
		if has := interfaceOf(t, pod); has != had {
			t.Errorf("%s has %s, had %s", pod.Name, has, had)
		}
	}

	// If no MAC address was requested for a VF, the PF may have a new one.
	now := node.HostState(t)[string(c.pfs[0])].VFs
	for i, vf := range now {
		vf.MAC = enforced[i].MAC
		now[i] = vf
	}
	if diff := cmp.Diff(enforced, now); diff != "" {
		t.Errorf("what the PF enforces (-before +now):\n%s", diff)
	}
}

// wantReady waits until the claims have this condition Ready for their devices.
func (c *cardLost) wantReady(t *testing.T, status metav1.ConditionStatus, reason string) {
	t.Helper()
	for pod, object := range c.claimed {
		c.Eventually(fmt.Sprintf("claim of %s is Ready: %s", pod.Name, status), func() bool {
			must.Succeed(t,
				c.Cluster.Admin.Get(t.Context(), client.ObjectKeyFromObject(object), object))

			for _, d := range object.Status.Devices {
				for _, condition := range d.Conditions {
					if condition.Type == v1alpha1.ConditionReady && condition.Status == status &&
						condition.Reason == reason {
						return true
					}
				}
			}

			return false
		})
	}
}

// wantEvents waits until each pod with a claim has an event about the loss.
func (c *cardLost) wantEvents(t *testing.T) {
	t.Helper()
	c.Eventually("events of the pods", func() bool {
		var events corev1.EventList
		must.Succeed(t, c.Cluster.Admin.List(t.Context(), &events, client.InNamespace("default")))
		told := map[string]bool{}
		for _, e := range events.Items {
			told[e.InvolvedObject.Name+" "+e.Reason] = true
		}

		for pod := range c.had {
			if pod != c.other &&
				(!told[pod.Name+" FunctionLost"] || !told[pod.Name+" FunctionBack"]) {
				return false
			}
		}

		return true
	})
}

// end ends the pods.
func (c *cardLost) end(t *testing.T) {
	t.Helper()
	for pod, object := range c.claimed {
		pod.MustStop()
		c.driver.MustUnprepare(object)
		c.Cluster.Unallocate(object)
		c.Cluster.Delete(&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: pod.Name},
		})
	}

	for pod, vf := range c.plugged {
		pod.MustDel(vf, lostConf)
	}
}
