// SPDX-License-Identifier: Apache-2.0

package prototypes

import (
	"cmp"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
)

// counterSet is the name of the counters of a pool, because the prototypes have only one set.
const counterSet = "shared"

// pool converts a pool of either prototype to ResourceSlices.
func (c *converter) pool(o object) {
	spec := part(o, "spec")
	counters := amounts(spec, "sharedResources", "sharedCapacity")
	most := resourceapi.ResourceSliceMaxDevices
	if len(counters) > 0 {
		most = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	}

	var contents []object
	if len(counters) > 0 {
		contents = append(contents, object{"sharedCounters": []any{
			object{"name": counterSet, "counters": counters}}})
	}
	var all []any
	for _, device := range list(spec, "devices") {
		all = append(all, c.device(spec, device))
	}
	for chunk := range slices.Chunk(all, most) {
		contents = append(contents, object{"devices": chunk})
	}

	name := text(o, "metadata", "name")
	for i, content := range contents {
		content["driver"] = cmp.Or(text(spec, "driver"), text(spec, "driverName"))
		content["nodeName"] = text(spec, "nodeName")
		content["pool"] = object{"name": name, "generation": int64(1),
			"resourceSliceCount": int64(len(contents))}
		sliceName := name
		if len(contents) > 1 {
			sliceName = fmt.Sprintf("%s-%d", name, i)
		}
		c.add(made("ResourceSlice", object{"name": sliceName}, content))
	}

	if len(contents) == 0 {
		c.note("left out, because it has no devices")
	}
}

// device converts a device, with the attributes of its pool, which a slice does not have.
func (c *converter) device(pool, from object) object {
	attributes, capacity := object{}, object{}
	for _, a := range append(list(pool, "attributes"), list(from, "attributes")...) {
		c.value(a, attributes, capacity)
	}
	for name, amount := range amounts(from, "claimResourcesProvided") {
		capacity[name] = amount
	}

	device := object{"name": text(from, "name")}
	if len(attributes) > 0 {
		device["attributes"] = attributes
	}
	if len(capacity) > 0 {
		device["capacity"] = capacity
	}
	if consumed := amounts(from, "sharedResourcesConsumed",
		"sharedCapacityConsumed"); len(consumed) > 0 {
		device["consumesCounters"] = []any{object{"counterSet": counterSet, "counters": consumed}}
	}

	return device
}

// value puts an attribute of a prototype to the attributes or, if it is a quantity, to the capacity.
func (c *converter) value(a, attributes, capacity object) {
	name := qualified(text(a, "name"), "")
	for from, to := range map[string]string{
		"stringValue": "string", "string": "string", "bool": "bool", "intValue": "int",
		"semVerValue": "version", "version": "version",
	} {
		if value, has := a[from]; has {
			attributes[name] = object{to: value}
		}
	}

	for _, from := range []string{"quantityValue", "quantity"} {
		if value, has := a[from]; has {
			capacity[name] = object{"value": fmt.Sprint(value)}
		}
	}
}

// amounts returns quantities by name, of the fields that have some: a list with name and capacity, as
// in the Go types, or a map, as in examples.
func amounts(o object, fields ...string) object {
	found := object{}
	for _, field := range fields {
		for name, value := range part(o, field) {
			found[name] = object{"value": fmt.Sprint(value)}
		}
		for _, one := range list(o, field) {
			found[text(one, "name")] = object{"value": fmt.Sprint(one["capacity"])}
		}
	}
	return found
}
