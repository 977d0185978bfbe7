package netdev

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
)

// VFState is what a PF enforces for a VF (struct ifla_vf_* in linux/if_link.h).
type VFState struct {
	// MAC is the administrative address; most drivers tell zeros where none was set.
	MAC   function.MAC `json:"mac,omitempty"`
	VLAN  int          `json:"vlan,omitempty"`  // 0 is none
	QoS   int          `json:"qos,omitempty"`   // 802.1p, 0-7
	Proto string       `json:"proto,omitempty"` // as in [function.VFConfig]; means nothing without VLAN
	// Rates in Mbit/s, 0 is none.
	MinTxRate int `json:"minTxRate,omitempty"`
	MaxTxRate int `json:"maxTxRate,omitempty"`
	// SpoofCheck and Trust are nil where the PF's driver does not have them.
	SpoofCheck *bool  `json:"spoofCheck,omitempty"`
	Trust      *bool  `json:"trust,omitempty"`
	LinkState  string `json:"linkState,omitempty"` // as in [function.VFConfig]
}

// vlanProtocols are the words for the ethertypes of linux/if_ether.h that a PF can tag with.
var vlanProtocols = map[uint16]string{unix.ETH_P_8021Q: function.VLAN8021Q, unix.ETH_P_8021AD: function.VLAN8021AD}

// linkStates are the words for IFLA_VF_LINK_STATE_*, by value.
var linkStates = [...]string{
	nl.IFLA_VF_LINK_STATE_AUTO: function.LinkAuto, nl.IFLA_VF_LINK_STATE_ENABLE: function.LinkEnable,
	nl.IFLA_VF_LINK_STATE_DISABLE: function.LinkDisable,
}

// with is the state that the pod's wishes lead to.
func (s VFState) with(c *function.VFConfig, mac function.MAC) VFState {
	s.MAC = cmp.Or(mac, s.MAC)
	if c == nil {
		return s
	}
	if c.VLAN != nil {
		s.VLAN, s.QoS, s.Proto = *c.VLAN, 0, function.VLAN8021Q
	}
	if c.QoS != nil {
		s.QoS = *c.QoS
	}
	s.Proto = cmp.Or(c.Proto, s.Proto)
	rate := c.Rate(s.rate())
	s.MinTxRate, s.MaxTxRate = rate.Min, rate.Max
	s.SpoofCheck = cmp.Or(c.SpoofCheck, s.SpoofCheck)
	s.Trust = cmp.Or(c.Trust, s.Trust)
	s.LinkState = cmp.Or(c.LinkState, s.LinkState)
	return s
}

func (s VFState) rate() function.Rate { return function.Rate{Min: s.MinTxRate, Max: s.MaxTxRate} }

// tag is what the frames of a VF get.
type tag struct {
	vlan, qos int
	proto     string
}

// tag leaves the protocol out where there is neither VLAN nor QoS: it means nothing then, and drivers tell any.
func (s VFState) tag() tag {
	if s.VLAN == 0 && s.QoS == 0 {
		return tag{}
	}
	return tag{s.VLAN, s.QoS, s.Proto}
}

func (t tag) String() string {
	if t.proto == "" {
		return "none"
	}
	return fmt.Sprintf("%d qos %d proto %s", t.vlan, t.qos, t.proto)
}

// fieldsOtherThan are the fields of an [function.Interface] that make the tags differ.
func (t tag) fieldsOtherThan(other tag) string {
	var d fields
	d.add("vf.vlan", t.vlan != other.vlan)
	d.add("vf.qos", t.qos != other.qos)
	d.add("vf.vlanProtocol", cmp.Or(t.proto, function.VLAN8021Q) != cmp.Or(other.proto, function.VLAN8021Q))
	return d.String()
}

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
	needed bool
	what   string // for people: "VLAN 100"
	// fields are those of an [function.Interface] that it is about, as users write them: "vf.vlan, vf.qos".
	fields string
	// carrier says that igb refuses it while the PF has no carrier: quirk "rates need a carrier".
	carrier bool
	send    func(h *netlink.Handle, pf netlink.Link, vf int) error
}

// vfChanges lead from one state to another, the MAC first: some drivers want it before the netdev's own.
func vfChanges(from, to VFState) []vfChange {
	changes := []vfChange{
		{
			needed: to.MAC != "" && from.MAC != to.MAC, what: "MAC " + string(to.MAC), fields: "mac",
			send: func(h *netlink.Handle, pf netlink.Link, vf int) error {
				return h.LinkSetVfHardwareAddr(pf, vf, to.MAC.HardwareAddr())
			},
		}, {
			needed: from.tag().String() != to.tag().String(), what: "VLAN " + to.tag().String(),
			fields: to.tag().fieldsOtherThan(from.tag()), send: to.tag().send,
		}, {
			needed: from.rate() != to.rate(), what: to.rate().String(), fields: rateFields(from.rate(), to.rate()), carrier: true,
			send: func(h *netlink.Handle, pf netlink.Link, vf int) error {
				return h.LinkSetVfRate(pf, vf, to.MinTxRate, to.MaxTxRate)
			},
		}, {
			needed: to.SpoofCheck != nil && onOff(from.SpoofCheck) != onOff(to.SpoofCheck),
			what:   "spoof check " + onOff(to.SpoofCheck), fields: "vf.spoofCheck",
			send: func(h *netlink.Handle, pf netlink.Link, vf int) error {
				return h.LinkSetVfSpoofchk(pf, vf, *to.SpoofCheck)
			},
		}, {
			needed: to.Trust != nil && onOff(from.Trust) != onOff(to.Trust), what: "trust " + onOff(to.Trust), fields: "vf.trust",
			send: func(h *netlink.Handle, pf netlink.Link, vf int) error {
				return h.LinkSetVfTrust(pf, vf, *to.Trust)
			},
		}, {
			needed: slices.Contains(linkStates[:], to.LinkState) && from.LinkState != to.LinkState,
			what:   "link state " + to.LinkState, fields: "vf.linkState",
			send: func(h *netlink.Handle, pf netlink.Link, vf int) error {
				return h.LinkSetVfState(pf, vf, uint32(slices.Index(linkStates[:], to.LinkState)))
			},
		},
	}
	return slices.DeleteFunc(changes, func(c vfChange) bool { return !c.needed })
}

// send uses the older message where it says enough, because more drivers know it.
func (t tag) send(h *netlink.Handle, pf netlink.Link, vf int) error {
	if t.proto == function.VLAN8021AD {
		return h.LinkSetVfVlanQosProto(pf, vf, t.vlan, t.qos, unix.ETH_P_8021AD)
	}
	return h.LinkSetVfVlanQos(pf, vf, t.vlan, t.qos)
}

// errNoCarrier is returned where a PF refuses what it may take when it has a carrier again.
var errNoCarrier = errors.New("it has no carrier, without which some drivers refuse it")

// changeVF tells the PF.
func (e *Engine) changeVF(pf *PF, c vfChange) error {
	link, err := e.host.named(pf.Name)
	if err != nil {
		return fmt.Errorf("PF %s: %w", pf, err)
	}
	e.trace("PF " + pf.Name + ": " + c.what)
	err = c.send(e.host.Handle, link, pf.VF)
	if err != nil && c.carrier && link.Attrs().RawFlags&unix.IFF_LOWER_UP == 0 {
		err = fmt.Errorf("%w; %w", err, errNoCarrier)
	}
	if err != nil {
		return fmt.Errorf("%s: PF %s refuses %s for VF %d: %w", c.fields, pf, c.what, pf.VF, err)
	}
	return nil
}

// awaitCarrier says whether the PF has a carrier in the end. It does not wait for one of a PF that is down, and for no
// more than half of the time that the caller has: the rest is for undoing and for telling why (a container runtime gives
// an NRI plugin 2 s, and starts the pod without it if it takes longer).
func (e *Engine) awaitCarrier(ctx context.Context, pf *PF) (has bool) {
	const often = 20 * time.Millisecond
	patience := quirk.CarrierPatience
	if end, limited := ctx.Deadline(); limited {
		patience = min(patience, time.Until(end)/2)
	}
	_ = wait.PollUntilContextTimeout(ctx, often, patience, true, func(context.Context) (done bool, err error) {
		l, err := e.host.named(pf.Name)
		if err != nil {
			return false, err
		}
		has = l.Attrs().RawFlags&unix.IFF_LOWER_UP != 0
		return has || l.Attrs().RawFlags&unix.IFF_UP == 0, nil
	})
	return has
}

// errNoVF is returned where a PF says nothing about a VF.
var errNoVF = errors.New("the PF does not tell")

// skipStatistics is RTEXT_FILTER_SKIP_STATS of linux/rtnetlink.h.
const skipStatistics = 1 << 3

// vf asks the PF for the VF's state, without statistics: with them the answer of a PF with some 200 VFs does not fit
// in an attribute's 64 KiB.
func (c *conn) vf(pf *PF) (*VFState, error) {
	message, err := c.ask(0, text(unix.IFLA_IFNAME, pf.Name), number(unix.IFLA_EXT_MASK, nl.RTEXT_FILTER_VF|skipStatistics))
	if err != nil {
		return nil, fmt.Errorf("PF %s: %w", pf, err)
	}
	if state := parseVF(message, pf.VF); state != nil {
		return state, nil
	}
	return nil, fmt.Errorf("PF %s: VF %d: %w", pf, pf.VF, errNoVF)
}

// parseVF finds a VF in the body of a PF's RTM_NEWLINK, nil where the PF tells nothing about it.
func parseVF(message []byte, vf int) *VFState {
	if len(message) < unix.SizeofIfInfomsg {
		return nil
	}
	for kind, list := range attribute.All(message[unix.SizeofIfInfomsg:]) {
		if kind != unix.IFLA_VFINFO_LIST {
			continue
		}
		for _, info := range attribute.All(list) {
			if index, state := parseVFInfo(info); index == vf {
				return state
			}
		}
	}
	return nil
}

// unknown is what the kernel tells of a setting that the driver does not have (rtnl_fill_vfinfo).
const unknown = 0xffffffff

// parseVFInfo reads one IFLA_VF_INFO. Each attribute in it is a struct that starts with the index of the VF, which is -1
// here where none was told.
func parseVFInfo(info []byte) (index int, state *VFState) {
	index, state = -1, &VFState{Proto: function.VLAN8021Q}
	for kind, value := range attribute.All(info) {
		if kind == nl.IFLA_VF_VLAN_LIST {
			state.Proto = parseVLANProto(value)
			continue
		}
		switch words := uint32s(value); {
		case kind == nl.IFLA_VF_MAC && len(words) >= 3:
			index, state.MAC = int(words[0]), macOf(net.HardwareAddr(value[4:10]))
		case kind == nl.IFLA_VF_VLAN && len(words) >= 3:
			state.VLAN, state.QoS = int(words[1]), int(words[2])
		case kind == nl.IFLA_VF_RATE && len(words) >= 3:
			state.MinTxRate, state.MaxTxRate = int(words[1]), int(words[2])
		case kind == nl.IFLA_VF_SPOOFCHK && len(words) >= 2:
			state.SpoofCheck = setting(words[1])
		case kind == nl.IFLA_VF_TRUST && len(words) >= 2:
			state.Trust = setting(words[1])
		case kind == nl.IFLA_VF_LINK_STATE && len(words) >= 2 && int(words[1]) < len(linkStates):
			state.LinkState = linkStates[words[1]]
		}
	}
	return index, state
}

func setting(value uint32) *bool {
	if value == unknown {
		return nil
	}
	return new(value != 0)
}

// parseVLANProto reads the protocol of the first tag in an IFLA_VF_VLAN_LIST; the kernel has only one.
func parseVLANProto(list []byte) string {
	for _, info := range attribute.All(list) {
		if len(info) < nl.SizeofVfVlan+2 {
			continue
		}
		if proto, known := vlanProtocols[binary.BigEndian.Uint16(info[nl.SizeofVfVlan:])]; known {
			return proto
		}
	}
	return function.VLAN8021Q
}

// Rates are the rate objects of Functions that have a port at an eswitch. The eswitch limits such a Function, and not
// the PF by its VF properties.
type Rates interface {
	// Rate is the Function's limit; ok is false where there is no rate object for it.
	Rate(ctx context.Context, function function.EswitchPort) (rate function.Rate, ok bool, err error)
	// SetRate makes it another one.
	SetRate(ctx context.Context, function function.EswitchPort, to function.Rate) error
}

// fields lists fields of an [function.Interface], as users write them.
type fields []string

func (f *fields) add(field string, is bool) {
	if is {
		*f = append(*f, field)
	}
}

func (f fields) String() string { return strings.Join(f, ", ") }

func rateFields(from, to function.Rate) string {
	var d fields
	d.add("vf.minTxRate", from.Min != to.Min)
	d.add("vf.maxTxRate", from.Max != to.Max)
	return d.String()
}

// enforceable says why nobody can enforce what is wanted for a Function, of which before is known.
func enforceable(c *function.VFConfig, device Device, before Snapshot) error {
	if c == nil || before.VF != nil || *c == (function.VFConfig{}) {
		return nil
	}
	var properties, rates fields // that only a PF can enforce, and that an eswitch can as well
	properties.add("vf.vlan", c.VLAN != nil)
	properties.add("vf.qos", c.QoS != nil)
	properties.add("vf.vlanProtocol", c.Proto != "")
	properties.add("vf.trust", c.Trust != nil)
	properties.add("vf.spoofCheck", c.SpoofCheck != nil)
	properties.add("vf.linkState", c.LinkState != "")
	rates.add("vf.minTxRate", c.MinTxRate != nil)
	rates.add("vf.maxTxRate", c.MaxTxRate != nil)
	switch sf := device.Port != nil && device.Port.SF; {
	case len(properties) > 0 && sf:
		return fmt.Errorf("%s: must be absent for %s: a PF enforces that for its VFs only", properties, device.Port)
	case before.Rate != nil && len(properties) == 0:
		return nil
	case sf:
		return fmt.Errorf("%s: must be absent for %s: its eswitch has no rate object for it", rates, device.Port)
	}
	wanted := cmp.Or(properties.String(), rates.String())
	return fmt.Errorf("%s: %s has no PF that VF properties could be set with", wanted, before.title())
}

// changeRate tells the eswitch.
func (e *Engine) changeRate(ctx context.Context, device Device, from, to *function.Rate) error {
	if device.Port == nil || from == nil || to == nil || *from == *to {
		return nil
	}
	e.trace("eswitch: " + to.String() + " for " + device.Port.String())
	if err := e.rates.SetRate(ctx, *device.Port, *to); err != nil {
		return fmt.Errorf("%s: the eswitch refuses %s for %s: %w", rateFields(*from, *to), to, device.Port, err)
	}
	return nil
}
