// SPDX-License-Identifier: Apache-2.0

package sriovdra

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// definition is a NetworkAttachmentDefinition.
type definition struct {
	key     key
	network string // name of the XPUNetwork that it becomes
	broken  error  // why its configuration is not understood
	plugin  plugin // sriov-cni's configuration
	tuning  *tuning
	others  []string // types of further plugins
}

// plugin has the fields of sriov-cni that have a meaning here, and the IPAM configuration.
type plugin struct {
	Type      string `json:"type"`
	VLAN      *int32 `json:"vlan"`
	VLANQoS   *int32 `json:"vlanQoS"`
	VLANProto string `json:"vlanProto"`
	SpoofChk  string `json:"spoofchk"`
	Trust     string `json:"trust"`
	LinkState string `json:"link_state"`
	MinTxRate *int32 `json:"min_tx_rate"`
	MaxTxRate *int32 `json:"max_tx_rate"`
	MAC       string `json:"mac"`
	IPAM      ipam   `json:"ipam"`
}

// ipam has the fields of host-local and static.
type ipam struct {
	Type string `json:"type"`
	ipRange
	Ranges    [][]ipRange `json:"ranges"`
	Addresses []struct {
		Address string `json:"address"`
		Gateway string `json:"gateway"`
	} `json:"addresses"`
	Routes []struct {
		To  string `json:"dst"`
		Via string `json:"gw"`
	} `json:"routes"`
}

type ipRange struct {
	Subnet  string `json:"subnet"`
	Start   string `json:"rangeStart"`
	End     string `json:"rangeEnd"`
	Gateway string `json:"gateway"`
}

// tuning has the fields of the CNI plugin tuning.
type tuning struct {
	Sysctl   map[string]string `json:"sysctl"`
	MTU      *int32            `json:"mtu"`
	MAC      string            `json:"mac"`
	AllMulti *bool             `json:"allmulti"`
	Promisc  *bool             `json:"promisc"`
}

// read keeps an object that is a NetworkAttachmentDefinition.
func (c *converter) read(object map[string]any) error {
	if object["kind"] != "NetworkAttachmentDefinition" {
		return nil
	}

	var k key
	k.namespace, _, _ = unstructured.NestedString(object, "metadata", "namespace")
	k.name, _, _ = unstructured.NestedString(object, "metadata", "name")
	config, _, _ := unstructured.NestedString(object, "spec", "config")
	d := &definition{key: k}
	d.broken = d.parse([]byte(config))
	c.definitions[k] = d

	// XPUNetworks have no namespace.
	d.network = k.name
	if _, taken := c.networks[d.network]; taken {
		d.network = k.namespace + "-" + k.name
	}
	c.networks[d.network] = k

	return nil
}

// parse reads a CNI configuration, or a list of them.
func (d *definition) parse(config []byte) error {
	var list struct {
		Plugins []json.RawMessage `json:"plugins"`
	}
	if err := json.Unmarshal(config, &list); err != nil {
		return fmt.Errorf("spec.config: %w", err)
	}
	if list.Plugins == nil {
		list.Plugins = []json.RawMessage{config}
	}

	found := false
	for _, text := range list.Plugins {
		var p plugin
		if err := json.Unmarshal(text, &p); err != nil {
			return fmt.Errorf("spec.config: %w", err)
		}

		switch {
		case p.Type == "sriov" && !found:
			d.plugin, found = p, true
		case p.Type == "tuning" && d.tuning == nil:
			d.tuning = &tuning{}
			if err := json.Unmarshal(text, d.tuning); err != nil {
				return fmt.Errorf("spec.config: tuning: %w", err)
			}
		default:
			d.others = append(d.others, p.Type)
		}
	}

	if !found {
		return errors.New("spec.config: has no plugin of type sriov, and is not converted")
	}
	return nil
}

// configure converts the configuration of the plugins, but for the IPAM ranges, which the XPUNetwork
// has.
func (d *definition) configure(i *v1alpha1.InterfaceConfig) (notes []string) {
	p := d.plugin
	vf := v1alpha1.VFConfig{
		LinkState: p.LinkState, MinTxRate: p.MinTxRate, MaxTxRate: p.MaxTxRate,
	}
	switch { // without a VLAN, its QoS and its protocol have no meaning
	case p.VLAN == nil:
	case *p.VLAN == 0:
		notes = append(notes, "vlan: 0 is left out; the administrator's VLAN of a VF, if there is one, "+
			"stays")
	default:
		vf.VLAN, vf.VLANProtocol = p.VLAN, strings.ToLower(p.VLANProto)
		if p.VLANQoS != nil && *p.VLANQoS != 0 {
			vf.QoS = p.VLANQoS
		}
		notes = append(notes, fmt.Sprintf("vlan: %d is vf.vlan now, which the PF enforces; where an xPU "+
			"makes the segment, give it to the XPUNetwork instead", *p.VLAN))
	}

	var more []string
	vf.SpoofCheck, more = onOff("spoofchk", p.SpoofChk)
	notes = append(notes, more...)
	vf.Trust, more = onOff("trust", p.Trust)
	notes = append(notes, more...)
	if vf != (v1alpha1.VFConfig{}) {
		i.VF = &vf
	}

	i.MAC = p.MAC
	notes = append(notes, d.setTuning(i)...)
	notes = append(notes, d.setAddresses(i)...)
	for _, other := range d.others {
		notes = append(notes, fmt.Sprintf("plugin %s: left out; a claim has no CNI plugins, and Multus "+
			"runs them with xpu-cni (docs/how-to/use-with-multus.md)", other))
	}

	return notes
}

// onOff converts a setting of sriov-cni.
func onOff(field, text string) (_ *bool, notes []string) {
	switch text {
	case "":
		return nil, nil
	case "on", "off":
		on := text == "on"
		return &on, nil
	}
	return nil, []string{fmt.Sprintf("%s: %q is left out; it is neither on nor off", field, text)}
}

// setTuning converts the configuration of the plugin tuning.
func (d *definition) setTuning(i *v1alpha1.InterfaceConfig) (notes []string) {
	if d.tuning == nil {
		return nil
	}

	t := d.tuning
	i.MTU, i.AllMulticast, i.MAC = t.MTU, t.AllMulti, cmp.Or(t.MAC, i.MAC)
	if len(t.Sysctl) > 0 {
		i.Sysctls = maps.Clone(t.Sysctl)
	}
	if t.Promisc != nil && *t.Promisc {
		notes = append(notes, "tuning: promisc is left out; vf.trust lets the pod set it")
	}
	if i.Driver != "" && (i.MTU != nil || i.AllMulticast != nil || i.Sysctls != nil) {
		i.MTU, i.AllMulticast, i.Sysctls = nil, nil, nil
		notes = append(notes, "tuning: left out; with vfio-pci there is no interface to set it for")
	}

	return notes
}

// setAddresses converts addresses and routes of the IPAM configuration.
func (d *definition) setAddresses(i *v1alpha1.InterfaceConfig) (notes []string) {
	p := d.plugin.IPAM
	switch p.Type {
	case "", "host-local":
	case "static":
		for _, a := range p.Addresses {
			i.Addresses = append(i.Addresses, a.Address)
		}
	default:
		notes = append(notes, fmt.Sprintf("ipam: %s is left out; the XPUNetwork gives addresses, or "+
			"Multus with xpu-cni calls the plugin", p.Type))
	}

	if len(p.Routes) > 0 && i.Driver != "" {
		return append(notes, "ipam.routes: left out; with vfio-pci there is no interface to add them to")
	}

	for n, r := range p.Routes {
		route := v1alpha1.Route{To: r.To, Via: r.Via}
		to, err := netip.ParsePrefix(r.To)
		if route.Via == "" && err == nil {
			route.Via = p.gateway(to.Addr().Is4())
		}
		if err == nil && to.Bits() == 0 {
			notes = append(notes, fmt.Sprintf("ipam.routes[%d]: a default route beside the one of eth0 needs "+
				"a metric", n))
		}
		i.Routes = append(i.Routes, route)
	}

	return notes
}

// ranges returns the ranges of host-local, or the subnets of the addresses of static.
func (p ipam) ranges() (all []ipRange) {
	switch p.Type {
	case "host-local":
	case "static":
		for _, a := range p.Addresses {
			all = append(all, ipRange{Subnet: a.Address, Gateway: a.Gateway})
		}
		return all
	default:
		return nil
	}

	if p.Subnet != "" {
		all = append(all, p.ipRange)
	}
	return append(all, slices.Concat(p.Ranges...)...)
}

// gateway returns the gateway that the plugin gives to routes without one, or "". That of host-local
// is the first address of the subnet if it is not given.
func (p ipam) gateway(is4 bool) string {
	for _, r := range p.ranges() {
		subnet, err := netip.ParsePrefix(r.Subnet)
		if err != nil || subnet.Addr().Is4() != is4 {
			continue
		}
		if p.Type == "static" && r.Gateway == "" {
			continue
		}
		return cmp.Or(r.Gateway, subnet.Masked().Addr().Next().String())
	}
	return ""
}

// object returns the XPUNetwork in place of a NetworkAttachmentDefinition for sriov-cni, and nil for
// another object.
func (c *converter) object(object map[string]any) (map[string]any, []string) {
	switch object["kind"] {
	case "NetworkAttachmentDefinition":
	case "SriovResourcePolicy", "DeviceAttributes":
		return nil, []string{"not converted; the section SriovResourcePolicy and DeviceAttributes of " +
			"docs/how-to/move-from-dra-driver-sriov.md says which DevicePool does the same"}
	default:
		return nil, nil
	}

	namespace, _, _ := unstructured.NestedString(object, "metadata", "namespace")
	name, _, _ := unstructured.NestedString(object, "metadata", "name")
	d := c.definitions[key{namespace, name}]
	if d == nil || d.broken != nil {
		return nil, nil
	}

	spec, notes := d.networkSpec()
	network := &v1alpha1.XPUNetwork{
		TypeMeta: metav1.TypeMeta{
			APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "XPUNetwork",
		},
		ObjectMeta: metav1.ObjectMeta{Name: d.network}, Spec: spec,
	}
	converted, err := runtime.DefaultUnstructuredConverter.ToUnstructured(network)
	if err != nil {
		return nil, []string{err.Error()}
	}
	delete(converted, "status")

	return converted, append([]string{fmt.Sprintf("is XPUNetwork %s now; give it the vlan of its segment "+
		"on the xPUs, or leave network out of claims where no xPU serves the PFs", d.network)}, notes...)
}

// networkSpec returns the XPUNetwork for the addresses of the definition and for pods of its
// namespace.
func (d *definition) networkSpec() (spec v1alpha1.XPUNetworkSpec, notes []string) {
	spec.AllowedNamespaces.From = v1alpha1.NamespacesFromSelector
	spec.AllowedNamespaces.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{
		corev1.LabelMetadataName: cmp.Or(d.key.namespace, metav1.NamespaceDefault),
	}}

	families := map[bool]bool{}
	for _, r := range d.plugin.IPAM.ranges() {
		subnet, err := netip.ParsePrefix(r.Subnet)
		if err != nil {
			notes = append(notes, fmt.Sprintf("ipam: subnet %q is left out; it is not in CIDR notation",
				r.Subnet))
			continue
		}
		if slices.Contains(spec.Subnets, subnet.Masked().String()) {
			continue
		}
		if families[subnet.Addr().Is4()] {
			notes = append(notes, fmt.Sprintf("ipam: subnet %s is left out; an XPUNetwork has one of each "+
				"family", r.Subnet))
			continue
		}

		families[subnet.Addr().Is4()] = true
		spec.Subnets = append(spec.Subnets, subnet.Masked().String())
		if r.Gateway != "" {
			spec.Gateways = append(spec.Gateways, r.Gateway)
		}
		spec.Reserved = append(spec.Reserved, r.outside(subnet.Masked())...)
	}

	return spec, notes
}

// outside returns the addresses of the subnet before rangeStart and after rangeEnd, as ranges.
func (r ipRange) outside(subnet netip.Prefix) (ranges []string) {
	first := subnet.Addr().Next()
	if start, err := netip.ParseAddr(r.Start); err == nil && subnet.Contains(start) && first.Less(start) {
		ranges = append(ranges, fmt.Sprintf("%s-%s", first, start.Prev()))
	}

	end, err := netip.ParseAddr(r.End)
	if last := lastOf(subnet); err == nil && subnet.Contains(end) && end.Less(last) {
		ranges = append(ranges, fmt.Sprintf("%s-%s", end.Next(), last))
	}

	return ranges
}

// lastOf returns the last address of a prefix.
func lastOf(subnet netip.Prefix) netip.Addr {
	bytes := subnet.Addr().AsSlice()
	for i := subnet.Bits(); i < len(bytes)*8; i++ {
		bytes[i/8] |= 1 << (7 - i%8)
	}
	last, _ := netip.AddrFromSlice(bytes)
	return last
}
