// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// conn speaks rtnetlink in one network namespace. Several goroutines may use it at once. Their
// requests are serialized, as they are in the kernel.
type conn struct {
	*links.Reader
	ns     netns.NsHandle
	cookie uint64
	isPod  bool // the namespace belongs to a pod
	conf6  bool // the IPv6 sysctls of the namespace can be written

	// opened is the handle of [conn.library]. It is nil until it is needed, because a release does
	// not need it.
	opening sync.Mutex
	opened  *netlink.Handle
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
	if c.Reader, err = links.OpenReader(c.ns); err != nil {
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
	if c.opened != nil {
		c.opened.Close()
	}
	if c.Reader != nil {
		c.Reader.Close()
	}
	return c.ns.Close()
}

// library calls use with a handle of the netlink library for the namespace.
func (c *conn) library(use func(*netlink.Handle) error) error {
	handle, err := c.openLibrary()
	if err != nil {
		return fmt.Errorf("netlink: %w", err)
	}
	return use(handle)
}

// openLibrary opens the handle of the netlink library, unless it is open already.
func (c *conn) openLibrary() (*netlink.Handle, error) {
	c.opening.Lock()
	defer c.opening.Unlock()
	if c.opened != nil {
		return c.opened, nil
	}

	handle, err := links.Library(c.ns)
	if err == nil {
		c.opened = handle
	}

	return handle, err
}

// set changes a netdev by one RTM_NEWLINK: the flags in mask, and the attributes.
//
// The kernel applies the parts in its own order: namespace, address, MTU, name, alias, flags, queue
// length (do_setlink of net/core/rtnetlink.c). It stops at the first part that fails and does not
// undo the parts before it.
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

// hardwareAddr returns the attribute of an address, or nil if mac is "".
func hardwareAddr(kind int, mac function.MAC) *nl.RtAttr {
	if mac == "" {
		return nil
	}
	return nl.NewRtAttr(kind, mac.HardwareAddr())
}

// ask calls [links.Reader.Ask].
func (c *conn) ask(index int, attributes ...*nl.RtAttr) ([]byte, error) {
	return c.Ask(index, attributes...)
}

// link is a netdev in the namespace of a conn.
type link struct {
	Snapshot
	rawFlags uint32 // IFF_* of include/uapi/linux/if.h
	linkType uint16 // ARPHRD_* of include/uapi/linux/if_arp.h
	master   int    // ifindex of the netdev that this netdev is a port of, or 0
	// conf6 holds all sysctls of net.ipv6.conf that rtnetlink reports (IFLA_INET6_CONF), indexed by
	// DEVCONF_*.
	conf6 []uint32
}

func (l *link) infiniBand() bool { return l.linkType == unix.ARPHRD_INFINIBAND }

// at returns the link with the index. If index is 0, the attributes name the link. It returns nil
// without an error if there is no such link.
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

// with returns the link that has the name or altname, or nil without an error if there is no such
// link.
func (c *conn) with(name string) (*link, error) { return c.at(0, text(unix.IFLA_ALT_IFNAME, name)) }

// existing returns the link with the index, or an error if there is no such link.
func (c *conn) existing(index int) (*link, error) {
	l, err := c.at(index)
	if err == nil && l == nil {
		return nil, errors.New("is not there any more")
	}
	return l, err
}

// named returns the link that has the name or altname, or an error if there is no such link.
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

// reference returns a link for functions of netlink.Handle that use nothing but its index.
func reference(index int) netlink.Link {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}
}
