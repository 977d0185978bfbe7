// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// strictDecoder decodes the kinds of this API group and rejects unknown and duplicate fields.
var strictDecoder = sync.OnceValue(func() runtime.Decoder {
	scheme := runtime.NewScheme()
	utilruntime.Must(v1alpha1.AddToScheme(scheme))
	return serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
})

// decode decodes opaque parameters. It rejects unknown fields, duplicate fields, wrong types and
// other kinds, with an error that names the field.
func decode(raw []byte) (v1alpha1.InterfaceConfig, error) {
	object, kind, err := strictDecoder().Decode(raw, nil, nil)
	config, ok := object.(*v1alpha1.InterfaceConfig)
	switch {
	case runtime.IsMissingKind(err), runtime.IsMissingVersion(err),
		runtime.IsNotRegisteredError(err), err == nil && !ok:
		apiVersion, name := ptr.Deref(kind, schema.GroupVersionKind{}).ToAPIVersionAndKind()
		return v1alpha1.InterfaceConfig{},
			fmt.Errorf("apiVersion %q and kind %q: must be %q and \"InterfaceConfig\"",
				apiVersion, name, v1alpha1.SchemeGroupVersion)
	case err != nil:
		return v1alpha1.InterfaceConfig{}, err
	}

	config.TypeMeta = metav1.TypeMeta{}
	return *config, nil
}

// merge returns base with every field replaced that over sets. The fields of vf are merged one by
// one; lists are replaced.
func merge(base, over v1alpha1.InterfaceConfig) v1alpha1.InterfaceConfig {
	// One of network and networks replaces the other, with its addresses.
	switch {
	case len(over.Networks) > 0 && over.Network == "":
		base.Network, base.Addresses = "", nil
	case over.Network != "" && len(over.Networks) == 0:
		base.Networks = nil
	}

	if base.VF != nil && over.VF != nil {
		over.VF = ptr.To(overlay(*base.VF, *over.VF))
	}
	return overlay(base, over)
}

// overlay returns the struct base with every field replaced that is not zero in over.
func overlay[T any](base, over T) T {
	to, from := reflect.ValueOf(&base).Elem(), reflect.ValueOf(over)
	for i := range to.NumField() {
		isEmptyList := from.Field(i).Kind() == reflect.Slice && from.Field(i).Len() == 0
		if !isEmptyList && !from.Field(i).IsZero() {
			to.Field(i).Set(from.Field(i))
		}
	}
	return base
}

const (
	// minMTU and maxMTU bound InterfaceConfig.mtu, in bytes: RFC 791, and the maximum of an
	// XPUNetwork.
	minMTU, maxMTU = 68, 9216
	// defaultName stands for a name that the node's agent will choose, in validation.
	defaultName = "net1"
)

// interfaceOf converts a merged configuration. It reports all errors that can be found without the
// cluster. It needs the merged configuration, because fields that depend on each other may come
// from class and claim.
func interfaceOf(c *v1alpha1.InterfaceConfig) (function.Interface, error) {
	var errs []error
	i := function.Interface{
		Name:         cmp.Or(c.InterfaceName, defaultName),
		MTU:          int(ptr.Deref(c.MTU, 0)),
		VF:           vfOf(c.VF),
		AllMulticast: ptr.Deref(c.AllMulticast, false),
	}

	if i.Name == "lo" || i.Name == "eth0" {
		errs = append(errs,
			fmt.Errorf("interfaceName %q: is taken in every pod; choose another name", i.Name))
	}

	if err := function.ValidateInterfaceName(i.Name); err != nil {
		errs = append(errs, fmt.Errorf("interfaceName: %w", err))
	}

	if c.MTU != nil && (*c.MTU < minMTU || *c.MTU > maxMTU) {
		errs = append(errs, fmt.Errorf("mtu %d: must be %d-%d", *c.MTU, minMTU, maxMTU))
	}

	var err error
	if c.MAC != "" {
		if i.MAC, err = function.ParseMAC(c.MAC); err != nil {
			errs = append(errs, fmt.Errorf("mac: %w", err))
		}
	}

	for n, text := range c.Addresses {
		address, err := netip.ParsePrefix(text)
		if err != nil {
			errs = append(errs,
				fmt.Errorf("addresses[%d] %q: must be an address with prefix length such as "+
					"10.1.0.5/24", n, text))
			continue
		}
		i.Addresses = append(i.Addresses, address)
	}

	for n, r := range c.Routes {
		route, err := routeOf(r)
		if err != nil {
			errs = append(errs, fmt.Errorf("routes[%d].%w", n, err))
			continue
		}
		i.Routes = append(i.Routes, route)
	}

	if c.Driver != "" && c.Driver != v1alpha1.DriverVFIO {
		errs = append(errs,
			fmt.Errorf("driver %q: must be %s, or absent for the DevicePool's", c.Driver,
				v1alpha1.DriverVFIO))
	}

	if len(errs) == 0 {
		errs = append(errs, i.Validate())
	}

	i.Name = c.InterfaceName
	if c.Driver != "" {
		i, err = Userspace(i)
		errs = append(errs, err)
	}

	return i, errors.Join(errs...)
}

// maxNetworks and maxAddresses are the limits of XPUPort.spec.networks and of the addresses of each.
const maxNetworks, maxAddresses = 64, 16

// networksOf converts the tagged networks of a merged configuration.
func networksOf(c *v1alpha1.InterfaceConfig) ([]Network, error) {
	if len(c.Networks) == 0 {
		return nil, nil
	}

	var errs []error
	if len(c.Networks) > maxNetworks {
		errs = append(errs, fmt.Errorf("networks: has %d, at most %d may be given", len(c.Networks),
			maxNetworks))
	}
	if len(c.Routes) > 0 || c.VF != nil && ptr.Deref(c.VF.VLAN, 0) != 0 {
		errs = append(errs, errors.New("networks: routes and vf.vlan must be absent with it, "+
			"because they are of no single network"))
	}
	if c.Network != "" || len(c.Addresses) > 0 {
		errs = append(errs, errors.New("networks: network and addresses must be absent with it; "+
			"give each of networks its addresses"))
	}

	var networks []Network
	seen := map[string]bool{}
	for n, one := range c.Networks {
		switch {
		case one.Name == "":
			errs = append(errs, fmt.Errorf("networks[%d].name: must be the name of an XPUNetwork", n))
		case seen[one.Name]:
			errs = append(errs, fmt.Errorf("networks[%d].name %q: is in the list twice", n, one.Name))
		case len(one.Addresses) > maxAddresses:
			errs = append(errs, fmt.Errorf("networks[%d].addresses: has %d, at most %d may be given",
				n, len(one.Addresses), maxAddresses))
		}

		seen[one.Name] = true
		network := Network{Name: one.Name}
		for m, text := range one.Addresses {
			address, err := netip.ParsePrefix(text)
			if err != nil {
				errs = append(errs, fmt.Errorf("networks[%d].addresses[%d] %q: must be an address "+
					"with prefix length such as 10.1.0.5/24", n, m, text))
				continue
			}
			network.Addresses = append(network.Addresses, address)
		}
		networks = append(networks, network)
	}

	return networks, errors.Join(errs...)
}

// Userspace returns the interface for a Function that a program of the pod drives instead of the
// kernel. It rejects settings that nothing would apply then.
func Userspace(i function.Interface) (function.Interface, error) {
	var errs []error
	refuse := func(isSet bool, setting string) {
		if isSet {
			errs = append(errs,
				fmt.Errorf("%s: must be absent with a driver that hands the Function to a program",
					setting))
		}
	}

	refuse(i.MTU != 0, fmt.Sprintf("mtu %d", i.MTU))
	refuse(len(i.Routes) > 0, "routes")
	refuse(i.AllMulticast, "allMulticast")
	i.Userspace = true

	return i, errors.Join(errs...)
}

func routeOf(r v1alpha1.Route) (function.Route, error) {
	to, err := netip.ParsePrefix(r.To)
	if err != nil {
		return function.Route{}, fmt.Errorf("to %q: must be a prefix such as 10.2.0.0/16", r.To)
	}

	route := function.Route{To: to, Metric: int(ptr.Deref(r.Metric, 0))}
	if r.Via != "" {
		if route.Via, err = netip.ParseAddr(r.Via); err != nil {
			return function.Route{}, fmt.Errorf("via %q: must be an address such as 10.1.0.1",
				r.Via)
		}
	}

	return route, nil
}

func vfOf(c *v1alpha1.VFConfig) *function.VFConfig {
	if c == nil {
		return nil
	}
	return &function.VFConfig{
		VLAN: intPtr(c.VLAN), QoS: intPtr(c.QoS), Proto: c.VLANProtocol,
		Trust: c.Trust, SpoofCheck: c.SpoofCheck,
		MinTxRate: intPtr(c.MinTxRate), MaxTxRate: intPtr(c.MaxTxRate),
		LinkState: c.LinkState,
	}
}

func intPtr(p *int32) *int {
	if p == nil {
		return nil
	}
	return ptr.To(int(*p))
}
