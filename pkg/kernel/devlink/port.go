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

// Flavour is what is behind a port.
type Flavour string

// The flavours of ports that matter here, in the words of devlink(8).
const (
	Physical Flavour = "physical"
	PCIPF    Flavour = "pcipf"
	PCIVF    Flavour = "pcivf"
	PCISF    Flavour = "pcisf"
)

// Port is a devlink port: for the flavours pcivf and pcisf the eswitch's side of a Function.
type Port struct {
	Device  Device
	Index   uint32 // at the Device
	Flavour Flavour
	// Controller is the number of the Function's host, 0 for the one that runs the eswitch.
	// External says that it is another host, as for all Functions that a DPU gives its host.
	Controller uint32
	External   bool
	Number     uint32 // of a physical port; drivers number PFs the same way
	PF         uint16 // number of the PF, not of its PCI function
	VF         uint16 // with flavour pcivf
	SF         uint32 // sfnum, with flavour pcisf
	// Netdev and NetdevIndex are those of the representor; "" and 0 if the namespace of the Conn
	// has none.
	Netdev      string
	NetdevIndex int
	Function    Function // the zero value if the driver does not tell
}

// Function is what devlink knows of the Function behind a port.
type Function struct {
	MAC      function.MAC // hw_addr; "" if it has none yet
	Active   bool         // a subfunction's device shall be there
	Attached bool         // a driver has the subfunction's device
}

// flavours are enum devlink_port_flavour, in the words of devlink(8).
var flavours = []Flavour{Physical, "cpu", "dsa", PCIPF, PCIVF, "virtual", "unused", PCISF}

// Ports lists the ports of all devices in the Conn's namespace.
func (c *Conn) Ports() (ports []Port, err error) {
	defer explain(&err, "port show")
	return list(c, unix.DEVLINK_CMD_PORT_GET, decodePort)
}

// PortsOf lists the ports of a device. A device that is not there has none.
func (c *Conn) PortsOf(d Device) (ports []Port, err error) {
	defer explain(&err, "port show %s", d)
	ports, err = list(c, unix.DEVLINK_CMD_PORT_GET, decodePort, d.attributes()...)
	if errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	// Kernels before 6.3 tell those of all devices.
	return slices.DeleteFunc(ports, func(p Port) bool { return p.Device != d }), err
}

// AddSF adds a subfunction with this sfnum to the PF that has the number pf ([Port.PF]) at the
// device. The subfunction is inactive and has no device yet; udev has not renamed the netdev of the
// returned port yet. EEXIST: the sfnum is taken. EOPNOTSUPP: the device has no subfunctions, or
// only in eswitch mode switchdev, as the text says.
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

// DeletePort deletes a port that was added, and what is behind it. ENODEV: it is not there.
func (c *Conn) DeletePort(d Device, index uint32) (err error) {
	defer explain(&err, "port del %s/%d", d, index)
	_, err = c.do(unix.DEVLINK_CMD_PORT_DEL, d, portIndex(index))
	return err
}

// FunctionChange is what is to be set of the Function behind a port.
type FunctionChange struct {
	MAC    function.MAC // "" leaves it
	Active *bool        // nil leaves it; only of a subfunction
}

// SetFunction changes the Function behind a port, its MAC before its state. Most drivers refuse an
// active SF another MAC.
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

// macOf is "" for an address of zeros, by which drivers tell that there is none.
func macOf(address []byte) function.MAC {
	if len(bytes.Trim(address, "\x00")) == 0 {
		return ""
	}
	return function.MAC(net.HardwareAddr(address).String())
}

// bytesPerMbit converts the Mbit/s of a [function.Rate] to the bytes per second of devlink.
const bytesPerMbit = 1_000_000 / 8

// Rate asks for the limits of the Function behind a port. exists is false if the port has no rate
// object, or does not exist.
func (c *Conn) Rate(d Device, index uint32) (rate function.Rate, exists bool, err error) {
	defer explain(&err, "port function rate show %s/%d", d, index)
	attrs, err := c.ask(unix.DEVLINK_CMD_RATE_GET, d, portIndex(index))
	// EOPNOTSUPP: before Linux 5.14
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

// mbits rounds up, so that a low limit does not become 0, which is no limit.
func mbits(bytesPerSecond uint64) int {
	return int(bytesPerSecond/bytesPerMbit + min(bytesPerSecond%bytesPerMbit, 1))
}

// SetRate limits what the Function behind a port sends. It sets only the limits that differ, as
// some drivers have only one. If one is refused, both are what they were. EOPNOTSUPP: the driver
// has no such limit; ENODEV: the port has no rate object.
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
	// the kernel sets the share first, and does not undo it if it fails at the maximum
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
