// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
)

// representor finds the port's netdev. It refuses one that this machine uses itself or that another
// port has.
func (b *bridgePlane) representor(port string) (netlink.Link, error) {
	link, err := b.locate(port)
	if err != nil && !isNoRepresentor(err) {
		return nil, err
	}

	b.forget(port, link)
	if err != nil {
		return nil, err
	}

	attrs := link.Attrs()
	other, err := b.holder(link, port)
	if err != nil {
		return nil, err
	}

	if other != "" {
		return nil, reference{
			to: task{taskPort, other},
			text: fmt.Sprintf("netdev %s: is already the representor of port %s",
				attrs.Name, other),
			instead: fmt.Sprintf("netdev %s: is already the representor of another client's port",
				attrs.Name),
		}
	}

	uplink, err := b.carriesUplink(link)
	if err != nil {
		return nil, err
	}

	own := isOurs(link) || attrs.Group == linkGroup
	if uplink || own || attrs.Flags&net.FlagLoopback != 0 || link.Type() == "bridge" {
		return nil, fmt.Errorf("netdev %s: is no representor but an uplink, a bridge, a loopback "+
			"or one "+
			"of the agent's own", attrs.Name)
	}

	addrs, err := b.addresses(attrs.Index, unix.AF_UNSPEC)
	if err != nil {
		return nil, linkError(err, link, "addresses")
	}

	for _, addr := range addrs {
		if !addr.Addr().IsLinkLocalUnicast() {
			return nil, fmt.Errorf("netdev %s: has the address %s, so this machine uses it itself",
				attrs.Name, addr)
		}
	}

	return link, nil
}

// carriesUplink reports whether a netdev is an uplink, or one that an uplink is on top of.
func (b *bridgePlane) carriesUplink(link netlink.Link) (bool, error) {
	for _, u := range b.uplinks {
		lower, err := b.find(u.Name)
		for lower != nil && lower.Attrs().Index != link.Attrs().Index {
			if !isOnTop(lower) {
				lower = nil
				break
			}
			lower, err = b.handle.LinkByIndex(lower.Attrs().ParentIndex)
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

// isOnTop reports whether a netdev sends by another one of its own namespace. The parent of others,
// such as the peer of a veth, says nothing of that.
func isOnTop(link netlink.Link) bool {
	return link.Attrs().ParentIndex != 0 &&
		slices.Contains([]string{"vlan", "macvlan", "macvtap", "ipvlan"}, link.Type())
}

// locate finds the port's netdev by its name or alternative name, or else by what the port's id
// says of its Function. The error is an errNoRepresentor if there is none.
func (b *bridgePlane) locate(port string) (netlink.Link, error) {
	named, err := b.find(port)
	if err != nil {
		return nil, err
	}
	return b.choose(port, named)
}

// choose returns the netdev with the port's name if it may be the port, or else the one that the
// port's id says. named is nil if no netdev has that name.
func (b *bridgePlane) choose(port string, named netlink.Link) (netlink.Link, error) {
	var byName error = errNoRepresentor{
		fmt.Errorf("netdev %s is missing: no netdev has it as its name or alternative name", port),
	}
	if named != nil {
		if byName = b.representors.admits(port, named.Attrs().Index); byName == nil {
			return named, nil
		}
	}

	for again := false; ; again = true {
		index, err := b.representors.ifindex(port)
		if err != nil {
			return nil, notFound(byName, err)
		}

		link, err := b.handle.LinkByIndex(index)
		if err == nil {
			return link, nil
		}
		if !errors.Is(err, links.ErrNotFound) || again {
			return nil, fmt.Errorf("netdev with ifindex %d: %w", index, err)
		}

		b.representors.stale.Store(true) // its event has not been read yet
	}
}

// notFound joins why a port is not the netdev of its name with why it is no other. The error is an
// errNoRepresentor if both are certain.
func notFound(byName, byID error) error {
	certain := isNoRepresentor(byName) && isNoRepresentor(byID)
	err := errors.New(byName.Error() + ", and by its id: " + byID.Error())
	if certain {
		return errNoRepresentor{err}
	}
	return err
}

// holder returns another port that the netdev already represents, "" if there is none: a netdev can
// have the name of one port and the PCI address of another.
func (b *bridgePlane) holder(link netlink.Link, port string) (string, error) {
	known, _ := b.users.of(link.Attrs().Index)
	if known.kind != taskPort || known.id == port {
		return "", nil
	}

	its, err := b.locate(known.id)
	if isNoRepresentor(err) || err == nil && its.Attrs().Index != link.Attrs().Index {
		return "", nil
	}
	if err == nil {
		return known.id, nil
	}

	text := linkError(err, link, "whether it is the representor of port %s", known.id).Error()
	return known.id, reference{
		to: task{taskPort, known.id}, text: text,
		instead: fmt.Sprintf("netdev %s: whether it is the representor of another client's port "+
			"is not known", link.Attrs().Name),
	}
}

// join puts a representor into a bridge of the agent, unless it is in somebody else's.
func (b *bridgePlane) join(rep, bridge netlink.Link) error {
	if rep.Attrs().MasterIndex == bridge.Attrs().Index {
		return nil
	}

	master, err := b.master(rep)
	if err != nil {
		return err
	}
	if master != nil && !isOurs(master) {
		return fmt.Errorf("netdev %s: is a port of %s, which is not ours", rep.Attrs().Name,
			master.Attrs().Name)
	}
	if err := b.disableIPv6(rep); err != nil {
		return err
	}

	b.forwarding.forget(rep.Attrs().Index)
	return b.enslave(rep, bridge)
}

func (b *bridgePlane) detach(port string) error {
	link, err := b.locate(port)
	if err != nil && !isNoRepresentor(err) {
		return err
	}

	b.forget(port, link)
	b.placement.remove(port)
	if link == nil {
		return nil
	}
	if other, err := b.holder(link, port); err != nil || other != "" {
		return err
	}

	err = b.release(link)
	if err == nil {
		b.users.remove(link.Attrs().Index)
	}

	return err
}

// release takes a netdev out of the agent's bridge, sets it down and ends its source filter.
func (b *bridgePlane) release(link netlink.Link) error {
	b.forwarding.forget(link.Attrs().Index)
	if err := b.takeOut(link); err != nil {
		return err
	}
	return linkError(b.filter.Remove(link.Attrs().Index), link,
		"end the filter of its source addresses")
}

// takeOut leaves a netdev alone that is in no bridge of the agent.
func (b *bridgePlane) takeOut(link netlink.Link) error {
	master, err := b.master(link)
	if err != nil || master == nil || !isOurs(master) {
		return err
	}
	// It is set down first, so that it never carries frames outside of the bridge.
	if err := b.handle.LinkSetDown(link); err != nil {
		return linkError(err, link, "set down")
	}

	return linkError(b.handle.LinkSetNoMaster(link), link, "take out of bridge %s",
		master.Attrs().Name)
}

// master returns the bridge or other netdev that a netdev is a port of, nil if there is none.
func (b *bridgePlane) master(link netlink.Link) (netlink.Link, error) {
	if link.Attrs().MasterIndex == 0 {
		return nil, nil
	}
	master, err := b.handle.LinkByIndex(link.Attrs().MasterIndex)
	return master, linkError(err, link, "its master")
}

// forget forgets and releases the representors that the port had before, all but now.
func (b *bridgePlane) forget(port string, now netlink.Link) {
	for _, index := range b.users.netdevs(task{taskPort, port}) {
		if now != nil && now.Attrs().Index == index {
			continue
		}

		b.users.remove(index)
		link, err := b.handle.LinkByIndex(index)
		if err != nil {
			b.forwarding.forget(index)
			_ = b.filter.Remove(index) // as below
			continue
		}

		_ = b.release(link) // sweep tries again at the next start
	}
}
