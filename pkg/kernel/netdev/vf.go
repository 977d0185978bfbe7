package netdev

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// VFState is what a PF enforces for a VF (struct ifla_vf_* in linux/if_link.h).
type VFState struct {
	MAC       function.MAC `json:"mac,omitempty"`       // the administrative address; most drivers tell zeros where none was set
	VLAN      int          `json:"vlan,omitempty"`      // 0 is none
	QoS       int          `json:"qos,omitempty"`       // 802.1p, 0-7
	Proto     string       `json:"proto,omitempty"`     // as in [function.VFConfig]
	MinTxRate int          `json:"minTxRate,omitempty"` // Mbit/s, 0 is none
	MaxTxRate int          `json:"maxTxRate,omitempty"` // Mbit/s, 0 is none
	// SpoofCheck and Trust are nil where the PF's driver does not have them.
	SpoofCheck *bool  `json:"spoofCheck,omitempty"`
	Trust      *bool  `json:"trust,omitempty"`
	LinkState  string `json:"linkState,omitempty"` // as in [function.VFConfig]
}

// linkStates are the words for IFLA_VF_LINK_STATE_*, by value.
var linkStates = []string{
	nl.IFLA_VF_LINK_STATE_AUTO: function.LinkAuto, nl.IFLA_VF_LINK_STATE_ENABLE: function.LinkEnable,
	nl.IFLA_VF_LINK_STATE_DISABLE: function.LinkDisable,
}

// with returns the state with what the pod wants.
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
	return s
}

func (s VFState) rate() function.Rate { return function.Rate{Min: s.MinTxRate, Max: s.MaxTxRate} }

// tag describes the tag that the frames of the VF get. Without a tag, Proto means nothing.
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

// vfChange is one message to the PF.
type vfChange struct {
	needed  bool
	what    string // for people: "VLAN 100"
	fields  string // of a [function.Interface] that it is about, as users write them: "vf.vlan, vf.qos"
	carrier bool   // a PF may refuse it while it has no carrier: quirk "rates need a carrier"
	send    func(vfLink) error
}

// vfLink is what a message about a VF is sent with and to.
type vfLink struct {
	*netlink.Handle
	pf netlink.Link
	vf int
}

// vfChanges lead from one state to another. The MAC is the first, as some drivers want it before the netdev's own.
func vfChanges(from, to VFState) []vfChange {
	linkState := slices.Index(linkStates, to.LinkState)
	changes := []vfChange{
		{
			needed: to.MAC != "" && from.MAC != to.MAC, what: "MAC " + string(to.MAC), fields: "mac",
			send: func(l vfLink) error { return l.LinkSetVfHardwareAddr(l.pf, l.vf, to.MAC.HardwareAddr()) },
		}, {
			needed: from.tag() != to.tag(), what: "VLAN " + to.tag(),
			fields: fields(field{"vf.vlan", from.VLAN != to.VLAN}, field{"vf.qos", from.QoS != to.QoS},
				field{"vf.vlanProtocol", from.tagsAD() != to.tagsAD()}),
			send: to.sendTag,
		}, {
			needed: from.rate() != to.rate(), what: to.rate().String(), fields: rateFields(from.rate(), to.rate()), carrier: true,
			send: func(l vfLink) error { return l.LinkSetVfRate(l.pf, l.vf, to.MinTxRate, to.MaxTxRate) },
		}, {
			needed: to.SpoofCheck != nil && onOff(from.SpoofCheck) != onOff(to.SpoofCheck),
			what:   "spoof check " + onOff(to.SpoofCheck), fields: "vf.spoofCheck",
			send: func(l vfLink) error { return l.LinkSetVfSpoofchk(l.pf, l.vf, *to.SpoofCheck) },
		}, {
			needed: to.Trust != nil && onOff(from.Trust) != onOff(to.Trust), what: "trust " + onOff(to.Trust), fields: "vf.trust",
			send: func(l vfLink) error { return l.LinkSetVfTrust(l.pf, l.vf, *to.Trust) },
		}, {
			needed: linkState >= 0 && from.LinkState != to.LinkState, what: "link state " + to.LinkState, fields: "vf.linkState",
			send: func(l vfLink) error { return l.LinkSetVfState(l.pf, l.vf, uint32(linkState)) },
		},
	}
	return slices.DeleteFunc(changes, func(c vfChange) bool { return !c.needed })
}

// sendTag sends the older message, which more drivers know, unless the protocol needs the newer one.
func (s VFState) sendTag(l vfLink) error {
	if s.tagsAD() {
		return l.LinkSetVfVlanQosProto(l.pf, l.vf, s.VLAN, s.QoS, unix.ETH_P_8021AD)
	}
	return l.LinkSetVfVlanQos(l.pf, l.vf, s.VLAN, s.QoS)
}

// errNoCarrier is returned for a refusal of a PF without a carrier, which may accept it when it has one.
var errNoCarrier = errors.New("it has no carrier, without which some drivers refuse it")

func (e *Engine) changeVF(pf *PF, c vfChange) error {
	link, err := e.host.named(pf.Name)
	if err != nil {
		return fmt.Errorf("PF %s: %w", pf, err)
	}
	e.trace("PF " + pf.Name + ": " + c.what)
	err = c.send(vfLink{e.host.Handle, reference(link.Identity.Index), pf.VF})
	if err != nil && c.carrier && link.rawFlags&unix.IFF_LOWER_UP == 0 {
		err = fmt.Errorf("%w; %w", err, errNoCarrier)
	}
	if err != nil {
		return fmt.Errorf("%s: PF %s refuses %s for VF %d: %w", c.fields, pf, c.what, pf.VF, err)
	}
	return nil
}

// awaitCarrier waits until the PF has a carrier, and says whether it has one. It does not wait for a PF that is down, and
// takes at most half of the caller's time: the rest is for undoing and for telling why. A container runtime gives an NRI
// plugin 2 s, and then starts the pod without it.
func (e *Engine) awaitCarrier(ctx context.Context, pf *PF) bool {
	l, err := e.host.named(pf.Name)
	if err != nil || !l.Up {
		return false
	}
	patience := quirk.CarrierPatience
	if end, limited := ctx.Deadline(); limited {
		patience = min(patience, time.Until(end)/2)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return e.host.awaitCarrier(ctx, l.Identity.Index) == nil
}

// vf asks the PF for the VF's state, which is nil if the PF does not tell. With statistics, the answer of a PF with some
// 200 VFs would not fit in an attribute's 64 KiB.
func (c *conn) vf(pf *PF) (*VFState, error) {
	message, err := c.ask(0, text(unix.IFLA_IFNAME, pf.Name), number(unix.IFLA_EXT_MASK, nl.RTEXT_FILTER_VF|request.SkipStatistics))
	if err != nil {
		return nil, fmt.Errorf("PF %s: %w", pf, err)
	}
	return parseVF(message[unix.SizeofIfInfomsg:], pf.VF), nil
}

// parseVF finds a VF in the attributes of a PF's RTM_NEWLINK. It returns nil if the PF tells nothing about the VF.
func parseVF(attributes []byte, vf int) *VFState {
	attrs, _ := attribute.Parse(attributes) // what comes after a malformed one is not told
	for _, info := range attribute.All(attrs[unix.IFLA_VFINFO_LIST]) {
		if index, state := parseVFInfo(info); index == vf {
			return state
		}
	}
	return nil
}

// parseVFInfo reads an IFLA_VF_INFO, of which each attribute starts with the index of the VF. Without one, index is -1.
func parseVFInfo(info []byte) (index int, state *VFState) {
	index, state = -1, &VFState{Proto: function.VLAN8021Q}
	for kind, value := range attribute.All(info) {
		if kind == nl.IFLA_VF_VLAN_LIST {
			for _, tag := range attribute.All(value) { // the kernel has only one
				if len(tag) >= nl.SizeofVfVlan+2 && binary.BigEndian.Uint16(tag[nl.SizeofVfVlan:]) == unix.ETH_P_8021AD {
					state.Proto = function.VLAN8021AD
				}
			}
			continue
		}
		switch words := uint32s(value); {
		case kind == nl.IFLA_VF_MAC && len(words) >= 3:
			index, state.MAC = int(words[0]), macOf(net.HardwareAddr(value[4:10]))
		case kind == nl.IFLA_VF_VLAN && len(words) >= 3:
			state.VLAN, state.QoS = int(words[1]), int(words[2])
		case kind == nl.IFLA_VF_RATE && len(words) >= 3:
			state.MinTxRate, state.MaxTxRate = int(words[1]), int(words[2])
		case kind == nl.IFLA_VF_SPOOFCHK && len(words) >= 2 && words[1] != unknown:
			state.SpoofCheck = new(words[1] != 0)
		case kind == nl.IFLA_VF_TRUST && len(words) >= 2 && words[1] != unknown:
			state.Trust = new(words[1] != 0)
		case kind == nl.IFLA_VF_LINK_STATE && len(words) >= 2 && int(words[1]) < len(linkStates):
			state.LinkState = linkStates[words[1]]
		}
	}
	return index, state
}

// unknown is the kernel's value of a setting that the driver does not have (rtnl_fill_vfinfo).
const unknown = math.MaxUint32

// field is a field of a [function.Interface], as users write it, and whether an error is about it.
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
	return fields(field{"vf.minTxRate", from.Min != to.Min}, field{"vf.maxTxRate", from.Max != to.Max})
}

// enforceable returns an error if neither a PF nor an eswitch can enforce what is wanted. before says what they told.
func enforceable(c *function.VFConfig, device Device, before Snapshot) error {
	if c == nil || before.VF != nil || *c == (function.VFConfig{}) {
		return nil
	}
	onlyPF := fields(
		field{"vf.vlan", c.VLAN != nil}, field{"vf.qos", c.QoS != nil}, field{"vf.vlanProtocol", c.Proto != ""},
		field{"vf.trust", c.Trust != nil}, field{"vf.spoofCheck", c.SpoofCheck != nil}, field{"vf.linkState", c.LinkState != ""},
	)
	rates := fields(field{"vf.minTxRate", c.MinTxRate != nil}, field{"vf.maxTxRate", c.MaxTxRate != nil}) // also an eswitch
	switch sf := device.Port != nil && device.Port.SF; {
	case onlyPF != "" && sf:
		return fmt.Errorf("%s: must be absent for %s: a PF enforces that for its VFs only", onlyPF, device.Port)
	case before.Rate != nil && onlyPF == "":
		return nil
	case sf:
		return fmt.Errorf("%s: must be absent for %s: its eswitch has no rate object for it", rates, device.Port)
	}
	return fmt.Errorf("%s: %s has no PF that VF properties could be set with", cmp.Or(onlyPF, rates), before.title())
}
