// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"slices"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// VFState is what a PF enforces for a VF (struct ifla_vf_* of include/uapi/linux/if_link.h).
type VFState struct {
	// MAC is the administrative address. Most drivers report zeros if no address was set.
	MAC       function.MAC `json:"mac,omitempty"`
	VLAN      int          `json:"vlan,omitempty"`      // 0 for no VLAN
	QoS       int          `json:"qos,omitempty"`       // priority of 802.1p, 0 to 7
	Proto     string       `json:"proto,omitempty"`     // as in [function.VFConfig]
	MinTxRate int          `json:"minTxRate,omitempty"` // Mbit/s, 0 for no limit
	MaxTxRate int          `json:"maxTxRate,omitempty"` // Mbit/s, 0 for no limit
	// SpoofCheck and Trust are nil if the PF's driver does not support them.
	SpoofCheck *bool  `json:"spoofCheck,omitempty"`
	Trust      *bool  `json:"trust,omitempty"`
	LinkState  string `json:"linkState,omitempty"` // as in [function.VFConfig]
	// These GUIDs are "" if the PF does not report them, as the PFs of Ethernet, and zeros if none
	// were set at the PF (mlx5_ib_get_vf_guid of drivers/infiniband/hw/mlx5/ib_virt.c).
	NodeGUID function.GUID `json:"nodeGUID,omitempty"`
	PortGUID function.GUID `json:"portGUID,omitempty"`
}

// linkStates holds the words for IFLA_VF_LINK_STATE_*, by value.
var linkStates = []string{
	nl.IFLA_VF_LINK_STATE_AUTO:    function.LinkAuto,
	nl.IFLA_VF_LINK_STATE_ENABLE:  function.LinkEnable,
	nl.IFLA_VF_LINK_STATE_DISABLE: function.LinkDisable,
}

// with returns the state with the properties that the pod wants.
func (s VFState) with(c *function.VFConfig, mac function.MAC) VFState {
	s.MAC = cmp.Or(mac, s.MAC)
	if c == nil {
		return s
	}

	if c.VLAN != nil {
		s.VLAN, s.QoS, s.Proto = *c.VLAN, 0, function.VLAN8021Q
	}

	s.QoS = *cmp.Or(c.QoS, &s.QoS)
	s.Proto = cmp.Or(c.Proto, s.Proto)
	rate := c.Rate(s.rate())
	s.MinTxRate, s.MaxTxRate = rate.Min, rate.Max
	s.SpoofCheck = cmp.Or(c.SpoofCheck, s.SpoofCheck)
	s.Trust = cmp.Or(c.Trust, s.Trust)
	s.LinkState = cmp.Or(c.LinkState, s.LinkState)
	s.NodeGUID = cmp.Or(c.NodeGUID, s.NodeGUID)
	s.PortGUID = cmp.Or(c.PortGUID, s.PortGUID)

	return s
}

func (s VFState) rate() function.Rate { return function.Rate{Min: s.MinTxRate, Max: s.MaxTxRate} }

// tag describes the VLAN tag that the VF's frames get. Proto matters only if there is a tag.
func (s VFState) tag() string {
	if s.VLAN == 0 && s.QoS == 0 || s.Proto == "" {
		return "none"
	}
	return fmt.Sprintf("%d qos %d proto %s", s.VLAN, s.QoS, s.Proto)
}

func (s VFState) tagsAD() bool { return s.tag() != "none" && s.Proto == function.VLAN8021AD }

func onOff(b *bool) string {
	switch {
	case b == nil:
		return "unknown"
	case *b:
		return "on"
	}
	return "off"
}

// vfField is the part of a VFState that one message to a PF sets.
type vfField int

const (
	vfMAC vfField = iota
	vfTag
	vfRates
	vfSpoofCheck
	vfTrust
	vfLinkState
	vfNodeGUID
	vfPortGUID
)

// vfChange is one message to a PF.
type vfChange struct {
	field vfField
	what  string // for messages to users: "VLAN 100"
	// fields are the names of the affected fields of a [function.Interface], as users write them:
	// "vf.vlan, vf.qos".
	fields string
	to     VFState
}

// missedBy returns the value that the PF reports if it differs from the value that the change asks
// for, or "" if they are equal.
func (c vfChange) missedBy(now VFState) string {
	for _, left := range vfChanges(now, c.to) {
		if left.field == c.field {
			return now.words(c.field)
		}
	}
	return ""
}

// words describes a field for messages to users.
func (s VFState) words(field vfField) string {
	switch field {
	case vfMAC:
		return "MAC " + string(s.MAC)
	case vfTag:
		return "VLAN " + s.tag()
	case vfRates:
		return s.rate().String()
	case vfSpoofCheck:
		return "spoof check " + onOff(s.SpoofCheck)
	case vfTrust:
		return "trust " + onOff(s.Trust)
	case vfNodeGUID:
		return "node GUID " + cmp.Or(string(s.NodeGUID), "unknown")
	case vfPortGUID:
		return "port GUID " + cmp.Or(string(s.PortGUID), "unknown")
	}
	return "link state " + s.LinkState
}

// vfChanges returns the changes that lead from one state to another. The MAC comes first, because
// some drivers accept a MAC of the netdev only after the PF has it.
func vfChanges(from, to VFState) (changes []vfChange) {
	add := func(field vfField, needed bool, fields string) {
		if needed {
			changes = append(changes, vfChange{field, to.words(field), fields, to})
		}
	}

	add(vfMAC, to.MAC != "" && from.MAC != to.MAC, "mac")
	add(vfTag, from.tag() != to.tag(), fields(field{"vf.vlan", from.VLAN != to.VLAN},
		field{"vf.qos", from.QoS != to.QoS},
		field{"vf.vlanProtocol", from.tagsAD() != to.tagsAD()}))
	add(vfRates, from.rate() != to.rate(), rateFields(from.rate(), to.rate()))
	differ := func(from, to *bool) bool { return to != nil && onOff(from) != onOff(to) }
	add(vfSpoofCheck, differ(from.SpoofCheck, to.SpoofCheck), "vf.spoofCheck")
	add(vfTrust, differ(from.Trust, to.Trust), "vf.trust")
	settable := slices.Contains(linkStates, to.LinkState)
	add(vfLinkState, settable && from.LinkState != to.LinkState, "vf.linkState")
	add(vfNodeGUID, to.NodeGUID != "" && from.NodeGUID != to.NodeGUID, "vf.nodeGUID")
	add(vfPortGUID, to.PortGUID != "" && from.PortGUID != to.PortGUID, "vf.portGUID")

	return changes
}

// linkStateNumber returns the IFLA_VF_LINK_STATE_* of a word in linkStates.
func linkStateNumber(word string) uint32 { return uint32(slices.Index(linkStates, word)) }

// parseVFInfo reads an IFLA_VF_INFO. Each of its attributes begins with the index of the VF. index
// is -1 if the attribute of the MAC is missing.
func parseVFInfo(info []byte) (index int, state *VFState) {
	index, state = -1, &VFState{Proto: function.VLAN8021Q}
	for kind, value := range attribute.All(info) {
		if kind == nl.IFLA_VF_VLAN_LIST {
			for _, tag := range attribute.All(value) { // the kernel sends one tag
				if len(tag) >= nl.SizeofVfVlan+2 &&
					binary.BigEndian.Uint16(tag[nl.SizeofVfVlan:]) == unix.ETH_P_8021AD {
					state.Proto = function.VLAN8021AD
				}
			}
			continue
		}
		switch words := uint32s(value); {
		case kind == nl.IFLA_VF_MAC && len(words) >= 3:
			index, state.MAC = int(words[0]), macOf(net.HardwareAddr(value[4:10]))
		case kind == nl.IFLA_VF_VLAN && len(words) >= 3:
			if state.VLAN, state.QoS = int(words[1]), int(words[2]); state.VLAN == noVLAN {
				state.VLAN, state.QoS = 0, 0
			}
		case kind == nl.IFLA_VF_RATE && len(words) >= 3:
			state.MinTxRate, state.MaxTxRate = int(words[1]), int(words[2])
		case kind == nl.IFLA_VF_SPOOFCHK && len(words) >= 2 && words[1] != unknown:
			state.SpoofCheck = new(words[1] != 0)
		case kind == nl.IFLA_VF_TRUST && len(words) >= 2 && words[1] != unknown:
			state.Trust = new(words[1] != 0)
		case kind == nl.IFLA_VF_LINK_STATE && len(words) >= 2 && int(words[1]) < len(linkStates):
			state.LinkState = linkStates[words[1]]
		case kind == nl.IFLA_VF_IB_NODE_GUID && len(value) >= nl.SizeofVfGUID:
			state.NodeGUID = guidIn(value)
		case kind == nl.IFLA_VF_IB_PORT_GUID && len(value) >= nl.SizeofVfGUID:
			state.PortGUID = guidIn(value)
		}
	}

	return index, state
}

// guidIn reads a struct ifla_vf_guid. The kernel has the GUID as a number after four bytes of
// padding.
func guidIn(value []byte) function.GUID {
	return function.GUIDOf(binary.NativeEndian.Uint64(value[8:nl.SizeofVfGUID]))
}

// noVLAN is the number that mlx4 reports if a VF has no VLAN (MLX4_VGT of
// include/linux/mlx4/device.h).
const noVLAN = 4095

// unknown is the value that the kernel reports for a setting that the driver does not support
// (rtnl_fill_vfinfo of net/core/rtnetlink.c).
const unknown = math.MaxUint32

// field is a field of a [function.Interface], as users write it. meant reports whether an error
// concerns this field.
type field struct {
	name  string
	meant bool
}

func fields(list ...field) string {
	var names []string
	for _, f := range list {
		if f.meant {
			names = append(names, f.name)
		}
	}
	return strings.Join(names, ", ")
}

func rateFields(from, to function.Rate) string {
	return fields(field{"vf.minTxRate", from.Min != to.Min},
		field{"vf.maxTxRate", from.Max != to.Max})
}

// enforceable returns an error if neither the PF nor the eswitch can enforce what is wanted. It
// also returns an error if the PF does not report what it enforces, because the property could be
// neither checked nor restored then. before holds what both report before the attachment.
func enforceable(c *function.VFConfig, device Device, before Snapshot) error {
	if c == nil || *c == (function.VFConfig{}) {
		return nil
	}

	if before.VF != nil {
		unreported := fields(field{"vf.spoofCheck", c.SpoofCheck != nil && before.VF.SpoofCheck == nil},
			field{"vf.trust", c.Trust != nil && before.VF.Trust == nil},
			field{"vf.nodeGUID", c.NodeGUID != "" && before.VF.NodeGUID == ""},
			field{"vf.portGUID", c.PortGUID != "" && before.VF.PortGUID == ""})
		if unreported != "" {
			return fmt.Errorf("%s: must be absent: PF %s does not tell it for VF %d, "+
				"so that it could be neither checked nor given back", unreported, device.PF,
				device.PF.VF)
		}
		return givableGUIDs(c, device, *before.VF)
	}

	onlyPF := fields(
		field{"vf.vlan", c.VLAN != nil}, field{"vf.qos", c.QoS != nil},
		field{"vf.vlanProtocol", c.Proto != ""},
		field{"vf.trust", c.Trust != nil}, field{"vf.spoofCheck", c.SpoofCheck != nil},
		field{"vf.linkState", c.LinkState != ""},
		field{"vf.nodeGUID", c.NodeGUID != ""}, field{"vf.portGUID", c.PortGUID != ""},
	)

	// An eswitch can enforce the rates, too.
	rates := fields(field{"vf.minTxRate", c.MinTxRate != nil},
		field{"vf.maxTxRate", c.MaxTxRate != nil})
	switch sf := device.Port != nil && device.Port.SF; {
	case onlyPF != "" && sf:
		return fmt.Errorf("%s: must be absent for %s: a PF enforces that for its VFs only",
			onlyPF, device.Port)
	case before.Rate != nil && onlyPF == "":
		return nil
	case sf:
		return fmt.Errorf("%s: must be absent for %s: its eswitch has no rate object for it",
			rates, device.Port)
	}

	return fmt.Errorf("%s: %s has no PF that VF properties could be set with",
		cmp.Or(onlyPF, rates), before.title())
}

// givableGUIDs returns an error if the PF reports zeros for a GUID that is wanted, because these say
// only that no GUID was set at the PF. The VF may have one of the firmware, and could not get it
// back.
func givableGUIDs(c *function.VFConfig, device Device, before VFState) error {
	unset := fields(field{"vf.nodeGUID", c.NodeGUID != "" && !before.NodeGUID.IsUsable()},
		field{"vf.portGUID", c.PortGUID != "" && !before.PortGUID.IsUsable()})
	if unset == "" {
		return nil
	}
	return fmt.Errorf("%s: PF %s tells %s and %s for VF %d, so that the GUIDs that the VF has are "+
		"unknown and could not be given back: set some before the VF gets its driver, by ip link "+
		"set %[2]s vf %[5]d node_guid and port_guid", unset, device.PF.Name,
		before.words(vfNodeGUID), before.words(vfPortGUID), device.PF.VF)
}
