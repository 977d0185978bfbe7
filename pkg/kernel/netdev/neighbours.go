// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// neighbourTwins are sysctls of net.ipv4.neigh and net.ipv6.neigh that show the value of another
// sysctl in a coarser unit (Documentation/networking/ip-sysctl.rst).
var neighbourTwins = []string{"base_reachable_time", "retrans_time", "unres_qlen"}

// neighboursTold lists the sysctls of net.ipv4.neigh and net.ipv6.neigh that NDTA_PARMS contains
// (NDTPA_* of include/uapi/linux/neighbour.h).
var neighboursTold = []toldSysctl{
	{"base_reachable_time_ms", 4, signed}, {"retrans_time_ms", 5, signed},
	{"gc_stale_time", 6, seconds}, {"delay_first_probe_time", 7, seconds},
	{"app_solicit", 9, signed}, {"ucast_solicit", 10, signed}, {"mcast_solicit", 11, signed},
	{"anycast_delay", 12, ticks}, {"proxy_delay", 13, ticks}, {"proxy_qlen", 14, signed},
	{"locktime", 15, ticks}, {"unres_qlen_bytes", 16, signed}, {"mcast_resolicit", 17, signed},
	{"interval_probe_time_ms", 19, signed},
}

// These are attributes of a neighbour table (include/uapi/linux/neighbour.h).
const (
	neighbourParameters = 6 // NDTA_PARMS
	parametersIndex     = 1 // NDTPA_IFINDEX
)

// neighbourHeader is struct ndtmsg of include/uapi/linux/neighbour.h. Its value is the address
// family.
type neighbourHeader byte

const neighbourHeaderSize = 4

// Len implements [nl.NetlinkRequestData]. It returns the length in bytes.
func (neighbourHeader) Len() int { return neighbourHeaderSize }

// Serialize implements [nl.NetlinkRequestData].
func (h neighbourHeader) Serialize() []byte { return []byte{byte(h), 0, 0, 0} }

// neighbourTables reads the neighbour tables of both address families on the host, which have the
// sysctls of all netdevs.
func (e *Engine) neighbourTables() [][]byte {
	answers, err := request.Send(
		e.host.Socket(), unix.RTM_GETNEIGHTBL, unix.NLM_F_DUMP, neighbourHeader(unix.AF_UNSPEC),
	)
	if err != nil {
		return nil
	}
	return answers
}

// tellNeighbours returns a function that returns the neighbour sysctls of a netdev of the host. It
// returns nil if the tables are unknown, and the sysctls are read from their files.
func tellNeighbours(family byte) func(r *reading) map[string]string {
	return func(r *reading) map[string]string {
		return neighboursOf(r.neighbours(), family, r.Identity.Index)
	}
}

// neighboursOf returns the sysctls of the netdev with the index, or nil if the answers lack the
// netdev.
func neighboursOf(answers [][]byte, family byte, index int) map[string]string {
	for _, answer := range answers {
		if len(answer) < neighbourHeaderSize || answer[0] != family {
			continue
		}

		parameters := attribute.First(answer[neighbourHeaderSize:], neighbourParameters)
		of := attribute.First(parameters, parametersIndex)
		if len(of) != 4 || binary.NativeEndian.Uint32(of) != uint32(index) {
			continue
		}
		if set, err := attribute.Parse(parameters); err == nil {
			return textsOf(set)
		}
	}
	return nil
}

// textsOf returns the sysctls as procfs shows them.
func textsOf(parameters attribute.Set) map[string]string {
	told := map[string]string{}
	for _, s := range neighboursTold {
		switch value := parameters[uint16(s.place)]; len(value) {
		case 4:
			told[s.name] = s.unit.text(uint64(binary.NativeEndian.Uint32(value)))
		case 8:
			told[s.name] = s.unit.text(binary.NativeEndian.Uint64(value))
		}
	}

	return told
}
