// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	opiagent "github.com/opiproject/xpu-device-plugin/pkg/bridge/service"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// bridged is a cluster with an xPU that runs opi-bridge.
type bridged struct {
	*cluster
	t   *testing.T
	xpu *netns.Namespace
}

func newBridged(t *testing.T) *bridged {
	t.Helper()
	netns.Need(t, netns.VLANFiltering(), netns.VRFs())
	b := &bridged{cluster: newCluster(t, impatient), t: t, xpu: netns.New(t)}
	netns.Connect(t, b.xpu, "p0", netns.New(t), "switch")
	b.xpuOn(b.node, "card", serveBridge(t, b.xpu, opiagent.Config{SourceFilter: true}))
	return b
}

// bridgedPod is a pod with a Function of the xPU.
type bridgedPod struct {
	*netns.Namespace
	t     *testing.T
	eth0  netlink.Link
	claim *resourceapi.ResourceClaim
	port  *v1alpha1.XPUPort
}

// pod makes a pod whose Function an allocated claim has, and waits until its port is up.
func (b *bridged) pod(w want) *bridgedPod {
	b.t.Helper()
	p := &bridgedPod{Namespace: netns.New(b.t), t: b.t}
	id, err := opi.PortID(w.function)
	must.Succeed(b.t, err)
	netns.Connect(b.t, b.xpu, id, p.Namespace, "eth0")
	p.eth0, err = p.Handle().LinkByName("eth0")
	must.Succeed(b.t, err)

	p.claim = b.claim(w)
	p.port = b.up(p.claim, w.function)
	mac, err := net.ParseMAC(p.port.Spec.MAC)
	must.Succeed(b.t, err)
	must.Succeed(b.t, p.Handle().LinkSetHardwareAddr(p.eth0, mac))

	return p
}

// tagged makes the VLAN interface of a network of a trunk, as the agent of the node would.
func (p *bridgedPod) tagged(network string) netip.Addr {
	p.t.Helper()
	for _, n := range p.port.Status.Networks {
		if n.Name != network {
			continue
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex = network, p.eth0.Attrs().Index
		link := &netlink.Vlan{
			LinkAttrs: attrs, VlanId: int(n.VLAN), VlanProtocol: netlink.VLAN_PROTOCOL_8021Q,
		}
		must.Succeed(p.t, p.Handle().LinkAdd(link))
		must.Succeed(p.t, p.Handle().LinkSetUp(link))
		return p.give(link, n.Addresses[0])
	}
	p.t.Fatalf("%s is not in %s", p.claim.Name, network)
	return netip.Addr{}
}

// untagged gives the pod the address of its only network.
func (p *bridgedPod) untagged() netip.Addr {
	p.t.Helper()
	return p.give(p.eth0, p.port.Spec.Addresses[0])
}

func (p *bridgedPod) give(link netlink.Link, prefix string) netip.Addr {
	p.t.Helper()
	address, err := netlink.ParseAddr(prefix)
	must.Succeed(p.t, err)
	must.Succeed(p.t, p.Handle().AddrAdd(link, address))
	return netip.MustParsePrefix(prefix).Addr()
}

// route makes the pod send by a gateway.
func (p *bridgedPod) route(to, gateway string) {
	p.t.Helper()
	_, dst, err := net.ParseCIDR(to)
	must.Succeed(p.t, err)
	must.Succeed(p.t, p.Handle().RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(gateway)}))
}

// reaches and misses check whether an address answers the pod.
func (p *bridgedPod) reaches(from, to netip.Addr) {
	p.t.Helper()
	answered, err := p.Ping(from, to, 20*time.Second)
	must.Succeed(p.t, err)
	if !answered {
		p.t.Errorf("%s does not reach %s from %s", p.claim.Name, to, from)
	}
}

func (p *bridgedPod) misses(from, to netip.Addr) {
	p.t.Helper()
	answered, err := p.Ping(from, to, time.Second)
	must.Succeed(p.t, err)
	if answered {
		p.t.Errorf("%s reaches %s from %s", p.claim.Name, to, from)
	}
}

// TestTrunkAtBridge takes claims through the controller to opi-bridge. A pod has a network that is
// routed and one that is not by one Function. Packets pass as the networks say, and no others.
func TestTrunkAtBridge(t *testing.T) {
	b := newBridged(t)
	b.routed("blue", "tenants", 100, "10.1.0.0/24")
	b.routed("red", "tenants", 200, "10.2.0.0/24")
	b.routed("other", "others", 400, "10.4.0.0/24")
	b.network("green", 300, "10.3.0.0/24")
	b.pool("green", "green")
	b.pool("fast", "")

	trunk := b.pod(want{name: "trunk", pool: "fast", function: vf(0),
		config: `{"networks":[{"name":"blue"},{"name":"green"}]}`})
	pods := map[string]*bridgedPod{}
	addresses := map[string]netip.Addr{}
	for i, name := range []string{"blue", "red", "green", "other"} {
		pods[name] = b.pod(want{name: name, pool: name, function: vf(1 + i)})
		addresses[name] = pods[name].untagged()
	}
	blue, green := trunk.tagged("blue"), trunk.tagged("green")
	trunk.route("10.2.0.0/24", "10.1.0.1")
	trunk.route("10.4.0.0/24", "10.1.0.1")
	for _, name := range []string{"blue", "red", "other"} {
		subnet := addresses[name].As4()[1]
		for to := byte(1); to <= 4; to++ {
			if to != subnet {
				pods[name].route(fmt.Sprintf("10.%d.0.0/24", to), fmt.Sprintf("10.%d.0.1", subnet))
			}
		}
	}

	// Within its networks, and by the gateway of the one that is routed.
	trunk.reaches(blue, addresses["blue"])
	trunk.reaches(green, addresses["green"])
	trunk.reaches(blue, addresses["red"])
	pods["red"].reaches(addresses["red"], blue)
	pods["blue"].reaches(addresses["blue"], addresses["red"])

	// A network that is not routed is reached from nowhere else, although a pod has both, and one
	// VRF does not reach the other.
	pods["red"].misses(addresses["red"], green)
	pods["red"].misses(addresses["red"], addresses["green"])
	trunk.misses(blue, addresses["other"])
	pods["other"].misses(addresses["other"], blue)

	// The trunk's Function has nothing after the claim, and the gateway stays for the other pods.
	b.delete(trunk.claim)
	b.delete(trunk.port)
	b.gone(trunk.port)
	trunk.misses(blue, addresses["blue"])
	trunk.misses(green, addresses["green"])
	pods["blue"].reaches(addresses["blue"], addresses["red"])
}
