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

// Sweep removes what the agent has made, in either mode, for other networks and ports than these.
// It also takes netdevs out of the agent's bridges that are not the representor of a port there.
// Before that, it learns which shared bridge each network is in.
func (p *Plane) Sweep(networks []string, ports map[string]Membership) error {
	links, err := p.handle.LinkList()
	if err != nil {
		return fmt.Errorf("list netdevs: %w", err)
	}

	representors, err := p.representors.FindAll(slices.Collect(maps.Keys(ports)), links)
	if err != nil { // otherwise a representor that has to stay could be taken out
		return err
	}

	bridges := ownBridges(links)
	if p.vlanAware {
		p.learnPlacement(links, bridges, ports, representors)
	}

	belongs := map[int]string{} // ids of bridges, by the ifindex of a representor
	for port, link := range representors {
		_, belongs[link.Attrs().Index] = p.bridgeOf(ports[port].Networks[0].ID)
	}

	var failed []error
	// The representors come first, because a representor whose bridge is removed would stay up.
	for _, link := range links {
		bridge, isPort := bridges[link.Attrs().MasterIndex]
		if _, ours := markOf(link); isPort && !ours && belongs[link.Attrs().Index] != bridge {
			failed = append(failed, p.release(link))
		}
	}

	wanted := map[string][]string{"vxlan": networks, "bridge": networks} // ids, by type of netdev
	if p.vlanAware {
		wanted["bridge"] = []string{sharedID}
		for _, network := range networks {
			_, id := p.bridgeOf(network)
			wanted["bridge"] = append(wanted["bridge"], id)
		}
	}

	for _, link := range links {
		id, ours := markOf(link)
		if ids, known := wanted[link.Type()]; ours && known && !slices.Contains(ids, id) {
			failed = append(failed, p.remove(link))
		}
	}

	return errors.Join(failed...)
}

// learnPlacement places networks where the kernel has their ports and VXLAN ports, so that none is
// moved. The bridges are ids by ifindex.
func (p *Plane) learnPlacement(
	links []netlink.Link, bridges map[int]string, ports map[string]Membership,
	representors map[string]netlink.Link,
) {
	bridgeOf := func(link netlink.Link) (number int, known bool) {
		id, isPort := bridges[link.Attrs().MasterIndex]
		number, shared := sharedNumber(id)
		return number, isPort && shared
	}

	for _, link := range links {
		network, ours := markOf(link)
		if number, known := bridgeOf(link); ours && known && link.Type() == "vxlan" {
			p.placement.bridges[network] = number
		}
	}

	for port, link := range representors {
		number, known := bridgeOf(link)
		if !known {
			continue
		}
		for _, n := range ports[port].Networks {
			p.placement.bridges[n.ID] = number
		}
		p.placement.setPort(port, ports[port].Networks)
	}
}
