// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// TestGang: a pod whose Ports are up and that is not bound waits for its gang, or is given back.
func TestGang(t *testing.T) {
	const where = "request nic of claim web-nic is not Provisioned: "
	told := func(reason string, failed metav1.ConditionStatus) []metav1.Condition {
		return []metav1.Condition{
			{Type: v1alpha1.ConditionProvisioned, Status: metav1.ConditionFalse, Reason: reason,
				Message: "so it is"},
			{Type: v1alpha1.ConditionProvisionFailed, Status: failed, Reason: reason,
				Message: "so it is"},
		}
	}

	for name, test := range map[string]struct {
		conditions []metav1.Condition
		ended      bool // the other pod of the gang
		want       string
	}{
		"waits": {
			told(v1alpha1.ReasonGangIncomplete, metav1.ConditionFalse), false,
			where + "XPUPort default/node1-0000-3b-01-0 at XPU xpu-1 is up; waits for 1 of 2 " +
				"claims of gang train",
		},
		"says nothing yet": {
			nil, false, where + "XPUPort default/node1-0000-3b-01-0 at XPU xpu-1 is up; waits " +
				"for 1 of 2 claims of gang train",
		},
		"waits for a pod that is missing": {
			told(v1alpha1.ReasonGangIncomplete, metav1.ConditionFalse), true,
			where + "GangIncomplete: so it is",
		},
		"given back": {
			told(v1alpha1.ReasonGangFailed, metav1.ConditionTrue), false,
			where + "GangFailed: so it is",
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

			other, claim := c.pod.DeepCopy(), c.claim.DeepCopy()
			other.Name, other.UID, claim.Name, claim.UID = "other", "other", "other-nic", "other-nic"
			other.Status.ResourceClaimStatuses[0].ResourceClaimName = new("other-nic")
			claim.Status.Allocation = nil
			if test.ended {
				other.Status.Phase = corev1.PodFailed
			}
			c.more = append(c.more, other, claim)

			if p := c.explain(t); p.OK || p.Verdict != test.want {
				t.Errorf("%t, %s\nwant %s", p.OK, p.Verdict, test.want)
			}
		})
	}
}
