// SPDX-License-Identifier: Apache-2.0

package plane

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

// MaxVLAN is the largest VLAN id that a network can have (IEEE 802.1Q).
const MaxVLAN = 4094

// errNoVLANFiltering is the reason why the VLAN-aware mode is impossible.
var errNoVLANFiltering = errors.New("the kernel's bridges cannot filter VLANs " +
	"(CONFIG_BRIDGE_VLAN_FILTERING), or cannot report the VLANs of one port (Linux 5.6)")

// filterVLANs makes a bridge filter VLANs. A kernel that cannot may return an error, or ignore the
// attributes.
func (c *conn) filterVLANs(bridge netlink.Link) error {
	err := c.configure(bridge,
		nl.NewRtAttr(nl.IFLA_BR_VLAN_FILTERING, nl.Uint8Attr(1)),
		nl.NewRtAttr(nl.IFLA_BR_VLAN_DEFAULT_PVID, nl.Uint16Attr(0)))
	if err != nil {
		return linkError(err, bridge, "filter VLANs")
	}

	name := bridge.Attrs().Name
	bridge, err = c.find(name)
	if err == nil && !isVLANFiltering(bridge) {
		err = fmt.Errorf("netdev %s: filter VLANs: has no effect: %w", name, errNoVLANFiltering)
	}

	return err
}

// isVLANFiltering reports whether a netdev is a bridge that filters VLANs and has no default VLAN.
func isVLANFiltering(link netlink.Link) bool {
	bridge, ok := link.(*netlink.Bridge)
	return ok && bridge.VlanFiltering != nil && *bridge.VlanFiltering &&
		bridge.VlanDefaultPVID != nil && *bridge.VlanDefaultPVID == 0
}

// setVLANs sets the VLANs of a port of a bridge. If tagged is set, their frames have a tag on the
// wire, in both directions. A VLAN that is right already is not set again, because that would cause
// an event.
func (p *Plane) setVLANs(link netlink.Link, want []uint16, tagged bool) error {
	have, err := p.vlansOf(link.Attrs().Index)
	if err != nil {
		return linkError(err, link, "VLANs")
	}

	right := map[uint16]bool{} // the wanted VLANs that need no change
	for vlan, flags := range have {
		if slices.Contains(want, vlan) {
			right[vlan] = (flags&nl.BRIDGE_VLAN_INFO_PVID == 0) == tagged &&
				(flags&nl.BRIDGE_VLAN_INFO_UNTAGGED == 0) == tagged
		} else if err := p.leaveVLAN(link, vlan); err != nil {
			return err
		}
	}

	for _, vlan := range want {
		if !right[vlan] {
			if err := p.handle.BridgeVlanAdd(link, vlan, !tagged, !tagged, false,
				true); err != nil {
				return linkError(err, link, "add to VLAN %d", vlan)
			}
		}
	}

	return nil
}

// vlansOf returns the VLANs of a port of a bridge, with their flags (BRIDGE_VLAN_INFO_*). The
// netlink library would read the VLANs of all ports.
func (c *conn) vlansOf(index int) (map[uint16]uint16, error) {
	messages, err := request.Send(&c.raw, unix.RTM_GETVLAN, unix.NLM_F_DUMP, bridgeVLANs{index})
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
	// vlanEntryRange (BRIDGE_VLANDB_ENTRY_RANGE) is the last VLAN of a range. The VLAN of the info
	// is the first one.
	vlanEntryRange = 2
)

// addVLANs adds the flags of the VLANs in an answer of the kernel, by VLAN id.
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
		if last > MaxVLAN {
			return fmt.Errorf("VLAN %d: must be at most %d", last, MaxVLAN)
		}

		for vlan := first; vlan <= last; vlan++ {
			vlans[vlan] = flags
		}
	}

	return nil
}

// leaveVLAN takes a port of a bridge out of a VLAN. It removes the agent's forwarding entries
// first, because without the VLAN the kernel would keep them and refuse their removal
// (br_fdb_delete).
func (p *Plane) leaveVLAN(link netlink.Link, vlan uint16) error {
	entries, err := p.entriesOf(link.Attrs().Index)
	if err != nil {
		return linkError(err, link, "forwarding database")
	}

	for _, e := range entries {
		if !isOwnEntry(e) || e.Vlan != int(vlan) {
			continue
		}
		p.forwarding.remove(keyOf(e.MasterIndex, e.HardwareAddr, e.Vlan))
		if err := p.deleteEntry(link.Attrs().Index, e.HardwareAddr, e.Vlan); err != nil {
			return linkError(err, link, "no longer forward %s in VLAN %d to it",
				e.HardwareAddr, vlan)
		}
	}

	if err := p.handle.BridgeVlanDel(link, vlan, false, false, false, true); !errors.Is(err,
		unix.ENOENT) {
		return linkError(err, link, "remove from VLAN %d", vlan)
	}

	return nil
}
