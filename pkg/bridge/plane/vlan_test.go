// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"encoding/binary"
	"maps"
	"slices"
	"testing"

	"github.com/vishvananda/netlink/nl"
)

// vlanMessage returns the kernel's answer about a port. An entry has flags, the first VLAN and, for
// a range, the last VLAN.
func vlanMessage(entries ...[]uint16) []byte {
	m := bridgeVLANs{index: 7}.Serialize()
	for _, e := range entries {
		info := binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint16(nil, e[0]), e[1])
		entry := nl.NewRtAttr(vlanEntry, nil)
		entry.AddRtAttr(vlanEntryInfo, info)
		if len(e) > 2 {
			entry.AddRtAttr(vlanEntryRange, binary.NativeEndian.AppendUint16(nil, e[2]))
		}
		m = append(m, entry.Serialize()...)
	}

	return m
}

func TestAddVLANs(t *testing.T) {
	const access = nl.BRIDGE_VLAN_INFO_PVID | nl.BRIDGE_VLAN_INFO_UNTAGGED
	got := map[uint16]uint16{}
	if err := addVLANs(got,
		vlanMessage([]uint16{access, 10}, []uint16{0, 20, 23}, []uint16{0, 4094})); err != nil {
		t.Fatal(err)
	}

	if want := map[uint16]uint16{
		10: access, 20: 0, 21: 0, 22: 0, 23: 0, 4094: 0,
	}; !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}

	for name, message := range map[string][]byte{
		"short": {1, 2, 3},
		"no info": slices.Concat(bridgeVLANs{}.Serialize(),
			nl.NewRtAttr(vlanEntry, nil).Serialize()),
		"no VLAN":       vlanMessage([]uint16{0, 4095}),
		"range too far": vlanMessage([]uint16{0, 20, 65535}),
	} {
		if err := addVLANs(map[uint16]uint16{}, message); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func FuzzAddVLANs(f *testing.F) {
	f.Add(vlanMessage([]uint16{6, 10}, []uint16{0, 20, 23}))
	f.Fuzz(func(t *testing.T, message []byte) {
		vlans := map[uint16]uint16{}
		if err := addVLANs(vlans, message); err != nil {
			return
		}
		for vlan := range vlans {
			if vlan > MaxVLAN {
				t.Errorf("VLAN %d", vlan)
			}
		}
	})
}
