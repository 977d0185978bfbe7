// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
)

// VRF is a routing domain: the networks whose gateways are in it reach each other, and no others.
type VRF struct {
	ID string
	// Loopback is an address of the VRF itself. It is zero if the VRF has none.
	Loopback netip.Addr
}

func vrfName(id string) string { return netdevName("vrf-", id) }

// The routing tables of the agent's VRFs have numbers from firstTable to before lastTable. They
// begin with the letters "opi". A machine's own tables have small numbers.
const (
	firstTable = 0x6f706900
	lastTable  = firstTable + 1<<16
)

// tables knows the routing tables of the agent's VRFs. A VRF keeps its table as long as its netdev
// exists. The netdev itself says which it is. The data plane writes tables while Watch reads them.
type tables struct {
	mu    sync.RWMutex
	byVRF map[string]uint32
	vrfs  map[uint32]string // by table
	next  uint32            // where to look for a free one; Watch does not read it
}

func newTables() *tables {
	return &tables{byVRF: map[string]uint32{}, vrfs: map[uint32]string{}, next: firstTable}
}

// set records the table of a VRF. 0 says that it has none.
func (t *tables) set(vrf string, table uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.vrfs, t.byVRF[vrf])
	delete(t.byVRF, vrf)
	if table != 0 {
		t.byVRF[vrf], t.vrfs[table] = table, vrf
	}
}

// of returns the table of a VRF, or 0.
func (t *tables) of(vrf string) uint32 {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.byVRF[vrf]
}

// vrfOf returns the VRF that has a table, or "".
func (t *tables) vrfOf(table uint32) string {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.vrfs[table]
}

// free returns a table that no VRF of the agent uses.
func (t *tables) free() uint32 {
	for t.vrfOf(t.next) != "" {
		t.skip()
	}
	return t.next
}

// skip makes free return another table.
func (t *tables) skip() {
	if t.next++; t.next == lastTable {
		t.next = firstTable
	}
}

// EnsureVRF makes a VRF.
func (p *Plane) EnsureVRF(v VRF) error {
	link, err := p.ensureVRFNetdev(v.ID)
	if err != nil {
		return err
	}

	var loopback []netip.Prefix
	if v.Loopback.IsValid() {
		loopback = append(loopback, netip.PrefixFrom(v.Loopback, v.Loopback.BitLen()))
	}

	if err := p.forgetVRFs(v.ID, link.Attrs().Index); err != nil {
		return err
	}

	p.owners.set(link.Attrs().Index, Object{KindVRF, v.ID})
	if err := p.filter.SetVRF(link.Attrs().Index, addressesOf(loopback)); err != nil {
		return linkError(err, link, "protect the machine")
	}
	if err := p.closeTable(p.tables.of(v.ID)); err != nil {
		return linkError(err, link, "end of its routes")
	}
	if err := p.setIPv4(link, ipv4Routing); err != nil {
		return err
	}
	if err := p.up(link); err != nil {
		return err
	}

	return p.setAddresses(link, loopback)
}

// ensureVRFNetdev returns the netdev of a VRF, and makes it with an unused table if it is missing.
func (p *Plane) ensureVRFNetdev(id string) (netlink.Link, error) {
	link, err := p.find(vrfName(id))
	if err != nil {
		return nil, err
	}

	attrs := netlink.NewLinkAttrs()
	attrs.Name = vrfName(id)
	want := &netlink.Vrf{LinkAttrs: attrs, Table: p.tables.of(id)}
	if link == nil && want.Table == 0 {
		if want.Table, err = p.emptyTable(); err != nil {
			return nil, err
		}
	}

	if link, err = p.ensure(want, id); err != nil {
		if errors.Is(err, unix.EOPNOTSUPP) {
			err = fmt.Errorf("%w: the kernel has no VRFs (CONFIG_NET_VRF, module vrf)", err)
		}
		return nil, err
	}

	if vrf, ok := link.(*netlink.Vrf); ok {
		p.tables.set(id, vrf.Table)
	}

	return link, nil
}

// emptyTable returns a routing table that no VRF of the agent uses and that has no routes, because
// another program may use tables with such numbers too.
func (p *Plane) emptyTable() (uint32, error) {
	const tries = 100
	for range tries {
		table, used := p.tables.free(), false
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			routes, err := p.hasRoutes(family, table)
			if err != nil {
				return 0, fmt.Errorf("routing table %d: %w", table, err)
			}
			used = used || routes
		}

		if !used {
			return table, nil
		}
		p.tables.skip()
	}
	return 0, fmt.Errorf("routing tables %d and before are in use by other programs",
		p.tables.next)
}

// hasRoutes reports whether a routing table has routes.
func (c *conn) hasRoutes(family uint8, table uint32) (bool, error) {
	header := &nl.RtMsg{RtMsg: unix.RtMsg{Family: family}}
	messages, err := request.Send(&c.strict, unix.RTM_GETROUTE, unix.NLM_F_DUMP, header,
		nl.NewRtAttr(unix.RTA_TABLE, nl.Uint32Attr(table)))
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EAFNOSUPPORT) ||
		errors.Is(err, unix.EOPNOTSUPP) {
		return false, nil // there is no such table, or no such family
	}

	// Before Linux 4.20 the list has the routes of all tables.
	for _, m := range messages {
		if of, known := tableOf(m); known && of == table {
			return true, err
		}
	}

	return false, err
}

// lastMetric is the metric of the route that ends a VRF's table (Documentation/networking/vrf.rst).
// All other routes are preferred.
const lastMetric = 4278198272

// endOf returns the route that ends a table: without it, the kernel would look for a packet of the
// VRF in the machine's own table too.
func endOf(table uint32, family int) *netlink.Route {
	everything := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	if family == unix.AF_INET6 {
		everything = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	}
	return &netlink.Route{
		Table: int(table), Type: unix.RTN_UNREACHABLE, Dst: everything, Family: family,
		Priority: lastMetric,
	}
}

// closeTable adds the routes that end a table. The kernel answers EEXIST if they are there.
func (p *Plane) closeTable(table uint32) error {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		err := p.handle.RouteAdd(endOf(table, family))
		if family == unix.AF_INET6 && (errors.Is(err, unix.EAFNOSUPPORT) ||
			errors.Is(err, unix.EOPNOTSUPP)) {
			continue // the kernel has no IPv6
		}
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("routing table %d: %w", table, err)
		}
	}
	return nil
}

// RemoveVRF removes a VRF. Its gateways must have been removed.
func (p *Plane) RemoveVRF(id string) error {
	link, err := p.find(vrfName(id))
	if err != nil {
		return err
	}
	if link != nil && link.Type() == "vrf" && link.Attrs().Alias == aliasPrefix+id {
		if err := p.removeVRFNetdev(link); err != nil {
			return err
		}
	}

	if err := p.forgetVRFs(id, 0); err != nil {
		return err
	}

	table := p.tables.of(id) // of a netdev that another program has removed
	p.tables.set(id, 0)

	return p.openTable(table)
}

// forgetVRFs ends the filter of the netdevs that a VRF had before its current one.
func (p *Plane) forgetVRFs(id string, current int) error {
	for _, index := range p.owners.netdevsOf(Object{KindVRF, id}) {
		if index == current {
			continue
		}
		if err := p.filter.RemoveVRF(index); err != nil {
			return err
		}
		p.owners.remove(index)
	}
	return nil
}

// openTable removes the routes that end a table.
func (p *Plane) openTable(table uint32) error {
	if table == 0 {
		return nil
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		err := p.handle.RouteDel(endOf(table, family))
		if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.EAFNOSUPPORT) &&
			!errors.Is(err, unix.EOPNOTSUPP) {
			return fmt.Errorf("routing table %d: %w", table, err)
		}
	}
	return nil
}

// removeVRFNetdev removes the netdev of a VRF, and first the routes that end its table, because the
// kernel keeps them without it. The machine stays protected until the netdev is gone.
func (p *Plane) removeVRFNetdev(link netlink.Link) error {
	if vrf, ok := link.(*netlink.Vrf); ok {
		if err := p.openTable(vrf.Table); err != nil {
			return linkError(err, link, "end of its routes")
		}
	}

	index := link.Attrs().Index
	if err := p.remove(link); err != nil {
		return err
	}

	return p.filter.RemoveVRF(index)
}

// openUnusedTables removes the routes that end the tables of VRFs that do not exist any more.
func (p *Plane) openUnusedTables() error {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		header := &nl.RtMsg{RtMsg: unix.RtMsg{Family: family, Type: unix.RTN_UNREACHABLE}}
		messages, err := request.Send(&p.strict, unix.RTM_GETROUTE, unix.NLM_F_DUMP, header)
		if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
			continue
		}
		if err != nil {
			return fmt.Errorf("list unreachable routes: %w", err)
		}

		for _, m := range messages {
			table, ends := tableEndedBy(m)
			if !ends || p.tables.vrfOf(table) != "" {
				continue
			}
			if err := p.openTable(table); err != nil {
				return err
			}
		}
	}
	return nil
}

// tableEndedBy returns the table of the agent's that a route ends, if it is such a route. The
// message is the body of an RTM_NEWROUTE or RTM_DELROUTE.
func tableEndedBy(message []byte) (table uint32, ends bool) {
	if len(message) < unix.SizeofRtMsg {
		return 0, false
	}
	attrs, err := attribute.Parse(message[unix.SizeofRtMsg:])
	if err != nil {
		return 0, false
	}

	table = attrs.Uint32(unix.RTA_TABLE)
	kind := nl.DeserializeRtMsg(message).Type
	return table, kind == unix.RTN_UNREACHABLE && attrs.Uint32(unix.RTA_PRIORITY) == lastMetric &&
		firstTable <= table && table < lastTable
}

// tableOf returns the table of a route. The message is the body of an RTM_NEWROUTE.
func tableOf(message []byte) (table uint32, known bool) {
	if len(message) < unix.SizeofRtMsg {
		return 0, false
	}
	attrs, err := attribute.Parse(message[unix.SizeofRtMsg:])
	return attrs.Uint32(unix.RTA_TABLE), err == nil && attrs.Has(unix.RTA_TABLE)
}

// setAddresses gives a netdev these addresses and no others. It needs no duplicate address
// detection, because nobody else may have an address of a gateway.
func (p *Plane) setAddresses(link netlink.Link, want []netip.Prefix) error {
	have, err := p.addresses(link.Attrs().Index, unix.AF_UNSPEC)
	if err != nil {
		return linkError(err, link, "addresses")
	}

	for _, address := range have {
		if slices.Contains(want, address) {
			continue
		}
		err := p.handle.AddrDel(link, &netlink.Addr{IPNet: netaddr.ToIPNet(address)})
		if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return linkError(err, link, "remove %s", address)
		}
	}

	for _, address := range want {
		if slices.Contains(have, address) {
			continue
		}
		err := p.handle.AddrAdd(link, &netlink.Addr{
			IPNet: netaddr.ToIPNet(address), Flags: unix.IFA_F_NODAD,
		})
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return linkError(err, link, "add %s", address)
		}
	}

	return nil
}

func addressesOf(prefixes []netip.Prefix) []netip.Addr {
	var addresses []netip.Addr
	for _, p := range prefixes {
		addresses = append(addresses, p.Addr())
	}
	return addresses
}
