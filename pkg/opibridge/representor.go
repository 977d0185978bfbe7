package opibridge

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// attach puts the port's representor into the network's bridge, which must be there.
func (b *bridges) attach(port, network string, mac net.HardwareAddr) error {
	rep, err := b.representor(port)
	if err != nil {
		return err
	}
	bridge, err := b.own(bridgeName(network), "bridge", network)
	if err != nil {
		return err
	}
	if bridge == nil {
		return fmt.Errorf("netdev %s, the bridge of %s, is missing", bridgeName(network), network)
	}
	if master := rep.Attrs().MasterIndex; master != bridge.Attrs().Index {
		if err := b.free(rep); err != nil {
			return err
		}
		if err := b.quiet(rep); err != nil {
			return err
		}
		if err := b.enslave(rep, bridge); err != nil {
			return err
		}
	}
	b.remember(rep.Attrs().Index, port)
	if err := b.up(rep); err != nil {
		return err
	}
	// The address is known, so it is neither learned nor flooded, and no other port can take it over.
	entry := &netlink.Neigh{LinkIndex: rep.Attrs().Index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_MASTER, State: netlink.NUD_NOARP, HardwareAddr: mac}
	if err := b.handle.NeighSet(entry); err != nil {
		return fmt.Errorf("netdev %s: forward %s to it: %w", rep.Attrs().Name, mac, err)
	}
	return nil
}

// representor finds the port's netdev, and makes sure that it can be one: nothing that this machine itself needs.
func (b *bridges) representor(port string) (netlink.Link, error) {
	link, err := b.find(port)
	if err != nil {
		return nil, err
	}
	b.forget(port, link)
	if link == nil {
		return nil, fmt.Errorf("netdev %s is missing: no netdev has it as its name or alternative name", port)
	}
	attrs := link.Attrs()
	uplink := attrs.Name == b.uplink || slices.Contains(attrs.AltNames, b.uplink)
	if uplink || attrs.Flags&net.FlagLoopback != 0 || strings.HasPrefix(attrs.Alias, aliasPrefix) {
		return nil, fmt.Errorf("netdev %s: is no representor but the uplink, a loopback or one of the agent's own", attrs.Name)
	}
	addrs, err := b.handle.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("netdev %s: addresses: %w", attrs.Name, err)
	}
	for _, addr := range addrs {
		if !addr.IP.IsLinkLocalUnicast() {
			return nil, fmt.Errorf("netdev %s: has the address %s, so this machine uses it itself", attrs.Name, addr.IPNet)
		}
	}
	return link, nil
}

// free takes a netdev out of our bridge that it is in, if any. In somebody else's it is an error.
func (b *bridges) free(link netlink.Link) error {
	attrs := link.Attrs()
	if attrs.MasterIndex == 0 {
		return nil
	}
	master, err := b.handle.LinkByIndex(attrs.MasterIndex)
	if err != nil {
		return fmt.Errorf("netdev %s: its master: %w", attrs.Name, err)
	}
	if !strings.HasPrefix(master.Attrs().Alias, aliasPrefix) {
		return fmt.Errorf("netdev %s: is a port of %s, which is not ours", attrs.Name, master.Attrs().Name)
	}
	if err := b.handle.LinkSetNoMaster(link); err != nil {
		return fmt.Errorf("netdev %s: take out of bridge %s: %w", attrs.Name, master.Attrs().Name, err)
	}
	return nil
}

// detach takes the port's representor out of our bridge and sets it down. One that is gone, or is somebody else's by
// now, is left alone.
func (b *bridges) detach(port string) error {
	link, err := b.find(port)
	if err != nil {
		return err
	}
	b.forget(port, link)
	if link == nil || link.Attrs().MasterIndex == 0 {
		return nil
	}
	return b.release(link)
}

func (b *bridges) release(link netlink.Link) error {
	attrs := link.Attrs()
	if attrs.MasterIndex == 0 {
		return nil
	}
	master, err := b.handle.LinkByIndex(attrs.MasterIndex)
	if err != nil {
		return fmt.Errorf("netdev %s: its master: %w", attrs.Name, err)
	}
	if !strings.HasPrefix(master.Attrs().Alias, aliasPrefix) {
		return nil
	}
	// Down first: between the two it must not carry frames as a netdev of its own.
	if err := b.handle.LinkSetDown(link); err != nil {
		return fmt.Errorf("netdev %s: set down: %w", attrs.Name, err)
	}
	if err := b.handle.LinkSetNoMaster(link); err != nil {
		return fmt.Errorf("netdev %s: take out of bridge %s: %w", attrs.Name, master.Attrs().Name, err)
	}
	return nil
}

func (b *bridges) remember(index int, port string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.attached[index] = port
}

// forget drops what is remembered of the port's earlier representors, all but now, and releases those that are still
// there under another name. That they may have been taken over meanwhile is seen by release.
func (b *bridges) forget(port string, now netlink.Link) {
	b.mu.Lock()
	var stale []int
	for index, of := range b.attached {
		if of == port && (now == nil || now.Attrs().Index != index) {
			stale = append(stale, index)
			delete(b.attached, index)
		}
	}
	b.mu.Unlock()
	for _, index := range stale {
		if link, err := b.handle.LinkByIndex(index); err == nil {
			_ = b.release(link) // sweep has another go at the next start
		}
	}
}

// sweep removes what is ours and not to be kept: bridges and VXLAN ports of other networks, and representors in our
// bridges that are no port of the bridge's network. ports tells each port's network.
func (b *bridges) sweep(networks map[string]bool, ports map[string]string) error {
	links, err := b.handle.LinkList()
	if err != nil {
		return fmt.Errorf("list netdevs: %w", err)
	}
	ours := map[int]string{} // networks by the ifindex of their bridge
	for _, link := range links {
		if id, ok := strings.CutPrefix(link.Attrs().Alias, aliasPrefix); ok && link.Type() == "bridge" {
			ours[link.Attrs().Index] = id
		}
	}
	var failed []error
	for _, link := range links {
		attrs := link.Attrs()
		id, marked := strings.CutPrefix(attrs.Alias, aliasPrefix)
		network, inOurs := ours[attrs.MasterIndex]
		switch {
		case marked && (link.Type() == "bridge" || link.Type() == "vxlan"):
			if !networks[id] {
				failed = append(failed, b.remove(link))
			}
		case inOurs:
			names := append(slices.Clone(attrs.AltNames), attrs.Name)
			if !slices.ContainsFunc(names, func(name string) bool { return ports[name] == network }) {
				failed = append(failed, b.release(link))
			}
		}
	}
	return errors.Join(failed...)
}

// change is what a netdev event may have changed. Level-triggered: what is named is looked at again.
type change struct {
	all      bool     // events were lost
	uplink   bool     // and so all networks with a VNI
	networks []string // ids
	ports    []string // ids, and names of netdevs that are no port's
}

// watch calls emit for each event until close, from one goroutine.
func (b *bridges) watch(emit func(change)) error {
	for {
		msgs, from, err := b.events.Receive()
		switch {
		case errors.Is(err, os.ErrClosed):
			return nil
		case errors.Is(err, unix.ENOBUFS):
			emit(change{all: true})
			continue
		case err != nil:
			return fmt.Errorf("netdev events: %w", err)
		case from.Pid != nl.PidKernel:
			continue // anybody may send to a netlink socket
		}
		for _, msg := range msgs {
			switch msg.Header.Type {
			case unix.RTM_NEWLINK, unix.RTM_DELLINK:
				header := unix.NlMsghdr(msg.Header)
				link, err := netlink.LinkDeserialize(&header, msg.Data)
				if err != nil {
					emit(change{all: true})
					continue
				}
				emit(b.changeOf(link.Attrs()))
			case unix.RTM_NEWADDR, unix.RTM_DELADDR:
				emit(change{uplink: true}) // addresses of netdevs other than the uplink are rare on an xPU
			}
		}
	}
}

func (b *bridges) changeOf(attrs *netlink.LinkAttrs) change {
	names := append(slices.Clone(attrs.AltNames), attrs.Name)
	c := change{ports: names, uplink: b.uplink != "" && slices.Contains(names, b.uplink)}
	b.mu.Lock()
	if port, ok := b.attached[attrs.Index]; ok {
		c.ports = append(c.ports, port)
	}
	b.mu.Unlock()
	if id, ok := strings.CutPrefix(attrs.Alias, aliasPrefix); ok {
		c.networks = []string{id}
	}
	return c
}

// pending collects changes until somebody has the time for them.
type pending struct {
	all, uplink     bool
	networks, ports map[string]bool
}

func newPending() *pending {
	return &pending{networks: map[string]bool{}, ports: map[string]bool{}}
}

func (p *pending) add(c change) {
	p.all = p.all || c.all
	p.uplink = p.uplink || c.uplink
	for _, id := range c.networks {
		p.networks[id] = true
	}
	for _, id := range c.ports {
		p.ports[id] = true
	}
}
