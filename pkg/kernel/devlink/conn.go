package devlink

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"
)

// ErrNoDevlink is what a kernel without devlink (CONFIG_NET_DEVLINK) answers. It is an EOPNOTSUPP.
var ErrNoDevlink = fmt.Errorf("the kernel has no devlink: %w", unix.EOPNOTSUPP)

// Conn speaks devlink in one network namespace. It may be used by several goroutines at once. Each request has a socket
// of its own, so that a card that takes many seconds, or hangs, keeps only those waiting who ask for it or for all.
type Conn struct {
	family uint16 // 0 if the kernel has no devlink

	mutex  sync.Mutex
	ns     netns.NsHandle // none for the process's own
	closed bool
}

// Dial makes a connection in the network namespace at this path, "" for the process's own. A kernel without devlink is
// not an error here: it has no ports and no reporters, and refuses the rest with [ErrNoDevlink].
func Dial(netNS string) (*Conn, error) {
	ns, err := openNamespace(netNS)
	if err != nil {
		return nil, err
	}
	family, err := findFamily(ns)
	if err != nil && !errors.Is(err, ErrNoDevlink) {
		ns.Close()
		return nil, err
	}
	return &Conn{ns: ns, family: family.ID}, nil
}

// Close ends the connection. What is asked for later fails; it does not wait for what was asked for before.
func (c *Conn) Close() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if !c.closed {
		c.closed = true
		c.ns.Close()
	}
}

// socket is for one request.
func (c *Conn) socket() (*nl.NetlinkSocket, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.closed {
		return nil, fmt.Errorf("the connection: %w", os.ErrClosed)
	}
	return openSocket(c.ns)
}

// do sends a command about a device, and returns what is answered: a message for one that asks for something.
func (c *Conn) do(command uint8, d Device, attrs ...*nl.RtAttr) ([][]byte, error) {
	return c.execute(command, unix.NLM_F_ACK, append(d.attributes(), attrs...))
}

// dump sends a command that is answered with a message for each object there is.
func (c *Conn) dump(command uint8, attrs ...*nl.RtAttr) ([][]byte, error) {
	const tries = 10
	for try := 1; ; try++ {
		messages, err := c.execute(command, unix.NLM_F_DUMP, attrs)
		// The kernel says when objects came and went while it told them.
		again := errors.Is(err, nl.ErrDumpInterrupted) || errors.Is(err, unix.EINTR)
		if !again || try == tries {
			return messages, err
		}
	}
}

func (c *Conn) execute(command uint8, flags int, attrs []*nl.RtAttr) ([][]byte, error) {
	if c.family == 0 {
		return nil, ErrNoDevlink
	}
	socket, err := c.socket()
	if err != nil {
		return nil, err
	}
	defer socket.Close()
	_ = socket.SetExtAck(true) // the kernel's own words in errors, where it has some
	req := nl.NewNetlinkRequest(int(c.family), flags)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_GENERIC: {Socket: socket}}
	req.AddData(&nl.Genlmsg{Command: command, Version: nl.GENL_DEVLINK_VERSION})
	for _, a := range attrs {
		req.AddData(a)
	}
	messages, err := req.Execute(unix.NETLINK_GENERIC, 0)
	if err != nil {
		return nil, err
	}
	for i, m := range messages {
		if len(m) < nl.SizeofGenlmsg {
			return nil, fmt.Errorf("answer of %d bytes, want at least %d", len(m), nl.SizeofGenlmsg)
		}
		messages[i] = m[nl.SizeofGenlmsg:]
	}
	return messages, nil
}

// Watch calls changed when it has begun to listen, then whenever devlink tells of something in the network namespace
// at this path ("" for the process's own) that came, went or changed, and when such messages may have been lost. It
// returns nil when ctx ends, and an error when it cannot listen (any more); [ErrNoDevlink] will not change until the
// next boot. The call of changed must not take long.
func Watch(ctx context.Context, netNS string, changed func()) error {
	ns, err := openNamespace(netNS)
	if err != nil {
		return err
	}
	defer ns.Close()
	group, err := findGroup(ns)
	if err != nil {
		return err
	}
	socket, err := openSocket(ns)
	if err != nil {
		return fmt.Errorf("devlink: %w", err)
	}
	defer socket.Close()
	if err := unix.SetsockoptInt(socket.GetFd(), unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, int(group)); err != nil {
		return fmt.Errorf("devlink: join multicast group %s: %w", groupName, err)
	}
	defer context.AfterFunc(ctx, func() { socket.Close() })()
	for {
		changed()
		_, _, err := socket.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EINTR): // ENOBUFS: messages were lost
			return fmt.Errorf("devlink: receive: %w", err)
		}
	}
}

// listenAgain is when devlink is listened to again after that failed.
var listenAgain = wait.Backoff{
	Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.1, Steps: 9, Cap: 30 * time.Second,
}

// Follow is [Watch] that listens again when it cannot listen any more, and then calls changed for what was missed. It
// returns when ctx ends or the kernel turns out to have no devlink.
func Follow(ctx context.Context, netNS string, changed func(), log logr.Logger) {
	follow(ctx, func(ctx context.Context) error { return Watch(ctx, netNS, changed) }, log)
}

func follow(ctx context.Context, watch func(context.Context) error, log logr.Logger) {
	delays := listenAgain.DelayFunc()
	for ctx.Err() == nil {
		begin := time.Now()
		err := watch(ctx)
		if ctx.Err() != nil {
			return
		}
		if errors.Is(err, ErrNoDevlink) {
			log.V(1).Info("The kernel has no devlink, so it tells nothing of eswitches, subfunctions and faults")
			return
		}
		if time.Since(begin) > listenAgain.Cap {
			delays = listenAgain.DelayFunc()
		}
		delay := delays()
		log.Error(err, "Not told of changes by devlink for now", "retry", delay.String())
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
	}
}

// groupName is that of devlink's only multicast group.
const groupName = "config"

func findGroup(ns netns.NsHandle) (uint32, error) {
	family, err := findFamily(ns)
	if err != nil {
		return 0, err
	}
	for _, g := range family.Groups {
		if g.Name == groupName {
			return g.ID, nil
		}
	}
	return 0, fmt.Errorf("devlink: the kernel has no multicast group %s", groupName)
}

// findFamily asks for the numbers that the kernel gave devlink at boot. The family is there before any device is.
func findFamily(ns netns.NsHandle) (netlink.GenlFamily, error) {
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_GENERIC)
	if err != nil {
		return netlink.GenlFamily{}, fmt.Errorf("devlink: netlink socket: %w", err)
	}
	defer handle.Close()
	family, err := handle.GenlFamilyGet(nl.GENL_DEVLINK_NAME)
	switch {
	case errors.Is(err, unix.ENOENT):
		return netlink.GenlFamily{}, ErrNoDevlink
	case err != nil:
		return netlink.GenlFamily{}, fmt.Errorf("devlink: generic netlink family: %w", err)
	}
	return *family, nil
}

// openSocket opens one in a namespace, for none in the process's own.
func openSocket(ns netns.NsHandle) (*nl.NetlinkSocket, error) {
	socket, err := nl.GetNetlinkSocketAt(ns, netns.None(), unix.NETLINK_GENERIC)
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	return socket, nil
}

// openNamespace returns no namespace for "".
func openNamespace(path string) (netns.NsHandle, error) {
	if path == "" {
		return netns.None(), nil
	}
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return ns, fmt.Errorf("network namespace %s: %w", path, err)
	}
	return ns, nil
}
