// SPDX-License-Identifier: Apache-2.0

package prototypes

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// devices are the requests, constraints and configurations of a claim.
type devices struct {
	requests, constraints, config []any
}

func (d *devices) object() object {
	o := object{"requests": d.requests}
	if len(d.constraints) > 0 {
		o["constraints"] = d.constraints
	}
	if len(d.config) > 0 {
		o["config"] = d.config
	}
	return object{"devices": o}
}

// constrain adds a constraint for the requests, or for all if there are none.
func (d *devices) constrain(kind, attribute string, requests ...any) {
	constraint := object{kind: attribute}
	if len(requests) > 0 {
		constraint["requests"] = requests
	}
	d.constraints = append(d.constraints, constraint)
}

// entries returns the details of an instance of k8srm-prototype. They are in allOf, or in the
// instance itself, as in the examples.
func entries(instance object) []object {
	all := list(instance, "allOf")
	if len(all) == 0 && text(instance, "class") != "" {
		all = []object{instance}
	}
	return all
}

// requestName returns the name of a detail's request: the instance's if it is the only one.
func requestName(instance object, i, of int) string {
	if of == 1 {
		return text(instance, "name")
	}
	return fmt.Sprintf("%s-%d", text(instance, "name"), i)
}

// nameRequests keeps which requests an instance of a DeviceClaim becomes, as "CLAIM/INSTANCE".
func (c *converter) nameRequests(claim object) {
	for _, instance := range list(claim, "spec", "devices") {
		key := text(claim, "metadata", "name") + "/" + text(instance, "name")
		of := requestCount(instance)
		for i := range of {
			c.requests[key] = append(c.requests[key], requestName(instance, i, of))
		}
	}
}

func requestCount(instance object) int {
	count := len(entries(instance))
	if len(list(instance, "oneOf")) > 0 {
		count++
	}
	return count
}

// deviceClaim converts a DeviceClaim of k8srm-prototype: to a template, a claim or both, as pods
// name it.
func (c *converter) deviceClaim(o object) {
	d := &devices{}
	driver, first := "", true
	for _, instance := range list(o, "spec", "devices") {
		all, of := entries(instance), requestCount(instance)
		for i, detail := range all {
			name := requestName(instance, i, of)
			d.requests = append(d.requests,
				object{"name": name, "exactly": c.request(d, detail, name, name)})
			driver, first = common(driver, c.drivers[text(detail, "class")], first), false
		}
		if alternatives := list(instance, "oneOf"); len(alternatives) > 0 {
			name := requestName(instance, len(all), of)
			d.requests = append(d.requests, c.alternatives(d, alternatives, name))
			driver, first = common(driver, c.drivers[text(alternatives[0], "class")], first), false
		}
	}

	for _, attribute := range texts(o, "spec", "matchAttributes") {
		d.constrain("matchAttribute", c.attribute(attribute, driver))
	}

	name := text(o, "metadata", "name")
	if c.templates[name] {
		c.add(made("ResourceClaimTemplate", o["metadata"], object{"spec": d.object()}))
	}
	if c.claims[name] || !c.templates[name] {
		c.add(made("ResourceClaim", o["metadata"], d.object()))
	}
}

// common returns the driver that all requests have, or "".
func common(before, driver string, isFirst bool) string {
	if isFirst || before == driver {
		return driver
	}
	return ""
}

// attribute returns an attribute with its domain, and notes if the domain is unknown.
func (c *converter) attribute(name, driver string) string {
	full := qualified(name, driver)
	if !strings.Contains(full, "/") {
		c.note("attribute %s has no domain, because the driver of the class is not known: name it "+
			"as DOMAIN/%s", name, name)
	}
	return full
}

// alternatives converts oneOf to a request with firstAvailable.
func (c *converter) alternatives(d *devices, alternatives []object, name string) object {
	var subs []any
	for i, detail := range alternatives {
		sub := fmt.Sprintf("%s-%d", name, i)
		request := c.request(d, detail, name+"/"+sub, name+"/"+sub)
		request["name"] = sub
		subs = append(subs, request)
	}
	return object{"name": name, "firstAvailable": subs}
}

// request converts a detail of k8srm-prototype. Its constraints and configurations are for the
// request that at names.
func (c *converter) request(d *devices, detail object, name, at string) object {
	class := text(detail, "class")
	driver := c.drivers[class]
	request := object{"deviceClassName": class}
	if detail["adminAccess"] == true {
		request["adminAccess"], request["allocationMode"] = true, "All"
	}
	c.amounts(detail, request, name)

	if constraints := text(detail, "constraints"); constraints != "" {
		if driver == "" {
			c.note("%s: constraints stay as they are, because the driver of class %s is not known: "+
				"name attributes as device.attributes[\"DOMAIN\"].NAME", name, class)
		} else {
			c.noteQuantity(name, constraints, driver)
			constraints = plainExpression(constraints, driver)
		}
		request["selectors"] = []any{selector(constraints)}
	}

	for _, attribute := range texts(detail, "matchAttributes") {
		d.constrain("matchAttribute", c.attribute(attribute, driver), at)
	}
	for _, attribute := range texts(detail, "distinctAttributes") {
		d.constrain("distinctAttribute", c.attribute(attribute, driver), at)
	}
	configs := append(list(detail, "configs"), list(detail, "config")...)
	d.config = append(d.config, c.references(configs, driver, at)...)

	return request
}

// amounts converts how many devices and how much of them a detail asks for.
func (c *converter) amounts(detail, request object, name string) {
	count := detail["devices"] // in examples
	capacity := object{}
	requests := part(detail, "requests")
	for _, resource := range slices.Sorted(maps.Keys(requests)) {
		if resource == "devices" {
			count = requests[resource]
			continue
		}
		capacity[resource] = requests[resource]
		c.note("%s: %s is asked of each device, because Kubernetes sums nothing over devices",
			name, resource)
	}

	if count != nil {
		request["count"] = count
	}
	if len(capacity) > 0 {
		request["capacity"] = object{"requests": capacity}
	}
	if most, has := detail["maxDevices"]; has {
		c.note("%s: maxDevices %v is left out, because a request has no range: list alternatives in "+
			"firstAvailable", name, most)
	}
	if detail["allowShared"] == true {
		c.note("%s: allowShared is left out: the driver decides, by allowMultipleAllocations of a "+
			"device", name)
	}
}

// resourceClaim converts a claim or template of dra-evolution.
func (c *converter) resourceClaim(o object) {
	kind := text(o, "kind")
	spec := part(o, "spec")
	if kind == "ResourceClaimTemplate" {
		spec = part(spec, "spec")
	}

	d := &devices{}
	for i, request := range list(spec, "requests") {
		d.requests = append(d.requests, c.evolutionRequest(d, request, i))
	}
	for _, constraint := range list(spec, "constraints") {
		if attribute := text(constraint, "matchAttribute"); attribute != "" {
			d.constrain("matchAttribute", c.attribute(attribute, ""))
		}
	}
	d.config = append(d.config, evolutionConfigs(list(spec, "config"), "")...)

	converted := d.object()
	if kind == "ResourceClaimTemplate" {
		converted = object{"spec": converted}
	}
	c.add(made(kind, o["metadata"], converted))
}

func (c *converter) evolutionRequest(d *devices, request object, i int) object {
	name := text(request, "name")
	if name == "" {
		name = fmt.Sprintf("request-%d", i)
	}

	exactly := object{"deviceClassName": text(request, "deviceClassName")}
	if exactly["deviceClassName"] == "" {
		c.note("%s: deviceClassName must be set: name a class", name)
	}
	if request["adminAccess"] == true {
		exactly["adminAccess"], exactly["allocationMode"] = true, "All"
	}

	var selectors []any
	for _, requirement := range list(request, "requirements") {
		selectors = append(selectors,
			selector(evolutionExpression(text(requirement, "deviceSelector"))))
	}
	if selectors != nil {
		exactly["selectors"] = selectors
	}
	d.config = append(d.config, evolutionConfigs(list(request, "config"), name)...)

	return object{"name": name, "exactly": exactly}
}
