// SPDX-License-Identifier: Apache-2.0

package sriovoperator

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// ResourceAnnotation is the annotation of a NetworkAttachmentDefinition that names the resource of
// its pods.
const ResourceAnnotation = "k8s.v1.cni.cncf.io/resourceName"

// network has the fields of a SriovNetwork, by the operator's API of August 2026.
type network struct {
	Metadata metav1.ObjectMeta `json:"metadata"`
	Spec     networkSpec       `json:"spec"`
}

type networkSpec struct {
	NetworkNamespace string `json:"networkNamespace"`
	ResourceName     string `json:"resourceName"`
	Capabilities     string `json:"capabilities"`
	IPAM             string `json:"ipam"`
	VLAN             int    `json:"vlan"`
	VLANQoS          int    `json:"vlanQoS"`
	VLANProto        string `json:"vlanProto"`
	SpoofChk         string `json:"spoofChk"`
	Trust            string `json:"trust"`
	LinkState        string `json:"linkState"`
	MinTxRate        *int   `json:"minTxRate"`
	MaxTxRate        *int   `json:"maxTxRate"`
	MetaPlugins      string `json:"metaPlugins"`
	LogLevel         string `json:"logLevel"`
	LogFile          string `json:"logFile"`
}

// plugin is a configuration of xpu-cni. Its fields are those of sriov-cni.
type plugin struct {
	CNIVersion   string          `json:"cniVersion,omitempty"`
	Name         string          `json:"name,omitempty"`
	Type         string          `json:"type"`
	MTU          int             `json:"mtu,omitempty"`
	VLAN         int             `json:"vlan,omitempty"`
	VLANQoS      int             `json:"vlanQoS,omitempty"`
	VLANProto    string          `json:"vlanProto,omitempty"`
	SpoofChk     string          `json:"spoofchk,omitempty"`
	Trust        string          `json:"trust,omitempty"`
	LinkState    string          `json:"link_state,omitempty"`
	MinTxRate    *int            `json:"min_tx_rate,omitempty"`
	MaxTxRate    *int            `json:"max_tx_rate,omitempty"`
	Capabilities json.RawMessage `json:"capabilities,omitempty"`
	IPAM         json.RawMessage `json:"ipam,omitempty"`
}

// chain is a configuration of several plugins.
type chain struct {
	CNIVersion string            `json:"cniVersion"`
	Name       string            `json:"name"`
	Plugins    []json.RawMessage `json:"plugins"`
}

// cniVersion is what the operator writes.
const cniVersion = "1.0.0"

// Network converts a SriovNetwork, as YAML or JSON, to a NetworkAttachmentDefinition of type
// xpu-cni. The prefix is for its resource. mtu is what the policy of the resource sets, or 0.
func Network(text []byte, prefix string, mtu int) (object map[string]any, notes []string, err error) {
	var n network
	if err := yaml.Unmarshal(text, &n); err != nil {
		return nil, nil, err
	}
	var strict struct {
		Spec networkSpec `json:"spec"`
	}
	if notes, err = unknownFields(text, &strict); err != nil {
		return nil, nil, err
	}
	notes = append(notes, n.Spec.leftOut()...)

	config, err := n.config(mtu)
	if err != nil {
		return nil, nil, err
	}

	metadata := map[string]any{
		"name": n.Metadata.Name,
		"annotations": map[string]any{
			ResourceAnnotation: prefix + "/" + n.Spec.ResourceName,
		},
	}
	if ns := cmp.Or(n.Spec.NetworkNamespace, n.Metadata.Namespace); ns != "" {
		metadata["namespace"] = ns
	}

	notes = append(notes, "the DevicePool must allow what it sets of the VF, and an XPUNetwork is "+
		"needed if an xPU serves the network")
	return map[string]any{
		"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
		"metadata": metadata, "spec": map[string]any{"config": config},
	}, notes, nil
}

// leftOut notes what does not come into the configuration.
func (s networkSpec) leftOut() (notes []string) {
	if s.VLAN == 0 && s.VLANQoS != 0 {
		notes = append(notes, withoutVLAN("vlanQoS"))
	}
	if s.VLAN == 0 && s.VLANProto != "" {
		notes = append(notes, withoutVLAN("vlanProto"))
	}
	if s.LogLevel != "" {
		notes = append(notes, withoutLog("logLevel"))
	}
	if s.LogFile != "" {
		notes = append(notes, withoutLog("logFile"))
	}
	return notes
}

func withoutVLAN(field string) string { return field + " is left out: there is no vlan" }

func withoutLog(field string) string { return field + " is left out: the agent has the log" }

// config returns the network's configuration as indented JSON.
func (n network) config(mtu int) (string, error) {
	s := n.Spec
	p := plugin{
		Type: "xpu-cni", MTU: mtu, VLAN: s.VLAN, VLANQoS: s.VLANQoS, VLANProto: s.VLANProto,
		SpoofChk: s.SpoofChk, Trust: s.Trust, LinkState: s.LinkState,
		MinTxRate: s.MinTxRate, MaxTxRate: s.MaxTxRate,
	}
	if s.VLAN == 0 {
		p.VLANQoS, p.VLANProto = 0, ""
	}

	for _, part := range []struct {
		name, text string
		into       *json.RawMessage
	}{{"capabilities", s.Capabilities, &p.Capabilities}, {"ipam", s.IPAM, &p.IPAM}} {
		text := bytes.TrimSpace([]byte(part.text))
		if len(text) == 0 || string(text) == "{}" {
			continue
		}
		if !json.Valid(text) {
			return "", fmt.Errorf("spec.%s: is not JSON", part.name)
		}
		*part.into = text
	}

	if strings.TrimSpace(s.MetaPlugins) == "" {
		p.CNIVersion, p.Name = cniVersion, n.Metadata.Name
		return indented(p)
	}

	own, err := json.Marshal(p)
	if err != nil {
		return "", err
	}
	list := chain{cniVersion, n.Metadata.Name, nil}
	// The operator puts the text behind its own plugin in a list.
	if err := json.Unmarshal([]byte("["+s.MetaPlugins+"]"), &list.Plugins); err != nil {
		return "", fmt.Errorf("spec.metaPlugins: %w", err)
	}
	list.Plugins = append([]json.RawMessage{own}, list.Plugins...)

	return indented(list)
}

func indented(value any) (string, error) {
	text, err := json.MarshalIndent(value, "", "  ")
	return string(text), err
}

// Types returns the types of the plugins in a NetworkAttachmentDefinition. One without a
// configuration has none: Multus reads it from a file on the node.
func Types(definition map[string]any) (types []string, err error) {
	config, found, err := unstructured.NestedString(definition, "spec", "config")
	if err != nil || !found || config == "" {
		return nil, err
	}
	plugins, _, err := pluginsOf(definition)
	if err != nil {
		return nil, err
	}

	for _, p := range plugins {
		name, _ := p["type"].(string)
		types = append(types, name)
	}
	return types, nil
}

// Definition converts a NetworkAttachmentDefinition of type sriov, for Multus, to one of type
// xpu-cni. Other plugins of a chain stay.
func Definition(definition map[string]any) (notes []string, err error) {
	plugins, config, err := pluginsOf(definition)
	if err != nil {
		return nil, err
	}

	for _, p := range plugins {
		if p["type"] != "sriov" {
			continue
		}
		p["type"] = "xpu-cni"
		// sriov-cni's default takes a VLAN away from the VF, which a pool must allow here.
		if p["vlan"] == float64(0) {
			delete(p, "vlan")
			for _, field := range []string{"vlanQoS", "vlanProto"} {
				if value, has := p[field]; has && value != float64(0) && value != "" {
					notes = append(notes, withoutVLAN(field))
				}
				delete(p, field)
			}
		}
		for _, field := range []string{"logLevel", "logFile"} {
			if _, has := p[field]; has {
				delete(p, field)
				notes = append(notes, withoutLog(field))
			}
		}
	}

	text, err := indented(config)
	if err != nil {
		return nil, err
	}
	notes = append(notes, "the DevicePool must allow what it sets of the VF, and an XPUNetwork is "+
		"needed if an xPU serves the network")
	return notes, unstructured.SetNestedField(definition, text, "spec", "config")
}

// pluginsOf returns the plugins in the configuration of a NetworkAttachmentDefinition, which are
// parts of the configuration.
func pluginsOf(definition map[string]any) (plugins []map[string]any, config map[string]any, err error) {
	text, _, err := unstructured.NestedString(definition, "spec", "config")
	if err != nil {
		return nil, nil, err
	}
	if err := json.Unmarshal([]byte(text), &config); err != nil {
		return nil, nil, fmt.Errorf("spec.config: %w", err)
	}

	all, isChain := config["plugins"].([]any)
	if !isChain {
		return []map[string]any{config}, config, nil
	}
	for i, one := range all {
		p, isObject := one.(map[string]any)
		if !isObject {
			return nil, nil, fmt.Errorf("spec.config: plugins[%d]: must be an object", i)
		}
		plugins = append(plugins, p)
	}

	return plugins, config, nil
}
