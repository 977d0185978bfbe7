// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// representorCache finds representors by the PCI addresses in port ids, in a view of devlink ports
// and netdevs that it takes again after a netdev came or went. One goroutine may call ifindex and
// refresh, another one (watch) the rest.
type representorCache struct {
	resolver  portResolver
	ports     func() ([]devlink.Port, error)
	physPorts func() ([]physPort, error)

	view  view
	taken time.Time    // when view was; zero if never
	stale atomic.Bool  // a netdev came or went since the view
	known map[int]bool // netdevs by ifindex that events told of as being there
}

// view is what the kernel said of representors at one time. A netdev belongs to one eswitch port as
// long as it exists: a representor that is found in a view stays right until the netdev is removed.
type view struct {
	functions map[int][]eswitchPort  // that a netdev represents, by its ifindex
	ports     map[string][]namedPort // by the second part of their names
	noDevlink error                  // why there are no ports
	// by the second part of their names; those that represent a Function
	netdevs map[string][]namedPhysPort
	uplinks map[pci.Address][]string // phys_switch_ids of the PFs' own netdevs
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

// physPort is a netdev with what rtnetlink tells of its place on a card.
type physPort struct {
	index int
	name  string
	// its PCI device, "" if the driver does not tell or the device is on another bus
	parent   pci.Address
	switchID string // phys_switch_id, "" if it is at no eswitch
	portName string // phys_port_name
}

// maxAge limits the age of a view from which a representor is missing: not every change has an
// event. A younger view is not taken again, since many ports may miss their representors at the
// same time.
const maxAge = 500 * time.Millisecond

// errNoRepresentor says why a port certainly has no representor by its PCI address.
type errNoRepresentor struct{ error }

func isNoRepresentor(err error) bool { return errors.As(err, new(errNoRepresentor)) }

// ifindex returns that of the port's representor. The error is an errNoRepresentor if there is
// none.
func (c *representorCache) ifindex(port string) (int, error) {
	at, err := c.resolver.resolve(port)
	if err != nil {
		return 0, errNoRepresentor{err}
	}

	if !c.stale.Load() {
		index, err := c.view.find(at)
		if err == nil || time.Since(c.taken) <= maxAge {
			return index, err
		}
	}

	if err := c.refresh(); err != nil {
		return 0, err
	}

	return c.view.find(at)
}

// admits returns nil if a netdev with the name of a port may be that port: its name is one that
// only the configuration gives, or it represents a Function for clients. The error is an
// errNoRepresentor if it certainly may not.
func (c *representorCache) admits(port string, index int) error {
	if c.resolver.mayBePort(port) {
		return nil
	}

	serves := func() bool { return slices.ContainsFunc(c.view.functions[index], c.resolver.serves) }
	if c.stale.Load() || !serves() && time.Since(c.taken) > maxAge {
		if err := c.refresh(); err != nil {
			return err
		}
	}

	if serves() {
		return nil
	}

	if err := c.view.noDevlink; err != nil {
		return fmt.Errorf(
			"netdev %s: whether it represents a function of the host is not known: %w", port, err,
		)
	}

	return errNoRepresentor{fmt.Errorf("netdev %s: represents no function of the host; if it is "+
		"to be a "+
		"port all the same, give it to opi-bridge with --representor %s", port, port)}
}

// refresh takes a new view.
func (c *representorCache) refresh() error {
	// before listing, since a netdev that comes from now on may be missing from the list
	c.stale.Store(false)
	// The ports of netdevs that an interrupted list lacks would be taken out of service.
	netdevs, err := request.Consistent(c.physPorts)
	if err != nil {
		c.stale.Store(true)
		return fmt.Errorf("list netdevs: %w", err)
	}

	// The ports are listed after the netdevs, so that the view has the port of each netdev in it.
	ports, noDevlink := c.ports()
	c.view, c.taken = newView(ports, noDevlink, netdevs), time.Now()

	return nil
}

// arrived notes an event of a netdev, and tells whether it is the first one of that netdev. A view
// may already have the netdev: the ports that miss it are reconciled because of the event.
func (c *representorCache) arrived(index int) bool {
	if c.known[index] {
		return false
	}
	c.known[index] = true
	c.stale.Store(true)
	return true
}

func (c *representorCache) departed(index int) {
	delete(c.known, index)
	c.stale.Store(true)
}

// find returns the ifindex of the representor of an eswitch port, by devlink or else by
// phys_port_name.
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
		return 0, err // there may be a representor that only devlink knows
	}

	return 0, errNoRepresentor{err}
}

func (v view) byPort(at eswitchPort) (int, error) {
	if v.noDevlink != nil {
		return 0, v.noDevlink
	}

	var found []string
	var index int
	// a Function with the same number at another controller or PF, which --host-pf should perhaps
	// name
	other := ""
	for _, port := range v.ports[at.name.function] {
		switch {
		case at.eswitch != "" && port.Device != devlink.OfPCI(at.eswitch):
		case at.has(port.name):
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
		if n.switchID != "" && at.has(n.represents) && v.on(n.physPort, at.eswitch) {
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

// on tells whether a netdev is at the eswitch of this PF: it belongs to the PF's device or, if its
// driver tells no device, has the phys_switch_id of the PF's own netdev, which bonded PFs share.
func (v view) on(n physPort, eswitch pci.Address) bool {
	if eswitch == "" || n.parent == eswitch {
		return true
	}
	return n.parent == "" && slices.Contains(v.uplinks[eswitch], n.switchID)
}

func (p eswitchPort) ambiguityHint() string {
	if p.eswitch != "" {
		return ""
	}
	return "; --host-pf with eswitch= tells which"
}

// physPorts lists all netdevs: the netlink library does not read phys_port_name, and only 4 bytes
// of phys_switch_id.
func (b *bridgePlane) physPorts() ([]physPort, error) {
	messages, err := b.handle.All()
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
