// SPDX-License-Identifier: Apache-2.0

// Package sriovdp converts configurations of sriov-network-device-plugin to DevicePools, so that a
// node gets the same resources with the same devices.
package sriovdp

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// DefaultPrefix is the default prefix of resources in sriov-network-device-plugin, its flag
// -resource-prefix.
const DefaultPrefix = "intel.com"

var resourceName = regexp.MustCompile(`^[a-zA-Z0-9_-]+$`)

// Is reports whether the text looks like a configuration of sriov-network-device-plugin: JSON with
// a resourceList, even if it has errors.
func Is(config []byte) bool {
	var file struct {
		ResourceList json.RawMessage `json:"resourceList"`
	}
	if json.Unmarshal(config, &file) != nil {
		return bytes.HasPrefix(bytes.TrimSpace(config), []byte("{")) &&
			bytes.Contains(bytes.ToLower(config), []byte(`"resourcelist"`))
	}
	return file.ResourceList != nil
}

// Convert converts a configuration. prefix is for resources without a prefix. The DevicePools are
// in the order of the configuration.
//
// A mistake with which sriov-network-device-plugin does not start is an error that names the entry
// and the field. Parts that it warns about, ignores, or understands in an unexpected way are
// warnings. A warning begins with the place: "resourceList[0].selectors[1].pfNames[0]: ..".
func Convert(
	config []byte, prefix string,
) (devicePools []v1alpha1.DevicePool, warnings []string, err error) {
	entries, err := parseList(config)
	if err != nil {
		return nil, nil, err
	}

	c := converter{prefix: prefix, resources: map[string]string{}, names: map[string]bool{}}
	usable := false
	for i, raw := range entries {
		used, err := c.convert(fmt.Sprintf("resourceList[%d]", i), raw, int32(len(entries)-i))
		if err != nil {
			return nil, nil, err
		}
		usable = usable || used
	}

	if !usable && len(entries) > 0 {
		return nil, nil, fmt.Errorf("no entry can be used: %s", strings.Join(c.warnings, "; "))
	}

	return c.devicePools, c.warnings, nil
}

// converter has the result of the entries so far.
type converter struct {
	devicePools []v1alpha1.DevicePool
	warnings    []string

	prefix string
	// resources has the place of the first use of each resource name.
	resources map[string]string
	// names has the names of the DevicePools.
	names map[string]bool
}

func (c *converter) warn(path, format string, args ...any) {
	c.warnings = append(c.warnings, path+": "+fmt.Sprintf(format, args...))
}

// convert converts one entry. used is false if sriov-network-device-plugin would drop the entry
// before it checks anything.
func (c *converter) convert(
	path string, raw json.RawMessage, priority int32,
) (used bool, err error) {
	r, err := parseResource(path, raw)
	if err != nil {
		return false, err
	}

	c.warnAboutKeys(path, r.unknown)
	selectors, err := parseSelectors(path, r)
	if err != nil {
		c.warnings = append(c.warnings, err.Error()+"; the entry is left out")
		return false, nil
	}
	if !resourceName.MatchString(r.ResourceName) {
		return false, fmt.Errorf("%s.resourceName: %q: must be of the characters a-z, A-Z, 0-9, "+
			"_ and -", path, r.ResourceName)
	}

	r.ResourcePrefix = cmp.Or(r.ResourcePrefix, c.prefix)
	name := r.ResourcePrefix + "/" + r.ResourceName
	if first, taken := c.resources[name]; taken {
		return false, fmt.Errorf("%s.resourceName: %s belongs to %s already", path, name, first)
	}

	c.resources[name] = path
	var usable []v1alpha1.FunctionSelector
	needVhostNet := 0
	for _, s := range selectors {
		if err := valid(s, r.DeviceType); err != nil {
			return false, err
		}

		c.warnAboutKeys(s.path, s.unknown)
		if kept, matches := c.clean(s.path, s.FunctionSelector); matches {
			usable = append(usable, kept)
		}
		if s.NeedVhostNet {
			needVhostNet++
		}
	}

	// A DevicePool cannot ask for this for only some of its Functions.
	if needVhostNet > 0 && needVhostNet < len(selectors) {
		c.warn(path, "needVhostNet is for all of %s, not only for the devices of some selectors",
			name)
	}

	r.ProvisionAt, r.PreferredAllocation = v1alpha1.ProvisionAtAdd, v1alpha1.PreferPack
	r.NeedVhostNet = needVhostNet > 0
	c.add(path, name, v1alpha1.DevicePoolSpec{
		DeviceType:   r.DeviceType,
		Selectors:    usable,
		Priority:     priority,
		Publish:      v1alpha1.PublishDevicePlugin,
		Provision:    v1alpha1.ProvisionOnPrepare,
		Allow:        fieldsOfSRIOVCNI(),
		DevicePlugin: &r.DevicePluginSpec,
	})

	return true, nil
}

// fieldsOfSRIOVCNI returns the privileged fields that sriov-cni has (NetConf of
// pkg/types/types.go), which knows no pools and allows them in every network configuration. A field
// that it lacks is not among them, because the conversion would let users do what they could not do
// before.
func fieldsOfSRIOVCNI() []v1alpha1.PrivilegedField {
	return []v1alpha1.PrivilegedField{
		v1alpha1.FieldMAC, v1alpha1.FieldAddresses, v1alpha1.FieldVLAN, v1alpha1.FieldQoS,
		v1alpha1.FieldTrust, v1alpha1.FieldSpoofCheck, v1alpha1.FieldMinTxRate,
		v1alpha1.FieldMaxTxRate, v1alpha1.FieldLinkState,
	}
}

// valid returns an error if the selector makes sriov-network-device-plugin refuse the whole
// configuration.
func valid(s selector, deviceType v1alpha1.DeviceType) error {
	if s.IsRdma && s.VDPAType != "" {
		return fmt.Errorf("%s.vdpaType: cannot be together with isRdma", s.path)
	}

	onlySFs := len(s.AuxTypes) > 0 && !slices.ContainsFunc(s.AuxTypes, func(t string) bool {
		return t != "sf"
	})
	if deviceType == v1alpha1.DeviceTypeAuxNet && !onlySFs {
		return fmt.Errorf("%s.auxTypes: %q: must be [\"sf\"]", s.path, s.AuxTypes)
	}

	return nil
}

func (c *converter) warnAboutKeys(path string, unknown []string) {
	for _, key := range unknown {
		c.warn(path+"."+key, "is ignored: no such field here")
	}
}

// add adds the DevicePool, unless it cannot be used.
func (c *converter) add(path, resource string, spec v1alpha1.DevicePoolSpec) {
	if err := pool.CheckResourceName(resource); err != nil {
		c.warn(path, "left out: the kubelet refuses it: %v", err)
		return
	}
	if len(spec.Selectors) == 0 {
		c.warn(path, "left out: none of its selectors can match")
		return
	}

	c.devicePools = append(c.devicePools, v1alpha1.DevicePool{
		TypeMeta: metav1.TypeMeta{
			APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "DevicePool",
		},
		ObjectMeta: metav1.ObjectMeta{Name: c.poolName(spec.DevicePlugin)},
		Spec:       spec,
	})
}

// poolName derives a DNS label from the name of the resource. If the label is in use, it adds the
// prefix, and then a number.
func (c *converter) poolName(plugin *v1alpha1.DevicePluginSpec) string {
	name := label(plugin.ResourceName)
	if c.names[name] {
		name = label(plugin.ResourceName + "-" + plugin.ResourcePrefix)
	}

	unnumbered := name
	for n := 2; c.names[name]; n++ {
		number := fmt.Sprintf("-%d", n)
		name = unnumbered[:min(len(unnumbered), validation.DNS1123LabelMaxLength-len(number))] +
			number
	}

	c.names[name] = true
	return name
}

// label converts a text to a DNS label. The text must have a letter or digit within its first 63
// characters.
func label(text string) string {
	text = strings.NewReplacer("_", "-", ".", "-").Replace(strings.ToLower(text))
	return strings.Trim(text[:min(len(text), validation.DNS1123LabelMaxLength)], "-")
}
