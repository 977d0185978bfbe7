// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"net"
	"net/netip"
	"strconv"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// TestBonds checks that a bond is reached by all its ports, of one xPU and of two.
func TestBonds(t *testing.T) {
	netns.Need(t, netns.Bonds())
	for _, mode := range []plane.Mode{plane.ModeBridgePerNetwork, plane.ModeVLANAware} {
		t.Run(string(mode), func(t *testing.T) {
			if mode == plane.ModeVLANAware {
				netns.Need(t, netns.VLANFiltering())
			}
			t.Run("OneXPU", func(t *testing.T) { testBondOfOneXPU(t, mode) })
			t.Run("TwoXPUs", func(t *testing.T) { testBondOfTwoXPUs(t, mode) })
		})
	}
}

// bonded is a pod with a bond of two ports, "left" and "right". The left one is active at first.
type bonded struct {
	t *testing.T
	*netns.Namespace
	addresses []netip.Addr // with the link-local address last
}

// bondMACs are the MAC addresses of the ports.
var bondMACs = map[string]net.HardwareAddr{
	"left": {2, 0, 0, 0, 9, 1}, "right": {2, 0, 0, 0, 9, 2},
}

// newBond connects a bond to representors. at has the xPU of each port, where the representor of the
// left port is rep1 and of the right port rep2. Each port may use the addresses of the bond, and is
// shared as the test says.
func newBond(t *testing.T, network string, at map[string]*xpu, shared bool) *bonded {
	t.Helper()
	b := &bonded{t: t, Namespace: netns.New(t), addresses: []netip.Addr{
		netip.MustParseAddr("10.1.0.9"), netip.MustParseAddr("fd00:1::9"),
		netaddr.LinkLocal(bondMACs["left"]),
	}}

	attrs := netlink.NewLinkAttrs()
	attrs.Name = "bond0"
	bond := netlink.NewLinkBond(attrs)
	bond.Mode, bond.Miimon = netlink.BOND_MODE_ACTIVE_BACKUP, 10
	bond.FailOverMac = netlink.BOND_FAIL_OVER_MAC_ACTIVE
	must.Succeed(t, b.Handle().LinkAdd(bond))

	for name, representor := range map[string]string{"left": rep1, "right": rep2} {
		netns.Connect(t, at[name].Namespace, representor, b.Namespace, name)
		port, err := b.Handle().LinkByName(name)
		must.Succeed(t, err)
		must.Succeed(t, b.Handle().LinkSetHardwareAddr(port, bondMACs[name]))
	}
	for _, name := range []string{"left", "right"} {
		port, err := b.Handle().LinkByName(name)
		must.Succeed(t, err)
		must.Succeed(t, b.Handle().LinkSetDown(port))
		must.Succeed(t, b.Handle().LinkSetMaster(port, bond))
	}
	must.Succeed(t, b.Handle().LinkSetUp(bond))
	addAddress(t, b.Namespace, "bond0", "10.1.0.9/24")
	addAddress(t, b.Namespace, "bond0", "fd00:1::9/64")

	b.ensurePorts(network, at, shared)
	return b
}

func (b *bonded) ensurePorts(network string, at map[string]*xpu, shared bool) {
	b.t.Helper()
	for name, representor := range map[string]string{"left": rep1, "right": rep2} {
		port := opi.Port{
			ID: representor, MAC: bondMACs[name], Networks: []string{network}, Shared: shared,
			Addresses: append(b.addresses[:2:2], netaddr.LinkLocal(bondMACs["left"]),
				netaddr.LinkLocal(bondMACs["right"])),
		}
		must.Succeed(b.t, at[name].client.EnsurePort(at[name].ctx(), port))
	}
}

// failOver takes the active port down.
func (b *bonded) failOver() {
	b.t.Helper()
	left, err := b.Handle().LinkByName("left")
	must.Succeed(b.t, err)
	must.Succeed(b.t, b.Handle().LinkSetDown(left))
	right, err := b.Handle().LinkByName("right")
	must.Succeed(b.t, err)
	must.Eventually(b.t, "the right port is active", func() bool {
		bond, err := b.Handle().LinkByName("bond0")
		must.Succeed(b.t, err)
		return bond.(*netlink.Bond).ActiveSlave == right.Attrs().Index
	})
}

// newPeer makes a pod that reaches the link-local addresses of others too.
func newPeer(r router, port, network string, last byte) *host {
	r.t.Helper()
	h := r.newHost(port, network, 1, last)
	addAddress(r.t, h.Namespace, "eth0", netaddr.LinkLocal(h.mac).String()+"/64")
	return h
}

// through returns the addresses as a peer uses them: a link-local address is one of its interface.
func (b *bonded) through(peer *host) (addresses []netip.Addr) {
	b.t.Helper()
	eth0, err := peer.Handle().LinkByName("eth0")
	must.Succeed(b.t, err)
	for _, address := range b.addresses {
		if address.IsLinkLocalUnicast() {
			address = address.WithZone(strconv.Itoa(eth0.Attrs().Index))
		}
		addresses = append(addresses, address)
	}
	return addresses
}

func testBondOfOneXPU(t *testing.T, mode plane.Mode) {
	a, b := wired(t, mode)
	for _, x := range []*xpu{a, b} {
		x.network("net-blue", 10, 1000)
	}
	near, far := newPeer(router{a}, rep3, "net-blue", 3), newPeer(router{b}, rep3, "net-blue", 4)

	bond := newBond(t, "net-blue", map[string]*xpu{"left": a, "right": a}, false)
	near.reaches(t, bond.through(near)...)
	far.reaches(t, bond.through(far)...)

	bond.failOver()
	near.reaches(t, bond.through(near)...)
	far.reaches(t, bond.through(far)...)
}

// testBondOfTwoXPUs also checks that the xPU of the other port drops the frames of the bond unless
// the port says that its addresses are shared.
func testBondOfTwoXPUs(t *testing.T, mode plane.Mode) {
	a, b := wired(t, mode)
	for _, x := range []*xpu{a, b} {
		x.network("net-blue", 10, 1000)
	}
	near, far := newPeer(router{a}, rep3, "net-blue", 3), newPeer(router{b}, rep3, "net-blue", 4)

	at := map[string]*xpu{"left": a, "right": b}
	bond := newBond(t, "net-blue", at, false)
	near.reaches(t, bond.through(near)...)
	far.reachesNot(t, bond.through(far)...)

	bond.ensurePorts("net-blue", at, true)
	far.reaches(t, bond.through(far)...)

	bond.failOver()
	near.reaches(t, bond.through(near)...)
	far.reaches(t, bond.through(far)...)
}
