// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	resourcehelper "k8s.io/component-helpers/resource"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
)

// podClaim is a claim of a pod. It must not be changed.
type podClaim struct {
	// name in the pod's spec.resourceClaims; "" for the claim for extended resources
	name     string
	template string // ResourceClaimTemplate that makes the claim; "" if the claim exists
	claim    *resourceapi.ResourceClaim
}

func (c *podClaim) isExtended() bool { return c.name == "" }

// podClaims returns the pod's claims, or reasons why no node can take the pod. If a template's
// claim does not exist yet, podClaims makes it. The last claim may be for extended resources that
// DeviceClasses serve.
func (s *Scheduler) podClaims(pod *corev1.Pod) (claims []*podClaim, reasons []Reason) {
	for i := range pod.Spec.ResourceClaims {
		c, reason := s.podClaim(pod, &pod.Spec.ResourceClaims[i])
		switch {
		case reason != nil:
			reasons = append(reasons, *reason)
		case c != nil:
			claims = append(claims, c)
			reasons = append(reasons, s.unusable(pod, c.claim)...)
		}
	}

	if s.features.ExtendedResources &&
		slices.ContainsFunc(slices.Collect(maps.Keys(requests(pod))), s.hasClass) {
		claims = append(claims, &podClaim{claim: extendedClaim(pod)})
	}

	return claims, reasons
}

func (s *Scheduler) podClaim(pod *corev1.Pod, entry *corev1.PodResourceClaim) (*podClaim, *Reason) {
	if entry.ResourceClaimName != nil {
		claim, has := s.claims[objectName{pod.Namespace, *entry.ResourceClaimName}]
		if !has {
			return nil, claimMissing(pod, *entry.ResourceClaimName)
		}
		return &podClaim{name: entry.Name, claim: claim}, nil
	}

	if made, _, err := resourceclaim.Name(pod, entry); err == nil {
		if made == nil { // the pod does not need a claim
			return nil, nil
		}
		claim, has := s.claims[objectName{pod.Namespace, *made}]
		if !has {
			return nil, claimMissing(pod, *made)
		}
		return &podClaim{name: entry.Name, claim: claim}, nil
	}

	template, has := s.templates[objectName{pod.Namespace, *entry.ResourceClaimTemplateName}]
	if !has {
		return nil, templateMissing(pod, *entry.ResourceClaimTemplateName)
	}

	claim := &resourceapi.ResourceClaim{
		ObjectMeta: *template.Spec.ObjectMeta.DeepCopy(), Spec: *template.Spec.Spec.DeepCopy(),
	}
	claim.Namespace, claim.Name = pod.Namespace, pod.Name+"-"+entry.Name
	claim.OwnerReferences = []metav1.OwnerReference{ownedBy(pod)}

	return &podClaim{name: entry.Name, template: template.Name, claim: claim}, nil
}

func ownedBy(pod *corev1.Pod) metav1.OwnerReference {
	controls := true
	return metav1.OwnerReference{
		APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID, Controller: &controls,
	}
}

// unusable returns why the pod cannot use the claim on any node.
func (s *Scheduler) unusable(pod *corev1.Pod, claim *resourceapi.ResourceClaim) []Reason {
	if claim.DeletionTimestamp != nil {
		return []Reason{claimDeleted(claim)}
	}

	if claim.Status.Allocation != nil {
		if len(claim.Status.ReservedFor) >= resourceapi.ResourceClaimReservedForMaxSize &&
			!resourceclaim.IsReservedForPod(pod, claim, false) {
			return []Reason{claimFull(claim)}
		}
		return nil
	}

	var reasons []Reason
	check := func(request, class string) {
		if _, has := s.classes[class]; !has {
			reasons = append(reasons, classMissing(claim, request, class))
		}
	}

	for _, request := range claim.Spec.Devices.Requests {
		if request.Exactly != nil {
			check(request.Name, request.Exactly.DeviceClassName)
		}
		for _, sub := range request.FirstAvailable {
			check(resourceclaim.CreateSubRequestRef(request.Name, sub.Name), sub.DeviceClassName)
		}
	}

	return reasons
}

// isElsewhere reports whether the claim is allocated to devices that the node cannot reach.
func isElsewhere(claim *resourceapi.ResourceClaim, node *nodeState) (Reason, bool) {
	terms := claim.Status.Allocation.NodeSelector
	if terms == nil {
		return Reason{}, false
	}

	selector, err := nodeaffinity.NewNodeSelector(terms)
	if err == nil && selector.Match(node.Node) {
		return Reason{}, false
	}
	return claimElsewhere(claim), true
}

// requests returns the resources that the pod requests of a node, summed up like in the scheduler.
func requests(pod *corev1.Pod) corev1.ResourceList {
	return resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{})
}

// hasClass reports whether a DeviceClass serves the extended resource.
func (s *Scheduler) hasClass(resource corev1.ResourceName) bool {
	return isExtended(resource) && s.extended.GetDeviceClass(resource) != nil
}

// isServed reports whether the node serves the extended resource by devices of a DeviceClass, not
// by a device plugin.
func (s *Scheduler) isServed(resource corev1.ResourceName, node *nodeState) bool {
	allocatable := node.Status.Allocatable[resource]
	return s.features.ExtendedResources && allocatable.IsZero() && s.hasClass(resource)
}

// isExtended reports whether a resource is not defined by Kubernetes itself.
func isExtended(resource corev1.ResourceName) bool {
	name := string(resource)
	if strings.HasPrefix(name, resourceapi.ResourceDeviceClassPrefix) {
		return true
	}
	domain, _, qualified := strings.Cut(name, "/")
	return qualified && !strings.HasSuffix(domain, "kubernetes.io") &&
		!strings.HasPrefix(name, corev1.DefaultResourceRequestsPrefix)
}

// extendedClaim returns the claim that the scheduler makes for the extended resources of a pod that
// DeviceClasses serve. It has no requests yet, because they depend on the node.
func extendedClaim(pod *corev1.Pod) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: pod.Namespace, Name: pod.Name + "-extended-resources",
		Annotations:     map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"},
		OwnerReferences: []metav1.OwnerReference{ownedBy(pod)},
	}}
}

// onNode returns the claims for the node. They depend on the node because a device plugin may serve
// extended resources there.
func (s *Scheduler) onNode(pod *corev1.Pod, claims []*podClaim, node *nodeState) []*podClaim {
	last := len(claims) - 1
	if last < 0 || !claims[last].isExtended() {
		return claims
	}

	claim := claims[last].claim.DeepCopy()
	claim.Spec.Devices.Requests = s.extendedRequests(pod, node)
	if len(claim.Spec.Devices.Requests) == 0 {
		return claims[:last]
	}

	return append(slices.Clone(claims[:last]), &podClaim{claim: claim})
}

// extendedRequests returns the requests for extended resources that the node serves by DRA. Like
// createRequestsAndMappings of the scheduler's plugin DynamicResources, it makes a request for each
// container that lives as long as the pod. If init containers need more, it adds a request for the
// difference.
func (s *Scheduler) extendedRequests(pod *corev1.Pod, node *nodeState) []resourceapi.DeviceRequest {
	var all []resourceapi.DeviceRequest
	for _, resource := range slices.Sorted(maps.Keys(requests(pod))) {
		if !s.isServed(resource, node) {
			continue
		}
		class := s.extended.GetDeviceClass(resource).Name
		all = append(all, containerRequests(pod, resource, class)...)
	}

	return all
}

func containerRequests(
	pod *corev1.Pod, resource corev1.ResourceName, class string,
) []resourceapi.DeviceRequest {
	containers := slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers)
	counts := make([]int64, len(containers)) // of the long-lived containers
	var long []resourceapi.DeviceRequest
	for i := range containers {
		if isLongLived(containers, i, len(pod.Spec.InitContainers)) {
			if counts[i] = count(containers[i], resource); counts[i] > 0 {
				long = append(long, deviceRequest(containers, i, resource, class, counts[i]))
			}
		}
	}

	var extra resourceapi.DeviceRequest
	for i := range pod.Spec.InitContainers {
		if isLongLived(containers, i, len(pod.Spec.InitContainers)) {
			continue
		}

		missing := count(containers[i], resource)
		for _, reused := range counts[i:] {
			missing -= reused
		}
		if missing > 0 && (extra.Exactly == nil || missing > extra.Exactly.Count) {
			extra = deviceRequest(containers, i, resource, class, missing)
		}
	}

	if extra.Exactly == nil {
		return long
	}

	return append(long, extra)
}

// isLongLived reports whether the container lives as long as the pod: it is not an init container,
// or a restartable one.
func isLongLived(containers []corev1.Container, i, initContainers int) bool {
	policy := containers[i].RestartPolicy
	return i >= initContainers || policy != nil && *policy == corev1.ContainerRestartPolicyAlways
}

func count(container corev1.Container, resource corev1.ResourceName) int64 {
	quantity := container.Resources.Requests[resource]
	return quantity.Value()
}

func deviceRequest(
	containers []corev1.Container, i int, resource corev1.ResourceName, class string, count int64,
) resourceapi.DeviceRequest {
	index := slices.Index(slices.Sorted(maps.Keys(containers[i].Resources.Requests)), resource)
	return resourceapi.DeviceRequest{
		Name: fmt.Sprintf("container-%d-request-%d", i, index),
		Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount,
			Count: count,
		},
	}
}
