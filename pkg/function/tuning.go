// SPDX-License-Identifier: Apache-2.0

package function

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Offload has the largest packets that the kernel passes to the driver and takes from it, in bytes
// (IFLA_GSO_MAX_SIZE, IFLA_GRO_MAX_SIZE and IFLA_*_IPV4_MAX_SIZE of linux/if_link.h). 0 leaves the
// netdev's value. More than 65536 is "BIG TCP".
type Offload struct {
	GSOMaxSize     int `json:"gsoMaxSize,omitempty"`
	GROMaxSize     int `json:"groMaxSize,omitempty"`
	GSOIPv4MaxSize int `json:"gsoIPv4MaxSize,omitempty"` // Linux 6.3
	GROIPv4MaxSize int `json:"groIPv4MaxSize,omitempty"` // Linux 6.3
}

// MaxOffload is GSO_MAX_SIZE and GRO_MAX_SIZE of linux/netdevice.h. A driver may have a lower limit.
const MaxOffload = 8 * 65535

func (o *Offload) validate() error {
	if o == nil {
		return nil
	}

	var errs []error
	for _, f := range []struct {
		field string
		size  int
	}{
		{"gsoMaxSize", o.GSOMaxSize}, {"groMaxSize", o.GROMaxSize},
		{"gsoIPv4MaxSize", o.GSOIPv4MaxSize}, {"groIPv4MaxSize", o.GROIPv4MaxSize},
	} {
		if f.size < 0 || f.size > MaxOffload {
			errs = append(errs, fmt.Errorf("offload.%s: must be 1-%d, or absent to keep the netdev's",
				f.field, MaxOffload))
		}
	}

	return errors.Join(errs...)
}

// sysctlPrefixes are the directories of the sysctls of an interface, with a placeholder for its
// name, as the CNI plugin "tuning" has it.
const (
	conf4Prefix = "net.ipv4.conf.IFNAME."
	conf6Prefix = "net.ipv6.conf.IFNAME."
)

// sysctls are the sysctls that a pod may set for its interface, by directory
// (Documentation/networking/ip-sysctl.rst). They affect this interface in the pod's network
// namespace only, and the kernel resets them when the netdev leaves the namespace.
var sysctls = map[string][]string{
	conf4Prefix: {
		"accept_local", "accept_redirects", "arp_accept", "arp_announce", "arp_evict_nocarrier",
		"arp_filter", "arp_ignore", "arp_notify", "disable_policy", "disable_xfrm",
		"drop_gratuitous_arp", "drop_unicast_in_l2_multicast", "forwarding", "log_martians",
		"promote_secondaries", "proxy_arp", "proxy_arp_pvlan", "rp_filter", "secure_redirects",
		"send_redirects", "src_valid_mark",
	},
	conf6Prefix: {
		"accept_dad", "accept_ra", "accept_ra_defrtr", "accept_ra_pinfo", "accept_ra_rtr_pref",
		"accept_redirects", "addr_gen_mode", "autoconf", "dad_transmits", "disable_ipv6",
		"drop_unicast_in_l2_multicast", "drop_unsolicited_na", "forwarding", "hop_limit",
		"ndisc_notify", "optimistic_dad", "proxy_ndp", "router_solicitations", "seg6_enabled",
		"use_tempaddr",
	},
}

// SysctlNames returns the names of the sysctls that a pod may set for its interface, in order, such
// as "net.ipv4.conf.IFNAME.arp_ignore". IFNAME stands for the interface.
func SysctlNames() (names []string) {
	for prefix, of := range sysctls {
		for _, name := range of {
			names = append(names, prefix+name)
		}
	}
	slices.Sort(names)
	return names
}

// SysctlFile returns the directory below /proc/sys and the file of a name of [SysctlNames].
func SysctlFile(name, netdev string) (directory, file string) {
	family := "net/ipv4/conf/"
	file, is4 := strings.CutPrefix(name, conf4Prefix)
	if !is4 {
		family, file = "net/ipv6/conf/", strings.TrimPrefix(name, conf6Prefix)
	}
	return family + netdev, file
}

func validateSysctls(values map[string]string) error {
	known := SysctlNames()
	isUnknown := func(name string) bool { return !slices.Contains(known, name) }
	names := slices.Sorted(maps.Keys(values))
	if i := slices.IndexFunc(names, isUnknown); i >= 0 {
		return fmt.Errorf("sysctls: %q cannot be set; of %s can be %s; of %s can be %s",
			cut(names[i]), strings.TrimSuffix(conf4Prefix, "."),
			strings.Join(sysctls[conf4Prefix], ", "), strings.TrimSuffix(conf6Prefix, "."),
			strings.Join(sysctls[conf6Prefix], ", "))
	}

	var errs []error
	for _, name := range names {
		if _, err := strconv.ParseInt(values[name], 10, 32); err != nil {
			errs = append(errs, fmt.Errorf("sysctls: %s %q: must be a number", name,
				cut(values[name])))
		}
	}

	return errors.Join(errs...)
}

// cut returns the beginning of a text for a message.
func cut(text string) string {
	const most = 64
	if len(text) <= most {
		return text
	}
	return text[:most] + "..."
}
