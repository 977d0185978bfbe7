package netdev

import (
	"errors"
	"maps"
	"slices"

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

// stableSecret is the sysctl that answers EIO while it is unset. It cannot be unset.
const stableSecret = "stable_secret"

// sysctlGroup is the directory of the netdev below one of procfs, without the files of except. What
// the kernel has is read from the directory itself, because each version has more. The group is
// unknown if its files cannot be written. The kernel lets no netdev have the names of the other
// directories there, "all" and "default".
func (e *Engine) sysctlGroup(name, directory string, except []string) settingGroup {
	of := func(l *link) sysfs.Dir { return sysfs.Root(e.procRoot).Dir(directory, l.Name) }
	read := func(l *link) map[string]string {
		if !e.host.conf6 {
			return nil
		}
		return readSysctls(of(l), except)
	}

	change := func(l *link, to map[string]string) error {
		err := namespace.Do(e.host.ns, func() error { return writeAll(of(l), to) })
		if _, secret := to[stableSecret]; secret {
			err = errors.Join(err, e.keepAddrGenMode(l))
		}
		return err
	}
	return settingGroup{name: name, sysctls: true, read: read, change: change}
}

func readSysctls(dir sysfs.Dir, except []string) map[string]string {
	names, _, _ := dir.Names()
	names = slices.DeleteFunc(names, func(name string) bool { return slices.Contains(except, name) })

	settings, failed := dir.Attributes(names...)
	if errors.Is(failed[stableSecret], unix.EIO) {
		settings[stableSecret] = ""
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
