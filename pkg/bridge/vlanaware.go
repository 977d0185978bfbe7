// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

const maxVLAN = 4094 // IEEE 802.1Q

// errNoVLANFiltering is why there is no VLAN-aware data plane.
var errNoVLANFiltering = errors.New("the kernel's bridges cannot filter VLANs " +
	"(CONFIG_BRIDGE_VLAN_FILTERING), or not tell those of one port " +
	"(Linux 5.6)")

// filterVLANs turns VLAN filtering on. A kernel without VLAN filtering may return an error, or
// ignore the attributes.
func (b *bridgePlane) filterVLANs(bridge netlink.Link) error {
	err := b.configure(bridge,
		nl.NewRtAttr(nl.IFLA_BR_VLAN_FILTERING, nl.Uint8Attr(1)),
		nl.NewRtAttr(nl.IFLA_BR_VLAN_DEFAULT_PVID, nl.Uint16Attr(0)))
	if err != nil {
		return linkError(err, bridge, "filter VLANs")
	}

	name := bridge.Attrs().Name
	bridge, err = b.find(name)
	if err == nil && !isVLANFiltering(bridge) {
		err = fmt.Errorf("netdev %s: filter VLANs: has no effect: %w", name, errNoVLANFiltering)
	}

	return err
}

// isVLANFiltering tells whether a netdev is a bridge that filters VLANs and has no default one.
func isVLANFiltering(link netlink.Link) bool {
	bridge, ok := link.(*netlink.Bridge)
	return ok && bridge.VlanFiltering != nil && *bridge.VlanFiltering &&
		bridge.VlanDefaultPVID != nil && *bridge.VlanDefaultPVID == 0
}

// setVLANs brings the VLANs of a port of the bridge to those wanted. tagged says whether their
// frames have a tag on the wire, in either direction. A VLAN that is right already is not set
// again, since that would be an event.
func (b *bridgePlane) setVLANs(link netlink.Link, want []uint16, tagged bool) error {
	have, err := b.vlansOf(link.Attrs().Index)
	if err != nil {
		return linkError(err, link, "VLANs")
	}

	right := map[uint16]bool{} // VLANs that need no change
	for vlan, flags := range have {
		if slices.Contains(want, vlan) {
			right[vlan] = (flags&nl.BRIDGE_VLAN_INFO_PVID == 0) == tagged &&
				(flags&nl.BRIDGE_VLAN_INFO_UNTAGGED == 0) == tagged
		} else if err := b.leaveVLAN(link, vlan); err != nil {
			return err
		}
	}

	for _, vlan := range want {
		if !right[vlan] {
			if err := b.handle.BridgeVlanAdd(link, vlan, !tagged, !tagged, false,
				true); err != nil {
				return linkError(err, link, "add to VLAN %d", vlan)
			}
		}
	}

	return nil
}

// vlansOf returns the VLANs of a port of the bridge, with their flags (BRIDGE_VLAN_INFO_*). The
// netlink library would read those of all ports.
func (b *bridgePlane) vlansOf(index int) (map[uint16]uint16, error) {
	messages, err := request.Send(&b.raw, unix.RTM_GETVLAN, unix.NLM_F_DUMP, bridgeVLANs{index})
	if err != nil {
		return nil, err
	}

	vlans := map[uint16]uint16{}
	for _, m := range messages {
		if err := addVLANs(vlans, m); err != nil {
			return nil, err
		}
	}

	return vlans, nil
}

// bridgeVLANs is the header of messages about the VLANs of a netdev (struct br_vlan_msg of
// linux/if_bridge.h, Linux 5.6).
type bridgeVLANs struct{ index int }

const sizeofBridgeVLANs = 8

func (h bridgeVLANs) Len() int { return sizeofBridgeVLANs }

func (h bridgeVLANs) Serialize() []byte {
	return binary.NativeEndian.AppendUint32([]byte{unix.AF_BRIDGE, 0, 0, 0}, uint32(h.index))
}

// Attributes of the kernel's answer (linux/if_bridge.h).
const (
	vlanEntry     = 1 // BRIDGE_VLANDB_ENTRY
	vlanEntryInfo = 1 // BRIDGE_VLANDB_ENTRY_INFO, struct bridge_vlan_info
	// BRIDGE_VLANDB_ENTRY_RANGE, the last VLAN of a range that begins with that of the info
	vlanEntryRange = 2
)

// addVLANs adds those of an answer of the kernel, by VLAN id.
func addVLANs(vlans map[uint16]uint16, message []byte) error {
	if len(message) < sizeofBridgeVLANs {
		return fmt.Errorf("VLANs of %d bytes, want at least %d", len(message), sizeofBridgeVLANs)
	}

	for kind, value := range attribute.All(message[sizeofBridgeVLANs:]) {
		if kind != vlanEntry {
			continue
		}

		entry, err := attribute.Parse(value)
		if err != nil {
			return fmt.Errorf("VLAN: %w", err)
		}

		info := entry[vlanEntryInfo]
		if len(info) < 4 {
			return fmt.Errorf("VLAN of %d bytes, want 4", len(info))
		}

		flags, first := binary.NativeEndian.Uint16(info), binary.NativeEndian.Uint16(info[2:])
		last := max(first, entry.Uint16(vlanEntryRange))
		if last > maxVLAN {
			return fmt.Errorf("VLAN %d: must be at most %d", last, maxVLAN)
		}

		for vlan := first; vlan <= last; vlan++ {
			vlans[vlan] = flags
		}
	}

	return nil
}

// leaveVLAN removes the agent's entries first: the kernel keeps them without the VLAN, and then
// refuses their removal (br_fdb_delete).
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
			return linkError(err, link, "no longer forward %s in VLAN %d to it",
				e.HardwareAddr, vlan)
		}
	}

	if err := b.handle.BridgeVlanDel(link, vlan, false, false, false, true); !errors.Is(err,
		unix.ENOENT) {
		return linkError(err, link, "remove from VLAN %d", vlan)
	}

	return nil
}
