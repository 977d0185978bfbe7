// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/representor"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/sourcefilter"
)

// Attach puts the port's representor into the bridge of its networks, and in the VLAN-aware mode
// into their VLANs.
func (p *Plane) Attach(port string, to Membership) error {
	if to.Trunk && !p.vlanAware { // the state file may come from the VLAN-aware mode
		return errors.New(NoTrunks)
	}

	rep, err := p.representor(port)
	if err != nil {
		return err
	}

	var vlans []uint16
	for _, n := range to.Networks {
		if err := p.checkVLAN(n); err != nil {
			return fmt.Errorf("logical bridge %s is down: %w", n.ID, err)
		}
		vlans = append(vlans, n.VLAN)
	}

	if err := p.filterSource(rep, to); err != nil {
		return err
	}

	bridge, err := p.joinBridge(rep, port, to.Networks)
	if err != nil {
		return err
	}

	p.owners.set(rep.Attrs().Index, Object{KindPort, port})

	if !p.vlanAware {
		vlans = []uint16{0} // stands for all VLANs in a bridge that does not filter them
	} else if err := p.setVLANs(rep, vlans, to.Trunk); err != nil {
		return err
	}

	if err := p.up(rep); err != nil {
		return err
	}

	return p.setForwarding(to.MAC, rep, bridge, port, vlans)
}

// Detach takes the port's representor out of its bridge. It also succeeds if the port has no
// representor.
func (p *Plane) Detach(port string) error {
	link, err := p.representors.Find(port)
	if err != nil && !representor.IsNotFound(err) {
		return err
	}

	p.releaseOthers(port, link)
	p.placement.removePort(port)
	if link == nil {
		return nil
	}
	if other, err := p.otherOwner(link, port); err != nil || other != "" {
		return err
	}

	err = p.release(link)
	if err == nil {
		p.owners.remove(link.Attrs().Index)
	}

	return err
}

// PortWithMAC returns the id of the port of the only Function for clients that has the MAC. Several
// goroutines may call it.
func (p *Plane) PortWithMAC(mac net.HardwareAddr) (id string, err error) {
	return p.representors.WithMAC(mac)
}

// representor finds the port's netdev. It refuses a netdev that this machine uses itself, or that
// is the representor of another port.
func (p *Plane) representor(port string) (netlink.Link, error) {
	link, err := p.representors.Find(port)
	if err != nil && !representor.IsNotFound(err) {
		return nil, err
	}

	p.releaseOthers(port, link)
	if err != nil {
		return nil, err
	}

	attrs := link.Attrs()
	other, err := p.otherOwner(link, port)
	if err != nil {
		return nil, err
	}

	if other != "" {
		return nil, ObjectError{
			Object: Object{KindPort, other},
			Text: fmt.Sprintf("netdev %s: is already the representor of port %s",
				attrs.Name, other),
			Anonymous: fmt.Sprintf("netdev %s: is already the representor of another client's port",
				attrs.Name),
		}
	}

	return link, p.checkUnused(link)
}

// checkUnused returns an error if this machine uses a netdev itself.
func (p *Plane) checkUnused(link netlink.Link) error {
	attrs := link.Attrs()
	uplink, err := p.carriesUplink(link)
	if err != nil {
		return err
	}

	own := isOurs(link) || attrs.Group == linkGroup
	if uplink || own || attrs.Flags&net.FlagLoopback != 0 || link.Type() == "bridge" {
		return fmt.Errorf("netdev %s: is no representor but an uplink, a bridge, a loopback "+
			"or one of the agent's own", attrs.Name)
	}

	addrs, err := p.addresses(attrs.Index, unix.AF_UNSPEC)
	if err != nil {
		return linkError(err, link, "addresses")
	}

	for _, addr := range addrs {
		if !addr.Addr().IsLinkLocalUnicast() {
			return fmt.Errorf("netdev %s: has the address %s, so this machine uses it itself",
				attrs.Name, addr)
		}
	}

	return nil
}

// carriesUplink reports whether a netdev is an uplink, or whether an uplink is on top of it.
func (p *Plane) carriesUplink(link netlink.Link) (bool, error) {
	for _, u := range p.uplinks {
		lower, err := p.find(u.Name)
		for lower != nil && lower.Attrs().Index != link.Attrs().Index {
			if !isOnTop(lower) {
				lower = nil
				break
			}
			lower, err = p.handle.LinkByIndex(lower.Attrs().ParentIndex)
		}

		if err != nil {
			return false, linkError(err, link, "whether it is beneath uplink %s", u.Name)
		}
		if lower != nil {
			return true, nil
		}
	}
	return false, nil
}

// isOnTop reports whether a netdev sends by another netdev of its own namespace. Only some types
// do. For others, ParentIndex means something else, such as the peer of a veth.
func isOnTop(link netlink.Link) bool {
	return link.Attrs().ParentIndex != 0 &&
		slices.Contains([]string{"vlan", "macvlan", "macvtap", "ipvlan"}, link.Type())
}

// otherOwner returns another port that the netdev already represents, or "" if there is none. Two
// ports can find the same netdev, because it can have the name of one port and the PCI address of
// the other.
func (p *Plane) otherOwner(link netlink.Link, port string) (string, error) {
	owner, _ := p.owners.get(link.Attrs().Index)
	if owner.Kind != KindPort || owner.ID == port {
		return "", nil
	}

	found, err := p.representors.Find(owner.ID)
	if representor.IsNotFound(err) || err == nil && found.Attrs().Index != link.Attrs().Index {
		return "", nil
	}
	if err == nil {
		return owner.ID, nil
	}

	text := linkError(err, link, "whether it is the representor of port %s", owner.ID).Error()
	return owner.ID, ObjectError{
		Object: owner, Text: text,
		Anonymous: fmt.Sprintf("netdev %s: whether it is the representor of another client's port "+
			"is not known", link.Attrs().Name),
	}
}

// filterSource limits the source addresses of what comes from a representor.
func (p *Plane) filterSource(rep netlink.Link, to Membership) error {
	port := sourcefilter.Port{Index: rep.Attrs().Index}
	for _, n := range to.Networks {
		var mac net.HardwareAddr
		sources := to.Sources[n.ID]
		if sources.Filtered {
			mac = to.MAC
		}

		if to.Trunk {
			port.Tagged = append(port.Tagged, sourcefilter.Tagged{
				VLAN: n.VLAN, Network: n.ID, MAC: mac, Addresses: sources.Addresses,
				Shared: sources.Shared,
			})
			continue
		}
		port.Networks = append(port.Networks, n.ID)
		port.MAC, port.Addresses, port.Shared = mac, sources.Addresses, sources.Shared
	}
	return linkError(p.filter.SetPort(port), rep, "filter its source addresses")
}

// joinBridge puts a port's representor into the bridge of the port's networks. If that bridge is
// full and these networks have no other ports, they move to another bridge.
func (p *Plane) joinBridge(
	rep netlink.Link, port string, networks []Segment,
) (bridge netlink.Link, err error) {
	if !p.vlanAware {
		if bridge, err = p.ensureBridge(p.bridgeOf(networks[0].ID)); err != nil {
			return nil, err
		}
		return bridge, p.join(rep, bridge)
	}

	for lowest := 0; ; {
		number, moved, err := p.placement.colocate(networks, port, lowest)
		if err != nil {
			return nil, err
		}

		for _, n := range moved {
			if _, _, err := p.ensureNetwork(n); err != nil { // moves its VXLAN port
				delete(p.placement.bridges, n.ID)
				return nil, fmt.Errorf("logical bridge %s: %w", n.ID, err)
			}
		}

		if bridge, err = p.ensureBridge(sharedBridgeOf(number)); err != nil {
			return nil, err
		}

		err = p.join(rep, bridge)
		pinned := slices.ContainsFunc(networks, func(n Segment) bool {
			return p.placement.isPinned(n.ID, port)
		})
		if errors.Is(err, unix.EXFULL) && !pinned {
			lowest = number + 1
			continue
		}

		if err == nil {
			p.placement.setPort(port, networks)
		}

		return bridge, err
	}
}

// join puts a representor into a bridge of the agent. It refuses a representor that is in a bridge
// of another program.
func (p *Plane) join(rep, bridge netlink.Link) error {
	if rep.Attrs().MasterIndex == bridge.Attrs().Index {
		return nil
	}

	master, err := p.master(rep)
	if err != nil {
		return err
	}
	if master != nil && !isOurs(master) {
		return fmt.Errorf("netdev %s: is a port of %s, which is not ours", rep.Attrs().Name,
			master.Attrs().Name)
	}
	if err := p.disableIPv6(rep); err != nil {
		return err
	}

	p.forwarding.removePort(rep.Attrs().Index)
	return p.enslave(rep, bridge)
}

// release takes a netdev out of the agent's bridge, sets it down and ends its source filter.
func (p *Plane) release(link netlink.Link) error {
	p.forwarding.removePort(link.Attrs().Index)
	if err := p.leaveBridge(link); err != nil {
		return err
	}
	return linkError(p.filter.Remove(link.Attrs().Index), link,
		"end the filter of its source addresses")
}

// leaveBridge takes a netdev out of the agent's bridge. It leaves a netdev alone that is in no
// bridge of the agent.
func (p *Plane) leaveBridge(link netlink.Link) error {
	master, err := p.master(link)
	if err != nil || master == nil || !isOurs(master) {
		return err
	}
	// It is set down first, so that it never carries frames outside of the bridge.
	if err := p.handle.LinkSetDown(link); err != nil {
		return linkError(err, link, "set down")
	}

	return linkError(p.handle.LinkSetNoMaster(link), link, "take out of bridge %s",
		master.Attrs().Name)
}

// master returns the bridge or other netdev that a netdev is a port of, or nil if there is none.
func (p *Plane) master(link netlink.Link) (netlink.Link, error) {
	if link.Attrs().MasterIndex == 0 {
		return nil, nil
	}
	master, err := p.handle.LinkByIndex(link.Attrs().MasterIndex)
	return master, linkError(err, link, "its master")
}

// releaseOthers releases the netdevs that represented the port before, except its current one.
func (p *Plane) releaseOthers(port string, current netlink.Link) {
	for _, index := range p.owners.netdevsOf(Object{KindPort, port}) {
		if current != nil && current.Attrs().Index == index {
			continue
		}

		// Errors are ignored, because Sweep tries again at the next start.
		p.owners.remove(index)
		link, err := p.handle.LinkByIndex(index)
		if err != nil {
			p.forwarding.removePort(index)
			_ = p.filter.Remove(index)
			continue
		}

		_ = p.release(link)
	}
}
