// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// The bridges that networks share, by number. No network's bridge can have the name of the first:
// ids have at least 4 characters.
const (
	sharedBridge = "br-opi" // the others have a hyphen and their number in addition
	// in their marks, in place of a network's id; the others have their number in addition
	sharedID = "*"
)

// roomyBridge is how many ports of its 1023 a bridge may have for a network to be put into it. The
// others are left for networks to grow.
const roomyBridge = 512

// sharedBridgeOf returns the name of a shared bridge, and the id in its mark.
func sharedBridgeOf(number int) (name, id string) {
	if number == 0 {
		return sharedBridge, sharedID
	}
	return fmt.Sprintf("%s-%d", sharedBridge, number), fmt.Sprintf("%s%d", sharedID, number)
}

// sharedNumber returns the number of the shared bridge with this id in its mark.
func sharedNumber(id string) (number int, shared bool) {
	text, shared := strings.CutPrefix(id, sharedID)
	if !shared || text == "" {
		return 0, shared
	}
	number, err := strconv.Atoi(text)
	return number, err == nil && number > 0
}

// placement is which of the shared bridges each network is in: all its ports and its VXLAN port are
// in one, since a frame does not get from one bridge to another. A network stays where it has
// ports.
type placement struct {
	bridges  map[string]int             // numbers by network
	ports    map[string]map[string]bool // by network
	networks map[string][]segment       // by port
}

func newPlacement() *placement {
	return &placement{bridges: map[string]int{}, ports: map[string]map[string]bool{},
		networks: map[string][]segment{}}
}

// add notes that a port is in networks, and in no others.
func (p *placement) add(port string, networks []segment) {
	p.remove(port)
	p.networks[port] = networks
	for _, n := range networks {
		if p.ports[n.id] == nil {
			p.ports[n.id] = map[string]bool{}
		}
		p.ports[n.id][port] = true
	}
}

// remove notes that a port is in no network.
func (p *placement) remove(port string) {
	for _, n := range p.networks[port] {
		delete(p.ports[n.id], port)
	}
	delete(p.networks, port)
}

// forget forgets a network that has no ports, and tells whether another one is in its bridge.
func (p *placement) forget(network string) (number int, shared bool) {
	number = p.bridges[network]
	delete(p.bridges, network)
	delete(p.ports, network)
	return number, slices.Contains(slices.Collect(maps.Values(p.bridges)), number)
}

// place returns the bridge of a network, a new one's too. from is the lowest number that it may
// have, unless it has ports other than this one.
func (p *placement) place(network, port string, from int) int {
	number, placed := p.bridges[network]
	if !placed || number < from && !p.fixed(network, port) {
		number = p.roomy(from)
	}
	p.bridges[network] = number
	return number
}

// fixed tells whether a network has ports other than this one, so that it stays in its bridge.
func (p *placement) fixed(network, port string) bool {
	others := len(p.ports[network])
	if p.ports[network][port] {
		others--
	}
	return others > 0
}

// roomy returns the first bridge from this number on that has room for another network.
func (p *placement) roomy(from int) int {
	used := map[int]int{} // ports by bridge; each network may have a VXLAN port
	for network, number := range p.bridges {
		used[number] += 1 + len(p.ports[network])
	}
	for used[from] >= roomyBridge {
		from++
	}
	return from
}

// gather has the networks of a port be in one bridge: that of those with other ports, or that of
// the first. from is as for place. moved are those that were in another one, or in none.
func (p *placement) gather(
	networks []segment, port string, from int,
) (number int, moved []segment, err error) {
	first := networks[0]
	for _, n := range networks {
		switch {
		case !p.fixed(n.id, port):
		case !p.fixed(first.id, port):
			first = n
		case p.bridges[n.id] != p.bridges[first.id]:
			const format = "the port cannot be in both logical bridges %s and %s: they have " +
				"ports in different bridges of the kernel, %s and %s, " +
				"of which each has room for %d; delete the ports of one of the two, make this " +
				"port, and then the others again"
			here, _ := sharedBridgeOf(p.bridges[first.id])
			there, _ := sharedBridgeOf(p.bridges[n.id])
			return 0, nil, fmt.Errorf(format, first.id, n.id, here, there, maxBridgePorts)
		}
	}

	before, placed := p.bridges[first.id]
	number = p.place(first.id, port, from)
	for _, n := range networks {
		if n.id != first.id {
			before, placed = p.bridges[n.id]
			p.bridges[n.id] = number
		}
		if !placed || before != number {
			moved = append(moved, n)
		}
	}

	return number, moved, nil
}
