package netdev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
)

// Conf are the sysctls of a netdev, net.ipv4.conf.<netdev> and net.ipv6.conf.<netdev>. The kernel forgets them when the
// netdev leaves its network namespace and makes them anew from those of the next one's "default".
type Conf struct {
	// IPv4 are all that rtnetlink tells (IPV4_DEVCONF_* of linux/ip.h, from the first).
	IPv4 []uint32 `json:"ipv4,omitempty"`
	// IPv6 are those of conf6, in that order; empty where the netdev has no IPv6.
	IPv6 []int32 `json:"ipv6,omitempty"`
}

// conf6 are the sysctls of IPv6 that are given back, in the order in which they are written: DEVCONF_* of linux/ipv6.h by
// their names in procfs. IPv6 is turned on, where it is, when all else is as it was.
var conf6 = []struct {
	name  string
	index int // in IFLA_INET6_CONF; -1 for addr_gen_mode, which has an attribute of its own
}{
	{"addr_gen_mode", -1}, {"forwarding", 0}, {"hop_limit", 1}, {"accept_ra", 3}, {"accept_redirects", 4}, {"autoconf", 5},
	{"dad_transmits", 6}, {"router_solicitations", 7}, {"use_tempaddr", 10}, {"accept_ra_defrtr", 17},
	{"accept_ra_pinfo", 18}, {"accept_ra_rtr_pref", 19}, {"proxy_ndp", 22}, {"optimistic_dad", 23},
	{"accept_source_route", 24}, {"accept_dad", 27}, {"ndisc_notify", 29}, {"disable_ipv6", 26},
}

// multicastForwarding is the kernel's own of IPv4, IPV4_DEVCONF_MC_FORWARDING less one.
const multicastForwarding = 1

// inet6AddrGenMode is IFLA_INET6_ADDR_GEN_MODE of linux/if_link.h.
const inet6AddrGenMode = 8

// parseConf reads IFLA_AF_SPEC.
func parseConf(data []byte) (c Conf, err error) {
	families, err := attribute.Parse(data)
	if err != nil {
		return c, fmt.Errorf("sysctls: %w", err)
	}
	four, fourErr := families.Nested(unix.AF_INET)
	six, sixErr := families.Nested(unix.AF_INET6)
	if err := errors.Join(fourErr, sixErr); err != nil {
		return c, fmt.Errorf("sysctls: %w", err)
	}
	c.IPv4 = uint32s(four[unix.IFLA_INET_CONF])
	if families.Has(unix.AF_INET6) {
		c.IPv6 = conf6Of(uint32s(six[unix.IFLA_INET6_CONF]), six[inet6AddrGenMode])
	}
	return c, nil
}

// conf6Of picks those of conf6; nil where the kernel does not tell all.
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

// diff adds what now differs. A snapshot of an older agent, or of a netdev without IPv6, does not know.
func (c *Conf) diff(d *differences, now *Conf) {
	if c == nil || now == nil {
		return
	}
	for i := range min(len(c.IPv4), len(now.IPv4)) {
		if i != multicastForwarding {
			differs(d, fmt.Sprintf("sysctl %d of net.ipv4.conf", i+1), c.IPv4[i], now.IPv4[i])
		}
	}
	if len(c.IPv6) != len(now.IPv6) || len(c.IPv6) != len(conf6) {
		return
	}
	for i, s := range conf6 {
		differs(d, "net.ipv6.conf "+s.name, c.IPv6[i], now.IPv6[i])
	}
}

// undoConf gives the netdev on the host its sysctls back.
func (e *Engine) undoConf(index int, name string, before, now *Conf) error {
	if before == nil || now == nil {
		return nil
	}
	var errs []error
	for i := range min(len(before.IPv4), len(now.IPv4)) {
		if i == multicastForwarding || before.IPv4[i] == now.IPv4[i] {
			continue
		}
		e.trace(fmt.Sprintf("sysctl %d of net.ipv4.conf", i+1))
		if err := e.host.setConf4(index, i+1, before.IPv4[i]); err != nil {
			errs = append(errs, fmt.Errorf("sysctl %d of net.ipv4.conf: %w", i+1, err))
		}
	}
	if len(before.IPv6) != len(now.IPv6) || len(before.IPv6) != len(conf6) {
		return errors.Join(errs...)
	}
	for i, s := range conf6 {
		if before.IPv6[i] == now.IPv6[i] {
			continue
		}
		e.trace("net.ipv6.conf " + s.name)
		if err := e.writeConf6(name, s.name, before.IPv6[i]); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// setConf4 sets one sysctl of IPv4, IPV4_DEVCONF_*.
func (c *conn) setConf4(index, number int, value uint32) error {
	spec := nl.NewRtAttr(unix.IFLA_AF_SPEC|unix.NLA_F_NESTED, nil)
	family := spec.AddRtAttr(unix.AF_INET|unix.NLA_F_NESTED, nil)
	conf := family.AddRtAttr(unix.IFLA_INET_CONF|unix.NLA_F_NESTED, nil)
	conf.AddRtAttr(number, nl.Uint32Attr(value))
	return c.set(index, spec)
}

// writeConf6 writes one sysctl of IPv6, which rtnetlink does not take.
func (e *Engine) writeConf6(netdev, name string, value int32) error {
	path := netdev + "/" + name
	fd, err := unix.Openat(e.conf6, path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("net.ipv6.conf %s: %w", name, err)
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	if _, err := file.WriteString(strconv.Itoa(int(value))); err != nil {
		return fmt.Errorf("net.ipv6.conf %s: %w", name, err)
	}
	return nil
}

// openConf6 opens the directory of the namespace's IPv6 sysctls, -1 where there is none or it cannot be written. It stays
// that of the namespace, whatever thread uses it.
func openConf6(ns netns.NsHandle, procRoot string) (fd int, err error) {
	fd = -1
	err = namespace.Do(ns, func() error {
		fd, err = unix.Open(procRoot+"/sys/net/ipv6/conf", unix.O_DIRECTORY|unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // no IPv6
		}
		return err
	})
	if err != nil || fd < 0 {
		return -1, err
	}
	if unix.Faccessat(fd, "default/forwarding", unix.W_OK, 0) != nil {
		unix.Close(fd)
		return -1, nil
	}
	return fd, nil
}
