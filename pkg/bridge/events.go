// SPDX-License-Identifier: Apache-2.0

package bridge

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

func (b *bridgePlane) watch(emit func(task)) error {
	sources := []func() error{
		func() error { return b.watchNetdevs(emit) },
		func() error { return b.watchEntries(emit) },
		func() error { return b.filter.Watch(func() { emit(task{kind: taskFilter}) }) },
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

// receive calls handle with each message of the kernel, and lost when there were some that nobody
// read. It returns nil after close.
func (b *bridgePlane) receive(
	socket *nl.NetlinkSocket, lost func(), handle func(syscall.NetlinkMessage),
) error {
	for {
		messages, from, err := socket.Receive()
		switch {
		case b.closed.Load():
			return nil
		case errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.EINVAL):
			// EINVAL: the message is larger than what is read
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

func (b *bridgePlane) watchNetdevs(emit func(task)) error {
	lost := func() {
		clear(b.representors.known)
		b.representors.stale.Store(true)
		b.uplinksUnknown()
		emit(task{kind: taskAll})
	}
	return b.receive(b.events, lost, func(m syscall.NetlinkMessage) {
		switch m.Header.Type {
		case unix.RTM_NEWLINK, unix.RTM_DELLINK:
			// When a netdev leaves a bridge, the kernel also sends RTM_DELLINK, with the family of
			// bridges.
			bridging := len(m.Data) > 0 && m.Data[0] == unix.AF_BRIDGE
			link, err := links.Parse(m.Data)
			if err != nil {
				lost()
				return
			}

			for _, t := range b.tasksOf(link, m.Header.Type == unix.RTM_DELLINK, bridging) {
				emit(t)
			}
		case unix.RTM_NEWADDR, unix.RTM_DELADDR:
			if len(m.Data) >= unix.SizeofIfAddrmsg &&
				b.isUplink(int(nl.DeserializeIfAddrmsg(m.Data).Index)) {
				emit(task{kind: taskUplink})
			}
		}
	})
}

func (b *bridgePlane) watchEntries(emit func(task)) error {
	lost := func() { emit(task{kind: taskAll}) }
	return b.receive(b.entries, lost, func(m syscall.NetlinkMessage) {
		entry, err := netlink.NeighDeserialize(m.Data)
		if err != nil {
			lost()
			return
		}
		for _, t := range b.tasksOfEntry(entry, m.Header.Type == unix.RTM_DELNEIGH) {
			emit(t)
		}
	})
}

// tasksOf returns what an event of a netdev may have changed. bridging says that the event is of
// the family of bridges.
func (b *bridgePlane) tasksOf(link netlink.Link, removed, bridging bool) []task {
	attrs := link.Attrs()
	var tasks []task
	id, ours := markOf(link)
	_, shared := sharedNumber(id)
	switch {
	case ours && !shared:
		tasks = append(tasks, task{taskNetwork, id})
	case ours && (removed || attrs.Flags&net.FlagUp == 0 || !isVLANFiltering(link)):
		tasks = append(tasks, task{kind: taskAll})
	}

	if user, used := b.users.of(attrs.Index); used {
		tasks = append(tasks, user)
	}

	for _, name := range append(slices.Clone(attrs.AltNames), attrs.Name) {
		tasks = append(tasks, task{taskPort, name})
	}

	if !bridging && b.uplinkChanged(attrs, removed) {
		tasks = append(tasks, task{kind: taskUplink})
	}

	switch {
	case bridging:
	case removed:
		b.representors.departed(attrs.Index)
	case b.representors.arrived(attrs.Index):
		tasks = append(tasks, task{kind: taskArrival})
	}

	return tasks
}
