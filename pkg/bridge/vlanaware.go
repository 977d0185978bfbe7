package bridge

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// errNoVLANFiltering is why there is no VLAN-aware data plane.
var errNoVLANFiltering = errors.New("the kernel's bridges cannot filter VLANs (CONFIG_BRIDGE_VLAN_FILTERING)")

// filterVLANs turns VLAN filtering on. A kernel without VLAN filtering may return an error, or ignore the attributes.
func (b *bridgePlane) filterVLANs(bridge netlink.Link) error {
	err := b.configure(bridge,
		nl.NewRtAttr(nl.IFLA_BR_VLAN_FILTERING, nl.Uint8Attr(1)),
		nl.NewRtAttr(nl.IFLA_BR_VLAN_DEFAULT_PVID, nl.Uint16Attr(0)))
	if err != nil {
		return linkError(err, bridge, "filter VLANs")
	}
	bridge, err = b.find(sharedBridge)
	if err == nil && !isVLANFiltering(bridge) {
		err = fmt.Errorf("netdev %s: filter VLANs: has no effect: %w", sharedBridge, errNoVLANFiltering)
	}
	return err
}

// isVLANFiltering tells whether a netdev is a bridge that filters VLANs and has no default one.
func isVLANFiltering(link netlink.Link) bool {
	bridge, ok := link.(*netlink.Bridge)
	return ok && bridge.VlanFiltering != nil && *bridge.VlanFiltering && bridge.VlanDefaultPVID != nil && *bridge.VlanDefaultPVID == 0
}

// setVLANs brings the VLANs of a port of the bridge to those wanted. tagged says whether their frames have a tag on the wire,
// in either direction. A VLAN that is right already is not set again, since that would be an event.
func (b *bridgePlane) setVLANs(link netlink.Link, want []uint16, tagged bool) error {
	all, err := b.handle.BridgeVlanList()
	if err != nil {
		return linkError(err, link, "VLANs")
	}
	right := map[uint16]bool{} // VLANs that need no change
	for _, vlan := range all[int32(link.Attrs().Index)] {
		if slices.Contains(want, vlan.Vid) {
			right[vlan.Vid] = vlan.PortVID() == !tagged && vlan.EngressUntag() == !tagged
		} else if err := b.leaveVLAN(link, vlan.Vid); err != nil {
			return err
		}
	}
	for _, vlan := range want {
		if !right[vlan] {
			if err := b.handle.BridgeVlanAdd(link, vlan, !tagged, !tagged, false, true); err != nil {
				return linkError(err, link, "add to VLAN %d", vlan)
			}
		}
	}
	return nil
}

// leaveVLAN removes the agent's entries first: the kernel keeps them without the VLAN, and then refuses their removal (br_fdb_delete).
func (b *bridgePlane) leaveVLAN(link netlink.Link, vlan uint16) error {
	entries, err := b.entriesOf(link.Attrs().Index)
	if err != nil {
		return linkError(err, link, "forwarding database")
	}
	for _, e := range entries {
		if !isOwnEntry(e) || e.Vlan != int(vlan) {
			continue
		}
		b.forwarding.remove(keyOf(e.MasterIndex, e.HardwareAddr, e.Vlan))
		if err := b.endForwarding(link.Attrs().Index, e.HardwareAddr, e.Vlan); err != nil {
			return linkError(err, link, "no longer forward %s in VLAN %d to it", e.HardwareAddr, vlan)
		}
	}
	if err := b.handle.BridgeVlanDel(link, vlan, false, false, false, true); !errors.Is(err, unix.ENOENT) {
		return linkError(err, link, "remove from VLAN %d", vlan)
	}
	return nil
}
