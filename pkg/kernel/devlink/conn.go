// SPDX-License-Identifier: Apache-2.0

package devlink

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"

	"github.com/go-logr/logr"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/listen"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// ErrNoDevlink says that the kernel has no devlink (CONFIG_NET_DEVLINK). It matches EOPNOTSUPP.
var ErrNoDevlink = fmt.Errorf("the kernel has no devlink: %w", unix.EOPNOTSUPP)

// Conn speaks devlink in one network namespace. Several goroutines may use it at once.
//
// Each request opens its own socket. A card that is slow or hangs therefore delays only requests
// about that card and requests about all cards.
type Conn struct {
	family uint16 // 0 if the kernel has no devlink

	mutex  sync.Mutex
	ns     netns.NsHandle // none for the namespace of the process
	closed bool
}

// Dial opens a Conn in the network namespace at the path, or in the namespace of the process if the
// path is "". A kernel without devlink is not an error: such a Conn lists no ports and no
// reporters, and its other requests fail with [ErrNoDevlink].
func Dial(netNS string) (*Conn, error) {
	ns, err := namespace.Open(netNS)
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

// Close makes later requests fail with [os.ErrClosed]. It does not wait for requests that are under
// way.
func (c *Conn) Close() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if !c.closed {
		c.closed = true
		c.ns.Close()
	}
}

func (c *Conn) open() (*nl.NetlinkSocket, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()

	if c.closed {
		return nil, fmt.Errorf("the connection: %w", os.ErrClosed)
	}

	socket, err := nl.GetNetlinkSocketAt(c.ns, netns.None(), unix.NETLINK_GENERIC)
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}

	return socket, nil
}

// do sends a command about a device and returns the messages of the answer.
func (c *Conn) do(command uint8, d Device, attrs ...*nl.RtAttr) ([][]byte, error) {
	return c.execute(command, unix.NLM_F_ACK, append(d.attributes(), attrs...))
}

// ask sends a command about a device and returns the one message of the answer.
func (c *Conn) ask(command uint8, d Device, attrs ...*nl.RtAttr) (attribute.Set, error) {
	messages, err := c.do(command, d, attrs...)
	if err != nil {
		return nil, err
	}
	if len(messages) != 1 {
		return nil, fmt.Errorf("%d answers, want 1", len(messages))
	}
	return attribute.Parse(messages[0])
}

// list sends a command to which the kernel answers with one message for each object. It returns no
// objects if the kernel has no devlink.
func list[T any](
	c *Conn, command uint8, decode func(attribute.Set) (T, error), attrs ...*nl.RtAttr,
) ([]T, error) {
	messages, err := request.Consistent(func() ([][]byte, error) {
		return c.execute(command, unix.NLM_F_DUMP, attrs)
	})
	if errors.Is(err, ErrNoDevlink) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}

	var all []T
	for _, m := range messages {
		attrs, err := attribute.Parse(m)
		if err != nil {
			return nil, err
		}

		object, err := decode(attrs)
		if err != nil {
			return nil, err
		}
		all = append(all, object)
	}

	return all, nil
}

func (c *Conn) execute(command uint8, flags int, attrs []*nl.RtAttr) ([][]byte, error) {
	if c.family == 0 {
		return nil, ErrNoDevlink
	}

	socket, err := c.open()
	if err != nil {
		return nil, err
	}
	defer socket.Close()

	_ = socket.SetExtAck(true) // errors carry the kernel's message, if there is one
	header := request.GenericHeader{Command: command, Version: nl.GENL_DEVLINK_VERSION}
	messages, err := request.Send(&nl.SocketHandle{Socket: socket}, int(c.family),
		flags, header, attrs...)
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

// explain puts the equivalent command of devlink(8) before the error, if there is one.
func explain(err *error, command string, args ...any) {
	if *err != nil {
		*err = fmt.Errorf("devlink %s: %w", fmt.Sprintf(command, args...), *err)
	}
}

// Follow calls changed when a devlink object appears, changes or disappears. [listen.Source.Follow]
// describes the details.
func Follow(ctx context.Context, netNS string, changed func(), log logr.Logger) {
	listen.Source{Name: "devlink", Protocol: unix.NETLINK_GENERIC, Groups: findGroup}.Follow(ctx,
		netNS, changed, log)
}

// findGroup returns the number of devlink's only multicast group.
func findGroup(ns netns.NsHandle) ([]uint32, error) {
	family, err := findFamily(ns)
	if err != nil {
		return nil, err
	}

	for _, g := range family.Groups {
		if g.Name == "config" {
			return []uint32{g.ID}, nil
		}
	}

	return nil, errors.New("devlink: the kernel has no multicast group config")
}

// findFamily returns the generic netlink numbers that the kernel assigned to devlink at boot. They
// exist even if there is no devlink device.
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

func deviceOf(a attribute.Set) Device {
	return Device{Bus: a.Text(unix.DEVLINK_ATTR_BUS_NAME), Name: a.Text(unix.DEVLINK_ATTR_DEV_NAME)}
}

// attributes returns the attributes that name the device in a request.
func (d Device) attributes() []*nl.RtAttr {
	return []*nl.RtAttr{
		nl.NewRtAttr(unix.DEVLINK_ATTR_BUS_NAME, nl.ZeroTerminated(d.Bus)),
		nl.NewRtAttr(unix.DEVLINK_ATTR_DEV_NAME, nl.ZeroTerminated(d.Name)),
	}
}

func portIndex(index uint32) *nl.RtAttr {
	return nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_INDEX, nl.Uint32Attr(index))
}

// word returns the word for a number of the kernel, or the number itself if words lacks it because
// the kernel is newer.
func word[T ~string](words []T, number uint16) T {
	if int(number) < len(words) {
		return words[number]
	}
	return T(strconv.Itoa(int(number)))
}
