package pool

import (
	"cmp"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// ResourceName is the name of the extended resource that the device plugin offers the pool as: "<prefix>/<name>",
// without other wishes xpu.opiproject.org/ and the name of the DevicePool.
func (p Pool) ResourceName() string {
	var spec v1alpha1.DevicePluginSpec
	if p.Spec.DevicePlugin != nil {
		spec = *p.Spec.DevicePlugin
	}
	return cmp.Or(spec.ResourcePrefix, v1alpha1.GroupName) + "/" + cmp.Or(spec.ResourceName, p.Name)
}

// CheckResourceName says what the kubelet would have against an extended resource of this name.
func CheckResourceName(name string) error {
	if !strings.Contains(name, "/") || strings.Contains(name, "kubernetes.io/") || strings.HasPrefix(name, "requests.") {
		return fmt.Errorf("resource %q: must be <prefix>/<name>, with a prefix other than kubernetes.io and requests.*", name)
	}
	// Quotas call the resource "requests." and its name, which must be a name too.
	if problems := validation.IsQualifiedName("requests." + name); len(problems) > 0 {
		return fmt.Errorf("resource %q: %s", name, strings.Join(problems, "; "))
	}
	return nil
}
