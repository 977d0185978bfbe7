package opibridge

import (
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	vxlanPort = 4789 // RFC 7348, section 8
	// vxlanOverhead is what VXLAN over IPv4 adds to a frame's IP packet: 14 inner Ethernet, 8 VXLAN, 8 UDP, 20 IP.
	vxlanOverhead = 50
)

// bridges is the data plane of a plain Linux: one bridge for each network. Only Agent uses it, one call at a time,
// except for watch.
type bridges struct {
	uplink string // empty: no VXLAN
	handle *netlink.Handle
	raw    *nl.NetlinkSocket // for requests that the netlink library has no call for
	events *nl.NetlinkSocket

	settled map[int]bool // bridges, by ifindex, whose settings were made by this process

	mu       sync.Mutex
	attached map[int]string // ports by the ifindex of their representor, which may lose its name or vanish
}

// openBridges works in the network namespace of the calling thread, for ever.
func openBridges(uplink string) (_ *bridges, err error) {
	b := &bridges{uplink: uplink, settled: map[int]bool{}, attached: map[int]string{}}
	defer func() {
		if err != nil {
			b.close()
		}
	}()
	// First the events, so that nothing is missed between looking and listening.
	b.events, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR)
	if err != nil {
		return nil, fmt.Errorf("subscribe to netdev events: %w", err)
	}
	// A burst of some hundred netdevs fits. If it overflows all the same, everything is looked at again.
	if err := b.events.SetReceiveBufferSize(1<<20, false); err != nil {
		return nil, fmt.Errorf("subscribe to netdev events: receive buffer: %w", err)
	}
	if b.raw, err = nl.Subscribe(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	if b.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	return b, nil
}

// close lets go of the sockets and leaves the data plane as it is. watch ends.
func (b *bridges) close() {
	for _, s := range []*nl.NetlinkSocket{b.events, b.raw} {
		if s != nil {
			_ = s.Close()
		}
	}
	if b.handle != nil {
		_ = b.handle.Close()
	}
}

// find gives the netdev of this name or alternative name, nil if there is none.
func (b *bridges) find(name string) (netlink.Link, error) {
	link, err := b.handle.LinkByName(name)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("netdev %s: %w", name, err)
	}
	return link, nil
}

// own gives our netdev of this name, type and network, nil if there is none. One that is somebody else's is an error;
// one without a mark that is down is ours: we died between making and marking it.
func (b *bridges) own(name, typ, network string) (netlink.Link, error) {
	link, err := b.find(name)
	if err != nil || link == nil {
		return nil, err
	}
	alias := link.Attrs().Alias
	fresh := alias == "" && link.Attrs().Flags&net.FlagUp == 0
	if link.Type() != typ || !fresh && alias != aliasPrefix+network {
		return nil, fmt.Errorf("netdev %s: the name is taken by a netdev that is not ours (type %s, alias %q)", name, link.Type(), alias)
	}
	if fresh {
		return link, b.mark(link, network)
	}
	return link, nil
}

func (b *bridges) mark(link netlink.Link, network string) error {
	if err := b.handle.LinkSetAlias(link, aliasPrefix+network); err != nil {
		return fmt.Errorf("netdev %s: set alias: %w", link.Attrs().Name, err)
	}
	return nil
}

// ensureNetwork brings up the network's bridge, and the VXLAN port if vni is not 0. made says that the bridge is new,
// and so without any port.
func (b *bridges) ensureNetwork(id string, vni uint32) (made bool, err error) {
	name := bridgeName(id)
	bridge, err := b.own(name, "bridge", id)
	if err != nil {
		return false, err
	}
	if bridge == nil {
		made = true
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		if bridge, err = b.add(&netlink.Bridge{LinkAttrs: attrs}, id); err != nil {
			return made, err
		}
	}
	if err := b.settle(bridge); err != nil {
		return made, err
	}
	if err := b.up(bridge); err != nil {
		return made, err
	}
	if vni == 0 {
		return made, b.removeOwn(vxlanName(id), "vxlan", id)
	}
	return made, b.ensureVXLAN(id, vni, bridge)
}

// add makes a netdev and marks it as ours.
func (b *bridges) add(link netlink.Link, network string) (netlink.Link, error) {
	name := link.Attrs().Name
	if err := b.handle.LinkAdd(link); err != nil {
		return nil, fmt.Errorf("netdev %s: add %s: %w", name, link.Type(), err)
	}
	made, err := b.find(name)
	if err != nil {
		return nil, err
	}
	if made == nil {
		return nil, fmt.Errorf("netdev %s vanished right after it was made", name)
	}
	return made, b.mark(made, network)
}

// settle makes a bridge a plain one, once: no spanning tree and no multicast snooping, which need a peer to talk to
// and a querier to work, and no address of its own. The settings cannot be read back with the netlink library, and
// setting them is an event, so it is not done again.
func (b *bridges) settle(bridge netlink.Link) error {
	index := bridge.Attrs().Index
	if b.settled[index] {
		return nil
	}
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: b.raw}}
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(index)
	req.AddData(msg)
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("bridge"))
	data := info.AddRtAttr(nl.IFLA_INFO_DATA, nil)
	data.AddRtAttr(nl.IFLA_BR_STP_STATE, nl.Uint32Attr(0))
	data.AddRtAttr(nl.IFLA_BR_FORWARD_DELAY, nl.Uint32Attr(0))
	data.AddRtAttr(nl.IFLA_BR_MCAST_SNOOPING, nl.Uint8Attr(0))
	req.AddData(info)
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("netdev %s: turn off STP and multicast snooping: %w", bridge.Attrs().Name, err)
	}
	if err := b.quiet(bridge); err != nil {
		return err
	}
	b.settled[index] = true
	return nil
}

// quiet keeps the kernel from giving the netdev an IPv6 link-local address, and takes the one it has. A kernel
// without IPv6 has nothing to be kept from.
func (b *bridges) quiet(link netlink.Link) error {
	err := b.handle.LinkSetIP6AddrGenMode(link, nl.IN6_ADDR_GEN_MODE_NONE)
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		return nil // EINVAL: IPv6 is off for this netdev
	}
	if err != nil {
		return fmt.Errorf("netdev %s: IPv6 address generation off: %w", link.Attrs().Name, err)
	}
	addrs, err := b.handle.AddrList(link, netlink.FAMILY_V6)
	if err != nil {
		return fmt.Errorf("netdev %s: addresses: %w", link.Attrs().Name, err)
	}
	for _, addr := range addrs {
		if !addr.IP.IsLinkLocalUnicast() {
			continue
		}
		if err := b.handle.AddrDel(link, &addr); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("netdev %s: remove %s: %w", link.Attrs().Name, addr.IP, err)
		}
	}
	return nil
}

func (b *bridges) up(link netlink.Link) error {
	if link.Attrs().Flags&net.FlagUp != 0 {
		return nil
	}
	if err := b.handle.LinkSetUp(link); err != nil {
		return fmt.Errorf("netdev %s: set up: %w", link.Attrs().Name, err)
	}
	return nil
}

// group is the multicast group of a VNI, to which frames go whose destination is not known yet: 239.x.y.z of the
// administratively scoped range (RFC 2365) with the VNI's 24 bits.
func group(vni uint32) net.IP {
	return net.IPv4(239, byte(vni>>16), byte(vni>>8), byte(vni)).To4()
}

// ensureVXLAN has the bridge reach the same network on other xPUs: flood and learn (RFC 7348, section 4.1).
func (b *bridges) ensureVXLAN(id string, vni uint32, bridge netlink.Link) error {
	uplink, err := b.find(b.uplink)
	if err != nil {
		return err
	}
	if uplink == nil {
		return fmt.Errorf("netdev %s, the uplink, is missing", b.uplink)
	}
	addrs, err := b.handle.AddrList(uplink, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("netdev %s, the uplink: addresses: %w", b.uplink, err)
	}
	if len(addrs) == 0 {
		return fmt.Errorf("netdev %s, the uplink, has no IPv4 address to send VXLAN from", b.uplink)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = vxlanName(id)
	attrs.MTU = uplink.Attrs().MTU - vxlanOverhead
	want := &netlink.Vxlan{LinkAttrs: attrs, VxlanId: int(vni), VtepDevIndex: uplink.Attrs().Index, Group: group(vni), Port: vxlanPort, Learning: true}

	link, err := b.own(want.Name, "vxlan", id)
	if err != nil {
		return err
	}
	if have, ok := link.(*netlink.Vxlan); ok && (have.VxlanId != want.VxlanId || have.VtepDevIndex != want.VtepDevIndex ||
		!have.Group.Equal(want.Group) || have.Port != want.Port) {
		if err := b.remove(link); err != nil {
			return err
		}
		link = nil
	}
	if link == nil {
		if link, err = b.add(want, id); err != nil {
			return err
		}
		if err := b.quiet(link); err != nil {
			return err
		}
	}
	if link.Attrs().MTU != want.MTU {
		if err := b.handle.LinkSetMTU(link, want.MTU); err != nil {
			return fmt.Errorf("netdev %s: set MTU %d: %w", want.Name, want.MTU, err)
		}
	}
	if err := b.enslave(link, bridge); err != nil {
		return err
	}
	return b.up(link)
}

func (b *bridges) enslave(link, bridge netlink.Link) error {
	if link.Attrs().MasterIndex == bridge.Attrs().Index {
		return nil
	}
	if err := b.handle.LinkSetMaster(link, bridge); err != nil {
		return fmt.Errorf("netdev %s: add to bridge %s: %w", link.Attrs().Name, bridge.Attrs().Name, err)
	}
	return nil
}

// removeNetwork removes the network's netdevs. Representors that are still in the bridge are set free by that.
func (b *bridges) removeNetwork(id string) error {
	if err := b.removeOwn(vxlanName(id), "vxlan", id); err != nil {
		return err
	}
	return b.removeOwn(bridgeName(id), "bridge", id)
}

func (b *bridges) removeOwn(name, typ, network string) error {
	link, err := b.find(name)
	if err != nil || link == nil || link.Type() != typ || link.Attrs().Alias != aliasPrefix+network {
		return err // what is not ours stays
	}
	return b.remove(link)
}

func (b *bridges) remove(link netlink.Link) error {
	delete(b.settled, link.Attrs().Index)
	if err := b.handle.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("netdev %s: remove: %w", link.Attrs().Name, err)
	}
	return nil
}
