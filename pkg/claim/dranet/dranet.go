// SPDX-License-Identifier: Apache-2.0

// Package dranet converts what pods ask of DRANET (kubernetes-sigs/dranet, driver "dra.net") to what
// they ask of this driver.
package dranet

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/conversion"
)

// Driver returns DRANET's driver.
func Driver() conversion.Driver {
	return conversion.Driver{
		Name:    "dra.net",
		Section: "the section Selecting devices of docs/how-to/move-from-dranet.md",
		Parameters: func(
			text []byte, _ conversion.Place,
		) (c v1alpha1.InterfaceConfig, notes []string, err error) {
			return Parameters(text)
		},
	}
}

// networkConfig has the fields of DRANET's NetworkConfig, by its API of August 2026.
type networkConfig struct {
	Interface struct {
		Name                string         `json:"name"`
		Addresses           []string       `json:"addresses"`
		DHCP                *bool          `json:"dhcp"`
		MTU                 *int32         `json:"mtu"`
		HardwareAddr        string         `json:"hardwareAddr"`
		GSOMaxSize          *int32         `json:"gsoMaxSize"`
		GROMaxSize          *int32         `json:"groMaxSize"`
		GSOIPv4MaxSize      *int32         `json:"gsoIPv4MaxSize"`
		GROIPv4MaxSize      *int32         `json:"groIPv4MaxSize"`
		DisableEBPFPrograms *bool          `json:"disableEbpfPrograms"`
		Forwarding          *bool          `json:"forwarding"`
		ARPIgnore           *int32         `json:"arpIgnore"`
		ARPAnnounce         *int32         `json:"arpAnnounce"`
		VRF                 *vrf           `json:"vrf"`
		IPVLAN              map[string]any `json:"ipvlan"`
	} `json:"interface"`
	Routes []struct {
		Destination string `json:"destination"`
		Gateway     string `json:"gateway"`
		Source      string `json:"source"`
		Scope       uint8  `json:"scope"`
		Table       int32  `json:"table"`
	} `json:"routes"`
	Rules []struct {
		Priority    int32  `json:"priority"`
		Source      string `json:"source"`
		Destination string `json:"destination"`
		Table       int32  `json:"table"`
	} `json:"rules"`
	Neighbors []struct {
		Destination  string `json:"destination"`
		HardwareAddr string `json:"hardwareAddr"`
	} `json:"neighbors"`
	Ethtool struct {
		Features     map[string]bool `json:"features"`
		PrivateFlags map[string]bool `json:"privateFlags"`
	} `json:"ethtool"`
	Profile any `json:"profile"`
}

type vrf struct {
	Name  string `json:"name"`
	Table *int32 `json:"table"`
}

// Parameters converts a NetworkConfig, as YAML or JSON. A note says what is left out, what differs,
// and what an administrator must allow.
func Parameters(text []byte) (c v1alpha1.InterfaceConfig, notes []string, err error) {
	var n networkConfig
	if err := yaml.Unmarshal(text, &n); err != nil {
		return c, nil, fmt.Errorf("NetworkConfig: %w", err)
	}
	if err := yaml.UnmarshalStrict(text, &networkConfig{}); err != nil {
		notes = append(notes, fmt.Sprintf("left out: %s", conversion.LastPart(err)))
	}

	c.Kind, c.APIVersion = "InterfaceConfig", v1alpha1.SchemeGroupVersion.String()
	notes = append(notes, n.setInterface(&c)...)
	notes = append(notes, n.setRouting(&c)...)
	notes = append(notes, n.setDriver(&c)...)
	_, err = claim.Interface(&c)

	return c, append(notes, conversion.Refusals(err)...), nil
}

// setInterface converts the properties of the interface.
func (n networkConfig) setInterface(c *v1alpha1.InterfaceConfig) (notes []string) {
	i := n.Interface
	c.InterfaceName, c.Addresses, c.MTU, c.MAC = i.Name, i.Addresses, i.MTU, i.HardwareAddr
	offload := v1alpha1.Offload{
		GSOMaxSize: i.GSOMaxSize, GROMaxSize: i.GROMaxSize,
		GSOIPv4MaxSize: i.GSOIPv4MaxSize, GROIPv4MaxSize: i.GROIPv4MaxSize,
	}
	if offload != (v1alpha1.Offload{}) {
		c.Offload = &offload
	}

	sysctl := func(name string, value *int32) {
		if value == nil {
			return
		}
		if c.Sysctls == nil {
			c.Sysctls = map[string]string{}
		}
		c.Sysctls[name] = fmt.Sprint(*value)
	}
	sysctl("net.ipv4.conf.IFNAME.arp_ignore", i.ARPIgnore)
	sysctl("net.ipv4.conf.IFNAME.arp_announce", i.ARPAnnounce)
	if i.Forwarding != nil {
		value := map[bool]int32{true: 1}[*i.Forwarding]
		sysctl("net.ipv4.conf.IFNAME.forwarding", &value)
		sysctl("net.ipv6.conf.IFNAME.forwarding", &value)
	}

	if c.MAC != "" {
		notes = append(notes, "interface.hardwareAddr: the DevicePool must have spec.allow: [mac], or "+
			"the DeviceClass must have it")
	}
	if ptr.Deref(i.DHCP, false) {
		notes = append(notes, "interface.dhcp: left out; have an XPUNetwork give the addresses, or use "+
			"Multus with ipam of type dhcp")
	}
	if ptr.Deref(i.DisableEBPFPrograms, false) {
		notes = append(notes, "interface.disableEbpfPrograms: left out; the kernel drops filters of tc "+
			"with the move, and a netdev with an XDP or tcx program on the host is not given to pods")
	}
	if i.IPVLAN != nil {
		notes = append(notes, "interface.ipvlan: left out; the pod gets the Function itself")
	}
	if n.Profile != nil {
		notes = append(notes, "profile: left out; an XPUNetwork gives addresses")
	}

	return notes
}

// setRouting converts routes, rules, neighbors and the VRF.
func (n networkConfig) setRouting(c *v1alpha1.InterfaceConfig) (notes []string) {
	const defaultTable = 100
	if v := n.Interface.VRF; v != nil {
		c.VRF = &v1alpha1.VRF{Name: cmp.Or(v.Name, "vrf0"), Table: ptr.Deref(v.Table, defaultTable)}
		if v.Name == "" || v.Table == nil {
			notes = append(notes, fmt.Sprintf("interface.vrf: name and table must be given; they are %s "+
				"and %d now", c.VRF.Name, c.VRF.Table))
		}
	}

	scopes := map[uint8]string{200: "site", 253: "link", 254: "host"}
	for _, r := range n.Routes {
		route := v1alpha1.Route{
			To: r.Destination, Via: r.Gateway, Source: r.Source, Scope: scopes[r.Scope],
		}
		if r.Table != 0 && c.VRF == nil { // DRANET ignores the table of a route in a VRF
			route.Table = ptr.To(r.Table)
		}
		c.Routes = append(c.Routes, route)
	}

	for i, r := range n.Rules {
		rule := v1alpha1.RoutingRule{
			Priority: r.Priority, Table: r.Table, From: r.Source, To: r.Destination,
		}
		if rule.Priority == 0 {
			rule.Priority = int32(1000 + i)
			notes = append(notes, fmt.Sprintf("rules[%d].priority: must be given; it is %d now", i,
				rule.Priority))
		}
		c.Rules = append(c.Rules, rule)
	}

	for _, one := range n.Neighbors {
		c.Neighbors = append(c.Neighbors,
			v1alpha1.Neighbor{Address: one.Destination, MAC: one.HardwareAddr})
	}

	return notes
}

// summaries are names that ethtool has for several features of the kernel, and older names
// (ethtool(8), section -K).
var summaries = map[string][]string{
	"rx-checksumming":              {"rx-checksum"},
	"scatter-gather":               {"tx-scatter-gather"},
	"tcp-segmentation-offload":     {"tx-tcp-segmentation", "tx-tcp6-segmentation"},
	"generic-segmentation-offload": {"tx-generic-segmentation"},
	"generic-receive-offload":      {"rx-gro"},
	"large-receive-offload":        {"rx-lro"},
	"rx-vlan-offload":              {"rx-vlan-hw-parse"},
	"tx-vlan-offload":              {"tx-vlan-hw-insert"},
	"ntuple-filters":               {"rx-ntuple-filter"},
	"receive-hashing":              {"rx-hashing"},
}

// setDriver converts the settings of the driver.
func (n networkConfig) setDriver(c *v1alpha1.InterfaceConfig) (notes []string) {
	if len(n.Ethtool.Features)+len(n.Ethtool.PrivateFlags) == 0 {
		return nil
	}

	c.Ethtool = &v1alpha1.Ethtool{PrivateFlags: n.Ethtool.PrivateFlags}
	if len(n.Ethtool.PrivateFlags) > 0 {
		notes = append(notes, "ethtool.privateFlags: the DevicePool must have spec.allow: "+
			"[ethtool.privateFlags], or the DeviceClass must have them")
	}

	for _, name := range slices.Sorted(maps.Keys(n.Ethtool.Features)) {
		features, isSummary := summaries[name]
		if !isSummary {
			features = []string{name}
		}
		if c.Ethtool.Features == nil {
			c.Ethtool.Features = map[string]bool{}
		}
		for _, feature := range features {
			c.Ethtool.Features[feature] = n.Ethtool.Features[name]
		}
		if len(features) > 1 {
			notes = append(notes, fmt.Sprintf("ethtool.features: %s is %s now; leave out what the driver "+
				"does not have", name, strings.Join(features, " and ")))
		}
	}

	return notes
}
