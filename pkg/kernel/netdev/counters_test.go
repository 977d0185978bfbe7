// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"encoding/binary"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// counting writes the counters of a VF as the kernel does. The value of each counter is ten times
// its attribute type, plus the index of the VF.
func counting(index uint32) func(*nl.RtAttr) {
	return func(info *nl.RtAttr) {
		describe(index, unix.ETH_P_8021Q, 1, 0, 0)(info)
		stats := info.AddRtAttr(nl.IFLA_VF_STATS, nil)
		for _, kind := range []int{
			nl.IFLA_VF_STATS_RX_PACKETS, nl.IFLA_VF_STATS_TX_PACKETS, nl.IFLA_VF_STATS_RX_BYTES,
			nl.IFLA_VF_STATS_TX_BYTES,
			nl.IFLA_VF_STATS_BROADCAST, nl.IFLA_VF_STATS_MULTICAST, nl.IFLA_VF_STATS_RX_DROPPED,
			nl.IFLA_VF_STATS_TX_DROPPED,
		} {
			stats.AddRtAttr(kind,
				binary.NativeEndian.AppendUint64(nil, uint64(10*kind)+uint64(index)))
		}
	}
}

func TestParseVFCounters(t *testing.T) {
	got := parseVFCounters(pfMessage(counting(0), describe(1, unix.ETH_P_8021Q, 1, 0, 0),
		counting(2)))

	of := func(i uint64) Counters {
		return Counters{
			RxPackets: 10*nl.IFLA_VF_STATS_RX_PACKETS +
				i, TxPackets: 10*nl.IFLA_VF_STATS_TX_PACKETS + i,
			RxBytes: 10*nl.IFLA_VF_STATS_RX_BYTES + i, TxBytes: 10*nl.IFLA_VF_STATS_TX_BYTES + i,
			RxDropped: 10*nl.IFLA_VF_STATS_RX_DROPPED +
				i, TxDropped: 10*nl.IFLA_VF_STATS_TX_DROPPED + i,
			RxBroadcast: 10*nl.IFLA_VF_STATS_BROADCAST +
				i, RxMulticast: 10*nl.IFLA_VF_STATS_MULTICAST + i,
		}
	}

	// The driver of VF 1 has no counters.
	if diff := cmp.Diff(map[int]Counters{0: of(0), 2: of(2)}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func FuzzParseVFCounters(f *testing.F) {
	f.Add(pfMessage(counting(3)))
	f.Add(pfMessage())

	f.Fuzz(func(t *testing.T, message []byte) {
		for index := range parseVFCounters(message) {
			if index < 0 {
				t.Fatalf("VF %d", index)
			}
		}
	})
}
