// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"encoding/binary"
	"sync"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
)

// ownVLANs knows in which VLANs the shared bridges themselves have to be, because there is an SVI,
// and in which they are. The data plane writes it, and Watch compares events with it.
type ownVLANs struct {
	mu       sync.RWMutex
	byBridge map[int]map[uint16]ownVLAN // by ifindex and VLAN id
}

type ownVLAN struct {
	svi     string // the id of the SVI
	present bool   // the bridge is certainly in the VLAN
}

func newOwnVLANs() *ownVLANs { return &ownVLANs{byBridge: map[int]map[uint16]ownVLAN{}} }

// set records that a bridge has to be in the VLAN of an SVI, and whether it certainly is.
func (o *ownVLANs) set(bridge int, vlan uint16, svi string, present bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.byBridge[bridge] == nil {
		o.byBridge[bridge] = map[uint16]ownVLAN{}
	}
	o.byBridge[bridge][vlan] = ownVLAN{svi, present}
}

// sviOf returns the SVI of a bridge in a VLAN, or "".
func (o *ownVLANs) sviOf(bridge int, vlan uint16) string {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return o.byBridge[bridge][vlan].svi
}

// present reports whether a bridge certainly is in the VLAN of an SVI.
func (o *ownVLANs) present(bridge int, vlan uint16) bool {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return o.byBridge[bridge][vlan].present
}

func (o *ownVLANs) remove(bridge int, vlan uint16) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if delete(o.byBridge[bridge], vlan); len(o.byBridge[bridge]) == 0 {
		delete(o.byBridge, bridge)
	}
}

// removeBridge forgets a bridge that does not exist any more.
func (o *ownVLANs) removeBridge(bridge int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.byBridge, bridge)
}

// hasOthers reports whether a bridge has an SVI besides one.
func (o *ownVLANs) hasOthers(bridge int, svi string) bool {
	o.mu.RLock()
	defer o.mu.RUnlock()
	for _, other := range o.byBridge[bridge] {
		if other.svi != svi {
			return true
		}
	}
	return false
}

// missing returns the SVIs whose VLAN an event of a bridge does not have. The event has the family
// of bridges, and so all VLANs of the bridge itself (br_ifinfo_notify).
func (o *ownVLANs) missing(bridge int, event []byte) (svis []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.byBridge[bridge]) == 0 {
		return nil
	}

	have := vlansInEvent(event)
	for vlan, own := range o.byBridge[bridge] {
		if !have[vlan] && own.present {
			o.byBridge[bridge][vlan] = ownVLAN{own.svi, false}
			svis = append(svis, own.svi)
		}
	}

	return svis
}

// vlansInEvent returns the VLANs in a message about a netdev that has the family of bridges.
func vlansInEvent(message []byte) map[uint16]bool {
	vlans := map[uint16]bool{}
	attrs, err := links.Attributes(message)
	if err != nil {
		return vlans
	}

	first := uint16(0)
	for kind, value := range attribute.All(attrs[unix.IFLA_AF_SPEC]) {
		if kind != nl.IFLA_BRIDGE_VLAN_INFO || len(value) < 4 {
			continue
		}

		// This is struct bridge_vlan_info of linux/if_bridge.h.
		flags, vlan := binary.NativeEndian.Uint16(value), binary.NativeEndian.Uint16(value[2:])
		switch {
		case vlan > MaxVLAN:
			continue
		case flags&nl.BRIDGE_VLAN_INFO_RANGE_BEGIN != 0:
			first = vlan
			continue
		case flags&nl.BRIDGE_VLAN_INFO_RANGE_END == 0:
			first = vlan
		}
		for ; first <= vlan; first++ {
			vlans[first] = true
		}
	}

	return vlans
}
