// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/sourcefilter"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// Traffic counts frames of a port, or of the VXLAN port of a network, since its netdev was made. It
// is the view of who is behind the netdev: the Function, or the other xPUs.
type Traffic struct {
	TransmittedFrames, TransmittedBytes uint64 // that the Function or the other xPUs sent
	ReceivedFrames, ReceivedBytes       uint64
	Dropped                             uint64 // frames that the netdev dropped, in either direction
	Filtered                            uint64 // transmitted frames that the source filter dropped
}

// Counters reads the counters of ports and networks. Several goroutines may use it at once, also
// while another one uses the Plane.
type Counters struct {
	owners *owners

	mu     sync.Mutex      // guards the fields below
	socket nl.SocketHandle // in the Plane's network namespace
	filter *sourcefilter.Filter
}

// openCounters opens the counters of the calling thread's network namespace.
func openCounters(o *owners, filter *sourcefilter.Filter) (*Counters, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("counters of netdevs: netlink: %w", err)
	}
	return &Counters{owners: o, socket: nl.SocketHandle{Socket: socket}, filter: filter}, nil
}

func (c *Counters) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.socket.Close()
}

// All returns the traffic of all ports and VXLAN ports that have a netdev.
func (c *Counters) All() (map[Object]Traffic, error) { return c.read(0) }

// Port returns the traffic of a port. counted is false if the port has no netdev.
func (c *Counters) Port(id string) (_ Traffic, counted bool, err error) {
	port, all := Object{KindPort, id}, Traffic{}
	for _, index := range c.owners.netdevsOf(port) {
		traffic, err := c.read(index)
		if err != nil {
			return Traffic{}, false, fmt.Errorf("port %s: %w", id, err)
		}
		one, known := traffic[port]
		all, counted = all.plus(one), counted || known
	}
	return all, counted, nil
}

// read returns the traffic of one netdev, or of all if index is 0, by owner.
func (c *Counters) read(index int) (map[Object]Traffic, error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	messages, err := c.ask(index)
	if err != nil {
		return nil, fmt.Errorf("counters of netdevs: %w", err)
	}
	filtered, err := c.filter.Dropped()
	if err != nil {
		return nil, err
	}

	traffic := map[Object]Traffic{}
	for _, m := range messages {
		netdev, counts, ok := parseStatistics(m)
		owner, owned := c.owners.get(netdev)
		if !ok || !owned || owner.routes() {
			continue
		}
		counts.Filtered = filtered[netdev]
		traffic[owner] = traffic[owner].plus(counts)
	}

	return traffic, nil
}

// sizeofStatsMessage is the length in bytes of struct if_stats_msg of include/uapi/linux/if_link.h:
// family, padding, ifindex and filter.
const sizeofStatsMessage = 12

// statsMessage is the header of a request for the 64-bit counters of a netdev.
type statsMessage struct{ index uint32 }

func (statsMessage) Len() int { return sizeofStatsMessage }

func (m statsMessage) Serialize() []byte {
	const onlyLink64 = 1 << (unix.IFLA_STATS_LINK_64 - 1) // IFLA_STATS_FILTER_BIT
	b := binary.NativeEndian.AppendUint32(make([]byte, 4, sizeofStatsMessage), m.index)
	return binary.NativeEndian.AppendUint32(b, onlyLink64)
}

// ask sends a request for the counters of one netdev, or of all if index is 0. There is no answer
// for a netdev that is gone.
func (c *Counters) ask(index int) ([][]byte, error) {
	if index != 0 {
		messages, err := request.Send(&c.socket, unix.RTM_GETSTATS, unix.NLM_F_REQUEST,
			statsMessage{uint32(index)})
		if err == unix.ENODEV {
			return nil, nil
		}
		return messages, err
	}

	return request.Consistent(func() ([][]byte, error) {
		return request.Send(&c.socket, unix.RTM_GETSTATS, unix.NLM_F_REQUEST|unix.NLM_F_DUMP,
			statsMessage{})
	})
}

// parseStatistics reads an RTM_NEWSTATS: the ifindex, and struct rtnl_link_stats64 of
// include/uapi/linux/if_link.h. ok is false if it has no counters.
func parseStatistics(message []byte) (index int, _ Traffic, ok bool) {
	if len(message) < sizeofStatsMessage {
		return 0, Traffic{}, false
	}
	index = int(binary.NativeEndian.Uint32(message[4:]))
	attributes, _ := attribute.Parse(message[sizeofStatsMessage:])

	// The kernel appends new counters at the end.
	var n [8]uint64
	if _, err := binary.Decode(attributes[unix.IFLA_STATS_LINK_64], binary.NativeEndian,
		n[:]); err != nil {
		return index, Traffic{}, false
	}

	// What the netdev of a port receives was transmitted by the Function behind it.
	return index, Traffic{
		TransmittedFrames: n[0], ReceivedFrames: n[1], TransmittedBytes: n[2], ReceivedBytes: n[3],
		Dropped: n[6] + n[7],
	}, true
}

func (t Traffic) plus(o Traffic) Traffic {
	return Traffic{
		TransmittedFrames: t.TransmittedFrames + o.TransmittedFrames,
		TransmittedBytes:  t.TransmittedBytes + o.TransmittedBytes,
		ReceivedFrames:    t.ReceivedFrames + o.ReceivedFrames,
		ReceivedBytes:     t.ReceivedBytes + o.ReceivedBytes,
		Dropped:           t.Dropped + o.Dropped,
		Filtered:          t.Filtered + o.Filtered,
	}
}
