package netdev

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
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

func carriedOf(l *link) *Carried {
	a := l.Attrs()
	c := &Carried{
		Group: a.Group, GSOMaxSize: a.GSOMaxSize, GSOMaxSegs: a.GSOMaxSegs, GROMaxSize: a.GROMaxSize,
		GSOIPv4MaxSize: a.GSOIPv4MaxSize, GROIPv4MaxSize: a.GROIPv4MaxSize,
		Multicast: a.RawFlags&unix.IFF_MULTICAST != 0, LinkMode: l.linkMode, Broadcast: l.broadcast,
	}
	if a.Xdp != nil && a.Xdp.Attached {
		c.XDP = &XDP{Mode: a.Xdp.AttachMode, Program: a.Xdp.ProgId}
	}
	return c
}

// String is "none" or the program's number.
func (x *XDP) String() string {
	if x == nil {
		return "none"
	}
	return fmt.Sprint(x.Program)
}

// detachXDP takes a program away that the pod left. The kernel wants to be told the mode, and says nothing if there is no
// program of that mode.
func (e *Engine) detachXDP(index int, x *XDP) error {
	if x == nil {
		return nil
	}
	e.trace("detach XDP program")
	flags := map[uint32][]uint32{
		nl.XDP_ATTACHED_DRV: {nl.XDP_FLAGS_DRV_MODE}, nl.XDP_ATTACHED_SKB: {nl.XDP_FLAGS_SKB_MODE},
		nl.XDP_ATTACHED_HW: {unix.XDP_FLAGS_HW_MODE},
	}[x.Mode]
	several := flags == nil // or a mode of a newer kernel
	if several {
		flags = []uint32{nl.XDP_FLAGS_DRV_MODE, nl.XDP_FLAGS_SKB_MODE, unix.XDP_FLAGS_HW_MODE}
	}
	for _, f := range flags {
		noProgram := int32(-1)
		attr := nl.NewRtAttr(unix.IFLA_XDP|unix.NLA_F_NESTED, nil)
		attr.AddRtAttr(nl.IFLA_XDP_FD, nl.Uint32Attr(uint32(noProgram)))
		attr.AddRtAttr(nl.IFLA_XDP_FLAGS, nl.Uint32Attr(f))
		err := e.host.set(index, 0, 0, attr)
		if several || err == nil {
			continue // whether a program is left is seen afterwards
		}
		if errors.Is(err, unix.EBUSY) {
			err = fmt.Errorf("is held by a BPF link of the pod, which ends with the pod's program: %w", err)
		}
		return fmt.Errorf("detach XDP program %d: %w", x.Program, err)
	}
	return nil
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
