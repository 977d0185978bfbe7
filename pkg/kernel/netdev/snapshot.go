// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// Snapshot is what a netdev was on the host: every property that an attachment, or the pod itself,
// may change, and what tells the netdev from every other one after a rename. It is comparable only
// by [Diff].
type Snapshot struct {
	// on the host; "" for a Function without a netdev
	Name     string       `json:"name"`
	AltNames []string     `json:"altNames,omitempty"` // sorted
	Alias    string       `json:"alias,omitempty"`
	MTU      int          `json:"mtu"`
	MAC      function.MAC `json:"mac,omitempty"`
	TxQLen   int          `json:"txQLen,omitempty"` // packets

	// Flags that the administrator sets (IFF_* in linux/if.h).
	Up           bool `json:"up,omitempty"`
	NoARP        bool `json:"noARP,omitempty"`
	Promiscuous  bool `json:"promiscuous,omitempty"`
	AllMulticast bool `json:"allMulticast,omitempty"`

	// what the PF enforces; nil without a PF, or where the PF does not tell
	VF *VFState `json:"vf,omitempty"`
	// what the eswitch enforces in place of the rates in VF; nil if nothing or not asked
	Rate *function.Rate `json:"rate,omitempty"`
	// nil in a snapshot of an older agent, which stands for all
	Sets *Sets `json:"sets,omitempty"`

	// Carried and Conf are nil in a snapshot of an older agent, and of a Function without a netdev.
	Carried *Carried `json:"carried,omitempty"`
	Conf    *Conf    `json:"conf,omitempty"`
	// Settings are read on the host only. They are nil in a snapshot of an older agent, and of a
	// Function without a netdev.
	Settings Settings `json:"settings,omitempty"`

	Identity Identity `json:"identity"`
}

// Sets are those of the properties in VF that an attachment changes and drivers change too: a
// driver may tell the VF's own MAC, or the speed of the link as its rate. Only what the attachment
// changed is written back.
type Sets struct {
	MAC  bool `json:"mac,omitempty"`
	Rate bool `json:"rate,omitempty"`
}

// Carried are further properties that a netdev keeps when it moves. A pod with CAP_NET_ADMIN can
// change all of them.
type Carried struct {
	Group uint32 `json:"group,omitempty"` // IFLA_GROUP, by which netdevs are changed together
	// The limits of segmentation and receive offloads, in bytes and, for GSOMaxSegs, in segments.
	// Those of IPv4 are 0 before Linux 6.3, which does not tell them.
	GSOMaxSize     uint32       `json:"gsoMaxSize,omitempty"`
	GSOMaxSegs     uint32       `json:"gsoMaxSegs,omitempty"`
	GROMaxSize     uint32       `json:"groMaxSize,omitempty"`
	GSOIPv4MaxSize uint32       `json:"gsoIPv4MaxSize,omitempty"`
	GROIPv4MaxSize uint32       `json:"groIPv4MaxSize,omitempty"`
	Multicast      bool         `json:"multicast,omitempty"` // IFF_MULTICAST
	LinkMode       uint8        `json:"linkMode,omitempty"`  // IF_LINK_MODE_DORMANT (1), or 0
	Broadcast      function.MAC `json:"broadcast,omitempty"`
	// XDP is the number of the XDP program, "0" for several and "" for none. A netdev that has one
	// on the host is not taken.
	XDP string `json:"xdp,omitempty"`
	// ProtoDown is nil in a snapshot of an older agent.
	ProtoDown *ProtoDown `json:"protoDown,omitempty"`
}

// Identity tells a netdev from every other one. Index and Peer are of the host's namespace.
type Identity struct {
	// ifindex on the host; it mostly survives a move to another namespace and back
	Index int    `json:"index"`
	Kind  string `json:"kind"` // the kernel's link kind, "device" for hardware
	// Parent is the name of the device on its bus (IFLA_PARENT_DEV_NAME), a PCI address for a VF;
	// "" for a virtual netdev.
	Parent string `json:"parent,omitempty"`
	Bus    string `json:"bus,omitempty"` // "pci" or "auxiliary"
	// the hardware's own address, "" without one
	Permanent function.MAC `json:"permanent,omitempty"`
	// Peer is the ifindex of a veth's other end, and PeerNS the host's id of the namespace of that
	// end, -1 for its own.
	Peer   int `json:"peer,omitempty"`
	PeerNS int `json:"peerNS,omitempty"`
}

// IsHardware says whether the netdev is on a bus. The kernel moves it to the host when its
// namespace ends, and deletes any other.
func (i Identity) IsHardware() bool { return i.Parent != "" }

// certain says whether the identity alone is enough to find the netdev among others.
func (i Identity) certain() bool {
	return i.Parent != "" || i.Permanent != "" || i.Kind == "veth" && i.Peer != 0
}

// same says whether other, seen in any namespace, can be the same netdev.
func (i Identity) same(other Identity) bool {
	return i.Kind == other.Kind && i.Parent == other.Parent &&
		(i.Parent != "" || i.Permanent == other.Permanent && i.Peer == other.Peer)
}

// sameOnHost is same for a netdev in the host's namespace, in which PeerNS means something too.
func (i Identity) sameOnHost(other Identity) bool {
	return i.same(other) && i.PeerNS == other.PeerNS
}

// userspace says whether the snapshot is one of a Function without a netdev.
func (s Snapshot) userspace() bool { return s.Name == "" }

// sets says what the attachment changes.
func (s Snapshot) sets() Sets {
	if s.Sets == nil {
		return Sets{MAC: true, Rate: true}
	}
	return *s.Sets
}

// title is for messages.
func (s Snapshot) title() string {
	if s.userspace() {
		return "Function without a netdev"
	}
	return "netdev " + s.Name
}

// enforcing returns s with what the PF and the eswitch shall enforce for the pod.
func (s Snapshot) enforcing(want function.Interface) Snapshot {
	if s.VF != nil {
		vf := s.VF.with(want.VF, want.MAC)
		if s.Rate != nil { // the eswitch limits it instead
			vf.MinTxRate, vf.MaxTxRate = s.VF.MinTxRate, s.VF.MaxTxRate
		}
		s.VF = &vf
	}

	if s.Rate != nil {
		s.Rate = new(want.VF.Rate(*s.Rate))
	}

	return s
}

// giveBack is what a PF shall enforce again for a VF, for which it enforces now: what the
// attachment did not set, and drivers change, stays. Without a netdev the MAC that differs is the
// program's.
func (s Snapshot) giveBack(now VFState) VFState {
	to := *s.VF
	if !s.sets().MAC && !s.userspace() {
		to.MAC = now.MAC
	}
	if !s.sets().Rate {
		to.MinTxRate, to.MaxTxRate = now.MinTxRate, now.MaxTxRate
	}
	return to
}

// administrativeMAC is the MAC that the PF gives the VF and the netdev does not have, "" for none.
func (s Snapshot) administrativeMAC() function.MAC {
	if s.VF == nil || s.VF.MAC == s.MAC || len(s.VF.MAC) != len(s.MAC) || isZero(s.VF.MAC) {
		return ""
	}
	return s.VF.MAC
}

// Renewed returns s for the netdev that the driver has made since in place of the one of s; now is
// a snapshot of it.
func (s Snapshot) Renewed(now Snapshot) Snapshot {
	s.Identity = now.Identity
	switch {
	case s.VF == nil:
		s.VF, s.Sets = now.VF, now.Sets
	case s.Sets != nil && now.Sets != nil:
		s.Sets = &Sets{MAC: s.Sets.MAC || now.Sets.MAC, Rate: s.Sets.Rate || now.Sets.Rate}
	}

	s.Rate = cmp.Or(s.Rate, now.Rate)
	return s
}

// VFChanges lists in words, as [Diff] does, what the PF enforces for a pod that wants this
// interface.
func (s Snapshot) VFChanges(want function.Interface) []string {
	return Diff(Snapshot{VF: s.VF}, Snapshot{VF: s.enforcing(want).VF})
}

// WithoutNetdev is what is left to restore when the netdev is gone: what the PF and the eswitch
// enforced.
func (s Snapshot) WithoutNetdev() Snapshot { return Snapshot{VF: s.VF, Rate: s.Rate, Sets: s.Sets} }

// flags are the IFF_* of linux/if.h that the snapshot has, and the mask of those that it knows.
func (s Snapshot) flags() (flags, mask uint32) {
	for _, p := range s.properties() {
		mask |= p.flag
		if p.value == true {
			flags |= p.flag
		}
	}
	return flags, mask
}

// snapshotOf reads a netdev; attrs has the properties that the netlink library does not read.
func snapshotOf(l netlink.Link, attrs attribute.Set) Snapshot {
	a := l.Attrs()
	carried := &Carried{
		Group: a.Group, GSOMaxSize: a.GSOMaxSize, GSOMaxSegs: a.GSOMaxSegs,
		GROMaxSize:     a.GROMaxSize,
		GSOIPv4MaxSize: a.GSOIPv4MaxSize, GROIPv4MaxSize: a.GROIPv4MaxSize,
		Multicast: a.RawFlags&unix.IFF_MULTICAST != 0, LinkMode: attrs.Uint8(unix.IFLA_LINKMODE),
		Broadcast: macOf(attrs[unix.IFLA_BROADCAST]), ProtoDown: protoDownOf(attrs),
	}

	if a.Xdp != nil && a.Xdp.Attached {
		carried.XDP = fmt.Sprint(a.Xdp.ProgId)
	}

	return Snapshot{
		Name: a.Name, AltNames: slices.Sorted(slices.Values(a.AltNames)), Alias: a.Alias,
		MTU: a.MTU, MAC: macOf(a.HardwareAddr),
		TxQLen: max(a.TxQLen, 0),
		Up:     a.RawFlags&unix.IFF_UP != 0, NoARP: a.RawFlags&unix.IFF_NOARP != 0,
		Promiscuous:  a.RawFlags&unix.IFF_PROMISC != 0,
		AllMulticast: a.RawFlags&unix.IFF_ALLMULTI != 0,
		Carried:      carried, Identity: identityOf(l),
	}
}

func identityOf(l netlink.Link) Identity {
	a := l.Attrs()
	return Identity{
		Index: a.Index, Kind: l.Type(), Parent: a.ParentDev, Bus: a.ParentDevBus,
		Permanent: macOf(a.PermHWAddr),
		Peer:      a.ParentIndex, PeerNS: a.NetNsID,
	}
}

// property is one thing of a netdev that an attachment, or the pod itself, may change.
type property struct {
	name  string
	value any // comparable
	now   any // the value in the other snapshot; only where two are compared
	// The property is restored by one of these: an attribute or an IFF_* flag of RTM_NEWLINK, or
	// the IPv6 sysctl of this name. [Engine.undo] knows how to restore a property without any of
	// them.
	attribute *nl.RtAttr
	flag      uint32
	conf6     string
	// group and key say which one of the [Settings] it is; group is "" for any other property.
	group, key string
}

// properties are those that the snapshot knows, in the order in which they are told and restored.
// The sizes for IPv4 come after the others, as the kernel sets them along with those.
func (s Snapshot) properties() []property {
	var list []property
	add := func(name string, value any, attr *nl.RtAttr) {
		list = append(list, property{name: name, value: value, attribute: attr})
	}
	flag := func(name string, set bool, flag uint32) {
		list = append(list, property{name: name, value: set, flag: flag})
	}

	add("name", s.Name, text(unix.IFLA_IFNAME, s.Name))
	add("altnames", fmt.Sprintf("%q", s.AltNames), nil)
	// a zero byte alone takes the alias away
	add("alias", s.Alias, text(unix.IFLA_IFALIAS, s.Alias))
	add("mtu", s.MTU, number(unix.IFLA_MTU, s.MTU))
	add("mac", s.MAC, hardwareAddr(unix.IFLA_ADDRESS, s.MAC))
	add("txqlen", s.TxQLen, number(unix.IFLA_TXQLEN, s.TxQLen))
	flag("up", s.Up, unix.IFF_UP)
	flag("noarp", s.NoARP, unix.IFF_NOARP)
	// rtnetlink tells of these two as requested, not as a bridge or a packet socket needs them.
	flag("promiscuous", s.Promiscuous, unix.IFF_PROMISC)
	flag("allmulticast", s.AllMulticast, unix.IFF_ALLMULTI)

	if v := s.VF; v != nil {
		add("vf mac", v.MAC, nil)
		add("vf vlan", v.tag(), nil)

		if s.sets().Rate {
			add("vf min_tx_rate", v.MinTxRate, nil)
			add("vf max_tx_rate", v.MaxTxRate, nil)
		}

		add("vf spoofchk", onOff(v.SpoofCheck), nil)
		add("vf trust", onOff(v.Trust), nil)
		add("vf link-state", v.LinkState, nil)
	}

	if r := s.Rate; r != nil {
		add("eswitch min_tx_rate", r.Min, nil)
		add("eswitch max_tx_rate", r.Max, nil)
	}

	if c := s.Carried; c != nil {
		add("group", c.Group, number(unix.IFLA_GROUP, c.Group))
		add("gso_max_size", c.GSOMaxSize, number(unix.IFLA_GSO_MAX_SIZE, c.GSOMaxSize))
		add("gso_max_segs", c.GSOMaxSegs, number(unix.IFLA_GSO_MAX_SEGS, c.GSOMaxSegs))
		add("gro_max_size", c.GROMaxSize, number(unix.IFLA_GRO_MAX_SIZE, c.GROMaxSize))

		if c.GSOIPv4MaxSize != 0 {
			add("gso_ipv4_max_size", c.GSOIPv4MaxSize,
				number(unix.IFLA_GSO_IPV4_MAX_SIZE, c.GSOIPv4MaxSize))
			add("gro_ipv4_max_size", c.GROIPv4MaxSize,
				number(unix.IFLA_GRO_IPV4_MAX_SIZE, c.GROIPv4MaxSize))
		}

		flag("multicast", c.Multicast, unix.IFF_MULTICAST)
		add("link mode", c.LinkMode, nl.NewRtAttr(unix.IFLA_LINKMODE, []byte{c.LinkMode}))
		add("broadcast", c.Broadcast, hardwareAddr(unix.IFLA_BROADCAST, c.Broadcast))
		add("XDP program", cmp.Or(c.XDP, "none"), nil)
		list = append(list, c.ProtoDown.properties()...)
	}

	list = append(list, s.Settings.properties()...)
	if s.Conf != nil {
		list = append(list, s.Conf.properties()...)
	}

	return list
}

// String describes a property that differs.
func (p property) String() string {
	if p.now == nil {
		return fmt.Sprintf("%s is not known, was %v", p.name, p.value)
	}
	if p.name == "altnames" {
		return fmt.Sprintf("altnames are %s, were %s", p.now, p.value)
	}
	if _, isText := p.value.(string); isText {
		return fmt.Sprintf("%s is %q, was %q", p.name, p.now, p.value)
	}

	return fmt.Sprintf("%s is %v, was %v", p.name, p.now, p.value)
}

// compare lists the properties that differ, with their values now.
func compare(before, now Snapshot) []property {
	before, now = withoutEqual(before, now)
	values := map[string]any{}
	for _, p := range now.properties() {
		values[p.name] = p.value
	}

	var list []property
	for _, p := range before.properties() {
		value, known := values[p.name]
		if known && value != p.value || !known && p.group != "" {
			p.now = value
			list = append(list, p)
		}
	}

	return list
}

// withoutEqual returns two snapshots without the sysctls and the groups of settings that are equal
// in both, because these are most of what is known of a netdev, and they seldom differ.
func withoutEqual(a, b Snapshot) (Snapshot, Snapshot) {
	if a.Conf != nil && b.Conf != nil && a.Conf.equal(*b.Conf) {
		a.Conf, b.Conf = nil, nil
	}
	a.Settings, b.Settings = a.Settings.unlike(b.Settings), b.Settings.unlike(a.Settings)
	return a, b
}

// Diff lists in words, in a stable order, the properties that differ: "mtu is 1400, was 1500". It
// does not compare the identity, nor what only one of the snapshots knows.
func Diff(before, now Snapshot) []string {
	var texts []string
	for _, d := range compare(before, now) {
		texts = append(texts, d.String())
	}
	return texts
}

// Observed is what a netdev is in a pod.
type Observed struct {
	Name      string         `json:"name"`
	MAC       function.MAC   `json:"mac,omitempty"`
	MTU       int            `json:"mtu"`
	Addresses []netip.Prefix `json:"addresses,omitempty"`
	Index     int            `json:"index"`
}

// Place is where a netdev sits in a pod. It is known before the netdev is moved.
type Place struct {
	NetNS string `json:"netns"` // path of the namespace's file
	// SO_NETNS_COOKIE, unique until the next boot; the path may mean another namespace later
	Cookie uint64 `json:"cookie"`
	Index  int    `json:"index"` // ifindex that the netdev gets there (IFLA_NEW_IFINDEX)
}

// Device is the host's side of a netdev.
type Device struct {
	// of the netdev in the host's namespace; "" where it is not known or not there
	Name string
	// enforces the VF's properties; nil for a Function that is no VF, or where the PF has no netdev
	PF *PF
	// at the eswitch, which is asked only if the pod wants a rate; nil for a PF
	Port *function.EswitchPort
	// Rebinding lets [Engine.Restore] bind the driver of a hardware netdev again, on which a pod
	// left others that are found nowhere. With nil, Restore never unbinds a driver.
	Rebinding *Rebinding
}

// as returns the device without the PF or the port if the snapshot has nothing of them: they were
// not changed then.
func (d Device) as(before Snapshot) Device {
	if before.VF == nil {
		d.PF = nil
	}
	if before.Rate == nil {
		d.Port = nil
	}
	return d
}

// PF is where a PF is told what to enforce for a VF.
type PF struct {
	Name    string // of the PF's netdev in the host's namespace
	Address string // PCI address of the PF, which the netdev must belong to; "" if it is not known
	VF      int    // index of the VF, from 0
}

func (p PF) String() string { return cmp.Or(p.Name, "?") + " (" + cmp.Or(p.Address, "?") + ")" }

// Restored tells what Restore found.
type Restored struct {
	Name string // of the netdev in the host's namespace now; "" for a Function without one
	// a sentence for each property that is not as it was, and that the next owner may find so
	Notes []string
}

var (
	// ErrNoNetdev says that the host's namespace has no such netdev.
	ErrNoNetdev = errors.New("no netdev in the host's network namespace")
	// ErrNameTaken says that the pod has an interface with the wanted name already.
	ErrNameTaken = errors.New("is taken in the pod")
	// ErrGone says that there is nothing to restore: the netdev ended with its namespace, or its
	// driver was unbound.
	ErrGone = errors.New("netdev is gone")
	// ErrAway says that the pod's namespace lives, but the netdev is neither there nor on the host:
	// the pod moved it on. The netdev comes back when the namespace that it is in ends.
	ErrAway = errors.New("netdev is neither in the pod nor on the host")
	// ErrLeaks says that what the last owner left may reach the next one, and that trying again at
	// once does not help.
	ErrLeaks = errors.New("may reach the next owner")
)

// macOf keeps an address of zeros, which drivers report as the administrative MAC of a VF that has
// none.
func macOf(address net.HardwareAddr) function.MAC { return function.MAC(address.String()) }
