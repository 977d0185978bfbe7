// SPDX-License-Identifier: Apache-2.0

// Package ethtool reads and changes what a driver keeps for a netdev, by the generic netlink family
// "ethtool" (Documentation/networking/ethtool-netlink.rst, include/uapi/linux/ethtool_netlink.h).
// All settings are text, so that a record of them can be compared and written back by another
// version of the program.
package ethtool

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// header is the attribute of each message that names the netdev (ETHTOOL_A_*_HEADER).
const header = 1

// group is what one request reads and another one changes.
type group struct {
	name     string
	get, set uint8 // ETHTOOL_MSG_*_GET and ETHTOOL_MSG_*_SET of the requests
	fields   []field
}

// field is one attribute of a group. Its number is the same in the answer and in the request that
// changes it.
type field struct {
	name string // of the setting; "" for a bitset of which each bit is one
	kind uint16 // ETHTOOL_A_*
	// changeable is the attribute with the bits that can be changed, 0 if all can.
	changeable uint16
	codec      codec
}

// codec translates an attribute to settings and back.
type codec interface {
	decode(f field, answer attribute.Set) map[string]string
	encode(f field, to map[string]string) (*nl.RtAttr, error) // nil if to has nothing of the field
}

// Numbers of linux/ethtool_netlink.h that golang.org/x/sys does not have yet.
const (
	rssSet = 0x30 // ETHTOOL_MSG_RSS_SET, Linux 6.17

	rssHashFunction, rssTable, rssKey, rssTransformation = 3, 4, 5, 6 // ETHTOOL_A_RSS_*
	// ETHTOOL_A_COALESCE_TX_AGGR_*
	coalesceAggrBytes, coalesceAggrFrames, coalesceAggrTime = 0x1a, 0x1b, 0x1c

	tsTxTypes, tsRxFilters = 3, 4 // ETHTOOL_A_TSCONFIG_*
)

// groups are in the order in which they are changed: the number of channels decides which queues
// there are, to which the table of RSS refers.
var groups = []group{
	{"private flags", unix.ETHTOOL_MSG_PRIVFLAGS_GET, unix.ETHTOOL_MSG_PRIVFLAGS_SET, []field{
		{kind: unix.ETHTOOL_A_PRIVFLAGS_FLAGS, codec: bits{}},
	}},
	{"channels", unix.ETHTOOL_MSG_CHANNELS_GET, unix.ETHTOOL_MSG_CHANNELS_SET, []field{
		{name: "rx", kind: unix.ETHTOOL_A_CHANNELS_RX_COUNT, codec: number(4)},
		{name: "tx", kind: unix.ETHTOOL_A_CHANNELS_TX_COUNT, codec: number(4)},
		{name: "other", kind: unix.ETHTOOL_A_CHANNELS_OTHER_COUNT, codec: number(4)},
		{name: "combined", kind: unix.ETHTOOL_A_CHANNELS_COMBINED_COUNT, codec: number(4)},
	}},
	{"rings", unix.ETHTOOL_MSG_RINGS_GET, unix.ETHTOOL_MSG_RINGS_SET, []field{
		{name: "rx", kind: unix.ETHTOOL_A_RINGS_RX, codec: number(4)},
		{name: "rx-mini", kind: unix.ETHTOOL_A_RINGS_RX_MINI, codec: number(4)},
		{name: "rx-jumbo", kind: unix.ETHTOOL_A_RINGS_RX_JUMBO, codec: number(4)},
		{name: "tx", kind: unix.ETHTOOL_A_RINGS_TX, codec: number(4)},
		{name: "rx-buf-len", kind: unix.ETHTOOL_A_RINGS_RX_BUF_LEN, codec: number(4)},
		{name: "tcp-data-split", kind: unix.ETHTOOL_A_RINGS_TCP_DATA_SPLIT, codec: number(1)},
		{name: "cqe-size", kind: unix.ETHTOOL_A_RINGS_CQE_SIZE, codec: number(4)},
		{name: "tx-push", kind: unix.ETHTOOL_A_RINGS_TX_PUSH, codec: number(1)},
		{name: "rx-push", kind: unix.ETHTOOL_A_RINGS_RX_PUSH, codec: number(1)},
		{name: "tx-push-buf-len", kind: unix.ETHTOOL_A_RINGS_TX_PUSH_BUF_LEN, codec: number(4)},
		{name: "hds-thresh", kind: unix.ETHTOOL_A_RINGS_HDS_THRESH, codec: number(4)},
	}},
	{"features", unix.ETHTOOL_MSG_FEATURES_GET, unix.ETHTOOL_MSG_FEATURES_SET, []field{
		// What is wanted, not what is active: a driver may leave out what does not fit other
		// features.
		{kind: unix.ETHTOOL_A_FEATURES_WANTED, changeable: unix.ETHTOOL_A_FEATURES_HW,
			codec: bits{}},
	}},
	{"coalescing", unix.ETHTOOL_MSG_COALESCE_GET, unix.ETHTOOL_MSG_COALESCE_SET, []field{
		{name: "rx-usecs", kind: unix.ETHTOOL_A_COALESCE_RX_USECS, codec: number(4)},
		{name: "rx-frames", kind: unix.ETHTOOL_A_COALESCE_RX_MAX_FRAMES, codec: number(4)},
		{name: "rx-usecs-irq", kind: unix.ETHTOOL_A_COALESCE_RX_USECS_IRQ, codec: number(4)},
		{name: "rx-frames-irq", kind: unix.ETHTOOL_A_COALESCE_RX_MAX_FRAMES_IRQ, codec: number(4)},
		{name: "tx-usecs", kind: unix.ETHTOOL_A_COALESCE_TX_USECS, codec: number(4)},
		{name: "tx-frames", kind: unix.ETHTOOL_A_COALESCE_TX_MAX_FRAMES, codec: number(4)},
		{name: "tx-usecs-irq", kind: unix.ETHTOOL_A_COALESCE_TX_USECS_IRQ, codec: number(4)},
		{name: "tx-frames-irq", kind: unix.ETHTOOL_A_COALESCE_TX_MAX_FRAMES_IRQ, codec: number(4)},
		{name: "stats-block-usecs", kind: unix.ETHTOOL_A_COALESCE_STATS_BLOCK_USECS,
			codec: number(4)},
		{name: "adaptive-rx", kind: unix.ETHTOOL_A_COALESCE_USE_ADAPTIVE_RX, codec: number(1)},
		{name: "adaptive-tx", kind: unix.ETHTOOL_A_COALESCE_USE_ADAPTIVE_TX, codec: number(1)},
		{name: "pkt-rate-low", kind: unix.ETHTOOL_A_COALESCE_PKT_RATE_LOW, codec: number(4)},
		{name: "rx-usecs-low", kind: unix.ETHTOOL_A_COALESCE_RX_USECS_LOW, codec: number(4)},
		{name: "rx-frames-low", kind: unix.ETHTOOL_A_COALESCE_RX_MAX_FRAMES_LOW, codec: number(4)},
		{name: "tx-usecs-low", kind: unix.ETHTOOL_A_COALESCE_TX_USECS_LOW, codec: number(4)},
		{name: "tx-frames-low", kind: unix.ETHTOOL_A_COALESCE_TX_MAX_FRAMES_LOW, codec: number(4)},
		{name: "pkt-rate-high", kind: unix.ETHTOOL_A_COALESCE_PKT_RATE_HIGH, codec: number(4)},
		{name: "rx-usecs-high", kind: unix.ETHTOOL_A_COALESCE_RX_USECS_HIGH, codec: number(4)},
		{name: "rx-frames-high", kind: unix.ETHTOOL_A_COALESCE_RX_MAX_FRAMES_HIGH,
			codec: number(4)},
		{name: "tx-usecs-high", kind: unix.ETHTOOL_A_COALESCE_TX_USECS_HIGH, codec: number(4)},
		{name: "tx-frames-high", kind: unix.ETHTOOL_A_COALESCE_TX_MAX_FRAMES_HIGH,
			codec: number(4)},
		{name: "sample-interval", kind: unix.ETHTOOL_A_COALESCE_RATE_SAMPLE_INTERVAL,
			codec: number(4)},
		{name: "cqe-mode-tx", kind: unix.ETHTOOL_A_COALESCE_USE_CQE_MODE_TX, codec: number(1)},
		{name: "cqe-mode-rx", kind: unix.ETHTOOL_A_COALESCE_USE_CQE_MODE_RX, codec: number(1)},
		{name: "tx-aggr-max-bytes", kind: coalesceAggrBytes, codec: number(4)},
		{name: "tx-aggr-max-frames", kind: coalesceAggrFrames, codec: number(4)},
		{name: "tx-aggr-time-usecs", kind: coalesceAggrTime, codec: number(4)},
	}},
	{"pause", unix.ETHTOOL_MSG_PAUSE_GET, unix.ETHTOOL_MSG_PAUSE_SET, []field{
		{name: "autoneg", kind: unix.ETHTOOL_A_PAUSE_AUTONEG, codec: number(1)},
		{name: "rx", kind: unix.ETHTOOL_A_PAUSE_RX, codec: number(1)},
		{name: "tx", kind: unix.ETHTOOL_A_PAUSE_TX, codec: number(1)},
	}},
	{"RSS", unix.ETHTOOL_MSG_RSS_GET, rssSet, []field{
		{name: "hash function", kind: rssHashFunction, codec: number(4)},
		{name: "input transformation", kind: rssTransformation, codec: number(4)},
		{name: "hash key", kind: rssKey, codec: binaryText{}},
		{name: "table", kind: rssTable, codec: table{}},
	}},
	{"time stamps", unix.ETHTOOL_MSG_TSCONFIG_GET, unix.ETHTOOL_MSG_TSCONFIG_SET, []field{
		{name: "tx", kind: tsTxTypes, codec: list{}},
		{name: "rx", kind: tsRxFilters, codec: list{}},
	}},
	{"messages", unix.ETHTOOL_MSG_DEBUG_GET, unix.ETHTOOL_MSG_DEBUG_SET, []field{
		{name: "classes", kind: unix.ETHTOOL_A_DEBUG_MSGMASK, codec: list{}},
	}},
}

// Groups are the names of the groups of settings, in the order in which they are to be changed.
func Groups() []string {
	var names []string
	for _, g := range groups {
		names = append(names, g.name)
	}
	return names
}

// Conn speaks with the drivers of the netdevs in one network namespace. Requests of several
// goroutines wait for each other.
type Conn struct {
	family uint16 // 0 for a kernel without ethtool netlink
	socket *nl.SocketHandle
}

// Dial opens a Conn in a network namespace, the process's own for [netns.None]. A kernel without
// ethtool netlink (before Linux 5.6, or without CONFIG_ETHTOOL_NETLINK) is no error: its requests
// fail with EOPNOTSUPP.
func Dial(ns netns.NsHandle) (*Conn, error) {
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_GENERIC)
	if err != nil {
		return nil, fmt.Errorf("ethtool: netlink socket: %w", err)
	}
	defer handle.Close()

	family, err := handle.GenlFamilyGet(unix.ETHTOOL_GENL_NAME)
	if errors.Is(err, unix.ENOENT) {
		return &Conn{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ethtool: generic netlink family: %w", err)
	}

	socket, err := nl.GetNetlinkSocketAt(ns, netns.None(), unix.NETLINK_GENERIC)
	if err != nil {
		return nil, fmt.Errorf("ethtool: netlink socket: %w", err)
	}

	_ = socket.SetExtAck(true) // the kernel's own words in errors, where it has some
	return &Conn{family: family.ID, socket: &nl.SocketHandle{Socket: socket}}, nil
}

// Close ends the Conn. It may be nil.
func (c *Conn) Close() {
	if c != nil && c.socket != nil {
		c.socket.Close()
	}
}

// Read returns the settings of a group by name, for the netdev with the index. The error matches
// EOPNOTSUPP if the driver or the kernel does not have them.
func (c *Conn) Read(index int, groupName string) (map[string]string, error) {
	g, err := groupOf(groupName)
	if err != nil {
		return nil, err
	}

	answer, err := c.send(g.get, index)
	if err != nil {
		return nil, fmt.Errorf("ethtool %s: %w", g.name, err)
	}

	settings, err := g.parse(answer)
	if err != nil {
		return nil, fmt.Errorf("ethtool %s: %w", g.name, err)
	}

	return settings, nil
}

// Change sets some settings of a group by one request, for the netdev with the index.
func (c *Conn) Change(index int, groupName string, to map[string]string) error {
	g, err := groupOf(groupName)
	if err != nil {
		return err
	}

	attributes, err := g.attributes(to)
	if err == nil {
		_, err = c.send(g.set, index, attributes...)
	}
	if err != nil {
		return fmt.Errorf("ethtool %s: %w", g.name, err)
	}

	return nil
}

func groupOf(name string) (group, error) {
	i := slices.IndexFunc(groups, func(g group) bool { return g.name == name })
	if i < 0 {
		return group{}, fmt.Errorf("ethtool: no group %q of settings", name)
	}
	return groups[i], nil
}

// send sends a command about a netdev and returns the attributes of the answer, nil if there is
// none.
func (c *Conn) send(command uint8, index int, attributes ...*nl.RtAttr) ([]byte, error) {
	if c.family == 0 {
		return nil, fmt.Errorf("the kernel has no ethtool netlink: %w", unix.EOPNOTSUPP)
	}

	netdev := nl.NewRtAttr(header|unix.NLA_F_NESTED, nil)
	netdev.AddRtAttr(unix.ETHTOOL_A_HEADER_DEV_INDEX, nl.Uint32Attr(uint32(index)))

	answers, err := request.Send(
		c.socket, int(c.family), unix.NLM_F_ACK,
		request.GenericHeader{Command: command, Version: unix.ETHTOOL_GENL_VERSION},
		append([]*nl.RtAttr{netdev}, attributes...)...,
	)

	if err != nil || len(answers) == 0 {
		return nil, err
	}
	if len(answers[0]) < nl.SizeofGenlmsg {
		return nil, fmt.Errorf("answer of %d bytes, want %d or more", len(answers[0]),
			nl.SizeofGenlmsg)
	}

	return answers[0][nl.SizeofGenlmsg:], nil
}

// parse reads the attributes of an answer. What the answer does not have is not among the settings.
func (g group) parse(answer []byte) (map[string]string, error) {
	attrs, err := attribute.Parse(answer)
	if err != nil {
		return nil, err
	}

	settings := map[string]string{}
	for _, f := range g.fields {
		if attrs.Has(f.kind) {
			maps.Copy(settings, f.codec.decode(f, attrs))
		}
	}

	return settings, nil
}

// attributes are those of the request that makes the settings be what to says.
func (g group) attributes(to map[string]string) ([]*nl.RtAttr, error) {
	var list []*nl.RtAttr
	for _, f := range g.fields {
		attr, err := f.codec.encode(f, to)
		if err != nil {
			return nil, err
		}
		if attr != nil {
			list = append(list, attr)
		}
	}

	return list, nil
}
