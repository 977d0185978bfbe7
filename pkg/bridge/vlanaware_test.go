// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/service"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// vlans returns the VLANs of a bridge port as text: "10 untagged" or "10".
func (x *xpu) vlans(name string) []string {
	x.t.Helper()
	all, err := x.Handle().BridgeVlanList()
	if err != nil {
		x.t.Fatal(err)
	}

	var got []string
	for _, vlan := range all[int32(x.link(name).Attrs().Index)] {
		text := fmt.Sprint(vlan.Vid)
		if vlan.PortVID() && vlan.EngressUntag() {
			text += " untagged"
		}
		got = append(got, text)
	}

	return got
}

// forwarded returns the VLANs in which frames for this address always go to a port.
func (x *xpu) forwarded(name string, mac net.HardwareAddr) []int {
	x.t.Helper()
	entries, err := x.Handle().NeighList(x.link(name).Attrs().Index, unix.AF_BRIDGE)
	if err != nil {
		x.t.Fatal(err)
	}

	vlans := map[int]bool{}
	for _, entry := range entries {
		if entry.State == netlink.NUD_NOARP && entry.HardwareAddr.String() == mac.String() {
			vlans[entry.Vlan] = true
		}
	}

	return slices.Sorted(maps.Keys(vlans))
}

// view returns a pod with a further address.
func (p *pod) view(t *testing.T, netdev, ip string) *pod {
	t.Helper()
	addAddress(t, p.Namespace, netdev, ip+"/24")
	return &pod{Namespace: p.Namespace, ip: net.ParseIP(ip).To4(), mac: p.mac}
}

// tagged returns a pod with a VLAN netdev on its eth0.
func (p *pod) tagged(t *testing.T, vlan int, ip string) *pod {
	t.Helper()
	eth0, err := p.Handle().LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}

	attrs := netlink.NewLinkAttrs()
	attrs.Name = fmt.Sprintf("eth0.%d", vlan)
	attrs.ParentIndex = eth0.Attrs().Index
	link := &netlink.Vlan{LinkAttrs: attrs, VlanId: vlan}
	if err := p.Handle().LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	if err := p.Handle().LinkSetUp(link); err != nil {
		t.Fatal(err)
	}

	return p.view(t, attrs.Name, ip)
}

func (x *xpu) networks() evpn.LogicalBridgeServiceClient {
	x.t.Helper()
	conn, err := grpc.NewClient(x.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		x.t.Fatal(err)
	}
	x.t.Cleanup(func() { _ = conn.Close() })
	return evpn.NewLogicalBridgeServiceClient(conn)
}

// sameVLAN makes a network with the VLAN id of another network, which [opi.Client] refuses.
func (x *xpu) sameVLAN(id string, vlan uint32) error {
	_, err := x.networks().CreateLogicalBridge(x.ctx(), &evpn.CreateLogicalBridgeRequest{
		LogicalBridgeId: id,
		LogicalBridge:   &evpn.LogicalBridge{Spec: &evpn.LogicalBridgeSpec{VlanId: vlan}},
	})
	return err
}

func TestTrunk(t *testing.T) {
	netns.Need(t, netns.VLANFiltering())
	x := newXPU(t, plane.ModeVLANAware, "")
	x.start()
	x.network("net-blue", 10, 0)
	x.network("net-red", 20, 0)
	x.network("net-green", 30, 0)
	const trunk = "vf-0000-03-00-5"
	access := map[string]*pod{}
	for i, network := range []string{"net-blue", "net-red", "net-green"} {
		id := fmt.Sprintf("vf-0000-03-00-%d", i)
		p := newPod(t, x, id, byte(i+1))
		x.port(id, network, p.mac)
		access[network] = p.view(t, "eth0", fmt.Sprintf("198.18.%d.2", (i+1)*10))
	}

	p := newPod(t, x, trunk, 9)
	port := opi.Port{ID: trunk, MAC: p.mac, Networks: []string{"net-red", "net-blue"}, Trunk: true}
	ensure := func() {
		t.Helper()
		if err := x.client.EnsurePort(x.ctx(), port); err != nil {
			t.Fatal(err)
		}
	}

	ensure()
	slices.Reverse(port.Networks) // still describes the same port
	ensure()
	blue, red, green := p.tagged(t, 10, "198.18.10.1"), p.tagged(t, 20, "198.18.20.1"), p.tagged(t,
		30, "198.18.30.1")
	reach(t, blue, access["net-blue"])
	reach(t, red, access["net-red"])
	reach(t, access["net-red"], red)
	noReach(t, green, access["net-green"])
	if diff := cmp.Diff([]string{"10", "20"}, x.vlans(trunk)); diff != "" {
		t.Errorf("VLANs of the trunk (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]int{10, 20}, x.forwarded(trunk, p.mac)); diff != "" {
		t.Errorf("static entries of the trunk (-want +got):\n%s", diff)
	}

	port.Networks = []string{"net-blue", "net-green"}
	ensure()
	reach(t, green, access["net-green"])
	reach(t, blue, access["net-blue"])
	noReach(t, red, access["net-red"])

	if err := x.client.DeleteNetwork(x.ctx(), "net-green"); !errors.Is(err, opi.ErrInUse) {
		t.Errorf("delete of a network with a trunk: %v", err)
	}
	if err := x.client.DeletePort(x.ctx(), trunk); err != nil {
		t.Fatal(err)
	}

	noReach(t, blue, access["net-blue"])
}

// TestTrunkSources checks what a trunk may send in each of its VLANs.
func TestTrunkSources(t *testing.T) {
	netns.Need(t, netns.VLANFiltering())
	x := newXPU(t, plane.ModeVLANAware, "")
	x.start()
	x.network("net-blue", 10, 0)
	x.network("net-red", 20, 0)
	access := map[string]*pod{}
	for i, network := range []string{"net-blue", "net-red"} {
		id := fmt.Sprintf("vf-0000-03-00-%d", i)
		p := newPod(t, x, id, byte(i+1))
		x.port(id, network, p.mac)
		access[network] = p.view(t, "eth0", fmt.Sprintf("198.18.%d.2", (i+1)*10))
	}

	const trunk = "vf-0000-03-00-5"
	p := newPod(t, x, trunk, 9)
	must.Succeed(t, x.client.EnsurePort(x.ctx(), opi.Port{
		ID: trunk, MAC: p.mac, Networks: []string{"net-red", "net-blue"}, Trunk: true,
		AddressesIn: map[string][]netip.Addr{
			"net-blue": {netip.MustParseAddr("198.18.10.1")},
			"net-red":  {netip.MustParseAddr("198.18.20.1")},
		},
	}))

	blue, red := p.tagged(t, 10, "198.18.10.1"), p.tagged(t, 20, "198.18.20.1")
	reach(t, blue, access["net-blue"])
	reach(t, access["net-blue"], blue)
	reach(t, red, access["net-red"])
	reach(t, access["net-red"], red)

	c := access["net-blue"].captureType(t, unix.ETH_P_ARP)
	vlan := func(id byte, payload []byte) (etherType uint16, tagged []byte) {
		return unix.ETH_P_8021Q, slices.Concat([]byte{0, id, 0x08, 0x06}, payload)
	}
	// claims reports whether the claim of an address by the trunk reaches the port in net-blue. id
	// is the VLAN id of the claim's frame; 0 is no tag.
	claims := func(id byte, address net.IP) bool {
		t.Helper()
		claim := arp(p.mac, address)
		end := slices.Concat(arp(p.mac, blue.ip), []byte("end"))
		etherType, payload := uint16(unix.ETH_P_ARP), claim
		if id != 0 {
			etherType, payload = vlan(id, claim)
		}
		p.send(t, broadcast, p.mac, etherType, payload)
		etherType, payload = vlan(10, end)
		p.send(t, broadcast, p.mac, etherType, payload)

		for arrived := false; ; {
			switch got := c.next(); {
			case got == string(end):
				return arrived
			case got == string(claim):
				arrived = true
			}
		}
	}

	if !claims(10, blue.ip) {
		t.Error("a claim of its own address does not arrive")
	}
	for what, arrives := range map[string]bool{
		"the address of the other VLAN": claims(10, red.ip),
		"its own address without a tag": claims(0, blue.ip),
		"an address from another VLAN":  claims(20, red.ip),
		"an unused address":             claims(10, net.IPv4(198, 18, 10, 77).To4()),
		"from a VLAN of no network":     claims(30, net.IPv4(198, 18, 10, 1).To4()),
	} {
		if arrives {
			t.Errorf("the claim of %s arrives", what)
		}
	}
}

// TestVLANIDChanges checks that the ports and the VXLAN port of a network follow its VLAN id, and
// leave nothing in the old VLAN.
func TestVLANIDChanges(t *testing.T) {
	netns.Need(t, netns.VLANFiltering())
	a, b := wired(t, plane.ModeVLANAware)
	a.network("net-blue", 10, 1000)
	b.network("net-blue", 99, 1000) // each xPU has VLAN ids of its own
	podA, podB := newPod(t, a, rep1, 1), newPod(t, b, rep1, 2)
	a.port(rep1, "net-blue", podA.mac)
	b.port(rep1, "net-blue", podB.mac)
	reach(t, podA, podB)
	vni := uint32(1000)
	_, err := a.networks().UpdateLogicalBridge(a.ctx(),
		&evpn.UpdateLogicalBridgeRequest{LogicalBridge: &evpn.LogicalBridge{
			Name: "logicalBridges/net-blue", Spec: &evpn.LogicalBridgeSpec{VlanId: 11, Vni: &vni}}})
	if err != nil {
		t.Fatal(err)
	}

	for _, name := range []string{rep1, "vx-net-blue"} {
		if diff := cmp.Diff([]string{"11 untagged"}, a.vlans(name)); diff != "" {
			t.Errorf("VLANs of %s (-want +got):\n%s", name, diff)
		}
	}

	if diff := cmp.Diff([]int{11}, a.forwarded(rep1, podA.mac)); diff != "" {
		t.Errorf("static entries (-want +got):\n%s", diff)
	}
	if got := a.vlans("br-opi"); got != nil {
		t.Errorf("the bridge itself is in VLANs %s: the machine must not be", got)
	}

	reach(t, podA, podB)
}

// TestVLANsHeal checks that the agent restores the VLANs of a bridge that another program has
// changed.
func TestVLANsHeal(t *testing.T) {
	netns.Need(t, netns.VLANFiltering())
	a, b := wired(t, plane.ModeVLANAware)
	for _, x := range []*xpu{a, b} {
		x.network("net-blue", 10, 1000)
	}

	podA, podB := newPod(t, a, rep1, 1), newPod(t, b, rep1, 2)
	a.port(rep1, "net-blue", podA.mac)
	b.port(rep1, "net-blue", podB.mac)
	reach(t, podA, podB)

	for _, name := range []string{rep1, "vx-net-blue"} {
		if err := a.Handle().BridgeVlanDel(a.link(name), 10, false, false, false,
			true); err != nil {
			t.Fatal(err)
		}

		must.Eventually(t, name+" is in its VLAN again", func() bool {
			return slices.Equal(a.vlans(name), []string{"10 untagged"})
		})
		if err := a.Handle().BridgeVlanAdd(a.link(name), 20, true, true, false, true); err != nil {
			t.Fatal(err)
		}

		must.Eventually(t, name+" is in no other VLAN", func() bool {
			return slices.Equal(a.vlans(name), []string{"10 untagged"})
		})
	}

	bare := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{
		Name: "br-opi", Index: a.link("br-opi").Attrs().Index, MTU: -1, TxQLen: -1,
	}}
	if err := a.Handle().BridgeSetVlanFiltering(bare, false); err != nil {
		t.Fatal(err)
	}

	must.Eventually(t, "VLANs are filtered again", func() bool {
		return *a.link("br-opi").(*netlink.Bridge).VlanFiltering
	})
	reach(t, podA, podB)
}

// TestDataPlaneChanges checks that an agent that starts in the other mode moves all networks to it
// and leaves nothing of the earlier mode, and that a network that cannot be served says why.
func TestDataPlaneChanges(t *testing.T) {
	netns.Need(t, netns.VLANFiltering())
	a, b := wired(t, plane.ModeBridgePerNetwork)
	for _, x := range []*xpu{a, b} {
		x.network("net-blue", 10, 1000)
	}

	if err := a.sameVLAN("net-red", 10); err != nil {
		t.Fatal(err)
	}

	podA, podB, podC := newPod(t, a, rep1, 1), newPod(t, b, rep1, 2), newPod(t, a, rep2, 3)
	a.port(rep1, "net-blue", podA.mac)
	a.port(rep2, "net-red", podC.mac)
	b.port(rep1, "net-blue", podB.mac)
	reach(t, podA, podB)

	a.stop()
	a.cfg.Plane.Mode = plane.ModeAuto
	a.start()
	reach(t, podA, podB)
	noReach(t, podC, podB)
	if a.hasLink("br-net-blue") || a.hasLink("br-net-red") {
		t.Error("bridges of the earlier mode are left")
	}
	if detail := a.down(rep2); !strings.Contains(detail, "VLAN 10") ||
		!strings.Contains(detail, "net-blue") && !strings.Contains(detail, "net-red") {
		t.Errorf("detail %q", detail)
	}
	if attrs := a.link(rep2).Attrs(); attrs.MasterIndex != 0 || attrs.Flags&net.FlagUp != 0 {
		t.Errorf("the representor that cannot be served has master %d, flags %s", attrs.MasterIndex,
			attrs.Flags)
	}
	if err := a.sameVLAN("net-pink", 10); err == nil ||
		!strings.Contains(err.Error(), "vlan_id 10") {
		t.Errorf("a third network with VLAN 10: %v", err)
	}

	a.stop()
	a.cfg.Plane.Mode = plane.ModeBridgePerNetwork
	a.start()
	reach(t, podA, podB)
	a.up(rep2)
	if a.hasLink("br-opi") {
		t.Error("the bridge of the earlier mode is left")
	}
	if master := a.link(rep2).Attrs().MasterIndex; master != a.link("br-net-red").Attrs().Index {
		t.Errorf("the representor is in netdev %d", master)
	}
}

// TestNetworkWaitsForItsVLAN checks that, if two networks in the state file have the same VLAN id,
// the second network comes up when the first one is deleted.
func TestNetworkWaitsForItsVLAN(t *testing.T) {
	netns.Need(t, netns.VLANFiltering())
	x := newXPU(t, plane.ModeBridgePerNetwork, "")
	x.start()
	x.network("net-blue", 10, 0)
	if err := x.sameVLAN("net-red", 10); err != nil {
		t.Fatal(err)
	}

	pod1 := newPod(t, x, rep1, 1)
	x.port(rep1, "net-red", pod1.mac)
	x.stop()
	x.cfg.Plane.Mode = plane.ModeVLANAware
	x.start()
	if detail := x.down(rep1); !strings.Contains(detail, "VLAN 10") {
		t.Errorf("detail %q", detail)
	}
	if err := x.client.DeleteNetwork(x.ctx(), "net-blue"); err != nil {
		t.Fatal(err)
	}

	x.up(rep1)
	if diff := cmp.Diff([]string{"10 untagged"}, x.vlans(rep1)); diff != "" {
		t.Errorf("VLANs (-want +got):\n%s", diff)
	}
}

func TestDataPlaneChoice(t *testing.T) {
	open := func(x *xpu, mode plane.Mode) error {
		x.cfg.Plane.Mode = mode
		return x.Do(func() error {
			agent, err := service.New(x.cfg, testr.New(t))
			if err != nil {
				return err
			}
			return agent.Close()
		})
	}

	x := newXPU(t, "", "")
	if err := open(x, "ovs"); err == nil ||
		!strings.Contains(err.Error(), `data plane "ovs": must be`) {
		t.Errorf("a data plane that does not exist: %v", err)
	}
	if err := open(x, plane.ModeAuto); err != nil {
		t.Errorf("auto: %v", err)
	}

	able := netns.Has(t, netns.VLANFiltering())
	if x.hasLink("br-opi") != able {
		t.Errorf("VLAN filtering is there: %t, br-opi: %t", able, x.hasLink("br-opi"))
	}

	err := open(x, plane.ModeVLANAware)
	if able && err != nil {
		t.Error(err)
	}
	if !able && (err == nil || !strings.Contains(err.Error(), "CONFIG_BRIDGE_VLAN_FILTERING")) {
		t.Errorf("the kernel cannot do it: %v", err)
	}

	// A bridge of another program is not touched, and is no reason to choose the other mode.
	x = newXPU(t, "", "")
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "br-opi"
	attrs.Flags = net.FlagUp
	if err := x.Handle().LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		t.Fatal(err)
	}
	if err := open(x, plane.ModeAuto); err == nil ||
		!strings.Contains(err.Error(), "netdev br-opi: the name is taken") {
		t.Errorf("auto with another program's br-opi: %v", err)
	}
	if err := open(x, plane.ModeBridgePerNetwork); err != nil || !x.hasLink("br-opi") {
		t.Errorf("bridge-per-network with another program's br-opi: %v, still there: %t",
			err, x.hasLink("br-opi"))
	}
}
