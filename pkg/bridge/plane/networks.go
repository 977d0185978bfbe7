// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// EnsureNetwork makes a network. It returns the largest MTU with which frames reach other xPUs, or
// 0 without a VNI. If frames cannot pass the network's uplink, it returns an error although the
// network is complete; other xPUs can be reached as soon as frames pass.
func (p *Plane) EnsureNetwork(n Segment) (mtu int, err error) {
	mtu, blocked, err := p.ensureNetwork(n)
	return mtu, cmp.Or(blocked, err)
}

// ensureNetwork reserves the network's VLAN id, and brings up its bridge and, if it has a VNI, its
// VXLAN port. blocked is the reason why no frames pass the network's uplink.
func (p *Plane) ensureNetwork(n Segment) (mtu int, blocked, err error) {
	if err := p.checkVLAN(n); err != nil {
		return 0, nil, err
	}

	if p.vlanAware {
		p.vlans[n.ID] = n.VLAN
		p.placement.place(n.ID, "", 0)
	}

	bridge, err := p.ensureBridge(p.bridgeOf(n.ID))
	if err != nil {
		return 0, nil, err
	}

	want, under, err := p.wantedVXLAN(n)
	if err != nil {
		return 0, nil, err
	}
	if want == nil {
		return 0, nil, p.removeVXLAN(n.ID)
	}

	vxlan, err := p.ensureVXLAN(n, want, under, bridge)
	if number := p.placement.bridges[n.ID]; p.vlanAware && errors.Is(err, unix.EXFULL) &&
		p.placement.place(n.ID, "", number+1) > number {
		return p.ensureNetwork(n)
	}

	if err == nil && p.vlanAware {
		err = p.setVLANs(vxlan, []uint16{n.VLAN}, false)
	}

	return want.MTU, under.blocked, err
}

// checkVLAN returns an error if another network has the network's VLAN id.
func (p *Plane) checkVLAN(n Segment) error {
	for holder, vlan := range p.vlans {
		if vlan == n.VLAN && holder != n.ID {
			return ObjectError{
				Object: Object{KindNetwork, holder},
				Text: fmt.Sprintf("VLAN %d is already in use by logical bridge %s",
					n.VLAN, holder),
				Anonymous: fmt.Sprintf(
					"VLAN %d is already in use by a logical bridge of another client", n.VLAN,
				),
			}
		}
	}
	return nil
}

// RemoveNetwork removes the netdevs of a network. Its ports must have been detached.
func (p *Plane) RemoveNetwork(id string) error {
	if err := p.removeVXLAN(id); err != nil {
		return err
	}

	delete(p.vlans, id)
	if !p.vlanAware {
		return p.removeOwn(bridgeName(id), "bridge", id)
	}
	if number, inUse := p.placement.removeNetwork(id); number > 0 && !inUse {
		name, sharedID := sharedBridgeOf(number)
		return p.removeOwn(name, "bridge", sharedID)
	}

	return nil
}

// bridgeOf returns the name of a network's bridge, and the id in the bridge's alias.
func (p *Plane) bridgeOf(network string) (name, id string) {
	if p.vlanAware {
		return sharedBridgeOf(p.placement.bridges[network])
	}
	return bridgeName(network), network
}

// ensureBridge brings up the agent's bridge with this name and id.
func (p *Plane) ensureBridge(name, id string) (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	bridge, err := p.ensure(&netlink.Bridge{LinkAttrs: attrs}, id)
	if err == nil && p.vlanAware && !isVLANFiltering(bridge) {
		err = p.filterVLANs(bridge)
	}
	if err != nil {
		return nil, err
	}

	return bridge, p.setUpBridge(bridge)
}

// removeOwn removes the agent's netdev with a name, type and id. It leaves a netdev alone that is
// not the agent's.
func (p *Plane) removeOwn(name, typ, id string) error {
	link, err := p.find(name)
	if err != nil || link == nil || link.Type() != typ || link.Attrs().Alias != aliasPrefix+id {
		return err
	}
	return p.remove(link)
}

func (p *Plane) remove(link netlink.Link) error {
	delete(p.configured, link.Attrs().Index)
	p.owners.remove(link.Attrs().Index)
	p.ownVLANs.removeBridge(link.Attrs().Index)
	p.destinations.forget(link.Attrs().Index)
	if err := p.handle.LinkDel(link); !errors.Is(err, unix.ENODEV) {
		return linkError(err, link, "remove")
	}
	return nil
}
