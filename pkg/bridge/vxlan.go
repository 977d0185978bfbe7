package bridge

import (
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
)

const (
	vxlanPort = 4789 // RFC 7348, section 8
	// vxlanOverhead is what VXLAN over IPv4 adds to a frame's IP packet: 14 inner Ethernet, 8 VXLAN, 8 UDP, 20 IP.
	vxlanOverhead = 50
)

// multicastGroup returns the group that gets the frames of a VNI whose destination is not known yet: 239.x.y.z of the
// administratively scoped range (RFC 2365), with the VNI's 24 bits.
func multicastGroup(vni uint32) net.IP {
	return net.IPv4(239, byte(vni>>16), byte(vni>>8), byte(vni)).To4()
}

// ensureVXLAN brings up the VXLAN port of a network in a bridge. It connects the network to the same network on other xPUs
// by flooding and learning (RFC 7348, section 4.1). It removes the VXLAN port of a network without a VNI, and returns nil.
func (r *rtnetlink) ensureVXLAN(n segment, bridge netlink.Link) (netlink.Link, error) {
	if n.vni == 0 {
		return nil, r.removeOwn(vxlanName(n.id), "vxlan", n.id)
	}
	uplink, err := r.findUplink()
	if err != nil {
		return nil, err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = vxlanName(n.id)
	attrs.MTU = uplink.Attrs().MTU - vxlanOverhead
	want := &netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: int(n.vni), VtepDevIndex: uplink.Attrs().Index,
		Group: multicastGroup(n.vni), Port: vxlanPort, Learning: true,
	}
	link, err := r.ensure(want, n.id)
	if err != nil {
		return nil, err
	}
	if have, ok := link.(*netlink.Vxlan); ok && (have.VxlanId != want.VxlanId || have.VtepDevIndex != want.VtepDevIndex ||
		!have.Group.Equal(want.Group) || have.Port != want.Port) {
		if err := r.remove(link); err != nil {
			return nil, err
		}
		if link, err = r.ensure(want, n.id); err != nil {
			return nil, err
		}
	}
	if link == want { // it was just made
		if err := r.disableIPv6(link); err != nil {
			return nil, err
		}
	}
	if link.Attrs().MTU != want.MTU {
		if err := r.handle.LinkSetMTU(link, want.MTU); err != nil {
			return nil, linkError(err, link, "set MTU %d", want.MTU)
		}
	}
	if err := r.enslave(link, bridge); err != nil {
		return nil, err
	}
	r.users.Store(link.Attrs().Index, task{taskNetwork, n.id})
	return link, r.up(link)
}

// findUplink returns the uplink, which must have an IPv4 address.
func (r *rtnetlink) findUplink() (netlink.Link, error) {
	uplink, err := r.find(r.uplink)
	if err != nil {
		return nil, err
	}
	if uplink == nil {
		return nil, fmt.Errorf("netdev %s, the uplink, is missing", r.uplink)
	}
	addrs, err := r.handle.AddrList(uplink, netlink.FAMILY_V4)
	if err != nil {
		return nil, fmt.Errorf("netdev %s, the uplink: addresses: %w", r.uplink, err)
	}
	if len(addrs) == 0 {
		return nil, fmt.Errorf("netdev %s, the uplink, has no IPv4 address to send VXLAN from", r.uplink)
	}
	return uplink, nil
}
