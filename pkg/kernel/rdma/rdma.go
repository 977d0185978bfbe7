// SPDX-License-Identifier: Apache-2.0

// Package rdma lists the RDMA devices of a network namespace, moves them to another one, and changes
// what a process with CAP_NET_ADMIN can change of them. It speaks NETLINK_RDMA
// (include/uapi/rdma/rdma_netlink.h), as the program rdma of iproute2 does.
//
// Where the RDMA system is in mode exclusive, a namespace has only its own devices. Where it is in
// mode shared, every namespace has all of them, and the kernel moves none.
package rdma

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// Device is an RDMA device.
type Device struct {
	// Name is unique on the node, or from Linux 7 on in its namespace. A process with CAP_NET_ADMIN
	// can change it.
	Name string `json:"name"`
	// Index is a number that the device keeps while it exists, wherever it is. The kernel gives it
	// to another device only after all other numbers.
	Index uint32 `json:"index"`
	// GUID is the node GUID as sysfs has it, such as "0200:00ff:fe00:0001"; "" if there is none.
	GUID string `json:"guid,omitempty"`
	// Moderation says whether the kernel adapts the moderation of completions to the load
	// ("adaptive-moderation"). It is nil before Linux 5.3, which does not report it.
	Moderation *bool `json:"moderation,omitempty"`
}

// Same reports whether both describe one device, whatever its name and its namespace are.
func (d Device) Same(other Device) bool { return d.Index == other.Index && d.GUID == other.GUID }

// System is the RDMA system of the kernel. The zero value is ready for use by several goroutines.
type System struct{}

// adaptiveModeration is RDMA_NLDEV_ATTR_DEV_DIM, which the netlink library does not have.
const adaptiveModeration = 84

// List returns the RDMA devices of a namespace.
func (System) List(ns netns.NsHandle) ([]Device, error) {
	answers, err := request.Consistent(func() ([][]byte, error) {
		return send(ns, nl.RDMA_NLDEV_CMD_GET, unix.NLM_F_DUMP)
	})
	if err != nil {
		return nil, fmt.Errorf("list RDMA devices: %w", err)
	}

	var devices []Device
	for _, answer := range answers {
		d, err := parse(answer)
		if err != nil {
			return nil, fmt.Errorf("list RDMA devices: %w", err)
		}
		devices = append(devices, d)
	}

	return devices, nil
}

// Move moves the device with the index from one namespace to another. The kernel closes what
// programs have open of it, and may give it other device nodes.
//
// The error matches [unix.EOPNOTSUPP] if the driver cannot do without these programs, or if the RDMA
// system is in mode shared (ib_device_set_netns_put of drivers/infiniband/core/device.c).
func (System) Move(from netns.NsHandle, index uint32, to netns.NsHandle) error {
	return set(from, index, nl.NewRtAttr(nl.RDMA_NLDEV_NET_NS_FD, nl.Uint32Attr(uint32(to))))
}

// Rename gives the device with the index another name.
func (System) Rename(ns netns.NsHandle, index uint32, name string) error {
	return set(ns, index, nl.NewRtAttr(nl.RDMA_NLDEV_ATTR_DEV_NAME, nl.ZeroTerminated(name)))
}

// SetModeration turns the adaptive moderation of a device on or off.
func (System) SetModeration(ns netns.NsHandle, index uint32, on bool) error {
	value := []byte{0}
	if on {
		value[0] = 1
	}
	return set(ns, index, nl.NewRtAttr(adaptiveModeration, value))
}

// set changes one property of a device.
func set(ns netns.NsHandle, index uint32, property *nl.RtAttr) error {
	_, err := send(ns, nl.RDMA_NLDEV_CMD_SET, unix.NLM_F_ACK,
		nl.NewRtAttr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, nl.Uint32Attr(index)), property)
	return err
}

// send sends a message on a thread in the namespace. A socket there would not be enough, because the
// kernel compares the namespace of a device that moves with the one of the thread
// (ib_device_set_netns_put of drivers/infiniband/core/device.c).
func send(
	ns netns.NsHandle, command, flags int, attributes ...*nl.RtAttr,
) (answers [][]byte, err error) {
	err = namespace.Do(ns, func() error {
		socket, err := nl.Subscribe(unix.NETLINK_RDMA) // joins no multicast group
		if err != nil {
			return fmt.Errorf("netlink: %w", err)
		}
		defer socket.Close()

		_ = socket.SetExtAck(true) // errors carry the kernel's message, if there is one
		message := nl.RDMA_NL_NLDEV<<nl.RDMA_NL_GET_CLIENT_SHIFT | command
		answers, err = request.Send(&nl.SocketHandle{Socket: socket}, message, flags, noHeader{},
			attributes...)
		return err
	})
	return answers, err
}

// noHeader is the header of the messages, which begin with their attributes.
type noHeader struct{}

func (noHeader) Len() int          { return 0 }
func (noHeader) Serialize() []byte { return nil }

// parse reads the description of a device.
func parse(message []byte) (Device, error) {
	attrs, err := attribute.Parse(message)
	if err != nil {
		return Device{}, err
	}
	if !attrs.Has(nl.RDMA_NLDEV_ATTR_DEV_INDEX) || !attrs.Has(nl.RDMA_NLDEV_ATTR_DEV_NAME) {
		return Device{}, errors.New("a device has no index or no name")
	}

	d := Device{
		Index: attrs.Uint32(nl.RDMA_NLDEV_ATTR_DEV_INDEX),
		Name:  attrs.Text(nl.RDMA_NLDEV_ATTR_DEV_NAME),
	}
	if guid := attrs.Uint64(nl.RDMA_NLDEV_ATTR_NODE_GUID); guid != 0 {
		d.GUID = formatGUID(guid)
	}
	if attrs.Has(adaptiveModeration) {
		d.Moderation = new(attrs.Uint8(adaptiveModeration) != 0)
	}

	return d, nil
}

// formatGUID returns a GUID as sysfs has it in node_guid.
func formatGUID(guid uint64) string {
	return fmt.Sprintf("%04x:%04x:%04x:%04x", guid>>48, guid>>32&0xffff, guid>>16&0xffff,
		guid&0xffff)
}
