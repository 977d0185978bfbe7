// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// maxErrors bounds the errors of a set of configurations, because 32 configurations of 10 KiB, which
// the API takes, can have 100000.
const maxErrors = 64

// ValidateClaim returns an error for everything that the driver would refuse in its parameters when
// the claim is prepared, whichever class, DevicePool and Function the claim gets. It does not judge
// what these may change: a class may give a field that is missing, and a DevicePool allows
// privileged fields. It judges neither parameters for other drivers nor parameters of requests with
// admin access.
//
// path is the field of the DeviceClaim, such as "spec.devices". Each error begins with the field
// that is wrong, such as "spec.devices.config[2].opaque.parameters.mtu 9: must be 68-9216". Of many
// errors the first are returned.
func ValidateClaim(path string, c *resourceapi.DeviceClaim) error {
	all := make([]resourceapi.DeviceAllocationConfiguration, len(c.Config))
	for i, config := range c.Config {
		all[i] = resourceapi.DeviceAllocationConfiguration{
			Requests: config.Requests, DeviceConfiguration: config.DeviceConfiguration,
		}
	}

	v := newChecker(path, all)
	for _, request := range requestsOf(c) {
		if len(v.errs) < maxErrors {
			v.validate(request)
		}
	}

	return errors.Join(v.errs...)
}

// ValidateClass does the same as [ValidateClaim] for the parameters of a DeviceClass. It judges them
// for a claim that adds nothing which contradicts them. path is the field of the spec.
func ValidateClass(path string, spec *resourceapi.DeviceClassSpec) error {
	all := make([]resourceapi.DeviceAllocationConfiguration, len(spec.Config))
	for i, config := range spec.Config {
		all[i].DeviceConfiguration = config.DeviceConfiguration
	}

	v := newChecker(path, all)
	v.validate("any")

	return errors.Join(v.errs...)
}

// requestsOf returns the names of the requests that are prepared with parameters, with a prioritized
// list as "request/subrequest".
func requestsOf(c *resourceapi.DeviceClaim) (names []string) {
	for _, request := range c.Requests {
		if e := request.Exactly; e != nil && !ptr.Deref(e.AdminAccess, false) {
			names = append(names, request.Name)
		}
		for _, sub := range request.FirstAvailable {
			names = append(names, resourceclaim.CreateSubRequestRef(request.Name, sub.Name))
		}
	}
	return names
}

// checker validates the parameters of one object, each set of configurations once.
type checker struct {
	path    string
	configs []resourceapi.DeviceAllocationConfiguration
	entries map[*resourceapi.OpaqueDeviceConfiguration]entry
	done    map[string]bool
	known   map[string]bool // messages of errs
	errs    []error
}

// entry is a configuration for this driver.
type entry struct {
	index  int
	config v1alpha1.InterfaceConfig
	alone  []string // errors of the configuration by itself
	broken error    // why the configuration cannot be decoded
}

func newChecker(path string, all []resourceapi.DeviceAllocationConfiguration) *checker {
	v := &checker{
		path: path, configs: all, entries: map[*resourceapi.OpaqueDeviceConfiguration]entry{},
		done: map[string]bool{}, known: map[string]bool{},
	}

	for i, c := range all {
		if c.Opaque == nil || c.Opaque.Driver != v1alpha1.GroupName {
			continue
		}

		e := entry{index: i}
		if e.config, e.broken = decode(c.Opaque.Parameters.Raw); e.broken == nil {
			e.alone = problems(e.config)
		}
		v.entries[c.Opaque] = e
	}

	return v
}

// validate adds the errors of a request. If configurations cannot be decoded, these are the errors of
// decoding. Otherwise they are the errors of all its configurations together.
func (v *checker) validate(request string) {
	var applicable []entry
	var merged v1alpha1.InterfaceConfig
	key, isBroken := "", false
	result := resourceapi.DeviceRequestAllocationResult{Request: request}
	for _, c := range resourceclaim.ConfigForResult(v.configs, result) {
		e, ours := v.entries[c.Opaque]
		if !ours {
			continue
		}
		applicable, isBroken = append(applicable, e), isBroken || e.broken != nil
		key += fmt.Sprintf("%d,", e.index)
	}

	if v.done[key] {
		return
	}
	v.done[key] = true

	for _, e := range applicable {
		if e.broken != nil {
			v.add(fmt.Sprintf("%s.config[%d].opaque.parameters: %v", v.path, e.index, e.broken))
		}
		merged = merge(merged, e.config)
	}
	if isBroken {
		return
	}

	for _, problem := range problems(merged) {
		v.add(v.whereIs(problem, applicable) + problem)
	}
}

// whereIs returns the field of the configurations that has the problem: the last one with it, or
// all of them if the problem comes from several together.
func (v *checker) whereIs(problem string, applicable []entry) string {
	for _, e := range slices.Backward(applicable) {
		if len(applicable) == 1 || slices.Contains(e.alone, problem) {
			return fmt.Sprintf("%s.config[%d].opaque.parameters.", v.path, e.index)
		}
	}

	text := v.path + ".config"
	for _, e := range applicable {
		text += fmt.Sprintf("[%d]", e.index)
	}
	return text + " together: "
}

func (v *checker) add(text string) {
	if !v.known[text] {
		v.known[text] = true
		v.errs = append(v.errs, errors.New(text))
	}
}

// problems returns what is wrong with a configuration, whatever a class adds to it.
func problems(c v1alpha1.InterfaceConfig) []string {
	if vf := c.VF; vf != nil && vf.VLAN == nil && (vf.VLANProtocol != "" || vf.QoS != nil) {
		c.VF = vf.DeepCopy()
		c.VF.VLAN = ptr.To[int32](1)
	}
	if c.Bond != nil {
		c.Bond = completedBond(c)
	}
	if c.InterfaceName == "" && (c.VRF != nil && c.VRF.Name == defaultName ||
		c.Bond != nil && c.Bond.Name == defaultName) {
		c.InterfaceName = otherName
	}

	_, _, err := settings(&c)
	return appendMessages(nil, err)
}

// completedBond returns the bond of a configuration with a name, and with a mode that has the given
// fields if there is one.
func completedBond(c v1alpha1.InterfaceConfig) *v1alpha1.Bond {
	bond := c.Bond.DeepCopy()
	bond.Name = cmp.Or(bond.Name, "name-of-class")
	switch {
	case bond.Mode != "":
	case bond.LACPRate != "" || bond.XmitHashPolicy != "":
		bond.Mode = function.BondLACP
	case len(c.Neighbors) > 0:
		bond.Mode = function.BondTLB
	default:
		bond.Mode = function.BondActiveBackup
	}
	return bond
}

// otherName stands for the name of an interface that is not [defaultName].
const otherName = "net2"

// appendMessages appends the messages of joined errors one by one, until there are [maxErrors].
func appendMessages(texts []string, err error) []string {
	joined, ok := err.(interface{ Unwrap() []error })
	switch {
	case err == nil, len(texts) == maxErrors:
		return texts
	case !ok:
		return append(texts, err.Error())
	}

	for _, one := range joined.Unwrap() {
		texts = appendMessages(texts, one)
	}

	return texts
}
