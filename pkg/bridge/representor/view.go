// SPDX-License-Identifier: Apache-2.0

package representor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
)

// view is what the kernel says about representors at one time. A netdev belongs to one eswitch port
// as long as it exists, so a representor that a view has stays right until the netdev is removed.
type view struct {
	functions map[int][]eswitchPort      // the Functions that a netdev represents, by its ifindex
	ports     map[string][]namedPort     // by portName.function
	noDevlink error                      // why there are no ports
	netdevs   map[string][]namedPhysPort // representors by portName.function
	uplinks   map[pci.Address][]string   // phys_switch_ids of the PFs' own netdevs
}

type namedPort struct {
	devlink.Port
	name portName
}

type namedPhysPort struct {
	physPort
	represents portName
}

func newView(ports []devlink.Port, noDevlink error, netdevs []physPort) view {
	v := view{
		functions: map[int][]eswitchPort{}, ports: map[string][]namedPort{}, noDevlink: noDevlink,
		netdevs: map[string][]namedPhysPort{}, uplinks: map[pci.Address][]string{},
	}

	for _, p := range ports {
		if name := nameOf(p); name != (portName{}) {
			v.ports[name.function] = append(v.ports[name.function], namedPort{p, name})
			at, _ := pci.Parse(p.Device.Name)
			v.functions[p.NetdevIndex] = append(v.functions[p.NetdevIndex], eswitchPort{at, name})
		}
	}

	for _, n := range netdevs {
		switch name, represents := parsePortName(n.portName); {
		case represents:
			v.netdevs[name.function] = append(v.netdevs[name.function], namedPhysPort{n, name})
			if n.switchID != "" {
				v.functions[n.index] = append(v.functions[n.index], eswitchPort{n.parent, name})
			}
		case n.parent != "":
			v.uplinks[n.parent] = append(v.uplinks[n.parent], n.switchID)
		}
	}

	return v
}

// physPort is a netdev with its place on a card, as rtnetlink describes it.
type physPort struct {
	index int
	name  string
	// parent is the PCI device, "" if the driver names none or the device is on another bus.
	parent   pci.Address
	switchID string // phys_switch_id, "" if it is at no eswitch
	portName string // phys_port_name
}

// find returns the ifindex of the representor at an eswitch port, by devlink or else by
// phys_port_name. The error satisfies IsNotFound if there certainly is none.
func (v view) find(at eswitchPort) (int, error) {
	index, byPort := v.byPort(at)
	if byPort == nil {
		return index, nil
	}

	index, byName := v.byName(at)
	if byName == nil {
		return index, nil
	}

	err := fmt.Errorf("%s has no representor (it has one in eswitch mode switchdev only): %w; %w",
		at, byPort, byName)
	if v.noDevlink != nil {
		return 0, err // only devlink may know the representor
	}

	return 0, notFoundError{err}
}

// byPort searches the devlink ports.
func (v view) byPort(at eswitchPort) (int, error) {
	if v.noDevlink != nil {
		return 0, v.noDevlink
	}

	var found []string
	var index int
	// other is a Function with the same number at another controller or PF. Perhaps --host-pf
	// should name it.
	other := ""
	for _, port := range v.ports[at.name.function] {
		switch {
		case at.eswitch != "" && port.Device != devlink.OfPCI(at.eswitch):
		case at.hasName(port.name):
			found = append(found, fmt.Sprintf("%s/%d", port.Device, port.Index))
			index = port.NetdevIndex
		case other == "":
			other = fmt.Sprintf(" (there is %s%s of %s)", port.name.pf, port.name.function,
				port.Device.Name)
		}
	}

	switch {
	case len(found) > 1:
		return 0, fmt.Errorf("devlink ports %s are all %s%s", strings.Join(found, ", "), at,
			at.ambiguityHint())
	case len(found) == 0:
		return 0, fmt.Errorf("no devlink port is %s%s", at, other)
	case index == 0:
		return 0, fmt.Errorf("devlink port %s has no netdev in this network namespace", found[0])
	}

	return index, nil
}

// byName searches the netdevs by phys_port_name and eswitch.
func (v view) byName(at eswitchPort) (int, error) {
	var found []string
	var index int
	for _, n := range v.netdevs[at.name.function] {
		if n.switchID != "" && at.hasName(n.represents) && v.isAt(n.physPort, at.eswitch) {
			found = append(found, n.name)
			index = n.index
		}
	}

	switch {
	case len(found) > 1:
		return 0, fmt.Errorf("netdevs %s are all %s by phys_port_name%s", strings.Join(found, ", "),
			at, at.ambiguityHint())
	case len(found) == 0:
		return 0, fmt.Errorf("no netdev is %s by phys_port_name and phys_switch_id", at)
	}

	return index, nil
}

// isAt reports whether a netdev is at the eswitch of this PF. It is if it belongs to the PF's
// device. If its driver names no device, it is if it has the phys_switch_id of the PF's own netdev,
// which bonded PFs share.
func (v view) isAt(n physPort, eswitch pci.Address) bool {
	if eswitch == "" || n.parent == eswitch {
		return true
	}
	return n.parent == "" && slices.Contains(v.uplinks[eswitch], n.switchID)
}

// ambiguityHint says how an administrator can tell apart the ports that this one could be.
func (p eswitchPort) ambiguityHint() string {
	if p.eswitch != "" {
		return ""
	}
	return "; --host-pf with eswitch= tells which"
}

// physPorts lists all netdevs. The netlink library cannot do so, because it reads no phys_port_name
// and only 4 bytes of phys_switch_id.
func (f *Finder) physPorts() ([]physPort, error) {
	messages, err := f.handle.All()
	if err != nil {
		return nil, err
	}

	all := make([]physPort, len(messages))
	for i, message := range messages {
		if all[i], err = parsePhysPort(message); err != nil {
			return nil, err
		}
	}

	return all, nil
}

func parsePhysPort(message []byte) (physPort, error) {
	attrs, err := links.Attributes(message)
	if err != nil {
		return physPort{}, err
	}

	parent, _ := pci.Parse(attrs.Text(unix.IFLA_PARENT_DEV_NAME))
	return physPort{
		index: int(nl.DeserializeIfInfomsg(message).Index), name: attrs.Text(unix.IFLA_IFNAME),
		parent:   parent,
		portName: attrs.Text(unix.IFLA_PHYS_PORT_NAME),
		switchID: string(attrs[unix.IFLA_PHYS_SWITCH_ID]),
	}, nil
}
