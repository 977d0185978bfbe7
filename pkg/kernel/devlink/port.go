// SPDX-License-Identifier: Apache-2.0

package devlink

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// Flavour is the kind of object behind a port.
type Flavour string

// These flavours matter to this project. The words are the same as in devlink(8).
const (
	Physical Flavour = "physical"
	PCIPF    Flavour = "pcipf"
	PCIVF    Flavour = "pcivf"
	PCISF    Flavour = "pcisf"
)

// Port is a devlink port. A port of flavour pcivf or pcisf is the side of a Function that faces the
// eswitch.
type Port struct {
	Device  Device
	Index   uint32 // unique within the Device
	Flavour Flavour
	// Controller is the number of the Function's host, or 0 for the host that runs the eswitch.
	// External reports whether the Function belongs to another host. All Functions that a DPU
	// provides to its host are external.
	Controller uint32
	External   bool
	Number     uint32 // of a physical port; drivers number PFs the same way
	PF         uint16 // number of the PF, which may differ from the number of its PCI function
	VF         uint16 // for flavour pcivf
	SF         uint32 // sfnum, for flavour pcisf
	// Netdev and NetdevIndex are the name and ifindex of the representor. They are "" and 0 if the
	// representor is not in the namespace of the Conn.
	Netdev      string
	NetdevIndex int
	Function    Function // the zero value if the driver does not report it
}

// Function is what devlink reports about the Function behind a port.
type Function struct {
	MAC      function.MAC // hw_addr, or "" if no address was set
	Active   bool         // the state of a subfunction is active: its device is requested
	Attached bool         // a driver is bound to the device of the subfunction
}

// flavours holds the words of devlink(8) for enum devlink_port_flavour.
var flavours = []Flavour{Physical, "cpu", "dsa", PCIPF, PCIVF, "virtual", "unused", PCISF}

// Ports lists the ports of all devices in the Conn's namespace.
func (c *Conn) Ports() (ports []Port, err error) {
	defer explain(&err, "port show")
	return list(c, unix.DEVLINK_CMD_PORT_GET, decodePort)
}

// PortsOf lists the ports of a device. It returns no ports if the device does not exist.
func (c *Conn) PortsOf(d Device) (ports []Port, err error) {
	defer explain(&err, "port show %s", d)
	ports, err = list(c, unix.DEVLINK_CMD_PORT_GET, decodePort, d.attributes()...)
	if errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	// Kernels before 6.3 list the ports of all devices.
	return slices.DeleteFunc(ports, func(p Port) bool { return p.Device != d }), err
}

// AddSF adds a subfunction with the number sfnum to the PF with the number pf ([Port.PF]) of the
// device. The new subfunction is inactive and has no auxiliary device. The netdev name in the
// returned port may change, because udev may rename the netdev later.
//
// The error matches EEXIST if sfnum is taken. It matches EOPNOTSUPP if the device has no
// subfunctions, or has them only in eswitch mode switchdev, as the error text says.
func (c *Conn) AddSF(d Device, pf uint16, sfnum uint32) (port Port, err error) {
	defer explain(&err, "port add %s flavour pcisf pfnum %d sfnum %d", d, pf, sfnum)
	attrs, err := c.ask(unix.DEVLINK_CMD_PORT_NEW, d,
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_FLAVOUR,
			nl.Uint16Attr(uint16(slices.Index(flavours, PCISF)))),
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_PCI_PF_NUMBER, nl.Uint16Attr(pf)),
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_PCI_SF_NUMBER, nl.Uint32Attr(sfnum)))

	if err != nil {
		return Port{}, err
	}

	return decodePort(attrs)
}

// DeletePort deletes a port that AddSF added, and its subfunction. The error matches ENODEV if
// there is no such port.
func (c *Conn) DeletePort(d Device, index uint32) (err error) {
	defer explain(&err, "port del %s/%d", d, index)
	_, err = c.do(unix.DEVLINK_CMD_PORT_DEL, d, portIndex(index))
	return err
}

// FunctionChange is a change of the Function behind a port.
type FunctionChange struct {
	MAC    function.MAC // "" keeps the address
	Active *bool        // nil keeps the state, which only a subfunction has
}

// SetFunction changes the Function behind a port. The MAC changes before the state. This order
// matters because most drivers refuse to change the MAC of an active SF.
func (c *Conn) SetFunction(d Device, index uint32, to FunctionChange) (err error) {
	words := ""
	function := nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_FUNCTION|unix.NLA_F_NESTED, nil)
	if to.MAC != "" {
		address := to.MAC.HardwareAddr()
		if address == nil {
			return fmt.Errorf("MAC %q of port %s/%d: must be an address such as 02:00:00:00:00:01",
				to.MAC, d, index)
		}
		words += " hw_addr " + string(to.MAC)
		function.AddRtAttr(unix.DEVLINK_PORT_FUNCTION_ATTR_HW_ADDR, address)
	}

	if to.Active != nil {
		state, word := nl.DEVLINK_PORT_FN_STATE_INACTIVE, "inactive"
		if *to.Active {
			state, word = nl.DEVLINK_PORT_FN_STATE_ACTIVE, "active"
		}
		words += " state " + word
		function.AddRtAttr(unix.DEVLINK_PORT_FN_ATTR_STATE, nl.Uint8Attr(uint8(state)))
	}

	if words == "" {
		return nil
	}
	defer explain(&err, "port function set %s/%d%s", d, index, words)

	_, err = c.do(unix.DEVLINK_CMD_PORT_SET, d, portIndex(index), function)
	return err
}

func decodePort(attrs attribute.Set) (Port, error) {
	function, err := attribute.Parse(attrs[unix.DEVLINK_ATTR_PORT_FUNCTION])
	if err != nil {
		return Port{}, fmt.Errorf("port function: %w", err)
	}

	return Port{
		Device:      deviceOf(attrs),
		Index:       attrs.Uint32(unix.DEVLINK_ATTR_PORT_INDEX),
		Flavour:     word(flavours, attrs.Uint16(unix.DEVLINK_ATTR_PORT_FLAVOUR)),
		Controller:  attrs.Uint32(unix.DEVLINK_ATTR_PORT_CONTROLLER_NUMBER),
		External:    attrs.Uint8(unix.DEVLINK_ATTR_PORT_EXTERNAL) != 0,
		Number:      attrs.Uint32(unix.DEVLINK_ATTR_PORT_NUMBER),
		PF:          attrs.Uint16(unix.DEVLINK_ATTR_PORT_PCI_PF_NUMBER),
		VF:          attrs.Uint16(unix.DEVLINK_ATTR_PORT_PCI_VF_NUMBER),
		SF:          attrs.Uint32(unix.DEVLINK_ATTR_PORT_PCI_SF_NUMBER),
		Netdev:      attrs.Text(unix.DEVLINK_ATTR_PORT_NETDEV_NAME),
		NetdevIndex: int(attrs.Uint32(unix.DEVLINK_ATTR_PORT_NETDEV_IFINDEX)),
		Function: Function{
			MAC: macOf(function[unix.DEVLINK_PORT_FUNCTION_ATTR_HW_ADDR]),
			Active: function.Uint8(
				unix.DEVLINK_PORT_FN_ATTR_STATE,
			) == nl.DEVLINK_PORT_FN_STATE_ACTIVE,
			Attached: function.Uint8(
				unix.DEVLINK_PORT_FN_ATTR_OPSTATE,
			) == nl.DEVLINK_PORT_FN_OPSTATE_ATTACHED,
		},
	}, nil
}

// macOf returns the address as text. It returns "" for zeros, because drivers report zeros if no
// address was set.
func macOf(address []byte) function.MAC {
	if len(bytes.Trim(address, "\x00")) == 0 {
		return ""
	}
	return function.MAC(net.HardwareAddr(address).String())
}

// bytesPerMbit converts Mbit/s, the unit of [function.Rate], to bytes per second, the unit of
// devlink.
const bytesPerMbit = 1_000_000 / 8

// Rate returns the limits of the Function behind a port. exists is false if the port has no rate
// object or does not exist.
func (c *Conn) Rate(d Device, index uint32) (rate function.Rate, exists bool, err error) {
	defer explain(&err, "port function rate show %s/%d", d, index)
	attrs, err := c.ask(unix.DEVLINK_CMD_RATE_GET, d, portIndex(index))
	// Linux before 5.14 returns EOPNOTSUPP.
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EOPNOTSUPP) {
		return rate, false, nil
	}
	if err != nil {
		return rate, false, err
	}

	return decodeRate(attrs), true, nil
}

func decodeRate(attrs attribute.Set) function.Rate {
	return function.Rate{
		Min: mbits(attrs.Uint64(unix.DEVLINK_ATTR_RATE_TX_SHARE)),
		Max: mbits(attrs.Uint64(unix.DEVLINK_ATTR_RATE_TX_MAX)),
	}
}

// mbits converts bytes per second to Mbit/s. It rounds up, so that a low limit does not become 0,
// which means no limit.
func mbits(bytesPerSecond uint64) int {
	return int(bytesPerSecond/bytesPerMbit + min(bytesPerSecond%bytesPerMbit, 1))
}

// SetRate limits the rate at which the Function behind a port sends. It sends only the limits that
// change, because some drivers support only one of the two. If the driver refuses one limit, both
// keep their values.
//
// The error matches EOPNOTSUPP if the driver does not support the limit, and ENODEV if the port has
// no rate object.
func (c *Conn) SetRate(d Device, index uint32, to function.Rate) (err error) {
	if to.Min < 0 || to.Max < 0 {
		return fmt.Errorf("rate of port %s/%d: share %d and max %d Mbit/s must not be negative",
			d, index, to.Min, to.Max)
	}
	defer explain(&err, "port function rate set %s/%d tx_share %dmbit tx_max %dmbit", d, index,
		to.Min, to.Max)

	port := portIndex(index)
	before, err := c.ask(unix.DEVLINK_CMD_RATE_GET, d, port)
	if err != nil {
		return err
	}

	now := decodeRate(before)
	changes := []*nl.RtAttr{port}
	if now.Min != to.Min {
		changes = append(changes,
			nl.NewRtAttr(unix.DEVLINK_ATTR_RATE_TX_SHARE,
				nl.Uint64Attr(uint64(to.Min)*bytesPerMbit)))
	}

	if now.Max != to.Max {
		changes = append(changes,
			nl.NewRtAttr(unix.DEVLINK_ATTR_RATE_TX_MAX, nl.Uint64Attr(uint64(to.Max)*bytesPerMbit)))
	}
	if len(changes) == 1 {
		return nil
	}

	_, err = c.do(unix.DEVLINK_CMD_RATE_SET, d, changes...)
	// The kernel sets the share first, and does not restore it when the maximum fails.
	if err != nil && len(changes) > 2 {
		share := nl.Uint64Attr(before.Uint64(unix.DEVLINK_ATTR_RATE_TX_SHARE))
		_, failed := c.do(unix.DEVLINK_CMD_RATE_SET, d, port,
			nl.NewRtAttr(unix.DEVLINK_ATTR_RATE_TX_SHARE, share))
		if failed != nil {
			return errors.Join(err, fmt.Errorf("put tx_share back: %w", failed))
		}
	}

	return err
}
