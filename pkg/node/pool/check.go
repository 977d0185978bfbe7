// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Check returns what is wrong with a DevicePool from a file. It applies the rules of the CRD, like
// the API server. Errors name the field.
func Check(devicePool v1alpha1.DevicePool) error {
	const longest = validation.DNS1123LabelMaxLength
	var errs []error
	if name := devicePool.Name; len(name) > longest ||
		len(validation.IsDNS1123Subdomain(name)) > 0 {
		errs = append(errs,
			fmt.Errorf("metadata.name: %q: must be a DNS name of at most %d characters, "+
				"such as fast", name, longest))
	}

	_, err := compileAll(devicePool.Spec)
	errs = append(errs, checkSpec(devicePool.Spec).ToAggregate(), err)
	if name := (Pool{Name: devicePool.Name, Spec: devicePool.Spec}).ResourceName(); name != "" {
		errs = append(errs, CheckResourceName(name))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("DevicePool %s: %w", devicePool.Name, err)
	}

	return nil
}

// CheckResourceName returns why the kubelet would refuse an extended resource of this name.
func CheckResourceName(name string) error {
	if !strings.Contains(name, "/") || strings.Contains(name, "kubernetes.io/") ||
		strings.HasPrefix(name, "requests.") {
		return fmt.Errorf("resource %q: must be <prefix>/<name>, with a prefix other than "+
			"kubernetes.io and requests.*", name)
	}

	// A quota uses the name "requests.<prefix>/<name>", which must be a qualified name too.
	if problems := validation.IsQualifiedName("requests." + name); len(problems) > 0 {
		return fmt.Errorf("resource %q: %s", name, strings.Join(problems, "; "))
	}

	return nil
}

type rule struct {
	broken  bool
	message string
}

// rules returns the rules of the CRD about several fields at once (the XValidation markers of
// [v1alpha1.DevicePoolSpec]), with the same messages in the same order.
func rules(s v1alpha1.DevicePoolSpec) []rule {
	namesNoPF := func(s v1alpha1.FunctionSelector) bool {
		return len(s.PFNames)+len(s.RootDevices) == 0
	}

	beyond := func(names func(v1alpha1.FunctionSelector) []string) bool {
		return s.NumVFs != nil &&
			slices.ContainsFunc(s.Selectors, func(one v1alpha1.FunctionSelector) bool {
				return slices.ContainsFunc(names(one), func(text string) bool {
					return !within(text, int(*s.NumVFs))
				})
			})
	}

	return []rule{
		{(s.NumVFs != nil || s.SFs != nil) && slices.ContainsFunc(s.Selectors, namesNoPF),
			"numVFs and sfs need selectors that name the PFs, by pfNames or rootDevices"},
		{beyond(func(s v1alpha1.FunctionSelector) []string { return s.PFNames }),
			"pfNames has VF indexes that the PF will not have: the first VF is 0, so the last " +
				"one is numVFs - 1"},
		{beyond(func(s v1alpha1.FunctionSelector) []string { return s.RootDevices }),
			"rootDevices has VF indexes that the PF will not have: the first VF is 0, so the " +
				"last one is numVFs - 1"},
		{s.SFs != nil && s.DeviceType != "" && s.DeviceType != v1alpha1.DeviceTypeAuxNet,
			"sfs needs a pool that may have SFs: leave deviceType out, or make it auxNetDevice"},
		{s.SFs != nil && s.Driver != "",
			"driver is not for pools with sfs: an SF is no PCI device that another driver could " +
				"be bound to"},
		{s.MaxAllocated != nil && s.Publish == v1alpha1.PublishDevicePlugin,
			"maxAllocated is only for pools with publish: DRA, whose counters the scheduler keeps"},
		{s.DevicePlugin != nil && s.Publish != v1alpha1.PublishDevicePlugin,
			"devicePlugin is only for pools with publish: DevicePlugin"},
		{s.DevicePlugin != nil && s.DevicePlugin.ProvisionAt == v1alpha1.ProvisionAtAllocate &&
			s.Network == "",
			"provisionAt: Allocate needs network: the kubelet does not say which network a pod " +
				"wants when it allocates"},
		{s.Provision == v1alpha1.ProvisionAhead &&
			(s.Network == "" || s.Publish == v1alpha1.PublishDevicePlugin || s.SFs != nil),
			"provision: Ahead needs network and publish: DRA, and no sfs: a Port can be made " +
				"ahead only for a Function that is there, " +
				"in a network that is known"},
		{s.Model != "" && s.Model != v1alpha1.ModelFunctions &&
			s.Publish == v1alpha1.PublishDevicePlugin,
			"model is only for pools with publish: DRA, as the device plugin API has only whole " +
				"devices"},
		{s.Model == v1alpha1.ModelPorts &&
			(s.Provision != "" && s.Provision != v1alpha1.ProvisionOnPrepare || s.SFs != nil ||
				s.DeviceType != "" && s.DeviceType != v1alpha1.DeviceTypeNet),
			"model: Ports needs provision: OnPrepare, as no VF is chosen before; and VFs, so no " +
				"sfs and no deviceType but netDevice"},
		{s.PortsAhead != nil && s.Provision != v1alpha1.ProvisionAhead,
			"portsAhead is only for pools with provision: Ahead"},
		{s.LinkDown != "" && s.Publish == v1alpha1.PublishDevicePlugin,
			"linkDown is only for pools with publish: DRA, as the kubelet knows no taints"},
		{s.EvictLostAfter != nil && (s.Publish == v1alpha1.PublishDevicePlugin ||
			s.Model == v1alpha1.ModelPorts),
			"evictLostAfter is only for pools with publish: DRA, as the kubelet knows no taints, " +
				"and not for model: Ports, whose devices other pods share"},
		{s.Attributes != nil && s.Publish == v1alpha1.PublishDevicePlugin,
			"attributes is only for pools with publish: DRA, as the kubelet knows none"},
		{s.DataDirect && s.Publish == v1alpha1.PublishDevicePlugin,
			"dataDirect is only for pools with publish: DRA, as the kubelet knows no attributes"},
		{s.ListNUMANodes && s.Publish == v1alpha1.PublishDevicePlugin,
			"listNUMANodes is only for pools with publish: DRA, as the kubelet knows no attributes"},
	}
}

var (
	// resourcePrefix and resourceName are the patterns of the CRD.
	resourcePrefix = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)
	resourceName   = regexp.MustCompile(`^[a-zA-Z0-9]([-a-zA-Z0-9_]*[a-zA-Z0-9])?$`)
)

// evictLostAfter checks the range of the CRD.
func evictLostAfter(path *field.Path, after *metav1.Duration) field.ErrorList {
	if after == nil || after.Duration >= time.Minute {
		return nil
	}
	return field.ErrorList{
		field.Invalid(path, after.Duration.String(), "must be at least 1m, as a card may reset"),
	}
}

// checkSpec applies the rules of the CRD, with its enumerations, ranges and patterns.
func checkSpec(spec v1alpha1.DevicePoolSpec) field.ErrorList {
	path := field.NewPath("spec")
	pluginPath := path.Child("devicePlugin")
	plugin := ptr.Deref(spec.DevicePlugin, v1alpha1.DevicePluginSpec{})
	sfs := ptr.Deref(spec.SFs, v1alpha1.SFSpec{Count: 1, FirstNumber: 1})
	errs := slices.Concat(
		oneOf(path.Child("deviceType"), spec.DeviceType,
			v1alpha1.DeviceTypeNet, v1alpha1.DeviceTypeAccelerator, v1alpha1.DeviceTypeAuxNet),
		oneOf(path.Child("linkDown"), spec.LinkDown,
			v1alpha1.LinkDownNoSchedule, v1alpha1.LinkDownNone),
		evictLostAfter(path.Child("evictLostAfter"), spec.EvictLostAfter),
		oneOf(path.Child("publish"), spec.Publish, v1alpha1.PublishDRA,
			v1alpha1.PublishDevicePlugin),
		oneOf(path.Child("model"), spec.Model, v1alpha1.ModelFunctions, v1alpha1.ModelCounters,
			v1alpha1.ModelPorts),
		oneOf(path.Child("provision"), spec.Provision, v1alpha1.ProvisionOnPrepare,
			v1alpha1.ProvisionBeforeBind,
			v1alpha1.ProvisionAhead),
		inRange(path.Child("portsAhead"), spec.PortsAhead, 1, 64),
		inRange(path.Child("numVFs"), spec.NumVFs, 0, math.MaxUint16),
		inRange(path.Child("maxAllocated"), spec.MaxAllocated, 1, math.MaxInt32),
		inRange(path.Child("sfs", "count"), &sfs.Count, 1, 1024),
		inRange(path.Child("sfs", "firstNumber"), &sfs.FirstNumber, 1, math.MaxUint16),
		oneOf(pluginPath.Child("provisionAt"), plugin.ProvisionAt, v1alpha1.ProvisionAtAllocate,
			v1alpha1.ProvisionAtAdd),
		oneOf(pluginPath.Child("preferredAllocation"), plugin.PreferredAllocation,
			v1alpha1.PreferPack, v1alpha1.PreferSpread),
		like(pluginPath.Child("resourcePrefix"), plugin.ResourcePrefix, resourcePrefix),
		like(pluginPath.Child("resourceName"), plugin.ResourceName, resourceName),
	)

	if err := spec.Driver.Validate(); err != nil {
		errs = append(errs, field.Invalid(path.Child("driver"), string(spec.Driver), err.Error()))
	}

	errs = append(errs, checkAttributes(path.Child("attributes"), spec.Attributes)...)
	for i, allowed := range spec.Allow {
		at := path.Child("allow").Index(i)
		errs = append(errs, oneOf(at, allowed, v1alpha1.PrivilegedFields()...)...)
		if slices.Contains(spec.Allow[:i], allowed) {
			errs = append(errs, field.Duplicate(at, allowed))
		}
	}

	if len(spec.Selectors) == 0 {
		errs = append(errs, field.Required(path.Child("selectors"), "must have at least one"))
	}

	for _, rule := range rules(spec) {
		if rule.broken {
			errs = append(errs, field.Forbidden(path, rule.message))
		}
	}

	return errs
}

func checkAttributes(path *field.Path, attributes []v1alpha1.PoolAttribute) field.ErrorList {
	var errs field.ErrorList
	if len(attributes) > v1alpha1.MaxPoolAttributes {
		errs = append(errs, field.TooMany(path, len(attributes), v1alpha1.MaxPoolAttributes))
	}

	names := map[string]bool{}
	for i, a := range attributes {
		if err := a.Validate(); err != nil {
			errs = append(errs, field.Invalid(path.Index(i), a.Name, err.Error()))
		}
		if names[a.Name] {
			errs = append(errs, field.Duplicate(path.Index(i), a.Name))
		}
		names[a.Name] = true
	}

	return errs
}

// like returns an error if a text is neither empty nor matches the pattern.
func like(path *field.Path, text string, pattern *regexp.Regexp) field.ErrorList {
	if text == "" || pattern.MatchString(text) {
		return nil
	}
	return field.ErrorList{field.Invalid(path, text, "must match "+pattern.String())}
}

// oneOf returns an error if a value is neither empty nor among those allowed.
func oneOf[T ~string](path *field.Path, value T, allowed ...T) field.ErrorList {
	if value == "" || slices.Contains(allowed, value) {
		return nil
	}
	return field.ErrorList{field.NotSupported(path, value, allowed)}
}

// inRange returns an error if a value is neither nil nor in the range.
func inRange(path *field.Path, value *int32, least, most int32) field.ErrorList {
	if value == nil || *value >= least && *value <= most {
		return nil
	}
	return field.ErrorList{
		field.Invalid(path, *value, fmt.Sprintf("must be %d to %d", least, most)),
	}
}
