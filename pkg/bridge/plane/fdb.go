// SPDX-License-Identifier: Apache-2.0

package plane

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
	"github.com/opiproject/xpu-device-plugin/pkg/multimap"
)

// forwarding knows the entries that the bridges' forwarding databases should have: which port has
// which MAC address. The data plane writes it, and Watch compares events with it.
type forwarding struct {
	mu      sync.RWMutex
	entries map[fdbKey]fdbEntry
	keys    multimap.Sets[int, fdbKey] // of the entries that point to a netdev, by its ifindex
	// checked are the netdevs, by ifindex, that certainly have no other entries of the agent.
	checked map[int]bool
}

// fdbKey identifies an entry of a forwarding database.
type fdbKey struct {
	bridge int // ifindex
	mac    [6]byte
	vlan   int // 0 in a bridge that does not filter VLANs
}

// fdbEntry is the port that frames are forwarded to.
type fdbEntry struct {
	index int    // ifindex of the representor
	port  string // id of the port
}

func newForwarding() *forwarding {
	return &forwarding{entries: map[fdbKey]fdbEntry{}, checked: map[int]bool{}}
}

func keyOf(bridge int, mac net.HardwareAddr, vlan int) fdbKey {
	return fdbKey{bridge, [6]byte(mac), vlan}
}

func (f *forwarding) get(key fdbKey) (fdbEntry, bool) {
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
	f.keys.Add(entry.index, key)
}

func (f *forwarding) remove(key fdbKey) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if entry, wanted := f.entries[key]; wanted {
		f.keys.Remove(entry.index, key)
		delete(f.entries, key)
	}
}

// removePort removes all entries of a netdev. The kernel does the same when the netdev leaves its
// bridge.
func (f *forwarding) removePort(index int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key := range f.keys.All(index) {
		delete(f.entries, key)
	}
	delete(f.keys, index)
	delete(f.checked, index)
}

// setChecked records whether it is certain that a netdev has no entries of the agent that are not
// in f, and returns whether it was certain before.
func (f *forwarding) setChecked(index int, checked bool) (before bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before = f.checked[index]
	f.checked[index] = checked
	return before
}

// staticEntry returns an entry of a bridge's forwarding database that does not age, so that frames
// for the address are not flooded. The entry is sticky (Linux 4.20). Otherwise it would move to
// another port when that port sends from the address (br_fdb_update). Each write of the entry must
// set this flag again.
func staticEntry(index int, mac net.HardwareAddr, vlan int) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_MASTER | netlink.NTF_STICKY,
		State: netlink.NUD_NOARP, HardwareAddr: mac, Vlan: vlan,
	}
}

// isOwnEntry reports whether the agent has made an entry.
func isOwnEntry(e *netlink.Neigh) bool {
	return e.State&netlink.NUD_NOARP != 0 && e.Flags&netlink.NTF_STICKY != 0 &&
		len(e.HardwareAddr) == 6
}

// setForwarding makes a bridge forward the frames for a MAC address to one of its ports, in these
// VLANs. It removes the agent's entries for other addresses of the port.
func (p *Plane) setForwarding(
	mac net.HardwareAddr, rep, bridge netlink.Link, port string, vlans []uint16,
) error {
	want := map[fdbKey]bool{}
	index := rep.Attrs().Index
	for _, vlan := range vlans {
		key := keyOf(bridge.Attrs().Index, mac, int(vlan))
		want[key] = true
		p.forwarding.set(key, fdbEntry{index, port})
		if err := p.handle.NeighSet(staticEntry(index, mac, int(vlan))); err != nil {
			return linkError(err, rep, "forward %s to it", mac)
		}
	}

	justAdded := rep.Attrs().MasterIndex != bridge.Attrs().Index
	if p.forwarding.setChecked(index, true) || justAdded {
		return nil
	}

	entries, err := p.entriesOf(index)
	if err != nil {
		p.forwarding.setChecked(index, false)
		return linkError(err, rep, "forwarding database")
	}

	for _, e := range entries {
		if isOwnEntry(e) && !want[keyOf(e.MasterIndex, e.HardwareAddr, e.Vlan)] {
			if err := p.deleteEntry(index, e.HardwareAddr, e.Vlan); err != nil {
				return linkError(err, rep, "no longer forward %s in VLAN %d to it",
					e.HardwareAddr, e.Vlan)
			}
		}
	}

	return nil
}

func (c *conn) deleteEntry(index int, mac net.HardwareAddr, vlan int) error {
	err := c.handle.NeighDel(staticEntry(index, mac, vlan))
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// entriesOf lists the forwarding entries, learned and static, of one port of a bridge.
func (c *conn) entriesOf(index int) ([]*netlink.Neigh, error) {
	header := &netlink.Ndmsg{Family: unix.AF_BRIDGE, Index: uint32(index)}
	messages, err := request.Send(&c.strict, unix.RTM_GETNEIGH, unix.NLM_F_DUMP, header)
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

// subscribeToEntries opens a socket for the events of static entries. A filter in the kernel leaves
// out the events of learned addresses, because there may be more of them than the agent can read.
func subscribeToEntries() (*nl.NetlinkSocket, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_NEIGH)
	if err != nil {
		return nil, err
	}

	// The fields are in struct ndmsg, which follows the header.
	const family, state = unix.SizeofNlMsghdr, unix.SizeofNlMsghdr + 8
	lowByte := uint32(state)
	if binary.NativeEndian.Uint16([]byte{0, 1}) == 1 {
		lowByte++
	}

	return filtered(socket,
		bpf.LoadAbsolute{Off: family, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AF_BRIDGE, SkipFalse: 3},
		bpf.LoadAbsolute{Off: lowByte, Size: 1},
		bpf.JumpIf{
			Cond: bpf.JumpBitsSet, Val: netlink.NUD_NOARP | netlink.NUD_PERMANENT, SkipFalse: 1,
		},
		bpf.RetConstant{Val: 1 << 16},
		bpf.RetConstant{Val: 0},
	)
}

// filtered returns the socket with a filter in the kernel. If that fails, it closes the socket.
func filtered(socket *nl.NetlinkSocket, code ...bpf.Instruction) (*nl.NetlinkSocket, error) {
	program, err := bpf.Assemble(code)
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
