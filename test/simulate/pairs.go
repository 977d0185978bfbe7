// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Uplink is the xPU's port to a network: a veth pair from the xPU's namespace to a bridge.
type Uplink struct {
	// Name in the xPU's namespace, "p0" if empty.
	Name string
	// Address on it, with prefix length; none if it is the zero value.
	Address netip.Prefix
	// NetNS is the path of the network namespace that the bridge is in. It must be there.
	NetNS string
	// Bridge is made if it is missing. It stays, because other hosts use it too.
	Bridge string
}

// pairs makes veth pairs with one end in the host's namespace and the other in the xPU's.
type pairs struct {
	hostNS, xpuNS netns.NsHandle
	host, xpu     *netlink.Handle
	// xpuID is the number that the host's namespace has for the xPU's.
	xpuID  int
	uplink netlink.Link // its end in the xPU's namespace, nil if there is none
}

// pair is a veth pair. Its representor's ifindex is what it is known by: that end stays where it
// is.
type pair struct {
	representor int
	up          bool // whether the representor is up
	master      int  // ifindex of the bridge that the representor is in, 0 if there is none
	netdev      int  // ifindex of the other end while it is on the host, else 0
}

// wanted says what a pair is to be like.
type wanted struct {
	name        string // on the host
	representor string
	altNames    []string // of the representor
	mac         net.HardwareAddr
	up          bool
}

func openPairs(config Config) (_ *pairs, err error) {
	p := &pairs{hostNS: netns.None(), xpuNS: netns.None()}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()

	if p.hostNS, p.host, err = openNamespace(config.HostNS); err != nil {
		return nil, fmt.Errorf("host: %w", err)
	}
	if p.xpuNS, p.xpu, err = openNamespace(config.XPUNS); err != nil {
		return nil, fmt.Errorf("xPU: %w", err)
	}
	if p.hostNS.Equal(p.xpuNS) {
		return nil, errors.New("the network namespaces of host and xPU must not be the same")
	}
	if p.xpuID, err = namespaceID(p.host, int(p.xpuNS)); err != nil {
		return nil, fmt.Errorf("number of the xPU's network namespace: %w", err)
	}

	if config.Uplink != nil {
		if err := p.addUplink(*config.Uplink, config.number()); err != nil {
			return nil, fmt.Errorf("uplink: %w", err)
		}
	}

	return p, nil
}

func openNamespace(path string) (netns.NsHandle, *netlink.Handle, error) {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return netns.None(), nil, fmt.Errorf("network namespace %s: %w", path, err)
	}

	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return ns, nil, fmt.Errorf("network namespace %s: netlink: %w", path, err)
	}
	return ns, handle, nil
}

// namespaceID returns the number of another namespace, which it gives out if there is none yet.
func namespaceID(h *netlink.Handle, fd int) (int, error) {
	id, err := h.GetNetNsIdByFd(fd)
	if err != nil || id >= 0 {
		return id, err
	}
	if err := h.SetNetNsIdByFd(fd, -1); err != nil && !errors.Is(err, unix.EEXIST) {
		return 0, err
	}
	return h.GetNetNsIdByFd(fd)
}

func (p *pairs) close() error {
	var err error
	if p.uplink != nil {
		err = ignoreMissing(p.xpu.LinkDel(p.uplink))
	}

	for _, handle := range []*netlink.Handle{p.host, p.xpu} {
		if handle != nil {
			_ = handle.Close()
		}
	}

	for _, ns := range []netns.NsHandle{p.hostNS, p.xpuNS} {
		if ns.IsOpen() {
			_ = ns.Close()
		}
	}

	return err
}

// add makes a pair; in place of a lost one if old is not the zero value, with all that the
// representor was. It is made from the xPU's side, where the ifindex is to stay the same.
func (p *pairs) add(old pair, w wanted) (pair, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = w.representor, old.representor
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: w.name, PeerHardwareAddr: w.mac,
		PeerNamespace: netlink.NsFd(p.hostNS)}
	err := p.xpu.LinkAdd(veth)
	if errors.Is(err, unix.EBUSY) { // the ifindex was given out meanwhile
		veth.Index = 0
		err = p.xpu.LinkAdd(veth)
	}
	if err != nil {
		return old, err
	}

	now := pair{representor: veth.Index, up: w.up}
	if old.representor != 0 {
		now.up, now.master = old.up, old.master
	}

	for _, name := range w.altNames {
		if err := p.xpu.LinkAddAltName(veth, name); err != nil {
			return now, fmt.Errorf("representor %s: altname %s: %w", w.representor, name, err)
		}
	}

	if now.master != 0 {
		if err := p.xpu.LinkSetMasterByIndex(veth, now.master); err != nil {
			return now, fmt.Errorf("representor %s: back into its bridge: %w", w.representor, err)
		}
	}

	if now.up {
		if err := p.setRepresentor(now, true); err != nil {
			return now, err
		}
	}

	if !w.up {
		return now, nil
	}

	netdev, err := p.netdev(now)
	if err == nil && netdev != nil {
		err = p.host.LinkSetUp(netdev)
	}
	if err != nil {
		return now, fmt.Errorf("netdev %s: up: %w", w.name, err)
	}

	return now, nil
}

// netdev finds the host's end of a pair, nil if it is not on the host.
func (p *pairs) netdev(of pair) (netlink.Link, error) {
	representor, err := p.xpu.LinkByIndex(of.representor)
	if err != nil {
		return nil, err
	}

	// The other end may be in another namespace, where the same ifindex means another netdev.
	link, err := p.host.LinkByIndex(representor.Attrs().ParentIndex)
	if ignoreMissing(err) != nil {
		return nil, err
	}
	if err != nil || p.representorOf(link) != of.representor {
		return nil, nil
	}

	return link, nil
}

// representorOf is the ifindex, in the xPU's namespace, of the other end of a netdev of the host; 0
// if that is not where the other end is.
func (p *pairs) representorOf(link netlink.Link) int {
	if link.Type() != "veth" || link.Attrs().NetNsID != p.xpuID {
		return 0
	}
	return link.Attrs().ParentIndex
}

func (p *pairs) setRepresentor(of pair, up bool) error {
	set := p.xpu.LinkSetDown
	if up {
		set = p.xpu.LinkSetUp
	}
	if err := set(reference(of.representor)); err != nil {
		return fmt.Errorf("representor: set up to %t: %w", up, err)
	}
	return nil
}

// remove destroys both ends, wherever the host's is.
func (p *pairs) remove(of pair) error {
	if of.representor == 0 {
		return nil
	}
	return ignoreMissing(p.xpu.LinkDel(reference(of.representor)))
}

// announce makes the kernel tell of a netdev of the host although nothing changes: setting the MAC
// address that it has is NETDEV_CHANGEADDR, which becomes RTM_NEWLINK also while it is down
// (rtnetlink_event in net/core/rtnetlink.c).
func (p *pairs) announce(index int) error {
	link, err := p.host.LinkByIndex(index)
	if err != nil {
		return ignoreMissing(err)
	}
	return ignoreMissing(p.host.LinkSetHardwareAddr(link, link.Attrs().HardwareAddr))
}

func (p *pairs) addUplink(u Uplink, number uint32) (err error) {
	if u.Name == "" {
		u.Name = "p0"
	}

	ns, network, err := openNamespace(u.NetNS)
	if ns.IsOpen() {
		defer ns.Close()
	}

	if err != nil {
		return err
	}
	defer network.Close()

	bridge, err := ensureBridge(network, u.Bridge)
	if err != nil {
		return fmt.Errorf("bridge %s: %w", u.Bridge, err)
	}

	attrs := netlink.NewLinkAttrs()
	attrs.Name = u.Name
	far := fmt.Sprintf("%s-%06x", u.Name, number&0xffffff)
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: far, PeerNamespace: netlink.NsFd(ns)}
	if err := p.xpu.LinkAdd(veth); err != nil {
		return fmt.Errorf("%s: %w", u.Name, err)
	}

	p.uplink = veth
	peer, err := network.LinkByName(far)
	if err != nil {
		return fmt.Errorf("%s: %w", far, err)
	}
	if err := errors.Join(network.LinkSetMaster(peer, bridge),
		network.LinkSetUp(peer)); err != nil {
		return fmt.Errorf("%s: %w", far, err)
	}

	if u.Address.IsValid() {
		address := &netlink.Addr{IPNet: &net.IPNet{
			IP:   u.Address.Addr().AsSlice(),
			Mask: net.CIDRMask(u.Address.Bits(), u.Address.Addr().BitLen()),
		}}
		if err := p.xpu.AddrAdd(veth, address); err != nil {
			return fmt.Errorf("%s: address %s: %w", u.Name, u.Address, err)
		}
	}

	if err := p.xpu.LinkSetUp(veth); err != nil {
		return fmt.Errorf("%s: up: %w", u.Name, err)
	}

	return nil
}

// ensureBridge returns the bridge, which it makes if needed. It does not snoop: multicast goes to
// all hosts.
func ensureBridge(h *netlink.Handle, name string) (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	snooping := false
	bridge := &netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &snooping}
	if err := h.LinkAdd(bridge); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, err
	}

	link, err := h.LinkByName(name)
	if err != nil {
		return nil, err
	}
	if link.Type() != "bridge" {
		return nil, fmt.Errorf("is a %s: must be a bridge", link.Type())
	}

	return link, h.LinkSetUp(link)
}

// reference is a link for calls that need no more than its ifindex.
func reference(index int) netlink.Link {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}
}

func ignoreMissing(err error) error {
	if missing := (netlink.LinkNotFoundError{}); errors.As(err, &missing) ||
		errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}
