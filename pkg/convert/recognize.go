// SPDX-License-Identifier: Apache-2.0

package convert

import (
	"cmp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/opiproject/xpu-device-plugin/pkg/convert/sriovoperator"
	"github.com/opiproject/xpu-device-plugin/pkg/convert/values"
)

// source is what an object is.
type source int

const (
	unknown            source = iota
	kept                      // Kubernetes', ours or a third one's: nothing to convert
	sriovdpConfig             // a configuration of sriov-network-device-plugin itself
	configMap                 // which may have one
	operatorPolicy            // of sriov-network-operator, as are the next two
	operatorNetwork           //
	withoutCounterpart        //
	attachment                // a NetworkAttachmentDefinition
	claims                    // a claim, template or class of resource.k8s.io
	parametersAlone           // of a DRA driver
	sriovDRAObject            // of dra-driver-sriov, besides
	prototype                 // of the working group Device Management
	pod                       // which may be a prototype's
	helmValues                // of a chart that is known
)

// sriovDRAGroup is the API group of dra-driver-sriov, and its driver's name.
const sriovDRAGroup = "sriovnetwork.k8snetworkplumbingwg.io"

// recognize says what an object is.
func recognize(object map[string]any) source {
	version, kind := stringOf(object, "apiVersion"), stringOf(object, "kind")
	group, _, _ := strings.Cut(version, "/")
	switch {
	case kind == "VfConfig":
		return parametersAlone
	case kind == "" && version == "":
		return withoutKind(object)
	case kind == "" || version == "":
		return unknown
	case version == "v1" && kind == "ConfigMap":
		return configMap
	case group == sriovoperator.Group:
		return ofOperator(kind)
	case kind == "NetworkAttachmentDefinition":
		return attachment
	case group == sriovDRAGroup:
		return sriovDRAObject
	case group == "devmgmtproto.k8s.io", strings.HasPrefix(version, "resource.k8s.io/v1alpha"):
		return prototype
	case group == "resource.k8s.io" && slices.Contains([]string{"ResourceClaim",
		"ResourceClaimTemplate", "DeviceClass"}, kind):
		return claims
	case kind == "Pod":
		return pod
	default:
		return kept
	}
}

// ofOperator says what an object of sriov-network-operator is.
func ofOperator(kind string) source {
	switch kind {
	case "SriovNetworkNodePolicy":
		return operatorPolicy
	case "SriovNetwork":
		return operatorNetwork
	case "SriovIBNetwork", "OVSNetwork", "SriovNetworkNodeState", "SriovOperatorConfig",
		"SriovNetworkPoolConfig":
		return withoutCounterpart
	default:
		return unknown
	}
}

// withoutKind says what an object is that has neither kind nor apiVersion.
func withoutKind(object map[string]any) source {
	for field := range object {
		if strings.EqualFold(field, "resourceList") { // as Go decodes it in the plugin
			return sriovdpConfig
		}
	}
	if values.Of(object) != nil {
		return helmValues
	}
	if isNetworkConfig(object) {
		return parametersAlone
	}
	return unknown
}

// isNetworkConfig reports whether an object has nothing but fields of DRANET's NetworkConfig, which
// has no kind.
func isNetworkConfig(object map[string]any) bool {
	fields := []string{"interface", "routes", "rules", "neighbors", "ethtool", "profile"}
	for name := range object {
		if !slices.Contains(fields, name) {
			return false
		}
	}
	return len(object) > 0
}

// unknownReason says why an object is unknown.
func unknownReason(object map[string]any) string {
	version, kind := stringOf(object, "apiVersion"), stringOf(object, "kind")
	switch {
	case version == "" && kind == "":
		return "has neither kind nor apiVersion, and is no configuration of " +
			"sriov-network-device-plugin, and no Helm values of a chart that is known (helm get values " +
			"--all prints enough to know it)"
	case version == "":
		return "has no apiVersion"
	case kind == "":
		return "has no kind"
	default:
		return "is a kind of " + version + " that is not known"
	}
}

// vfConfigNetworks returns the NetworkAttachmentDefinitions that the VfConfigs of an object name, as
// namespace/name. The namespace is empty if an object has none, such as a DeviceClass.
func vfConfigNetworks(object map[string]any) (names []string) {
	configs := []map[string]any{object} // parameters alone
	for _, path := range [][]string{
		{"spec", "devices", "config"}, {"spec", "spec", "devices", "config"}, {"spec", "config"},
	} {
		list, _, _ := unstructured.NestedSlice(object, path...)
		for _, one := range list {
			config, _ := one.(map[string]any)
			parameters, _, _ := unstructured.NestedMap(config, "opaque", "parameters")
			configs = append(configs, parameters)
		}
	}

	for _, config := range configs {
		if name := stringOf(config, "netAttachDefName"); name != "" {
			namespace := cmp.Or(stringOf(config, "netAttachDefNamespace"),
				stringOf(object, "metadata", "namespace"))
			names = append(names, namespace+"/"+name)
		}
	}

	return names
}

// stringOf returns a string of an object, or "".
func stringOf(object map[string]any, path ...string) string {
	value, _, _ := unstructured.NestedFieldNoCopy(object, path...)
	text, _ := value.(string)
	return text
}
