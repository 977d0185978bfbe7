// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// MaxPoolAttributes is how many attributes a DevicePool may add to its devices. A device can have 32
// attributes and capacities (ResourceSliceMaxAttributesAndCapacitiesPerDevice of Kubernetes'
// resource.k8s.io/v1), of which the agent itself needs up to 18.
const MaxPoolAttributes = 12

// PoolAttribute is an attribute that all devices of a DevicePool have in ResourceSlices, as the
// administrator says. It has one of string, int and bool.
// +kubebuilder:validation:XValidation:rule="[has(self.string), has(self.int), has(self.bool)].filter(x, x).size() == 1",message="must have one of string, int and bool"
// +kubebuilder:validation:XValidation:rule="!(self.name in ['adminAccess', 'device', 'functions', 'functionsInUse', 'index', 'kind', 'linkSpeed', 'numaNode', 'pcieRoot', 'pf', 'pfName', 'pool', 'rdma', 'rdmaDevice', 'switchID', 'vendor'])",message="name is an attribute that the agent finds out itself: use another name"
// +kubebuilder:validation:XValidation:rule="!self.name.matches('^(.*[.])?(k8s[.]io|kubernetes[.]io|k8s[.]cni[.]cncf[.]io|xpu[.]opiproject[.]org)/')",message="name has a domain of Kubernetes, of Multus or of this project: use a domain of yours, or none"
// +kubebuilder:validation:XValidation:rule="self.name.indexOf('/') <= 63",message="the domain of name has at most 63 characters"
type PoolAttribute struct {
	// Name is a C identifier of at most 32 characters, such as rail. Without a domain it belongs to
	// the domain xpu.opiproject.org. With a domain, example.com/rail, devices of several drivers can
	// have it, for matchAttribute. A domain is a DNS-1123 subdomain of at most 63 characters
	// (DeviceMaxDomainLength of Kubernetes' resource.k8s.io/v1).
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=96
	// +kubebuilder:validation:Pattern=`^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z_][A-Za-z0-9_]{0,31}$`
	Name string `json:"name"`

	// String is 1 to 64 printable ASCII characters.
	// +optional
	// +kubebuilder:validation:Pattern=`^[ -~]{1,64}$`
	String *string `json:"string,omitempty"`

	// Int is a whole number.
	// +optional
	Int *int64 `json:"int,omitempty"`

	// Bool is true or false.
	// +optional
	Bool *bool `json:"bool,omitempty"`
}

var (
	// attributeName and attributeText are the patterns of the CRD, which bounds the domain by a rule.
	attributeName = regexp.MustCompile(
		`^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?` +
			`[A-Za-z_][A-Za-z0-9_]{0,31}$`)
	attributeText = regexp.MustCompile(`^[ -~]{1,64}$`)

	// foundAttributes are those that the agent finds out itself, or tells pods with adminAccess.
	foundAttributes = []string{
		"adminAccess", "device", "functions", "functionsInUse", "index", "kind", "linkSpeed",
		"numaNode", "pcieRoot", "pf", "pfName", "pool", "rdma", "rdmaDevice", "switchID", "vendor",
	}
	// reservedDomains, and the domains below them, have meanings that a DevicePool must not change.
	reservedDomains = []string{"k8s.io", "kubernetes.io", "k8s.cni.cncf.io", GroupName}
)

// Validate applies the rules of the CRD to an attribute. The error begins with the name of a field.
func (a PoolAttribute) Validate() error {
	domain, _, qualified := strings.Cut(a.Name, "/")
	reserved := func(other string) bool {
		return domain == other || strings.HasSuffix(domain, "."+other)
	}

	values := 0
	for _, has := range []bool{a.String != nil, a.Int != nil, a.Bool != nil} {
		if has {
			values++
		}
	}

	switch {
	case !attributeName.MatchString(a.Name):
		return fmt.Errorf("name: %q: must be a C identifier of at most 32 characters, such as "+
			"rail, or example.com/rail", a.Name)
	case qualified && len(domain) > 63:
		return fmt.Errorf("name: %q: the domain of name has at most 63 characters", a.Name)
	case slices.Contains(foundAttributes, a.Name):
		return fmt.Errorf("name: %q: name is an attribute that the agent finds out itself: use "+
			"another name", a.Name)
	case qualified && slices.ContainsFunc(reservedDomains, reserved):
		return fmt.Errorf("name: %q: name has a domain of Kubernetes, of Multus or of this "+
			"project: use a domain of yours, or none", a.Name)
	case values != 1:
		return fmt.Errorf("name: %q: must have one of string, int and bool", a.Name)
	case a.String != nil && !attributeText.MatchString(*a.String):
		return fmt.Errorf("string: %q: must be 1 to 64 printable ASCII characters", *a.String)
	}

	return nil
}
