package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// Carried is what the kernel carries along with a netdev from one network namespace to the next, beside what a
// [Snapshot] has by itself. A pod with CAP_NET_ADMIN can change all of it.
type Carried struct {
	// Group is the number by which netdevs are changed together (IFLA_GROUP).
	Group uint32 `json:"group,omitempty"`
	// GSOMaxSize to GROIPv4MaxSize bound what the stack puts together, in bytes, and GSOMaxSegs in segments. They are 0
	// where the kernel does not tell: those of IPv4 before Linux 6.3.
	GSOMaxSize     uint32 `json:"gsoMaxSize,omitempty"`
	GSOMaxSegs     uint32 `json:"gsoMaxSegs,omitempty"`
	GROMaxSize     uint32 `json:"groMaxSize,omitempty"`
	GSOIPv4MaxSize uint32 `json:"gsoIPv4MaxSize,omitempty"`
	GROIPv4MaxSize uint32 `json:"groIPv4MaxSize,omitempty"`
	// Multicast is IFF_MULTICAST.
	Multicast bool `json:"multicast,omitempty"`
	// LinkMode is 1 for a netdev that stays dormant when it has a carrier (IF_LINK_MODE_DORMANT), else 0.
	LinkMode uint8 `json:"linkMode,omitempty"`
	// Broadcast is the address that frames to all have.
	Broadcast function.MAC `json:"broadcast,omitempty"`
	// XDP says that a program looks at every frame before the stack does. It is never set in a snapshot of the host's: a
	// netdev with one is not taken.
	XDP *XDP `json:"xdp,omitempty"`
}

// XDP is a program of the express data path.
type XDP struct {
	// Mode is an XDP_ATTACHED_* of linux/if_link.h.
	Mode uint32 `json:"mode"`
	// Program is the kernel's number of the program.
	Program uint32 `json:"program"`
}

func carriedOf(a *netlink.LinkAttrs, d details) *Carried {
	c := &Carried{
		Group: a.Group, GSOMaxSize: a.GSOMaxSize, GSOMaxSegs: a.GSOMaxSegs, GROMaxSize: a.GROMaxSize,
		GSOIPv4MaxSize: a.GSOIPv4MaxSize, GROIPv4MaxSize: a.GROIPv4MaxSize,
		Multicast: a.RawFlags&unix.IFF_MULTICAST != 0, LinkMode: d.linkMode, Broadcast: d.broadcast,
	}
	if a.Xdp != nil && a.Xdp.Attached {
		c.XDP = &XDP{Mode: a.Xdp.AttachMode, Program: a.Xdp.ProgId}
	}
	return c
}

// diff adds what now differs. A snapshot of an older agent does not know.
func (c *Carried) diff(d *differences, now *Carried) {
	if c == nil || now == nil {
		return
	}
	differs(d, "group", c.Group, now.Group)
	differs(d, "gso_max_size", c.GSOMaxSize, now.GSOMaxSize)
	differs(d, "gso_max_segs", c.GSOMaxSegs, now.GSOMaxSegs)
	differs(d, "gro_max_size", c.GROMaxSize, now.GROMaxSize)
	differs(d, "gso_ipv4_max_size", c.GSOIPv4MaxSize, now.GSOIPv4MaxSize)
	differs(d, "gro_ipv4_max_size", c.GROIPv4MaxSize, now.GROIPv4MaxSize)
	differs(d, "multicast", c.Multicast, now.Multicast)
	differs(d, "link mode", c.LinkMode, now.LinkMode)
	differs(d, "broadcast", c.Broadcast, now.Broadcast)
	differs(d, "XDP program", c.XDP.String(), now.XDP.String())
}

// String is "none" or the program's number.
func (x *XDP) String() string {
	if x == nil {
		return "none"
	}
	return fmt.Sprint(x.Program)
}

// undoCarried gives the netdev on the host back what it was. Of the sizes the IPv4 ones come last: the kernel sets them
// along with the others.
func (e *Engine) undoCarried(index int, before, now *Carried, up bool) error {
	if before == nil || now == nil {
		return nil
	}
	var errs []error
	set := func(differs bool, what string, kind int, data []byte) {
		if !differs {
			return
		}
		e.trace(what)
		if err := e.host.set(index, nl.NewRtAttr(kind, data)); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	if before.XDP == nil && now.XDP != nil {
		errs = append(errs, e.detachXDP(index, *now.XDP))
	}
	set(before.Group != now.Group, "group", unix.IFLA_GROUP, nl.Uint32Attr(before.Group))
	sizes := before.GSOMaxSize != now.GSOMaxSize || before.GROMaxSize != now.GROMaxSize
	set(before.GSOMaxSize != now.GSOMaxSize, "gso_max_size", unix.IFLA_GSO_MAX_SIZE, nl.Uint32Attr(before.GSOMaxSize))
	set(before.GSOMaxSegs != now.GSOMaxSegs, "gso_max_segs", unix.IFLA_GSO_MAX_SEGS, nl.Uint32Attr(before.GSOMaxSegs))
	set(before.GROMaxSize != now.GROMaxSize, "gro_max_size", unix.IFLA_GRO_MAX_SIZE, nl.Uint32Attr(before.GROMaxSize))
	set(before.GSOIPv4MaxSize != 0 && (sizes || before.GSOIPv4MaxSize != now.GSOIPv4MaxSize), "gso_ipv4_max_size",
		unix.IFLA_GSO_IPV4_MAX_SIZE, nl.Uint32Attr(before.GSOIPv4MaxSize))
	set(before.GROIPv4MaxSize != 0 && (sizes || before.GROIPv4MaxSize != now.GROIPv4MaxSize), "gro_ipv4_max_size",
		unix.IFLA_GRO_IPV4_MAX_SIZE, nl.Uint32Attr(before.GROIPv4MaxSize))
	set(before.Broadcast != now.Broadcast && before.Broadcast != "", "broadcast", unix.IFLA_BROADCAST, before.Broadcast.HardwareAddr())
	set(before.LinkMode != now.LinkMode, "link mode", unix.IFLA_LINKMODE, []byte{before.LinkMode})
	if before.LinkMode != now.LinkMode && up { // the state follows the mode when the netdev comes up
		errs = append(errs, e.host.changeFlags(index, 0, unix.IFF_UP))
	}
	if before.Multicast != now.Multicast {
		flag := uint32(0)
		if before.Multicast {
			flag = unix.IFF_MULTICAST
		}
		e.trace("multicast")
		errs = append(errs, e.host.changeFlags(index, flag, unix.IFF_MULTICAST))
	}
	return errors.Join(errs...)
}

// detachXDP takes a program away that the pod left. The kernel wants to be told the mode, and says nothing if there is no
// program of that mode.
func (e *Engine) detachXDP(index int, x XDP) error {
	e.trace("detach XDP program")
	modes := map[uint32][]uint32{
		nl.XDP_ATTACHED_DRV: {nl.XDP_FLAGS_DRV_MODE}, nl.XDP_ATTACHED_SKB: {nl.XDP_FLAGS_SKB_MODE},
		nl.XDP_ATTACHED_HW: {unix.XDP_FLAGS_HW_MODE},
	}[x.Mode]
	if modes == nil { // several, or a mode of a newer kernel
		modes = []uint32{nl.XDP_FLAGS_DRV_MODE, nl.XDP_FLAGS_SKB_MODE, unix.XDP_FLAGS_HW_MODE}
	}
	var errs []error
	for _, mode := range modes {
		fd := int32(-1)
		attr := nl.NewRtAttr(unix.IFLA_XDP|unix.NLA_F_NESTED, nil)
		attr.AddRtAttr(nl.IFLA_XDP_FD, nl.Uint32Attr(uint32(fd)))
		attr.AddRtAttr(nl.IFLA_XDP_FLAGS, nl.Uint32Attr(mode))
		err := e.host.set(index, attr)
		if errors.Is(err, unix.EBUSY) {
			err = fmt.Errorf("is held by a BPF link of the pod, which ends with the pod's program: %w", err)
		}
		if err != nil && len(modes) == 1 {
			errs = append(errs, fmt.Errorf("detach XDP program %d: %w", x.Program, err))
		}
	}
	return errors.Join(errs...)
}

// stacked are kinds of virtual netdevs that stay on top of a netdev which leaves their namespace, and go on to use it.
var stacked = []string{"vlan", "macvlan", "macvtap", "ipvlan", "ipvtap", "macsec"}

// dropStacked deletes what the pod made on top of the netdev, which would use it from the pod still.
func (e *Engine) dropStacked(pod *conn, index int) error {
	links, err := pod.all()
	if err != nil {
		return err
	}
	for _, l := range links {
		if l.Attrs().ParentIndex != index || l.Attrs().NetNsID >= 0 || !slices.Contains(stacked, l.Type()) {
			continue
		}
		e.trace("delete " + l.Attrs().Name + " on top of it")
		if err := pod.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("delete %s %s, which the pod made on top of it: %w", l.Type(), l.Attrs().Name, err)
		}
	}
	return nil
}

// details are what the kernel tells of a netdev and the netlink library does not.
type details struct {
	linkMode  uint8
	broadcast function.MAC
	conf      Conf
}

// details asks for them.
func (c *conn) details(index int) (d details, err error) {
	messages, err := c.query(unix.RTM_GETLINK, index)
	if err != nil {
		return d, err
	}
	for _, message := range messages {
		if len(message) < unix.SizeofIfInfomsg {
			return d, errors.New("link: the kernel's answer is too short")
		}
		attrs, err := attribute.Parse(message[unix.SizeofIfInfomsg:])
		if err != nil {
			return d, fmt.Errorf("link: %w", err)
		}
		d.linkMode = attrs.Uint8(unix.IFLA_LINKMODE)
		if attrs.Has(unix.IFLA_BROADCAST) {
			d.broadcast = macOf(attrs[unix.IFLA_BROADCAST])
		}
		if d.conf, err = parseConf(attrs[unix.IFLA_AF_SPEC]); err != nil {
			return d, err
		}
	}
	return d, nil
}

// query asks about a link and returns what the kernel answers.
func (c *conn) query(message, index int) ([][]byte, error) {
	req := c.request(message, index)
	req.Flags = unix.NLM_F_REQUEST
	return req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
}

// set changes a link by one attribute.
func (c *conn) set(index int, attribute nl.NetlinkRequestData) error {
	req := c.request(unix.RTM_NEWLINK, index)
	req.AddData(attribute)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// changeFlags sets the flags of the mask.
func (c *conn) changeFlags(index int, flags, mask uint32) error {
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: c.socket}
	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index, header.Flags, header.Change = int32(index), flags, mask
	req.AddData(header)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

func uint32s(data []byte) []uint32 {
	list := make([]uint32, 0, len(data)/4)
	for ; len(data) >= 4; data = data[4:] {
		list = append(list, binary.NativeEndian.Uint32(data))
	}
	return list
}
