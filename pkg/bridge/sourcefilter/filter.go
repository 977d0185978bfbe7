// SPDX-License-Identifier: Apache-2.0

// Package sourcefilter keeps what is connected to a bridge from sending as somebody else, by the
// bridge family of nftables.
//
// A port may send with its own MAC address only and, if its addresses are known, with these: as the
// source of IP packets and in ARP (RFC 826) and Neighbor Discovery (RFC 4861). What comes from
// other machines by the VXLAN ports of its networks may not have the port's MAC address, and not
// claim its addresses. No port reaches the machine itself.
package sourcefilter

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// TableName is that of the agent's table in the family "bridge".
const TableName = "opi-bridge"

// ErrUnsupported says that the kernel cannot filter.
var ErrUnsupported = errors.New("the kernel has no nftables for bridges " +
	"(CONFIG_NF_TABLES_BRIDGE, CONFIG_NFT_BRIDGE_META): load nf_tables and nft_meta_bridge, or " +
	"give --source-filter=false")

// Port is a port of a bridge, and what may come in from it.
type Port struct {
	Index    int      // ifindex
	Networks []string // that the port is in
	// MAC is the only source address that the port's frames may have; nil: any, and Addresses are
	// not looked at.
	MAC net.HardwareAddr
	// Addresses are those that the port may send from and claim, besides the IPv6 link-local one
	// that its MAC address makes; empty: any.
	Addresses []netip.Addr
}

// Filter is the agent's table. Only one goroutine may use it at a time, except for Watch and
// Dropped. Its calls send nothing if the kernel already has what is wanted.
type Filter struct {
	conn   *nftables.Conn
	reader *nftables.Conn    // for Dropped
	portID uint32            // of conn's socket, by which events tell who changed something
	events *nl.NetlinkSocket // what becomes of all tables
	closed atomic.Bool
	table  *nftables.Table
	sets   map[string]*nftables.Set
	// unsupported is why the kernel cannot filter, nil if it can.
	unsupported error

	ports    map[int]Port    // by ifindex
	vxlans   map[string]int  // ifindexes by network
	needs    map[int]needed  // by ifindex of the port or VXLAN port that needs the elements
	elements map[element]int // those in the kernel, by how many need them
}

// Open makes the table in the network namespace of the calling thread, or takes over that of an
// agent before. What that one filtered stays filtered until Sweep. Where the kernel cannot filter,
// a port with a MAC address is refused and all else does nothing.
func Open() (_ *Filter, err error) {
	f := &Filter{
		ports: map[int]Port{}, vxlans: map[string]int{}, needs: map[int]needed{},
		elements: map[element]int{},
	}

	f.conn, err = nftables.New(nftables.AsLasting(), nftables.WithSockOptions(f.socket))
	if errors.Is(err, unix.EPROTONOSUPPORT) { // no netlink of netfilter at all
		f.unsupported = fmt.Errorf("%w: %w", ErrUnsupported, err)
		return f, nil
	}
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	if f.reader, err = nftables.New(nftables.AsLasting()); err != nil {
		return nil, errors.Join(fmt.Errorf("nftables: %w", err), f.Close())
	}
	if f.events, err = nl.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES); err != nil {
		return nil, errors.Join(fmt.Errorf("nftables: subscribe to events: %w", err), f.Close())
	}

	err = f.adopt()
	if errors.Is(err, ErrUnsupported) {
		f.unsupported = err
		return f, nil
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}

	return f, nil
}

// socket learns the socket's port id, and has it take a transaction of all ports at once.
func (f *Filter) socket(conn *netlink.Conn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}

	var name unix.Sockaddr
	if errControl := raw.Control(func(fd uintptr) {
		name, err = unix.Getsockname(int(fd))
	}); errControl != nil {
		return errControl
	}

	if own, ok := name.(*unix.SockaddrNetlink); ok {
		f.portID = own.Pid
	}

	if err != nil {
		return err
	}

	return errors.Join(conn.SetWriteBuffer(8<<20), conn.SetReadBuffer(8<<20))
}

// Close ends Watch and leaves the table as it is.
func (f *Filter) Close() error {
	f.closed.Store(true)
	if f.events != nil {
		_ = f.events.Close()
	}

	var failed []error
	for _, conn := range []*nftables.Conn{f.conn, f.reader} {
		if conn != nil {
			failed = append(failed, conn.CloseLasting())
		}
	}

	return errors.Join(failed...)
}

// Supported returns an ErrUnsupported where the kernel cannot filter.
func (f *Filter) Supported() error { return f.unsupported }

// SetPort has the kernel filter a port as described, instead of as before.
func (f *Filter) SetPort(port Port) error {
	if port.MAC != nil && f.unsupported != nil {
		return f.unsupported
	}
	if err := f.change(port.Index, f.portNeeds(port)); err != nil {
		return err
	}
	f.ports[port.Index] = port
	return nil
}

// SetVXLAN tells which VXLAN port, by ifindex, connects a network to other machines; 0: none.
func (f *Filter) SetVXLAN(network string, index int) error {
	before := f.vxlans[network]
	if before == index {
		return nil
	}

	f.vxlans[network] = index
	for _, port := range f.ports {
		if !slices.Contains(port.Networks, network) {
			continue
		}
		if err := f.SetPort(port); err != nil {
			f.vxlans[network] = before
			return err
		}
	}

	if index == 0 {
		delete(f.vxlans, network)
	} else if err := f.change(index, needed{}.isolated(index)); err != nil {
		return err
	}

	return f.change(before, nil)
}

// Remove has the kernel filter nothing of a port any more.
func (f *Filter) Remove(index int) error {
	if err := f.change(index, nil); err != nil {
		return err
	}
	delete(f.ports, index)
	return nil
}

// Sweep removes what the agent before filtered and nobody has asked for since.
func (f *Filter) Sweep() error {
	var stale []element
	for e, users := range f.elements {
		if users == 0 {
			stale = append(stale, e)
		}
	}
	return f.apply(nil, stale)
}

// Restore makes the table anew, as somebody else changed it.
func (f *Filter) Restore() error {
	if f.unsupported != nil {
		return nil
	}

	f.conn.AddTable(f.table) // so that there is one to remove
	f.conn.DelTable(f.table)
	if err := f.declare(); err != nil {
		return err
	}

	maps.DeleteFunc(f.elements, func(_ element, users int) bool { return users == 0 })
	return f.send(slices.Collect(maps.Keys(f.elements)), nil)
}

// change brings the elements that a port needs to those wanted.
func (f *Filter) change(index int, want needed) error {
	have := f.needs[index]
	var add, remove []element
	for e := range want {
		if _, there := f.elements[e]; !have[e] && !there {
			add = append(add, e)
		}
	}

	for e := range have {
		if !want[e] && f.elements[e] == 1 {
			remove = append(remove, e)
		}
	}

	if err := f.apply(add, remove); err != nil {
		return err
	}

	for e := range have {
		if !want[e] && f.elements[e] > 0 {
			f.elements[e]--
		}
	}

	for e := range want {
		if !have[e] {
			f.elements[e]++
		}
	}

	f.needs[index] = want
	if len(want) == 0 {
		delete(f.needs, index)
	}

	return nil
}

// apply adds and removes elements in one transaction, in a new table if somebody else took the old
// one away.
func (f *Filter) apply(add, remove []element) error {
	if len(add)+len(remove) == 0 || f.unsupported != nil {
		return nil
	}

	err := f.send(add, remove)
	if errors.Is(err, unix.ENOENT) {
		for _, e := range remove {
			delete(f.elements, e)
		}
		if err = f.Restore(); err == nil {
			err = f.send(add, nil)
		}
	}

	if err != nil {
		return err
	}

	for _, e := range add {
		f.elements[e] = 0
	}

	for _, e := range remove {
		delete(f.elements, e)
	}

	return nil
}
