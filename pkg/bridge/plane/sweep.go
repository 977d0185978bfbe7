// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/vishvananda/netlink"
)

// Netdevs returns the names of the netdevs that carry networks and ports, whoever asked for them.
func (p *Plane) Netdevs() ([]string, error) {
	links, err := p.handle.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list netdevs: %w", err)
	}

	bridges := ownBridges(links)
	var names []string
	for _, link := range links {
		id, ours := markOf(link)
		_, shared := sharedNumber(id)
		_, isPort := bridges[link.Attrs().MasterIndex]
		if ours && !shared || !ours && isPort {
			names = append(names, link.Attrs().Name)
		}
	}

	slices.Sort(names)
	return names, nil
}

// ownBridges returns the ids of the agent's bridges, by ifindex.
func ownBridges(links []netlink.Link) map[int]string {
	bridges := map[int]string{}
	for _, link := range links {
		if id, ours := markOf(link); ours && link.Type() == "bridge" {
			bridges[link.Attrs().Index] = id
		}
	}
	return bridges
}

// Wanted is what clients have asked for.
type Wanted struct {
	Networks []string // ids
	Ports    map[string]Membership
	VRFs     []string // ids
	SVIs     map[string]SVI
}

// Sweep removes what the agent has made, in either mode, for other objects than these. It also
// takes netdevs out of the agent's bridges that are not the representor of a port there. Before
// that, it learns which shared bridge each network is in, and which routing table each VRF has.
func (p *Plane) Sweep(want Wanted) error {
	links, err := p.handle.LinkList()
	if err != nil {
		return fmt.Errorf("list netdevs: %w", err)
	}

	representors, err := p.representors.FindAll(slices.Collect(maps.Keys(want.Ports)), links)
	if err != nil { // otherwise a representor that has to stay could be taken out
		return err
	}

	bridges := ownBridges(links)
	if p.vlanAware {
		p.learnPlacement(links, bridges, want, representors)
	}

	belongs := map[int]string{} // ids of bridges, by the ifindex of a representor
	for port, link := range representors {
		_, belongs[link.Attrs().Index] = p.bridgeOf(want.Ports[port].Networks[0].ID)
	}

	var failed []error
	// The representors come first, because a representor whose bridge is removed would stay up.
	for _, link := range links {
		bridge, isPort := bridges[link.Attrs().MasterIndex]
		if _, ours := markOf(link); isPort && !ours && belongs[link.Attrs().Index] != bridge {
			failed = append(failed, p.release(link))
		}
	}

	failed = append(failed, p.sweepNetdevs(links, want), p.sweepGateways(want))

	return errors.Join(failed...)
}

// sweepNetdevs removes the agent's netdevs that are for other objects than these.
func (p *Plane) sweepNetdevs(links []netlink.Link, want Wanted) error {
	// These are ids, by the type of the netdev.
	wanted := map[string][]string{
		"vxlan": want.Networks, "bridge": want.Networks, "vrf": want.VRFs, "vlan": nil,
	}
	if p.vlanAware {
		wanted["vlan"] = slices.Collect(maps.Keys(want.SVIs))
		wanted["bridge"] = []string{sharedID}
		for _, network := range want.Networks {
			_, id := p.bridgeOf(network)
			wanted["bridge"] = append(wanted["bridge"], id)
		}
	}

	var failed []error
	for _, link := range links {
		id, ours := markOf(link)
		ids, known := wanted[link.Type()]
		vrf, isVRF := link.(*netlink.Vrf)
		switch {
		case !ours || !known:
		case slices.Contains(ids, id):
			if isVRF {
				p.tables.set(id, vrf.Table)
			}
		case isVRF:
			failed = append(failed, p.removeVRFNetdev(link))
		default:
			failed = append(failed, p.remove(link))
		}
	}

	return errors.Join(failed...)
}

// sweepGateways makes the bridges forget gateways that clients do not want, and removes the routes
// that were left by VRFs.
func (p *Plane) sweepGateways(want Wanted) error {
	failed := []error{p.openUnusedTables()}
	links, err := p.handle.LinkList() // without those that sweepNetdevs removed
	if err != nil {
		return errors.Join(append(failed, fmt.Errorf("list netdevs: %w", err))...)
	}

	routed := map[string]bool{}             // networks with a gateway
	vlans := map[string]map[uint16]string{} // ids of SVIs, by the id of the shared bridge
	for id, s := range want.SVIs {
		routed[s.Network.ID] = true
		_, bridge := p.bridgeOf(s.Network.ID)
		if vlans[bridge] == nil {
			vlans[bridge] = map[uint16]string{}
		}
		vlans[bridge][s.Network.VLAN] = id
	}

	for _, link := range links {
		id, ours := markOf(link)
		switch {
		case !ours || link.Type() != "bridge":
		case p.vlanAware:
			failed = append(failed, p.sweepOwnVLANs(link, vlans[id]))
		case !routed[id] && link.Attrs().MasterIndex != 0:
			failed = append(failed, p.stopRouting(id, nil))
		}
	}

	return errors.Join(failed...)
}

// sweepOwnVLANs takes a shared bridge itself out of all VLANs that are not in want, which has the
// VLANs of SVIs.
func (p *Plane) sweepOwnVLANs(bridge netlink.Link, want map[uint16]string) error {
	have, err := p.vlansOf(bridge.Attrs().Index)
	if err != nil {
		return linkError(err, bridge, "VLANs")
	}
	for vlan := range have {
		if want[vlan] != "" {
			p.ownVLANs.set(bridge.Attrs().Index, vlan, want[vlan], true)
			continue
		}
		if err := p.leaveOwnVLAN(bridge, vlan); err != nil {
			return err
		}
	}

	if len(have) > 0 {
		return p.unshareMAC(bridge, bridge.Attrs().HardwareAddr)
	}
	return nil
}

// learnPlacement places networks where the kernel has their ports, VXLAN ports and gateways, so
// that none is moved. The bridges are ids by ifindex.
func (p *Plane) learnPlacement(
	links []netlink.Link, bridges map[int]string, want Wanted,
	representors map[string]netlink.Link,
) {
	numberOf := func(bridge int) (number int, known bool) {
		id, isPort := bridges[bridge]
		number, shared := sharedNumber(id)
		return number, isPort && shared
	}

	for _, link := range links {
		id, ours := markOf(link)
		if number, known := numberOf(link.Attrs().MasterIndex); ours && known &&
			link.Type() == "vxlan" {
			p.placement.bridges[id] = number
		}

		svi, isWanted := want.SVIs[id]
		number, known := numberOf(link.Attrs().ParentIndex)
		if ours && known && isWanted && link.Type() == "vlan" {
			p.placement.bridges[svi.Network.ID] = number
			p.placement.setPort(sviPin(svi.Network.ID), []Segment{svi.Network})
		}
	}

	for port, link := range representors {
		number, known := numberOf(link.Attrs().MasterIndex)
		if !known {
			continue
		}
		for _, n := range want.Ports[port].Networks {
			p.placement.bridges[n.ID] = number
		}
		p.placement.setPort(port, want.Ports[port].Networks)
	}
}
