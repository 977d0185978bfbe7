// SPDX-License-Identifier: Apache-2.0

package dranet

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// devicesOf returns where an object has requests and configurations of devices, by kind.
func devicesOf(kind string) (path []string, known bool) {
	path, known = map[string][]string{
		"ResourceClaim": {"spec", "devices"}, "ResourceClaimTemplate": {"spec", "spec", "devices"},
		"DeviceClass": {"spec"},
	}[kind]
	return path, known
}

// Convert converts YAML documents, and the items of a list of Kubernetes. Each is a ResourceClaim,
// ResourceClaimTemplate or DeviceClass, or one NetworkConfig alone. Other objects come back as they
// are. A note says what is left out, what differs, and what an administrator must allow.
func Convert(text []byte) (documents, notes []string, err error) {
	decoder := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		one, err := decoder.Read()
		if errors.Is(err, io.EOF) {
			return documents, notes, nil
		}
		if err != nil {
			return nil, nil, err
		}

		items, err := itemsOf(one)
		if err != nil {
			return nil, nil, err
		}
		for _, item := range items {
			converted, more, err := document(item)
			if err != nil {
				return nil, nil, err
			}
			documents, notes = append(documents, string(converted)), append(notes, more...)
		}
	}
}

// itemsOf returns the items of a list, or the document itself. An empty document has none.
func itemsOf(text []byte) (items [][]byte, err error) {
	var list struct {
		Kind  string           `json:"kind"`
		Items []map[string]any `json:"items"`
	}
	if err := yaml.Unmarshal(text, &list); err != nil {
		return nil, err
	}
	if len(bytes.TrimSpace(text)) == 0 {
		return nil, nil
	}
	if !strings.HasSuffix(list.Kind, "List") {
		return [][]byte{text}, nil
	}

	for _, item := range list.Items {
		one, err := yaml.Marshal(item)
		if err != nil {
			return nil, err
		}
		items = append(items, one)
	}

	return items, nil
}

func document(text []byte) (converted []byte, notes []string, err error) {
	var object map[string]any
	if err := yaml.Unmarshal(text, &object); err != nil {
		return nil, nil, err
	}

	kind, _ := object["kind"].(string)
	path, known := devicesOf(kind)
	switch {
	case kind == "":
		c, notes, err := Parameters(text)
		if err != nil {
			return nil, nil, err
		}
		converted, err := yaml.Marshal(c)
		return converted, notes, err
	case !known:
		return text, nil, nil
	}

	notes, err = convertDevices(object, path)
	if err != nil {
		return nil, nil, fmt.Errorf("%s %s: %w", kind, nameOf(object), err)
	}
	for i, note := range notes {
		notes[i] = fmt.Sprintf("%s %s: %s", kind, nameOf(object), note)
	}

	converted, err = yaml.Marshal(object)
	return converted, notes, err
}

func nameOf(object map[string]any) string {
	name, _, _ := unstructured.NestedString(object, "metadata", "name")
	return name
}

// convertDevices converts the configurations of DRANET in an object, and notes the selectors that
// name its attributes.
func convertDevices(object map[string]any, path []string) (notes []string, err error) {
	at := func(field string) []string { return append(path[:len(path):len(path)], field) }
	list, _, err := unstructured.NestedSlice(object, at("config")...)
	if err != nil {
		return nil, err
	}

	found := false
	for i, entry := range list {
		config, _ := entry.(map[string]any)
		opaque, _ := config["opaque"].(map[string]any)
		if opaque == nil || opaque["driver"] != Driver {
			continue
		}

		found = true
		parameters, more, err := convertParameters(opaque["parameters"])
		if err != nil {
			return nil, fmt.Errorf("config[%d]: %w", i, err)
		}
		opaque["driver"], opaque["parameters"] = v1alpha1.GroupName, parameters
		for _, note := range more {
			notes = append(notes, fmt.Sprintf("config[%d]: %s", i, note))
		}
	}

	if found {
		if err := unstructured.SetNestedSlice(object, list, at("config")...); err != nil {
			return nil, err
		}
	}

	rest, _ := json.Marshal(object) // of decoded YAML
	if strings.Contains(string(rest), Driver) {
		notes = append(notes, "its selectors name attributes of "+Driver+"; the section Selecting "+
			"devices of docs/how-to/move-from-dranet.md has those of "+v1alpha1.GroupName)
	}

	return notes, nil
}

// convertParameters converts the parameters of a configuration to an object for YAML.
func convertParameters(parameters any) (converted map[string]any, notes []string, err error) {
	text, err := json.Marshal(parameters)
	if err != nil {
		return nil, nil, err
	}
	c, notes, err := Parameters(text)
	if err != nil {
		return nil, nil, err
	}

	if text, err = json.Marshal(c); err != nil {
		return nil, nil, err
	}
	return converted, notes, json.Unmarshal(text, &converted)
}
