// SPDX-License-Identifier: Apache-2.0

package opitest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// patience bounds the waits of the suite. Agents answer within milliseconds, on slow machines
// within seconds.
const patience = 30 * time.Second

// RunClientSuite tests an agent together with the client: everything that a controller relies on.
// It leaves out the cases that the dialect's agents cannot pass; see [ClientCases]. start prepares
// an agent for one case and returns how to reach it. The agent must have no ports and networks, and
// its xPU must be able to bring up ports with these ids, so their representors must exist. start
// cleans up with t.Cleanup. A case with ports begins with the network net-blue.
func RunClientSuite(
	t *testing.T, dialect opi.Dialect, start func(t *testing.T, ports []string) opi.Config,
) {
	for _, test := range clientCases() {
		if !test.possible(dialect.Traits) {
			continue
		}

		ids := portIDs(test.ports, dialect.Traits)
		t.Run(test.name, func(t *testing.T) {
			cfg := start(t, ids)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			t.Cleanup(cancel)

			s := suite{T: t, ctx: ctx, ports: ids, traits: dialect.Traits}
			s.client, s.other = newClient(t, cfg, Installation), newClient(t, cfg, "other")
			if len(ids) > 0 {
				s.network("net-blue", 10)
			}
			test.run(s)
		})
	}
}

// ClientCase is a case of the suite. Possible means that agents with given traits can pass it.
type ClientCase struct {
	Name     string
	Possible func(opi.Traits) bool
}

// ClientCases returns the cases of the suite.
func ClientCases() (cases []ClientCase) {
	for _, test := range clientCases() {
		cases = append(cases, ClientCase{test.name, test.possible})
	}
	return cases
}

func newClient(t *testing.T, cfg opi.Config, installation opi.Installation) *opi.Client {
	t.Helper()
	cfg.Installation = installation
	client, err := opi.Dial(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

type suite struct {
	*testing.T
	ctx    context.Context
	client *opi.Client
	other  *opi.Client // a client of another installation
	ports  []string
	traits opi.Traits
}

func (s suite) ok(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s suite) is(err, kind error) {
	s.Helper()
	if !errors.Is(err, kind) {
		s.Errorf("got %v, want %q", err, kind)
	}
}

func (s suite) network(id string, vlan uint16) {
	s.Helper()
	s.ok(s.client.EnsureNetwork(s.ctx, opi.Network{ID: id, VLAN: vlan}))
}

// port returns the n-th port, in the network net-blue.
func (s suite) port(n int) opi.Port {
	return s.portIn(n, n+1, "net-blue", 10)
}

// portIn returns the port with a number as the last bytes of its MAC address, in a network.
func (s suite) portIn(n, mac int, network string, vlan uint16) opi.Port {
	p := opi.Port{ID: s.ports[n], MAC: hw(mac), Networks: []string{network}}
	if !s.traits.Networks {
		p.VLANs = []uint16{vlan}
	}
	return p
}

// hasPort fails the test unless the agent reports that this port is up. An agent that reports no
// ports is believed.
func (s suite) hasPort(want opi.Port) {
	s.Helper()
	if !s.traits.Verifies {
		return
	}

	got, err := s.client.GetPort(s.ctx, want.ID)
	s.ok(err)
	want.Networks = slices.Sorted(slices.Values(want.Networks)) // their order means nothing
	slices.Sort(got.Networks)
	if diff := cmp.Diff(opi.PortStatus{Port: want, Status: opi.Status{State: opi.StateUp}},
		got); diff != "" {
		s.Errorf("port %s (-want +got):\n%s", want.ID, diff)
	}
}

func hw(n int) net.HardwareAddr {
	// The second byte is not zero, because agents of the Intel IPU do not accept that.
	return net.HardwareAddr{0x02, 1, 0, 0, byte(n >> 8), byte(n)}
}

// portIDs returns the ids of n ports, as agents with these traits need them.
func portIDs(n int, traits opi.Traits) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("vf-0000-03-%02x-%d", i/8, i%8)
		if traits.Numbered {
			ids[i] = opi.PortIDAt("pf0", fmt.Sprintf("vf%d", i))
		}
	}
	return ids
}

type clientCase struct {
	name  string
	ports int
	needs needs

	run func(s suite)
}

// needs are what the agent must have, or else a case is not possible.
type needs int

const (
	reports  needs = 1 << iota // [opi.Traits.Verifies]
	networks                   // [opi.Traits.Networks]
	trunks                     // [opi.Traits.Trunks]
	gateways                   // [opi.Traits.Gateways]

	nothing needs = 0
)

func (c clientCase) possible(traits opi.Traits) bool {
	lacks := func(need needs, has bool) bool { return c.needs&need != 0 && !has }
	return !lacks(reports, traits.Verifies) && !lacks(networks, traits.Networks) &&
		!lacks(trunks, traits.Trunks) && !lacks(gateways, traits.Gateways)
}

func clientCases() []clientCase { return append(networkAndPortCases(), gatewayCases()...) }

func networkAndPortCases() []clientCase {
	return []clientCase{
		{"alive", 0, nothing, func(s suite) {
			s.ok(s.client.Check(s.ctx))
			// gRPC may make calls before it reports that the connection is up.
			must.Eventually(s, "connected after a successful check", s.client.Connected)
		}},
		{"network is made once", 0, nothing, func(s suite) {
			n := opi.Network{ID: "net-blue", VLAN: 10}
			s.ok(s.client.EnsureNetwork(s.ctx, n))
			s.ok(s.client.EnsureNetwork(s.ctx, n))
		}},
		{"network with another VLAN is a conflict", 0, networks, func(s suite) {
			s.network("net-blue", 10)
			s.is(s.client.EnsureNetwork(s.ctx, opi.Network{ID: "net-blue", VLAN: 11}), opi.ErrConflict)
			s.network("net-blue", 10)
		}},
		{"network is deleted, and again", 0, nothing, func(s suite) {
			s.network("net-blue", 10)
			s.ok(s.client.DeleteNetwork(s.ctx, "net-blue"))
			s.ok(s.client.DeleteNetwork(s.ctx, "net-blue"))
			s.network("net-blue", 11)
		}},
		{"network in use is not deleted", 1, networks, func(s suite) {
			s.ok(s.client.EnsurePort(s.ctx, s.port(0)))
			s.is(s.client.DeleteNetwork(s.ctx, "net-blue"), opi.ErrInUse)
			s.ok(s.client.DeletePort(s.ctx, s.ports[0]))
			s.ok(s.client.DeleteNetwork(s.ctx, "net-blue"))
		}},
		{"port comes up, and again", 1, nothing, func(s suite) {
			p := s.port(0)
			s.ok(s.client.EnsurePort(s.ctx, p))
			s.hasPort(p)
			s.ok(s.client.EnsurePort(s.ctx, p))
			s.hasPort(p)
		}},
		{"port moves to another MAC and network", 1, nothing, func(s suite) {
			s.network("net-red", 20)
			p := s.port(0)
			s.ok(s.client.EnsurePort(s.ctx, p))
			p.MAC = hw(2)
			s.ok(s.client.EnsurePort(s.ctx, p))
			s.hasPort(p)
			p = s.portIn(0, 2, "net-red", 20)
			s.ok(s.client.EnsurePort(s.ctx, p))
			s.hasPort(p)
			s.ok(s.client.DeleteNetwork(s.ctx, "net-blue"))
		}},
		{"trunk comes up, and changes its networks", 1, trunks, func(s suite) {
			s.network("net-red", 20)
			p := s.port(0)
			p.Trunk, p.Networks = true, []string{"net-red", "net-blue"}
			s.ok(s.client.EnsurePort(s.ctx, p))
			s.hasPort(p)
			slices.Reverse(p.Networks) // it is the same port
			s.ok(s.client.EnsurePort(s.ctx, p))
			s.hasPort(p)
			p.Networks = []string{"net-blue"}
			s.ok(s.client.EnsurePort(s.ctx, p))
			s.hasPort(p)
			s.ok(s.client.DeleteNetwork(s.ctx, "net-red"))
			s.is(s.client.DeleteNetwork(s.ctx, "net-blue"), opi.ErrInUse)
			s.ok(s.client.DeletePort(s.ctx, p.ID))
			s.ok(s.client.DeleteNetwork(s.ctx, "net-blue"))
		}},
		{"port and trunk replace each other", 1, trunks, func(s suite) {
			access, trunk := s.port(0), s.port(0)
			trunk.Trunk = true
			for _, p := range []opi.Port{access, trunk, access} {
				s.ok(s.client.EnsurePort(s.ctx, p))
				s.hasPort(p)
			}
		}},
		{"port of a missing network", 1, networks, func(s suite) {
			p := opi.Port{ID: s.ports[0], MAC: hw(1), Networks: []string{"net-none"}}
			s.is(s.client.EnsurePort(s.ctx, p), opi.ErrNetworkMissing)
			s.network("net-none", 30)
			s.ok(s.client.EnsurePort(s.ctx, p))
		}},
		{"two ports with one MAC in a network", 2, reports, func(s suite) {
			s.network("net-red", 20)
			s.ok(s.client.EnsurePort(s.ctx, s.port(0)))
			s.is(s.client.EnsurePort(s.ctx,
				opi.Port{ID: s.ports[1], MAC: hw(1), Networks: []string{"net-blue"}}), opi.ErrConflict)
			s.ok(s.client.EnsurePort(s.ctx,
				opi.Port{ID: s.ports[1], MAC: hw(1), Networks: []string{"net-red"}}))
		}},
		{"another installation's port stays", 1, reports, func(s suite) {
			s.ok(s.client.EnsurePort(s.ctx, s.port(0)))
			s.ok(s.other.EnsureNetwork(s.ctx, opi.Network{ID: "other-red", VLAN: 20}))
			theirs := opi.Port{ID: s.ports[0], MAC: hw(2), Networks: []string{"other-red"}}
			s.is(s.other.EnsurePort(s.ctx, theirs), opi.ErrConflict)
			s.ok(s.other.DeletePort(s.ctx, s.ports[0])) // the other installation has none
			s.hasPort(s.port(0))
			s.ok(s.client.DeletePort(s.ctx, s.ports[0]))
			s.ok(s.other.EnsurePort(s.ctx, theirs))
			s.is(s.client.EnsurePort(s.ctx, s.port(0)), opi.ErrConflict)
			s.ok(s.client.DeletePort(s.ctx, s.ports[0]))
			s.hasPort(theirs)
		}},
		{"another network's VLAN or VNI is not taken", 0, reports | networks, func(s suite) {
			s.network("net-blue", 10)
			s.is(s.other.EnsureNetwork(s.ctx, opi.Network{ID: "other-red", VLAN: 10}), opi.ErrConflict)
			s.is(s.client.EnsureNetwork(s.ctx, opi.Network{ID: "net-red", VLAN: 10}), opi.ErrConflict)
			s.is(s.other.EnsureNetwork(s.ctx, opi.Network{ID: "net-red", VLAN: 20}), opi.ErrInvalid)
			s.ok(s.other.EnsureNetwork(s.ctx, opi.Network{ID: "other-red", VLAN: 20}))
			got, err := s.client.ListNetworks(s.ctx)
			s.ok(err)
			slices.SortFunc(got, func(a, b opi.NetworkStatus) int {
				return strings.Compare(a.ID, b.ID)
			})
			up := opi.Status{State: opi.StateUp}
			want := []opi.NetworkStatus{
				{Network: opi.Network{ID: "net-blue", VLAN: 10}, Status: up},
				{Network: opi.Network{ID: "other-red", VLAN: 20}, Status: up},
			}
			if diff := cmp.Diff(want, got); diff != "" {
				s.Errorf("networks (-want +got):\n%s", diff)
			}
		}},
		{"port is deleted, and again", 1, nothing, func(s suite) {
			s.ok(s.client.EnsurePort(s.ctx, s.port(0)))
			s.ok(s.client.DeletePort(s.ctx, s.ports[0]))
			s.ok(s.client.DeletePort(s.ctx, s.ports[0]))
			_, err := s.client.GetPort(s.ctx, s.ports[0])
			if s.traits.Verifies {
				s.is(err, opi.ErrNotFound)
			} else {
				s.is(err, opi.ErrUnsupported)
			}
		}},
		{"list", 3, reports, func(s suite) {
			got, err := s.client.ListPorts(s.ctx)
			s.ok(err)
			if len(got) != 0 {
				s.Errorf("a new agent has ports: %v", got)
			}

			var want []opi.PortStatus
			for i := range s.ports {
				p := s.port(i)
				s.ok(s.client.EnsurePort(s.ctx, p))
				want = append(want, opi.PortStatus{Port: p, Status: opi.Status{State: opi.StateUp}})
			}

			got, err = s.client.ListPorts(s.ctx)
			s.ok(err)
			slices.SortFunc(got, func(a, b opi.PortStatus) int { return strings.Compare(a.ID, b.ID) })
			if diff := cmp.Diff(want, got); diff != "" {
				s.Errorf("ports (-want +got):\n%s", diff)
			}
		}},
		{"32 ports at once", 32, reports, func(s suite) {
			var all sync.WaitGroup
			each := func(do func(p opi.Port) error) {
				for i := range s.ports {
					all.Go(func() {
						if err := do(s.port(i)); err != nil {
							s.Error(err)
						}
					})
				}
				all.Wait()
			}

			each(func(p opi.Port) error { return s.client.EnsurePort(s.ctx, p) })
			each(func(p opi.Port) error { return s.client.DeletePort(s.ctx, p.ID) })
			got, err := s.client.ListPorts(s.ctx)
			s.ok(err)
			if len(got) != 0 {
				s.Errorf("left behind: %v", got)
			}
		}},
		{"a context that has ended", 1, nothing, func(s suite) {
			ctx, cancel := context.WithCancel(s.ctx)
			cancel()
			p := s.port(0)
			s.is(s.client.EnsurePort(ctx, p), opi.ErrTimeout)
			s.is(s.client.DeletePort(ctx, p.ID), opi.ErrTimeout)
			s.ok(s.client.EnsurePort(s.ctx, p))
		}},
	}
}
