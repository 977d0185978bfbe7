// SPDX-License-Identifier: Apache-2.0

// Package conversion converts what pods ask of another driver, in claims, templates and classes, to
// what they ask of this driver. The packages beside it know the other drivers.
package conversion

import (
	"encoding/json"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Driver is another driver. Notes say what is left out, what differs, and what an administrator must
// allow.
type Driver struct {
	// Name is the driver's name in claims.
	Name string
	// Kind is the kind of its parameters; "" if they have none.
	Kind string
	// Section names where selectors of the driver are compared: "the section X of docs/..".
	Section string
	// Parameters converts parameters, as YAML or JSON.
	Parameters func(text []byte, at Place) (c v1alpha1.InterfaceConfig, notes []string, err error)
	// Read is called with each object before any is converted. It may be nil.
	Read func(object map[string]any) error
	// Object converts an object that has no parameters. It returns nil to leave the object as it is.
	// It may be nil.
	Object func(object map[string]any) (converted map[string]any, notes []string)
}

// Place is where parameters stand.
type Place struct {
	// Kind and Namespace are the object's. Kind is "" for parameters alone. A DeviceClass has no
	// namespace.
	Kind, Namespace string
	// ForAll is set if the configuration names no requests.
	ForAll bool
}

// devicesOf returns where an object has requests and configurations of devices, by kind.
func devicesOf(kind string) (path []string, known bool) {
	path, known = map[string][]string{
		"ResourceClaim": {"spec", "devices"}, "ResourceClaimTemplate": {"spec", "spec", "devices"},
		"DeviceClass": {"spec"},
	}[kind]
	return path, known
}

// Convert converts YAML documents, and the items of a list of Kubernetes. Each is a ResourceClaim,
// ResourceClaimTemplate or DeviceClass, or parameters of the driver alone. Other objects come back
// as they are, unless the driver converts them.
func Convert(text []byte, from Driver) (documents, notes []string, err error) {
	all, err := read(text)
	if err != nil {
		return nil, nil, err
	}

	for _, d := range all {
		if from.Read == nil {
			break
		}
		if err := from.Read(d.object); err != nil {
			return nil, nil, fmt.Errorf("%s %s: %w", d.kind(), d.name(), err)
		}
	}

	for _, d := range all {
		converted, more, err := from.convert(d)
		if err != nil {
			return nil, nil, err
		}
		documents, notes = append(documents, string(converted)), append(notes, more...)
	}

	return documents, notes, nil
}

// convert returns a document in place of another.
func (from Driver) convert(d document) (converted []byte, notes []string, err error) {
	path, known := devicesOf(d.kind())
	switch {
	case d.kind() == from.Kind:
		c, notes, err := from.Parameters(d.text, Place{})
		if err != nil {
			return nil, nil, err
		}
		converted, err := yaml.Marshal(c)
		return converted, notes, err
	case known:
		notes, err = from.convertDevices(d, path)
	case from.Object != nil:
		object, more := from.Object(d.object)
		if object == nil {
			return d.text, withName(d, more), nil
		}
		converted, err = yaml.Marshal(object)
		return converted, withName(d, more), err
	default:
		return d.text, nil, nil
	}

	if err != nil {
		return nil, nil, fmt.Errorf("%s %s: %w", d.kind(), d.name(), err)
	}
	converted, err = yaml.Marshal(d.object)
	return converted, withName(d, notes), err
}

// withName returns the notes with the object that they are about.
func withName(d document, notes []string) []string {
	for i, note := range notes {
		notes[i] = fmt.Sprintf("%s %s: %s", d.kind(), d.name(), note)
	}
	return notes
}

// convertDevices converts the configurations of the driver in an object, and notes what names the
// driver besides.
func (from Driver) convertDevices(d document, path []string) (notes []string, err error) {
	at := func(field string) []string { return append(path[:len(path):len(path)], field) }
	list, _, err := unstructured.NestedSlice(d.object, at("config")...)
	if err != nil {
		return nil, err
	}

	place := Place{Kind: d.kind()}
	place.Namespace, _, _ = unstructured.NestedString(d.object, "metadata", "namespace")
	found := false
	for i, entry := range list {
		config, _ := entry.(map[string]any)
		opaque, _ := config["opaque"].(map[string]any)
		if opaque == nil || opaque["driver"] != from.Name {
			continue
		}

		found = true
		requests, _, _ := unstructured.NestedSlice(config, "requests")
		place.ForAll = len(requests) == 0
		parameters, more, err := from.convertParameters(opaque["parameters"], place)
		if err != nil {
			return nil, fmt.Errorf("config[%d]: %w", i, err)
		}
		opaque["driver"], opaque["parameters"] = v1alpha1.GroupName, parameters
		for _, note := range more {
			notes = append(notes, fmt.Sprintf("config[%d]: %s", i, note))
		}
	}

	if found {
		if err := unstructured.SetNestedSlice(d.object, list, at("config")...); err != nil {
			return nil, err
		}
	}

	return append(notes, from.names(d, path)...), nil
}

// names notes requests for the driver's class, and selectors and constraints with its attributes.
func (from Driver) names(d document, path []string) (notes []string) {
	devices, _, _ := unstructured.NestedMap(d.object, path...)
	text, _ := json.Marshal(devices) // of decoded YAML
	class := fmt.Sprintf(`"deviceClassName":%q`, from.Name)
	if strings.Contains(string(text), class) {
		notes = append(notes, fmt.Sprintf("deviceClassName: %s is the class of all devices there; name "+
			"the DeviceClass of a DevicePool", from.Name))
	}

	if strings.Contains(strings.ReplaceAll(string(text), class, ""), from.Name) {
		notes = append(notes, fmt.Sprintf("its selectors name attributes of %s; %s has those of %s",
			from.Name, from.Section, v1alpha1.GroupName))
	}

	return notes
}

// convertParameters converts the parameters of a configuration to an object for YAML.
func (from Driver) convertParameters(
	parameters any, at Place,
) (converted map[string]any, notes []string, err error) {
	text, err := json.Marshal(parameters)
	if err != nil {
		return nil, nil, err
	}
	c, notes, err := from.Parameters(text, at)
	if err != nil {
		return nil, nil, err
	}

	if text, err = json.Marshal(c); err != nil {
		return nil, nil, err
	}
	return converted, notes, json.Unmarshal(text, &converted)
}

// LastPart returns the part of an error of a decoder that names the field.
func LastPart(err error) string {
	parts := strings.Split(err.Error(), ": ")
	return parts[len(parts)-1]
}

// Refusals returns a note for each error of a converted configuration.
func Refusals(err error) (notes []string) {
	if err == nil {
		return nil
	}
	for line := range strings.SplitSeq(err.Error(), "\n") {
		notes = append(notes, "would be refused: "+line)
	}
	return notes
}
