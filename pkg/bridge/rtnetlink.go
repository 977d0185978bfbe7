package bridge

import (
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

// rtnetlink finds, makes, marks and watches the netdevs of a network namespace. Only one goroutine may use it at a time,
// except for watch.
type rtnetlink struct {
	uplink       string // empty: no VXLAN
	handle       *netlink.Handle
	raw          *nl.SocketHandle // for requests for which the netlink library has no function
	events       *nl.NetlinkSocket
	devlink      *devlink.Conn
	representors *representorCache

	settled map[int]bool // bridges, by ifindex, whose settings were made by this process
	// users are tasks by ifindex: those of representors, which may lose their name or be removed, and those of VXLAN ports,
	// since the events of a bridge port have no alias. watch reads them.
	users sync.Map
}

// openRtnetlink opens sockets in the network namespace of the calling thread.
func openRtnetlink(uplink string, resolver portResolver) (_ *rtnetlink, err error) {
	r := &rtnetlink{uplink: uplink, settled: map[int]bool{}}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	// The subscription comes before any list of netdevs, so that no change is missed.
	r.events, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR)
	if err != nil {
		return nil, fmt.Errorf("subscribe to netdev events: %w", err)
	}
	// A burst of some hundred netdevs fits. If the buffer overflows, watch has everything reconciled.
	if err := r.events.SetReceiveBufferSize(1<<20, false); err != nil {
		return nil, fmt.Errorf("subscribe to netdev events: receive buffer: %w", err)
	}
	raw, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	r.raw = &nl.SocketHandle{Socket: raw}
	if r.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	if r.devlink, err = devlink.Dial("/proc/thread-self/ns/net"); err != nil {
		return nil, err
	}
	r.representors = &representorCache{
		resolver: resolver, ports: r.devlink.Ports, physPorts: r.physPorts, known: map[int]bool{},
	}
	return r, nil
}

// close closes the sockets, which ends watch. The data plane stays as it is.
func (r *rtnetlink) close() {
	if r.events != nil {
		_ = r.events.Close()
	}
	if r.raw != nil {
		r.raw.Close()
	}
	if r.handle != nil {
		_ = r.handle.Close()
	}
	if r.devlink != nil {
		r.devlink.Close()
	}
}

// aliasPrefix begins the mark of the agent's netdevs, which is their ifalias. The id of a network follows, or sharedID.
const aliasPrefix = "opi-bridge:"

// markOf returns the id in a netdev's mark. ours is false if it has no mark.
func markOf(link netlink.Link) (id string, ours bool) {
	return strings.CutPrefix(link.Attrs().Alias, aliasPrefix)
}

func isOurs(link netlink.Link) bool { return strings.HasPrefix(link.Attrs().Alias, aliasPrefix) }

func bridgeName(id string) string { return "br-" + netdevSuffix(id) }
func vxlanName(id string) string  { return "vx-" + netdevSuffix(id) }

// netdevSuffix returns what follows a prefix of three bytes in a netdev name, which has at most 15 bytes: a network's id if
// it fits, so that people recognise it, or else 60 bits of its hash.
func netdevSuffix(id string) string {
	const room = 15 - 3
	if len(id) <= room {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:room]
}

// find returns the netdev with this name or alternative name, nil if there is none.
func (r *rtnetlink) find(name string) (netlink.Link, error) {
	link, err := r.handle.LinkByName(name)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("netdev %s: %w", name, err)
	}
	return link, nil
}

// own returns the agent's netdev of this name, type and id, nil if there is none. A netdev that somebody else made is an
// error. One that has no alias and is down is the agent's: the agent ended between making and marking it.
func (r *rtnetlink) own(name, typ, id string) (netlink.Link, error) {
	link, err := r.find(name)
	if err != nil || link == nil {
		return nil, err
	}
	alias := link.Attrs().Alias
	fresh := alias == "" && link.Attrs().Flags&net.FlagUp == 0
	if link.Type() != typ || !fresh && alias != aliasPrefix+id {
		return nil, fmt.Errorf("netdev %s: the name is taken by a netdev that is not ours (type %s, alias %q)", name, link.Type(), alias)
	}
	if fresh {
		return link, r.mark(link, id)
	}
	return link, nil
}

func (r *rtnetlink) mark(link netlink.Link, id string) error {
	return linkError(r.handle.LinkSetAlias(link, aliasPrefix+id), link, "set alias")
}

// ensure returns the agent's netdev of this name, type and id. It is made as wanted if it is missing, and is not changed if
// it is there.
func (r *rtnetlink) ensure(want netlink.Link, id string) (netlink.Link, error) {
	link, err := r.own(want.Attrs().Name, want.Type(), id)
	if err != nil || link != nil {
		return link, err
	}
	if err := r.handle.LinkAdd(want); err != nil {
		return nil, linkError(err, want, "add %s", want.Type())
	}
	return want, r.mark(want, id)
}

func newBridge(name string) *netlink.Bridge {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	return &netlink.Bridge{LinkAttrs: attrs}
}

// linkError adds to an error the netdev and what was tried. It returns nil without an error.
func linkError(err error, link netlink.Link, tried string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("netdev %s: %s: %w", link.Attrs().Name, fmt.Sprintf(tried, args...), err)
}

// settle brings a bridge up without STP, which needs peers, without multicast snooping, which needs a querier, and without
// an address. It sets that once for each bridge: the netlink library cannot read all of it back, and setting it is an event.
func (r *rtnetlink) settle(bridge netlink.Link) error {
	index := bridge.Attrs().Index
	if r.settled[index] {
		return r.up(bridge)
	}
	err := r.configure(bridge,
		nl.NewRtAttr(nl.IFLA_BR_STP_STATE, nl.Uint32Attr(0)),
		nl.NewRtAttr(nl.IFLA_BR_FORWARD_DELAY, nl.Uint32Attr(0)),
		nl.NewRtAttr(nl.IFLA_BR_MCAST_SNOOPING, nl.Uint8Attr(0)))
	if err != nil {
		return linkError(err, bridge, "turn off STP and multicast snooping")
	}
	if err := r.disableIPv6(bridge); err != nil {
		return err
	}
	r.settled[index] = true
	return r.up(bridge)
}

// configure sets only these attributes of a bridge. The netlink library would write back all those that it has read.
func (r *rtnetlink) configure(bridge netlink.Link, attrs ...*nl.RtAttr) error {
	req := r.linkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK, bridge.Attrs().Index)
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("bridge"))
	data := info.AddRtAttr(nl.IFLA_INFO_DATA, nil)
	for _, attr := range attrs {
		data.AddChild(attr)
	}
	req.AddData(info)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// linkRequest makes a request for which the netlink library has no function.
func (r *rtnetlink) linkRequest(typ, flags, index int) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(typ, flags)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: r.raw}
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(index)
	req.AddData(msg)
	return req
}

// disableIPv6 removes the netdev's IPv6 link-local address, and keeps the kernel from giving it another one. A kernel
// without IPv6 gives none.
func (r *rtnetlink) disableIPv6(link netlink.Link) error {
	err := r.handle.LinkSetIP6AddrGenMode(link, nl.IN6_ADDR_GEN_MODE_NONE)
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		return nil // EINVAL: IPv6 is off for this netdev
	}
	if err != nil {
		return linkError(err, link, "IPv6 address generation off")
	}
	addrs, err := r.handle.AddrList(link, netlink.FAMILY_V6)
	if err != nil {
		return linkError(err, link, "addresses")
	}
	for _, addr := range addrs {
		if !addr.IP.IsLinkLocalUnicast() {
			continue
		}
		if err := r.handle.AddrDel(link, &addr); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return linkError(err, link, "remove %s", addr.IP)
		}
	}
	return nil
}

func (r *rtnetlink) up(link netlink.Link) error {
	if link.Attrs().Flags&net.FlagUp != 0 {
		return nil
	}
	return linkError(r.handle.LinkSetUp(link), link, "set up")
}

// enslave puts a netdev into a bridge, out of another one in one step if it is in one.
func (r *rtnetlink) enslave(link, bridge netlink.Link) error {
	if link.Attrs().MasterIndex == bridge.Attrs().Index {
		return nil
	}
	return linkError(r.handle.LinkSetMaster(link, bridge), link, "add to bridge %s", bridge.Attrs().Name)
}

// removeOwn removes the agent's netdev of this name, type and id. It leaves netdevs of others alone.
func (r *rtnetlink) removeOwn(name, typ, id string) error {
	link, err := r.find(name)
	if err != nil || link == nil || link.Type() != typ || link.Attrs().Alias != aliasPrefix+id {
		return err
	}
	return r.remove(link)
}

func (r *rtnetlink) remove(link netlink.Link) error {
	delete(r.settled, link.Attrs().Index)
	r.users.Delete(link.Attrs().Index)
	if err := r.handle.LinkDel(link); !errors.Is(err, unix.ENODEV) {
		return linkError(err, link, "remove")
	}
	return nil
}
