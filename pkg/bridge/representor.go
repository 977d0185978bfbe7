package bridge

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

// join makes a representor a port of our bridge, and remembers it.
func (d *netdevs) join(rep, bridge netlink.Link, port string) error {
	if rep.Attrs().MasterIndex != bridge.Attrs().Index {
		if err := d.free(rep); err != nil {
			return err
		}
		if err := d.quiet(rep); err != nil {
			return err
		}
		if err := d.enslave(rep, bridge); err != nil {
			return err
		}
	}
	d.remember(rep.Attrs().Index, port)
	return nil
}

// forward sends frames for an address to a representor. The address is known by this, so it is neither learned nor
// flooded, and no other port can take it over. vlan is 0 in a bridge that does not filter VLANs.
func (d *netdevs) forward(rep netlink.Link, mac net.HardwareAddr, vlan uint16) error {
	if err := d.handle.NeighSet(forwarding(rep, mac, vlan)); err != nil {
		return fmt.Errorf("netdev %s: forward %s to it: %w", rep.Attrs().Name, mac, err)
	}
	return nil
}

func forwarding(rep netlink.Link, mac net.HardwareAddr, vlan uint16) *netlink.Neigh {
	return &netlink.Neigh{LinkIndex: rep.Attrs().Index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_MASTER, State: netlink.NUD_NOARP, HardwareAddr: mac, Vlan: int(vlan)}
}

// representor finds the port's netdev, and makes sure that it can be one: nothing that this machine itself needs.
func (d *netdevs) representor(port string) (netlink.Link, error) {
	link, err := d.locate(port)
	if _, nowhere := errors.AsType[errNowhere](err); err != nil && !nowhere {
		return nil, err
	}
	d.forget(port, link)
	if err != nil {
		return nil, fmt.Errorf("netdev %s is missing: no netdev has it as its name or alternative name, and by PCI address: %w",
			port, err)
	}
	attrs := link.Attrs()
	other, err := d.holder(link, port)
	if err != nil {
		return nil, err
	}
	if other != "" {
		return nil, fmt.Errorf("netdev %s: is already the representor of port %s", attrs.Name, other)
	}
	uplink := attrs.Name == d.uplink || slices.Contains(attrs.AltNames, d.uplink)
	if uplink || attrs.Flags&net.FlagLoopback != 0 || strings.HasPrefix(attrs.Alias, aliasPrefix) {
		return nil, fmt.Errorf("netdev %s: is no representor but the uplink, a loopback or one of the agent's own", attrs.Name)
	}
	addrs, err := d.handle.AddrList(link, netlink.FAMILY_ALL)
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

// locate finds the port's netdev: by name, as people agreed, or else by the PCI address in the port's id. The error is
// an errNowhere if there is none.
func (d *netdevs) locate(port string) (netlink.Link, error) {
	if link, err := d.find(port); link != nil || err != nil {
		return link, err
	}
	for again := false; ; again = true {
		index, err := d.locator.index(port)
		if err != nil {
			return nil, err
		}
		link, err := d.handle.LinkByIndex(index)
		if _, gone := errors.AsType[netlink.LinkNotFoundError](err); gone && !again {
			d.locator.expire() // the event is still to come
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("netdev with ifindex %d: %w", index, err)
		}
		return link, nil
	}
}

// holder is the port that already has a netdev as its representor, "" if none or this one has. It is another if the
// netdev has that port's name, and this one's PCI address.
func (d *netdevs) holder(link netlink.Link, port string) (string, error) {
	index := link.Attrs().Index
	d.mu.Lock()
	other := d.attached[index]
	d.mu.Unlock()
	if other == "" || other == port {
		return "", nil
	}
	its, err := d.locate(other)
	if _, nowhere := errors.AsType[errNowhere](err); nowhere {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("netdev %s: whether it is the representor of port %s: %w", link.Attrs().Name, other, err)
	}
	if its.Attrs().Index != index {
		return "", nil
	}
	return other, nil
}

// free takes a netdev out of our bridge that it is in, if any. In somebody else's it is an error.
func (d *netdevs) free(link netlink.Link) error {
	attrs := link.Attrs()
	if attrs.MasterIndex == 0 {
		return nil
	}
	master, err := d.handle.LinkByIndex(attrs.MasterIndex)
	if err != nil {
		return fmt.Errorf("netdev %s: its master: %w", attrs.Name, err)
	}
	if !strings.HasPrefix(master.Attrs().Alias, aliasPrefix) {
		return fmt.Errorf("netdev %s: is a port of %s, which is not ours", attrs.Name, master.Attrs().Name)
	}
	if err := d.handle.LinkSetNoMaster(link); err != nil {
		return fmt.Errorf("netdev %s: take out of bridge %s: %w", attrs.Name, master.Attrs().Name, err)
	}
	return nil
}

// detach takes the port's representor out of our bridge and sets it down. One that is gone, or is somebody else's by
// now, is left alone.
func (d *netdevs) detach(port string) error {
	link, err := d.locate(port)
	if _, nowhere := errors.AsType[errNowhere](err); err != nil && !nowhere {
		return err
	}
	d.forget(port, link)
	if link == nil {
		return nil
	}
	if other, err := d.holder(link, port); err != nil || other != "" {
		return err
	}
	if err := d.release(link); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.attached, link.Attrs().Index)
	return nil
}

func (d *netdevs) release(link netlink.Link) error {
	attrs := link.Attrs()
	if attrs.MasterIndex == 0 {
		return nil
	}
	master, err := d.handle.LinkByIndex(attrs.MasterIndex)
	if err != nil {
		return fmt.Errorf("netdev %s: its master: %w", attrs.Name, err)
	}
	if !strings.HasPrefix(master.Attrs().Alias, aliasPrefix) {
		return nil
	}
	// Down first: between the two it must not carry frames as a netdev of its own.
	if err := d.handle.LinkSetDown(link); err != nil {
		return fmt.Errorf("netdev %s: set down: %w", attrs.Name, err)
	}
	if err := d.handle.LinkSetNoMaster(link); err != nil {
		return fmt.Errorf("netdev %s: take out of bridge %s: %w", attrs.Name, master.Attrs().Name, err)
	}
	return nil
}

func (d *netdevs) remember(index int, port string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.attached[index] = port
}

// forget drops what is remembered of the port's earlier representors, all but now, and releases those that are still
// there under another name. That they may have been taken over meanwhile is seen by release.
func (d *netdevs) forget(port string, now netlink.Link) {
	d.mu.Lock()
	var stale []int
	for index, of := range d.attached {
		if of == port && (now == nil || now.Attrs().Index != index) {
			stale = append(stale, index)
			delete(d.attached, index)
		}
	}
	d.mu.Unlock()
	for _, index := range stale {
		if link, err := d.handle.LinkByIndex(index); err == nil {
			_ = d.release(link) // sweep has another go at the next start
		}
	}
}

// sweep removes what is ours and not to be kept: VXLAN ports of other networks, bridges, by the id in their mark, and
// netdevs in our bridges that are not the representor of a port that belongs there.
func (d *netdevs) sweep(
	networks map[string]bool, keep func(bridge string) bool,
	ports map[string]membership, belongs func(port, bridge string) bool,
) error {
	owners, err := d.owners(ports)
	if err != nil {
		return err
	}
	links, err := d.handle.LinkList()
	if err != nil {
		return fmt.Errorf("list netdevs: %w", err)
	}
	ours := map[int]string{} // ids of our bridges by ifindex
	for _, link := range links {
		if id, ok := strings.CutPrefix(link.Attrs().Alias, aliasPrefix); ok && link.Type() == "bridge" {
			ours[link.Attrs().Index] = id
		}
	}
	var failed []error
	// The representors first: one whose bridge is removed would stay up.
	for _, link := range links {
		attrs := link.Attrs()
		bridge, inOurs := ours[attrs.MasterIndex]
		if !inOurs || strings.HasPrefix(attrs.Alias, aliasPrefix) {
			continue
		}
		if port, ok := owners[attrs.Index]; !ok || !belongs(port, bridge) {
			failed = append(failed, d.release(link))
		}
	}
	for _, link := range links {
		id, marked := strings.CutPrefix(link.Attrs().Alias, aliasPrefix)
		if marked && (link.Type() == "bridge" && !keep(id) || link.Type() == "vxlan" && !networks[id]) {
			failed = append(failed, d.remove(link))
		}
	}
	return errors.Join(failed...)
}

// owners are the ports by the ifindex of their representor. It fails rather than leave one out.
func (d *netdevs) owners(ports map[string]membership) (map[int]string, error) {
	owners := map[int]string{}
	for port := range ports {
		link, err := d.locate(port)
		if _, nowhere := errors.AsType[errNowhere](err); nowhere {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("representor of port %s: %w", port, err)
		}
		owners[link.Attrs().Index] = port
	}
	return owners, nil
}

func namesOf(attrs *netlink.LinkAttrs) []string {
	return append(slices.Clone(attrs.AltNames), attrs.Name)
}

// change is what a netdev event may have changed. Level-triggered: what is named is looked at again.
type change struct {
	all      bool     // events were lost, or it is the bridge of all networks
	uplink   bool     // and so all networks with a VNI
	arrival  bool     // a netdev that was not there: what has no representor is looked at again
	networks []string // ids
	ports    []string // ids, and names of netdevs that are no port's
}

// watch calls emit for each event until close, from one goroutine.
func (d *netdevs) watch(emit func(change)) error {
	for {
		msgs, from, err := d.events.Receive()
		switch {
		case errors.Is(err, os.ErrClosed):
			return nil
		case errors.Is(err, unix.ENOBUFS):
			d.locator.lost()
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
				// A netdev that leaves a bridge is also told of as a link that is gone, in the bridge's family.
				bridging := len(msg.Data) > 0 && msg.Data[0] == unix.AF_BRIDGE
				link, err := netlink.LinkDeserialize(&header, msg.Data)
				if err != nil {
					d.locator.lost()
					emit(change{all: true})
					continue
				}
				emit(d.changeOf(link, msg.Header.Type == unix.RTM_DELLINK, bridging))
			case unix.RTM_NEWADDR, unix.RTM_DELADDR:
				emit(change{uplink: true}) // addresses of netdevs other than the uplink are rare on an xPU
			}
		}
	}
}

func (d *netdevs) changeOf(link netlink.Link, removed, bridging bool) change {
	attrs := link.Attrs()
	names := namesOf(attrs)
	c := change{ports: names, uplink: d.uplink != "" && slices.Contains(names, d.uplink)}
	switch {
	case bridging:
	case removed:
		d.locator.went(attrs.Index)
	default:
		c.arrival = d.locator.came(attrs.Index)
	}
	d.mu.Lock()
	if port, ok := d.attached[attrs.Index]; ok {
		c.ports = append(c.ports, port)
	}
	if network, ok := d.tunnels[attrs.Index]; ok {
		c.networks = append(c.networks, network)
	}
	d.mu.Unlock()
	id, ours := strings.CutPrefix(attrs.Alias, aliasPrefix)
	switch {
	case ours && id == sharedID:
		c.all = removed || attrs.Flags&net.FlagUp == 0 || !filtersVLANs(link)
	case ours:
		c.networks = append(c.networks, id)
	}
	return c
}

// pending collects changes until somebody has the time for them.
type pending struct {
	all, uplink, arrival bool
	networks, ports      map[string]bool
}

func newPending() *pending {
	return &pending{networks: map[string]bool{}, ports: map[string]bool{}}
}

func (p *pending) add(c change) {
	p.all = p.all || c.all
	p.uplink = p.uplink || c.uplink
	p.arrival = p.arrival || c.arrival
	for _, id := range c.networks {
		p.networks[id] = true
	}
	for _, id := range c.ports {
		p.ports[id] = true
	}
}
