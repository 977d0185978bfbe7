// SPDX-License-Identifier: Apache-2.0

// Package values converts values of the Helm charts of other projects to values of this project's
// chart.
package values

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Chart is the chart of another project, as it was in August 2026.
type Chart struct {
	// Name is the project's.
	Name string
	// image is the end of the name of the chart's image, without a tag.
	image string
	// marks are paths that no other chart is known to have.
	marks []string
	rules []rule
}

// rule says where a value goes. Paths have their parts joined by dots.
type rule struct {
	from, to string
	// change returns the value in the place of another; nil leaves it as it is.
	change func(any) any
}

// Charts returns the charts that are known.
func Charts() []Chart {
	return []Chart{
		{"DRANET", "/dranet", []string{
			"args.inventoryMinPollInterval", "args.inventoryMaxPollInterval", "args.moveIBInterfaces",
			"args.cloudProviderHint",
		}, dranetRules()},
		{"dra-driver-sriov", "/dra-driver-sriov", []string{
			"kubeletPlugin.nriPluginName", "kubeletPlugin.configurationMode",
			"kubeletPlugin.defaultInterfacePrefix",
		}, sriovDRARules()},
		{"sriov-network-operator", "/sriov-network-operator", []string{
			"sriovOperatorConfig", "supportedExtraNICs", "operator.resourcePrefix",
			"operator.cniBinPath",
		}, operatorRules()},
	}
}

func dranetRules() []rule {
	return append(pod("", "agent"),
		rule{"podLabels", "agent.podLabels", nil},
		rule{"resources", "agent.resources", nil},
		rule{"kubeletRootDir", "agent.hostPaths.kubelet", nil},
		rule{"imagePullSecrets", "image.pullSecrets", names},
		rule{"prometheus.monitor.enabled", "monitoring.enabled", nil},
		rule{"prometheus.monitor.labels", "monitoring.labels", nil},
	)
}

func sriovDRARules() []rule {
	return slices.Concat(pod("kubeletPlugin.", "agent"), pod("controller.", "controller"), []rule{
		{"kubeletPlugin.priorityClassName", "agent.priorityClassName", nil},
		{"kubeletPlugin.containers.plugin.resources", "agent.resources", nil},
		{"kubeletPlugin.kubeletPluginsDirectoryPath", "agent.hostPaths.kubelet", parentOf("/plugins")},
		{"controller.priorityClassName", "controller.priorityClassName", nil},
		{"controller.containers.controller.resources", "controller.resources", nil},
		{"imagePullSecrets", "image.pullSecrets", names},
	})
}

func operatorRules() []rule {
	return []rule{
		{"operator.resourcePrefix", "", nil}, // for policies
		{"sriovOperatorConfig.configDaemonNodeSelector", "agent.nodeSelector", nil},
		{"operator.cniBinPath", "agent.hostPaths.cniBin", nil},
		{"operator.nodeSelector", "controller.nodeSelector", nil},
		{"operator.tolerations", "controller.tolerations", nil},
		{"operator.affinity", "controller.affinity", nil},
		{"operator.metricsExporter.prometheusOperator.enabled", "monitoring.enabled", nil},
		{"imagePullSecrets", "image.pullSecrets", names},
	}
}

// pod returns rules for what both have of a pod.
func pod(from, to string) []rule {
	var rules []rule
	for _, field := range []string{"nodeSelector", "affinity", "tolerations", "podAnnotations"} {
		rules = append(rules, rule{from + field, to + "." + field, nil})
	}
	return rules
}

// names returns the names of references to Secrets.
func names(value any) any {
	list, _ := value.([]any)
	var all []any
	for _, one := range list {
		if reference, isObject := one.(map[string]any); isObject {
			one = reference["name"]
		}
		all = append(all, one)
	}
	return all
}

// parentOf returns a change that takes the end of a path away.
func parentOf(end string) func(any) any {
	return func(value any) any {
		path, _ := value.(string)
		return strings.TrimSuffix(path, end)
	}
}

// Of returns the chart whose values these are; nil if that is not known. Values that only say what
// many charts have, such as a nodeSelector, are not known.
func Of(values map[string]any) *Chart {
	image, _, _ := unstructured.NestedString(values, "image", "repository")
	for _, chart := range Charts() {
		if strings.HasSuffix(image, chart.image) {
			return &chart
		}
		for _, mark := range chart.marks {
			_, has, _ := unstructured.NestedFieldNoCopy(values, strings.Split(mark, ".")...)
			if has {
				return &chart
			}
		}
	}

	return nil
}

// Targets returns the paths of this project's chart that values are converted to.
func (c Chart) Targets() (paths []string) {
	for _, r := range c.rules {
		if r.to != "" {
			paths = append(paths, r.to)
		}
	}
	return paths
}

// Convert converts values of the chart. Empty ones say nothing. Notes name what is left out.
func (c Chart) Convert(values map[string]any) (converted map[string]any, notes []string, err error) {
	converted = map[string]any{}
	used := map[string]bool{}
	for _, r := range c.rules {
		value, found, err := unstructured.NestedFieldCopy(values, strings.Split(r.from, ".")...)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", r.from, err)
		}
		used[r.from] = true
		if r.change != nil {
			value = r.change(value)
		}
		if !found || r.to == "" || isEmpty(value) {
			continue
		}
		if err := unstructured.SetNestedField(converted, value,
			strings.Split(r.to, ".")...); err != nil {
			return nil, nil, err
		}
	}

	for _, path := range leftOut(values, "", used) {
		notes = append(notes, path+" is left out")
	}
	return converted, notes, nil
}

// isEmpty reports whether a value is what charts write for nothing.
func isEmpty(value any) bool {
	switch v := value.(type) {
	case nil:
		return true
	case string:
		return v == ""
	case bool:
		return !v
	case []any:
		return len(v) == 0
	case map[string]any:
		for _, inner := range v {
			// A label may well be "".
			if _, isText := inner.(string); isText || !isEmpty(inner) {
				return false
			}
		}
		return true
	default:
		return false
	}
}

// leftOut returns the shortest paths below which no rule has used anything.
func leftOut(values map[string]any, above string, used map[string]bool) (paths []string) {
	for _, name := range slices.Sorted(maps.Keys(values)) {
		path, value := above+name, values[name]
		if used[path] || isEmpty(value) {
			continue
		}
		inner, isObject := value.(map[string]any)
		if isObject && usedBelow(path, used) {
			paths = append(paths, leftOut(inner, path+".", used)...)
			continue
		}
		paths = append(paths, path)
	}
	return paths
}

func usedBelow(path string, used map[string]bool) bool {
	for one := range used {
		if strings.HasPrefix(one, path+".") {
			return true
		}
	}
	return false
}
