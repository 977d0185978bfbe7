package bridge

import (
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

const (
	vxlanPort = 4789 // RFC 7348, section 8
	// vxlanOverhead is what VXLAN over IPv4 adds to a frame's IP packet: 14 inner Ethernet, 8 VXLAN, 8 UDP, 20 IP.
	vxlanOverhead = 50
)

// netdevs is what all data planes have in common: finding, making, marking and watching netdevs. One call at a time,
// except for watch.
type netdevs struct {
	uplink string // empty: no VXLAN
	handle *netlink.Handle
	raw    *nl.SocketHandle // for requests that the netlink library has no call for
	events *nl.NetlinkSocket
	// eswitches tells of devlink ports, and locator finds representors by it and by names that drivers give.
	eswitches *devlink.Conn
	locator   *locator

	settled map[int]bool // bridges, by ifindex, whose settings were made by this process

	mu       sync.Mutex
	attached map[int]string // ports by the ifindex of their representor, which may lose its name or vanish
	tunnels  map[int]string // networks by the ifindex of their VXLAN port: events of a bridge port tell no alias
}

// openNetdevs works in the network namespace of the calling thread, for ever.
func openNetdevs(uplink string, where portFinder) (_ *netdevs, err error) {
	d := &netdevs{uplink: uplink, settled: map[int]bool{}, attached: map[int]string{}, tunnels: map[int]string{}}
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	// First the events, so that nothing is missed between looking and listening.
	d.events, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR)
	if err != nil {
		return nil, fmt.Errorf("subscribe to netdev events: %w", err)
	}
	// A burst of some hundred netdevs fits. If it overflows all the same, everything is looked at again.
	if err := d.events.SetReceiveBufferSize(1<<20, false); err != nil {
		return nil, fmt.Errorf("subscribe to netdev events: receive buffer: %w", err)
	}
	raw, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	d.raw = &nl.SocketHandle{Socket: raw}
	if d.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	if d.eswitches, err = devlink.Dial("/proc/thread-self/ns/net"); err != nil {
		return nil, err
	}
	d.locator = &locator{places: where, ports: d.eswitches.Ports, physical: d.physical, told: map[int]bool{}}
	return d, nil
}

// close lets go of the sockets and leaves the data plane as it is. watch ends.
func (d *netdevs) close() {
	if d.events != nil {
		_ = d.events.Close()
	}
	if d.raw != nil {
		d.raw.Close()
	}
	if d.handle != nil {
		_ = d.handle.Close()
	}
	if d.eswitches != nil {
		d.eswitches.Close()
	}
}

// find gives the netdev of this name or alternative name, nil if there is none.
func (d *netdevs) find(name string) (netlink.Link, error) {
	link, err := d.handle.LinkByName(name)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("netdev %s: %w", name, err)
	}
	return link, nil
}

// own gives our netdev of this name, type and id (a network's, or that of the shared bridge), nil if there is none. One that is somebody else's is an error;
// one without a mark that is down is ours: we died between making and marking it.
func (d *netdevs) own(name, typ, id string) (netlink.Link, error) {
	link, err := d.find(name)
	if err != nil || link == nil {
		return nil, err
	}
	alias := link.Attrs().Alias
	fresh := alias == "" && link.Attrs().Flags&net.FlagUp == 0
	if link.Type() != typ || !fresh && alias != aliasPrefix+id {
		return nil, fmt.Errorf("netdev %s: the name is taken by a netdev that is not ours (type %s, alias %q)", name, link.Type(), alias)
	}
	if fresh {
		return link, d.mark(link, id)
	}
	return link, nil
}

func (d *netdevs) mark(link netlink.Link, id string) error {
	if err := d.handle.LinkSetAlias(link, aliasPrefix+id); err != nil {
		return fmt.Errorf("netdev %s: set alias: %w", link.Attrs().Name, err)
	}
	return nil
}

// add makes a netdev and marks it as ours.
func (d *netdevs) add(link netlink.Link, id string) (netlink.Link, error) {
	name := link.Attrs().Name
	if err := d.handle.LinkAdd(link); err != nil {
		return nil, fmt.Errorf("netdev %s: add %s: %w", name, link.Type(), err)
	}
	made, err := d.find(name)
	if err != nil {
		return nil, err
	}
	if made == nil {
		return nil, fmt.Errorf("netdev %s vanished right after it was made", name)
	}
	return made, d.mark(made, id)
}

// settle makes a bridge a plain one, once: no spanning tree and no multicast snooping, which need a peer to talk to
// and a querier to work, and no address of its own. The settings cannot be read back with the netlink library, and
// setting them is an event, so it is not done again.
func (d *netdevs) configureOnce(bridge netlink.Link) error {
	index := bridge.Attrs().Index
	if d.settled[index] {
		return nil
	}
	err := d.configure(bridge,
		nl.NewRtAttr(nl.IFLA_BR_STP_STATE, nl.Uint32Attr(0)),
		nl.NewRtAttr(nl.IFLA_BR_FORWARD_DELAY, nl.Uint32Attr(0)),
		nl.NewRtAttr(nl.IFLA_BR_MCAST_SNOOPING, nl.Uint8Attr(0)))
	if err != nil {
		return fmt.Errorf("netdev %s: turn off STP and multicast snooping: %w", bridge.Attrs().Name, err)
	}
	if err := d.quiet(bridge); err != nil {
		return err
	}
	d.settled[index] = true
	return nil
}

// configure sets attributes of a bridge, and no others. The netlink library would write back all that it has read.
func (d *netdevs) configure(bridge netlink.Link, attrs ...*nl.RtAttr) error {
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: d.raw}
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(bridge.Attrs().Index)
	req.AddData(msg)
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

// quiet keeps the kernel from giving the netdev an IPv6 link-local address, and takes the one it has. A kernel
// without IPv6 has nothing to be kept from.
func (d *netdevs) quiet(link netlink.Link) error {
	err := d.handle.LinkSetIP6AddrGenMode(link, nl.IN6_ADDR_GEN_MODE_NONE)
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		return nil // EINVAL: IPv6 is off for this netdev
	}
	if err != nil {
		return fmt.Errorf("netdev %s: IPv6 address generation off: %w", link.Attrs().Name, err)
	}
	addrs, err := d.handle.AddrList(link, netlink.FAMILY_V6)
	if err != nil {
		return fmt.Errorf("netdev %s: addresses: %w", link.Attrs().Name, err)
	}
	for _, addr := range addrs {
		if !addr.IP.IsLinkLocalUnicast() {
			continue
		}
		if err := d.handle.AddrDel(link, &addr); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("netdev %s: remove %s: %w", link.Attrs().Name, addr.IP, err)
		}
	}
	return nil
}

func (d *netdevs) up(link netlink.Link) error {
	if link.Attrs().Flags&net.FlagUp != 0 {
		return nil
	}
	if err := d.handle.LinkSetUp(link); err != nil {
		return fmt.Errorf("netdev %s: set up: %w", link.Attrs().Name, err)
	}
	return nil
}

// group is the multicast group of a VNI, to which frames go whose destination is not known yet: 239.x.y.z of the
// administratively scoped range (RFC 2365) with the VNI's 24 bits.
func group(vni uint32) net.IP {
	return net.IPv4(239, byte(vni>>16), byte(vni>>8), byte(vni)).To4()
}

// ensureVXLAN gives the bridge a VXLAN port, to reach the same network on other xPUs: flood and learn (RFC 7348, section 4.1).
func (d *netdevs) ensureVXLAN(id string, vni uint32, bridge netlink.Link) (netlink.Link, error) {
	uplink, err := d.find(d.uplink)
	if err != nil {
		return nil, err
	}
	if uplink == nil {
		return nil, fmt.Errorf("netdev %s, the uplink, is missing", d.uplink)
	}
	addrs, err := d.handle.AddrList(uplink, netlink.FAMILY_V4)
	if err != nil {
		return nil, fmt.Errorf("netdev %s, the uplink: addresses: %w", d.uplink, err)
	}
	if len(addrs) == 0 {
		return nil, fmt.Errorf("netdev %s, the uplink, has no IPv4 address to send VXLAN from", d.uplink)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = vxlanName(id)
	attrs.MTU = uplink.Attrs().MTU - vxlanOverhead
	want := &netlink.Vxlan{LinkAttrs: attrs, VxlanId: int(vni), VtepDevIndex: uplink.Attrs().Index, Group: group(vni), Port: vxlanPort, Learning: true}

	link, err := d.own(want.Name, "vxlan", id)
	if err != nil {
		return nil, err
	}
	if have, ok := link.(*netlink.Vxlan); ok && (have.VxlanId != want.VxlanId || have.VtepDevIndex != want.VtepDevIndex ||
		!have.Group.Equal(want.Group) || have.Port != want.Port) {
		if err := d.remove(link); err != nil {
			return nil, err
		}
		link = nil
	}
	if link == nil {
		if link, err = d.add(want, id); err != nil {
			return nil, err
		}
		if err := d.quiet(link); err != nil {
			return nil, err
		}
	}
	if link.Attrs().MTU != want.MTU {
		if err := d.handle.LinkSetMTU(link, want.MTU); err != nil {
			return nil, fmt.Errorf("netdev %s: set MTU %d: %w", want.Name, want.MTU, err)
		}
	}
	if err := d.enslave(link, bridge); err != nil {
		return nil, err
	}
	d.mu.Lock()
	d.tunnels[link.Attrs().Index] = id
	d.mu.Unlock()
	return link, d.up(link)
}

func (d *netdevs) enslave(link, bridge netlink.Link) error {
	if link.Attrs().MasterIndex == bridge.Attrs().Index {
		return nil
	}
	if err := d.handle.LinkSetMaster(link, bridge); err != nil {
		return fmt.Errorf("netdev %s: add to bridge %s: %w", link.Attrs().Name, bridge.Attrs().Name, err)
	}
	return nil
}

func (d *netdevs) removeOwn(name, typ, id string) error {
	link, err := d.find(name)
	if err != nil || link == nil || link.Type() != typ || link.Attrs().Alias != aliasPrefix+id {
		return err // what is not ours stays
	}
	return d.remove(link)
}

func (d *netdevs) remove(link netlink.Link) error {
	delete(d.settled, link.Attrs().Index)
	d.mu.Lock()
	delete(d.tunnels, link.Attrs().Index)
	d.mu.Unlock()
	if err := d.handle.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("netdev %s: remove: %w", link.Attrs().Name, err)
	}
	return nil
}
