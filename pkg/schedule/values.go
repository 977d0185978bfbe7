// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"context"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"
)

// values returns the values of the constraint's attribute as sorted texts, and nothing if the
// device lacks the attribute. Two texts are equal exactly if the allocator treats the values as equal.
//
// An attribute can have several values (KEP-5491). matchAttribute wants a value that all devices
// have, and distinctAttribute wants devices without a common value. A scheduler without the feature
// gate DRAListTypeAttributes finds no list equal to anything. It accepts a list at most for the
// first device, so a list is a value of its own then.
func (c *candidate) values(constraint *resourceapi.DeviceConstraint) []string {
	attribute, has := c.attribute(string(ptr.Deref(constraint.MatchAttribute,
		ptr.Deref(constraint.DistinctAttribute, ""))))
	if !has {
		return nil
	}

	if isList(attribute) && !c.lists {
		return []string{"list of " + c.id.String()}
	}

	all := texts(attribute)
	slices.Sort(all)
	return slices.Compact(all)
}

// attribute returns the device's attribute, which the request may derive (KEP-6080). The name of an
// attribute in the driver's own domain may omit the domain.
func (c *candidate) attribute(name string) (resourceapi.DeviceAttribute, bool) {
	if attribute, has := c.derived[name]; has {
		return attribute, true
	}
	if attribute, has := c.Attributes[resourceapi.QualifiedName(name)]; has {
		return attribute, true
	}

	id, own := strings.CutPrefix(name, c.id.Driver.String()+"/")
	attribute, has := c.Attributes[resourceapi.QualifiedName(id)]
	return attribute, own && has
}

func isList(a resourceapi.DeviceAttribute) bool {
	return len(a.IntValues)+len(a.BoolValues)+len(a.StringValues)+len(a.VersionValues) > 0
}

// texts returns the values of an attribute, which are all of one type.
func texts(a resourceapi.DeviceAttribute) (all []string) {
	for _, value := range append(slices.Clone(a.IntValues), slice(a.IntValue)...) {
		all = append(all, strconv.FormatInt(value, 10))
	}
	for _, value := range append(slices.Clone(a.BoolValues), slice(a.BoolValue)...) {
		all = append(all, strconv.FormatBool(value))
	}
	for _, value := range append(slices.Clone(a.StringValues), slice(a.StringValue)...) {
		all = append(all, strconv.Quote(value))
	}
	for _, value := range append(slices.Clone(a.VersionValues), slice(a.VersionValue)...) {
		all = append(all, "version "+value)
	}
	return all
}

// slice returns the value, or nothing for nil.
func slice[T any](value *T) []T {
	if value == nil {
		return nil
	}
	return []T{*value}
}

// derive returns the attributes that a request derives from a device, by their names. sound is
// false if an expression has an error.
func (s *Scheduler) derive(
	ctx context.Context, attributes []resourceapi.DeviceDerivedAttribute, driver string,
	device *resourceapi.Device,
) (derived map[string]resourceapi.DeviceAttribute, sound bool) {
	if !s.features.Allocator.DerivedAttributes || len(attributes) == 0 {
		return nil, true
	}

	derived = map[string]resourceapi.DeviceAttribute{}
	for _, a := range attributes {
		compiled := s.cel.GetOrCompileDerivedAttribute(a.Expression)
		if compiled.Error != nil {
			return nil, false
		}

		value, _, err := compiled.EvaluateDerivedAttribute(ctx, cel.Device{
			Driver: driver, AllowMultipleAllocations: device.AllowMultipleAllocations,
			Attributes: device.Attributes, Capacity: device.Capacity,
		})
		if err != nil {
			return nil, false
		}
		derived[string(a.Name)] = *value
	}

	return derived, true
}
