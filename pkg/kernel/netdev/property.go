package netdev

import (
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

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
