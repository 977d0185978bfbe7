package bridge

import (
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ensureVXLAN brings up a network's VXLAN port in a bridge, which connects it to other xPUs by flooding and learning (RFC 7348,
// section 4.1). It removes the VXLAN port of a network without a VNI, and returns nil.
func (b *bridgePlane) ensureVXLAN(n segment, bridge netlink.Link) (netlink.Link, error) {
	if n.vni == 0 {
		return nil, b.removeVXLAN(n.id)
	}
	uplink, err := b.findUplink()
	if err != nil {
		return nil, err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = vxlanName(n.id)
	const overhead = 14 + 8 + 8 + 20 // of the inner Ethernet, VXLAN, UDP and IPv4 headers
	attrs.MTU = uplink.Attrs().MTU - overhead
	// Frames to unknown addresses go to a group of the administratively scoped range (RFC 2365) with the VNI's 24 bits.
	group := net.IPv4(239, byte(n.vni>>16), byte(n.vni>>8), byte(n.vni)).To4()
	want := &netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: int(n.vni), VtepDevIndex: uplink.Attrs().Index,
		Group: group, Port: 4789, Learning: true, // RFC 7348, section 8
	}
	link, err := b.ensure(want, n.id)
	if err != nil {
		return nil, err
	}
	if have, ok := link.(*netlink.Vxlan); ok && (have.VxlanId != want.VxlanId || have.VtepDevIndex != want.VtepDevIndex ||
		!have.Group.Equal(want.Group) || have.Port != want.Port) {
		if err = b.remove(link); err == nil {
			link, err = b.ensure(want, n.id)
		}
	}
	if err == nil && link == want { // it was just made
		err = b.disableIPv6(link)
	}
	if err == nil && link.Attrs().MTU != want.MTU {
		err = linkError(b.handle.LinkSetMTU(link, want.MTU), link, "set MTU %d", want.MTU)
	}
	if err == nil {
		err = linkError(b.filter.SetVXLAN(n.id, link.Attrs().Index), link, "filter foreign source addresses")
	}
	if err == nil {
		err = b.enslave(link, bridge)
	}
	if err != nil {
		return nil, err
	}
	b.users.set(link.Attrs().Index, task{taskNetwork, n.id})
	return link, explainGroupLimits(b.up(link))
}

func (b *bridgePlane) removeVXLAN(network string) error {
	if err := b.removeOwn(vxlanName(network), "vxlan", network); err != nil {
		return err
	}
	return b.filter.SetVXLAN(network, 0)
}

func (b *bridgePlane) findUplink() (netlink.Link, error) {
	uplink, err := b.find(b.uplink)
	if err != nil {
		return nil, err
	}
	if uplink == nil {
		return nil, fmt.Errorf("netdev %s, the uplink, is missing", b.uplink)
	}
	addrs, err := b.addresses(uplink.Attrs().Index, unix.AF_INET)
	if err != nil {
		return nil, fmt.Errorf("netdev %s, the uplink: addresses: %w", b.uplink, err)
	}
	if len(addrs) == 0 {
		return nil, fmt.Errorf("netdev %s, the uplink, has no IPv4 address to send VXLAN from", b.uplink)
	}
	return uplink, nil
}
