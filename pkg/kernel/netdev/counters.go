// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// Counters are what a Function received and sent, as its pod sees it.
type Counters struct {
	RxPackets, TxPackets, RxBytes, TxBytes, RxDropped, TxDropped uint64
	// RxBroadcast and RxMulticast are of RxPackets; only PFs tell RxBroadcast.
	RxBroadcast, RxMulticast uint64
}

// VFCounters asks a PF for the counters of all of its VFs, by index, in one request. The PF's
// netdev is asked by its name, and must belong to the device with the PCI address: names move from
// one netdev to another. Drivers that have none are left out, and so are all VFs of a PF with some
// 200, whose answer would not fit in an attribute's 64 KiB.
func (e *Engine) VFCounters(pf, address string) (map[int]Counters, error) {
	message, err := e.host.ask(0, text(unix.IFLA_IFNAME, pf),
		number(unix.IFLA_EXT_MASK, nl.RTEXT_FILTER_VF))
	if errors.Is(err, unix.EMSGSIZE) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("PF %s: %w", pf, err)
	}

	attrs, _ := attribute.Parse(message[unix.SizeofIfInfomsg:])
	if parent := attrs.Text(unix.IFLA_PARENT_DEV_NAME); parent != address {
		return nil, fmt.Errorf("PF %s (%s): the netdev of this name belongs to device %q", address,
			pf, parent)
	}

	return parseVFCounters(message[unix.SizeofIfInfomsg:]), nil
}

// parseVFCounters reads the attributes of a PF's RTM_NEWLINK.
func parseVFCounters(attributes []byte) map[int]Counters {
	counters := map[int]Counters{}
	attrs, _ := attribute.Parse(attributes) // what comes after a malformed one is not told
	for _, info := range attribute.All(attrs[unix.IFLA_VFINFO_LIST]) {
		index, stats := -1, []byte(nil)
		for kind, value := range attribute.All(info) {
			switch {
			case kind == nl.IFLA_VF_MAC && len(value) >= 4:
				index = int(binary.NativeEndian.Uint32(value))
			case kind == nl.IFLA_VF_STATS:
				stats = value
			}
		}

		if known := maps.Collect(attribute.All(stats)); index >= 0 && len(known) > 0 {
			counters[index] = Counters{
				RxPackets:   counter(known[nl.IFLA_VF_STATS_RX_PACKETS]),
				TxPackets:   counter(known[nl.IFLA_VF_STATS_TX_PACKETS]),
				RxBytes:     counter(known[nl.IFLA_VF_STATS_RX_BYTES]),
				TxBytes:     counter(known[nl.IFLA_VF_STATS_TX_BYTES]),
				RxDropped:   counter(known[nl.IFLA_VF_STATS_RX_DROPPED]),
				TxDropped:   counter(known[nl.IFLA_VF_STATS_TX_DROPPED]),
				RxBroadcast: counter(known[nl.IFLA_VF_STATS_BROADCAST]),
				RxMulticast: counter(known[nl.IFLA_VF_STATS_MULTICAST]),
			}
		}
	}

	return counters
}

// counter is 0 where the driver has none.
func counter(value []byte) uint64 {
	if len(value) < 8 {
		return 0
	}
	return binary.NativeEndian.Uint64(value)
}

// Counters reads those of a netdev in a pod, at its place there. exists is false if the pod or the
// netdev is gone.
func (e *Engine) Counters(place Place) (counters Counters, exists bool, err error) {
	pod, err := e.dialPlace(place)
	if err != nil || pod == nil {
		return Counters{}, false, err
	}
	defer pod.close()

	link, err := pod.LinkByIndex(place.Index)
	if err != nil {
		return Counters{}, false, nil
	}

	s := link.Attrs().Statistics
	if s == nil {
		return Counters{}, false, nil
	}

	return Counters{
		RxPackets: s.RxPackets, TxPackets: s.TxPackets, RxBytes: s.RxBytes, TxBytes: s.TxBytes,
		RxDropped: s.RxDropped, TxDropped: s.TxDropped, RxMulticast: s.Multicast,
	}, true, nil
}
