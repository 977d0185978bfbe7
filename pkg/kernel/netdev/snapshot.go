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
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// Snapshot describes a netdev on the host: every property that an attachment or the pod may change,
// and the identity by which the netdev is found after a rename. Snapshots are compared with [Diff].
type Snapshot struct {
	// Name is the name on the host, or "" for a Function without a netdev.
	Name     string       `json:"name"`
	AltNames []string     `json:"altNames,omitempty"` // sorted
	Alias    string       `json:"alias,omitempty"`
	MTU      int          `json:"mtu"`
	MAC      function.MAC `json:"mac,omitempty"`
	TxQLen   int          `json:"txQLen,omitempty"` // packets

	// These flags are set by the administrator (IFF_* of include/uapi/linux/if.h).
	Up           bool `json:"up,omitempty"`
	NoARP        bool `json:"noARP,omitempty"`
	Promiscuous  bool `json:"promiscuous,omitempty"`
	AllMulticast bool `json:"allMulticast,omitempty"`

	// VF is what the PF enforces. It is nil if there is no PF, or if the PF does not report the VF.
	VF *VFState `json:"vf,omitempty"`
	// Rate is what the eswitch enforces instead of the rates in VF. It is nil if the eswitch does
	// not limit the Function, or was not asked.
	Rate *function.Rate `json:"rate,omitempty"`
	// Sets says which properties in VF the attachment changes. It is nil in a snapshot of an older
	// agent, and then stands for all of them.
	Sets *Sets `json:"sets,omitempty"`

	// Carried and Conf are nil in a snapshot of an older agent, and for a Function without a
	// netdev.
	Carried *Carried `json:"carried,omitempty"`
	Conf    *Conf    `json:"conf,omitempty"`
	// Settings are read on the host only. They are nil in a snapshot of an older agent, and for a
	// Function without a netdev.
	Settings Settings `json:"settings,omitempty"`
	// WritesTable says that the attachment may write the RSS table. The kernel keeps in mind that a
	// table was configured (IFF_RXFH_CONFIGURED), and does not report it. A table that is as before
	// may therefore be another one for the next change of the channels.
	WritesTable bool `json:"writesTable,omitempty"`
	// RDMA has the RDMA devices that the attachment moves. It is nil if it moves none.
	RDMA *RDMA `json:"rdma,omitempty"`

	Identity Identity `json:"identity"`
}

// Sets says whether the attachment changes the MAC, the rates and the GUIDs in VF. Drivers may
// change these properties by themselves: a driver may report the MAC that the VF gave itself, or the
// speed of the link as the rate of the VF. Only properties that the attachment changed are written
// back.
type Sets struct {
	MAC  bool `json:"mac,omitempty"`
	Rate bool `json:"rate,omitempty"`
	GUID bool `json:"guid,omitempty"` // either of them
}

// Carried holds further properties that a netdev keeps when it moves. A pod with CAP_NET_ADMIN can
// change all of them.
type Carried struct {
	Group uint32 `json:"group,omitempty"` // IFLA_GROUP
	// These are the limits of segmentation and receive offloads, in bytes and, for GSOMaxSegs, in
	// segments. The limits for IPv4 are 0 before Linux 6.3, which does not report them.
	GSOMaxSize     uint32       `json:"gsoMaxSize,omitempty"`
	GSOMaxSegs     uint32       `json:"gsoMaxSegs,omitempty"`
	GROMaxSize     uint32       `json:"groMaxSize,omitempty"`
	GSOIPv4MaxSize uint32       `json:"gsoIPv4MaxSize,omitempty"`
	GROIPv4MaxSize uint32       `json:"groIPv4MaxSize,omitempty"`
	Multicast      bool         `json:"multicast,omitempty"` // IFF_MULTICAST
	LinkMode       uint8        `json:"linkMode,omitempty"`  // IF_LINK_MODE_DORMANT (1), or 0
	Broadcast      function.MAC `json:"broadcast,omitempty"`
	// XDP is the id of the XDP program, "0" for several programs, or "" for none. A netdev with a
	// program on the host is not attached.
	XDP string `json:"xdp,omitempty"`
	// ProtoDown is nil in a snapshot of an older agent.
	ProtoDown *ProtoDown `json:"protoDown,omitempty"`
}

// Identity identifies a netdev among all others. Index and Peer are valid in the host's namespace.
type Identity struct {
	// Index is the ifindex on the host. It mostly survives a move to another namespace and back.
	Index int    `json:"index"`
	Kind  string `json:"kind"` // the kernel's link kind, or "device" for hardware
	// Parent is the name of the device on its bus (IFLA_PARENT_DEV_NAME), a PCI address for a VF.
	// It is "" for a virtual netdev.
	Parent string `json:"parent,omitempty"`
	Bus    string `json:"bus,omitempty"` // "pci" or "auxiliary"
	// Permanent is the hardware's own address, or "" if it has none.
	Permanent function.MAC `json:"permanent,omitempty"`
	// Peer is the ifindex of the other end of a veth. PeerNS is the id that the host has for the
	// namespace of this end, or -1 for the host's own namespace.
	Peer   int `json:"peer,omitempty"`
	PeerNS int `json:"peerNS,omitempty"`
}

// IsHardware reports whether the netdev belongs to a device on a bus. When a namespace ends, the
// kernel moves such a netdev to the host, and deletes all others.
func (i Identity) IsHardware() bool { return i.Parent != "" }

// certain reports whether the identity alone is enough to find the netdev among others.
func (i Identity) certain() bool {
	return i.Parent != "" || i.Permanent != "" || i.Kind == "veth" && i.Peer != 0
}

// same reports whether other, seen in any namespace, can be the same netdev.
func (i Identity) same(other Identity) bool {
	return i.Kind == other.Kind && i.Parent == other.Parent &&
		(i.Parent != "" || i.Permanent == other.Permanent && i.Peer == other.Peer)
}

// sameOnHost reports whether other, seen in the host's namespace, can be the same netdev. It also
// compares PeerNS, which is valid only there.
func (i Identity) sameOnHost(other Identity) bool {
	return i.same(other) && i.PeerNS == other.PeerNS
}

// userspace reports whether the snapshot describes a Function without a netdev.
func (s Snapshot) userspace() bool { return s.Name == "" }

// sets returns which properties the attachment changes.
func (s Snapshot) sets() Sets {
	if s.Sets == nil {
		return Sets{MAC: true, Rate: true, GUID: true}
	}
	return *s.Sets
}

// title returns the name of the Function for messages.
func (s Snapshot) title() string {
	if s.userspace() {
		return "Function without a netdev"
	}
	return "netdev " + s.Name
}

// enforcing returns s with what the PF and the eswitch must enforce for the pod.
func (s Snapshot) enforcing(want function.Interface) Snapshot {
	if s.VF != nil {
		vf := s.VF.with(want.VF, want.MAC)
		if s.Rate != nil { // the eswitch enforces the rate instead of the PF
			vf.MinTxRate, vf.MaxTxRate = s.VF.MinTxRate, s.VF.MaxTxRate
		}
		s.VF = &vf
	}

	if s.Rate != nil {
		s.Rate = new(want.VF.Rate(*s.Rate))
	}

	return s
}

// giveBack returns what a PF must enforce for a VF after the attachment. now is what it enforces at
// present. Properties that the attachment did not set, and that drivers change, keep their present
// values. For a Function without a netdev, the MAC is always restored, because the program of the
// pod may have changed it.
func (s Snapshot) giveBack(now VFState) VFState {
	to := *s.VF
	if !s.sets().MAC && !s.userspace() {
		to.MAC = now.MAC
	}
	if !s.sets().Rate {
		to.MinTxRate, to.MaxTxRate = now.MinTxRate, now.MaxTxRate
	}
	if !s.sets().GUID {
		to.NodeGUID, to.PortGUID = now.NodeGUID, now.PortGUID
	}
	return to
}

// administrativeMAC returns the MAC that the PF enforces for the VF if the netdev does not have
// this MAC yet, or "".
func (s Snapshot) administrativeMAC() function.MAC {
	if s.VF == nil || s.VF.MAC == s.MAC || len(s.VF.MAC) != len(s.MAC) || isZero(s.VF.MAC) {
		return ""
	}
	return s.VF.MAC
}

// Renewed returns s for a new netdev that the driver has made in place of the old one. now is a
// snapshot of the new netdev.
func (s Snapshot) Renewed(now Snapshot) Snapshot {
	s.Identity = now.Identity
	switch {
	case s.VF == nil:
		s.VF, s.Sets = now.VF, now.Sets
	case s.Sets != nil && now.Sets != nil:
		s.Sets = &Sets{
			MAC: s.Sets.MAC || now.Sets.MAC, Rate: s.Sets.Rate || now.Sets.Rate,
			GUID: s.Sets.GUID || now.Sets.GUID,
		}
	}

	s.Rate = cmp.Or(s.Rate, now.Rate)
	s.RDMA = s.RDMA.renewed(now.RDMA)
	return s
}

// VFChanges returns a sentence for each change of the PF for a pod that wants this interface, as
// [Diff] does.
func (s Snapshot) VFChanges(want function.Interface) []string {
	return Diff(Snapshot{VF: s.VF}, Snapshot{VF: s.enforcing(want).VF})
}

// WithoutNetdev returns the part of the snapshot that must be restored even if the netdev is gone:
// what the PF and the eswitch enforced, and the RDMA devices.
func (s Snapshot) WithoutNetdev() Snapshot {
	return Snapshot{VF: s.VF, Rate: s.Rate, Sets: s.Sets, RDMA: s.RDMA}
}

// flags returns the IFF_* flags of include/uapi/linux/if.h that are set in the snapshot, and the
// mask of the flags that the snapshot contains.
func (s Snapshot) flags() (flags, mask uint32) {
	for _, p := range s.properties() {
		mask |= p.flag
		if p.value == true {
			flags |= p.flag
		}
	}
	return flags, mask
}

// snapshotOf returns the snapshot of a netdev. attrs holds the attributes that the netlink library
// does not read.
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

// compare lists the properties that differ, with their current values.
func compare(before, now Snapshot) []property {
	before, now = withoutEqual(before, now)
	before.MAC = before.MAC.At(now.MAC)
	values := map[string]any{}
	for _, p := range now.properties() {
		values[p.name] = p.value
	}

	var list []property
	for _, p := range before.properties() {
		value, known := values[p.name]
		unknown := !known && (p.group != "" || p.told && now.VF != nil)
		if known && value != p.value || unknown {
			p.now = value
			list = append(list, p)
		}
	}

	return list
}

// withoutEqual returns both snapshots without the sysctls and groups of settings that are equal,
// because most of a snapshot consists of these, and they seldom differ.
func withoutEqual(a, b Snapshot) (Snapshot, Snapshot) {
	if a.Conf != nil && b.Conf != nil && a.Conf.equal(*b.Conf) {
		a.Conf, b.Conf = nil, nil
	}
	a.Settings, b.Settings = a.Settings.unlike(b.Settings), b.Settings.unlike(a.Settings)
	return a, b
}

// Diff returns a sentence for each property that differs, in a stable order: "mtu is 1400, was
// 1500". It compares neither the identity nor properties that are in only one of the snapshots.
func Diff(before, now Snapshot) []string {
	var texts []string
	for _, d := range compare(before, now) {
		texts = append(texts, d.String())
	}
	return texts
}

// Observed describes a netdev in a pod after its configuration.
type Observed struct {
	Name      string         `json:"name"`
	MAC       function.MAC   `json:"mac,omitempty"`
	MTU       int            `json:"mtu"`
	Addresses []netip.Prefix `json:"addresses,omitempty"`
	Index     int            `json:"index"`
	// Bond is the name of the bond that the netdev is a port of, and that has Addresses; "" without
	// one.
	Bond string `json:"bond,omitempty"`
}

// Carrier returns the name of the netdev that has the addresses.
func (o Observed) Carrier() string { return cmp.Or(o.Bond, o.Name) }

// Place is the position of a netdev in a pod. It is known before the netdev is moved.
type Place struct {
	NetNS string `json:"netns"` // path of the namespace's file
	// Cookie is SO_NETNS_COOKIE of the namespace. It is unique until the next boot, while the path
	// may refer to another namespace later.
	Cookie uint64 `json:"cookie"`
	Index  int    `json:"index"` // ifindex that the netdev gets there (IFLA_NEW_IFINDEX)
	// Remains is what the kernel would leave in the namespace when the netdev leaves. It is nil if
	// that is nothing.
	Remains *Remains `json:"remains,omitempty"`
}

// Device is the host's side of a netdev.
type Device struct {
	// Name is the name of the netdev in the host's namespace. It is "" if the name is not known or
	// the netdev is not there.
	Name string
	// PF enforces the properties of the VF. It is nil if the Function is not a VF, or if the PF has
	// no netdev.
	PF *PF
	// Port is the Function's port at the eswitch. The eswitch is asked only if the pod wants a
	// rate. Port is nil for a PF.
	Port *function.EswitchPort
	// RDMA names the RDMA devices that go to the pod too. It is nil if none do.
	RDMA *RDMANames
	// Rebinding allows [Engine.Restore] to bind the driver of a hardware netdev again, if a pod
	// left netdevs on top of it that cannot be found. If Rebinding is nil, Restore never unbinds a
	// driver.
	Rebinding *Rebinding
}

// as returns the device without the PF or the port if the snapshot lacks what they enforce, because
// the attachment did not change it.
func (d Device) as(before Snapshot) Device {
	if before.VF == nil {
		d.PF = nil
	}
	if before.Rate == nil {
		d.Port = nil
	}
	return d
}

// PF names the PF that enforces the properties of a VF.
type PF struct {
	Name    string // of the PF's netdev in the host's namespace
	Address string // PCI address of the PF, which must own the netdev; "" if it is not known
	VF      int    // index of the VF, from 0
}

// String names the PF for messages, as in "ens1f0 (0000:3b:00.0)".
func (p PF) String() string { return cmp.Or(p.Name, "?") + " (" + cmp.Or(p.Address, "?") + ")" }

// Restored is the result of [Engine.Restore].
type Restored struct {
	Name string // of the netdev in the host's namespace now; "" for a Function without a netdev
	// Notes has a sentence for each property that was not restored and that the next owner may see,
	// and for what stays in the pod.
	Notes []string
}

var (
	// ErrNoNetdev says that the host's namespace has no such netdev.
	ErrNoNetdev = errors.New("no netdev in the host's network namespace")
	// ErrNameTaken says that the pod already has an interface with the wanted name.
	ErrNameTaken = errors.New("is taken in the pod")
	// ErrGone says that there is no netdev to restore, because it ended with its namespace, or
	// because its driver was unbound.
	ErrGone = errors.New("netdev is gone")
	// ErrAway says that the netdev is neither on the host nor in the pod's namespace, which still
	// exists. The pod has moved the netdev to another namespace. The netdev returns when this
	// namespace ends.
	ErrAway = errors.New("netdev is neither in the pod nor on the host")
	// ErrLeaks says that something of the previous owner may reach the next owner, and that an
	// immediate retry does not help.
	ErrLeaks = errors.New("may reach the next owner")
)

// macOf returns an address as text. It keeps an address of zeros, which drivers report as the
// administrative MAC of a VF if no MAC was set.
func macOf(address net.HardwareAddr) function.MAC { return function.MAC(address.String()) }
