package bridge

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	sharedBridge = "br-opi" // no network's: ids have at least 4 characters
	sharedID     = "*"      // in its mark, in place of a network's id
)

// errNoVLANFiltering is why there is no VLAN-aware data plane.
var errNoVLANFiltering = errors.New("the kernel's bridges cannot filter VLANs (CONFIG_BRIDGE_VLAN_FILTERING)")

// vlanAware is the data plane with one bridge, in which a network is its VLAN id: an ACCESS port and a VXLAN port have
// it untagged, a TRUNK port has those of its networks tagged. The bridge has no default VLAN and is itself in none, so
// that a netdev that was just added is in no network, and the machine neither.
type vlanAware struct {
	*rtnetlink
	vlans map[string]uint16 // VLAN ids by network; of two networks that want one, the first has it
}

// openVLANAware makes the bridge: only by trying can one know whether the kernel is able to.
func openVLANAware(r *rtnetlink) (*vlanAware, error) {
	v := &vlanAware{rtnetlink: r, vlans: map[string]uint16{}}
	_, _, err := v.bridge()
	if errors.Is(err, errNoVLANFiltering) {
		err = errors.Join(err, v.removeOwn(sharedBridge, "bridge", sharedID))
	}
	if err != nil {
		return nil, err
	}
	return v, nil
}

func (*vlanAware) filtersVLANs() bool { return true }

// bridge gives the bridge as it has to be, and tells whether it had to be made.
func (v *vlanAware) bridge() (link netlink.Link, made bool, err error) {
	if link, made, err = v.ensure(newBridge(sharedBridge), sharedID); err != nil {
		return nil, made, unsupported(err)
	}
	if !isVLANFiltering(link) {
		if link, err = v.filterVLANs(link); err != nil {
			return nil, made, err
		}
	}
	return link, made, v.settle(link)
}

// filterVLANs turns VLAN filtering on. A kernel that has none may say so, or ignore what it does not know.
func (v *vlanAware) filterVLANs(bridge netlink.Link) (netlink.Link, error) {
	err := v.configure(bridge,
		nl.NewRtAttr(nl.IFLA_BR_VLAN_FILTERING, nl.Uint8Attr(1)),
		nl.NewRtAttr(nl.IFLA_BR_VLAN_DEFAULT_PVID, nl.Uint16Attr(0)))
	if err != nil {
		return nil, fmt.Errorf("netdev %s: filter VLANs: %w", sharedBridge, unsupported(err))
	}
	if bridge, err = v.find(sharedBridge); err != nil {
		return nil, err
	}
	if bridge == nil || !isVLANFiltering(bridge) {
		return nil, fmt.Errorf("netdev %s: filter VLANs: has no effect: %w", sharedBridge, errNoVLANFiltering)
	}
	return bridge, nil
}

func unsupported(err error) error {
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("%w: %w", errNoVLANFiltering, err)
	}
	return err
}

// isVLANFiltering tells whether a netdev is a bridge that filters VLANs and has no default one.
func isVLANFiltering(link netlink.Link) bool {
	bridge, ok := link.(*netlink.Bridge)
	return ok && bridge.VlanFiltering != nil && *bridge.VlanFiltering && bridge.VlanDefaultPVID != nil && *bridge.VlanDefaultPVID == 0
}

// ensureNetwork takes the network's VLAN id, and brings up the VXLAN port if it has a VNI.
func (v *vlanAware) ensureNetwork(n segment) (made bool, err error) {
	if err := v.available(n); err != nil {
		return false, err
	}
	v.vlans[n.id] = n.vlan
	bridge, made, err := v.bridge()
	if err != nil {
		return made, err
	}
	vxlan, err := v.ensureVXLAN(n, bridge)
	if err != nil || vxlan == nil {
		return made, err
	}
	return made, v.setVLANs(vxlan, []uint16{n.vlan}, false, nil)
}

// available tells whether the network's VLAN id is no other network's.
func (v *vlanAware) available(n segment) error {
	for holder, vlan := range v.vlans {
		if vlan == n.vlan && holder != n.id {
			return fmt.Errorf("VLAN %d is already in use by logical bridge %s", n.vlan, holder)
		}
	}
	return nil
}

// removeNetwork removes the VXLAN port, if any. Ports of the network must have been detached.
func (v *vlanAware) removeNetwork(id string) error {
	if err := v.removeOwn(vxlanName(id), "vxlan", id); err != nil {
		return err
	}
	delete(v.vlans, id)
	return nil
}

// attach puts the port's representor into the bridge and its networks' VLANs.
func (v *vlanAware) attach(port string, to membership) error {
	rep, err := v.representor(port)
	if err != nil {
		return err
	}
	var vlans []uint16
	for _, n := range to.networks {
		if err := v.available(n); err != nil {
			return fmt.Errorf("logical bridge %s is down: %w", n.id, err)
		}
		vlans = append(vlans, n.vlan)
	}
	bridge, _, err := v.bridge()
	if err != nil {
		return err
	}
	if err := v.join(rep, bridge, port); err != nil {
		return err
	}
	if err := v.setVLANs(rep, vlans, to.trunk, to.mac); err != nil {
		return err
	}
	return v.forward(rep, to.mac, vlans...)
}

// setVLANs brings the VLANs of a port of the bridge to what is wanted: with tags on the wire, or without in either
// direction. What is so already is not set again, since that would be an event. mac, if any, is what frames are forwarded
// to the port for.
func (v *vlanAware) setVLANs(link netlink.Link, want []uint16, tagged bool, mac net.HardwareAddr) error {
	all, err := v.handle.BridgeVlanList()
	if err != nil {
		return linkError(err, link, "VLANs")
	}
	have := map[uint16]uint16{} // flags by VLAN id
	for _, vlan := range all[int32(link.Attrs().Index)] {
		have[vlan.Vid] = vlan.Flags & untagged
		if slices.Contains(want, vlan.Vid) {
			continue
		}
		if err := v.leaveVLAN(link, vlan.Vid, mac); err != nil {
			return err
		}
	}
	flags := uint16(untagged)
	if tagged {
		flags = 0
	}
	for _, vlan := range want {
		if had, ok := have[vlan]; ok && had == flags {
			continue
		}
		if err := v.handle.BridgeVlanAdd(link, vlan, !tagged, !tagged, false, true); err != nil {
			return linkError(err, link, "add to VLAN %d", vlan)
		}
	}
	return nil
}

// untagged are the flags of a VLAN whose frames have no tag on the wire, in either direction.
const untagged = nl.BRIDGE_VLAN_INFO_PVID | nl.BRIDGE_VLAN_INFO_UNTAGGED

// leaveVLAN takes a port out of a VLAN. The kernel leaves static entries of the VLAN behind, and does not remove them
// any more once the port is out of it (br_fdb_delete).
func (v *vlanAware) leaveVLAN(link netlink.Link, vlan uint16, mac net.HardwareAddr) error {
	if mac != nil {
		if err := v.handle.NeighDel(staticEntry(link, mac, vlan)); err != nil && !errors.Is(err, unix.ENOENT) {
			return linkError(err, link, "no longer forward %s in VLAN %d to it", mac, vlan)
		}
	}
	if err := v.handle.BridgeVlanDel(link, vlan, false, false, false, true); !errors.Is(err, unix.ENOENT) {
		return linkError(err, link, "remove from VLAN %d", vlan)
	}
	return nil
}

func (v *vlanAware) sweep(networks []string, ports map[string]membership) error {
	return v.rtnetlink.sweep(networks, []string{sharedID}, ports, func(membership) string { return sharedID })
}
