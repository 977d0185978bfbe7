// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"encoding/binary"
	"maps"
	"slices"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// bridgeEvent returns an event about a bridge that itself is in VLANs, with the flags of each.
func bridgeEvent(vlans ...[2]uint16) []byte {
	header := nl.NewIfInfomsg(unix.AF_BRIDGE)
	header.Index = 7
	spec := nl.NewRtAttr(unix.IFLA_AF_SPEC, nil)
	for _, vlan := range vlans {
		spec.AddRtAttr(nl.IFLA_BRIDGE_VLAN_INFO, binary.NativeEndian.AppendUint16(
			binary.NativeEndian.AppendUint16(nil, vlan[0]), vlan[1]))
	}
	return slices.Concat(header.Serialize(), spec.Serialize())
}

// TestOwnVLANs checks that an event says which SVIs have lost their VLAN, once for each.
func TestOwnVLANs(t *testing.T) {
	const begin, end = nl.BRIDGE_VLAN_INFO_RANGE_BEGIN, nl.BRIDGE_VLAN_INFO_RANGE_END
	o := newOwnVLANs()
	for vlan, svi := range map[uint16]string{10: "blue", 21: "red", 30: "green"} {
		o.set(7, vlan, svi, true)
	}
	o.set(7, 40, "new", false)

	if got := o.missing(8, bridgeEvent()); got != nil {
		t.Errorf("another bridge: %s", got)
	}
	all := bridgeEvent([2]uint16{0, 10}, [2]uint16{begin, 20}, [2]uint16{end, 22},
		[2]uint16{0, 30})
	if got := o.missing(7, all); got != nil {
		t.Errorf("with all VLANs: %s", got)
	}
	if got := o.missing(7, bridgeEvent([2]uint16{0, 30})); !slices.Equal(
		slices.Sorted(slices.Values(got)), []string{"blue", "red"}) {
		t.Errorf("with VLAN 30 only: %s", got)
	}
	if got := o.missing(7, bridgeEvent()); !slices.Equal(got, []string{"green"}) {
		t.Errorf("without VLANs: %s", got)
	}
	if o.present(7, 30) || !o.hasOthers(7, "green") || o.hasOthers(8, "") {
		t.Error("a VLAN that is missing is present, or an SVI is not known")
	}
	if got := vlansInEvent(bridgeEvent([2]uint16{begin, 4000}, [2]uint16{end, 65535})); len(
		got) != 0 {
		t.Errorf("VLANs that cannot be: %v", slices.Collect(maps.Keys(got)))
	}
}

func FuzzVLANsInEvent(f *testing.F) {
	f.Add(bridgeEvent([2]uint16{0, 10}, [2]uint16{8, 20}, [2]uint16{16, 22}))
	f.Fuzz(func(t *testing.T, message []byte) {
		for vlan := range vlansInEvent(message) {
			if vlan > MaxVLAN {
				t.Errorf("VLAN %d", vlan)
			}
		}
	})
}

// routeMessage returns the body of a message about a route.
func routeMessage(kind uint8, table, metric uint32) []byte {
	header := &nl.RtMsg{RtMsg: unix.RtMsg{Family: unix.AF_INET, Type: kind}}
	return slices.Concat(header.Serialize(),
		nl.NewRtAttr(unix.RTA_TABLE, nl.Uint32Attr(table)).Serialize(),
		nl.NewRtAttr(unix.RTA_PRIORITY, nl.Uint32Attr(metric)).Serialize())
}

func TestTableEndedBy(t *testing.T) {
	for name, test := range map[string]struct {
		message []byte
		ends    bool
	}{
		"own":           {routeMessage(unix.RTN_UNREACHABLE, firstTable+1, lastMetric), true},
		"another type":  {routeMessage(unix.RTN_UNICAST, firstTable+1, lastMetric), false},
		"another table": {routeMessage(unix.RTN_UNREACHABLE, 254, lastMetric), false},
		"table beyond":  {routeMessage(unix.RTN_UNREACHABLE, lastTable, lastMetric), false},
		"metric":        {routeMessage(unix.RTN_UNREACHABLE, firstTable, 5), false},
		"short":         {[]byte{1, 2}, false},
	} {
		if _, ends := tableEndedBy(test.message); ends != test.ends {
			t.Errorf("%s: %t, want %t", name, ends, test.ends)
		}
	}
}

func FuzzTableEndedBy(f *testing.F) {
	f.Add(routeMessage(unix.RTN_UNREACHABLE, firstTable, lastMetric))
	f.Fuzz(func(t *testing.T, message []byte) {
		if table, ends := tableEndedBy(message); ends && (table < firstTable ||
			table >= lastTable) {
			t.Errorf("table %d", table)
		}
		_, _ = tableOf(message)
		(&Plane{owners: newOwners()}).changeOfParameter(message)
	})
}

// TestTables checks that VRFs get tables that no other VRF has, and that they are used again.
func TestTables(t *testing.T) {
	tables := newTables()
	tables.set("one", tables.free())
	tables.set("two", tables.free())
	if tables.of("one") != firstTable || tables.of("two") != firstTable+1 ||
		tables.vrfOf(firstTable) != "one" || tables.vrfOf(firstTable+7) != "" {
		t.Errorf("tables %v", tables.byVRF)
	}
	tables.set("one", 0)
	tables.next = lastTable - 1
	tables.set("last", tables.free())
	if tables.set("three", tables.free()); tables.of("three") != firstTable {
		t.Errorf("tables %v", tables.byVRF)
	}
}
