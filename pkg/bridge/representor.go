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

// representor finds the port's netdev. It refuses one that this machine uses itself or that another port has.
func (b *bridgePlane) representor(port string) (netlink.Link, error) {
	link, err := b.locate(port)
	if err != nil && !isNoRepresentor(err) {
		return nil, err
	}
	b.forget(port, link)
	if err != nil {
		return nil, fmt.Errorf("netdev %s is missing: no netdev has it as its name or alternative name, and by PCI address: %w",
			port, err)
	}
	attrs := link.Attrs()
	uplink := slices.ContainsFunc(b.uplinks, func(u Uplink) bool { return u.is(attrs) })
	other, err := b.holder(link, port)
	switch {
	case err != nil:
		return nil, err
	case other != "":
		return nil, fmt.Errorf("netdev %s: is already the representor of port %s", attrs.Name, other)
	case uplink || attrs.Flags&net.FlagLoopback != 0 || isOurs(link):
		return nil, fmt.Errorf("netdev %s: is no representor but an uplink, a loopback or one of the agent's own", attrs.Name)
	}
	addrs, err := b.addresses(attrs.Index, unix.AF_UNSPEC)
	if err != nil {
		return nil, linkError(err, link, "addresses")
	}
	for _, addr := range addrs {
		if !addr.Addr().IsLinkLocalUnicast() {
			return nil, fmt.Errorf("netdev %s: has the address %s, so this machine uses it itself", attrs.Name, addr)
		}
	}
	return link, nil
}

// locate finds the port's netdev by its name or alternative name, or else by the PCI address in the port's id. The error is an
// errNoRepresentor if there is none.
func (b *bridgePlane) locate(port string) (netlink.Link, error) {
	if link, err := b.find(port); link != nil || err != nil {
		return link, err
	}
	for again := false; ; again = true {
		index, err := b.representors.ifindex(port)
		if err != nil {
			return nil, err
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

// holder returns another port that the netdev already represents, "" if there is none: a netdev can have the name of one port
// and the PCI address of another.
func (b *bridgePlane) holder(link netlink.Link, port string) (string, error) {
	known, _ := b.users.of(link.Attrs().Index)
	if known.kind != taskPort || known.id == port {
		return "", nil
	}
	its, err := b.locate(known.id)
	if isNoRepresentor(err) || err == nil && its.Attrs().Index != link.Attrs().Index {
		return "", nil
	}
	return known.id, linkError(err, link, "whether it is the representor of port %s", known.id)
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
		return fmt.Errorf("netdev %s: is a port of %s, which is not ours", rep.Attrs().Name, master.Attrs().Name)
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
	return linkError(b.filter.Remove(link.Attrs().Index), link, "end the filter of its source addresses")
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
	return linkError(b.handle.LinkSetNoMaster(link), link, "take out of bridge %s", master.Attrs().Name)
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
