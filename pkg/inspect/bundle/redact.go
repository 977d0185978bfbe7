// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// redacted replaces an omitted text where its presence is of interest.
const redacted = "<left out>"

// redact returns the parts of an object that the archive shows. namespace is where the project's
// pods are.
func redact(kind string, o *unstructured.Unstructured, namespace string) map[string]any {
	allowed := shownFields(kind, o, namespace)
	if allowed == nil {
		return nil
	}
	shown, _ := allowed.filter(o.Object).(map[string]any)
	return shown
}

func views() map[string]view {
	return map[string]view{
		"labels":      selectKeys(shownLabels()),
		"annotations": annotations,
		"opaque":      opaque,
		"device":      deviceStatus,
		"network":     networkConfig,
		"container":   parse(containerFields, nil).filter,
		"status":      parse(statusFields, nil).filter,
	}
}

// ourViews returns the views for the project's own pods. Other containers in them, such as a
// service mesh's, are shown like everywhere else.
func ourViews() map[string]view {
	all := views()
	others := all["container"]
	ours := parse(ourContainerFields, map[string]view{"arguments": arguments})
	all["container"] = func(value any) any {
		container, _ := value.(map[string]any)
		if name, _ := container["name"].(string); isOurContainer(name) {
			return ours.filter(value)
		}
		return others(value)
	}

	return all
}

// selectKeys shows the texts of a map under the given keys.
func selectKeys(keys []string) view {
	return func(value any) any {
		all, _ := value.(map[string]any)
		shown := map[string]any{}
		for _, key := range keys {
			if text, isText := all[key].(string); isText {
				shown[key] = text
			}
		}

		if len(shown) == 0 {
			return nil
		}

		return shown
	}
}

const (
	networksAnnotation = "k8s.v1.cni.cncf.io/networks"
	statusAnnotation   = "k8s.v1.cni.cncf.io/network-status"
)

func annotations(value any) any {
	all, _ := value.(map[string]any)
	shown, _ := selectKeys(shownAnnotations())(value).(map[string]any)
	for key, show := range map[string]func(string) string{
		networksAnnotation: networks, statusAnnotation: networkStatus,
	} {
		if text, isText := all[key].(string); isText {
			if shown == nil {
				shown = map[string]any{}
			}
			shown[key] = show(text)
		}
	}

	if shown == nil {
		return nil
	}

	return shown
}

// networkNames matches the short form of a pod's networks, "namespace/name@interface,...", from the
// multi-network specification (k8snetworkplumbingwg), section 4.1.1.
var networkNames = regexp.MustCompile(`^[a-z0-9.-]+(/[a-z0-9.-]+)?(@[a-zA-Z0-9._-]+)?$`)

// networks shows which networks a pod requests from Multus, without the cni-args of plugins.
func networks(text string) string {
	if strings.HasPrefix(strings.TrimSpace(text), "[") {
		return filterJSON(text, parse("[]: name namespace interface ips[] mac", nil))
	}

	for name := range strings.SplitSeq(text, ",") {
		if !networkNames.MatchString(strings.TrimSpace(name)) {
			return redacted
		}
	}

	return text
}

// networkStatus shows which interfaces a pod has according to Multus.
func networkStatus(text string) string {
	return filterJSON(text, parse(`
		[]: name interface ips[] mac mtu default gateway[]
		[].device-info: type version
		[].device-info.pci: pci-address pf-pci-address representor-device rdma-device vdpa-device
	`, nil))
}

// networkConfig shows a CNI network configuration: the types of the plugins, and the fields that
// xpu-cni reads. It omits the rest, because configurations of IPAM plugins contain passwords.
func networkConfig(value any) any {
	text, _ := value.(string)
	if text == "" {
		return nil
	}

	plugin := func(value any) any {
		list := "type name ipam.type"
		if conf, _ := value.(map[string]any); conf["type"] == "xpu-cni" {
			list += ` deviceID network mtu mac vlan vlanQoS vlanProto min_tx_rate max_tx_rate
				spoofchk trust link_state timeout capabilities.*`
		}
		return parse(oneLine(list)+" cniVersion", nil).filter(value)
	}

	list := parse("cniVersion name disableCheck plugins[]=plugin",
		map[string]view{"plugin": plugin})
	return filterJSON(text, &fields{view: func(value any) any {
		if conf, _ := value.(map[string]any); conf["plugins"] == nil {
			return plugin(value)
		}
		return list.filter(value)
	}})
}

// filterJSON returns the selected fields of a JSON text as JSON, or [redacted] if it is not JSON.
func filterJSON(text string, f *fields) string {
	var value any
	if err := json.Unmarshal([]byte(text), &value); err != nil {
		return redacted
	}

	shown, err := json.Marshal(f.filter(value))
	if err != nil || string(shown) == "null" {
		return redacted
	}
	return string(shown)
}

func oneLine(list string) string { return strings.Join(strings.Fields(list), " ") }

// opaque shows the driver of a configuration, and the parameters if it is for this driver.
func opaque(value any) any {
	list := "driver"
	if config, _ := value.(map[string]any); config["driver"] == v1alpha1.GroupName {
		list = `driver
			parameters: apiVersion kind network interfaceName mtu mac addresses[] allMulticast driver
			parameters.routes[]: to via metric table source onLink scope mtu advMSS
			parameters.rules[]: priority table from to incoming outgoing
			parameters.neighbors[]: address mac
			parameters.networks[]: name addresses[] interfaceName
			parameters.vrf: name table
			parameters.offload: gsoMaxSize groMaxSize gsoIPv4MaxSize groIPv4MaxSize
			parameters.vf: vlan qos vlanProtocol trust spoofCheck minTxRate maxTxRate linkState
			parameters.vf: nodeGUID portGUID
		`
	}

	return parse(list, nil).filter(value)
}

// deviceStatus shows the status of a claim's device, completely if this driver wrote it.
func deviceStatus(value any) any {
	list := `
		driver pool device shareID
		conditions[]: type status reason observedGeneration lastTransitionTime
	`

	if device, _ := value.(map[string]any); device["driver"] == v1alpha1.GroupName {
		list += `
			conditions[]: message
			networkData: interfaceName ips[] hardwareAddress
		`
	}

	return parse(list, nil).filter(value)
}

// eventMessage returns the message of an event if the project or the scheduler writes it. Of other
// messages it returns the part that comes from the project's CNI plugin or DRA driver.
func eventMessage(o *unstructured.Unstructured) any {
	event := o.Object
	text, _ := event["message"].(string)
	reason, _ := event["reason"].(string)
	from, _ := event["reportingComponent"].(string)
	if from == "" {
		from, _, _ = unstructured.NestedString(event, "source", "component")
	}

	switch {
	case text == "":
		return nil
	case reason == "PostDeleteHookFailed": // it contains the hook's output
		return redacted
	case slices.Contains(ourParts(), from), from == "default-scheduler":
		return text
	case from == "kubelet":
		return ourPart(text)
	}

	return redacted
}

// ourPart extracts the message of the project's CNI plugin or DRA driver from a kubelet's message.
func ourPart(text string) string {
	for _, mark := range []string{`plugin type="xpu-cni"`, `plugin type=\"xpu-cni\"`} {
		if _, said, found := strings.Cut(text, mark); found {
			said, _, _ = strings.Cut(said, "plugin type=")
			return mark + said
		}
	}
	return redacted
}

// ourParts returns the names of the project's components, which are also the names of their
// containers, DaemonSets, Deployments and event reporters.
func ourParts() []string {
	return []string{"xpu-agent", "xpu-controller", "xpu-broker", "opi-bridge"}
}

func isOurContainer(name string) bool {
	return name == "install-cni" || slices.Contains(ourParts(), name)
}

// partOf is a label on the project's pods and their owners.
const partOf = "app.kubernetes.io/part-of"

// isOurPod reports whether a pod is the project's. It checks the namespace, in which only the
// project's operator may create pods, the labels, the ServiceAccount, and the owner.
func isOurPod(o metav1.Object, account, namespace string) bool {
	part := o.GetLabels()["app.kubernetes.io/name"]
	if o.GetNamespace() != namespace || o.GetLabels()[partOf] != "xpu-device-plugin" ||
		!slices.Contains(ourParts(), part) || !isAccountOf(part, account) {
		return false
	}

	for _, owner := range o.GetOwnerReferences() {
		if owner.Controller == nil || !*owner.Controller {
			continue
		}
		ofDaemonSet := owner.Kind == "DaemonSet" && owner.Name == part
		ofDeployment := owner.Kind == "ReplicaSet" && strings.HasPrefix(owner.Name, part+"-")
		return ofDaemonSet || ofDeployment
	}

	return false
}

// isOurWorkload reports whether a DaemonSet or Deployment is the project's.
func isOurWorkload(o metav1.Object, account, namespace string) bool {
	return o.GetNamespace() == namespace && o.GetLabels()[partOf] == "xpu-device-plugin" &&
		slices.Contains(ourParts(), o.GetName()) && isAccountOf(o.GetName(), account)
}

// isAccountOf reports whether a component runs as the ServiceAccount. Older versions have no account
// of their own for opi-bridge, and for the agent of direct mode.
func isAccountOf(part, account string) bool {
	own := account == "" || account == "default"
	return account == part || own && (part == "xpu-agent" || part == "opi-bridge")
}

// arguments shows the flags of the project's programs, with values that are names, numbers, paths
// or addresses.
func arguments(value any) any {
	all, _ := value.([]any)
	shown := []any{}
	for _, item := range all {
		text, _ := item.(string)
		flag, _, hasValue := strings.Cut(text, "=")
		switch {
		case slices.Contains(shownFlags(), flag):
			shown = append(shown, text)
		case hasValue && flagName.MatchString(flag):
			shown = append(shown, flag+"="+redacted)
		default:
			shown = append(shown, redacted)
		}
	}

	return shown
}

var flagName = regexp.MustCompile(`^--[a-z-]{1,40}$`)

// shownFlags returns flags whose values are not secret. --tracing-endpoint is omitted, because a
// URL may contain a password.
func shownFlags() []string {
	return strings.Fields(`
		--agent-timeout --authorization --cdi-dir --clusterprofile-provider-file --cni-allow-keys
		--cni-socket --config-file --data-plane --dev-root --devinfo-dir --direct-config --from
		--gang-timeout --health-probe-bind-address --hook-attempts --hook-timeout --hooks-dir
		--host-pf --host-pf-file --insecure --kube-api-burst --kube-api-qps --kubeconfig
		--kubelet-dir --leader-elect --listen --log-format --log-level --metrics-bind-address
		--metrics-cert-dir --metrics-listen --metrics-secure --metrics-tls --namespace --new-state
		--node-name --nri-socket --pod-name --pod-uid --pprof-bind-address --pprof-listen
		--proc-root --provision-timeout --provisioner --ready-socket --representor --resource-prefix
		--resync-period --role --socket --source-filter --spool-dir --state --state-dir --sys-root
		--sysctl --tls-cert --tls-client-ca --tls-key --to --underlay --uplink --use-cdi
	`)
}

// redactState removes the output of the administrator's post-delete hooks. All other texts are the
// agent's own.
func redactState(state *nodestate.State) *nodestate.State {
	shown := *state
	shown.Functions = slices.Clone(state.Functions)
	for i := range shown.Functions {
		a := shown.Functions[i].Attachment
		if a == nil || a.Hook == nil || a.Hook.Name == nodestate.PortHook || a.Hook.Error == "" {
			continue
		}
		attachment, hook := *a, *a.Hook
		hook.Error = redacted
		attachment.Hook = &hook
		shown.Functions[i].Attachment = &attachment
	}

	shown.DeadLetters = slices.Clone(state.DeadLetters)
	for i := range shown.DeadLetters {
		if l := &shown.DeadLetters[i]; l.Hook != nodestate.PortHook && l.Error != "" {
			l.Error = redacted
		}
	}

	return &shown
}

// redactLog removes the output of post-delete hooks from a log of the project.
func redactLog(log []byte) []byte {
	var out strings.Builder
	for line := range strings.Lines(string(log)) {
		before, _, isOfHook := strings.Cut(line, "Post-delete hook ")
		if !isOfHook {
			out.WriteString(line)
			continue
		}
		at, _, _ := strings.Cut(before, " ")
		out.WriteString(at + " Post-delete hook " + redacted + "\n")
	}

	return []byte(out.String())
}
