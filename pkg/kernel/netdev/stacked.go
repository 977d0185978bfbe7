// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// stacked lists the kinds of upper netdevs that keep working when their lower netdev moves to
// another namespace. They send and receive its frames from any namespace.
var stacked = []string{"vlan", "macvlan", "macvtap", "ipvlan", "ipvtap", "macsec", childOfIPoIB}

// childOfIPoIB is the kind of the child interfaces of an InfiniBand netdev, and of the netdev itself
// (ipoib_link_ops of drivers/infiniband/ulp/ipoib/ipoib_netlink.c).
const childOfIPoIB = "ipoib"

// ownNamespace is IFLA_LINK_NETNSID of a netdev whose lower netdev is in the same namespace.
const ownNamespace = -1

// dropAltNames deletes altnames of a netdev. A pod may have added thousands, because the kernel
// limits only their total size, to the 64 KiB of an attribute.
func (e *Engine) dropAltNames(c *conn, index int, names []string) error {
	if len(names) == 0 {
		return nil
	}

	messages := make([]request.Message, len(names))
	for i, name := range names {
		list := nl.NewRtAttr(unix.IFLA_PROP_LIST|unix.NLA_F_NESTED, nil)
		list.AddRtAttr(unix.IFLA_ALT_IFNAME, nl.ZeroTerminated(name))
		messages[i] = request.Message{
			Type: unix.RTM_DELLINKPROP, Header: linkHeader(index), Attributes: []*nl.RtAttr{list},
		}
	}

	e.trace(fmt.Sprintf("remove %d altnames", len(names)))
	for i, err := range request.SendAll(context.Background(), c.Socket(), messages) {
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("remove altname %s: %w", names[i], err)
		}
	}

	return nil
}

func linkHeader(index int) *nl.IfInfomsg {
	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index = int32(index)
	return header
}

// stackedOn lists the netdevs in a namespace that are stacked on the netdev with the index. lowerNS
// is the id that the namespace has for the namespace of the lower netdev, or ownNamespace.
func stackedOn(c *conn, index, lowerNS int) ([]netlink.Link, error) {
	list, err := request.Consistent(c.LinkList)
	if err != nil {
		return nil, err
	}

	return slices.DeleteFunc(list, func(l netlink.Link) bool {
		return !isStacked(l, c.isPod, index, lowerNS)
	}), nil
}

// isStacked reports whether a netdev, which isPod says to be in a pod, is stacked on the netdev with
// the index: see [stackedOn].
func isStacked(l netlink.Link, isPod bool, index, lowerNS int) bool {
	a := l.Attrs()
	switch {
	case !slices.Contains(stacked, l.Type()):
		return false
	// The kernel does not report the lower netdev if the description of the upper netdev is too
	// large. In a pod such a netdev counts as stacked, because it is certainly the pod's. The netdev
	// of a device has no lower one.
	case a.ParentIndex == 0:
		return isPod && a.ParentDev == ""
	}
	return a.ParentIndex == index && a.NetNsID == lowerNS
}

// dropped is the number of netdevs that are deleted at once. The kernel waits for an RCU grace
// period only once for all of them.
const dropped = 256

// dropStacked deletes the netdevs in a namespace that are stacked on a netdev: see [stackedOn]. The
// kernel also deletes what is stacked on these netdevs. If ctx ends, the error says how many
// netdevs are left, and the next call continues.
func (e *Engine) dropStacked(ctx context.Context, c *conn, index, lowerNS int) error {
	left, err := stackedOn(c, index, lowerNS)
	if err != nil || len(left) == 0 {
		return err
	}

	e.trace(fmt.Sprintf("delete %d netdevs on top of it, such as %s", len(left),
		left[0].Attrs().Name))

	for len(left) > 0 {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("%d netdevs that the pod made on top of it are left: %w",
				len(left), err)
		}

		part := left[:min(dropped, len(left))]
		if err := deleteAll(ctx, c, part); err != nil {
			what := part[0].Type() + " " + part[0].Attrs().Name
			return fmt.Errorf("delete %s and other netdevs on top of it, %d in all: %w", what,
				len(left), err)
		}

		left = left[len(part):]
	}

	return nil
}

// deleteAll puts the netdevs into a group of their own and deletes the group by one message.
func deleteAll(ctx context.Context, c *conn, list []netlink.Link) error {
	if len(list) == 1 {
		return unlessGone(c.library(func(h *netlink.Handle) error { return h.LinkDel(list[0]) }))
	}

	group := number(unix.IFLA_GROUP, rand.Uint32()|1<<31) // unused by administrators
	messages := make([]request.Message, len(list))
	for i, l := range list {
		messages[i] = request.Message{
			Type: unix.RTM_NEWLINK, Header: linkHeader(l.Attrs().Index),
			Attributes: []*nl.RtAttr{group},
		}
	}

	for _, err := range request.SendAll(ctx, c.Socket(), messages) {
		if unlessGone(err) != nil {
			return err
		}
	}

	_, err := request.Send(c.Socket(), unix.RTM_DELLINK, unix.NLM_F_ACK, linkHeader(0), group)
	return unlessGone(err)
}

func unlessGone(err error) error {
	if errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}
