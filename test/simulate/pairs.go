// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Uplink is the xPU's port to a network: a veth pair from the xPU's namespace to a bridge.
type Uplink struct {
	// Name in the xPU's namespace; "p0" if empty.
	Name string
	// Address of the port, with prefix length; the zero value means none.
	Address netip.Prefix
	// NetNS is the path of the bridge's network namespace, which must exist.
	NetNS string
	// Bridge is created if it does not exist. It is never deleted, because other hosts use it too.
	Bridge string
}

// pairs creates veth pairs between the host's namespace and the xPU's.
type pairs struct {
	hostNS, xpuNS netns.NsHandle
	host, xpu     *netlink.Handle
	// xpuID is the id of the xPU's namespace in the host's namespace.
	xpuID  int
	uplink netlink.Link // the end in the xPU's namespace; nil if there is none
}

// pair is a veth pair. It is identified by the ifindex of the representor, because that end never
// moves.
type pair struct {
	representor int
	up          bool // the representor is up
	master      int  // ifindex of the representor's bridge; 0 if it has none
	netdev      int  // ifindex of the other end while it is on the host, otherwise 0
}

// pairSpec specifies a pair.
type pairSpec struct {
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

// namespaceID returns the id of another namespace, which it assigns if there is none yet.
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

// add creates a pair. If old is not the zero value, the new pair replaces that lost one, with the
// same state of the representor. It is created from the xPU's side, because the representor's
// ifindex must stay the same.
func (p *pairs) add(old pair, w pairSpec) (pair, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = w.representor, old.representor
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: w.name, PeerHardwareAddr: w.mac,
		PeerNamespace: netlink.NsFd(p.hostNS)}
	err := p.xpu.LinkAdd(veth)
	if errors.Is(err, unix.EBUSY) { // the ifindex was taken meanwhile
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

// netdev returns the host's end of a pair, or nil if it is not on the host.
func (p *pairs) netdev(of pair) (netlink.Link, error) {
	representor, err := p.xpu.LinkByIndex(of.representor)
	if err != nil {
		return nil, err
	}

	// The other end may be in another namespace, where the ifindex belongs to another netdev.
	link, err := p.host.LinkByIndex(representor.Attrs().ParentIndex)
	if ignoreMissing(err) != nil {
		return nil, err
	}
	if err != nil || p.representorOf(link) != of.representor {
		return nil, nil
	}

	return link, nil
}

// representorOf returns the ifindex of the representor of a netdev on the host, or 0 if its other
// end is not in the xPU's namespace.
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

// remove deletes both ends, wherever the host's end is.
func (p *pairs) remove(of pair) error {
	if of.representor == 0 {
		return nil
	}
	return ignoreMissing(p.xpu.LinkDel(reference(of.representor)))
}

// representorName matches the names of all representors of simulations.
var representorName = regexp.MustCompile(`^pf[0-9]+(hpf|vf[0-9]+)$`)

// removeLeft deletes the pairs that a killed simulation left in the xPU's namespace.
func (p *pairs) removeLeft() error {
	links, err := p.xpu.LinkList()
	if err != nil {
		return err
	}

	var errs []error
	for _, link := range links {
		if link.Type() == "veth" && representorName.MatchString(link.Attrs().Name) {
			errs = append(errs, ignoreMissing(p.xpu.LinkDel(link)))
		}
	}
	return errors.Join(errs...)
}

// announce makes the kernel send a message about a netdev on the host without a change. Setting the
// current MAC address again is NETDEV_CHANGEADDR, which causes RTM_NEWLINK even while the netdev is
// down (rtnetlink_event in net/core/rtnetlink.c).
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

// ensureBridge returns the bridge, creating it if needed. It does not snoop, so multicast reaches
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

// reference returns a link for calls that need only its ifindex.
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
