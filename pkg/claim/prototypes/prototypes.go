// SPDX-License-Identifier: Apache-2.0

// Package prototypes converts the objects of the prototypes of DRA, k8srm-prototype and
// dra-evolution of https://github.com/kubernetes-sigs/wg-device-management, to resource.k8s.io/v1.
// The examples of the prototypes differ from their Go types in places; both spellings are read.
package prototypes

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/pkg/claim/conversion"
)

// The groups of the prototypes, with their versions.
const (
	k8srm     = "devmgmtproto.k8s.io/"
	evolution = "resource.k8s.io/v1alpha"
)

// object is a decoded YAML object, or a part of one.
type object = map[string]any

// Convert converts the prototypes' objects in YAML documents and lists. Other objects come back as
// they are. Notes name what has no counterpart and is left out, and what differs. An expression or an
// attribute whose driver is unknown stays as it is, so that an API server rejects the result rather
// than that a claim asks for less.
func Convert(text []byte) (documents, notes []string, err error) {
	objects, err := conversion.Objects(text)
	if err != nil {
		return nil, nil, err
	}

	c := newConverter(objects)
	for _, o := range objects {
		c.convert(o)
	}

	for _, o := range c.converted {
		document, err := yaml.Marshal(o)
		if err != nil {
			return nil, nil, err
		}
		documents = append(documents, string(document))
	}

	return documents, c.notes, nil
}

// converter holds what one object has to know of others.
type converter struct {
	objects   map[string]object // by kind/name: configurations are referred to
	drivers   map[string]string // of the devices of a class
	templates map[string]bool   // DeviceClaims that pods name as templates
	claims    map[string]bool   // DeviceClaims that pods name as claims
	requests  map[string][]string
	current   string // the object that notes are about
	converted []object
	notes     []string
}

func newConverter(objects []object) *converter {
	c := &converter{objects: map[string]object{}, drivers: map[string]string{},
		templates: map[string]bool{}, claims: map[string]bool{}, requests: map[string][]string{}}

	for _, o := range objects {
		c.objects[text(o, "kind")+"/"+text(o, "metadata", "name")] = o
		switch text(o, "kind") {
		case "DeviceClass":
			c.drivers[text(o, "metadata", "name")] = driverOf(o)
		case "Pod":
			c.templates[text(o, "spec", "deviceClaims", "template", "claimName")] = true
			c.claims[text(o, "spec", "deviceClaims", "claimName")] = true
		case "DeviceClaim":
			c.requests[text(o, "metadata", "name")] = nil
		}
	}

	for _, o := range objects {
		if text(o, "kind") == "DeviceClaim" {
			c.nameRequests(o)
		}
	}

	return c
}

func (c *converter) convert(o object) {
	kind, version := text(o, "kind"), text(o, "apiVersion")
	c.current = kind + " " + text(o, "metadata", "name")
	isPrototype := strings.HasPrefix(version, k8srm) || strings.HasPrefix(version, evolution)

	switch {
	case kind == "Pod":
		c.pod(o)
	case !isPrototype:
		c.add(o)
	case kind == "DeviceClass":
		c.class(o)
	case kind == "DeviceClaim":
		c.deviceClaim(o)
	case kind == "ResourceClaim", kind == "ResourceClaimTemplate":
		c.resourceClaim(o)
	case kind == "DevicePool", kind == "ResourcePool":
		c.pool(o)
	default:
		c.note("left out, because Kubernetes has no counterpart: see docs/explanation/prototypes.md")
	}
}

func (c *converter) add(o object) { c.converted = append(c.converted, o) }

func (c *converter) note(format string, args ...any) {
	c.notes = append(c.notes, c.current+": "+fmt.Sprintf(format, args...))
}

// made returns an object of resource.k8s.io/v1.
func made(kind string, metadata any, spec object) object {
	return object{"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": metadata,
		"spec": spec}
}

// text returns a string of an object, or "".
func text(o object, path ...string) string {
	value, _, _ := unstructured.NestedFieldNoCopy(o, path...)
	s, _ := value.(string)
	return s
}

// part returns an object in an object, or nil.
func part(o object, path ...string) object {
	value, _, _ := unstructured.NestedFieldNoCopy(o, path...)
	inner, _ := value.(object)
	return inner
}

// list returns the objects of a list in an object.
func list(o object, path ...string) (items []object) {
	value, _, _ := unstructured.NestedFieldNoCopy(o, path...)
	all, _ := value.([]any)
	for _, one := range all {
		if item, isObject := one.(object); isObject {
			items = append(items, item)
		}
	}
	return items
}

// texts returns the strings of a list in an object.
func texts(o object, path ...string) []string {
	items, _, _ := unstructured.NestedStringSlice(o, path...)
	return items
}
