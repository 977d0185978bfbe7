// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"fmt"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

func named(ids ...string) (networks []Segment) {
	for _, id := range ids {
		networks = append(networks, Segment{ID: id})
	}
	return networks
}

// join puts a port into networks, as a Plane does whose bridges all have capacity.
func (p *placement) join(port string, networks ...string) (number int, err error) {
	number, _, err = p.colocate(named(networks...), port, 0)
	if err == nil {
		p.setPort(port, named(networks...))
	}
	return number, err
}

// TestPlacementOfManyPorts checks that 40 networks with 100 ports each fit into bridges.
func TestPlacementOfManyPorts(t *testing.T) {
	p := newPlacement()
	used := map[int]int{}
	for network := range 40 {
		for port := range 100 {
			number, err := p.join(fmt.Sprintf("port-%d-%d", network, port),
				fmt.Sprintf("net-%d", network))
			must.Succeed(t, err)
			used[number]++
		}
	}

	for number, ports := range used {
		if ports > maxBridgePorts {
			t.Errorf("bridge %d has %d ports", number, ports)
		}
	}

	if len(used) != 7 {
		t.Errorf("there are %d bridges, want 7 with 512 to 611 ports", len(used))
	}
}

func TestPlacementOfTrunks(t *testing.T) {
	p := newPlacement()
	p.bridges["net-a"], p.bridges["net-b"], p.bridges["net-c"] = 0, 1, 2
	_, err := p.join("a-1", "net-a")
	must.Succeed(t, err)
	// net-b and net-c have no ports, so they move to the bridge of net-a.
	if number, err := p.join("trunk", "net-c", "net-b", "net-a"); number != 0 || err != nil ||
		p.bridges["net-b"] != 0 || p.bridges["net-c"] != 0 {
		t.Errorf("bridge %d, %v; networks are in %v", number, err, p.bridges)
	}

	// The trunk itself does not pin the networks.
	p.removePort("a-1")
	number, moved, err := p.colocate(named("net-a", "net-b", "net-c"), "trunk", 3)
	if number != 3 || len(moved) != 3 || err != nil {
		t.Errorf("bridge %d, moved %v, %v", number, moved, err)
	}

	p.bridges["net-d"] = 1
	_, err = p.join("d-1", "net-d")
	must.Succeed(t, err)
	_, err = p.join("other", "net-b", "net-d")
	if err == nil ||
		!strings.Contains(err.Error(), "net-b and net-d: they have ports in different bridges of "+
			"the kernel, br-opi-3 and br-opi-1") {
		t.Errorf("a trunk of networks in two bridges: %v", err)
	}

	if p.bridges["net-b"] != 3 || p.bridges["net-d"] != 1 {
		t.Errorf("what is refused has moved networks: %v", p.bridges)
	}
}

func TestSharedNumber(t *testing.T) {
	for id, want := range map[string]int{
		"*": 0, "*1": 1, "*12": 12, "net-blue": -1, "*0": -1, "*-1": -1, "*x": -1, "": -1,
	} {
		number, shared := sharedNumber(id)
		if shared != (want >= 0) || shared && number != want {
			t.Errorf("%q: %d, %t; want %d", id, number, shared, want)
		}
		if _, again := sharedBridgeOf(number); shared && again != id {
			t.Errorf("%q: the bridge with its number has %q", id, again)
		}
	}
}
