// SPDX-License-Identifier: Apache-2.0

// Package sourcefilter drops frames with a false source address at the ports of bridges, by the
// bridge family of nftables.
//
// A port may send only from its own MAC address. If the IP addresses of a port are known, it may
// use only these as the source of IP packets, in ARP (RFC 826) and in Neighbor Discovery (RFC
// 4861). A frame from another machine, which comes from a VXLAN port of the same network, may not
// have the port's MAC address and may not claim its IP addresses. No port reaches the machine
// itself. The frames of a trunk are judged by the network whose VLAN id they have.
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

	"github.com/opiproject/xpu-device-plugin/pkg/multimap"
)

// TableName is the name of the agent's table in the family "bridge".
const TableName = "opi-bridge"

// ErrUnsupported says that the kernel cannot filter at bridges.
var ErrUnsupported = errors.New("the kernel has no nftables for bridges " +
	"(CONFIG_NF_TABLES_BRIDGE, CONFIG_NFT_BRIDGE_META): load nf_tables and nft_meta_bridge, or " +
	"give --source-filter=false")

// Port is a port of a bridge with the source addresses that it may use.
type Port struct {
	Index    int      // ifindex
	Networks []string // the networks of the port
	// MAC is the only source address that the port's frames may have. If it is nil, the port may
	// use any MAC and IP addresses.
	MAC net.HardwareAddr
	// Addresses are the IP addresses that the port may send from and claim, besides the IPv6
	// link-local address of its MAC address. If there are none, the port may use any IP address.
	Addresses []netip.Addr
	// Shared is true if ports at other machines have the same Addresses. Frames that come from
	// there may have them as source addresses then. The MAC address is never shared.
	Shared bool

	// Tagged are the networks of a trunk, whose frames have the VLAN id of their network. Other
	// frames from it are dropped. The fields above, except Index, mean nothing then.
	Tagged []Tagged
}

// Tagged is a network of a trunk, with the source addresses that the trunk may use in it.
type Tagged struct {
	VLAN    uint16 // 1-4094
	Network string
	// MAC, Addresses and Shared are as in [Port].
	MAC       net.HardwareAddr
	Addresses []netip.Addr
	Shared    bool
}

// networks returns the networks of the port.
func (p Port) networks() []string {
	all := slices.Clone(p.Networks)
	for _, t := range p.Tagged {
		all = append(all, t.Network)
	}
	return all
}

// isFiltered reports whether the port may not use all addresses in some of its networks.
func (p Port) isFiltered() bool {
	return p.MAC != nil || slices.ContainsFunc(p.Tagged, func(t Tagged) bool { return t.MAC != nil })
}

// Filter is the agent's table. Only one goroutine may use it at a time, but Watch and Dropped may
// be called at any time. A call sends nothing if the kernel already has what is wanted.
type Filter struct {
	conn   *nftables.Conn
	reader *nftables.Conn    // for Dropped
	portID uint32            // of conn's socket, to recognise the filter's own changes in events
	events *nl.NetlinkSocket // of all tables
	closed atomic.Bool
	table  *nftables.Table
	routed *nftables.Table // of the family "inet"
	// hasRouted is the number of elements in the table routed, which exists while there are any.
	hasRouted int
	sets      map[string]*nftables.Set // of both tables
	// unsupported is the reason why the kernel cannot filter, nil if it can.
	unsupported error

	ports    map[int]Port               // by ifindex
	members  multimap.Sets[string, int] // ifindexes of ports, by network
	vxlans   map[string]VXLAN           // by network
	gateways map[string]Gateway         // by network
	needs    map[int]elements           // by ifindex of the port or VXLAN port that needs the elements
	// refCount is how many ports need an element, for each element in the kernel.
	refCount map[element]int
	// values are the elements of maps in the kernel, by their slots.
	values map[element]element
}

// Open makes the table in the network namespace of the calling thread. If an earlier agent has left
// a table, Open takes it over, and what it filters stays filtered until Sweep. If the kernel cannot
// filter, SetPort refuses a port with a MAC address, and the other calls do nothing.
func Open() (_ *Filter, err error) {
	f := &Filter{
		ports: map[int]Port{}, vxlans: map[string]VXLAN{}, gateways: map[string]Gateway{},
		needs: map[int]elements{}, refCount: map[element]int{}, values: map[element]element{},
	}

	f.conn, err = nftables.New(nftables.AsLasting(), nftables.WithSockOptions(f.socket))
	if errors.Is(err, unix.EPROTONOSUPPORT) { // the kernel has no netlink for netfilter
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

// socket stores the port id of conn's socket, and makes its buffers large enough for a transaction
// with all ports.
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

// Supported returns an ErrUnsupported if the kernel cannot filter.
func (f *Filter) Supported() error { return f.unsupported }

// SetPort makes the kernel filter a port as described.
func (f *Filter) SetPort(port Port) error {
	if port.isFiltered() && f.unsupported != nil {
		return f.unsupported
	}
	if err := f.change(port.Index, f.elementsOf(port)); err != nil {
		return err
	}

	f.forget(port.Index)
	f.ports[port.Index] = port
	for _, network := range port.networks() {
		f.members.Add(network, port.Index)
	}

	return nil
}

// forget removes a port from the description.
func (f *Filter) forget(index int) {
	for _, network := range f.ports[index].networks() {
		f.members.Remove(network, index)
	}
	delete(f.ports, index)
}

// SetVXLAN sets the VXLAN port of a network. The zero VXLAN says that there is none.
func (f *Filter) SetVXLAN(network string, v VXLAN) error {
	before := f.vxlans[network]
	if before.equal(v) {
		return nil
	}

	f.vxlans[network] = v
	if v.Index == 0 {
		delete(f.vxlans, network)
	}
	if err := f.updateNetwork(network); err != nil {
		f.vxlans[network] = before
		return err
	}

	if before.Index == v.Index {
		return nil
	}
	return f.change(before.Index, nil)
}

// Remove ends the filtering of a port.
func (f *Filter) Remove(index int) error {
	if err := f.change(index, nil); err != nil {
		return err
	}
	f.forget(index)
	return nil
}

// Sweep ends the filtering that an earlier agent has left and that no call has asked for since
// Open.
func (f *Filter) Sweep() error {
	var stale []element
	for e, count := range f.refCount {
		if count == 0 {
			stale = append(stale, e)
		}
	}
	return f.apply(nil, stale)
}

// Restore makes the tables anew after another program has changed them.
func (f *Filter) Restore() error {
	if f.unsupported != nil {
		return nil
	}

	maps.DeleteFunc(f.refCount, func(e element, count int) bool {
		if count == 0 && f.values[e.slot()] == e {
			delete(f.values, e.slot())
		}
		return count == 0
	})
	// Only an existing table can be deleted.
	f.conn.AddTable(f.table)
	f.conn.DelTable(f.table)
	if err := f.declare(f.table); err != nil {
		return err
	}

	f.conn.AddTable(f.routed)
	f.conn.DelTable(f.routed)
	if f.hasRouted = f.routedElements(); f.hasRouted > 0 {
		if err := f.declare(f.routed); err != nil {
			return err
		}
	}

	return f.send(slices.Collect(maps.Keys(f.refCount)), nil)
}

// change replaces the elements that a port needs.
func (f *Filter) change(index int, want elements) error {
	have := f.needs[index]
	var add, remove []element
	for e := range want {
		if _, there := f.refCount[e]; !have[e] && !there {
			add = append(add, e)
		}
	}

	for e := range have {
		if !want[e] && f.refCount[e] == 1 {
			remove = append(remove, e)
		}
	}

	// An earlier agent may have left another value in a map.
	for _, e := range add {
		if stale, there := f.values[e.slot()]; there && e.value != "" && !have[stale] {
			remove = append(remove, stale)
		}
	}

	if err := f.apply(add, remove); err != nil {
		return err
	}

	for e := range have {
		if !want[e] && f.refCount[e] > 0 {
			f.refCount[e]--
		}
	}

	for e := range want {
		if !have[e] {
			f.refCount[e]++
		}
	}

	f.needs[index] = want
	if len(want) == 0 {
		delete(f.needs, index)
	}

	return nil
}

// apply adds and removes elements in one transaction. If another program has removed the table, it
// makes a new one.
func (f *Filter) apply(add, remove []element) error {
	if len(add)+len(remove) == 0 || f.unsupported != nil {
		return nil
	}

	err := f.transact(add, remove)
	if errors.Is(err, unix.ENOENT) {
		f.forgetElements(remove)
		if err = f.Restore(); err == nil {
			remove, err = nil, f.transact(add, nil)
		}
	}

	if err != nil {
		return err
	}

	f.forgetElements(remove)
	for _, e := range add {
		f.learnElement(e)
	}

	f.hasRouted += countRouted(add) - countRouted(remove)
	return nil
}

// learnElement records an element that the kernel has.
func (f *Filter) learnElement(e element) {
	f.refCount[e] = 0
	if e.value != "" {
		f.values[e.slot()] = e
	}
}

// forgetElements records that the kernel does not have these elements any more.
func (f *Filter) forgetElements(some []element) {
	for _, e := range some {
		delete(f.refCount, e)
		delete(f.values, e.slot())
	}
}

// transact adds and removes elements. The table of the family "inet" comes with its first element
// and goes with its last one.
func (f *Filter) transact(add, remove []element) error {
	added, removed := countRouted(add), countRouted(remove)
	if f.hasRouted == 0 && added > 0 {
		if err := f.declare(f.routed); err != nil {
			return err
		}
	}

	if f.hasRouted > 0 && f.hasRouted+added == removed {
		f.conn.DelTable(f.routed)
		remove = slices.DeleteFunc(slices.Clone(remove), func(e element) bool {
			return countRouted([]element{e}) > 0
		})
	}

	return f.send(add, remove)
}
