package provision

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metaapply "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// fieldOwner is the field manager of what the controller writes into ResourceClaims. The node's agent is another one:
// its conditions in the same entry stay.
const fieldOwner = client.FieldOwner("xpu-controller")

// claimConditions are the conditions of a device that the controller owns.
var claimConditions = [...]string{v1alpha1.ConditionProvisioned, v1alpha1.ConditionProvisionFailed}

// report brings the controller's conditions in the claim's status up to date, and tells of problems that are new. In
// the good case of a pool that does not hold pods back there is nothing to tell and nothing is written.
func (r *claims) report(ctx context.Context, c *resourceapi.ResourceClaim, devices []claim.Device, verdicts []verdict) error {
	status := resourceapply.ResourceClaimStatus()
	changed := false
	var news []*problem
	for i := range devices {
		have := ownedConditions(c, &devices[i])
		want := wantedConditions(&devices[i], verdicts[i], c.Generation)
		for j := range want {
			before := meta.FindStatusCondition(have, want[j].Type)
			if before != nil && before.Status == want[j].Status {
				want[j].LastTransitionTime = before.LastTransitionTime
			}
			if p := verdicts[i].problem; p != nil && want[j].Type == v1alpha1.ConditionProvisioned && !says(before, p) {
				news = append(news, p)
			}
		}
		changed = changed || !equality.Semantic.DeepEqual(have, want)
		if len(want) > 0 {
			status.WithDevices(deviceStatus(&devices[i], want))
		}
	}
	if !changed {
		return nil
	}
	// With UID and resourceVersion the conditions cannot end up in a later allocation of the same device.
	config := resourceapply.ResourceClaim(c.Name, c.Namespace).WithUID(c.UID).WithResourceVersion(c.ResourceVersion).WithStatus(status)
	err := r.client.Status().Apply(ctx, config, fieldOwner, client.ForceOwnership)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // the claim has changed: its event is on the way
	}
	if err != nil {
		return fmt.Errorf("status of ResourceClaim %s/%s: %w", c.Namespace, c.Name, err)
	}
	for _, p := range news {
		r.tell(c, p)
	}
	return nil
}

// says tells whether the condition already says what the problem says.
func says(condition *metav1.Condition, p *problem) bool {
	return condition != nil && condition.Status == metav1.ConditionFalse && condition.Reason == p.reason && condition.Message == p.message
}

// tell sends an event to the claim and to each pod that waits for it.
func (r *claims) tell(c *resourceapi.ResourceClaim, p *problem) {
	r.events.Eventf(c, nil, corev1.EventTypeWarning, p.reason, "Provision", "%s", p.message)
	for _, consumer := range c.Status.ReservedFor {
		if consumer.APIGroup != "" || consumer.Resource != "pods" {
			continue
		}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: consumer.Name, UID: consumer.UID}}
		r.events.Eventf(pod, c, corev1.EventTypeWarning, p.reason, "Provision", "ResourceClaim %s: %s", c.Name, p.message)
	}
}

// deviceCondition is a condition in the claim's entry for the device, nil if there is none.
func deviceCondition(c *resourceapi.ResourceClaim, d *claim.Device, conditionType string) *metav1.Condition {
	for i := range c.Status.Devices {
		s := &c.Status.Devices[i]
		if s.Driver == v1alpha1.GroupName && s.Pool == d.Pool && s.Device == d.Name {
			return meta.FindStatusCondition(s.Conditions, conditionType)
		}
	}
	return nil
}

func ownedConditions(c *resourceapi.ResourceClaim, d *claim.Device) []metav1.Condition {
	var owned []metav1.Condition
	for _, conditionType := range claimConditions {
		if condition := deviceCondition(c, d, conditionType); condition != nil {
			owned = append(owned, *condition)
		}
	}
	return owned
}

// wantedConditions are in the order of claimConditions.
func wantedConditions(d *claim.Device, v verdict, generation int64) []metav1.Condition {
	condition := func(conditionType string, status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return metav1.Condition{Type: conditionType, Status: status, Reason: reason, Message: message, ObservedGeneration: generation, LastTransitionTime: metav1.Now().Rfc3339Copy()}
	}
	switch {
	case v.problem != nil && v.failed:
		return []metav1.Condition{
			condition(v1alpha1.ConditionProvisioned, metav1.ConditionFalse, v.problem.reason, v.problem.message),
			condition(v1alpha1.ConditionProvisionFailed, metav1.ConditionTrue, v.problem.reason, v.problem.message),
		}
	case v.problem != nil:
		return []metav1.Condition{condition(v1alpha1.ConditionProvisioned, metav1.ConditionFalse, v.problem.reason, v.problem.message)}
	case d.BeforeBind && v.ready == v1alpha1.ReasonNoPortNeeded:
		return []metav1.Condition{condition(v1alpha1.ConditionProvisioned, metav1.ConditionTrue, v.ready, "the interface joins no network")}
	case d.BeforeBind && v.ready != "":
		return []metav1.Condition{condition(v1alpha1.ConditionProvisioned, metav1.ConditionTrue, v.ready, "the xPU serves the Port")}
	}
	return nil
}

func deviceStatus(d *claim.Device, conditions []metav1.Condition) *resourceapply.AllocatedDeviceStatusApplyConfiguration {
	s := resourceapply.AllocatedDeviceStatus().WithDriver(v1alpha1.GroupName).WithPool(d.Pool).WithDevice(d.Name)
	for _, c := range conditions {
		s.WithConditions(metaapply.Condition().
			WithType(c.Type).WithStatus(c.Status).WithReason(c.Reason).WithMessage(c.Message).
			WithObservedGeneration(c.ObservedGeneration).WithLastTransitionTime(c.LastTransitionTime))
	}
	return s
}
