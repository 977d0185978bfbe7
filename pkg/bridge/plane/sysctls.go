// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// ipv4Setting is a parameter of a netdev (net.ipv4.conf.<netdev>) by its number in enum
// IPV4_DEVCONF_* of include/uapi/linux/ip.h.
type ipv4Setting struct {
	number uint16
	value  uint32
}

// ipv4Routing makes a netdev route IPv4, and answer ARP for its own addresses only. The netdev of a
// gateway and the netdev of its VRF need it, because a packet belongs to either of them on its way.
var ipv4Routing = []ipv4Setting{
	{1, 1},  // forwarding
	{3, 0},  // proxy_arp
	{4, 0},  // accept_redirects
	{6, 0},  // send_redirects
	{9, 0},  // accept_source_route
	{18, 2}, // arp_announce: from the address of the target's subnet
	{19, 1}, // arp_ignore: not for the machine's other addresses
	{20, 1}, // promote_secondaries: an address stays if another one of its subnet goes
	{26, 0}, // route_localnet
}

// ipv4NotRouting reverses what makes a netdev forward.
var ipv4NotRouting = []ipv4Setting{{1, 0}}

// ipv6Setting is a parameter of a netdev, a file below net/ipv6/conf/<netdev>.
type ipv6Setting struct{ name, value string }

// forceForwarding is the parameter by which one netdev forwards although the machine does not
// (Linux 6.17).
const forceForwarding = "force_forwarding"

// ipv6Routing makes a netdev route IPv6, without configuration by other routers, and without
// duplicate address detection, because the bridge is not forwarding yet when it begins.
var ipv6Routing = []ipv6Setting{
	{"accept_ra", "0"}, {"autoconf", "0"}, {"accept_redirects", "0"}, {"accept_dad", "0"},
	{"forwarding", "1"}, {forceForwarding, "1"},
}

var ipv6NotRouting = []ipv6Setting{{forceForwarding, "0"}, {"forwarding", "0"}}

// sysctls reads and writes the IPv6 parameters of netdevs. It stays in the network namespace in
// which it was opened, because it keeps the directory: the path of the directory means another one
// in another namespace.
type sysctls struct {
	path string
	root *os.Root // of net/ipv6/conf; nil if the kernel has no IPv6, or the container no mount
}

func openSysctls(root string) *sysctls {
	path := filepath.Join(root, "net/ipv6/conf")
	dir, err := os.OpenRoot(path)
	if err != nil {
		return &sysctls{path: path}
	}
	return &sysctls{path, dir}
}

func (s *sysctls) close() {
	if s.root != nil {
		_ = s.root.Close()
	}
}

// read returns the value of a parameter of a netdev, or of all netdevs ("all").
func (s *sysctls) read(netdev, name string) (string, error) {
	if s.root == nil {
		return "", fmt.Errorf("%s is missing: the kernel has no IPv6, or the container needs a "+
			"mount of it (--sysctl)", s.path)
	}
	text, err := s.root.ReadFile(filepath.Join(netdev, name))
	return strings.TrimSpace(string(text)), err
}

// set writes the parameters of a netdev that differ. A kernel may lack forceForwarding.
func (s *sysctls) set(netdev string, settings []ipv6Setting) error {
	for _, want := range settings {
		have, err := s.read(netdev, want.name)
		if errors.Is(err, fs.ErrNotExist) && want.name == forceForwarding {
			continue
		}
		if err == nil && have != want.value {
			err = s.root.WriteFile(filepath.Join(netdev, want.name), []byte(want.value), 0)
		}
		if err != nil {
			return fmt.Errorf("sysctl net.ipv6.conf.%s.%s=%s: %w", netdev, want.name, want.value,
				err)
		}
	}
	return nil
}

// checkForwarding returns an error if the kernel does not forward the IPv6 packets of a netdev that
// routes. Before Linux 6.17 that depends on a parameter that is valid for the whole machine, so the
// agent does not set it: a machine that forwards ignores the router advertisements of its uplinks.
func (s *sysctls) checkForwarding(netdev string) error {
	if _, err := s.read(netdev, forceForwarding); err == nil {
		return nil
	}

	all, err := s.read("all", "forwarding")
	if err == nil && all == "0" {
		err = errors.New("is 0, so that the kernel forwards no IPv6 (before Linux 6.17 no single " +
			"netdev can): set it to 1, and net.ipv6.conf.<uplink>.accept_ra to 2 if the uplink " +
			"has its address from router advertisements")
	}
	if err != nil {
		return fmt.Errorf("sysctl net.ipv6.conf.all.forwarding: %w", err)
	}

	return nil
}

// setIPv4 sets the IPv4 parameters of a netdev that differ. A write that changes nothing would
// cause an event.
func (c *conn) setIPv4(link netlink.Link, settings []ipv4Setting) error {
	have, err := c.ipv4Settings(link.Attrs().Index)
	if err != nil {
		return linkError(err, link, "IPv4 parameters")
	}

	spec := nl.NewRtAttr(unix.IFLA_AF_SPEC, nil)
	conf := spec.AddRtAttr(unix.AF_INET, nil).AddRtAttr(unix.IFLA_INET_CONF, nil)
	differs := false
	for _, want := range settings {
		if have[want.number] != want.value {
			differs = true
			conf.AddRtAttr(int(want.number), nl.Uint32Attr(want.value))
		}
	}
	if !differs {
		return nil
	}

	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index = int32(link.Attrs().Index)
	_, err = request.Send(&c.raw, unix.RTM_SETLINK, unix.NLM_F_ACK, header, spec)

	return linkError(err, link, "set IPv4 parameters")
}

// ipv4Settings returns the IPv4 parameters of a netdev by their numbers.
func (c *conn) ipv4Settings(index int) (map[uint16]uint32, error) {
	message, err := c.handle.Ask(index)
	if err != nil {
		return nil, err
	}

	attrs, err := links.Attributes(message)
	if err != nil {
		return nil, err
	}

	families, err := attribute.Parse(attrs[unix.IFLA_AF_SPEC])
	if err != nil {
		return nil, err
	}

	ofIPv4, err := attribute.Parse(families[unix.AF_INET])
	if err != nil {
		return nil, err
	}

	// The parameters are an array of 4 bytes each, which begins with number 1 (inet_fill_link_af).
	settings := map[uint16]uint32{}
	for i, array := uint16(1), ofIPv4[unix.IFLA_INET_CONF]; len(array) >= 4; i++ {
		settings[i] = nl.NativeEndian().Uint32(array)
		array = array[4:]
	}

	if len(settings) == 0 {
		return nil, errors.New("the kernel tells none")
	}

	return settings, nil
}
