// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	cniversion "github.com/containernetworking/cni/pkg/version"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Limits of what a network configuration, a pod's annotation or an IPAM plugin may ask for, and of
// what the agent stores.
const (
	maxAddresses = 64       // of an interface
	maxRoutes    = 256      // of an interface
	maxIPAM      = 64 << 10 // bytes of an IPAM plugin's result, which the journal keeps
	// bytes of the network configuration's name, like the name of a NetworkAttachmentDefinition
	maxName      = 253
	maxNamespace = 63   // bytes of a namespace (RFC 1123 label)
	maxPodName   = 253  // bytes of a pod's name (RFC 1123 subdomain)
	maxPodUID    = 128  // bytes of a pod's UID, which usually has 36
	maxRuntime   = 4096 // bytes of CNI_CONTAINERID, CNI_IFNAME and CNI_NETNS: PATH_MAX of Linux
	maxUnknown   = 8    // unknown keys that an error names
	// bytes of an error's message, which is logged and becomes a pod's event
	maxError = 4096
	// answerSpace is the number of bytes that a reply has besides its result.
	answerSpace = 16 << 10
)

// limits adds an error for every part of a network configuration that exceeds its limit.
func (m *fieldErrors) limits(n netConf, routes json.RawMessage, ipam json.RawMessage) {
	if len(n.Name) > maxName {
		m.add("name: has %d bytes, at most %d are allowed", len(n.Name), maxName)
	}

	if problems := validation.IsDNS1123Subdomain(n.Network); n.Network != "" && len(problems) > 0 {
		m.add("network %q: must be the name of an XPUNetwork: %s", short(n.Network), problems[0])
	}

	if len(n.Runtime.IPs) > maxAddresses {
		m.add("runtimeConfig.ips: has %d addresses, at most %d are allowed", len(n.Runtime.IPs),
			maxAddresses)
	}

	if len(routes) > maxIPAM {
		m.add("ipam.routes: has %d bytes, at most %d are allowed", len(routes), maxIPAM)
	}

	if len(ipam) > maxIPAM {
		m.add("ipam: the plugin's result has %d bytes, at most %d are allowed", len(ipam), maxIPAM)
	}
}

// version refuses a version of the specification for which the CNI library has no result.
func (m *fieldErrors) version(version string) {
	if known := cniversion.All.SupportedVersions(); !slices.Contains(known, version) {
		m.add("cniVersion %q: is not known; known are %s", short(version),
			strings.Join(known, ", "))
	}
}

// checkPod refuses names in CNI_ARGS that no pod can have.
func checkPod(pod journal.Pod) error {
	for _, field := range []struct {
		name, value string
		most        int
	}{
		{"K8S_POD_NAMESPACE", pod.Namespace, maxNamespace},
		{"K8S_POD_NAME", pod.Name, maxPodName},
		{"K8S_POD_UID", string(pod.UID), maxPodUID},
	} {
		if len(field.value) > field.most {
			return fail(types.ErrInvalidEnvironmentVariables,
				"CNI_ARGS: %s: has %d bytes, at most %d are allowed",
				field.name, len(field.value), field.most)
		}
	}
	return nil
}

// checkLengths refuses values that are longer than any runtime sends.
func checkLengths(r wire.Request) error {
	for name, value := range map[string]string{
		"CNI_CONTAINERID": r.ContainerID, "CNI_IFNAME": r.IfName, "CNI_NETNS": r.NetNS,
	} {
		if len(value) > maxRuntime {
			return fail(types.ErrInvalidEnvironmentVariables,
				"%s: has %d bytes, at most %d are allowed", name, len(value), maxRuntime)
		}
	}
	return nil
}

// notServed has the capability arguments of the CNI conventions that are refused, each with what to
// do instead.
var notServed = map[string]string{
	"bandwidth": "limit what the pod sends by max_tx_rate, and leave bandwidth out of the " +
		"pod's annotation",
	"portMappings": "no port of the node leads to a Function, whose packets do not pass the " +
		"node's kernel",
	"aliases": "give the pod's address a name by a Service",
}

// served has the capability arguments that are used by the agent or the shim, and arguments that
// only inform plugins, and are not needed here.
var served = []string{
	"mac", "ips", "infinibandGUID", "deviceID", "CNIDeviceInfoFile", "dns", "cgroupPath",
	"io.kubernetes.cri.pod-annotations",
}

// capabilities adds an error for every capability argument that has a value and no effect, because
// the pod would run without what it asked for. ipRanges is allowed if there is an IPAM plugin,
// because it is meant for that plugin.
func (m *fieldErrors) capabilities(config json.RawMessage, ipam string, allowed []string) {
	var runtime struct {
		Config map[string]json.RawMessage `json:"runtimeConfig"`
	}
	_ = json.Unmarshal(config, &runtime) // decode returns the error
	known := slices.Concat(served, allowed)
	if ipam != "" && ipam != wire.IPAM {
		known = append(known, "ipRanges")
	}

	unserved := 0
	for _, key := range slices.Sorted(maps.Keys(runtime.Config)) {
		isKey := func(k string) bool { return strings.EqualFold(k, key) }
		if slices.ContainsFunc(known, isKey) || empty(runtime.Config[key]) {
			continue
		}
		if unserved++; unserved > maxUnknown {
			return
		}

		reason, defined := notServed[key]
		if !defined {
			reason = "take it out of capabilities"
		}

		m.add("runtimeConfig.%s: xpu-cni does not serve this capability: %s", short(key), reason)
	}
}

// empty reports whether a JSON value is empty.
func empty(value json.RawMessage) bool {
	return slices.Contains([]string{"null", `""`, "[]", "{}", "false", "0"}, string(value))
}

// short returns a text, cut for display in an error.
func short(text string) string {
	const most = 64
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "..."
}

// bounded returns a message, cut to [maxError] bytes.
func bounded(message string) string {
	if len(message) <= maxError {
		return message
	}
	return strings.ToValidUTF8(message[:maxError], "") + "... (cut)"
}
