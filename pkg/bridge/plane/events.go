// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
)

// Watch calls emit with what each event of the kernel may have changed. It returns nil after Close.
func (p *Plane) Watch(emit func(Change)) error {
	sources := []func() error{
		func() error { return p.watchNetdevs(emit) },
		func() error { return p.watchEntries(emit) },
		func() error { return p.watchRoutes(emit) },
		func() error { return p.filter.Watch(func() { emit(Change{Scope: ScopeFilter}) }) },
	}

	ended := make(chan error, len(sources))
	for _, source := range sources {
		go func() { ended <- source() }()
	}

	for range sources {
		if err := <-ended; err != nil {
			return err
		}
	}

	return nil
}

// receive calls handle with each message of the kernel, and lost when messages were lost. It
// returns nil after Close.
func (p *Plane) receive(
	socket *nl.NetlinkSocket, lost func(), handle func(syscall.NetlinkMessage),
) error {
	for {
		messages, from, err := socket.Receive()
		switch {
		case p.closed.Load():
			return nil
		case errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.EINVAL):
			// EINVAL says that a message is larger than the buffer.
			lost()
			continue
		case err != nil:
			return fmt.Errorf("netlink events: %w", err)
		case from.Pid != nl.PidKernel:
			continue // any process may send to a netlink socket
		}

		for _, m := range messages {
			handle(m)
		}
	}
}

// watchNetdevs follows the events of netdevs and addresses.
func (p *Plane) watchNetdevs(emit func(Change)) error {
	lost := func() {
		p.representors.EventsLost()
		p.uplinkStates.eventsLost()
		emit(Change{Scope: ScopeAll})
	}
	return p.receive(p.events, lost, func(m syscall.NetlinkMessage) {
		switch m.Header.Type {
		case unix.RTM_NEWLINK, unix.RTM_DELLINK:
			// The kernel sends RTM_DELLINK also when a netdev leaves a bridge, but then with the
			// family of bridges.
			ofBridge := len(m.Data) > 0 && m.Data[0] == unix.AF_BRIDGE
			link, err := links.Parse(m.Data)
			if err != nil {
				lost()
				return
			}

			for _, c := range p.changesOf(link, m.Header.Type == unix.RTM_DELLINK, ofBridge) {
				emit(c)
			}
			if ofBridge {
				for _, svi := range p.ownVLANs.missing(link.Attrs().Index, m.Data) {
					emit(Change{Object: Object{KindSVI, svi}})
				}
			}
		case unix.RTM_NEWADDR, unix.RTM_DELADDR:
			if len(m.Data) < unix.SizeofIfAddrmsg {
				return
			}

			index := int(nl.DeserializeIfAddrmsg(m.Data).Index)
			if p.uplinkStates.contains(index) {
				emit(Change{Scope: ScopeVXLAN})
			}
			if owner, owned := p.owners.get(index); owned && owner.routes() {
				emit(Change{Object: owner})
			}
		case rtmNewNetconf:
			if c, changes := p.changeOfParameter(m.Data); changes {
				emit(c)
			}
		}
	})
}

// Messages about the parameters of netdevs (include/uapi/linux/rtnetlink.h and netconf.h).
const (
	rtmNewNetconf = 80 // RTM_NEWNETCONF
	// sizeofNetconf is the size of struct netconfmsg, padded.
	sizeofNetconf = 4

	netconfIndex      = 1  // NETCONFA_IFINDEX
	netconfForwarding = 2  // NETCONFA_FORWARDING
	netconfAll        = -1 // NETCONFA_IFINDEX_ALL
)

// changeOfParameter returns what an event of a parameter may have changed: what a VRF or SVI
// forwards, or what the whole machine forwards.
func (p *Plane) changeOfParameter(message []byte) (_ Change, changes bool) {
	if len(message) < sizeofNetconf {
		return Change{}, false
	}
	attrs, err := attribute.Parse(message[sizeofNetconf:])
	if err != nil || !attrs.Has(netconfForwarding) {
		return Change{}, false
	}

	index := int(int32(attrs.Uint32(netconfIndex)))
	if index == netconfAll {
		return Change{Scope: ScopeRouting}, true
	}
	owner, owned := p.owners.get(index)
	return Change{Object: owner},
		owned && owner.routes() && attrs.Uint32(netconfForwarding) == 0
}

// changedByPermanentEntry is changedByEntry for an entry of a VXLAN port, and for an entry that a
// bridge has for the machine itself. It returns the network that has lost a remote, or the SVI that
// has lost its MAC address.
func (p *Plane) changedByPermanentEntry(
	e *netlink.Neigh, removed bool,
) (_ Object, changed bool) {
	if !removed {
		return Object{}, false
	}

	if slices.Equal(e.HardwareAddr, unknownMAC) {
		p.destinations.forget(e.LinkIndex)
		owner, owned := p.owners.get(e.LinkIndex)
		return owner, owned && owner.Kind == KindNetwork
	}

	svi := p.ownVLANs.sviOf(e.LinkIndex, uint16(e.Vlan))
	return Object{KindSVI, svi}, svi != ""
}

// watchRoutes follows the events of the routes that end the tables of VRFs.
func (p *Plane) watchRoutes(emit func(Change)) error {
	lost := func() { emit(Change{Scope: ScopeRouting}) }
	return p.receive(p.routeEvents, lost, func(m syscall.NetlinkMessage) {
		table, ends := tableEndedBy(m.Data)
		if vrf := p.tables.vrfOf(table); ends && vrf != "" {
			emit(Change{Object: Object{KindVRF, vrf}})
		}
	})
}

// subscribeToLostEnds opens a socket for the events of unreachable routes that were removed. A
// filter in the kernel leaves out all others, because a router may have very many.
func subscribeToLostEnds() (*nl.NetlinkSocket, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_IPV4_ROUTE,
		unix.RTNLGRP_IPV6_ROUTE)
	if err != nil {
		return nil, err
	}

	// The type of the message is in the header, and the type of the route in struct rtmsg, which
	// follows the header. RTM_DELROUTE fits into one byte.
	const messageType, routeType = 4, unix.SizeofNlMsghdr + 7
	lowByte := uint32(messageType)
	if binary.NativeEndian.Uint16([]byte{0, 1}) == 1 {
		lowByte++
	}

	return filtered(socket,
		bpf.LoadAbsolute{Off: lowByte, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.RTM_DELROUTE, SkipFalse: 3},
		bpf.LoadAbsolute{Off: routeType, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.RTN_UNREACHABLE, SkipFalse: 1},
		bpf.RetConstant{Val: 1 << 16},
		bpf.RetConstant{Val: 0},
	)
}

// watchEntries follows the events of static forwarding entries.
func (p *Plane) watchEntries(emit func(Change)) error {
	lost := func() { emit(Change{Scope: ScopeAll}) }
	return p.receive(p.fdbEvents, lost, func(m syscall.NetlinkMessage) {
		entry, err := netlink.NeighDeserialize(m.Data)
		if err != nil {
			lost()
			return
		}

		object, changed := p.changedByEntry(entry, m.Header.Type == unix.RTM_DELNEIGH)
		if changed {
			emit(Change{Object: object})
		}
	})
}

// changesOf returns what an event of a netdev may have changed. ofBridge says that the event has
// the family of bridges, so that removed means that the netdev has left its bridge.
func (p *Plane) changesOf(link netlink.Link, removed, ofBridge bool) []Change {
	attrs := link.Attrs()
	var changes []Change
	id, ours := markOf(link)
	_, shared := sharedNumber(id)
	switch {
	case ours && !shared:
		changes = append(changes, Change{Object: Object{kindOf(link.Type()), id}})
	case ours && (removed || attrs.Flags&net.FlagUp == 0 || !isVLANFiltering(link)):
		changes = append(changes, Change{Scope: ScopeAll})
	}

	if owner, owned := p.owners.get(attrs.Index); owned {
		changes = append(changes, Change{Object: owner})
	}

	for _, name := range append(slices.Clone(attrs.AltNames), attrs.Name) {
		changes = append(changes, Change{Object: Object{KindPort, name}})
	}

	if !ofBridge && p.uplinkStates.update(attrs, removed) {
		changes = append(changes, Change{Scope: ScopeVXLAN})
	}

	switch {
	case ofBridge:
	case removed:
		p.representors.Removed(attrs.Index)
	case p.representors.Added(attrs.Index):
		changes = append(changes, Change{Scope: ScopeMissing})
	}

	return changes
}

// changedByEntry returns the object that the event of a static entry may have changed: the port
// that should have the entry's MAC address or, if no port should, the owner of the netdev to which
// the entry of the agent wrongly points.
func (p *Plane) changedByEntry(e *netlink.Neigh, removed bool) (_ Object, changed bool) {
	if len(e.HardwareAddr) != 6 {
		return Object{}, false
	}
	if e.State&netlink.NUD_PERMANENT != 0 {
		return p.changedByPermanentEntry(e, removed)
	}

	entry, wanted := p.forwarding.get(keyOf(e.MasterIndex, e.HardwareAddr, e.Vlan))
	if wanted {
		right := !removed && e.LinkIndex == entry.index && isOwnEntry(e)
		return Object{KindPort, entry.port}, !right
	}

	owner, owned := p.owners.get(e.LinkIndex)
	if !owned || removed || !isOwnEntry(e) {
		return Object{}, false
	}

	p.forwarding.setChecked(e.LinkIndex, false)
	return owner, true
}
