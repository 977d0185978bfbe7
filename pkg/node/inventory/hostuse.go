// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// readHostUse reads what the host uses its netdevs for. It also finds the netdevs below one with a
// default route: the ports of a bond or bridge, and the lower netdev of a VLAN.
func (s *scanner) readHostUse() {
	uses, err := s.options.HostNetdevs()
	if err != nil {
		s.report("", reasonHostUse, err)
		return
	}

	s.uses = uses

	var found []string
	for name, netdev := range uses {
		if netdev.DefaultRoute {
			found = append(found, name)
		}
	}

	s.routed = map[string]bool{}
	for len(found) > 0 {
		netdev := found[0]
		found = found[1:]
		if s.routed[netdev] {
			continue
		}

		s.routed[netdev] = true
		// none if the netdev disappeared
		entries, _, _ := s.sysfs.Dir("class/net", netdev).Names()
		for _, name := range entries {
			if lower, ok := strings.CutPrefix(name, "lower_"); ok {
				found = append(found, lower)
			}
		}
	}
}

// altNames returns the altnames of a PF's netdev. While they cannot be read, and while the netdev is
// not on the host, they are those that were seen last.
func (s *scanner) altNames(netdev string, device sysfs.Dir, before lastSeen) []string {
	now, known := s.uses[netdev]
	if !known || s.problems[problem{"", reasonHostUse}] != nil ||
		isPCI(now.Parent) && isPCI(device.Base()) && now.Parent != device.Base() {
		return before.altNames
	}
	return now.AltNames
}

// hostUse returns what the host uses a netdev of the device for. An unknown use counts as a use.
// The use is unknown while the host's netdevs cannot be read, and until the next scan if another
// device has the name now.
func (s *scanner) hostUse(netdev string, device sysfs.Dir) string {
	if netdev == "" {
		return ""
	}

	now, known := s.uses[netdev]
	failure := s.problems[problem{"", reasonHostUse}]
	switch {
	case !known && failure != nil:
		return "may be used by the host: what the host does with its netdevs cannot be read: " +
			failure.Error()
	case isPCI(now.Parent) && isPCI(device.Base()) && now.Parent != device.Base():
		return "may be used by the host: it is being renamed"
	}

	return now.Use
}
