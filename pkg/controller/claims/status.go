// SPDX-License-Identifier: Apache-2.0

package claims

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
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// claimConditions are the conditions of a device that the controller owns.
var claimConditions = [...]string{v1alpha1.ConditionProvisioned, v1alpha1.ConditionProvisionFailed}

// report writes the claim's status if it differs from before, and sends events about new problems
// of devices to the claim and to each pod that waits for it. That a gang is not complete yet is no
// problem.
//
// It uses Update: server-side apply would write the opaque parameters of the allocation with their
// keys in another order, which the API server refuses as a change of the allocation. As an Update
// needs the resourceVersion that was read, it cannot overwrite what others wrote meanwhile, nor
// reach a later allocation of the same device.
func (r *reconciler) report(
	ctx context.Context, c, before *resourceapi.ResourceClaim, devices []claim.Device,
) error {
	if equality.Semantic.DeepEqual(before.Status, c.Status) {
		return nil
	}

	wanted := c.DeepCopy() // an API server without status.devices gives the claim back without them
	err := r.Client.Status().Update(ctx, c)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // the claim has changed: its event is on the way
	}
	if err != nil {
		return fmt.Errorf("status of ResourceClaim %s/%s: %w", c.Namespace, c.Name, err)
	}

	for i := range devices {
		was := deviceCondition(before, &devices[i], v1alpha1.ConditionProvisioned)
		is := deviceCondition(wanted, &devices[i], v1alpha1.ConditionProvisioned)
		if is.Status != metav1.ConditionFalse || is.Reason == v1alpha1.ReasonGangIncomplete ||
			is.Status == was.Status && is.Reason == was.Reason && is.Message == was.Message {
			continue
		}

		r.Events.Eventf(c, nil, corev1.EventTypeWarning, is.Reason, "Provision", "%s", is.Message)
		for _, consumer := range c.Status.ReservedFor {
			if consumer.APIGroup == "" && consumer.Resource == "pods" {
				pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
					Namespace: c.Namespace, Name: consumer.Name, UID: consumer.UID,
				}}
				r.Events.Eventf(pod, c, corev1.EventTypeWarning, is.Reason, "Provision",
					"ResourceClaim %s: %s", c.Name, is.Message)
			}
		}
	}

	return nil
}

// deviceStatus is the claim's entry for the device, nil if there is none.
func deviceStatus(
	c *resourceapi.ResourceClaim, d *claim.Device,
) *resourceapi.AllocatedDeviceStatus {
	for i := range c.Status.Devices {
		if s := &c.Status.Devices[i]; claim.IsOf(s, d.Pool, d.Name, d.Share) {
			return s
		}
	}
	return nil
}

// deviceCondition is a condition in the claim's entry for the device, its zero value if there is
// none.
func deviceCondition(
	c *resourceapi.ResourceClaim, d *claim.Device, conditionType string,
) metav1.Condition {
	entry := ptr.Deref(deviceStatus(c, d), resourceapi.AllocatedDeviceStatus{})
	return ptr.Deref(meta.FindStatusCondition(entry.Conditions, conditionType), metav1.Condition{})
}

// setConditions has exactly these of claimConditions in the claim's entry for the device. Entries
// of this driver that say nothing are removed.
func setConditions(c *resourceapi.ResourceClaim, d *claim.Device, wanted []metav1.Condition) {
	if deviceStatus(c, d) == nil {
		c.Status.Devices = append(c.Status.Devices, claim.NewEntry(d.Pool, d.Name, d.Share))
	}

	conditions := &deviceStatus(c, d).Conditions
	for _, conditionType := range claimConditions {
		if condition := meta.FindStatusCondition(wanted, conditionType); condition != nil {
			meta.SetStatusCondition(conditions, *condition)
		} else {
			meta.RemoveStatusCondition(conditions, conditionType)
		}
	}

	c.Status.Devices = slices.DeleteFunc(c.Status.Devices,
		func(s resourceapi.AllocatedDeviceStatus) bool {
			return s.Driver == v1alpha1.GroupName && len(s.Conditions) == 0 && s.Data == nil &&
				s.NetworkData == nil
		})
}
