// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// TestGang: a pod whose Ports are up and that is not bound waits for its gang, or is given back.
func TestGang(t *testing.T) {
	const where = "request nic of claim web-nic is not Provisioned: "
	const isUp = "XPUPort default/node1-0000-3b-01-0 at XPU xpu-1 is up"
	told := func(reason string, failed metav1.ConditionStatus) []metav1.Condition {
		return []metav1.Condition{
			{Type: v1alpha1.ConditionProvisioned, Status: metav1.ConditionFalse, Reason: reason,
				Message: "so it is"},
			{Type: v1alpha1.ConditionProvisionFailed, Status: failed, Reason: reason,
				Message: "so it is"},
		}
	}

	incomplete := told(v1alpha1.ReasonGangIncomplete, metav1.ConditionFalse)

	for name, test := range map[string]struct {
		conditions []metav1.Condition
		ended      bool // the other pod of the gang
		// more changes the other pod of the gang, its claim, and the cluster. It may be nil.
		more func(c *cluster, pod *corev1.Pod, claim *resourceapi.ResourceClaim)
		want string
	}{
		"waits": {
			told(v1alpha1.ReasonGangIncomplete, metav1.ConditionFalse), false, nil,
			where + "XPUPort default/node1-0000-3b-01-0 at XPU xpu-1 is up; waits for 1 of 2 " +
				"claims of gang train",
		},
		"says nothing yet": {
			nil, false, nil, where + "XPUPort default/node1-0000-3b-01-0 at XPU xpu-1 is up; waits " +
				"for 1 of 2 claims of gang train",
		},
		"waits for a pod that is missing": {
			told(v1alpha1.ReasonGangIncomplete, metav1.ConditionFalse), true, nil,
			where + "GangIncomplete: so it is",
		},
		"given back": {
			told(v1alpha1.ReasonGangFailed, metav1.ConditionTrue), false, nil,
			where + "GangFailed: so it is",
		},
		"the other has an extended resource": {
			nil, false, func(_ *cluster, p *corev1.Pod, c *resourceapi.ResourceClaim) {
				p.Spec.ResourceClaims, p.Status.ResourceClaimStatuses = nil, nil
				p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{
					ResourceClaimName: c.Name,
				}
			}, where + isUp + "; waits for 1 of 2 claims of gang train",
		},
		"a request with alternatives": {
			nil, false, func(_ *cluster, _ *corev1.Pod, c *resourceapi.ResourceClaim) {
				c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{
					FirstAvailable: []resourceapi.DeviceSubRequest{
						{DeviceClassName: "gpu"}, {DeviceClassName: "xpu"},
					},
				}}
			}, where + isUp + "; waits for 1 of 2 claims of gang train",
		},
		"the other waits for another driver": {
			incomplete, false, func(_ *cluster, _ *corev1.Pod, c *resourceapi.ResourceClaim) {
				c.Spec.Devices.Requests[0].Exactly.DeviceClassName = "gpu"
			}, where + "GangIncomplete: so it is",
		},
		"the other joins no network": {
			incomplete, false, func(all *cluster, _ *corev1.Pod, c *resourceapi.ResourceClaim) {
				all.claim.DeepCopy().Status.DeepCopyInto(&c.Status)
				c.Status.Devices = nil
				c.Status.Allocation.Devices.Results[0].Pool = "node1/0000-3b-00-0/plain"
				all.more = append(all.more, &v1alpha1.DevicePool{
					ObjectMeta: metav1.ObjectMeta{Name: "plain"},
				})
			}, where + "GangIncomplete: so it is",
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster()
			bound(c)
			group := &corev1.PodSchedulingGroup{PodGroupName: new("train")}
			c.pod.Spec.NodeName, c.pod.Spec.SchedulingGroup, c.state = "", group, nil
			c.claim.Status.Allocation.Devices.Results[0].BindingConditions = []string{
				v1alpha1.ConditionProvisioned,
			}
			c.claim.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
				Driver: v1alpha1.GroupName, Pool: "node1/0000-3b-00-0/fast",
				Device: "0000-3b-01-0", Conditions: test.conditions,
			}}

			other, waits := c.pod.DeepCopy(), c.claim.DeepCopy()
			other.Name, other.UID, waits.Name, waits.UID = "other", "other", "other-nic", "other-nic"
			other.Status.ResourceClaimStatuses[0].ResourceClaimName = new("other-nic")
			waits.Status.Allocation = nil
			waits.Spec.Devices.Requests = []resourceapi.DeviceRequest{
				{Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "xpu"}},
			}
			if test.more != nil {
				test.more(c, other, waits)
			}
			if test.ended {
				other.Status.Phase = corev1.PodFailed
			}
			c.more = append(c.more, other, waits, classOf("xpu", v1alpha1.GroupName),
				classOf("gpu", "gpu.example.com"))

			if p := c.explain(t); p.OK || p.Verdict != test.want {
				t.Errorf("%t, %s\nwant %s", p.OK, p.Verdict, test.want)
			}
		})
	}
}

// classOf returns a DeviceClass for the devices of a driver.
func classOf(name, driver string) *resourceapi.DeviceClass {
	return &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{
			CEL: &resourceapi.CELDeviceSelector{Expression: `device.driver == "` + driver + `"`},
		}}},
	}
}

// TestGangWithoutNetwork: a device that joins no network has no Port, and its pod waits all the same.
func TestGangWithoutNetwork(t *testing.T) {
	f := facts{gang: &gang{name: "train", claims: 2, waiting: 1}}
	s := f.withGang(Stage{Status: Skipped, Text: "no network"}, claim.Device{BeforeBind: true}, nil)
	if want := "no network; waits for 1 of 2 claims of gang train"; s.Status != Waiting ||
		s.Text != want {
		t.Errorf("%+v, want %s", s, want)
	}
}
