package netdev

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// arpNotify is IPV4_DEVCONF_ARP_NOTIFY of linux/ip.h.
const arpNotify = 22

// announceItself has the kernel tell the neighbours of the interface's addresses whenever it comes up, or gets another
// MAC: an address may have been another pod's a moment ago. That is arp_notify and ndisc_notify of the kernel's
// ip-sysctl.rst. The addresses are there already. Where it cannot be set, neighbours learn by their own timeouts.
func (e *Engine) announceItself(pod *conn, index int, name string, addresses []netip.Prefix) {
	is4 := func(p netip.Prefix) bool { return p.Addr().Is4() }
	if slices.ContainsFunc(addresses, is4) {
		e.trace("arp_notify")
		_ = pod.set(index, 0, 0, conf4(arpNotify, 1))
	}
	if slices.ContainsFunc(addresses, func(p netip.Prefix) bool { return !is4(p) }) {
		e.trace("ndisc_notify")
		_ = e.writeConf6(pod, name, "ndisc_notify", 1)
	}
}

// Announce has the kernel of an attached interface tell its neighbours once more, when it has a carrier: what it told when
// the interface came up is lost without. It waits until ctx ends, and is over when the pod or the interface is.
func (e *Engine) Announce(ctx context.Context, place Place, observed Observed) error {
	if len(observed.Addresses) == 0 || observed.MAC == "" {
		return nil
	}
	pod, err := e.dialPlace(place)
	if pod == nil || err != nil {
		return err
	}
	defer pod.close()
	if err := awaitCarrier(ctx, pod, observed.Index); err != nil {
		return fmt.Errorf("interface %s: %w", observed.Name, err)
	}
	// The MAC that it has: the kernel notifies of it all the same (NETDEV_CHANGEADDR), and asks no driver.
	if err := pod.set(observed.Index, 0, 0, hardwareAddr(unix.IFLA_ADDRESS, observed.MAC)); err != nil {
		return fmt.Errorf("interface %s: announce its addresses: %w", observed.Name, err)
	}
	return nil
}

// carrierLook is how often it is looked whether ctx has ended while the kernel says nothing. The socket must not be closed
// under a read: it would stay, and with it the pod's namespace.
const carrierLook = 200 * time.Millisecond

// awaitCarrier returns when the link has a carrier.
func awaitCarrier(ctx context.Context, pod *conn, index int) error {
	// Before the first look, so that nothing is missed.
	changes, err := nl.SubscribeAt(pod.ns, netns.None(), unix.NETLINK_ROUTE, unix.RTNLGRP_LINK)
	if err != nil {
		return fmt.Errorf("carrier: %w", err)
	}
	defer changes.Close()
	timeout := unix.NsecToTimeval(int64(carrierLook))
	if err := changes.SetReceiveTimeout(&timeout); err != nil {
		return fmt.Errorf("carrier: %w", err)
	}
	for {
		l, err := pod.existing(index)
		if err != nil || l.Attrs().RawFlags&unix.IFF_LOWER_UP != 0 {
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("has no carrier yet: %w", context.Cause(ctx))
		}
		if _, _, err := changes.Receive(); err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("carrier: %w", err)
		}
	}
}
