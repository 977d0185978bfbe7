// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/gangs"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// askGang changes what the devices report alone, in conditions, to what the gang of the claim lets
// them report. It returns the pause before the next attempt, 0 if an event will come. A claim of
// which the scheduler was condition that it is ready, or that its gang is given back, reports the same
// until it is deallocated.
func (r *reconciler) askGang(
	ctx context.Context, c *resourceapi.ResourceClaim, devices []claim.Device,
	conditions [][]metav1.Condition,
) (time.Duration, error) {
	request := reconciling.RequestFor(c)
	binding := bindingDevices(devices)
	if len(binding) == 0 || allProvisioned(c, devices, binding) {
		r.leaveGang(request)
		return 0, nil
	}
	if keepGivenBack(c, devices, binding, conditions) {
		return 0, nil
	}

	state, failure := together(binding, conditions)
	verdict, err := r.Gangs.Ask(ctx, c, state, failure)
	if err != nil {
		return 0, err
	}

	switch {
	case verdict.Answer == gangs.Wait:
		return r.holdBack(c, verdict, devices, binding, conditions), nil
	case verdict.Answer == gangs.GiveBack:
		for _, i := range binding {
			failed := meta.FindStatusCondition(conditions[i], v1alpha1.ConditionProvisionFailed)
			if failed == nil {
				conditions[i] = givenBack(c, verdict.Reason, verdict.Message)
			}
		}
	}
	r.held.Reset(request)
	return 0, nil
}

// leaveGang forgets a claim that reports nothing about its gang any more.
func (r *reconciler) leaveGang(request reconcile.Request) {
	r.Gangs.Forget(request.NamespacedName)
	r.held.Reset(request)
}

// bindingDevices returns the indexes of the devices for which the scheduler waits.
func bindingDevices(devices []claim.Device) (indexes []int) {
	for i := range devices {
		if devices[i].BeforeBind && !devices[i].Admin {
			indexes = append(indexes, i)
		}
	}
	return indexes
}

// together returns the state of a claim by the conditions of its devices, and why an xPU refuses a
// Port.
func together(binding []int, conditions [][]metav1.Condition) (state gangs.State, failure string) {
	state = gangs.Up
	for _, i := range binding {
		failed := meta.FindStatusCondition(conditions[i], v1alpha1.ConditionProvisionFailed)
		if failed != nil {
			return gangs.Failed, failed.Reason + ": " + failed.Message
		}
		if !meta.IsStatusConditionTrue(conditions[i], v1alpha1.ConditionProvisioned) {
			state = gangs.Pending
		}
	}
	return state, ""
}

// holdBack removes from the conditions what would have the scheduler act. After a while the
// conditions say what the claim waits for.
func (r *reconciler) holdBack(
	c *resourceapi.ResourceClaim, verdict gangs.Verdict, devices []claim.Device, binding []int,
	conditions [][]metav1.Condition,
) (pause time.Duration) {
	waited := r.held.Elapsed(reconciling.RequestFor(c))
	for _, i := range binding {
		condition := deviceCondition(c, &devices[i], v1alpha1.ConditionProvisionFailed)
		switch {
		case condition.Status == metav1.ConditionTrue: // by the controller before this one
			continue
		case !meta.IsStatusConditionTrue(conditions[i], v1alpha1.ConditionProvisioned):
			meta.RemoveStatusCondition(&conditions[i], v1alpha1.ConditionProvisionFailed)
			continue
		}

		conditions[i] = nil
		if waited < r.BusyGrace {
			pause = r.BusyGrace - waited
			continue
		}
		conditions[i] = provisioned(c, v1alpha1.ReasonGangIncomplete, "the xPU serves the Port; the "+
			"pod is bound when all Ports of PodGroup "+verdict.Group+" are up")
	}
	return pause
}

// givenBack returns the conditions of a device that is given back with others.
func givenBack(c *resourceapi.ResourceClaim, reason, message string) []metav1.Condition {
	conditions := provisioned(c, reason, message)
	failed := conditions[0]
	failed.Type, failed.Status = v1alpha1.ConditionProvisionFailed, metav1.ConditionTrue
	return append(conditions, failed)
}

// keepGivenBack keeps the conditions of devices that were given back with others, and reports
// whether any were.
func keepGivenBack(
	c *resourceapi.ResourceClaim, devices []claim.Device, binding []int,
	conditions [][]metav1.Condition,
) (kept bool) {
	for _, i := range binding {
		condition := deviceCondition(c, &devices[i], v1alpha1.ConditionProvisionFailed)
		switch condition.Reason {
		case v1alpha1.ReasonGangFailed, v1alpha1.ReasonSiblingFailed:
			conditions[i] = givenBack(c, condition.Reason, condition.Message)
			kept = true
		}
	}
	return kept
}

// allProvisioned reports whether the claim says of all these devices that they are provisioned.
func allProvisioned(c *resourceapi.ResourceClaim, devices []claim.Device, binding []int) bool {
	for _, i := range binding {
		condition := deviceCondition(c, &devices[i], v1alpha1.ConditionProvisioned)
		if condition.Status != metav1.ConditionTrue {
			return false
		}
	}
	return true
}
