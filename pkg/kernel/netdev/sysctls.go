package netdev

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"sync/atomic"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// neighbourTwins are sysctls of net.ipv4.neigh and net.ipv6.neigh that show the value of another
// one in a coarser unit (Documentation/networking/ip-sysctl.rst).
var neighbourTwins = []string{"base_reachable_time", "retrans_time", "unres_qlen"}

// confElsewhere are the sysctls of net.ipv6.conf that [Conf] has, or that follow from something
// else: the MTU of the netdev, and the multicast routes.
func confElsewhere() []string {
	names := []string{"mtu", "mc_forwarding"}
	for _, s := range conf6 {
		names = append(names, s.name)
	}
	return names
}

// conf6Told are sysctls of net.ipv6.conf that IFLA_INET6_CONF has with the number that procfs shows
// as well, by their places there (DEVCONF_* of linux/ipv6.h). The others are times in another unit,
// unsigned, or younger than Linux 6.1.
var conf6Told = map[string]int{
	"temp_valid_lft": 11, "temp_prefered_lft": 12, "regen_max_retry": 13, "max_desync_factor": 14,
	"max_addresses": 15, "force_mld_version": 16, "accept_ra_rt_info_max_plen": 21,
	"force_tllao": 28, "suppress_frag_ndisc": 32, "accept_ra_from_local": 33, "use_optimistic": 34,
	"accept_ra_mtu": 35, "use_oif_addrs_only": 37, "accept_ra_min_hop_limit": 38,
	"ignore_routes_with_linkdown": 39, "drop_unicast_in_l2_multicast": 40,
	"drop_unsolicited_na": 41, "keep_addr_on_down": 42, "seg6_enabled": 44,
	"seg6_require_hmac": 45, "enhanced_dad": 46, "disable_policy": 48,
	"accept_ra_rt_info_min_plen": 49, "rpl_seg_enabled": 51, "ioam6_enabled": 53,
	"ndisc_evict_nocarrier": 56, "accept_untracked_na": 57, "accept_ra_min_lft": 58,
}

// stableSecret is the sysctl that answers EIO while it is unset. It cannot be unset.
const stableSecret = "stable_secret"

// sysctlGroup are the sysctls of a netdev in a directory of procfs, but for except. Their names are
// those of "lo", which each network namespace has: they are listed once, because that takes as long as
// to read them. The values of those in told come with the netdev by rtnetlink. The group is unknown
// while its files cannot be listed or written. The kernel lets no netdev have the names of the other
// directories there, "all" and "default".
func (e *Engine) sysctlGroup(
	name, directory string, except []string, told map[string]int,
) settingGroup {
	of := func(netdev string) sysfs.Dir { return sysfs.Root(e.procRoot).Dir(directory, netdev) }
	var listed atomic.Pointer[[]string]
	names := func() []string {
		if known := listed.Load(); known != nil {
			return *known
		}
		all, exists, err := of("lo").Names()
		if err != nil || !exists {
			return nil // a later call asks again
		}

		all = slices.DeleteFunc(all, func(name string) bool { return slices.Contains(except, name) })
		listed.Store(&all)
		return all
	}

	read := func(l *link) map[string]string {
		if !e.host.conf6 {
			return nil
		}
		return readSysctls(of(l.Name), names(), told, l.conf6)
	}

	change := func(l *link, to map[string]string) error {
		err := namespace.Do(e.host.ns, func() error { return writeAll(of(l.Name), to) })
		if _, secret := to[stableSecret]; secret {
			err = errors.Join(err, e.keepAddrGenMode(l))
		}
		return err
	}
	return settingGroup{name: name, sysctls: true, read: read, change: change}
}

// readSysctls reads sysctls of a netdev from its directory of procfs. It takes those in told from
// numbers, where they have the places that told says.
func readSysctls(
	dir sysfs.Dir, names []string, told map[string]int, numbers []uint32,
) map[string]string {
	byNumber := func(name string) bool {
		place, ok := told[name]
		return ok && place < len(numbers)
	}
	settings, failed := dir.Attributes(slices.DeleteFunc(slices.Clone(names), byNumber)...)
	if errors.Is(failed[stableSecret], unix.EIO) {
		settings[stableSecret] = ""
	}

	for _, name := range names {
		if byNumber(name) {
			settings[name] = strconv.Itoa(int(int32(numbers[told[name]])))
		}
	}
	return settings
}

// keepAddrGenMode sets what the kernel changes along with the secret. It sets it by rtnetlink,
// because the kernel makes an address when the sysctl is written.
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

// writeAll writes texts into files of a directory by their names, and goes on after one that is
// refused.
func writeAll(dir sysfs.Dir, texts map[string]string) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		errs = append(errs, dir.Write(name, texts[name]))
	}
	return errors.Join(errs...)
}
