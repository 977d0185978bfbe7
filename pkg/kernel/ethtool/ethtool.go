// SPDX-License-Identifier: Apache-2.0

// Package ethtool reads and changes driver settings of a netdev by the generic netlink family
// "ethtool" (Documentation/networking/ethtool-netlink.rst, include/uapi/linux/ethtool_netlink.h).
// All settings are text, so that another version of the program can compare a record of them and
// write it back.
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

// header is the type of the attribute that names the netdev in each message (ETHTOOL_A_*_HEADER).
const header = 1

// group is the set of settings that one request reads and another request changes.
type group struct {
	name     string
	get, set uint8 // ETHTOOL_MSG_*_GET and ETHTOOL_MSG_*_SET of the requests
	fields   []field
}

// field is one attribute of a group. The attribute has the same type in the answer and in the
// request that changes it.
type field struct {
	name string // of the setting, or "" for a bitset each bit of which is a setting
	kind uint16 // ETHTOOL_A_*
	// changeable is the type of the attribute that lists the bits that can be changed, or 0 if all
	// bits can be changed.
	changeable uint16
	codec      codec
}

// codec translates between an attribute and settings.
type codec interface {
	decode(f field, answer attribute.Set) map[string]string
	encode(f field, to map[string]string) (*nl.RtAttr, error) // nil if to lacks the field
}

// These numbers of include/uapi/linux/ethtool_netlink.h are missing in golang.org/x/sys.
const (
	rssSet = 0x30 // ETHTOOL_MSG_RSS_SET, Linux 6.17

	rssHashFunction, rssTable, rssKey, rssTransformation = 3, 4, 5, 6 // ETHTOOL_A_RSS_*
	// ETHTOOL_A_COALESCE_TX_AGGR_*
	coalesceAggrBytes, coalesceAggrFrames, coalesceAggrTime = 0x1a, 0x1b, 0x1c

	tsTxTypes, tsRxFilters = 3, 4 // ETHTOOL_A_TSCONFIG_*
)

// groups lists the groups in the order in which they must be changed. The channels come before RSS,
// because the number of channels decides which queues the RSS table can refer to.
//
// FEC, speed and the like are missing, because PF, VFs and SFs share the port, so that a restore
// for one of them would undo the changes of others.
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
		// The record holds the features that were requested, not the active ones, because a driver
		// may leave out a feature that conflicts with another one.
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
		{name: transformation, kind: rssTransformation, codec: number(4)},
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

// Groups returns the names of all groups of settings, in the order in which they must be changed.
func Groups() []string {
	var names []string
	for _, g := range groups {
		names = append(names, g.name)
	}
	return names
}

// Conn reads and changes driver settings of the netdevs in one network namespace. Several
// goroutines may use it at once. Their requests are serialized.
type Conn struct {
	family uint16 // 0 for a kernel without ethtool netlink
	socket *nl.SocketHandle
}

// Dial opens a Conn in a network namespace, or in the namespace of the process for [netns.None]. A
// kernel without ethtool netlink (before Linux 5.6, or without CONFIG_ETHTOOL_NETLINK) is not an
// error: requests of the Conn then fail with EOPNOTSUPP.
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

	_ = socket.SetExtAck(true) // errors carry the kernel's message, if there is one
	return &Conn{family: family.ID, socket: &nl.SocketHandle{Socket: socket}}, nil
}

// Close closes the Conn's socket. The Conn may be nil.
func (c *Conn) Close() {
	if c != nil && c.socket != nil {
		c.socket.Close()
	}
}

// Read returns the settings of a group by name, for the netdev with the index. The error matches
// EOPNOTSUPP if the driver or the kernel does not support the group.
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

// Change sets some settings of a group with one request, for the netdev with the index.
func (c *Conn) Change(index int, groupName string, to map[string]string) error {
	g, err := groupOf(groupName)
	if err != nil {
		return err
	}

	if g.set == rssSet {
		err = c.changeRSS(g, index, to)
	} else {
		err = c.change(g, index, to)
	}
	if err != nil {
		return fmt.Errorf("ethtool %s: %w", g.name, err)
	}

	return nil
}

func (c *Conn) change(g group, index int, to map[string]string) error {
	attributes, err := g.attributes(to)
	if err == nil {
		_, err = c.send(g.set, index, attributes...)
	}
	return err
}

func groupOf(name string) (group, error) {
	i := slices.IndexFunc(groups, func(g group) bool { return g.name == name })
	if i < 0 {
		return group{}, fmt.Errorf("ethtool: no group %q of settings", name)
	}
	return groups[i], nil
}

// send sends a command about a netdev. It returns the attributes of the answer, or nil if the
// kernel only acknowledges the command.
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

// parse returns the settings that the answer contains. It leaves out settings whose attribute is
// missing.
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

// attributes returns the attributes of a request that sets the settings in to.
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
