// SPDX-License-Identifier: Apache-2.0

package sriovdp

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// resource is an entry of resourceList. A DevicePluginSpec has the same keys in JSON.
type resource struct {
	v1alpha1.DevicePluginSpec
	DeviceType v1alpha1.DeviceType `json:"deviceType"`
	Selectors  json.RawMessage     `json:"selectors"`

	unknown []string // keys that the plugin does not know
}

// selector is one set of selectors. A FunctionSelector has the same keys in JSON.
type selector struct {
	v1alpha1.FunctionSelector
	NeedVhostNet bool `json:"needVhostNet"`

	// path is where the selector is: "resourceList[0].selectors[1]".
	path string
	// unknown has the keys that the device type does not know.
	unknown []string
}

var (
	pciKeys = []string{"vendors", "devices", "drivers"}
	netKeys = append(slices.Clone(pciKeys), "pfNames", "rootDevices", "linkTypes", "isRdma",
		"needVhostNet")

	// selectorKeys has the keys that each device type knows.
	selectorKeys = map[v1alpha1.DeviceType][]string{
		v1alpha1.DeviceTypeNet: append(slices.Clone(netKeys),
			"pciAddresses", "acpiIndexes", "ddpProfiles", "pKeys", "vdpaType"),
		v1alpha1.DeviceTypeAccelerator: append(slices.Clone(pciKeys), "pciAddresses"),
		v1alpha1.DeviceTypeAuxNet:      append(slices.Clone(netKeys), "auxTypes"),
	}
	// selectorObj and selectorObjs are in the plugin's own output, and never had a meaning.
	resourceKeys = []string{
		"resourcePrefix", "resourceName", "deviceType", "excludeTopology", "additionalInfo",
		"selectors",
		"selectorObj", "selectorObjs",
	}
)

// parseList splits the configuration into the entries of resourceList. A syntax error has its line
// and column.
func parseList(config []byte) ([]json.RawMessage, error) {
	var file struct {
		ResourceList json.RawMessage `json:"resourceList"`
	}
	err := decode("", config, &file)
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		before := config[:min(max(int(syntax.Offset)-1, 0), len(config))]
		line, column := bytes.Count(before, []byte("\n"))+
			1, len(before)-bytes.LastIndexByte(before, '\n')
		return nil, fmt.Errorf("line %d, column %d: is not JSON: %w", line, column, syntax)
	}

	if err != nil {
		return nil, err
	}
	if file.ResourceList == nil {
		return nil, errors.New("resourceList: is missing")
	}
	// sriov-network-operator writes null for a node without a policy.
	if string(file.ResourceList) == "null" {
		return nil, nil
	}

	var list []json.RawMessage
	err = decode("resourceList", file.ResourceList, &list)
	return list, err
}

// parseResource parses an entry of resourceList, at path. It sets the device type if it is missing.
func parseResource(path string, raw json.RawMessage) (resource, error) {
	var r resource
	raw, r.unknown = splitKeys(raw, resourceKeys)
	if err := decode(path, raw, &r); err != nil {
		return r, err
	}

	r.DeviceType = cmp.Or(r.DeviceType, v1alpha1.DeviceTypeNet)
	if _, known := selectorKeys[r.DeviceType]; !known {
		return r, fmt.Errorf("%s.deviceType: %q: must be netDevice, accelerator or auxNetDevice",
			path, r.DeviceType)
	}
	if len(r.Selectors) == 0 || string(r.Selectors) == "null" {
		return r, fmt.Errorf("%s.selectors: must be an object or a list of objects", path)
	}

	return r, nil
}

// jsonWords has the JSON names of values of these kinds. Values of other kinds are objects.
var jsonWords = map[reflect.Kind]string{
	reflect.Bool: "true or false", reflect.String: "a string", reflect.Slice: "a list",
}

// decode is json.Unmarshal with errors that name the place and the field. path is "" for the whole
// configuration.
func decode(path string, raw json.RawMessage, out any) error {
	if string(raw) == "null" {
		return fmt.Errorf("%s: must be an object", cmp.Or(path, "configuration"))
	}

	err := json.Unmarshal(raw, out)
	if mismatch, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		// The names before the last dot are names of embedded structs, which mean nothing to users.
		field := mismatch.Field[strings.LastIndex(mismatch.Field, ".")+1:]
		place := cmp.Or(strings.Trim(path+"."+field, "."), "configuration")
		return fmt.Errorf("%s: must be %s, not %s",
			place, cmp.Or(jsonWords[mismatch.Type.Kind()], "an object"), mismatch.Value)
	}

	if err != nil {
		return fmt.Errorf("%s: %w", cmp.Or(path, "configuration"), err)
	}

	return nil
}

// parseSelectors parses the selectors of the resource at path: one object, or a list of objects.
func parseSelectors(path string, r resource) ([]selector, error) {
	path += ".selectors"
	var list []json.RawMessage
	isList := !bytes.HasPrefix(r.Selectors, []byte("{"))
	if !isList {
		list = append(list, r.Selectors)
	} else if err := json.Unmarshal(r.Selectors, &list); err != nil {
		return nil, fmt.Errorf("%s: must be an object or a list of objects", path)
	}

	if len(list) == 0 {
		return nil, fmt.Errorf("%s: must have at least one entry", path)
	}

	var out []selector
	for i, raw := range list {
		s := selector{path: path}
		if isList {
			s.path = fmt.Sprintf("%s[%d]", path, i)
		}

		raw, s.unknown = splitKeys(raw, selectorKeys[r.DeviceType])
		if err := decode(s.path, raw, &s); err != nil {
			return nil, err
		}
		out = append(out, s)
	}

	return out, nil
}

// splitKeys returns an object with only its known keys, in their order and in any case, and the
// other keys, sorted. Values that are not objects are returned unchanged.
func splitKeys(raw json.RawMessage, keys []string) (known json.RawMessage, unknown []string) {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	if start, err := decoder.Token(); err != nil || start != json.Delim('{') {
		return raw, nil
	}

	var members [][]byte
	for decoder.More() {
		token, _ := decoder.Token()
		key, isKey := token.(string)
		var value json.RawMessage
		if err := decoder.Decode(&value); err != nil || !isKey {
			return raw, nil
		}

		i := slices.IndexFunc(keys, func(k string) bool { return strings.EqualFold(k, key) })
		if i < 0 {
			unknown = append(unknown, key)
			continue
		}

		members = append(members, fmt.Appendf(nil, "%q:%s", keys[i], value))
	}

	slices.Sort(unknown)
	return slices.Concat([]byte("{"), bytes.Join(members, []byte(",")), []byte("}")),
		slices.Compact(unknown)
}
