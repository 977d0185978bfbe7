// SPDX-License-Identifier: Apache-2.0

package prototypes

import (
	"cmp"
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
)

// podClaim is the name in a pod of its one claim, because deviceClaims of k8srm-prototype has none.
const podClaim = "devices"

// pod converts a pod of either prototype. A pod without claims stays as it is.
func (c *converter) pod(o object) {
	pod := runtime.DeepCopyJSON(o)
	pod["apiVersion"] = "v1"
	spec := part(pod, "spec")
	if spec == nil {
		c.add(pod)
		return
	}

	if claims := part(spec, "deviceClaims"); claims != nil {
		delete(spec, "deviceClaims")
		spec["resourceClaims"] = c.podClaims(pod, claims)
	}
	for _, container := range append(list(spec, "initContainers"), list(spec, "containers")...) {
		c.container(container, part(o, "spec", "deviceClaims"))
	}

	c.add(pod)
}

// podClaims converts the deviceClaims of a pod. Each class in it becomes a template.
func (c *converter) podClaims(pod, claims object) (converted []any) {
	for i, device := range list(claims, "devices") {
		name := cmp.Or(text(device, "name"), fmt.Sprintf("device-%d", i)) // examples have no names
		template := text(pod, "metadata", "name") + "-" + name
		metadata := object{"name": template}
		if namespace := text(pod, "metadata", "namespace"); namespace != "" {
			metadata["namespace"] = namespace
		}

		d := &devices{requests: []any{object{"name": name,
			"exactly": object{"deviceClassName": text(device, "class")}}}}
		c.add(made("ResourceClaimTemplate", metadata, object{"spec": d.object()}))
		converted = append(converted, object{"name": name, "resourceClaimTemplateName": template})
	}

	if template := text(claims, "template", "claimName"); template != "" {
		converted = append(converted, object{"name": podClaim,
			"resourceClaimTemplateName": template})
	}
	if claim := text(claims, "claimName"); claim != "" {
		converted = append(converted, object{"name": podClaim, "resourceClaimName": claim})
	}

	return converted
}

// container converts what a container has of the pod's devices.
func (c *converter) container(container, claims object) {
	var converted []any
	for _, entry := range list(container, "resources", "claims") {
		if name := text(entry, "requestName"); name != "" { // dra-evolution
			entry["request"] = name
			delete(entry, "requestName")
		}
		converted = append(converted, entry)
	}
	for _, device := range list(container, "devices") { // k8srm-prototype
		converted = append(converted, c.claimsOf(text(device, "name"), claims)...)
	}
	delete(container, "devices")

	if converted == nil {
		return
	}
	resources := part(container, "resources")
	if resources == nil {
		resources = object{}
		container["resources"] = resources
	}
	resources["claims"] = converted
}

// claimsOf returns the claims of a container for the device that it names: one for each request
// that the device became.
func (c *converter) claimsOf(device string, claims object) (converted []any) {
	if len(list(claims, "devices")) > 0 {
		return []any{object{"name": device}}
	}

	claim := text(claims, "template", "claimName") + text(claims, "claimName")
	for _, request := range c.requests[claim+"/"+device] {
		converted = append(converted, object{"name": podClaim, "request": request})
	}
	if converted == nil {
		c.note("device %s of a container: DeviceClaim %s is not given, or has no such device",
			device, claim)
		converted = []any{object{"name": podClaim, "request": device}}
	}

	return converted
}
