package pool

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
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

// Check says what is wrong with a DevicePool by itself, for those that come from a file and not from the API server,
// which knows these rules as part of the CRD. Errors name the field.
func Check(devicePool v1alpha1.DevicePool) error {
	const longest = validation.DNS1123LabelMaxLength
	var errs []error
	if name := devicePool.Name; len(name) > longest || len(validation.IsDNS1123Subdomain(name)) > 0 {
		errs = append(errs, fmt.Errorf("metadata.name: %q: must be a DNS name of at most %d characters, such as fast",
			name, longest))
	}
	errs = append(errs, checkSpec(devicePool.Spec)...)
	if devicePool.Spec.Publish == v1alpha1.PublishDevicePlugin {
		errs = append(errs, CheckResourceName(Pool{Name: devicePool.Name, Spec: devicePool.Spec}.ResourceName()))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("DevicePool %s: %w", devicePool.Name, err)
	}
	return nil
}

func checkSpec(spec v1alpha1.DevicePoolSpec) []error {
	errs := []error{
		optional("spec.deviceType", spec.DeviceType,
			v1alpha1.DeviceTypeNet, v1alpha1.DeviceTypeAccelerator, v1alpha1.DeviceTypeAuxNet),
		optional("spec.publish", spec.Publish, v1alpha1.PublishDRA, v1alpha1.PublishDevicePlugin),
		optional("spec.provision", spec.Provision, v1alpha1.ProvisionOnPrepare, v1alpha1.ProvisionBeforeBind),
	}
	if len(spec.Selectors) == 0 {
		errs = append(errs, errors.New("spec.selectors: must have at least one"))
	}
	_, err := compileAll(spec)
	errs = append(errs, err)
	errs = append(errs, checkSupply(spec)...)
	if spec.DevicePlugin == nil {
		return errs
	}
	if spec.Publish != v1alpha1.PublishDevicePlugin {
		errs = append(errs, errors.New("spec.devicePlugin: is only for pools with publish: DevicePlugin"))
	}
	plugin := spec.DevicePlugin
	if plugin.ProvisionAt == v1alpha1.ProvisionAtAllocate && spec.Network == "" {
		errs = append(errs, errors.New("spec.devicePlugin.provisionAt: Allocate needs spec.network"))
	}
	return append(errs,
		optional("spec.devicePlugin.provisionAt", plugin.ProvisionAt,
			v1alpha1.ProvisionAtAllocate, v1alpha1.ProvisionAtAdd),
		optional("spec.devicePlugin.preferredAllocation", plugin.PreferredAllocation,
			v1alpha1.PreferPack, v1alpha1.PreferSpread))
}

// checkSupply is about what a pool has made for it.
func checkSupply(spec v1alpha1.DevicePoolSpec) []error {
	errs := []error{optional("spec.driver", spec.Driver, v1alpha1.DriverVFIO)}
	refuse := func(wrong bool, text string) {
		if wrong {
			errs = append(errs, errors.New(text))
		}
	}
	anonymous := func(s v1alpha1.FunctionSelector) bool { return len(s.PFNames)+len(s.RootDevices) == 0 }
	refuse((spec.NumVFs != nil || spec.SFs != nil) && slices.ContainsFunc(spec.Selectors, anonymous),
		"spec.selectors: numVFs and sfs need selectors that name the PFs, by pfNames or rootDevices")
	refuse(spec.NumVFs != nil && (*spec.NumVFs < 0 || *spec.NumVFs > math.MaxUint16), "spec.numVFs: must be 0 to 65535")
	refuse(spec.MaxAllocated != nil && *spec.MaxAllocated < 1, "spec.maxAllocated: must be at least 1")
	refuse(spec.MaxAllocated != nil && spec.Publish == v1alpha1.PublishDevicePlugin,
		"spec.maxAllocated: is only for pools with publish: DRA, whose counters the scheduler keeps")
	if spec.SFs == nil {
		return errs
	}
	refuse(spec.SFs.Count < 1 || spec.SFs.Count > maxSFs, fmt.Sprintf("spec.sfs.count: must be 1 to %d", maxSFs))
	refuse(spec.SFs.FirstNumber < 1 || spec.SFs.FirstNumber > math.MaxUint16, "spec.sfs.firstNumber: must be 1 to 65535")
	refuse(spec.Driver != "", "spec.driver: is not for pools with sfs: an SF is no PCI device that another driver could be bound to")
	refuse(spec.DeviceType != "" && spec.DeviceType != v1alpha1.DeviceTypeAuxNet,
		"spec.sfs: needs a pool that may have SFs: leave deviceType out, or make it auxNetDevice")
	return errs
}

// maxSFs is how many SFs a pool may offer at each of its PFs, as the CRD has it.
const maxSFs = 1024

// optional says what is wrong with the value of a field that may be empty.
func optional[T ~string](field string, value T, allowed ...T) error {
	if value == "" || slices.Contains(allowed, value) {
		return nil
	}
	words := make([]string, len(allowed))
	for i, a := range allowed {
		words[i] = string(a)
	}
	return fmt.Errorf("%s: %q: must be %s", field, value, strings.Join(words, " or "))
}
