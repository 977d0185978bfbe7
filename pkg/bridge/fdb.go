// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// forwarding is which port has which MAC address, in the bridges' forwarding databases. The data
// plane writes it, and watch compares events with it.
type forwarding struct {
	mu      sync.RWMutex
	entries map[fdbKey]fdbEntry
	keys    map[int]map[fdbKey]bool // of the entries of each port of a bridge, by ifindex
	// ports of bridges of which it is known that they have no other entries of the agent
	checked map[int]bool
}

// fdbKey is what an entry of a forwarding database is known by.
type fdbKey struct {
	bridge int // ifindex
	mac    [6]byte
	vlan   int // 0 in a bridge that does not filter VLANs
}

type fdbEntry struct {
	index int    // ifindex of the port that has the address
	port  string // its id
}

func newForwarding() *forwarding {
	return &forwarding{
		entries: map[fdbKey]fdbEntry{}, keys: map[int]map[fdbKey]bool{}, checked: map[int]bool{},
	}
}

func keyOf(bridge int, mac net.HardwareAddr, vlan int) fdbKey {
	return fdbKey{bridge, [6]byte(mac), vlan}
}

func (f *forwarding) of(key fdbKey) (fdbEntry, bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	entry, wanted := f.entries[key]
	return entry, wanted
}

func (f *forwarding) set(key fdbKey, entry fdbEntry) {
	f.remove(key)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.entries[key] = entry
	if f.keys[entry.index] == nil {
		f.keys[entry.index] = map[fdbKey]bool{}
	}
	f.keys[entry.index][key] = true
}

func (f *forwarding) remove(key fdbKey) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if entry, wanted := f.entries[key]; wanted {
		delete(f.keys[entry.index], key)
		delete(f.entries, key)
	}
}

// forget forgets what a port of a bridge has, which the kernel removes when the netdev leaves its
// bridge.
func (f *forwarding) forget(index int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key := range f.keys[index] {
		delete(f.entries, key)
	}
	delete(f.keys, index)
	delete(f.checked, index)
}

// setChecked notes whether a port of a bridge may have entries of the agent that are not in f, and
// returns what was known.
func (f *forwarding) setChecked(index int, is bool) (was bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	was = f.checked[index]
	f.checked[index] = is
	return was
}

// staticEntry is an entry of a bridge's forwarding database that does not age: frames for the
// address are not flooded. It is sticky (Linux 4.20): otherwise it would move to another port from
// which a frame with that source address comes in (br_fdb_update). Every write of an entry must say
// so again.
func staticEntry(index int, mac net.HardwareAddr, vlan int) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_MASTER | netlink.NTF_STICKY,
		State: netlink.NUD_NOARP, HardwareAddr: mac, Vlan: vlan,
	}
}

func isOwnEntry(e *netlink.Neigh) bool {
	return e.State&netlink.NUD_NOARP != 0 && e.Flags&netlink.NTF_STICKY != 0 &&
		len(e.HardwareAddr) == 6
}

// forward has a bridge send the frames for a MAC address to one of its ports, in each of these
// VLANs, and those for no other address.
func (b *bridgePlane) forward(
	mac net.HardwareAddr, rep, bridge netlink.Link, port string, vlans []uint16,
) error {
	want := map[fdbKey]bool{}
	index := rep.Attrs().Index
	for _, vlan := range vlans {
		key := keyOf(bridge.Attrs().Index, mac, int(vlan))
		want[key] = true
		b.forwarding.set(key, fdbEntry{index, port})
		if err := b.handle.NeighSet(staticEntry(index, mac, int(vlan))); err != nil {
			return linkError(err, rep, "forward %s to it", mac)
		}
	}

	justAdded := rep.Attrs().MasterIndex != bridge.Attrs().Index
	if b.forwarding.setChecked(index, true) || justAdded {
		return nil
	}

	entries, err := b.entriesOf(index)
	if err != nil {
		b.forwarding.setChecked(index, false)
		return linkError(err, rep, "forwarding database")
	}

	for _, e := range entries {
		if isOwnEntry(e) && !want[keyOf(e.MasterIndex, e.HardwareAddr, e.Vlan)] {
			if err := b.endForwarding(index, e.HardwareAddr, e.Vlan); err != nil {
				return linkError(err, rep, "no longer forward %s in VLAN %d to it",
					e.HardwareAddr, e.Vlan)
			}
		}
	}

	return nil
}

func (b *bridgePlane) endForwarding(index int, mac net.HardwareAddr, vlan int) error {
	err := b.handle.NeighDel(staticEntry(index, mac, vlan))
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// entriesOf lists what a bridge has learned or was told of one of its ports.
func (b *bridgePlane) entriesOf(index int) ([]*netlink.Neigh, error) {
	header := &netlink.Ndmsg{Family: unix.AF_BRIDGE, Index: uint32(index)}
	messages, err := request.Send(&b.strict, unix.RTM_GETNEIGH, unix.NLM_F_DUMP, header)
	if err != nil {
		return nil, err
	}

	var entries []*netlink.Neigh
	for _, m := range messages {
		entry, err := netlink.NeighDeserialize(m)
		if err != nil {
			return nil, fmt.Errorf("entry of a forwarding database: %w", err)
		}
		if entry.LinkIndex == index && entry.MasterIndex != 0 {
			entries = append(entries, entry)
		}
	}

	return entries, nil
}

// subscribeToEntries opens a socket with the events of static entries. The kernel tells of every
// address that it learns too, which may be more than anybody reads: a filter in the kernel leaves
// those out.
func subscribeToEntries() (*nl.NetlinkSocket, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_NEIGH)
	if err != nil {
		return nil, err
	}

	// offsets in struct ndmsg, which follows the header
	const family, state = unix.SizeofNlMsghdr, unix.SizeofNlMsghdr + 8
	lowByte := uint32(state)
	if binary.NativeEndian.Uint16([]byte{0, 1}) == 1 {
		lowByte++
	}

	program, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: family, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AF_BRIDGE, SkipFalse: 3},
		bpf.LoadAbsolute{Off: lowByte, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: netlink.NUD_NOARP, SkipFalse: 1},
		bpf.RetConstant{Val: 1 << 16},
		bpf.RetConstant{Val: 0},
	})

	if err != nil {
		return nil, errors.Join(err, socket.Close())
	}

	filter := make([]unix.SockFilter, len(program))
	for i, op := range program {
		filter[i] = unix.SockFilter{Code: op.Op, Jt: op.Jt, Jf: op.Jf, K: op.K}
	}

	err = unix.SetsockoptSockFprog(socket.GetFd(), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("filter: %w", err), socket.Close())
	}

	return socket, nil
}

// tasksOfEntry returns what the event of a static entry may have changed: whose address it is and,
// if it is the agent's but no port's, the port that has it too much.
func (b *bridgePlane) tasksOfEntry(e *netlink.Neigh, removed bool) []task {
	if len(e.HardwareAddr) != 6 {
		return nil
	}

	if entry, wanted := b.forwarding.of(keyOf(e.MasterIndex, e.HardwareAddr, e.Vlan)); wanted {
		if !removed && e.LinkIndex == entry.index && isOwnEntry(e) {
			return nil
		}
		return []task{{taskPort, entry.port}}
	}

	if user, used := b.users.of(e.LinkIndex); used && !removed && isOwnEntry(e) {
		b.forwarding.setChecked(e.LinkIndex, false)
		return []task{user}
	}

	return nil
}
