// SPDX-License-Identifier: Apache-2.0

// Package sriovdra converts what pods ask of dra-driver-sriov (k8snetworkplumbingwg/dra-driver-sriov,
// driver "sriovnetwork.k8snetworkplumbingwg.io") to what they ask of this driver. Its VfConfigs name
// NetworkAttachmentDefinitions, which become XPUNetworks and fields of InterfaceConfigs.
package sriovdra

import (
	"cmp"
	"fmt"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/conversion"
)

// vfConfig has the fields of VfConfig, by the API of August 2026.
type vfConfig struct {
	APIVersion            string `json:"apiVersion"`
	Kind                  string `json:"kind"`
	Driver                string `json:"driver"`
	AddVhostMount         bool   `json:"addVhostMount"`
	IfName                string `json:"ifName"`
	NetAttachDefName      string `json:"netAttachDefName"`
	NetAttachDefNamespace string `json:"netAttachDefNamespace"`
}

// converter knows the NetworkAttachmentDefinitions that are converted with the claims.
type converter struct {
	definitions map[key]*definition
	networks    map[string]key // names of XPUNetworks
}

// key is the namespace and name of a NetworkAttachmentDefinition.
type key struct{ namespace, name string }

func (k key) String() string {
	if k.namespace == "" {
		return "NetworkAttachmentDefinition " + k.name
	}
	return "NetworkAttachmentDefinition " + k.namespace + "/" + k.name
}

// Driver returns the driver dra-driver-sriov, for one conversion.
func Driver() conversion.Driver {
	c := &converter{definitions: map[key]*definition{}, networks: map[string]key{}}
	return conversion.Driver{
		Name: "sriovnetwork.k8snetworkplumbingwg.io",
		Kind: "VfConfig",
		Section: "the section SriovResourcePolicy and DeviceAttributes of " +
			"docs/how-to/move-from-dra-driver-sriov.md",
		Parameters: c.parameters, Read: c.read, Object: c.object,
	}
}

// parameters converts a VfConfig with its NetworkAttachmentDefinition.
func (c *converter) parameters(
	text []byte, at conversion.Place,
) (i v1alpha1.InterfaceConfig, notes []string, err error) {
	var v vfConfig
	if err := yaml.Unmarshal(text, &v); err != nil {
		return i, nil, fmt.Errorf("VfConfig: %w", err)
	}
	if err := yaml.UnmarshalStrict(text, &vfConfig{}); err != nil {
		notes = append(notes, "left out: "+conversion.LastPart(err))
	}

	i.Kind, i.APIVersion = "InterfaceConfig", v1alpha1.SchemeGroupVersion.String()
	i.InterfaceName = v.IfName
	switch v.Driver {
	case "", "default":
	case string(v1alpha1.DriverVFIO):
		i.Driver = v1alpha1.DriverVFIO
	default:
		notes = append(notes, fmt.Sprintf("driver: %q is left out; bind it on the host, and select by "+
			"drivers of a DevicePool", v.Driver))
	}

	if v.AddVhostMount {
		notes = append(notes, "addVhostMount: left out; the device plugin gives /dev/vhost-net and "+
			"/dev/net/tun (devicePlugin.needVhostNet of a DevicePool), or the pod mounts them")
	}
	if at.ForAll && at.Kind != "DeviceClass" && at.Kind != "" {
		notes = append(notes, "has no requests: dra-driver-sriov leaves it out of account, and here it "+
			"is for all requests of the claim")
	}

	notes = append(notes, c.attach(&i, v, at)...)
	_, err = claim.Interface(&i)
	notes = append(notes, conversion.Refusals(err)...)
	if fields := claim.PrivilegedFields(i); len(fields) > 0 && at.Kind != "DeviceClass" {
		notes = append(notes, fmt.Sprintf("the DevicePool must have spec.allow: [%s], or a DeviceClass "+
			"must have these fields", joined(fields)))
	}

	return i, notes, nil
}

func joined(fields []v1alpha1.PrivilegedField) string {
	texts := make([]string, len(fields))
	for i, f := range fields {
		texts[i] = string(f)
	}
	return strings.Join(texts, ", ")
}

// attach converts what the NetworkAttachmentDefinition of a VfConfig says.
func (c *converter) attach(
	i *v1alpha1.InterfaceConfig, v vfConfig, at conversion.Place,
) (notes []string) {
	if v.NetAttachDefName == "" {
		return []string{"netAttachDefName: is missing, as where Multus attaches; name the networks of " +
			"the pod in its annotation, with xpu-cni (docs/how-to/use-with-multus.md)"}
	}

	wanted := key{cmp.Or(v.NetAttachDefNamespace, at.Namespace), v.NetAttachDefName}
	d, notes := c.find(wanted)
	if d == nil {
		i.Network = v.NetAttachDefName
		return append(notes, fmt.Sprintf("netAttachDefName: %s is not given; give it too, for its VLAN, "+
			"trust and addresses", wanted))
	}

	if d.broken != nil {
		i.Network = v.NetAttachDefName
		return append(notes, fmt.Sprintf("netAttachDefName: %s: %v", d.key, d.broken))
	}

	i.Network = d.network
	if at.Namespace != "" && d.key.namespace != "" && at.Namespace != d.key.namespace {
		notes = append(notes, fmt.Sprintf("netAttachDefNamespace: XPUNetwork %s must allow namespace %s",
			d.network, at.Namespace))
	}
	for _, note := range d.configure(i) {
		notes = append(notes, fmt.Sprintf("%s: %s", d.key, note))
	}

	return notes
}

// find returns a definition, or nil. Where the class or the file names no namespace, the only
// definition of this name is meant.
func (c *converter) find(wanted key) (_ *definition, notes []string) {
	for _, k := range []key{wanted, {name: wanted.name}} {
		if d := c.definitions[k]; d != nil {
			return d, nil
		}
	}
	if wanted.namespace != "" {
		return nil, nil
	}

	var found *definition
	for k, d := range c.definitions {
		if k.name != wanted.name {
			continue
		}
		if found != nil {
			return nil, []string{"netAttachDefName: several namespaces have a " + wanted.String() +
				", and the class is for claims of all of them; make a class for each"}
		}
		found = d
	}

	return found, nil
}
