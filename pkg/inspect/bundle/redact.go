package bundle

import (
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// leftOut stands for what may be secret.
const leftOut = "<left out>"

// lastApplied has a copy of the object as somebody wrote it, secrets included.
const lastApplied = "kubectl.kubernetes.io/last-applied-configuration"

// redact takes from an object what may be secret: values of environment variables and of probes' headers, commands and arguments of containers that are not the
// product's, annotations but those that have to do with networks, and opaque parameters of other drivers.
func redact(o *unstructured.Unstructured) {
	unstructured.RemoveNestedField(o.Object, "metadata", "managedFields")
	annotations := o.GetAnnotations()
	for name := range annotations {
		if name == lastApplied {
			delete(annotations, name)
		} else if !slices.Contains(shownAnnotations, name) {
			annotations[name] = leftOut
		}
	}
	o.SetAnnotations(annotations)
	walk(o.Object)
}

// shownAnnotations are what Multus, the broker and the controller read or write.
var shownAnnotations = []string{
	"k8s.v1.cni.cncf.io/networks", "k8s.v1.cni.cncf.io/network-status", "k8s.v1.cni.cncf.io/resourceName",
	v1alpha1.AnnotationOrigin, v1alpha1.AnnotationOriginUID, v1alpha1.AnnotationTLSSecret, v1alpha1.AnnotationServerName,
	"resource.kubernetes.io/pod-claim-name", "deprecated.daemonset.template.generation", "deployment.kubernetes.io/revision",
}

// walk goes through a value of JSON.
func walk(value any) {
	switch v := value.(type) {
	case []any:
		for _, item := range v {
			walk(item)
		}
	case map[string]any:
		for key, item := range v {
			switch {
			case key == "env" || key == "args" || key == "command" || key == "httpHeaders":
				hide(v, key)
			case key == "opaque":
				hideParameters(item)
			default:
				walk(item)
			}
		}
	}
}

// hide keeps the names of environment variables, and the arguments that are flags of the product's programs in its own images.
func hide(parent map[string]any, key string) {
	items, isList := parent[key].([]any)
	if !isList {
		return
	}
	for i, item := range items {
		switch entry := item.(type) {
		case map[string]any:
			if _, has := entry["value"]; has {
				entry["value"] = leftOut
			}
		case string:
			if !ours(parent) {
				items[i] = leftOut
			}
		}
	}
}

// ours says whether a container is one of the product's, none of whose flags is secret.
func ours(container map[string]any) bool {
	name, _ := container["name"].(string)
	return slices.Contains([]string{"xpu-agent", "xpu-controller", "opi-bridge", "install-cni"}, name)
}

func hideParameters(opaque any) {
	o, isMap := opaque.(map[string]any)
	if isMap && o["driver"] != v1alpha1.GroupName {
		o["parameters"] = leftOut
	}
}
