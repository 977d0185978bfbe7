// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/sourcefilter"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
)

// SVI is the gateway of a network: a netdev of this machine in the network and in a VRF.
type SVI struct {
	ID       string
	Network  Segment
	VRF      string // the id of the VRF
	MAC      net.HardwareAddr
	Prefixes []netip.Prefix // the addresses of the gateway with the lengths of their subnets

	// router is the MAC address of the gateway at other machines, nil if its network has no VNI.
	router net.HardwareAddr
}

// hasIPv6 reports whether one of the addresses is an IPv6 address.
func (s SVI) hasIPv6() bool {
	for _, prefix := range s.Prefixes {
		if prefix.Addr().Is6() {
			return true
		}
	}
	return false
}

// prefixes returns all addresses of the SVI's netdev. With an IPv6 address it has the link-local
// address of its MAC address too, because the kernel sends Neighbor Solicitations from there, and
// of the MAC address that it has at other machines, because these get them from there.
func (s SVI) prefixes() []netip.Prefix {
	if !s.hasIPv6() {
		return s.Prefixes
	}

	all := slices.Clone(s.Prefixes)
	for _, mac := range []net.HardwareAddr{s.MAC, s.router} {
		if mac == nil {
			continue
		}
		own := netip.PrefixFrom(netaddr.LinkLocal(mac), 64)
		if !slices.Contains(all, own) {
			all = slices.Insert(all, 0, own)
		}
	}

	return all
}

// sviName returns the name of the netdev of an SVI in the VLAN-aware mode.
func sviName(id string) string { return netdevName("svi-", id) }

// sviPin stands for the SVI of a network in the placement, so that the network stays in its bridge.
// No port has such an id.
func sviPin(network string) string { return "svi/" + network }

// EnsureSVI makes the gateway of a network. The network and the VRF must exist. If the kernel does
// not forward IPv6, EnsureSVI returns an error although the gateway is complete.
func (p *Plane) EnsureSVI(s SVI) error {
	vrf, err := p.find(vrfName(s.VRF))
	if err != nil {
		return err
	}
	if vrf == nil || vrf.Type() != "vrf" || vrf.Attrs().Alias != aliasPrefix+s.VRF {
		return fmt.Errorf("netdev %s, the VRF, is missing", vrfName(s.VRF))
	}
	if err := p.checkVLAN(s.Network); err != nil {
		return fmt.Errorf("logical bridge %s is down: %w", s.Network.ID, err)
	}

	if before, made := p.svis[s.ID]; made && (before.Network.ID != s.Network.ID ||
		before.Network.VLAN != s.Network.VLAN) {
		if err := p.RemoveSVI(before); err != nil {
			return err
		}
	}

	s.router = p.routers[s.Network.ID]
	p.svis[s.ID] = s
	link, err := p.ensureSVINetdev(s)
	if err != nil {
		return err
	}

	p.owners.set(link.Attrs().Index, Object{KindSVI, s.ID})
	if err := p.protect(link, vrf, s); err != nil {
		return err
	}
	if err := p.route(link, vrf, s); err != nil || !s.hasIPv6() {
		return err
	}
	return linkError(p.sysctls.checkForwarding(link.Attrs().Name), link, "forward IPv6")
}

// IsStale reports whether a gateway was made before the address of this machine in the underlay of
// its network has changed, so that EnsureSVI has something to do.
func (p *Plane) IsStale(svi string) bool {
	s, made := p.svis[svi]
	return made && !bytes.Equal(s.router, p.routers[s.Network.ID])
}

// protect keeps ports from the machine itself and from what is the gateway's.
func (p *Plane) protect(link, vrf netlink.Link, s SVI) error {
	err := p.filter.SetGateway(s.Network.ID, sourcefilter.Gateway{
		Index: link.Attrs().Index, VRF: vrf.Attrs().Index, MAC: s.MAC,
		Addresses: addressesOf(s.prefixes()),
	})
	return linkError(err, link, "protect the machine")
}

// route puts the netdev of a gateway into its VRF and gives it its addresses. The VRF comes first,
// because the kernel removes IPv6 addresses when a netdev comes into a VRF (cycle_netdev).
func (p *Plane) route(link, vrf netlink.Link, s SVI) error {
	if link.Attrs().MasterIndex != vrf.Attrs().Index {
		if err := p.handle.LinkSetMaster(link, vrf); err != nil {
			return linkError(err, link, "add to VRF %s", s.VRF)
		}
	}
	if err := p.setIPv4(link, ipv4Routing); err != nil {
		return err
	}
	if s.hasIPv6() {
		for _, of := range []netlink.Link{vrf, link} {
			if err := p.sysctls.set(of.Attrs().Name, ipv6Routing); err != nil {
				return linkError(err, link, "route IPv6")
			}
		}
	}
	if err := p.up(link); err != nil {
		return err
	}

	return p.setAddresses(link, s.prefixes())
}

// ensureSVINetdev returns the netdev of a gateway with the gateway's MAC address.
func (p *Plane) ensureSVINetdev(s SVI) (netlink.Link, error) {
	bridge, err := p.ensureBridge(p.bridgeOf(s.Network.ID))
	if err != nil {
		return nil, err
	}

	link := bridge
	if p.vlanAware {
		p.placement.setPort(sviPin(s.Network.ID), []Segment{s.Network})
		if err := p.shareMAC(bridge, s); err != nil {
			return nil, err
		}
		if err := p.joinVLAN(bridge, s); err != nil {
			return nil, err
		}
		if link, err = p.ensureVLANNetdev(bridge, s); err != nil {
			return nil, err
		}
	}

	if !bytes.Equal(link.Attrs().HardwareAddr, s.MAC) {
		if err := p.handle.LinkSetHardwareAddr(link, s.MAC); err != nil {
			return nil, linkError(err, link, "set MAC address %s", s.MAC)
		}
	}

	return link, nil
}

// shareMAC gives a shared bridge the MAC address of its first gateway. The kernel makes a bridge
// promiscuous, so that it copies all frames of all networks, if a VLAN netdev has another MAC
// address than the bridge (vlan_dev_open). Gateways usually have all the same one.
func (p *Plane) shareMAC(bridge netlink.Link, s SVI) error {
	if bytes.Equal(bridge.Attrs().HardwareAddr, s.MAC) ||
		p.ownVLANs.hasOthers(bridge.Attrs().Index, s.ID) {
		return nil
	}
	return linkError(p.handle.LinkSetHardwareAddr(bridge, s.MAC), bridge, "set MAC address %s",
		s.MAC)
}

// unshareMAC gives a shared bridge without gateways another MAC address if it still has the address
// of its last gateway, because that gateway may move to another machine.
func (p *Plane) unshareMAC(bridge netlink.Link, last net.HardwareAddr) error {
	if p.ownVLANs.hasOthers(bridge.Attrs().Index, "") ||
		!bytes.Equal(bridge.Attrs().HardwareAddr, last) {
		return nil
	}
	return linkError(p.handle.LinkSetHardwareAddr(bridge, randomMAC()), bridge, "set MAC address")
}

// joinVLAN puts a shared bridge itself into the VLAN of a gateway, and makes it take the frames for
// the gateway's MAC address.
func (p *Plane) joinVLAN(bridge netlink.Link, s SVI) error {
	index, vlan := bridge.Attrs().Index, s.Network.VLAN
	if !p.ownVLANs.present(index, vlan) {
		p.ownVLANs.set(index, vlan, s.ID, false)
		if err := p.handle.BridgeVlanAdd(bridge, vlan, false, false, true, false); err != nil {
			return linkError(err, bridge, "add to VLAN %d", vlan)
		}
		p.ownVLANs.set(index, vlan, s.ID, true)
	}
	return linkError(p.handle.NeighSet(localEntry(bridge, s)), bridge, "take %s", s.MAC)
}

// localEntry returns the entry of a bridge's forwarding database for a MAC address of the machine
// itself.
func localEntry(bridge netlink.Link, s SVI) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: bridge.Attrs().Index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF,
		State: netlink.NUD_PERMANENT, HardwareAddr: s.MAC, Vlan: int(s.Network.VLAN),
	}
}

// ensureVLANNetdev returns the netdev of a gateway on a shared bridge.
func (p *Plane) ensureVLANNetdev(bridge netlink.Link, s SVI) (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex = sviName(s.ID), bridge.Attrs().Index
	attrs.HardwareAddr = s.MAC
	want := &netlink.Vlan{
		LinkAttrs: attrs, VlanId: int(s.Network.VLAN), VlanProtocol: netlink.VLAN_PROTOCOL_8021Q,
	}
	link, err := p.ensure(want, s.ID)
	if err != nil {
		return nil, err
	}

	if have, ok := link.(*netlink.Vlan); ok &&
		(have.VlanId != want.VlanId || have.ParentIndex != want.ParentIndex) {
		if err = p.remove(link); err == nil {
			link, err = p.ensure(want, s.ID)
		}
	}

	if err == nil && link == want { // the netdev is new
		err = p.disableIPv6(link)
	}

	return link, err
}

// RemoveSVI removes a gateway. The network stays.
func (p *Plane) RemoveSVI(s SVI) error {
	if before, made := p.svis[s.ID]; made {
		s = before
	}

	var err error
	if p.vlanAware {
		err = p.removeVLANNetdev(s)
	} else {
		err = p.stopRouting(s.Network.ID, s.MAC)
	}
	if err != nil {
		return err
	}

	// The filter is the last, because it protects the machine.
	if err := p.filter.RemoveGateway(s.Network.ID); err != nil {
		return fmt.Errorf("filter of the gateway of %s: %w", s.Network.ID, err)
	}

	delete(p.svis, s.ID)
	return nil
}

// removeVLANNetdev removes the netdev of a gateway, and takes the shared bridge itself out of the
// VLAN. The kernel removes the entry for the gateway's MAC address with that (br_vlan_delete).
func (p *Plane) removeVLANNetdev(s SVI) error {
	if err := p.removeOwn(sviName(s.ID), "vlan", s.ID); err != nil {
		return err
	}

	name, id := p.bridgeOf(s.Network.ID)
	bridge, err := p.find(name)
	if err != nil {
		return err
	}
	if bridge != nil && bridge.Attrs().Alias == aliasPrefix+id {
		err := cmp.Or(p.leaveOwnVLAN(bridge, s.Network.VLAN), p.unshareMAC(bridge, s.MAC))
		if err != nil {
			return err
		}
	}

	p.placement.removePort(sviPin(s.Network.ID))

	return nil
}

// leaveOwnVLAN takes a bridge itself out of a VLAN.
func (p *Plane) leaveOwnVLAN(bridge netlink.Link, vlan uint16) error {
	p.ownVLANs.remove(bridge.Attrs().Index, vlan)
	err := p.handle.BridgeVlanDel(bridge, vlan, false, false, true, false)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return linkError(err, bridge, "leave VLAN %d", vlan)
}

// stopRouting makes the bridge of a network a bridge and nothing else. The bridge leaves its VRF
// last, so that another try finds what is left if this one ends in between. mac is the gateway's
// MAC address, or nil if it is not known.
func (p *Plane) stopRouting(network string, mac net.HardwareAddr) error {
	bridge, err := p.find(bridgeName(network))
	if err != nil || bridge == nil || bridge.Attrs().Alias != aliasPrefix+network {
		return err
	}

	if err := p.setAddresses(bridge, nil); err != nil {
		return err
	}
	if err := p.setIPv4(bridge, ipv4NotRouting); err != nil {
		return err
	}
	if _, err := p.sysctls.read(bridge.Attrs().Name, "forwarding"); err == nil {
		if err := p.sysctls.set(bridge.Attrs().Name, ipv6NotRouting); err != nil {
			return linkError(err, bridge, "route no IPv6")
		}
	}

	p.owners.remove(bridge.Attrs().Index)
	if bridge.Attrs().MasterIndex == 0 && !bytes.Equal(bridge.Attrs().HardwareAddr, mac) {
		return nil
	}
	// The bridge gets another MAC address, because the gateway may move to another machine.
	if err := p.handle.LinkSetHardwareAddr(bridge, randomMAC()); err != nil {
		return linkError(err, bridge, "set MAC address")
	}

	return linkError(p.handle.LinkSetNoMaster(bridge), bridge, "take out of its VRF")
}

// randomMAC returns a unicast address that is administered locally (IEEE 802, section 8.4).
func randomMAC() net.HardwareAddr {
	mac := make(net.HardwareAddr, 6)
	_, _ = rand.Read(mac) // never fails
	mac[0] = mac[0]&^1 | 2
	return mac
}
