// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/sourcefilter"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
)

// noTrunks is what is said about TRUNK ports where networks have a bridge each.
const noTrunks = "ptype TRUNK: needs the data plane " + string(DataPlaneVLANAware) +
	", this agent's has a bridge for each network and serves ACCESS ports"

// bridgePlane is the data plane of Linux bridges. If it is VLAN-aware, all networks share a bridge,
// or some few, in which a network is its VLAN id: ACCESS and VXLAN ports have it untagged, a TRUNK
// port has those of its networks tagged. A shared bridge has no default VLAN and is itself in none,
// so that neither a netdev that was just added nor the machine is in a network. Otherwise each
// network has a bridge of its own, and VLAN ids mean nothing. Only one goroutine may use it at a
// time, except for watch.
type bridgePlane struct {
	uplinks  []Uplink // none: no VXLAN
	underlay Underlay
	handle   *links.Handle
	raw      nl.SocketHandle // for requests for which the netlink library has no function
	// for lists of which the kernel leaves out what is of other netdevs
	strict       nl.SocketHandle
	events       *nl.NetlinkSocket // of netdevs and addresses
	entries      *nl.NetlinkSocket // of static entries of forwarding databases
	forwarding   *forwarding
	closed       atomic.Bool
	uplinksNow   map[string]uplinkState // as watch knows them, by name
	devlink      *devlink.Conn
	representors *representorCache
	filter       *sourcefilter.Filter

	vlanAware bool
	// VLAN ids by network, if VLAN-aware; of two networks that want one, the first has it
	vlans     map[string]uint16
	placement *placement   // of networks, if VLAN-aware
	settled   map[int]bool // bridges, by ifindex, whose settings were made by this process
	users     *users
}

func (b *bridgePlane) filtersVLANs() bool { return b.vlanAware }

// bridgeOf returns the name of a network's bridge, and the id in its mark.
func (b *bridgePlane) bridgeOf(network string) (name, id string) {
	if b.vlanAware {
		return sharedBridgeOf(b.placement.bridges[network])
	}
	return bridgeName(network), network
}

func (b *bridgePlane) ensureBridge(name, id string) (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	bridge, err := b.ensure(&netlink.Bridge{LinkAttrs: attrs}, id)
	if err == nil && b.vlanAware && !isVLANFiltering(bridge) {
		err = b.filterVLANs(bridge)
	}
	if err != nil {
		return nil, err
	}

	return bridge, b.settle(bridge)
}

// ensureNetwork makes the network. It then is an error that nothing passes its uplink: the network
// is complete, and reaches other xPUs as soon as frames pass again.
func (b *bridgePlane) ensureNetwork(n segment) (mtu int, err error) {
	mtu, blocked, err := b.realiseNetwork(n)
	return mtu, cmp.Or(blocked, err)
}

// realiseNetwork takes the network's VLAN id, and brings up its bridge, and the VXLAN port if it
// has a VNI. blocked is why nothing passes the network's uplink.
func (b *bridgePlane) realiseNetwork(n segment) (mtu int, blocked, err error) {
	if err := b.available(n); err != nil {
		return 0, nil, err
	}

	if b.vlanAware {
		b.vlans[n.id] = n.vlan
		b.placement.place(n.id, "", 0)
	}

	bridge, err := b.ensureBridge(b.bridgeOf(n.id))
	if err != nil {
		return 0, nil, err
	}

	want, blocked, err := b.wantedVXLAN(n)
	if err != nil {
		return 0, nil, err
	}
	if want == nil {
		return 0, nil, b.removeVXLAN(n.id)
	}

	vxlan, err := b.ensureVXLAN(n, want, bridge)
	if number := b.placement.bridges[n.id]; b.vlanAware && errors.Is(err, unix.EXFULL) &&
		b.placement.place(n.id, "", number+1) > number {
		return b.realiseNetwork(n)
	}

	if err == nil && b.vlanAware {
		err = b.setVLANs(vxlan, []uint16{n.vlan}, false)
	}

	return want.MTU, blocked, err
}

func (b *bridgePlane) available(n segment) error {
	for holder, vlan := range b.vlans {
		if vlan == n.vlan && holder != n.id {
			return reference{
				to: task{taskNetwork, holder},
				text: fmt.Sprintf("VLAN %d is already in use by logical bridge %s",
					n.vlan, holder),
				instead: fmt.Sprintf(
					"VLAN %d is already in use by a logical bridge of another client", n.vlan,
				),
			}
		}
	}
	return nil
}

// removeNetwork removes the network's netdevs. Its ports must have been detached.
func (b *bridgePlane) removeNetwork(id string) error {
	if err := b.removeVXLAN(id); err != nil {
		return err
	}

	delete(b.vlans, id)
	if !b.vlanAware {
		return b.removeOwn(bridgeName(id), "bridge", id)
	}
	if number, shared := b.placement.forget(id); number > 0 && !shared {
		name, mark := sharedBridgeOf(number)
		return b.removeOwn(name, "bridge", mark)
	}

	return nil
}

// attach puts the port's representor into the bridge, and into its networks' VLANs if the bridge is
// VLAN-aware.
func (b *bridgePlane) attach(port string, to membership) error {
	if to.trunk && !b.vlanAware { // from a state of the other data plane
		return errors.New(noTrunks)
	}

	rep, err := b.representor(port)
	if err != nil {
		return err
	}

	var vlans []uint16
	for _, n := range to.networks {
		if err := b.available(n); err != nil {
			return fmt.Errorf("logical bridge %s is down: %w", n.id, err)
		}
		vlans = append(vlans, n.vlan)
	}

	if err := b.filterSource(rep, to); err != nil {
		return err
	}

	bridge, err := b.joinBridge(rep, port, to.networks)
	if err != nil {
		return err
	}

	b.users.set(rep.Attrs().Index, task{taskPort, port})

	if !b.vlanAware {
		vlans = []uint16{0} // stands for all in a bridge that does not filter VLANs
	} else if err := b.setVLANs(rep, vlans, to.trunk); err != nil {
		return err
	}

	if err := b.up(rep); err != nil {
		return err
	}

	return b.forward(to.mac, rep, bridge, port, vlans)
}

// joinBridge puts a port's representor into the bridge of its networks. If that one is full, and
// these networks have no other ports, they go into another one.
func (b *bridgePlane) joinBridge(
	rep netlink.Link, port string, networks []segment,
) (bridge netlink.Link, err error) {
	if !b.vlanAware {
		if bridge, err = b.ensureBridge(b.bridgeOf(networks[0].id)); err != nil {
			return nil, err
		}
		return bridge, b.join(rep, bridge)
	}

	for from := 0; ; {
		number, moved, err := b.placement.gather(networks, port, from)
		if err != nil {
			return nil, err
		}

		for _, n := range moved {
			if _, _, err := b.realiseNetwork(n); err != nil { // its VXLAN port moves too
				delete(b.placement.bridges, n.id)
				return nil, fmt.Errorf("logical bridge %s: %w", n.id, err)
			}
		}

		if bridge, err = b.ensureBridge(sharedBridgeOf(number)); err != nil {
			return nil, err
		}

		err = b.join(rep, bridge)
		stays := slices.ContainsFunc(networks, func(n segment) bool {
			return b.placement.fixed(n.id, port)
		})
		if errors.Is(err, unix.EXFULL) && !stays {
			from = number + 1
			continue
		}

		if err == nil {
			b.placement.add(port, networks)
		}

		return bridge, err
	}
}

// filterSource keeps what comes from a representor from having another source address than it may.
func (b *bridgePlane) filterSource(rep netlink.Link, to membership) error {
	port := sourcefilter.Port{Index: rep.Attrs().Index}
	for _, n := range to.networks {
		port.Networks = append(port.Networks, n.id)
	}
	if to.filtered {
		port.MAC, port.Addresses = to.mac, to.addresses
	}
	return linkError(b.filter.SetPort(port), rep, "filter its source addresses")
}

func (b *bridgePlane) dropped() (map[task]uint64, error) {
	counters, err := b.filter.Dropped()
	frames := map[task]uint64{}
	for index, n := range counters {
		if user, used := b.users.of(index); used {
			frames[user] = n
		}
	}
	return frames, err
}

func (b *bridgePlane) sweepFilter() error   { return b.filter.Sweep() }
func (b *bridgePlane) restoreFilter() error { return b.filter.Restore() }

func (b *bridgePlane) made() ([]string, error) {
	links, err := b.handle.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list netdevs: %w", err)
	}

	ownBridges := map[int]bool{} // by ifindex
	for _, link := range links {
		if isOurs(link) && link.Type() == "bridge" {
			ownBridges[link.Attrs().Index] = true
		}
	}

	var names []string
	for _, link := range links {
		id, ours := markOf(link)
		_, shared := sharedNumber(id)
		if ours && !shared || !ours && ownBridges[link.Attrs().MasterIndex] {
			names = append(names, link.Attrs().Name)
		}
	}

	slices.Sort(names)
	return names, nil
}

// sweep also takes netdevs out of the agent's bridges that are not the representor of a port that
// belongs there. It learns before which of the shared bridges the networks are in.
func (b *bridgePlane) sweep(networks []string, ports map[string]membership) error {
	links, err := b.handle.LinkList()
	if err != nil {
		return fmt.Errorf("list netdevs: %w", err)
	}

	representors, err := b.locateAll(ports, links)
	if err != nil { // rather than take one out that has to stay
		return err
	}

	bridges := map[int]string{} // ids of the agent's bridges by ifindex
	for _, link := range links {
		if id, ours := markOf(link); ours && link.Type() == "bridge" {
			bridges[link.Attrs().Index] = id
		}
	}

	if b.vlanAware {
		b.learnPlacement(links, bridges, ports, representors)
	}

	belongs := map[int]string{} // ids of bridges by the ifindex of a representor
	for port, link := range representors {
		_, belongs[link.Attrs().Index] = b.bridgeOf(ports[port].networks[0].id)
	}

	var failed []error
	// The representors first: one whose bridge is removed would stay up.
	for _, link := range links {
		bridge, inOurs := bridges[link.Attrs().MasterIndex]
		if _, ours := markOf(link); inOurs && !ours && belongs[link.Attrs().Index] != bridge {
			failed = append(failed, b.release(link))
		}
	}

	wanted := map[string][]string{"vxlan": networks, "bridge": networks} // ids by type
	if b.vlanAware {
		wanted["bridge"] = []string{sharedID}
		for _, network := range networks {
			_, id := b.bridgeOf(network)
			wanted["bridge"] = append(wanted["bridge"], id)
		}
	}

	for _, link := range links {
		id, ours := markOf(link)
		if ids, known := wanted[link.Type()]; ours && known && !slices.Contains(ids, id) {
			failed = append(failed, b.remove(link))
		}
	}

	return errors.Join(failed...)
}

// locateAll is locate for many ports, by port, with a list of all netdevs. It leaves out those
// without a representor.
func (b *bridgePlane) locateAll(
	ports map[string]membership, links []netlink.Link,
) (map[string]netlink.Link, error) {
	named := map[string]netlink.Link{}
	for _, link := range links {
		for _, name := range append(slices.Clone(link.Attrs().AltNames), link.Attrs().Name) {
			named[name] = link
		}
	}

	representors := map[string]netlink.Link{}
	for port := range ports {
		link, err := b.choose(port, named[port])
		if isNoRepresentor(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("representor of port %s: %w", port, err)
		}
		representors[port] = link
	}

	return representors, nil
}

// learnPlacement puts networks where the kernel has their ports and VXLAN ports, so that none is
// moved. bridges are ids by ifindex.
func (b *bridgePlane) learnPlacement(
	links []netlink.Link, bridges map[int]string, ports map[string]membership,
	representors map[string]netlink.Link,
) {
	numberOf := func(link netlink.Link) (int, bool) {
		id, inOurs := bridges[link.Attrs().MasterIndex]
		number, shared := sharedNumber(id)
		return number, inOurs && shared
	}

	for _, link := range links {
		network, ours := markOf(link)
		if number, known := numberOf(link); ours && known && link.Type() == "vxlan" {
			b.placement.bridges[network] = number
		}
	}

	for port, link := range representors {
		number, known := numberOf(link)
		if !known {
			continue
		}
		for _, n := range ports[port].networks {
			b.placement.bridges[n.id] = number
		}
		b.placement.add(port, ports[port].networks)
	}
}
