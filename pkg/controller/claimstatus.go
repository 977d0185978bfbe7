package controller

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// claimConditions are the conditions of a device that the controller owns.
var claimConditions = [...]string{v1alpha1.ConditionProvisioned, v1alpha1.ConditionProvisionFailed}

// report brings the controller's conditions in the claim's status up to date, and tells of problems that are new. In
// the good case of a pool that does not hold pods back there is nothing to tell and nothing is written.
//
// It is an Update of what was read, and not a server-side apply: that rewrites the opaque parameters in the allocation
// in its own order of keys, which the API server then refuses as a change of the allocation. What the node's agent
// and other drivers wrote stays, because the resourceVersion must be the one that was read. For the same reason the
// conditions cannot end up in a later allocation of the same device.
func (r *claims) report(ctx context.Context, c *resourceapi.ResourceClaim, devices []claim.Device, results []result) error {
	before := c.DeepCopy()
	var news []*problem
	for i := range devices {
		was := deviceCondition(c, &devices[i], v1alpha1.ConditionProvisioned)
		if p := results[i].problem; p != nil && !says(was, p) {
			news = append(news, p)
		}
		setConditions(c, &devices[i], wantedConditions(&devices[i], results[i], c.Generation))
	}
	if equality.Semantic.DeepEqual(before.Status, c.Status) {
		return nil
	}
	err := r.client.Status().Update(ctx, c)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // the claim has changed: its event is on the way
	}
	if err != nil {
		return fmt.Errorf("status of ResourceClaim %s/%s: %w", c.Namespace, c.Name, err)
	}
	for _, p := range news {
		r.record(before, p)
	}
	return nil
}

// says tells whether the condition already says what the problem says.
func says(condition *metav1.Condition, p *problem) bool {
	return condition != nil && condition.Status == metav1.ConditionFalse && condition.Reason == p.reason && condition.Message == p.message
}

// tell sends an event to the claim and to each pod that waits for it.
func (r *claims) record(c *resourceapi.ResourceClaim, p *problem) {
	r.events.Eventf(c, nil, corev1.EventTypeWarning, p.reason, "Provision", "%s", p.message)
	for _, consumer := range c.Status.ReservedFor {
		if consumer.APIGroup != "" || consumer.Resource != "pods" {
			continue
		}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: consumer.Name, UID: consumer.UID}}
		r.events.Eventf(pod, c, corev1.EventTypeWarning, p.reason, "Provision", "ResourceClaim %s: %s", c.Name, p.message)
	}
}

// deviceStatus is the claim's entry for the device, nil if there is none.
func deviceStatus(c *resourceapi.ResourceClaim, d *claim.Device) *resourceapi.AllocatedDeviceStatus {
	i := slices.IndexFunc(c.Status.Devices, func(s resourceapi.AllocatedDeviceStatus) bool {
		return s.Driver == v1alpha1.GroupName && s.Pool == d.Pool && s.Device == d.Name
	})
	if i < 0 {
		return nil
	}
	return &c.Status.Devices[i]
}

// deviceCondition is a condition in the claim's entry for the device, nil if there is none.
func deviceCondition(c *resourceapi.ResourceClaim, d *claim.Device, conditionType string) *metav1.Condition {
	if entry := deviceStatus(c, d); entry != nil {
		return meta.FindStatusCondition(entry.Conditions, conditionType)
	}
	return nil
}

// setConditions has exactly these of claimConditions in the claim's entry for the device, and no entry for nothing.
func setConditions(c *resourceapi.ResourceClaim, d *claim.Device, wanted []metav1.Condition) {
	entry := deviceStatus(c, d)
	if entry == nil && len(wanted) == 0 {
		return
	}
	if entry == nil {
		c.Status.Devices = append(c.Status.Devices, resourceapi.AllocatedDeviceStatus{Driver: v1alpha1.GroupName, Pool: d.Pool, Device: d.Name})
		entry = &c.Status.Devices[len(c.Status.Devices)-1]
	}
	for _, conditionType := range claimConditions {
		if meta.FindStatusCondition(wanted, conditionType) == nil {
			meta.RemoveStatusCondition(&entry.Conditions, conditionType)
		}
	}
	for _, condition := range wanted {
		meta.SetStatusCondition(&entry.Conditions, condition)
	}
	c.Status.Devices = slices.DeleteFunc(c.Status.Devices, func(s resourceapi.AllocatedDeviceStatus) bool {
		return s.Driver == v1alpha1.GroupName && len(s.Conditions) == 0 && s.Data == nil && s.NetworkData == nil
	})
}

// wantedConditions are those of claimConditions that the device is to have.
func wantedConditions(d *claim.Device, v result, generation int64) []metav1.Condition {
	condition := func(conditionType string, status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return metav1.Condition{Type: conditionType, Status: status, Reason: reason, Message: message, ObservedGeneration: generation}
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
