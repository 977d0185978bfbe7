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

// Counters holds what a Function received and sent, from the view of its pod.
type Counters struct {
	RxPackets, TxPackets, RxBytes, TxBytes, RxDropped, TxDropped uint64
	// RxBroadcast and RxMulticast are included in RxPackets. RxBroadcast is 0 unless a PF reports
	// the counters.
	RxBroadcast, RxMulticast uint64
}

// VFCounters returns the counters of all VFs of a PF by index, with one request. pf is the name of
// the PF's netdev. VFCounters returns an error unless this netdev belongs to the device with the
// PCI address, because another netdev may have got the name.
//
// The result lacks VFs whose driver does not count. It is empty for a PF with more than about 200
// VFs, because the kernel's answer would exceed the 64 KiB of an attribute.
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
	attrs, _ := attribute.Parse(attributes) // what follows a malformed attribute is ignored
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

// counter returns the value of a counter, or 0 if the driver does not have it.
func counter(value []byte) uint64 {
	if len(value) < 8 {
		return 0
	}
	return binary.NativeEndian.Uint64(value)
}

// Counters returns the counters of a netdev in a pod. exists is false if the pod or the netdev is
// gone.
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
