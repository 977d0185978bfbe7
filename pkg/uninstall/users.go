// SPDX-License-Identifier: Apache-2.0

package uninstall

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// users returns the pods that use Functions or may get some, as "namespace/name", sorted: pods for
// which a ResourceClaim with devices of the driver is reserved, and pods that have not ended and that
// request the extended resource of a DevicePool or have an XPUPort. A DevicePool may be deleted under
// pods, whose XPUPorts stay.
func (r *run) users(ctx context.Context) ([]string, error) {
	users := sets.New[string]()
	if err := r.usersOfClaims(ctx, users); err != nil {
		return nil, err
	}
	if err := r.usersOfPlugin(ctx, users); err != nil {
		return nil, err
	}
	return sets.List(users), nil
}

func (r *run) usersOfClaims(ctx context.Context, users sets.Set[string]) error {
	var claims resourceapi.ResourceClaimList
	if err := r.api.List(ctx, &claims); err != nil {
		return fmt.Errorf("list ResourceClaims: %w", err)
	}

	isOurs := func(d resourceapi.DeviceRequestAllocationResult) bool {
		return d.Driver == v1alpha1.GroupName
	}
	for _, claim := range claims.Items {
		allocation := claim.Status.Allocation
		if allocation == nil || !slices.ContainsFunc(allocation.Devices.Results, isOurs) {
			continue
		}
		for _, consumer := range claim.Status.ReservedFor {
			name := claim.Namespace + "/" + consumer.Name
			if consumer.APIGroup != "" || consumer.Resource != "pods" { // such as a group of pods
				name = consumer.Resource + " " + name
			}
			users.Insert(name)
		}
	}

	return nil
}

// usersOfPlugin adds the pods that get Functions from the device plugin.
func (r *run) usersOfPlugin(ctx context.Context, users sets.Set[string]) error {
	resources, err := r.resources(ctx)
	if err != nil {
		return err
	}
	served, err := r.served(ctx)
	if err != nil || len(resources)+len(served) == 0 {
		return err
	}

	var pods corev1.PodList
	if err := r.api.List(ctx, &pods); err != nil {
		return fmt.Errorf("list pods: %w", err)
	}

	for _, pod := range pods.Items {
		isServed := served.HasAny(
			v1alpha1.PodRef{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
			v1alpha1.PodRef{Namespace: pod.Namespace, Name: pod.Name})
		if pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed &&
			(isServed || requests(pod, resources)) {
			users.Insert(pod.Namespace + "/" + pod.Name)
		}
	}

	return nil
}

// served returns the pods that XPUPorts name, some without a UID.
func (r *run) served(ctx context.Context) (sets.Set[v1alpha1.PodRef], error) {
	var ports v1alpha1.XPUPortList
	err := r.api.List(ctx, &ports)
	if isUnknown(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list XPUPorts: %w", err)
	}

	pods := sets.New[v1alpha1.PodRef]()
	for _, port := range ports.Items {
		if port.Spec.Pod != nil {
			pods.Insert(*port.Spec.Pod)
		}
	}
	return pods, nil
}

// resources returns the names of the extended resources of DevicePools.
func (r *run) resources(ctx context.Context) (sets.Set[corev1.ResourceName], error) {
	var pools v1alpha1.DevicePoolList
	err := r.api.List(ctx, &pools)
	if isUnknown(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list DevicePools: %w", err)
	}

	resources := sets.New[corev1.ResourceName]()
	for _, pool := range pools.Items {
		if name := pool.Spec.ResourceName(pool.Name); name != "" {
			resources.Insert(corev1.ResourceName(name))
		}
	}

	return resources, nil
}

// requests reports whether a container of the pod requests one of the resources.
func requests(pod corev1.Pod, resources sets.Set[corev1.ResourceName]) bool {
	asks := func(c corev1.Container) bool {
		return resources.HasAny(slices.Collect(maps.Keys(c.Resources.Requests))...)
	}
	return slices.ContainsFunc(pod.Spec.Containers, asks) ||
		slices.ContainsFunc(pod.Spec.InitContainers, asks)
}
