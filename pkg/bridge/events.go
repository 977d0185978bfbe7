package bridge

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

func (b *bridgePlane) watch(emit func(task)) error {
	ended := make(chan error, 2)
	go func() { ended <- b.watchNetdevs(emit) }()
	go func() { ended <- b.filter.Watch(func() { emit(task{kind: taskFilter}) }) }()
	if err := <-ended; err != nil {
		return err
	}
	return <-ended
}

func (b *bridgePlane) watchNetdevs(emit func(task)) error {
	lost := func() {
		clear(b.representors.known)
		b.representors.stale.Store(true)
		emit(task{kind: taskAll})
	}
	for {
		msgs, from, err := b.events.Receive()
		switch {
		case errors.Is(err, os.ErrClosed):
			return nil
		case errors.Is(err, unix.ENOBUFS):
			lost()
			continue
		case err != nil:
			return fmt.Errorf("netdev events: %w", err)
		case from.Pid != nl.PidKernel:
			continue // any process may send to a netlink socket
		}
		for _, msg := range msgs {
			switch msg.Header.Type {
			case unix.RTM_NEWLINK, unix.RTM_DELLINK:
				// When a netdev leaves a bridge, the kernel also sends RTM_DELLINK, with the family of bridges.
				bridging := len(msg.Data) > 0 && msg.Data[0] == unix.AF_BRIDGE
				link, err := netlink.LinkDeserialize(nil, msg.Data)
				if err != nil {
					lost()
					continue
				}
				for _, t := range b.tasksOf(link, msg.Header.Type == unix.RTM_DELLINK, bridging) {
					emit(t)
				}
			case unix.RTM_NEWADDR, unix.RTM_DELADDR:
				emit(task{kind: taskUplink}) // addresses of netdevs other than the uplink are rare on an xPU
			}
		}
	}
}

// tasksOf returns what an event of a netdev may have changed. bridging says that the event is of the family of bridges.
func (b *bridgePlane) tasksOf(link netlink.Link, removed, bridging bool) []task {
	attrs := link.Attrs()
	var tasks []task
	id, ours := markOf(link)
	switch {
	case ours && id != sharedID:
		tasks = append(tasks, task{taskNetwork, id})
	case ours && (removed || attrs.Flags&net.FlagUp == 0 || !isVLANFiltering(link)):
		tasks = append(tasks, task{kind: taskAll})
	}
	if user, used := b.users.Load(attrs.Index); used {
		tasks = append(tasks, user.(task))
	}
	names := append(slices.Clone(attrs.AltNames), attrs.Name)
	for _, name := range names {
		tasks = append(tasks, task{taskPort, name})
		if name == b.uplink {
			tasks = append(tasks, task{kind: taskUplink})
		}
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
