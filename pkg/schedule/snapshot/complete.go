// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
)

// This file sets the defaults of an API server, and rejects what it rejects, for the fields that
// the scheduler reads: k8s.io/kubernetes pkg/apis/{core,resource}/v1/defaults.go and
// pkg/apis/resource/validation.

// completePod sets missing requests to the limits, like the API server.
func completePod(pod *corev1.Pod) error {
	if len(pod.Spec.Containers) == 0 {
		return errors.New("spec.containers: must have at least one")
	}

	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			resources := &containers[i].Resources
			for resource, limit := range resources.Limits {
				if _, has := resources.Requests[resource]; has {
					continue
				}
				if resources.Requests == nil {
					resources.Requests = corev1.ResourceList{}
				}
				resources.Requests[resource] = limit.DeepCopy()
			}
		}
	}

	for i, claim := range pod.Spec.ResourceClaims {
		if (claim.ResourceClaimName == nil) == (claim.ResourceClaimTemplateName == nil) {
			return fmt.Errorf("spec.resourceClaims[%d]: must name one of resourceClaimName and "+
				"resourceClaimTemplateName", i)
		}
	}

	return nil
}

func completeClass(class *resourceapi.DeviceClass) error {
	return completeSelectors("spec.selectors", class.Spec.Selectors)
}

func completeSlice(slice *resourceapi.ResourceSlice) error {
	spec := &slice.Spec
	switch {
	case spec.Driver == "":
		return errors.New("spec.driver: must be set")
	case spec.Pool.Name == "":
		return errors.New("spec.pool.name: must be set")
	case spec.Pool.ResourceSliceCount <= 0:
		return errors.New("spec.pool.resourceSliceCount: must be greater than zero: how many " +
			"ResourceSlices the pool has")
	case len(spec.Devices) > resourceapi.ResourceSliceMaxDevices:
		return fmt.Errorf("spec.devices: has %d, must have at most %d: a pool can have several "+
			"ResourceSlices",
			len(spec.Devices), resourceapi.ResourceSliceMaxDevices)
	case len(spec.Devices) > 0 && len(spec.SharedCounters) > 0:
		return errors.New("spec: must not have both devices and sharedCounters: a pool can have " +
			"several ResourceSlices")
	}

	places := 0
	for _, is := range []bool{
		spec.NodeName != nil, spec.NodeSelector != nil, spec.AllNodes != nil && *spec.AllNodes,
		spec.PerDeviceNodeSelection != nil && *spec.PerDeviceNodeSelection,
	} {
		if is {
			places++
		}
	}

	if places != 1 {
		return errors.New("spec: must have exactly one of nodeName, nodeSelector, allNodes and " +
			"perDeviceNodeSelection")
	}

	for i, device := range spec.Devices {
		if device.Name == "" {
			return fmt.Errorf("spec.devices[%d].name: must be set", i)
		}
	}

	return nil
}

func completeClaim(claim *resourceapi.ResourceClaim) error {
	return completeClaimSpec(&claim.Spec, "spec")
}

func completeTemplate(template *resourceapi.ResourceClaimTemplate) error {
	return completeClaimSpec(&template.Spec.Spec, "spec.spec")
}

func completeClaimSpec(spec *resourceapi.ResourceClaimSpec, path string) error {
	names := map[string]bool{}
	for i := range spec.Devices.Requests {
		request := &spec.Devices.Requests[i]
		field := fmt.Sprintf("%s.devices.requests[%d]", path, i)
		if request.Name == "" {
			return fmt.Errorf("%s.name: must be set", field)
		}
		if (request.Exactly == nil) == (len(request.FirstAvailable) == 0) {
			return fmt.Errorf("%s: must have one of exactly and firstAvailable", field)
		}

		names[request.Name] = true
		if e := request.Exactly; e != nil {
			if err := completeRequest(field+".exactly", e.DeviceClassName, e.Selectors,
				&e.AllocationMode, &e.Count, e.Tolerations); err != nil {
				return err
			}
		}

		for j := range request.FirstAvailable {
			sub := &request.FirstAvailable[j]
			field := fmt.Sprintf("%s.firstAvailable[%d]", field, j)
			if sub.Name == "" {
				return fmt.Errorf("%s.name: must be set", field)
			}

			names[request.Name+"/"+sub.Name] = true
			if err := completeRequest(field, sub.DeviceClassName, sub.Selectors,
				&sub.AllocationMode, &sub.Count, sub.Tolerations); err != nil {
				return err
			}
		}
	}

	for i, constraint := range spec.Devices.Constraints {
		field := fmt.Sprintf("%s.devices.constraints[%d]", path, i)
		if (constraint.MatchAttribute == nil) == (constraint.DistinctAttribute == nil) {
			return fmt.Errorf("%s: must have one of matchAttribute and distinctAttribute", field)
		}
		for _, request := range constraint.Requests {
			if !names[request] {
				return fmt.Errorf("%s.requests: no request is named %q", field, request)
			}
		}
	}

	for i, config := range spec.Devices.Config {
		for _, request := range config.Requests {
			if !names[request] {
				return fmt.Errorf("%s.devices.config[%d].requests: no request is named %q",
					path, i, request)
			}
		}
	}

	return nil
}

func completeRequest(field, class string, selectors []resourceapi.DeviceSelector,
	mode *resourceapi.DeviceAllocationMode,
	count *int64, tolerations []resourceapi.DeviceToleration) error {
	if class == "" {
		return fmt.Errorf("%s.deviceClassName: must be set", field)
	}

	if *mode == "" {
		*mode = resourceapi.DeviceAllocationModeExactCount
	}

	switch {
	case *mode == resourceapi.DeviceAllocationModeExactCount && *count == 0:
		*count = 1
	case *mode == resourceapi.DeviceAllocationModeAll && *count != 0:
		return fmt.Errorf("%s.count: must not be set with allocationMode All", field)
	case *mode != resourceapi.DeviceAllocationModeExactCount &&
		*mode != resourceapi.DeviceAllocationModeAll:
		return fmt.Errorf("%s.allocationMode: is %q, must be ExactCount or All", field, *mode)
	case *count < 0:
		return fmt.Errorf("%s.count: is %d, must be greater than zero", field, *count)
	}

	for i := range tolerations {
		if tolerations[i].Operator == "" {
			tolerations[i].Operator = resourceapi.DeviceTolerationOpEqual
		}
	}

	return completeSelectors(field+".selectors", selectors)
}

func completeSelectors(field string, selectors []resourceapi.DeviceSelector) error {
	for i, selector := range selectors {
		if selector.CEL == nil || selector.CEL.Expression == "" {
			return fmt.Errorf("%s[%d].cel.expression: must be set", field, i)
		}
	}
	return nil
}

func completeTaintRule(rule *resourceapi.DeviceTaintRule) error {
	taint := rule.Spec.Taint
	if taint.Key == "" {
		return errors.New("spec.taint.key: must be set")
	}
	return knownEffect("spec.taint.effect", taint.Effect)
}

func knownEffect(field string, effect resourceapi.DeviceTaintEffect) error {
	switch effect {
	case resourceapi.DeviceTaintEffectNone, resourceapi.DeviceTaintEffectNoSchedule,
		resourceapi.DeviceTaintEffectNoExecute:
		return nil
	}
	return fmt.Errorf("%s: is %q, must be None, NoSchedule or NoExecute", field, effect)
}
