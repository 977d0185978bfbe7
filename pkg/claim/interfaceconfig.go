// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
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

// merge returns base with every field replaced that over sets. The settings of structs and maps are
// merged one by one; lists are replaced.
func merge(base, over v1alpha1.InterfaceConfig) v1alpha1.InterfaceConfig {
	// One of network and networks replaces the other, with all that is about a single network.
	switch {
	case len(over.Networks) > 0 && over.Network == "":
		base.Network, base.Addresses = "", nil
		base.Routes, base.Rules, base.Neighbors, base.VRF = nil, nil, nil, nil
	case over.Network != "" && len(over.Networks) == 0:
		base.Networks = nil
	}

	base = *base.DeepCopy()
	replaceTable(base.Ethtool, over.Ethtool)
	overlay(reflect.ValueOf(&base).Elem(), reflect.ValueOf(over))

	return base
}

// overlay replaces every field of the struct base that is not empty in over. It does the same in
// structs that both refer to, and with the entries of maps that both have.
func overlay(base, over reflect.Value) {
	for i := range base.NumField() {
		to, from := base.Field(i), over.Field(i)
		isList, isMap := from.Kind() == reflect.Slice, from.Kind() == reflect.Map
		_, isValue := from.Interface().(*v1alpha1.VRF) // its fields belong together
		isStruct := from.Kind() == reflect.Pointer && from.Type().Elem().Kind() == reflect.Struct &&
			!isValue
		switch {
		case from.IsZero(), isList && from.Len() == 0:
		case isStruct && !to.IsNil():
			overlay(to.Elem(), from.Elem())
		case isMap && !to.IsNil():
			for name, value := range from.Seq2() {
				to.SetMapIndex(name, value)
			}
		default:
			to.Set(from)
		}
	}
}

const (
	// minMTU and maxMTU bound InterfaceConfig.mtu, in bytes: RFC 791, and the maximum of an
	// XPUNetwork.
	minMTU, maxMTU = 68, 9216
	// defaultName stands for a name that the node's agent will choose, in validation.
	defaultName = "net1"
)

// Interface converts a merged configuration. It reports all errors that can be found without the
// cluster. It needs the merged configuration, because fields that depend on each other may come
// from class and claim.
func Interface(c *v1alpha1.InterfaceConfig) (function.Interface, error) {
	var errs []error
	i := function.Interface{
		Name:         cmp.Or(c.InterfaceName, defaultName),
		MTU:          int(ptr.Deref(c.MTU, 0)),
		AllMulticast: ptr.Deref(c.AllMulticast, false),
		Sysctls:      maps.Clone(c.Sysctls),
		Offload:      offloadOf(c.Offload),
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
	i.VF, err = vfOf(c.VF)
	errs = append(errs, err)
	i.Ethtool, err = ethtoolOf(c.Ethtool)
	errs = append(errs, err)
	if c.MAC != "" {
		if i.MAC, err = function.ParseMAC(c.MAC); err != nil {
			errs = append(errs, fmt.Errorf("mac: %w", err))
		}
	}

	i.Addresses, err = addressesOf(c.Addresses)
	errs = append(errs, err)
	i.Routes, err = routesOf(c.Routes)
	errs = append(errs, err)
	i.Rules, err = rulesOf(c.Rules)
	errs = append(errs, err)
	i.Neighbors, err = neighborsOf(c.Neighbors)
	errs = append(errs, err)

	if c.VRF != nil {
		i.VRF = &function.VRF{Name: c.VRF.Name, Table: int(c.VRF.Table)}
	}
	i.Bond = bondOf(c.Bond)
	errs = append(errs, Device{Config: *c, Interface: i}.CheckBond(v1alpha1.DevicePoolSpec{}))

	if err := c.Driver.Validate(); err != nil {
		errs = append(errs, fmt.Errorf("driver %w, or absent for the DevicePool's", err))
	}

	if errors.Join(errs...) == nil {
		errs = append(errs, i.Validate())
	}

	i.Name = c.InterfaceName
	if c.Driver != "" {
		i, err = Userspace(i)
		errs = append(errs, err)
	}

	return i, errors.Join(errs...)
}

// settings converts a merged configuration with its tagged networks.
func settings(c *v1alpha1.InterfaceConfig) (function.Interface, []Network, error) {
	i, err := Interface(c)
	if err != nil {
		return i, nil, err
	}
	networks, err := networksOf(c)
	return i, networks, err
}

const (
	maxNetworks = 64 // XPUPort.spec.networks
	// maxAddresses bounds the addresses of a network. It is also what the status of a claim has room
	// for (NetworkDeviceDataMaxIPs of k8s.io/api/resource/v1).
	maxAddresses = 16
)

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
	ofOne := len(c.Routes) > 0 || len(c.Rules) > 0 || len(c.Neighbors) > 0 ||
		c.VRF != nil || c.VF != nil && ptr.Deref(c.VF.VLAN, 0) != 0
	if ofOne {
		errs = append(errs, errors.New("networks: routes, rules, neighbors, vrf and vf.vlan must be "+
			"absent with it, because they are of no single network"))
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
		errs = append(errs, interfaceNameOf(c, n))
		network := Network{Name: one.Name, InterfaceName: one.InterfaceName}
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

// interfaceNameOf reports what is wrong with the name of the VLAN interface of the network with the
// index.
func interfaceNameOf(c *v1alpha1.InterfaceConfig, n int) error {
	name := c.Networks[n].InterfaceName
	if name == "" {
		return nil
	}

	isTaken := func(other v1alpha1.InterfaceNetwork) bool { return other.InterfaceName == name }
	switch err := function.ValidateInterfaceName(name); {
	case err != nil:
		return fmt.Errorf("networks[%d].interfaceName: %w", n, err)
	case name == "lo" || name == "eth0" || name == c.InterfaceName ||
		slices.ContainsFunc(c.Networks[:n], isTaken):
		return fmt.Errorf("networks[%d].interfaceName %q: is the name of another interface; choose "+
			"another name", n, name)
	case c.Driver != "":
		return fmt.Errorf("networks[%d].interfaceName: must be absent with a driver that hands the "+
			"Function to a program", n)
	}

	return nil
}

// Userspace returns the interface for a Function that a program of the pod drives instead of the
// kernel. It rejects settings that nothing would apply then.
func Userspace(i function.Interface) (function.Interface, error) {
	var errs []error
	for _, field := range i.NetdevFields() {
		errs = append(errs,
			fmt.Errorf("%s: must be absent with a driver that hands the Function to a program", field))
	}
	i.Userspace = true

	return i, errors.Join(errs...)
}

func addressesOf(texts []string) (list []netip.Prefix, _ error) {
	var errs []error
	if len(texts) > maxAddresses {
		errs = append(errs, fmt.Errorf("addresses: has %d, at most %d may be given", len(texts),
			maxAddresses))
	}

	for n, text := range texts {
		address, err := netip.ParsePrefix(text)
		if err != nil {
			errs = append(errs,
				fmt.Errorf("addresses[%d] %q: must be an address with prefix length such as "+
					"10.1.0.5/24", n, text))
			continue
		}
		list = append(list, address)
	}

	return list, errors.Join(errs...)
}

func routesOf(routes []v1alpha1.Route) (list []function.Route, _ error) {
	var errs []error
	for n, r := range routes {
		route, err := routeOf(r)
		if err != nil {
			errs = append(errs, fmt.Errorf("routes[%d].%w", n, err))
			continue
		}
		list = append(list, route)
	}

	return list, errors.Join(errs...)
}

func routeOf(r v1alpha1.Route) (function.Route, error) {
	to, err := netip.ParsePrefix(r.To)
	if err != nil {
		return function.Route{}, fmt.Errorf("to %q: must be a prefix such as 10.2.0.0/16", r.To)
	}

	route := function.Route{
		To: to, Metric: int(ptr.Deref(r.Metric, 0)), Table: int(ptr.Deref(r.Table, 0)),
		MTU: int(ptr.Deref(r.MTU, 0)), AdvMSS: int(ptr.Deref(r.AdvMSS, 0)),
		OnLink: ptr.Deref(r.OnLink, false),
	}
	if r.Via != "" {
		if route.Via, err = netip.ParseAddr(r.Via); err != nil {
			return function.Route{}, fmt.Errorf("via %q: must be an address such as 10.1.0.1",
				r.Via)
		}
	}
	if r.Source != "" {
		if route.Source, err = netip.ParseAddr(r.Source); err != nil {
			return function.Route{}, fmt.Errorf("source %q: must be an address such as 10.1.0.5",
				r.Source)
		}
	}
	if r.Scope != "" {
		scope, known := scopes[r.Scope]
		if !known {
			return function.Route{}, fmt.Errorf("scope %q: must be one of %s", r.Scope,
				strings.Join(slices.Sorted(maps.Keys(scopes)), ", "))
		}
		route.Scope = &scope
	}

	return route, nil
}

// scopes are the names of RT_SCOPE_* of linux/rtnetlink.h, as in /etc/iproute2/rt_scopes.
var scopes = map[string]int{"universe": 0, "site": 200, "link": 253, "host": 254}

func rulesOf(list []v1alpha1.RoutingRule) (rules []function.Rule, _ error) {
	var errs []error
	for n, r := range list {
		rule := function.Rule{
			Priority: int(r.Priority), Table: int(r.Table),
			Incoming: ptr.Deref(r.Incoming, false), Outgoing: ptr.Deref(r.Outgoing, false),
		}

		for _, f := range []struct {
			field, text string
			to          *netip.Prefix
		}{{"from", r.From, &rule.From}, {"to", r.To, &rule.To}} {
			if f.text == "" {
				continue
			}

			var err error
			if *f.to, err = netip.ParsePrefix(f.text); err != nil {
				errs = append(errs, fmt.Errorf("rules[%d].%s %q: must be a prefix such as 10.2.0.0/16",
					n, f.field, f.text))
			}
		}

		rules = append(rules, rule)
	}

	return rules, errors.Join(errs...)
}

func neighborsOf(list []v1alpha1.Neighbor) (neighbors []function.Neighbor, _ error) {
	var errs []error
	for n, one := range list {
		address, err := netip.ParseAddr(one.Address)
		if err != nil {
			errs = append(errs, fmt.Errorf("neighbors[%d].address %q: must be an address such as "+
				"10.1.0.7", n, one.Address))
		}
		mac, err := function.ParseMAC(one.MAC)
		if err != nil {
			errs = append(errs, fmt.Errorf("neighbors[%d].mac: %w", n, err))
		}
		neighbors = append(neighbors, function.Neighbor{Address: address, MAC: mac})
	}
	return neighbors, errors.Join(errs...)
}

func bondOf(c *v1alpha1.Bond) *function.Bond {
	const defaultMIIMon = 100 // milliseconds
	if c == nil {
		return nil
	}
	return &function.Bond{
		Name: c.Name, Mode: c.Mode, MIIMon: int(ptr.Deref(c.MIIMon, defaultMIIMon)),
		XmitHashPolicy: c.XmitHashPolicy, LACPRate: c.LACPRate,
		Primary: ptr.Deref(c.Primary, false),
	}
}

// offloadOf converts sizes. A size of 0 becomes -1, which the validation refuses, because 0 stands
// for an absent size.
func offloadOf(c *v1alpha1.Offload) *function.Offload {
	if c == nil {
		return nil
	}

	size := func(p *int32) int {
		if p != nil && *p == 0 {
			return -1
		}
		return int(ptr.Deref(p, 0))
	}

	return &function.Offload{
		GSOMaxSize: size(c.GSOMaxSize), GROMaxSize: size(c.GROMaxSize),
		GSOIPv4MaxSize: size(c.GSOIPv4MaxSize), GROIPv4MaxSize: size(c.GROIPv4MaxSize),
	}
}

func vfOf(c *v1alpha1.VFConfig) (*function.VFConfig, error) {
	if c == nil {
		return nil, nil
	}

	node, nodeErr := guidOf("vf.nodeGUID", c.NodeGUID)
	port, portErr := guidOf("vf.portGUID", c.PortGUID)
	return &function.VFConfig{
		VLAN: intPtr(c.VLAN), QoS: intPtr(c.QoS), Proto: c.VLANProtocol,
		Trust: c.Trust, SpoofCheck: c.SpoofCheck,
		MinTxRate: intPtr(c.MinTxRate), MaxTxRate: intPtr(c.MaxTxRate),
		LinkState: c.LinkState, NodeGUID: node, PortGUID: port,
	}, errors.Join(nodeErr, portErr)
}

func guidOf(field, text string) (function.GUID, error) {
	if text == "" {
		return "", nil
	}
	guid, err := function.ParseGUID(text)
	if err != nil {
		return "", fmt.Errorf("%s: %w", field, err)
	}
	return guid, nil
}

func intPtr(p *int32) *int {
	if p == nil {
		return nil
	}
	return ptr.To(int(*p))
}
