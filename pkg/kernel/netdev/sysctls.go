// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"maps"
	"path"
	"slices"
	"strconv"
	"sync/atomic"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// confElsewhere lists the sysctls of net.ipv6.conf that are not among the settings, because [Conf]
// has them or because they follow from the MTU or the multicast routes.
func confElsewhere() []string {
	names := []string{"mtu", "mc_forwarding"}
	for _, s := range conf6 {
		names = append(names, s.name)
	}
	return names
}

// neighbourTwins are sysctls of net.ipv4.neigh and net.ipv6.neigh that show the value of another
// sysctl in a coarser unit (Documentation/networking/ip-sysctl.rst).
//
// rtnetlink reports the other sysctls of neighbours, too, but only for all netdevs at once, which
// takes longer than reading the files of one netdev (RTM_GETNEIGHTBL).
var neighbourTwins = []string{"base_reachable_time", "retrans_time", "unres_qlen"}

// reportedSysctl is a sysctl of a netdev whose value rtnetlink reports, too. A report is faster than
// reading the file of the sysctl.
type reportedSysctl struct {
	name  string // in procfs
	place int    // index in IFLA_INET6_CONF
	unit  unit
}

// unit is the unit in which procfs shows a number of rtnetlink. rtnetlink reports times in
// milliseconds.
type unit int

const (
	signed unit = iota // the number itself
	unsigned
	seconds
)

// text returns the number as procfs shows it.
func (u unit) text(number uint32) string {
	switch u {
	case unsigned:
		return strconv.FormatUint(uint64(number), 10)
	case seconds:
		return strconv.FormatUint(uint64(number/1000), 10)
	}
	return strconv.Itoa(int(int32(number)))
}

// conf6Reported lists the sysctls of net.ipv6.conf that IFLA_INET6_CONF contains (DEVCONF_* of
// include/uapi/linux/ipv6.h). It leaves out sysctls that are newer than Linux 6.1.
var conf6Reported = []reportedSysctl{
	{"router_solicitation_interval", 8, seconds}, {"router_solicitation_delay", 9, seconds},
	{"temp_valid_lft", 11, signed}, {"temp_prefered_lft", 12, signed},
	{"regen_max_retry", 13, signed}, {"max_desync_factor", 14, signed},
	{"max_addresses", 15, signed}, {"force_mld_version", 16, signed},
	{"router_probe_interval", 20, seconds}, {"accept_ra_rt_info_max_plen", 21, signed},
	{"force_tllao", 28, signed}, {"mldv1_unsolicited_report_interval", 30, signed},
	{"mldv2_unsolicited_report_interval", 31, signed}, {"suppress_frag_ndisc", 32, signed},
	{"accept_ra_from_local", 33, signed}, {"use_optimistic", 34, signed},
	{"accept_ra_mtu", 35, signed}, {"use_oif_addrs_only", 37, signed},
	{"accept_ra_min_hop_limit", 38, signed}, {"ignore_routes_with_linkdown", 39, signed},
	{"drop_unicast_in_l2_multicast", 40, signed}, {"drop_unsolicited_na", 41, signed},
	{"keep_addr_on_down", 42, signed}, {"router_solicitation_max_interval", 43, seconds},
	{"seg6_enabled", 44, signed}, {"seg6_require_hmac", 45, signed}, {"enhanced_dad", 46, signed},
	{"disable_policy", 48, signed}, {"accept_ra_rt_info_min_plen", 49, signed},
	{"ndisc_tclass", 50, signed}, {"rpl_seg_enabled", 51, signed},
	{"ra_defrtr_metric", 52, unsigned}, {"ioam6_enabled", 53, signed}, {"ioam6_id", 54, unsigned},
	{"ioam6_id_wide", 55, unsigned}, {"ndisc_evict_nocarrier", 56, signed},
	{"accept_untracked_na", 57, signed}, {"accept_ra_min_lft", 58, signed},
}

// reportedConf6 returns the sysctls of conf6Reported from the description of the netdev.
func reportedConf6(r *reading) map[string]string {
	values := map[string]string{}
	for _, s := range conf6Reported {
		if s.place < len(r.conf6) {
			values[s.name] = s.unit.text(r.conf6[s.place])
		}
	}
	return values
}

// stableSecret is the sysctl for which a read fails with EIO while it is unset. Once set, it cannot
// be unset.
const stableSecret = "stable_secret"

// sysctlGroup returns the group of a netdev's sysctls in a directory of procfs, without the sysctls
// in except. Sysctls that reported returns are not read from their files.
//
// The names of the sysctls are the same for all netdevs. They are listed once, for the netdev "lo",
// which exists in each network namespace, because a list takes as long as reading all files. The
// group is unknown while its files cannot be listed or written, or while the protocol's module is
// not loaded. A netdev cannot have the name of another directory there, "all" or "default", because
// the kernel refuses these names.
func (e *Engine) sysctlGroup(
	name, directory string, except []string, reported func(r *reading) map[string]string,
) settingGroup {
	of := func(netdev string) sysfs.Dir { return sysfs.Root(e.procRoot).Dir(directory, netdev) }
	var listed atomic.Pointer[[]string]
	names := func() []string {
		if known := listed.Load(); known != nil {
			return *known
		}
		if !e.hasProtocol(directory) {
			return nil // a later call tries again
		}

		all, exists, err := of("lo").Names()
		if err != nil || !exists {
			return nil
		}

		all = slices.DeleteFunc(all, func(name string) bool {
			return slices.Contains(except, name)
		})
		listed.Store(&all)

		return all
	}

	read := func(r *reading) map[string]string {
		if !e.host.conf6 {
			return nil
		}
		all := names()
		if len(all) == 0 {
			return nil
		}
		return readSysctls(of(r.Name), all, reported(r))
	}

	change := func(l *link, to map[string]string) error {
		err := namespace.Do(e.host.ns, func() error { return writeAll(of(l.Name), to) })
		if _, secret := to[stableSecret]; secret {
			err = errors.Join(err, e.keepAddrGenMode(l))
		}
		return err
	}

	return settingGroup{name, fromProtocols, read, change}
}

// hasProtocol reports whether the kernel has the protocol of a directory, such as
// "sys/net/mpls/conf". It returns false if the list of protocols cannot be read.
//
// It reads the list instead of looking up the protocol's name. After a failed lookup the kernel
// frees the name after an RCU grace period, and the move of a netdev would wait for this period:
// see [handover].
func (e *Engine) hasProtocol(directory string) bool {
	protocol := path.Dir(directory)
	names, _, _ := sysfs.Root(e.procRoot).Dir(path.Dir(protocol)).Names()
	return slices.Contains(names, path.Base(protocol))
}

// reportsNone is for groups of which rtnetlink reports no sysctls.
func reportsNone(*reading) map[string]string { return nil }

// readSysctls reads sysctls of a netdev from its directory of procfs. It does not read the files of
// sysctls in reported, which holds their values.
func readSysctls(dir sysfs.Dir, names []string, reported map[string]string) map[string]string {
	settings := map[string]string{}
	var files []string
	for _, name := range names {
		if text, known := reported[name]; known {
			settings[name] = text
		} else {
			files = append(files, name)
		}
	}

	texts, failed := dir.Attributes(files...)
	maps.Copy(settings, texts)

	if errors.Is(failed[stableSecret], unix.EIO) {
		settings[stableSecret] = ""
	}

	return settings
}

// keepAddrGenMode restores addr_gen_mode, which the kernel changes when the secret is written. It
// uses rtnetlink, because the kernel generates an address when the sysctl is written.
func (e *Engine) keepAddrGenMode(l *link) error {
	if l.Conf == nil || len(l.Conf.IPv6) == 0 {
		return nil
	}

	i := slices.IndexFunc(conf6, func(s sysctl6) bool { return s.name == "addr_gen_mode" })
	mode := byte(l.Conf.IPv6[i])

	spec := nl.NewRtAttr(unix.IFLA_AF_SPEC|unix.NLA_F_NESTED, nil)
	family := spec.AddRtAttr(unix.AF_INET6|unix.NLA_F_NESTED, nil)
	family.AddRtAttr(unix.IFLA_INET6_ADDR_GEN_MODE, []byte{mode})

	return e.host.set(l.Identity.Index, 0, 0, spec)
}

// writeAll writes texts to the files of a directory by name. It continues after a refusal.
func writeAll(dir sysfs.Dir, texts map[string]string) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		errs = append(errs, dir.Write(name, texts[name]))
	}
	return errors.Join(errs...)
}
