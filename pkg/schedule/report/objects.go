// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
)

// Objects returns the pods of the decisions, each followed by the claims that it is the first to
// use, as the scheduler leaves them: pods with spec.nodeName and a condition PodScheduled, claims
// with allocation and reservedFor. Three things differ from a cluster. A claim that a template will
// make is called POD-CLAIM. UIDs of objects from files are empty. Times are missing.
func Objects(decisions []*schedule.Decision) []runtime.Object {
	last := map[string]*resourceapi.ResourceClaim{}
	for _, d := range decisions {
		for _, c := range d.Claims {
			last[c.Claim.Namespace+"/"+c.Claim.Name] = c.Claim
		}
	}

	var objects []runtime.Object
	for _, d := range decisions {
		objects = append(objects, scheduledPod(d))
		for _, c := range d.Claims {
			name := c.Claim.Namespace + "/" + c.Claim.Name
			if claim, isFirst := last[name]; isFirst {
				objects = append(objects, reservedClaim(claim))
				delete(last, name)
			}
		}
	}

	return objects
}

// scheduledPod returns the pod of a decision with its node and its status.
func scheduledPod(d *schedule.Decision) *corev1.Pod {
	pod := d.Pod.DeepCopy()
	pod.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Pod"))
	pod.ManagedFields = nil
	pod.Spec.NodeName = d.Node
	pod.Status.Phase = corev1.PodPending
	setScheduled(&pod.Status, scheduledCondition(d))

	for _, c := range d.Claims {
		switch {
		case c.PodClaim == "":
			pod.Status.ExtendedResourceClaimStatus = extendedStatus(pod, c.Claim)
		case c.Template != "":
			pod.Status.ResourceClaimStatuses = append(pod.Status.ResourceClaimStatuses,
				corev1.PodResourceClaimStatus{Name: c.PodClaim, ResourceClaimName: &c.Claim.Name})
		}
	}

	return pod
}

// scheduledCondition returns the condition PodScheduled. Its reasons are those of the scheduler.
func scheduledCondition(d *schedule.Decision) corev1.PodCondition {
	condition := corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}
	if d.Node != "" {
		return condition
	}

	condition.Status = corev1.ConditionFalse
	condition.Reason = corev1.PodReasonUnschedulable
	if slices.ContainsFunc(d.Reasons, func(r schedule.Reason) bool {
		return r.Code == schedule.PodGated
	}) {
		condition.Reason = corev1.PodReasonSchedulingGated
	}
	condition.Message = newPod(d).Why()[0]

	return condition
}

// setScheduled replaces the condition PodScheduled, and keeps the others.
func setScheduled(status *corev1.PodStatus, condition corev1.PodCondition) {
	status.Conditions = slices.DeleteFunc(status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled
	})
	status.Conditions = append(status.Conditions, condition)
}

// extendedStatus returns the status of a pod whose extended resources the claim serves. The claim's
// requests are named container-INDEX-request-INDEX, like those of the scheduler: the container in
// the list of init containers and containers, and the resource in the sorted list of its requests.
func extendedStatus(
	pod *corev1.Pod, claim *resourceapi.ResourceClaim,
) *corev1.PodExtendedResourceClaimStatus {
	status := &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: claim.Name}
	containers := slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers)

	for _, request := range claim.Spec.Devices.Requests {
		var c, r int
		if _, err := fmt.Sscanf(request.Name, "container-%d-request-%d", &c, &r); err != nil ||
			c >= len(containers) {
			continue
		}

		resources := slices.Sorted(maps.Keys(containers[c].Resources.Requests))
		if r < len(resources) {
			status.RequestMappings = append(status.RequestMappings,
				corev1.ContainerExtendedResourceRequest{ContainerName: containers[c].Name,
					ResourceName: string(resources[r]), RequestName: request.Name})
		}
	}

	return status
}

func reservedClaim(claim *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	claim = claim.DeepCopy()
	claim.SetGroupVersionKind(resourceapi.SchemeGroupVersion.WithKind("ResourceClaim"))
	claim.ManagedFields = nil
	return claim
}
