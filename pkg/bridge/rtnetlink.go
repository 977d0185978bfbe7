// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/sourcefilter"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// openBridgePlane opens sockets in the network namespace of the calling thread.
func openBridgePlane(
	uplinks []Uplink, underlay Underlay, resolver portResolver, vlanAware bool,
) (_ *bridgePlane, err error) {
	b := &bridgePlane{
		uplinks: uplinks, underlay: underlay, uplinksNow: map[string]uplinkState{},
		vlanAware: vlanAware, vlans: map[string]uint16{}, placement: newPlacement(),
		settled: map[int]bool{}, users: newUsers(), forwarding: newForwarding(),
	}

	defer func() {
		if err != nil {
			b.close()
		}
	}()

	// The subscription comes before any list of netdevs, so that no change is missed.
	b.events, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR,
		unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return nil, fmt.Errorf("subscribe to netdev events: %w", err)
	}
	// A burst of some hundred netdevs fits. If the buffer overflows, watch has everything
	// reconciled.
	if err := b.events.SetReceiveBufferSize(1<<20, false); err != nil {
		return nil, fmt.Errorf("subscribe to netdev events: receive buffer: %w", err)
	}
	if b.entries, err = subscribeToEntries(); err != nil {
		return nil, fmt.Errorf("subscribe to forwarding databases: %w", err)
	}
	if b.raw.Socket, err = nl.Subscribe(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	if b.strict.Socket, err = nl.Subscribe(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}

	// Without it (before Linux 4.20) lists have everything, and cost more.
	_ = unix.SetsockoptInt(b.strict.Socket.GetFd(), unix.SOL_NETLINK,
		unix.NETLINK_GET_STRICT_CHK, 1)
	if b.handle, err = links.Open(netns.None()); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}

	for _, u := range uplinks {
		if link, err := b.find(u.Name); err == nil && link != nil {
			b.uplinksNow[u.Name] = uplinkStateOf(link.Attrs())
		}
	}

	if b.devlink, err = devlink.Dial(threadNamespace()); err != nil {
		return nil, err
	}
	if b.filter, err = sourcefilter.Open(); err != nil {
		return nil, err
	}

	ports := patience[[]devlink.Port]{limit: devlinkLimit, call: b.devlink.Ports}
	b.representors = &representorCache{
		resolver: resolver, ports: ports.do, physPorts: b.physPorts, known: map[int]bool{},
	}
	return b, nil
}

// threadNamespace is the path of the calling thread's network namespace, "" if it is the process's
// own: to enter that one again, as a path would have it, needs CAP_SYS_ADMIN.
func threadNamespace() string {
	const path = "/proc/thread-self/ns/net"
	own, err := os.Readlink("/proc/self/ns/net")
	if now, errNow := os.Readlink(path); err == nil && errNow == nil && now == own {
		return ""
	}
	return path
}

func (b *bridgePlane) close() {
	b.closed.Store(true)
	if b.events != nil {
		_ = b.events.Close()
	}

	if b.entries != nil {
		_ = b.entries.Close()
	}

	_ = b.raw.Close()
	_ = b.strict.Close()

	if b.handle != nil {
		b.handle.Close()
	}

	if b.devlink != nil {
		b.devlink.Close()
	}

	if b.filter != nil {
		_ = b.filter.Close()
	}
}

// aliasPrefix begins the mark of the agent's netdevs, which is their ifalias. The id of a network
// follows, or sharedID.
const aliasPrefix = "opi-bridge:"

// linkGroup is the group of the agent's netdevs, the letters "opi". A netdev is made with it, and
// gets its alias only later: the agent may end in between.
const linkGroup = 0x6f7069

// markOf returns the id in a netdev's mark. ours is false if it has no mark.
func markOf(link netlink.Link) (id string, ours bool) {
	return strings.CutPrefix(link.Attrs().Alias, aliasPrefix)
}

func isOurs(link netlink.Link) bool { return strings.HasPrefix(link.Attrs().Alias, aliasPrefix) }

func bridgeName(id string) string { return netdevName("br-", id) }
func vxlanName(id string) string  { return netdevName("vx-", id) }

// netdevName returns a prefix with a network's id, or with the beginning of its hash if the id does
// not fit into a netdev name.
func netdevName(prefix, id string) string {
	const longest = unix.IFNAMSIZ - 1
	if name := prefix + id; len(name) <= longest {
		return name
	}
	sum := sha256.Sum256([]byte(id))
	return (prefix + strings.ToLower(base32.StdEncoding.EncodeToString(sum[:])))[:longest]
}

// find returns the netdev with a name or alternative name, nil if there is none.
func (b *bridgePlane) find(name string) (netlink.Link, error) {
	link, err := b.handle.LinkByName(name)
	if errors.Is(err, links.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("netdev %s: %w", name, err)
	}
	return link, nil
}

// ensure returns the agent's netdev of a name, type and id, and makes it if it is missing. A netdev
// that somebody else made is an error.
func (b *bridgePlane) ensure(want netlink.Link, id string) (netlink.Link, error) {
	link, err := b.find(want.Attrs().Name)
	if err == nil && link == nil {
		want.Attrs().Group = linkGroup
		link, err = want, linkError(b.handle.LinkAdd(want), want, "add %s", want.Type())
	}
	if err != nil {
		return nil, err
	}

	attrs := link.Attrs()
	unmarked := attrs.Alias == "" && attrs.Group == linkGroup
	if link.Type() != want.Type() || !unmarked && attrs.Alias != aliasPrefix+id {
		taken := fmt.Sprintf("netdev %s: the name is taken by a netdev that is not ours",
			attrs.Name)
		owner, _ := markOf(link)
		return nil, reference{
			to:      task{taskNetwork, owner},
			text:    fmt.Sprintf("%s (type %s, alias %q)", taken, link.Type(), attrs.Alias),
			instead: taken,
		}
	}

	if !unmarked {
		return link, nil
	}

	return link, linkError(b.handle.LinkSetAlias(link, aliasPrefix+id), link, "set alias")
}

// linkError adds to an error the netdev and what was tried. It returns nil without an error.
func linkError(err error, link netlink.Link, tried string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("netdev %s: %s: %w", link.Attrs().Name, fmt.Sprintf(tried, args...), err)
}

// settle brings a bridge up without STP, which needs peers, without multicast snooping, which needs
// a querier, and without an address. It sets that once for each bridge: the netlink library cannot
// read all of it back, and setting it is an event.
func (b *bridgePlane) settle(bridge netlink.Link) error {
	index := bridge.Attrs().Index
	if b.settled[index] {
		return b.up(bridge)
	}

	err := b.configure(bridge,
		nl.NewRtAttr(nl.IFLA_BR_STP_STATE, nl.Uint32Attr(0)),
		nl.NewRtAttr(nl.IFLA_BR_FORWARD_DELAY, nl.Uint32Attr(0)),
		nl.NewRtAttr(nl.IFLA_BR_MCAST_SNOOPING, nl.Uint8Attr(0)))
	if err != nil {
		return linkError(err, bridge, "turn off STP and multicast snooping")
	}
	if err := b.disableIPv6(bridge); err != nil {
		return err
	}

	b.settled[index] = true
	return b.up(bridge)
}

// configure sets only these attributes of a bridge. The netlink library would write back all those
// that it has read.
func (b *bridgePlane) configure(bridge netlink.Link, attrs ...*nl.RtAttr) error {
	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index = int32(bridge.Attrs().Index)
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("bridge"))
	data := info.AddRtAttr(nl.IFLA_INFO_DATA, nil)
	for _, attr := range attrs {
		data.AddChild(attr)
	}

	_, err := request.Send(&b.raw, unix.RTM_NEWLINK, unix.NLM_F_ACK, header, info)
	return err
}

// disableIPv6 removes the netdev's IPv6 link-local address, and keeps the kernel from giving it
// another one.
func (b *bridgePlane) disableIPv6(link netlink.Link) error {
	err := b.handle.LinkSetIP6AddrGenMode(link, nl.IN6_ADDR_GEN_MODE_NONE)
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) ||
		errors.Is(err, unix.EINVAL) {
		return nil // the kernel has no IPv6; EINVAL: IPv6 is off for this netdev
	}
	if err != nil {
		return linkError(err, link, "IPv6 address generation off")
	}

	addrs, err := b.addresses(link.Attrs().Index, unix.AF_INET6)
	if err != nil {
		return linkError(err, link, "addresses")
	}

	for _, addr := range addrs {
		if !addr.Addr().IsLinkLocalUnicast() {
			continue
		}
		err := b.handle.AddrDel(link, &netlink.Addr{IPNet: netipx.PrefixIPNet(addr)})
		if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return linkError(err, link, "remove %s", addr)
		}
	}

	return nil
}

// addresses returns those of one netdev, of a family or of all (AF_UNSPEC). The netlink library
// would read those of all netdevs.
func (b *bridgePlane) addresses(index, family int) ([]netip.Prefix, error) {
	header := nl.NewIfAddrmsg(family)
	header.Index = uint32(index)
	messages, err := request.Send(&b.strict, unix.RTM_GETADDR, unix.NLM_F_DUMP, header)
	if errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}

	var all []netip.Prefix
	for _, m := range messages {
		if len(m) < unix.SizeofIfAddrmsg {
			return nil, fmt.Errorf("address of %d bytes, want at least %d", len(m),
				unix.SizeofIfAddrmsg)
		}

		have := nl.DeserializeIfAddrmsg(m)
		attrs, err := attribute.Parse(m[unix.SizeofIfAddrmsg:])
		if err != nil {
			return nil, fmt.Errorf("address: %w", err)
		}

		local := attrs[unix.IFA_LOCAL] // IPv4's own; IFA_ADDRESS may be a peer's
		if local == nil {
			local = attrs[unix.IFA_ADDRESS]
		}

		if addr, ok := netip.AddrFromSlice(local); ok && int(have.Index) == index {
			all = append(all, netip.PrefixFrom(addr, int(have.Prefixlen)))
		}
	}

	return all, nil
}

func (b *bridgePlane) up(link netlink.Link) error {
	if link.Attrs().Flags&net.FlagUp != 0 {
		return nil
	}
	return linkError(b.handle.LinkSetUp(link), link, "set up")
}

// enslave puts a netdev into a bridge, out of another one in one step if it is in one.
func (b *bridgePlane) enslave(link, bridge netlink.Link) error {
	if link.Attrs().MasterIndex == bridge.Attrs().Index {
		return nil
	}

	err := b.handle.LinkSetMaster(link, bridge)
	if errors.Is(err, unix.EXFULL) {
		err = fmt.Errorf("%w: a bridge has at most %d ports, VXLAN ports included",
			err, maxBridgePorts)
	}

	return linkError(err, link, "add to bridge %s", bridge.Attrs().Name)
}

// maxBridgePorts is how many ports the kernel lets a bridge have: BR_MAX_PORTS of
// net/bridge/br_private.h, of which number 0 is not given.
const maxBridgePorts = 1<<10 - 1

// removeOwn removes the agent's netdev of a name, type and id. It leaves netdevs of others alone.
func (b *bridgePlane) removeOwn(name, typ, id string) error {
	link, err := b.find(name)
	if err != nil || link == nil || link.Type() != typ || link.Attrs().Alias != aliasPrefix+id {
		return err
	}
	return b.remove(link)
}

func (b *bridgePlane) remove(link netlink.Link) error {
	delete(b.settled, link.Attrs().Index)
	b.users.remove(link.Attrs().Index)
	if err := b.handle.LinkDel(link); !errors.Is(err, unix.ENODEV) {
		return linkError(err, link, "remove")
	}
	return nil
}
