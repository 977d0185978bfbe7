// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/multimap"
)

// The shared bridges have numbers from 0 on. A number above 0 is part of the bridge's name
// (br-opi-1) and of its id (*1). No bridge of a single network has the name of the first shared
// bridge, because the ids of networks have at least 4 characters.
const (
	sharedBridge = "br-opi"
	sharedID     = "*" // takes the place of a network's id in the alias
)

// placementLimit is how many ports a bridge may have for another network to be placed there. The
// rest of maxBridgePorts is left for networks to grow.
const placementLimit = 512

// sharedBridgeOf returns the name of a shared bridge, and the id in its alias.
func sharedBridgeOf(number int) (name, id string) {
	if number == 0 {
		return sharedBridge, sharedID
	}
	return fmt.Sprintf("%s-%d", sharedBridge, number), fmt.Sprintf("%s%d", sharedID, number)
}

// sharedNumber returns the number of the shared bridge with this id in its alias.
func sharedNumber(id string) (number int, shared bool) {
	text, shared := strings.CutPrefix(id, sharedID)
	if !shared || text == "" {
		return 0, shared
	}
	number, err := strconv.Atoi(text)
	return number, err == nil && number > 0
}

// placement knows which shared bridge each network is in. All ports of a network, and its VXLAN
// port, are in one bridge, because a frame does not get from one bridge to another. A network is
// pinned to its bridge while it has ports.
type placement struct {
	bridges  map[string]int                // numbers, by network
	ports    multimap.Sets[string, string] // by network
	networks map[string][]Segment          // by port
}

func newPlacement() *placement {
	return &placement{bridges: map[string]int{}, networks: map[string][]Segment{}}
}

// setPort records the networks of a port.
func (p *placement) setPort(port string, networks []Segment) {
	p.removePort(port)
	p.networks[port] = networks
	for _, n := range networks {
		p.ports.Add(n.ID, port)
	}
}

// removePort records that a port is in no network.
func (p *placement) removePort(port string) {
	for _, n := range p.networks[port] {
		p.ports.Remove(n.ID, port)
	}
	delete(p.networks, port)
}

// removeNetwork removes a network that has no ports. It returns the network's bridge, and whether
// other networks are in that bridge.
func (p *placement) removeNetwork(network string) (number int, inUse bool) {
	number = p.bridges[network]
	delete(p.bridges, network)
	delete(p.ports, network)
	return number, slices.Contains(slices.Collect(maps.Values(p.bridges)), number)
}

// place returns the bridge of a network. If the network has none, place chooses one with a number
// of at least lowest. A network in a lower bridge moves there too, unless a port other than this
// one pins it.
func (p *placement) place(network, port string, lowest int) int {
	number, placed := p.bridges[network]
	if !placed || number < lowest && !p.isPinned(network, port) {
		number = p.firstWithCapacity(lowest)
	}
	p.bridges[network] = number
	return number
}

// isPinned reports whether a network has other ports than this one.
func (p *placement) isPinned(network, port string) bool {
	others := len(p.ports[network])
	if p.ports.Has(network, port) {
		others--
	}
	return others > 0
}

// firstWithCapacity returns the first bridge, from the number lowest on, that can take another
// network.
func (p *placement) firstWithCapacity(lowest int) int {
	ports := map[int]int{} // by bridge; each network may have a VXLAN port
	for network, number := range p.bridges {
		ports[number] += 1 + len(p.ports[network])
	}

	number := lowest
	for ports[number] >= placementLimit {
		number++
	}
	return number
}

// colocate places the networks of a port in one bridge: the bridge of the networks that other ports
// pin, or the bridge of the first network. It returns the networks that were not in that bridge
// before. lowest is as for place.
func (p *placement) colocate(
	networks []Segment, port string, lowest int,
) (number int, moved []Segment, err error) {
	first := networks[0]
	for _, n := range networks {
		switch {
		case !p.isPinned(n.ID, port):
		case !p.isPinned(first.ID, port):
			first = n
		case p.bridges[n.ID] != p.bridges[first.ID]:
			const format = "the port cannot be in both logical bridges %s and %s: they have " +
				"ports in different bridges of the kernel, %s and %s, " +
				"of which each has room for %d; delete the ports of one of the two, make this " +
				"port, and then the others again"
			one, _ := sharedBridgeOf(p.bridges[first.ID])
			two, _ := sharedBridgeOf(p.bridges[n.ID])
			return 0, nil, fmt.Errorf(format, first.ID, n.ID, one, two, maxBridgePorts)
		}
	}

	before, placed := p.bridges[first.ID]
	number = p.place(first.ID, port, lowest)
	for _, n := range networks {
		if n.ID != first.ID {
			before, placed = p.bridges[n.ID]
			p.bridges[n.ID] = number
		}
		if !placed || before != number {
			moved = append(moved, n)
		}
	}

	return number, moved, nil
}
