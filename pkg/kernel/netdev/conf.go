// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// Conf holds the sysctls net.ipv4.conf.<netdev> and net.ipv6.conf.<netdev>. They must be restored,
// because the kernel resets them to the values of "default" when a netdev moves to another
// namespace.
type Conf struct {
	// IPv4 holds all values that rtnetlink reports, beginning with the first (IPV4_DEVCONF_* of
	// include/uapi/linux/ip.h).
	IPv4 []uint32 `json:"ipv4,omitempty"`
	// IPv6 holds the values of conf6, in the same order. It is empty if the netdev has no IPv6.
	IPv6 []int32 `json:"ipv6,omitempty"`
}

// sysctl6 is a sysctl of net.ipv6.conf.
type sysctl6 struct {
	name  string
	index int // in IFLA_INET6_CONF; -1 for addr_gen_mode, which has its own attribute
}

// conf6 lists the sysctls of IPv6 that are restored, in the order in which they are written.
// disable_ipv6 comes last, so that IPv6 starts with all other values in effect. [Settings] holds
// all other sysctls of IPv6. The names are file names in procfs. The indexes are DEVCONF_* of
// include/uapi/linux/ipv6.h.
var conf6 = []sysctl6{
	{"addr_gen_mode", -1}, {"forwarding", 0}, {"hop_limit", 1}, {"accept_ra", 3},
	{"accept_redirects", 4}, {"autoconf", 5},
	{"dad_transmits", 6}, {"router_solicitations", 7}, {"use_tempaddr", 10},
	{"accept_ra_defrtr", 17},
	{"accept_ra_pinfo", 18}, {"accept_ra_rtr_pref", 19}, {"proxy_ndp", 22}, {"optimistic_dad", 23},
	{"accept_source_route", 24}, {"accept_dad", 27}, {"ndisc_notify", 29}, {"disable_ipv6", 26},
}

const multicastForwarding = 2 // IPV4_DEVCONF_MC_FORWARDING, which only the kernel sets

// ipv4 returns the sysctls of IPv4 that can be restored.
func (c *Conf) ipv4() (list []property) {
	if c == nil {
		return nil
	}

	for i, value := range c.IPv4 {
		if sysctl := i + 1; sysctl != multicastForwarding {
			list = append(list, property{
				name: fmt.Sprintf("sysctl %d of net.ipv4.conf", sysctl), value: value,
				attribute: conf4(sysctl, value),
			})
		}
	}
	return list
}

// ipv6 returns the sysctls of IPv6 that can be restored. These are none if another version of the
// agent recorded another list of them.
func (c *Conf) ipv6() (list []property) {
	if c == nil || len(c.IPv6) != len(conf6) {
		return nil
	}

	for i, s := range conf6 {
		list = append(list,
			property{name: "net.ipv6.conf " + s.name, value: c.IPv6[i], conf6: s.name})
	}
	return list
}

func (c Conf) equal(other Conf) bool {
	return slices.Equal(c.IPv4, other.IPv4) && slices.Equal(c.IPv6, other.IPv6)
}

// parseConf reads IFLA_AF_SPEC. Its second result holds every value of net.ipv6.conf that the
// kernel reports, indexed by DEVCONF_*.
func parseConf(data []byte) (*Conf, []uint32, error) {
	families, err := attribute.Parse(data)
	if err != nil {
		return nil, nil, err
	}

	four, fourErr := attribute.Parse(families[unix.AF_INET])
	six, sixErr := attribute.Parse(families[unix.AF_INET6])
	values6 := uint32s(six[unix.IFLA_INET6_CONF])

	return &Conf{
		IPv4: uint32s(four[unix.IFLA_INET_CONF]),
		IPv6: conf6Of(values6, six[unix.IFLA_INET6_ADDR_GEN_MODE]),
	}, values6, errors.Join(fourErr, sixErr)
}

// conf6Of returns the values of conf6. It returns nil if the netdev has no IPv6 or the kernel
// reports only some of the values.
func conf6Of(all []uint32, addrGenMode []byte) []int32 {
	var list []int32
	for _, s := range conf6 {
		switch {
		case s.index < 0 && len(addrGenMode) > 0:
			list = append(list, int32(addrGenMode[0]))
		case s.index >= 0 && s.index < len(all):
			list = append(list, int32(all[s.index]))
		default:
			return nil
		}
	}

	return list
}

func uint32s(data []byte) []uint32 {
	list := make([]uint32, len(data)/4)
	_, _ = binary.Decode(data, binary.NativeEndian, list)
	return list
}

// conf4 returns the attribute that sets one sysctl of IPv4 (IPV4_DEVCONF_*).
func conf4(sysctl int, value uint32) *nl.RtAttr {
	spec := nl.NewRtAttr(unix.IFLA_AF_SPEC|unix.NLA_F_NESTED, nil)
	family := spec.AddRtAttr(unix.AF_INET|unix.NLA_F_NESTED, nil)
	family.AddRtAttr(unix.IFLA_INET_CONF|unix.NLA_F_NESTED, nil).AddRtAttr(sysctl,
		nl.Uint32Attr(value))
	return spec
}

// conf6Dir returns the directory of the IPv6 sysctls of a netdev, or of "default", in the network
// namespace of the calling thread.
func (e *Engine) conf6Dir(netdev string) sysfs.Dir {
	return sysfs.Root(e.procRoot).Dir("sys/net/ipv6/conf", netdev)
}

// writeConf6 writes one sysctl of IPv6 to its file, because rtnetlink cannot change it.
func (e *Engine) writeConf6(c *conn, netdev, sysctl string, value any) error {
	return namespace.Do(c.ns, func() error {
		return e.conf6Dir(netdev).Write(sysctl, fmt.Sprint(value))
	})
}
