// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
)

// Watch calls emit with what each event of the kernel may have changed. It returns nil after Close.
func (p *Plane) Watch(emit func(Change)) error {
	sources := []func() error{
		func() error { return p.watchNetdevs(emit) },
		func() error { return p.watchEntries(emit) },
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
		case unix.RTM_NEWADDR, unix.RTM_DELADDR:
			if len(m.Data) >= unix.SizeofIfAddrmsg &&
				p.uplinkStates.contains(int(nl.DeserializeIfAddrmsg(m.Data).Index)) {
				emit(Change{Scope: ScopeVXLAN})
			}
		}
	})
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
		changes = append(changes, Change{Object: Object{KindNetwork, id}})
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
