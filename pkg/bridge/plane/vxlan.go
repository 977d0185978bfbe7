// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/sourcefilter"
)

// wantedVXLAN describes the VXLAN port of a network and its underlay. The port is nil if the
// network has no VNI. It has no multicast group if the network's frames are sent to remotes.
func (p *Plane) wantedVXLAN(n Segment) (want *netlink.Vxlan, under underlay, err error) {
	if n.VNI == 0 {
		return nil, under, nil
	}

	if under, err = p.underlayOf(n.VNI, n.VTEP); err != nil {
		return nil, under, err
	}

	group := under.group
	if n.Unicast {
		group = nil
	}

	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = vxlanName(n.ID), under.mtu
	return &netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: int(n.VNI), VtepDevIndex: under.uplink.Attrs().Index,
		Group: group, Port: 4789, Learning: true, // RFC 7348, section 8
		SrcAddr: n.VTEP.AsSlice(),
	}, under, nil
}

// ensureVXLAN brings up a network's VXLAN port in a bridge. The port connects the network to other
// xPUs by flooding and learning (RFC 7348, section 4.1).
func (p *Plane) ensureVXLAN(
	n Segment, want *netlink.Vxlan, under underlay, bridge netlink.Link,
) (netlink.Link, error) {
	link, err := p.ensure(want, n.ID)
	if err != nil {
		return nil, err
	}

	if have, ok := link.(*netlink.Vxlan); ok &&
		(have.VxlanId != want.VxlanId || have.VtepDevIndex != want.VtepDevIndex ||
			!have.Group.Equal(want.Group) || !have.SrcAddr.Equal(want.SrcAddr) ||
			have.Port != want.Port) {
		if err = p.remove(link); err == nil {
			link, err = p.ensure(want, n.ID)
		}
	}

	if err == nil && link == want { // the netdev is new
		err = p.disableIPv6(link)
	}

	if err == nil && link.Attrs().MTU != want.MTU {
		err = linkError(p.handle.LinkSetMTU(link, want.MTU), link, "set MTU %d", want.MTU)
	}

	if err == nil {
		router := sourcefilter.RouterMAC(under.sender(n.VTEP))
		p.routers[n.ID] = router
		err = linkError(p.filter.SetVXLAN(n.ID, sourcefilter.VXLAN{
			Index: link.Attrs().Index, Router: router,
		}), link, "filter foreign source addresses")
	}

	if err == nil {
		err = p.setRemotes(link, n, under)
	}

	if err == nil {
		err = p.enslave(link, bridge)
	}
	if err != nil {
		return nil, err
	}

	p.owners.set(link.Attrs().Index, Object{KindNetwork, n.ID})
	return link, explainGroupLimits(p.up(link))
}

// removeVXLAN removes a network's VXLAN port, if it has one.
func (p *Plane) removeVXLAN(network string) error {
	if err := p.removeOwn(vxlanName(network), "vxlan", network); err != nil {
		return err
	}
	delete(p.routers, network)
	return p.filter.SetVXLAN(network, sourcefilter.VXLAN{})
}
