// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// routedNetwork returns a network as xpu-controller asks for it. Its subnets are 10.<n>.0.0/24 and
// fd00:<n>::/64.
func routedNetwork(id, vrf string, subnet byte) opi.Network {
	return opi.Network{
		ID: id, VLAN: 10 * uint16(subnet), VNI: new(1000 * uint32(subnet)),
		Gateway: &opi.Gateway{
			VRF: opitest.Installation.VRFID(vrf), MAC: opitest.Installation.GatewayMAC(),
			Prefixes: []netip.Prefix{
				netip.MustParsePrefix(fmt.Sprintf("10.%d.0.1/24", subnet)),
				netip.MustParsePrefix(fmt.Sprintf("fd00:%d::1/64", subnet)),
			},
		},
	}
}

// testGatewayByClient checks the gateways that the client makes at two xPUs, which both are the
// gateway of the network that they share.
func testGatewayByClient(t *testing.T, mode plane.Mode) {
	a, b := router{newXPU(t, mode, "p0")}, router{newXPU(t, mode, "p0")}
	netns.Connect(t, a.Namespace, "p0", b.Namespace, "p0")
	addAddress(t, a.Namespace, "p0", "198.51.100.1/24")
	addAddress(t, b.Namespace, "p0", "198.51.100.2/24")
	for _, r := range []router{a, b} {
		r.forwardIPv6("1")
		r.start()
		must.Succeed(t, r.client.EnsureNetwork(r.ctx(), routedNetwork("net-blue", "one", 1)))
	}
	must.Succeed(t, a.client.EnsureNetwork(a.ctx(), routedNetwork("net-red", "one", 2)))
	must.Succeed(t, a.client.EnsureNetwork(a.ctx(), routedNetwork("net-green", "two", 3)))

	blue, red := a.newHost(rep1, "net-blue", 1, 2), a.newHost(rep2, "net-red", 2, 2)
	green, far := a.newHost(rep3, "net-green", 3, 2), b.newHost(rep1, "net-blue", 1, 3)
	blue.reaches(t, blueGateway...)
	blue.reaches(t, red.v4, red.v6)
	red.reaches(t, blue.v4, blue.v6)
	far.reaches(t, blueGateway...)
	far.reaches(t, blue.v4, blue.v6) // in the same network, by VXLAN
	green.reachesNot(t, blue.v4, blue.v6, red.v4)
	blue.reachesNot(t, green.v4, green.v6)

	// Gateways in other VRFs do not make the bridge promiscuous.
	if n := a.link(a.bridge("net-blue")).Attrs().Promisc; n != 0 {
		t.Errorf("the bridge is promiscuous: %d", n)
	}

	checkLocalAnswers(t, a, far)

	for _, id := range []string{"net-red", "net-green"} {
		must.Succeed(t, a.client.DeletePort(a.ctx(), map[string]string{
			"net-red": rep2, "net-green": rep3,
		}[id]))
		must.Succeed(t, a.client.DeleteNetwork(a.ctx(), id))
	}
	vrfs, gateways, err := a.client.ListGateways(a.ctx())
	must.Succeed(t, err)
	if len(vrfs) != 1 || len(gateways) != 1 {
		t.Errorf("VRFs %+v and gateways %+v are left, want those of net-blue", vrfs, gateways)
	}
}

// checkLocalAnswers checks that a pod always hears its own xPU's gateway. The other xPU gets a
// gateway with another MAC address, so that its answers can be told apart.
func checkLocalAnswers(t *testing.T, other router, far *host) {
	t.Helper()
	changed := routedNetwork("net-blue", "one", 1)
	changed.Gateway.MAC = net.HardwareAddr{0x12, 0xff, 0xff, 0xff, 0xff, 0xff}
	must.Succeed(t, other.client.EnsureNetwork(other.ctx(), changed))
	defer func() {
		must.Succeed(t, other.client.EnsureNetwork(other.ctx(),
			routedNetwork("net-blue", "one", 1)))
	}()

	eth0, err := far.Handle().LinkByName("eth0")
	must.Succeed(t, err)
	for range 10 {
		neighbors, err := far.Handle().NeighList(eth0.Attrs().Index, netlink.FAMILY_ALL)
		must.Succeed(t, err)
		for i := range neighbors {
			_ = far.Handle().NeighDel(&neighbors[i]) // the kernel keeps its own
		}

		far.reaches(t, blueGateway...)
		neighbors, err = far.Handle().NeighList(eth0.Attrs().Index, netlink.FAMILY_ALL)
		must.Succeed(t, err)
		for _, n := range neighbors {
			if bytes.Equal(n.HardwareAddr, changed.Gateway.MAC) {
				t.Fatalf("%s has the gateway of the other xPU for %s", far.v4, n.IP)
			}
		}
	}
}
