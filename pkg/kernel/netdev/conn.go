// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// conn speaks rtnetlink in one network namespace. Requests of several goroutines wait for each
// other, as they do in the kernel.
type conn struct {
	*links.Handle
	ns     netns.NsHandle
	cookie uint64
	isPod  bool // the namespace is that of a pod
	conf6  bool // the namespace's IPv6 sysctls can be restored
}

func dial(path string) (*conn, error) {
	ns, err := namespace.Open(path)
	if err != nil {
		return nil, err
	}

	c := &conn{ns: ns}
	if err := c.connect(); err != nil {
		_ = c.close()
		return nil, fmt.Errorf("network namespace %s: %w", path, err)
	}

	return c, nil
}

var errNotMounted = errors.New("is a plain file, no namespace is mounted on it")

func (c *conn) connect() (err error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(c.ns), &fs); err != nil {
		return err
	}
	if fs.Type != unix.NSFS_MAGIC {
		return errNotMounted
	}
	if c.Handle, err = links.Open(c.ns); err != nil {
		return fmt.Errorf("netlink: %w", err)
	}
	if c.cookie, err = unix.GetsockoptUint64(c.Socket().Socket.GetFd(), unix.SOL_SOCKET,
		unix.SO_NETNS_COOKIE); err != nil {
		return fmt.Errorf("cookie of the network namespace (needs Linux 5.14): %w", err)
	}

	return nil
}

func (c *conn) close() error {
	if c == nil {
		return nil
	}
	if c.Handle != nil {
		c.Handle.Close()
	}
	return c.ns.Close()
}

// set changes a netdev by one RTM_NEWLINK: the flags of the mask, and the attributes. do_setlink in
// net/core/rtnetlink.c has an order of its own: namespace, address, MTU, name, alias, flags, queue
// length. It stops at the first that fails, and does not undo the ones before.
func (c *conn) set(index int, flags, mask uint32, attributes ...*nl.RtAttr) error {
	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index, header.Flags, header.Change = int32(index), flags, mask
	_, err := request.Send(c.Socket(), unix.RTM_NEWLINK, unix.NLM_F_ACK, header, attributes...)
	return err
}

func text(kind int, value string) *nl.RtAttr { return nl.NewRtAttr(kind, nl.ZeroTerminated(value)) }

func number[T int | uint32](kind int, value T) *nl.RtAttr {
	return nl.NewRtAttr(kind, nl.Uint32Attr(uint32(value)))
}

// hardwareAddr is nil for no address.
func hardwareAddr(kind int, mac function.MAC) *nl.RtAttr {
	if mac == "" {
		return nil
	}
	return nl.NewRtAttr(kind, mac.HardwareAddr())
}

// ask is [links.Handle.Ask].
func (c *conn) ask(index int, attributes ...*nl.RtAttr) ([]byte, error) {
	return c.Ask(index, attributes...)
}

// link is a netdev in the namespace of a conn.
type link struct {
	Snapshot
	rawFlags uint32 // IFF_* of linux/if.h
	linkType uint16 // ARPHRD_* of linux/if_arp.h
	master   int    // index of the netdev that it is a port of, 0 for none
	// conf6 are all sysctls of net.ipv6.conf that rtnetlink tells (IFLA_INET6_CONF), by DEVCONF_*.
	conf6 []uint32
}

// at returns the link with the index or, if that is 0, with the name in the attributes. It is nil
// if there is none.
func (c *conn) at(index int, attributes ...*nl.RtAttr) (*link, error) {
	message, err := c.ask(index, attributes...)
	switch {
	case errors.Is(err, unix.ENODEV):
		return nil, nil
	case err != nil:
		return nil, err
	}

	attrs, err := links.Attributes(message)
	if err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}

	l, err := links.Parse(message)
	if err != nil {
		return nil, err
	}

	s := snapshotOf(l, attrs)
	conf, conf6, err := parseConf(attrs[unix.IFLA_AF_SPEC])
	if err != nil {
		return nil, fmt.Errorf("sysctls: %w", err)
	}

	if !c.conf6 {
		conf.IPv6 = nil
	}

	s.Conf = conf
	return &link{
		Snapshot: s, rawFlags: l.Attrs().RawFlags, linkType: nl.DeserializeIfInfomsg(message).Type,
		master: l.Attrs().MasterIndex, conf6: conf6,
	}, nil
}

// with returns the link that has the name or altname, or nil if there is none.
func (c *conn) with(name string) (*link, error) { return c.at(0, text(unix.IFLA_ALT_IFNAME, name)) }

// existing is [conn.at] with an error if there is no such link.
func (c *conn) existing(index int) (*link, error) {
	l, err := c.at(index)
	if err == nil && l == nil {
		return nil, errors.New("is not there any more")
	}
	return l, err
}

// named is [conn.with], with an error if there is no such link.
func (c *conn) named(name string) (*link, error) {
	if name == "" {
		return nil, ErrNoNetdev
	}
	l, err := c.with(name)
	if err == nil && l == nil {
		return nil, fmt.Errorf("%q: %w", name, ErrNoNetdev)
	}
	return l, err
}

// reference is a link for the calls of netlink.Handle that need no more than its index.
func reference(index int) netlink.Link {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}
}
