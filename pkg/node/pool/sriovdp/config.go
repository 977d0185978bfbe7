package sriovdp

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// resource is an entry of resourceList.
type resource struct {
	ResourcePrefix  string                       `json:"resourcePrefix"`
	ResourceName    string                       `json:"resourceName"`
	DeviceType      string                       `json:"deviceType"`
	ExcludeTopology bool                         `json:"excludeTopology"`
	AdditionalInfo  map[string]map[string]string `json:"additionalInfo"`
	Selectors       json.RawMessage              `json:"selectors"`
}

// pciSelectors are those that every device type has.
type pciSelectors struct {
	Vendors []string `json:"vendors"`
	Devices []string `json:"devices"`
	Drivers []string `json:"drivers"`
}

// netSelectors are those that both device types with netdevs have.
type netSelectors struct {
	PFNames      []string `json:"pfNames"`
	RootDevices  []string `json:"rootDevices"`
	LinkTypes    []string `json:"linkTypes"`
	IsRdma       bool     `json:"isRdma"`
	NeedVhostNet bool     `json:"needVhostNet"`
}

// The selectors of each device type. Keys that another type has are unknown, and hence ignored whatever their value is.
type (
	netDevice struct {
		pciSelectors
		netSelectors
		PCIAddresses []string `json:"pciAddresses"`
		ACPIIndexes  []string `json:"acpiIndexes"`
		DDPProfiles  []string `json:"ddpProfiles"`
		PKeys        []string `json:"pKeys"`
		VDPAType     string   `json:"vdpaType"`
	}
	accelerator struct {
		pciSelectors
		PCIAddresses []string `json:"pciAddresses"`
	}
	auxNetDevice struct {
		pciSelectors
		netSelectors
		AuxTypes []string `json:"auxTypes"`
	}
)

var (
	pciKeys = []string{"vendors", "devices", "drivers"}
	netKeys = append(slices.Clone(pciKeys), "pfNames", "rootDevices", "linkTypes", "isRdma", "needVhostNet")

	// selectorKeys are the keys that a device type knows.
	selectorKeys = map[v1alpha1.DeviceType][]string{
		v1alpha1.DeviceTypeNet: append(slices.Clone(netKeys),
			"pciAddresses", "acpiIndexes", "ddpProfiles", "pKeys", "vdpaType"),
		v1alpha1.DeviceTypeAccelerator: append(slices.Clone(pciKeys), "pciAddresses"),
		v1alpha1.DeviceTypeAuxNet:      append(slices.Clone(netKeys), "auxTypes"),
	}
	// SelectorObj and SelectorObjs are what the plugin's own output has; they never meant anything.
	resourceKeys = []string{
		"resourcePrefix", "resourceName", "deviceType", "excludeTopology", "additionalInfo", "selectors",
		"selectorObj", "selectorObjs",
	}
)

// selector is one set of selectors, of any device type.
type selector struct {
	v1alpha1.FunctionSelector
	needVhostNet bool
}

func (s netDevice) selector() selector {
	return selector{v1alpha1.FunctionSelector{
		Vendors: s.Vendors, Devices: s.Devices, Drivers: s.Drivers, PCIAddresses: s.PCIAddresses, PFNames: s.PFNames,
		RootDevices: s.RootDevices, ACPIIndexes: s.ACPIIndexes, LinkTypes: s.LinkTypes, DDPProfiles: s.DDPProfiles,
		PKeys: s.PKeys, IsRdma: s.IsRdma, VDPAType: s.VDPAType,
	}, s.NeedVhostNet}
}

func (s accelerator) selector() selector {
	return selector{v1alpha1.FunctionSelector{
		Vendors: s.Vendors, Devices: s.Devices, Drivers: s.Drivers, PCIAddresses: s.PCIAddresses,
	}, false}
}

func (s auxNetDevice) selector() selector {
	return selector{v1alpha1.FunctionSelector{
		Vendors: s.Vendors, Devices: s.Devices, Drivers: s.Drivers, PFNames: s.PFNames, RootDevices: s.RootDevices,
		LinkTypes: s.LinkTypes, AuxTypes: s.AuxTypes, IsRdma: s.IsRdma,
	}, s.NeedVhostNet}
}

// parseList splits the configuration into the entries of resourceList.
func parseList(config []byte) ([]json.RawMessage, error) {
	var file struct {
		ResourceList []json.RawMessage `json:"resourceList"`
	}
	if err := decode("", config, &file); err != nil {
		return nil, placed(config, err)
	}
	if len(file.ResourceList) == 0 {
		return nil, errors.New("resourceList: must have at least one entry")
	}
	return file.ResourceList, nil
}

// placed adds the line and column to a syntax error.
func placed(config []byte, err error) error {
	var syntax *json.SyntaxError
	if !errors.As(err, &syntax) {
		return err
	}
	before := config[:min(max(int(syntax.Offset)-1, 0), len(config))]
	line, column := bytes.Count(before, []byte("\n"))+1, len(before)-bytes.LastIndexByte(before, '\n')
	return fmt.Errorf("line %d, column %d: is not JSON: %w", line, column, syntax)
}

// parseResource reads an entry of resourceList, at path. The device type is filled in.
func parseResource(path string, raw json.RawMessage) (resource, error) {
	var r resource
	if err := decode(path, raw, &r); err != nil {
		return r, err
	}
	if r.DeviceType == "" {
		r.DeviceType = string(v1alpha1.DeviceTypeNet)
	}
	if _, known := selectorKeys[v1alpha1.DeviceType(r.DeviceType)]; !known {
		return r, fmt.Errorf("%s.deviceType: %q: must be netDevice, accelerator or auxNetDevice", path, r.DeviceType)
	}
	if len(r.Selectors) == 0 || string(r.Selectors) == "null" {
		return r, fmt.Errorf("%s.selectors: must be an object or a list of objects", path)
	}
	return r, nil
}

// decode makes errors name the place and the field; path is "" for the whole configuration.
func decode(path string, raw json.RawMessage, out any) error {
	if string(raw) == "null" {
		return fmt.Errorf("%s: must be an object", cmp.Or(path, "configuration"))
	}
	err := json.Unmarshal(raw, out)
	var mismatch *json.UnmarshalTypeError
	if errors.As(err, &mismatch) {
		// Before the field, embedded structs are named, which are nothing to the reader.
		field := mismatch.Field[strings.LastIndex(mismatch.Field, ".")+1:]
		place := cmp.Or(strings.Trim(path+"."+field, "."), "configuration")
		return fmt.Errorf("%s: must be %s, not %s", place, jsonWord(mismatch.Type.Kind()), mismatch.Value)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", cmp.Or(path, "configuration"), err)
	}
	return nil
}

// jsonWord is what a value of a kind is called in JSON.
func jsonWord(kind reflect.Kind) string {
	switch kind {
	case reflect.Bool:
		return "true or false"
	case reflect.String:
		return "a string"
	case reflect.Slice:
		return "a list"
	}
	return "an object"
}

// located is one set of selectors and where it is.
type located struct {
	selector
	path string
	raw  json.RawMessage
}

// parseSelectors reads what belongs to the resource at path: one object, or a list of them.
func parseSelectors(path string, raw json.RawMessage, deviceType v1alpha1.DeviceType) ([]located, error) {
	path += ".selectors"
	if bytes.HasPrefix(raw, []byte("{")) {
		one, err := parseSelector(path, raw, deviceType)
		return []located{{one, path, raw}}, err
	}
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("%s: must be an object or a list of objects", path)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%s: must have at least one entry", path)
	}
	var out []located
	for i, raw := range list {
		path := fmt.Sprintf("%s[%d]", path, i)
		one, err := parseSelector(path, raw, deviceType)
		if err != nil {
			return nil, err
		}
		out = append(out, located{one, path, raw})
	}
	return out, nil
}

func parseSelector(path string, raw json.RawMessage, deviceType v1alpha1.DeviceType) (selector, error) {
	switch deviceType {
	case v1alpha1.DeviceTypeAccelerator:
		var s accelerator
		err := decode(path, raw, &s)
		return s.selector(), err
	case v1alpha1.DeviceTypeAuxNet:
		var s auxNetDevice
		err := decode(path, raw, &s)
		return s.selector(), err
	}
	var s netDevice
	err := decode(path, raw, &s)
	return s.selector(), err
}

// unknownKeys lists the keys of an object that are none of these; the case of letters does not count.
func unknownKeys(raw json.RawMessage, known []string) []string {
	var object map[string]json.RawMessage
	if json.Unmarshal(raw, &object) != nil {
		return nil
	}
	var unknown []string
	for _, key := range slices.Sorted(maps.Keys(object)) {
		if !slices.ContainsFunc(known, func(k string) bool { return strings.EqualFold(k, key) }) {
			unknown = append(unknown, key)
		}
	}
	return unknown
}
