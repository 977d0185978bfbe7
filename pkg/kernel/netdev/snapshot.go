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
)

// Snapshot is what a netdev was on the host: every property that an attachment, or the pod itself, may change, and
// what tells the netdev from every other one after a rename. It is comparable only by [Diff].
type Snapshot struct {
	// Name on the host; "" for a Function without a netdev, of which only VF is known.
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

	// VF is what the PF enforces, nil where there is no PF to ask or it does not tell.
	VF *VFState `json:"vf,omitempty"`
	// Rate is what the eswitch enforces; nil where it does not limit the Function, or was not asked. The rates in VF mean
	// nothing where it does.
	Rate *function.Rate `json:"rate,omitempty"`

	// Carried is what the kernel carries along with the netdev, and Conf what it forgets when it is moved. Both are nil in
	// a snapshot of an older agent, and of a Function without a netdev.
	Carried *Carried `json:"carried,omitempty"`
	Conf    *Conf    `json:"conf,omitempty"`

	Identity Identity `json:"identity"`
}

// Carried is what the kernel carries along with a netdev from one network namespace to the next, beside what a
// [Snapshot] has by itself. A pod with CAP_NET_ADMIN can change all of it.
type Carried struct {
	// Group is the number by which netdevs are changed together (IFLA_GROUP).
	Group uint32 `json:"group,omitempty"`
	// GSOMaxSize to GROIPv4MaxSize bound what the stack puts together, in bytes, and GSOMaxSegs in segments. They are 0
	// where the kernel does not tell: those of IPv4 before Linux 6.3.
	GSOMaxSize     uint32 `json:"gsoMaxSize,omitempty"`
	GSOMaxSegs     uint32 `json:"gsoMaxSegs,omitempty"`
	GROMaxSize     uint32 `json:"groMaxSize,omitempty"`
	GSOIPv4MaxSize uint32 `json:"gsoIPv4MaxSize,omitempty"`
	GROIPv4MaxSize uint32 `json:"groIPv4MaxSize,omitempty"`
	// Multicast is IFF_MULTICAST.
	Multicast bool `json:"multicast,omitempty"`
	// LinkMode is 1 for a netdev that stays dormant when it has a carrier (IF_LINK_MODE_DORMANT), else 0.
	LinkMode uint8 `json:"linkMode,omitempty"`
	// Broadcast is the address that frames to all have.
	Broadcast function.MAC `json:"broadcast,omitempty"`
	// XDP says that a program looks at every frame before the stack does. It is never set in a snapshot of the host's: a
	// netdev with one is not taken.
	XDP *XDP `json:"xdp,omitempty"`
}

// XDP is a program of the express data path.
type XDP struct {
	// Mode is an XDP_ATTACHED_* of linux/if_link.h.
	Mode uint32 `json:"mode"`
	// Program is the kernel's number of the program.
	Program uint32 `json:"program"`
}

// String is "none" or the program's number.
func (x *XDP) String() string {
	if x == nil {
		return "none"
	}
	return fmt.Sprint(x.Program)
}

// Identity tells a netdev from every other one. Index and Peer are of the host's namespace.
type Identity struct {
	// Index (ifindex) on the host. It mostly survives a move to another namespace and back, but need not.
	Index int `json:"index"`
	// Kind is the kernel's link kind, "device" for hardware.
	Kind string `json:"kind"`
	// Parent is the name of the device on its bus (IFLA_PARENT_DEV_NAME), a PCI address for a VF. It is the same in
	// every namespace. Kernels before 5.14 do not tell.
	Parent string `json:"parent,omitempty"`
	// Bus is the bus that Parent is a name on, "pci" or "auxiliary".
	Bus string `json:"bus,omitempty"`
	// Permanent is the address that the hardware was made with, where it has one.
	Permanent function.MAC `json:"permanent,omitempty"`
	// Peer is the ifindex of a veth's other end, and PeerNS the id that the host's namespace has for the one that the
	// other end is in, -1 for the host's own.
	Peer   int `json:"peer,omitempty"`
	PeerNS int `json:"peerNS,omitempty"`
}

// IsHardware says that the netdev is a device's on a bus. It survives the namespace it is in: the kernel brings it back
// to the host. A virtual one ends with its namespace.
func (i Identity) IsHardware() bool { return i.Parent != "" }

// certain says whether the identity alone is enough to find the netdev among others.
func (i Identity) certain() bool {
	return i.Parent != "" || i.Permanent != "" || i.Kind == "veth" && i.Peer != 0
}

// same says whether other, seen in any namespace, can be the same netdev.
func (i Identity) same(other Identity) bool {
	if i.Kind != other.Kind || i.Parent != other.Parent {
		return false
	}
	if i.Parent != "" {
		return true
	}
	return i.Permanent == other.Permanent && i.Peer == other.Peer
}

// sameOnHost also compares what means something in the host's namespace only.
func (i Identity) sameOnHost(other Identity) bool { return i.same(other) && i.PeerNS == other.PeerNS }

// userspace says that the snapshot is one of a Function without a netdev.
func (s Snapshot) userspace() bool { return s.Name == "" }

// title is for messages.
func (s Snapshot) title() string {
	if s.userspace() {
		return "Function without a netdev"
	}
	return "netdev " + s.Name
}

// enforcing is s with what the PF and the eswitch shall enforce for the pod.
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

// Renewed is s of a netdev that its driver has made anew since, and that is now as the other snapshot says.
func (s Snapshot) Renewed(now Snapshot) Snapshot {
	s.Identity = now.Identity
	s.VF = cmp.Or(s.VF, now.VF)
	s.Rate = cmp.Or(s.Rate, now.Rate)
	return s
}

// VFChanges says in words what a PF enforces for a pod with these wishes that it did not before, in a stable order:
// `vf trust is "on", was "off"`.
func (s Snapshot) VFChanges(want function.Interface) []string {
	return Diff(Snapshot{VF: s.VF}, Snapshot{VF: s.enforcing(want).VF})
}

// WithoutNetdev is what there is to restore when the netdev is gone: what the PF and the eswitch enforced.
func (s Snapshot) WithoutNetdev() Snapshot { return Snapshot{VF: s.VF, Rate: s.Rate} }

// flags are the IFF_* of linux/if.h that an administrator sets and that the snapshot knows. IFF_PROMISC and IFF_ALLMULTI
// as rtnetlink tells them are those set on request, not those that a bridge or a packet socket needs.
func (s Snapshot) flags() (flags, mask uint32) {
	add := func(set bool, flag uint32) {
		mask |= flag
		if set {
			flags |= flag
		}
	}
	add(s.Up, unix.IFF_UP)
	add(s.NoARP, unix.IFF_NOARP)
	add(s.Promiscuous, unix.IFF_PROMISC)
	add(s.AllMulticast, unix.IFF_ALLMULTI)
	if s.Carried != nil {
		add(s.Carried.Multicast, unix.IFF_MULTICAST)
	}
	return flags, mask
}

func snapshotOf(l *link) Snapshot {
	a := l.Attrs()
	return Snapshot{
		Name: a.Name, AltNames: slices.Sorted(slices.Values(a.AltNames)), Alias: a.Alias, MTU: a.MTU, MAC: macOf(a.HardwareAddr),
		TxQLen: max(a.TxQLen, 0),
		Up:     a.RawFlags&unix.IFF_UP != 0, NoARP: a.RawFlags&unix.IFF_NOARP != 0,
		Promiscuous: a.RawFlags&unix.IFF_PROMISC != 0, AllMulticast: a.RawFlags&unix.IFF_ALLMULTI != 0,
		Carried: carriedOf(l), Conf: &l.conf, Identity: identityOf(l),
	}
}

func identityOf(l netlink.Link) Identity {
	a := l.Attrs()
	return Identity{
		Index: a.Index, Kind: l.Type(), Parent: a.ParentDev, Bus: a.ParentDevBus, Permanent: macOf(a.PermHWAddr),
		Peer: a.ParentIndex, PeerNS: a.NetNsID,
	}
}

func carriedOf(l *link) *Carried {
	a := l.Attrs()
	c := &Carried{
		Group: a.Group, GSOMaxSize: a.GSOMaxSize, GSOMaxSegs: a.GSOMaxSegs, GROMaxSize: a.GROMaxSize,
		GSOIPv4MaxSize: a.GSOIPv4MaxSize, GROIPv4MaxSize: a.GROIPv4MaxSize,
		Multicast: a.RawFlags&unix.IFF_MULTICAST != 0, LinkMode: l.linkMode, Broadcast: l.broadcast,
	}
	if a.Xdp != nil && a.Xdp.Attached {
		c.XDP = &XDP{Mode: a.Xdp.AttachMode, Program: a.Xdp.ProgId}
	}
	return c
}

// property is one thing of a netdev that an attachment, or the pod itself, may change.
type property struct {
	name  string
	value any // comparable
	// attribute gives a netdev the property by RTM_NEWLINK. conf6 is the name of the sysctl of IPv6 that does. What has
	// neither, [Engine.undo] restores in a way of its own.
	attribute *nl.RtAttr
	conf6     string
}

// properties are those that the snapshot knows, in the order in which they are told and restored. Of the sizes the IPv4
// ones come last: the kernel sets them along with the others.
func (s Snapshot) properties() []property {
	var list []property
	add := func(name string, value any, attribute *nl.RtAttr) {
		list = append(list, property{name: name, value: value, attribute: attribute})
	}
	add("name", s.Name, text(unix.IFLA_IFNAME, s.Name))
	add("altnames", fmt.Sprintf("%q", s.AltNames), nil)
	add("alias", s.Alias, text(unix.IFLA_IFALIAS, s.Alias)) // a zero byte alone takes the alias away
	add("mtu", s.MTU, number(unix.IFLA_MTU, s.MTU))
	add("mac", s.MAC, hardwareAddr(unix.IFLA_ADDRESS, s.MAC))
	add("txqlen", s.TxQLen, number(unix.IFLA_TXQLEN, s.TxQLen))
	add("up", s.Up, nil)
	add("noarp", s.NoARP, nil)
	add("promiscuous", s.Promiscuous, nil)
	add("allmulticast", s.AllMulticast, nil)
	if v := s.VF; v != nil {
		add("vf mac", v.MAC, nil)
		add("vf vlan", v.tag().String(), nil)
		add("vf min_tx_rate", v.MinTxRate, nil)
		add("vf max_tx_rate", v.MaxTxRate, nil)
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
		if c.GSOIPv4MaxSize != 0 { // which kernels before 6.3 do not tell
			add("gso_ipv4_max_size", c.GSOIPv4MaxSize, number(unix.IFLA_GSO_IPV4_MAX_SIZE, c.GSOIPv4MaxSize))
			add("gro_ipv4_max_size", c.GROIPv4MaxSize, number(unix.IFLA_GRO_IPV4_MAX_SIZE, c.GROIPv4MaxSize))
		}
		add("multicast", c.Multicast, nil)
		add("link mode", c.LinkMode, nl.NewRtAttr(unix.IFLA_LINKMODE, []byte{c.LinkMode}))
		add("broadcast", c.Broadcast, hardwareAddr(unix.IFLA_BROADCAST, c.Broadcast))
		add("XDP program", c.XDP.String(), nil)
	}
	if s.Conf != nil {
		list = append(list, s.Conf.properties()...)
	}
	return list
}

// difference is a property, and what it is now instead.
type difference struct {
	property
	now any
}

func (d difference) String() string {
	if d.name == "altnames" {
		return fmt.Sprintf("altnames are %s, were %s", d.now, d.value)
	}
	return fmt.Sprintf("%s is %v, was %v", d.name, quoted(d.now), quoted(d.value))
}

func quoted(v any) any {
	if s, ok := v.(string); ok {
		return fmt.Sprintf("%q", s)
	}
	return v
}

// compare lists the properties of before that are other ones now. What only one of the snapshots knows is not compared,
// nor is the identity.
func compare(before, now Snapshot) []difference {
	values := map[string]any{}
	for _, p := range now.properties() {
		values[p.name] = p.value
	}
	var list []difference
	for _, p := range before.properties() {
		if value, known := values[p.name]; known && value != p.value {
			list = append(list, difference{p, value})
		}
	}
	return list
}

// Diff lists the properties that now differ from before, in a stable order and in words: "mtu is 1400, was 1500". The
// index is not compared, nor is what only one of the snapshots knows about the VF or its rate.
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
	// NetNS is the path of the namespace's file.
	NetNS string `json:"netns"`
	// Cookie is the kernel's number of the namespace (SO_NETNS_COOKIE, Linux 5.14), never given twice until the next
	// boot: a path can come to mean another namespace, the cookie cannot.
	Cookie uint64 `json:"cookie"`
	// Index is the ifindex that the netdev gets there (IFLA_NEW_IFINDEX).
	Index int `json:"index"`
}

// Device is the host's side of a netdev.
type Device struct {
	// Name of the netdev in the host's namespace; "" where it is not known or not there.
	Name string
	// PF is asked for the VF's properties; nil where the netdev is no VF's or the PF has no netdev.
	PF *PF
	// Port is whose rate the eswitch limits, if it has a rate object for it; nil for a PF. It is asked only where the pod
	// wishes a rate.
	Port *function.EswitchPort
}

// as is the device with what is known of it from before only: nothing else was changed.
func (d Device) as(before Snapshot) Device {
	if before.VF == nil {
		d.PF = nil
	}
	if before.Rate == nil {
		d.Port = nil
	}
	return d
}

// PF is the way to the properties that a PF enforces for a VF.
type PF struct {
	// Name is the PF's netdev in the host's namespace.
	Name string
	// Address of the PF, for messages only.
	Address string
	// VF is the index of the VF, from 0.
	VF int
}

func (p PF) String() string { return cmp.Or(p.Name, "?") + " (" + cmp.Or(p.Address, "?") + ")" }

// Restored tells what Restore found.
type Restored struct {
	// Name of the netdev in the host's namespace now; "" for a Function without one.
	Name string
	// Notes are what could not be as it was, because another netdev has the name by now. None in a healthy system.
	Notes []string
}

var (
	// ErrNoNetdev is returned where the host's namespace has no such netdev.
	ErrNoNetdev = errors.New("no netdev in the host's network namespace")
	// ErrNameTaken is returned where the pod has an interface of the wanted name already.
	ErrNameTaken = errors.New("is taken in the pod")
	// ErrGone is returned where a netdev exists no more: its namespace is gone and it did not come back, as a veth's
	// end does not, or its driver was unbound. There is nothing to restore.
	ErrGone = errors.New("netdev is gone")
	// ErrAway is returned where the pod's namespace lives, but the netdev is neither there nor on the host: the pod
	// moved it on. It comes back when the namespace it is in ends.
	ErrAway = errors.New("netdev is neither in the pod nor on the host")
)

// macOf is the canonical form of an address from the kernel. An address of zeros only is one: drivers report it as
// the administrative MAC of a VF that has none.
func macOf(address net.HardwareAddr) function.MAC { return function.MAC(address.String()) }
