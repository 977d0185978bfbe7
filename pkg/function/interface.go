// SPDX-License-Identifier: Apache-2.0

package function

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"unicode"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// Limits of the kernel and of the standards.
const (
	MaxName = 15   // IFNAMSIZ - 1, linux/if.h
	minMTU  = 68   // RFC 791; ETH_MIN_MTU in linux/if_ether.h
	MaxVLAN = 4094 // IEEE 802.1Q
	MaxQoS  = 7    // IEEE 802.1p
)

// Protocols of a VLAN tag.
const (
	VLAN8021Q  = "802.1q"
	VLAN8021AD = "802.1ad"
)

// Link states that a PF can give a VF.
const (
	LinkAuto    = "auto"
	LinkEnable  = "enable"
	LinkDisable = "disable"
)

// Interface is the configuration that a pod wants for its netdev. The zero value of a field keeps
// the host's value.
type Interface struct {
	// name in the pod, see [ValidateInterfaceName]
	Name string `json:"name"`
	// in bytes, at least 68; the driver may have further limits
	MTU int `json:"mtu,omitempty"`
	// unicast Ethernet address; for a VF also set at the PF
	MAC MAC `json:"mac,omitempty"`
	// IPv6 addresses are used at once, without duplicate address detection
	Addresses []netip.Prefix `json:"addresses,omitempty"`
	Routes    []Route        `json:"routes,omitempty"`
	Rules     []Rule         `json:"rules,omitempty"`
	Neighbors []Neighbor     `json:"neighbors,omitempty"`
	// VLANs are interfaces of the pod on top of this one, for networks whose frames have a tag.
	VLANs []VLAN `json:"vlans,omitempty"`
	// VRF makes the interface a port of a VRF in the pod.
	VRF *VRF `json:"vrf,omitempty"`
	// Bond makes the interface a port of a bond in the pod: see [Interface.OfBond].
	Bond *Bond `json:"bond,omitempty"`
	// receive all multicast frames
	AllMulticast bool `json:"allMulticast,omitempty"`
	// Sysctls are values by the names of [SysctlNames].
	Sysctls map[string]string `json:"sysctls,omitempty"`
	Offload *Offload          `json:"offload,omitempty"`
	// Ethtool are settings of the driver by group and name: see [Ethtool].
	Ethtool Ethtool `json:"ethtool,omitempty"`
	// VF is only for a VF whose PF has a netdev on the host. Its rates are also for an SF or VF
	// that the eswitch limits.
	VF *VFConfig `json:"vf,omitempty"`
	// Userspace is set if there is no netdev to move: a driver such as vfio-pci hands the Function
	// to a program of the pod, which configures Addresses itself. MAC and VF are set through the
	// PF. All fields that configure a netdev must be empty: see [Interface.NetdevFields].
	Userspace bool `json:"userspace,omitempty"`
}

// VFConfig has the settings that the PF enforces for a VF (IFLA_VF_* in linux/if_link.h). Nil and
// empty fields are left unchanged.
type VFConfig struct {
	// tag that the PF adds and strips, 1-4094; 0 removes it
	VLAN *int `json:"vlan,omitempty"`
	// 802.1p priority of the tag, 0-7; more than 0 needs VLAN
	QoS *int `json:"qos,omitempty"`
	// of the tag: "802.1q" (the default) or "802.1ad"; needs VLAN
	Proto string `json:"proto,omitempty"`
	Trust *bool  `json:"trust,omitempty"` // allow the VF to change its MAC and to be promiscuous
	// drop frames of the VF with another source MAC
	SpoofCheck *bool  `json:"spoofCheck,omitempty"`
	MinTxRate  *int   `json:"minTxRate,omitempty"` // guaranteed rate in Mbit/s; 0 removes it
	MaxTxRate  *int   `json:"maxTxRate,omitempty"` // maximum rate in Mbit/s; 0 removes it
	LinkState  string `json:"linkState,omitempty"` // "auto" (the PF's), "enable" or "disable"
	// GUIDs of the VF of an InfiniBand PF
	NodeGUID GUID `json:"nodeGUID,omitempty"`
	PortGUID GUID `json:"portGUID,omitempty"`
}

// Rate limits what a Function sends, in Mbit/s; 0 means no limit.
type Rate struct {
	Min int `json:"minTxRate,omitempty"` // guaranteed
	Max int `json:"maxTxRate,omitempty"`
}

// String returns a text for messages.
func (r Rate) String() string { return fmt.Sprintf("rates of %d-%d Mbit/s", r.Min, r.Max) }

// Rated reports whether a rate is configured.
func (c *VFConfig) Rated() bool { return c != nil && (c.MinTxRate != nil || c.MaxTxRate != nil) }

// Identified reports whether a GUID is configured.
func (c *VFConfig) Identified() bool { return c != nil && (c.NodeGUID != "" || c.PortGUID != "") }

// Rate returns r with the configured rates applied.
func (c *VFConfig) Rate(r Rate) Rate {
	if c == nil {
		return r
	}
	return Rate{Min: *cmp.Or(c.MinTxRate, &r.Min), Max: *cmp.Or(c.MaxTxRate, &r.Max)}
}

// EswitchPort identifies the port of a Function at the eswitch of its PF.
type EswitchPort struct {
	PF     pci.Address
	SF     bool   // whether the Function is a subfunction, not a VF
	Number uint32 // index of the VF, from 0, or the sfnum
}

func (p EswitchPort) String() string {
	kind := "VF"
	if p.SF {
		kind = "SF"
	}
	return fmt.Sprintf("%s %d of PF %s", kind, p.Number, p.PF)
}

// Validate reports every field that all kernels would reject. It does not report what only a driver
// or a namespace rejects.
func (i Interface) Validate() error {
	errs := []error{ValidateInterfaceName(i.Name)}
	if i.MTU != 0 && (i.MTU < minMTU || i.MTU > math.MaxInt32) {
		errs = append(errs,
			fmt.Errorf("mtu %d: must be %d or more, or 0 to keep the netdev's", i.MTU, minMTU))
	}

	switch {
	case i.MAC == "" || i.MAC.isUnicast():
	case i.MAC.PortGUID() != "":
		errs = append(errs, fmt.Errorf("mac %q: %w", i.MAC, ErrNoMAC))
	default:
		errs = append(errs,
			fmt.Errorf("mac %q: must be a unicast Ethernet address such as 02:00:00:00:00:01",
				i.MAC))
	}

	for n, address := range i.Addresses {
		switch {
		case !address.IsValid():
			errs = append(errs,
				fmt.Errorf("addresses[%d]: must be an address with prefix length such as "+
					"10.1.0.5/24", n))
		case address.Addr().IsMulticast() || address.Addr().IsUnspecified():
			errs = append(errs,
				fmt.Errorf("addresses[%d] %s: must be a unicast address", n, address))
		case slices.Contains(i.Addresses[:n], address):
			errs = append(errs, fmt.Errorf("addresses[%d] %s: is given twice", n, address))
		}
	}

	for n, route := range i.Routes {
		if err := route.validate(); err != nil {
			errs = append(errs, fmt.Errorf("routes[%d]: %w", n, err))
		}
	}

	errs = append(errs, validateVLANs(i.Name, i.VLANs), validateRules(i.Rules),
		validateNeighbors(i.Neighbors), i.VRF.validate(i.Name), i.validateBond(),
		validateSysctls(i.Sysctls), i.Offload.validate(), i.Ethtool.validate())
	if i.VF != nil {
		errs = append(errs, i.VF.validate())
	}

	if fields := i.NetdevFields(); i.Userspace && len(fields) > 0 {
		errs = append(errs, fmt.Errorf("%s: must be empty for a Function without a netdev",
			strings.Join(fields, ", ")))
	}

	return errors.Join(errs...)
}

// NetdevFields names the fields that are set and that only a netdev can have, for messages.
func (i Interface) NetdevFields() (fields []string) {
	for _, f := range []struct {
		name string
		set  bool
	}{
		{fmt.Sprintf("mtu %d", i.MTU), i.MTU != 0}, {"routes", len(i.Routes) > 0},
		{"rules", len(i.Rules) > 0}, {"neighbors", len(i.Neighbors) > 0},
		{"vlans", len(i.VLANs) > 0}, {"vrf", i.VRF != nil}, {"bond", i.Bond != nil},
		{"allMulticast", i.AllMulticast},
		{"sysctls", len(i.Sysctls) > 0}, {"offload", i.Offload != nil},
		{"ethtool", len(i.Ethtool) > 0},
	} {
		if f.set {
			fields = append(fields, f.name)
		}
	}
	return fields
}

// ValidateInterfaceName follows dev_valid_name in net/core/dev.c, and rejects "%", which makes the
// kernel number names.
func ValidateInterfaceName(name string) error {
	switch {
	case name == "":
		return errors.New("interface name: is empty, must be 1-15 bytes")
	case len(name) > MaxName:
		return fmt.Errorf("interface name %q: is %d bytes long, must be at most %d",
			name, len(name), MaxName)
	case name == "." || name == "..":
		return fmt.Errorf("interface name %q: must be neither \".\" nor \"..\"", name)
	case name == "all" || name == "default": // devinet_conf_proc of net/ipv4/devinet.c
		return fmt.Errorf("interface name %q: the kernel has its sysctls for all interfaces under it",
			name)
	case strings.ContainsAny(name, "/:%\x00") || strings.ContainsFunc(name, unicode.IsSpace):
		return fmt.Errorf("interface name %q: must not contain \"/\", \":\", \"%%\", white space "+
			"or a zero byte", name)
	}
	return nil
}

func (c *VFConfig) validate() error {
	var errs []error
	inRange := func(field string, value *int, most int) {
		if value != nil && (*value < 0 || *value > most) {
			errs = append(errs, fmt.Errorf("vf.%s %d: must be 0-%d", field, *value, most))
		}
	}

	oneOf := func(field, value string, allowed ...string) {
		if value != "" && !slices.Contains(allowed, value) {
			errs = append(errs,
				fmt.Errorf("vf.%s %q: must be one of %s", field, value,
					strings.Join(allowed, ", ")))
		}
	}

	usable := func(field string, guid GUID) {
		if guid != "" && !guid.IsUsable() {
			errs = append(errs, fmt.Errorf("vf.%s %q: %s", field, guid, MustBeGUID))
		}
	}

	inRange("vlan", c.VLAN, MaxVLAN)
	inRange("qos", c.QoS, MaxQoS)
	inRange("minTxRate", c.MinTxRate, math.MaxInt32)
	inRange("maxTxRate", c.MaxTxRate, math.MaxInt32)
	oneOf("vlanProtocol", c.Proto, VLAN8021Q, VLAN8021AD)
	oneOf("linkState", c.LinkState, LinkAuto, LinkEnable, LinkDisable)
	usable("nodeGUID", c.NodeGUID)
	usable("portGUID", c.PortGUID)
	tagged := c.VLAN != nil && *c.VLAN > 0
	if !tagged && (c.Proto != "" || c.QoS != nil && *c.QoS > 0) {
		errs = append(errs,
			errors.New("vf.vlan: must be 1-4094 where qos or vlanProtocol is given"))
	}

	if c.MinTxRate != nil && c.MaxTxRate != nil && *c.MaxTxRate > 0 && *c.MinTxRate > *c.MaxTxRate {
		errs = append(errs,
			fmt.Errorf("vf.minTxRate %d: must be at most vf.maxTxRate %d", *c.MinTxRate,
				*c.MaxTxRate))
	}

	return errors.Join(errs...)
}
