// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
)

// conn reads and changes netdevs by rtnetlink.
type conn struct {
	handle *links.Handle
	raw    nl.SocketHandle // for requests that the netlink library has no function for
	strict nl.SocketHandle // for lists that the kernel limits to one netdev
	// configured are the bridges, by ifindex, whose settings this process has made.
	configured map[int]bool
}

func dial() (_ *conn, err error) {
	c := &conn{configured: map[int]bool{}}
	defer func() {
		if err != nil {
			c.close()
		}
	}()

	if c.raw.Socket, err = nl.Subscribe(unix.NETLINK_ROUTE); err != nil {
		return nil, err
	}
	if c.strict.Socket, err = nl.Subscribe(unix.NETLINK_ROUTE); err != nil {
		return nil, err
	}

	// Before Linux 4.20 this fails. Lists then have all netdevs, and cost more.
	_ = unix.SetsockoptInt(c.strict.Socket.GetFd(), unix.SOL_NETLINK,
		unix.NETLINK_GET_STRICT_CHK, 1)

	c.handle, err = links.Open(netns.None())
	return c, err
}

func (c *conn) close() {
	_ = c.raw.Close()
	_ = c.strict.Close()

	if c.handle != nil {
		c.handle.Close()
	}
}

// aliasPrefix begins the alias of the agent's netdevs, which marks them as the agent's. After it
// comes the id of a network, or of a shared bridge: see sharedID.
const aliasPrefix = "opi-bridge:"

// linkGroup is the group of the agent's netdevs, the letters "opi". It marks a netdev that has no
// alias yet: a netdev is made with its group, but gets its alias later, and the agent may end in
// between.
const linkGroup = 0x6f7069

// markOf returns the id in a netdev's alias. ours is false if the netdev is not the agent's.
func markOf(link netlink.Link) (id string, ours bool) {
	return strings.CutPrefix(link.Attrs().Alias, aliasPrefix)
}

func isOurs(link netlink.Link) bool { return strings.HasPrefix(link.Attrs().Alias, aliasPrefix) }

func bridgeName(id string) string { return netdevName("br-", id) }
func vxlanName(id string) string  { return netdevName("vx-", id) }

// netdevName returns a prefix and a network's id, or the beginning of the id's hash if the id does
// not fit into the name of a netdev.
func netdevName(prefix, id string) string {
	const longest = unix.IFNAMSIZ - 1
	if name := prefix + id; len(name) <= longest {
		return name
	}
	sum := sha256.Sum256([]byte(id))
	return (prefix + strings.ToLower(base32.StdEncoding.EncodeToString(sum[:])))[:longest]
}

// find returns the netdev with a name or alternative name, or nil if there is none.
func (c *conn) find(name string) (netlink.Link, error) {
	link, err := c.handle.LinkByName(name)
	if errors.Is(err, links.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("netdev %s: %w", name, err)
	}
	return link, nil
}

// ensure returns the agent's netdev with a name, type and id, and makes it if it is missing. It
// returns an error if a netdev with this name is not the agent's.
func (c *conn) ensure(want netlink.Link, id string) (netlink.Link, error) {
	link, err := c.find(want.Attrs().Name)
	if err == nil && link == nil {
		want.Attrs().Group = linkGroup
		link, err = want, linkError(c.handle.LinkAdd(want), want, "add %s", want.Type())
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
		return nil, ObjectError{
			Object:    Object{kindOf(link.Type()), owner},
			Text:      fmt.Sprintf("%s (type %s, alias %q)", taken, link.Type(), attrs.Alias),
			Anonymous: taken,
		}
	}

	if !unmarked {
		return link, nil
	}

	return link, linkError(c.handle.LinkSetAlias(link, aliasPrefix+id), link, "set alias")
}

// linkError adds the netdev and the attempted operation to an error. It returns nil if err is nil.
func linkError(err error, link netlink.Link, operation string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("netdev %s: %s: %w", link.Attrs().Name, fmt.Sprintf(operation, args...), err)
}

// setUpBridge brings a bridge up without STP, which needs peers, without multicast snooping, which
// needs a querier, and without an address. It writes the settings once for each bridge, because the
// netlink library cannot read all of them, and writing them causes an event.
func (c *conn) setUpBridge(bridge netlink.Link) error {
	index := bridge.Attrs().Index
	if c.configured[index] {
		return c.up(bridge)
	}

	err := c.configure(bridge,
		nl.NewRtAttr(nl.IFLA_BR_STP_STATE, nl.Uint32Attr(0)),
		nl.NewRtAttr(nl.IFLA_BR_FORWARD_DELAY, nl.Uint32Attr(0)),
		nl.NewRtAttr(nl.IFLA_BR_MCAST_SNOOPING, nl.Uint8Attr(0)))
	if err != nil {
		return linkError(err, bridge, "turn off STP and multicast snooping")
	}
	if err := c.disableIPv6(bridge); err != nil {
		return err
	}

	c.configured[index] = true
	return c.up(bridge)
}

// configure sets only these attributes of a bridge. The netlink library would also write back all
// attributes that it has read.
func (c *conn) configure(bridge netlink.Link, attrs ...*nl.RtAttr) error {
	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index = int32(bridge.Attrs().Index)
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("bridge"))
	data := info.AddRtAttr(nl.IFLA_INFO_DATA, nil)
	for _, attr := range attrs {
		data.AddChild(attr)
	}

	_, err := request.Send(&c.raw, unix.RTM_NEWLINK, unix.NLM_F_ACK, header, info)
	return err
}

// disableIPv6 removes the netdev's IPv6 link-local address, and stops the kernel from giving it
// another one. The addresses of a bridge in a VRF stay, because the bridge is a gateway.
func (c *conn) disableIPv6(link netlink.Link) error {
	err := c.handle.LinkSetIP6AddrGenMode(link, nl.IN6_ADDR_GEN_MODE_NONE)
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) ||
		errors.Is(err, unix.EINVAL) {
		return nil // the kernel has no IPv6, or (EINVAL) IPv6 is off for this netdev
	}
	if err != nil {
		return linkError(err, link, "IPv6 address generation off")
	}

	if link.Type() == "bridge" && link.Attrs().MasterIndex != 0 {
		return nil
	}

	addrs, err := c.addresses(link.Attrs().Index, unix.AF_INET6)
	if err != nil {
		return linkError(err, link, "addresses")
	}

	for _, addr := range addrs {
		if !addr.Addr().IsLinkLocalUnicast() {
			continue
		}
		err := c.handle.AddrDel(link, &netlink.Addr{IPNet: netaddr.ToIPNet(addr)})
		if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return linkError(err, link, "remove %s", addr)
		}
	}

	return nil
}

// addresses returns the addresses of one netdev, of one family or of all (AF_UNSPEC). The netlink
// library would read the addresses of all netdevs.
func (c *conn) addresses(index, family int) ([]netip.Prefix, error) {
	header := nl.NewIfAddrmsg(family)
	header.Index = uint32(index)
	messages, err := request.Send(&c.strict, unix.RTM_GETADDR, unix.NLM_F_DUMP, header)
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

		local := attrs[unix.IFA_LOCAL] // of IPv4, where IFA_ADDRESS may belong to a peer
		if local == nil {
			local = attrs[unix.IFA_ADDRESS]
		}

		if addr, ok := netip.AddrFromSlice(local); ok && int(have.Index) == index {
			all = append(all, netip.PrefixFrom(addr, int(have.Prefixlen)))
		}
	}

	return all, nil
}

// up sets a netdev up.
func (c *conn) up(link netlink.Link) error {
	if link.Attrs().Flags&net.FlagUp != 0 {
		return nil
	}
	return linkError(c.handle.LinkSetUp(link), link, "set up")
}

// enslave puts a netdev into a bridge. If it is in another bridge, it moves in one step.
func (c *conn) enslave(link, bridge netlink.Link) error {
	if link.Attrs().MasterIndex == bridge.Attrs().Index {
		return nil
	}

	err := c.handle.LinkSetMaster(link, bridge)
	if errors.Is(err, unix.EXFULL) {
		err = fmt.Errorf("%w: a bridge has at most %d ports, VXLAN ports included",
			err, maxBridgePorts)
	}

	return linkError(err, link, "add to bridge %s", bridge.Attrs().Name)
}

// maxBridgePorts is how many ports a bridge of the kernel can have: BR_MAX_PORTS of
// net/bridge/br_private.h without port number 0.
const maxBridgePorts = 1<<10 - 1
