// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// Property is a property of a Function or of its interface in the pod that an attachment or the pod
// can change. [Properties] lists all of them: what an attachment sets, what a release restores and
// compares, and what the documents say.
type Property struct {
	// Name names the property in messages, notes and documents. A name that ends with a space is
	// the beginning of the names of several properties.
	Name string
	// Title stands for Name in documents, in Markdown. It is "" if the name is clear enough.
	Title  string
	Source Source
	// Fields are the fields of an InterfaceConfig that set the property, such as "vf.vlan". It is
	// empty if only the pod itself can change the property.
	Fields []string
	Move   Move
	// Check says how CNI's CHECK compares what a pod asked for, or why it does not. It is "" if CHECK
	// compares it with what the attachment set.
	Check string
	// Release says what a release does with the property, if it does not restore the old value.
	Release string
	// Leftovers say what it means for the next owner if the old value cannot be restored. The first
	// one that applies counts. A property without leftovers ends with the pod.
	Leftovers []Leftover

	// check returns a sentence for each difference between what a pod asked for and what it has. The
	// link is the interface, and for a property of the pod's namespace its bond, if it has one. CHECK
	// compares what the PF and the eswitch enforce by value instead.
	check func(pod *conn, l *link, a Attached) ([]string, error)
	// value returns the value in a snapshot, and nil if the snapshot does not have it. It is nil for
	// a property that ends with the pod.
	value func(Snapshot) any
	// A property of the netdev is restored by an attribute or an IFF_* flag of RTM_NEWLINK. If it
	// has neither of them, [Engine.undo] knows how to restore it.
	attribute func(Snapshot) *nl.RtAttr
	flag      uint32
	// told is set if a PF that reports the VF without this property differs from one that reports it.
	// Without told, only values are compared.
	told bool
	// list returns all properties whose names begin with Name. It replaces value.
	list func(Snapshot) []property
}

// Source is the part of the system that has a property.
type Source string

// Sources of properties.
const (
	FromNetdev  Source = "netdev"          // rtnetlink
	FromPF      Source = "VF at its PF"    // IFLA_VF_* of rtnetlink
	FromEswitch Source = "eswitch"         // devlink-rate
	FromSysctl  Source = "sysctl"          // procfs, rtnetlink
	FromDriver  Source = "driver"          // ethtool
	FromSysfs   Source = "sysfs"           // /sys/class/net
	FromPod     Source = "pod's namespace" // rtnetlink and procfs in the namespace
	FromRDMA    Source = "RDMA device"     // NETLINK_RDMA
)

// Move is what the kernel does with a property when the netdev moves to another namespace.
type Move string

// What a move can do.
const (
	Kept  Move = "kept"  // the next owner would get the pod's value
	Reset Move = "reset" // to the defaults of the namespace, so that the host would miss its value
	Gone  Move = "gone"  // it ends with the netdev's stay in the pod
	Stays Move = "stays" // in the pod's namespace, although the netdev leaves
)

// Leftover says what the value that a property has after a failed restore means for the next owner.
type Leftover struct {
	// If completes the name in documents. It is "" for all values that no other Leftover covers.
	If string
	// Means says what the next owner notices.
	Means string
	// Leaks is set if the next owner could receive what belongs to the previous owner, or what the
	// host withheld from owners. The Function is then kept from others. Otherwise it is let go with
	// a note.
	Leaks bool

	when func(remains) bool // nil if it always applies
}

// Properties returns all properties in the order in which they are reported and restored. The
// caller must not change them.
func Properties() []Property { return table }

// Texts that several properties have in common.
const (
	performance  = "performance only"
	whetherSends = "whether and how it sends, and not what it sees"
	slower       = "it is slower or faster"
	itsIdentity  = "it has the last owner's identity in the InfiniBand fabric, and its partitions"
	byAddress    = "nothing: the Function is known by its PCI address"
	seesMore     = "it sees frames that are not for it"
	seesLess     = "it sees less than before"
	tuned        = "not compared: a plugin after this one may set another, such as `tuning`"
	ofPod        = "not compared: it is for the performance of the pod, which may try others"
	hostDefaults = "nothing: the kernel gave the netdev the host's defaults when it moved"
)

// noted lets the Function go with a note, whatever value stays.
func noted(means string) []Leftover { return []Leftover{{Means: means}} }

// table is what [Properties] returns. The sizes for IPv4 come after the general sizes, because the
// kernel changes both when a general size is set. The reason of proto_down comes before it, because
// a netdev with a reason stays down. IPv6 comes last, because it starts with its sysctls.
var table = []Property{
	{
		Name: "name", Source: FromNetdev, Fields: []string{"interfaceName"}, Move: Kept,
		Leftovers: noted(byAddress),
		value:     func(s Snapshot) any { return s.Name },
		check:     comparing("name", func(l *link, a Attached) (any, any) { return a.Want.Name, l.Name }),
		attribute: func(s Snapshot) *nl.RtAttr { return text(unix.IFLA_IFNAME, s.Name) },
	},
	{
		Name: "altnames", Source: FromNetdev, Move: Kept,
		Leftovers: []Leftover{
			{If: "that the pod gave", Means: "they stand in the way of the host's names", Leaks: true,
				when: remains.podAltNames},
			{If: "that are missing", Means: byAddress},
		},
		value: func(s Snapshot) any { return fmt.Sprintf("%q", s.AltNames) },
	},
	{
		Name: "alias", Source: FromNetdev, Move: Kept, Leftovers: noted(byAddress),
		value: func(s Snapshot) any { return s.Alias },
		// A zero byte alone removes the alias.
		attribute: func(s Snapshot) *nl.RtAttr { return text(unix.IFLA_IFALIAS, s.Alias) },
	},
	{
		Name: "mtu", Source: FromNetdev, Fields: []string{"mtu"}, Move: Kept,
		Check: tuned,
		Leftovers: noted("nothing: the next pod gets its own. If the driver's maximum is lower by " +
			"now, the netdev gets the maximum"),
		value:     func(s Snapshot) any { return s.MTU },
		attribute: func(s Snapshot) *nl.RtAttr { return number(unix.IFLA_MTU, s.MTU) },
	},
	{
		Name: "mac", Source: FromNetdev, Fields: []string{"mac"}, Move: Kept,
		Check: "compared with the last result of the chain, but for a port of a bond or a team, " +
			"which has its master's",
		check: otherMAC,
		Leftovers: []Leftover{
			{If: "that the PF gave the VF before the pod", Means: "it is not the pod's",
				when: remains.macOfPF},
			{Means: "the next owner has the last one's address", Leaks: true},
		},
		value:     func(s Snapshot) any { return s.MAC },
		attribute: func(s Snapshot) *nl.RtAttr { return hardwareAddr(unix.IFLA_ADDRESS, s.MAC) },
	},
	{
		Name: "txqlen", Source: FromNetdev, Move: Kept, Leftovers: noted(performance),
		value:     func(s Snapshot) any { return s.TxQLen },
		attribute: func(s Snapshot) *nl.RtAttr { return number(unix.IFLA_TXQLEN, s.TxQLen) },
	},
	{
		Name: "up", Source: FromNetdev, Move: Reset, Leftovers: noted(whetherSends),
		value: func(s Snapshot) any { return s.Up }, flag: unix.IFF_UP,
		check: comparing("up", func(l *link, _ Attached) (any, any) { return true, l.Up }),
	},
	{
		Name: "noarp", Source: FromNetdev, Move: Kept, Leftovers: noted(whetherSends),
		value: func(s Snapshot) any { return s.NoARP }, flag: unix.IFF_NOARP,
	},
	// rtnetlink reports the next two flags as the administrator requested them, without the requests
	// of bridges and packet sockets.
	{
		Name: "promiscuous", Source: FromNetdev, Move: Kept,
		Leftovers: openIf("on", "off", seesMore, seesLess,
			func(now Snapshot) bool { return now.Promiscuous }),
		value: func(s Snapshot) any { return s.Promiscuous }, flag: unix.IFF_PROMISC,
	},
	{
		Name: "allmulticast", Source: FromNetdev, Fields: []string{"allMulticast"}, Move: Kept,
		Check: tuned,
		Leftovers: openIf("on", "off", seesMore, seesLess,
			func(now Snapshot) bool { return now.AllMulticast }),
		value: func(s Snapshot) any { return s.AllMulticast }, flag: unix.IFF_ALLMULTI,
	},

	{
		Name: "vf mac", Source: FromPF, Fields: []string{"mac"}, Move: Kept,
		Leftovers: []Leftover{
			{If: "that is the netdev's own: a driver that tells zeros and refuses them gets it. " +
				"Without a netdev it is a locally administered one, always the same for a VF",
				Means: "it is not the pod's", when: remains.neutralVFMAC},
			{If: "that the attachment did not set, while the netdev has its own",
				Means: "it is an administrator's", when: remains.vfMACOfHost},
			{Means: "frames for the last owner reach the next one", Leaks: true},
		},
		value: ofVF(func(v VFState) any { return v.MAC }),
	},
	{
		Name: "vf vlan", Source: FromPF, Move: Kept,
		Fields:    []string{"vf.vlan", "vf.vlanProtocol", "vf.qos"},
		Leftovers: []Leftover{{Means: "it is in another network", Leaks: true}},
		value:     ofVF(func(v VFState) any { return v.tag() }),
	},
	{
		Name: "vf min_tx_rate", Source: FromPF, Fields: []string{"vf.minTxRate"}, Move: Kept,
		Leftovers: noted(slower),
		value:     ratesOfVF(func(v VFState) any { return v.MinTxRate }),
	},
	{
		Name: "vf max_tx_rate", Source: FromPF, Fields: []string{"vf.maxTxRate"}, Move: Kept,
		Leftovers: noted(slower),
		value:     ratesOfVF(func(v VFState) any { return v.MaxTxRate }),
	},
	{
		Name: "vf spoofchk", Source: FromPF, Fields: []string{"vf.spoofCheck"}, Move: Kept,
		Leftovers: openIf("off, or unknown", "on", "it may do what the host did not allow",
			"it may do less than before",
			func(now Snapshot) bool { return onOff(now.VF.SpoofCheck) != "on" }),
		value: ofVF(func(v VFState) any { return onOff(v.SpoofCheck) }),
	},
	{
		Name: "vf trust", Source: FromPF, Fields: []string{"vf.trust"}, Move: Kept,
		Leftovers: openIf("on, or unknown", "off", "it may do what the host did not allow",
			"it may do less than before",
			func(now Snapshot) bool { return onOff(now.VF.Trust) != "off" }),
		value: ofVF(func(v VFState) any { return onOff(v.Trust) }),
	},
	{
		Name: "vf link-state", Source: FromPF, Fields: []string{"vf.linkState"}, Move: Kept,
		Leftovers: noted("it has a link or not"),
		value:     ofVF(func(v VFState) any { return v.LinkState }),
	},
	{
		Name: "vf node_guid", Source: FromPF, Fields: []string{"vf.nodeGUID"}, Move: Kept,
		Leftovers: []Leftover{{Means: itsIdentity, Leaks: true}}, told: true,
		value: guidsOfVF(func(v VFState) function.GUID { return v.NodeGUID }),
	},
	{
		Name: "vf port_guid", Source: FromPF, Fields: []string{"vf.portGUID"}, Move: Kept,
		Leftovers: []Leftover{{Means: itsIdentity, Leaks: true}}, told: true,
		value: guidsOfVF(func(v VFState) function.GUID { return v.PortGUID }),
	},
	{
		Name: "eswitch min_tx_rate", Source: FromEswitch, Fields: []string{"vf.minTxRate"},
		Move: Kept, Leftovers: noted(slower),
		value: ofRate(func(r function.Rate) any { return r.Min }),
	},
	{
		Name: "eswitch max_tx_rate", Source: FromEswitch, Fields: []string{"vf.maxTxRate"},
		Move: Kept, Leftovers: noted(slower),
		value: ofRate(func(r function.Rate) any { return r.Max }),
	},

	{
		Name: "group", Source: FromNetdev, Move: Kept, Leftovers: noted(byAddress),
		value: ofCarried(func(c Carried) any { return c.Group }),
		attribute: func(s Snapshot) *nl.RtAttr {
			return number(unix.IFLA_GROUP, s.Carried.Group)
		},
	},
	{
		Name: "gso_max_size", Source: FromNetdev, Fields: []string{"offload.gsoMaxSize"},
		Move: Kept, Check: ofPod,
		Leftovers: noted(performance),
		value:     ofCarried(func(c Carried) any { return c.GSOMaxSize }),
		attribute: func(s Snapshot) *nl.RtAttr {
			return number(unix.IFLA_GSO_MAX_SIZE, s.Carried.GSOMaxSize)
		},
	},
	{
		Name: "gso_max_segs", Source: FromNetdev, Move: Kept, Leftovers: noted(performance),
		value: ofCarried(func(c Carried) any { return c.GSOMaxSegs }),
		attribute: func(s Snapshot) *nl.RtAttr {
			return number(unix.IFLA_GSO_MAX_SEGS, s.Carried.GSOMaxSegs)
		},
	},
	{
		Name: "gro_max_size", Source: FromNetdev, Fields: []string{"offload.groMaxSize"},
		Move: Kept, Check: ofPod,
		Leftovers: noted(performance),
		value:     ofCarried(func(c Carried) any { return c.GROMaxSize }),
		attribute: func(s Snapshot) *nl.RtAttr {
			return number(unix.IFLA_GRO_MAX_SIZE, s.Carried.GROMaxSize)
		},
	},
	{
		Name: "gso_ipv4_max_size", Source: FromNetdev, Fields: []string{"offload.gsoIPv4MaxSize"},
		Move: Kept, Check: ofPod, Leftovers: noted(performance),
		value: sizeOfIPv4(func(c Carried) any { return c.GSOIPv4MaxSize }),
		attribute: func(s Snapshot) *nl.RtAttr {
			return number(unix.IFLA_GSO_IPV4_MAX_SIZE, s.Carried.GSOIPv4MaxSize)
		},
	},
	{
		Name: "gro_ipv4_max_size", Source: FromNetdev, Fields: []string{"offload.groIPv4MaxSize"},
		Move: Kept, Check: ofPod, Leftovers: noted(performance),
		value: sizeOfIPv4(func(c Carried) any { return c.GROIPv4MaxSize }),
		attribute: func(s Snapshot) *nl.RtAttr {
			return number(unix.IFLA_GRO_IPV4_MAX_SIZE, s.Carried.GROIPv4MaxSize)
		},
	},
	{
		Name: "multicast", Source: FromNetdev, Move: Kept, Leftovers: noted(whetherSends),
		value: ofCarried(func(c Carried) any { return c.Multicast }), flag: unix.IFF_MULTICAST,
	},
	{
		Name: "link mode", Source: FromNetdev, Move: Kept, Leftovers: noted(whetherSends),
		value: ofCarried(func(c Carried) any { return c.LinkMode }),
		attribute: func(s Snapshot) *nl.RtAttr {
			return nl.NewRtAttr(unix.IFLA_LINKMODE, []byte{s.Carried.LinkMode})
		},
	},
	{
		Name: "broadcast", Source: FromNetdev, Move: Kept, Leftovers: noted(whetherSends),
		value: ofCarried(func(c Carried) any { return c.Broadcast }),
		attribute: func(s Snapshot) *nl.RtAttr {
			return hardwareAddr(unix.IFLA_BROADCAST, s.Carried.Broadcast)
		},
	},
	{
		Name: "XDP program", Source: FromNetdev, Move: Kept,
		Release: "detached, also where a BPF link holds it. A netdev on which the host has a program " +
			"is not given to a pod",
		Leftovers: []Leftover{{Means: "the last owner's program sees its frames", Leaks: true}},
		value:     ofCarried(func(c Carried) any { return cmp.Or(c.XDP, "none") }),
	},
	{
		Name: "proto_down reason", Source: FromNetdev, Move: Kept,
		Leftovers: noted("nothing without `proto_down`"),
		value:     ofProtoDown(func(p ProtoDown) any { return p.Reason }),
		attribute: func(s Snapshot) *nl.RtAttr { return s.Carried.ProtoDown.reason() },
	},
	{
		Name: "proto_down", Source: FromNetdev, Move: Kept,
		Leftovers: openIf("on", "off", "it has no carrier", "it has a carrier",
			func(now Snapshot) bool { return now.Carried.ProtoDown.On }),
		value:     ofProtoDown(func(p ProtoDown) any { return p.On }),
		attribute: func(s Snapshot) *nl.RtAttr { return s.Carried.ProtoDown.state() },
	},

	{
		Name: "sysctl ", Title: "`net.ipv4.conf.<netdev>.*`", Source: FromSysctl,
		Fields: []string{"sysctls"}, Move: Reset, Check: tuned, Leftovers: noted(hostDefaults),
		list: func(s Snapshot) []property { return s.Conf.ipv4() },
	},
	{
		Name: "net.ipv6.conf ", Title: "`net.ipv6.conf.<netdev>.*`", Source: FromSysctl,
		Fields: []string{"sysctls"}, Move: Reset, Check: tuned,
		Release: "restored and read back before the netdev comes up, but for `mtu`, which follows the " +
			"netdev's, and `mc_forwarding`. Not restored if the agent cannot write `/proc/sys/net`",
		Leftovers: noted(hostDefaults + ". Such is `addr_gen_mode` 2 where the agent cannot write " +
			"the `stable_secret` that it needs"),
		list: func(s Snapshot) []property { return s.Conf.ipv6() },
	},

	settingRow("net.ipv4.neigh", "`net.ipv4.neigh.<netdev>.*`", FromSysctl, Reset, ""),
	settingRow("net.ipv6.neigh", "`net.ipv6.neigh.<netdev>.*`", FromSysctl, Reset, ""),
	settingRow("net.mpls.conf", "`net.mpls.conf.<netdev>.*`", FromSysctl, Reset, ""),
	settingRow("ethtool features", "wanted features", FromDriver, Kept,
		"", "ethtool.features"),
	settingRow("ethtool private flags", "private flags", FromDriver, Kept, "", "ethtool.privateFlags"),
	settingRow("ethtool channels", "channels", FromDriver, Kept, "", "ethtool.channels"),
	settingRow("ethtool rings", "rings", FromDriver, Kept, "", "ethtool.rings"),
	settingRow("ethtool coalescing", "coalescing", FromDriver, Kept, "", "ethtool.coalescing"),
	settingRow("ethtool pause", "pause", FromDriver, Kept, "", "ethtool.pause"),
	settingRow("ethtool messages", "message classes", FromDriver, Kept, ""),
	settingRow("ethtool RSS", "RSS (hash function, key, table)", FromDriver, Kept,
		"restored and read back, before Linux 6.17 by ioctl; noted where the driver cannot set it",
		"ethtool.rss"),
	settingRow("ethtool time stamps", "time stamps", FromDriver, Kept,
		"restored and read back since Linux 6.14, which can set it; noted before"),
	settingRow("sysfs", "`gro_flush_timeout`, `napi_defer_hard_irqs`, `threaded`", FromSysfs, Kept,
		""),
	settingRow("queues", "queues (`rps_cpus`, `rps_flow_cnt`, `xps_cpus`, `xps_rxqs`, "+
		"`tx_maxrate`, and of `byte_queue_limits`: `limit_max`, `limit_min`, `hold_time`)", FromSysfs,
		Kept, "restored and read back, for up to 1024 queues. Not restored if the sysfs of "+
			"`--sys-root` shows another network namespace than the agent's"),

	{
		Name: "tcx programs", Source: FromNetdev, Move: Kept,
		Release: "detached, also where a BPF link holds them. A netdev on which the host has one is " +
			"not given to a pod",
	},
	{
		Name: "VLANs, macvlans, ipvlans and macsecs that the pod made on top", Source: FromPod,
		Move: Kept,
		Release: "deleted in whatever namespace they are found, because they would use the netdev " +
			"from there. The agent [proves](../adr/0017-nothing-on-top.md) by the kernel's own list " +
			"that none is left; otherwise it binds the driver again, or the Function is kept from " +
			"the next owner",
	},
	{
		Name: "RDMA devices", Title: "RDMA devices, where the RDMA system is in mode exclusive",
		Source: FromRDMA, Move: Stays,
		Check: "compared: that they are in the pod",
		Release: "moved to the host before the netdev, from whatever namespace they are found in; " +
			"otherwise the Function is kept from the next owner. What `rdma statistic` sets stays",
	},
	{
		Name: rdmaName, Title: "name of an RDMA device", Source: FromRDMA, Move: Kept,
		Leftovers: noted(byAddress),
		list:      func(s Snapshot) []property { return s.RDMA.names() },
	},
	{
		Name: rdmaModeration, Title: "adaptive moderation of an RDMA device", Source: FromRDMA,
		Move: Kept, Leftovers: noted(performance),
		list: func(s Snapshot) []property { return s.RDMA.moderations() },
	},
	{
		Name: "addresses", Source: FromPod, Fields: []string{"addresses"}, Move: Gone,
		Check: "compared with the last result of the chain; more addresses are no difference",
		check: missingAddresses,
	},
	{
		Name: "routes", Source: FromPod, Fields: []string{"routes"}, Move: Gone,
		Check: "compared, in whatever table the route is now, because `sbr` moves routes; not " +
			"compared if a later plugin made the interface a port, as `vrf` and `bond` do: the " +
			"kernel drops its routes then, and nothing says which ones the plugin made again",
		check: missingRoutes,
	},
	{
		Name: "neighbors", Source: FromPod, Fields: []string{"neighbors"}, Move: Gone,
		Check: "compared, unless the MAC address of the interface has changed, with which the " +
			"kernel drops them",
		check: missingNeighbors,
	},
	{
		Name: "VLAN interfaces", Source: FromPod, Fields: []string{"networks"}, Move: Gone,
		Check: "compared: the tag, the netdev below, and that it is up; not the MTU and the " +
			"addresses",
		check: missingVLANs,
	},
	{
		Name: "rules", Source: FromPod, Fields: []string{"rules"}, Move: Stays,
		check:   missingRules,
		Release: "removed, because the kernel would leave them there",
	},
	{
		Name: "bond", Source: FromPod, Fields: []string{"bond"}, Move: Stays,
		Check: "compared: that the interface is its port, its options, and that it is up",
		check: missingPort,
		Release: "removed with its rules when its last interface leaves. The kernel gives the MTU and " +
			"the MAC address of before back to an interface that leaves",
	},
	{
		Name: "VRF", Source: FromPod, Fields: []string{"vrf"}, Move: Stays,
		Check: "compared: that the interface is in it, its table, and that it is up",
		check: missingVRF,
		Release: "removed when its last interface leaves. The rule of priority 1000 that came with the " +
			"pod's first VRF stays, because the kernel adds it once for a network namespace and each " +
			"later VRF needs it",
	},
}

// settingRow returns the row of a group of [Settings], all of which are harmless.
func settingRow(
	group, title string, source Source, move Move, release string, fields ...string,
) Property {
	p := Property{
		Name: group + " ", Title: title, Source: source, Fields: fields, Move: move,
		Release: release, Leftovers: noted(performance),
	}
	if source == FromSysctl {
		p.Leftovers = noted(hostDefaults)
	}
	if len(fields) > 0 {
		p.Check = ofPod
	}
	return p
}

// IsChecked reports whether CNI's CHECK compares what a pod asked for.
func (p Property) IsChecked() bool {
	return p.check != nil || p.Source == FromPF || p.Source == FromEswitch
}

// comparing returns the check of a property of an interface.
func comparing(
	name string, values func(l *link, a Attached) (want, now any),
) func(*conn, *link, Attached) ([]string, error) {
	return func(_ *conn, l *link, a Attached) ([]string, error) {
		want, now := values(l, a)
		if want == now {
			return nil, nil
		}
		return []string{property{name: name, value: want, now: now}.String()}, nil
	}
}

// isOfPort reports whether a port of a bond has the property, and not the bond.
func (p Property) isOfPort() bool {
	return p.Source == FromNetdev || slices.Contains(p.Fields, "bond")
}

// openIf returns the leftovers of a property that has one value which leaks.
func openIf(
	leaking, other, meansLeaking, meansOther string, isOpen func(now Snapshot) bool,
) []Leftover {
	return []Leftover{
		{If: leaking, Means: meansLeaking, Leaks: true,
			when: func(r remains) bool { return isOpen(r.now) }},
		{If: other, Means: meansOther},
	}
}

// of returns a reader of a part of a snapshot. It reads nil if the snapshot does not have the part.
func of[T any](part func(Snapshot) *T, read func(T) any) func(Snapshot) any {
	return func(s Snapshot) any {
		p := part(s)
		if p == nil {
			return nil
		}
		return read(*p)
	}
}

func ofVF(read func(VFState) any) func(Snapshot) any {
	return of(func(s Snapshot) *VFState { return s.VF }, read)
}

// ratesOfVF is ofVF for the rates, which count only if the attachment sets them.
func ratesOfVF(read func(VFState) any) func(Snapshot) any {
	return of(func(s Snapshot) *VFState {
		if !s.sets().Rate {
			return nil
		}
		return s.VF
	}, read)
}

// guidsOfVF is ofVF for the GUIDs, which count only if the attachment sets them and the PF reports
// them.
func guidsOfVF(read func(VFState) function.GUID) func(Snapshot) any {
	return func(s Snapshot) any {
		if s.VF == nil || !s.sets().GUID || read(*s.VF) == "" {
			return nil
		}
		return read(*s.VF)
	}
}

func ofRate(read func(function.Rate) any) func(Snapshot) any {
	return of(func(s Snapshot) *function.Rate { return s.Rate }, read)
}

func ofCarried(read func(Carried) any) func(Snapshot) any {
	return of(func(s Snapshot) *Carried { return s.Carried }, read)
}

// sizeOfIPv4 is ofCarried for the sizes that a kernel before Linux 6.3 does not report.
func sizeOfIPv4(read func(Carried) any) func(Snapshot) any {
	return of(func(s Snapshot) *Carried {
		if s.Carried == nil || s.Carried.GSOIPv4MaxSize == 0 {
			return nil
		}
		return s.Carried
	}, read)
}

func ofProtoDown(read func(ProtoDown) any) func(Snapshot) any {
	return of(func(s Snapshot) *ProtoDown {
		if s.Carried == nil {
			return nil
		}
		return s.Carried.ProtoDown
	}, read)
}

// property is one property with its value in a snapshot.
type property struct {
	name  string
	value any // comparable
	now   any // value in the other snapshot, if two snapshots are compared
	// attribute, flag and conf6 say how the property is restored: see [Property]. conf6 is the IPv6
	// sysctl of this name.
	attribute *nl.RtAttr
	flag      uint32
	conf6     string
	told      bool // see [Property]
	// group and key name one of the [Settings]. group is "" for other properties.
	group, key string
}

// properties lists the properties in the snapshot. The settings come last.
func (s Snapshot) properties() (list []property) {
	for _, row := range table {
		list = append(list, row.in(s)...)
	}
	return append(list, s.Settings.properties()...)
}

// in returns the properties of the row in a snapshot.
func (p Property) in(s Snapshot) []property {
	if p.list != nil {
		return p.list(s)
	}
	if p.value == nil {
		return nil
	}

	one := property{name: p.Name, value: p.value(s), flag: p.flag, told: p.told}
	if one.value == nil {
		return nil
	}
	if p.attribute != nil {
		one.attribute = p.attribute(s)
	}
	return []property{one}
}

// Covers reports whether the row is about the property of a name, as messages have it.
func (p Property) Covers(name string) bool {
	isGroup := strings.HasSuffix(p.Name, " ")
	return name == p.Name || isGroup && strings.HasPrefix(name, p.Name)
}
