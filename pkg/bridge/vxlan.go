// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"github.com/vishvananda/netlink"
)

// wantedVXLAN describes the VXLAN port of a network, nil for one without a VNI. blocked is why
// nothing passes the uplink that it is on; nil if frames do.
func (b *bridgePlane) wantedVXLAN(n segment) (want *netlink.Vxlan, blocked, err error) {
	if n.vni == 0 {
		return nil, nil, nil
	}

	under, err := b.underlayOf(n.vni)
	if err != nil {
		return nil, nil, err
	}

	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = vxlanName(n.id), under.mtu
	return &netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: int(n.vni), VtepDevIndex: under.uplink.Attrs().Index,
		Group: under.group, Port: 4789, Learning: true, // RFC 7348, section 8
	}, under.blocked, nil
}

// ensureVXLAN brings up a network's VXLAN port in a bridge, which connects it to other xPUs by
// flooding and learning (RFC 7348, section 4.1).
func (b *bridgePlane) ensureVXLAN(
	n segment, want *netlink.Vxlan, bridge netlink.Link,
) (netlink.Link, error) {
	link, err := b.ensure(want, n.id)
	if err != nil {
		return nil, err
	}

	if have, ok := link.(*netlink.Vxlan); ok &&
		(have.VxlanId != want.VxlanId || have.VtepDevIndex != want.VtepDevIndex ||
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
		err = linkError(b.filter.SetVXLAN(n.id, link.Attrs().Index), link,
			"filter foreign source addresses")
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
