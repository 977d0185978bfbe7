// SPDX-License-Identifier: Apache-2.0

package prototypes

import "fmt"

// definition returns what a class defines: DeviceClass.spec.definition of k8srm-prototype, whose
// examples have it in spec.
func definition(class object) object {
	if d := part(class, "spec", "definition"); d != nil {
		return d
	}
	return part(class, "spec")
}

// driverOf returns the driver of all devices of a class, or "" if there may be several.
func driverOf(class object) string {
	if driver := text(definition(class), "driver"); driver != "" {
		return driver
	}

	for _, requirement := range list(class, "requirements") {
		if m := driverIs.FindStringSubmatch(text(requirement, "deviceSelector")); m != nil {
			return m[1]
		}
	}

	return ""
}

func (c *converter) class(o object) {
	spec := object{}
	d := definition(o)
	switch {
	case part(o, "spec", "selector") != nil:
		c.note("left out, because a class of classes has no counterpart: write one class with an " +
			"expression for all")
		return
	case d == nil:
		c.evolutionClass(o, spec)
	case driverOf(o) == "":
		c.note("left out, because it names no driver: write an expression for its devices")
		return
	default:
		c.plainClass(d, spec)
	}

	c.add(made("DeviceClass", o["metadata"], spec))
}

// evolutionClass converts a class of dra-evolution.
func (c *converter) evolutionClass(o, spec object) {
	selectors := []any{}
	for _, requirement := range list(o, "requirements") {
		selectors = append(selectors, selector(evolutionExpression(text(requirement,
			"deviceSelector"))))
	}
	if len(selectors) > 0 {
		spec["selectors"] = selectors
	}
	if config := evolutionConfigs(list(o, "config"), ""); len(config) > 0 {
		spec["config"] = config
	}
}

// plainClass converts a class of k8srm-prototype.
func (c *converter) plainClass(d, spec object) {
	driver := text(d, "driver")
	selectors := []any{selector(fmt.Sprintf("device.driver == %q", driver))}
	if constraints := text(d, "constraints"); constraints != "" {
		selectors = append(selectors, selector(plainExpression(constraints, driver)))
		c.noteQuantity("spec", constraints, driver)
	}
	spec["selectors"] = selectors

	if config := c.references(list(d, "configs"), driver, ""); len(config) > 0 {
		spec["config"] = config
	}
}

// noteQuantity notes that an expression compares a quantity as if it were an attribute.
func (c *converter) noteQuantity(where, expression, driver string) {
	if quantity.MatchString(expression) {
		c.note("%s: constraints %s compare a quantity, which is capacity now: write "+
			"device.capacity[%q].NAME.compareTo(quantity(\"1G\")) >= 0", where, expression, driver)
	}
}

// evolutionConfigs converts configurations of dra-evolution, for one request or for all.
func evolutionConfigs(configs []object, request string) (converted []any) {
	for _, config := range configs {
		if opaque := part(config, "opaque"); opaque != nil {
			converted = append(converted, opaqueConfig(text(opaque, "driverName"),
				opaque["parameters"], request))
		}
	}
	return converted
}

func opaqueConfig(driver string, parameters any, request string) object {
	config := object{"opaque": object{"driver": driver, "parameters": parameters}}
	if request != "" {
		config["requests"] = []any{request}
	}
	return config
}

// references converts references to configurations of k8srm-prototype. What an object of the input
// says stands in place of the reference.
func (c *converter) references(references []object, driver, request string) (converted []any) {
	for _, r := range references {
		name := text(r, "kind") + "/" + text(r, "name")
		parameters, known := c.objects[name]
		if !known || driver == "" {
			c.note("configuration %s is left out, because it is a reference: give the object and "+
				"the class too, or write opaque parameters for the driver", name)
			continue
		}
		converted = append(converted, opaqueConfig(driver, parameters, request))
	}
	return converted
}
