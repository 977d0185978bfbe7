package netdev

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
)

// conn speaks rtnetlink in one network namespace, whatever thread uses it. It may be used by several goroutines at
// once; their requests go one after the other, as they do in the kernel.
type conn struct {
	*netlink.Handle
	// socket is for the messages that Handle cannot send.
	socket *nl.SocketHandle
	cookie uint64
}

func dial(ns netns.NsHandle) (_ *conn, err error) {
	// The family has to be named: without, the handle also wants XFRM, which not every kernel has loaded.
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	handle.DisableVFInfoCollection() // conn.vf asks, and only where it matters
	socket, err := nl.GetNetlinkSocketAt(ns, netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		handle.Close()
		return nil, fmt.Errorf("netlink: %w", err)
	}
	c := &conn{Handle: handle, socket: &nl.SocketHandle{Socket: socket}}
	if c.cookie, err = unix.GetsockoptUint64(socket.GetFd(), unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); err != nil {
		c.close()
		return nil, fmt.Errorf("cookie of the network namespace (needs Linux 5.14): %w", err)
	}
	_ = socket.SetExtAck(true) // the kernel's own words in errors, where it has some
	return c, nil
}

// dialPath opens the namespace that a path names.
func dialPath(path string) (*conn, error) {
	ns, err := namespace.Open(path)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(ns), &fs); err != nil {
		return nil, fmt.Errorf("network namespace %s: %w", path, err)
	}
	if fs.Type != unix.NSFS_MAGIC {
		return nil, fmt.Errorf("network namespace %s: %w", path, errNotMounted)
	}
	c, err := dial(ns)
	if err != nil {
		return nil, fmt.Errorf("network namespace %s: %w", path, err)
	}
	return c, nil
}

// errNotMounted is returned for a file that a namespace was mounted on, or never.
var errNotMounted = errors.New("is a plain file, no namespace is mounted on it")

func (c *conn) close() {
	c.Handle.Close()
	c.socket.Close()
}

// request is a message about no link yet, or about the one with the index.
func (c *conn) request(message, index int) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(message, unix.NLM_F_ACK)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: c.socket}
	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index = int32(index)
	req.AddData(header)
	return req
}

// change is one RTM_NEWLINK for an existing netdev. do_setlink in the kernel's net/core/rtnetlink.c takes it in this
// order, whatever order it is written in: namespace, address, MTU, name, alias, flags, queue length. It stops at the
// first that fails and leaves in effect what it did before.
type change struct {
	netns  int // file descriptor, 0 to stay
	index  int // in netns, 0 for any
	name   string
	mtu    int
	mac    function.MAC
	alias  *string
	txQLen *int
	flags  *uint32 // of settable
}

func (c *conn) change(index int, to change) error {
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: c.socket}
	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index = int32(index)
	if to.flags != nil {
		header.Flags, header.Change = *to.flags, settable
	}
	req.AddData(header)
	attr := func(set bool, kind int, data []byte) {
		if set {
			req.AddData(nl.NewRtAttr(kind, data))
		}
	}
	attr(to.netns != 0, unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(to.netns)))
	attr(to.index != 0, unix.IFLA_NEW_IFINDEX, nl.Uint32Attr(uint32(to.index)))
	attr(to.name != "", unix.IFLA_IFNAME, nl.ZeroTerminated(to.name))
	attr(to.mtu != 0, unix.IFLA_MTU, nl.Uint32Attr(uint32(to.mtu)))
	attr(to.mac != "", unix.IFLA_ADDRESS, to.mac.HardwareAddr())
	if to.alias != nil {
		attr(true, unix.IFLA_IFALIAS, nl.ZeroTerminated(*to.alias)) // a zero byte alone takes the alias away
	}
	if to.txQLen != nil {
		attr(true, unix.IFLA_TXQLEN, nl.Uint32Attr(uint32(*to.txQLen)))
	}
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// at finds a link by its index, nil where there is none.
func (c *conn) at(index int) (netlink.Link, error) {
	return found(c.LinkByIndex(index))
}

// with finds a link that has the name, as its name or as one of its altnames; nil where there is none.
func (c *conn) with(name string) (netlink.Link, error) {
	return found(c.LinkByName(name))
}

// named is with where there must be one.
func (c *conn) named(name string) (netlink.Link, error) {
	if name == "" {
		return nil, ErrNoNetdev
	}
	l, err := c.with(name)
	if err == nil && l == nil {
		return nil, fmt.Errorf("%q: %w", name, ErrNoNetdev)
	}
	return l, err
}

func found(l netlink.Link, err error) (netlink.Link, error) {
	if _, none := errors.AsType[netlink.LinkNotFoundError](err); none {
		return nil, nil
	}
	return l, err
}

// all lists the links. The kernel says when they changed while it told them; it is asked again then.
func (c *conn) all() ([]netlink.Link, error) { return consistent(c.LinkList) }

func consistent[T any](dump func() ([]T, error)) ([]T, error) {
	const tries = 10
	for try := 1; ; try++ {
		list, err := dump()
		again := errors.Is(err, netlink.ErrDumpInterrupted) || errors.Is(err, unix.EINTR)
		if !again || try == tries {
			return list, err
		}
	}
}
