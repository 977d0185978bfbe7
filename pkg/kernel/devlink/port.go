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

// flavours are enum devlink_port_flavour, in the words of devlink(8).
var flavours = []Flavour{Physical, "cpu", "dsa", PCIPF, PCIVF, "virtual", "unused", PCISF}

// Ports lists the ports of all devices in the Conn's namespace.
func (c *Conn) Ports() (ports []Port, err error) {
	defer explain(&err, "port show")
	return list(c, unix.DEVLINK_CMD_PORT_GET, decodePort)
}

// PortsOf lists the ports of a device; none if the device is not there.
func (c *Conn) PortsOf(d Device) (ports []Port, err error) {
	defer explain(&err, "port show %s", d)
	ports, err = list(c, unix.DEVLINK_CMD_PORT_GET, decodePort, d.attributes()...)
	if errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	// Kernels before 6.3 tell those of all devices.
	return slices.DeleteFunc(ports, func(p Port) bool { return p.Device != d }), err
}

// AddSF adds a subfunction with this sfnum to the PF that has the number pf at the device: a PF's [Port.PF], which is
// not its PCI function. It is inactive, so that it has no device yet. The netdev in the answer is not renamed by udev
// yet. EEXIST (mlx5 and others): the sfnum is taken. EOPNOTSUPP: the device has no subfunctions, or has them in eswitch
// mode switchdev only, as the text says.
func (c *Conn) AddSF(d Device, pf uint16, sfnum uint32) (port Port, err error) {
	defer explain(&err, "port add %s flavour pcisf pfnum %d sfnum %d", d, pf, sfnum)
	attrs, err := c.ask(unix.DEVLINK_CMD_PORT_NEW, d,
		nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_FLAVOUR, nl.Uint16Attr(uint16(slices.Index(flavours, PCISF)))),
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

// SetFunction changes the Function behind a port. The kernel sets the MAC first, so that an SF that is made active has
// it from the start. Of an SF that is active already most drivers refuse another MAC.
func (c *Conn) SetFunction(d Device, index uint32, to FunctionChange) error {
	words := ""
	function := nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_FUNCTION|unix.NLA_F_NESTED, nil)
	if to.MAC != "" {
		address := to.MAC.HardwareAddr()
		if address == nil {
			return fmt.Errorf("MAC %q of port %s/%d: must be an address such as 02:00:00:00:00:01", to.MAC, d, index)
		}
		words += " hw_addr " + string(to.MAC)
		function.AddRtAttr(unix.DEVLINK_PORT_FUNCTION_ATTR_HW_ADDR, address)
	}
	if to.Active != nil {
		state, word := uint8(0), "inactive"
		if *to.Active {
			state, word = stateActive, "active"
		}
		words += " state " + word
		function.AddRtAttr(unix.DEVLINK_PORT_FN_ATTR_STATE, nl.Uint8Attr(state))
	}
	if words == "" {
		return nil
	}
	if _, err := c.do(unix.DEVLINK_CMD_PORT_SET, d, portIndex(index), function); err != nil {
		return fmt.Errorf("devlink port function set %s/%d%s: %w", d, index, words, err)
	}
	return nil
}

// stateActive and opstateAttached are DEVLINK_PORT_FN_STATE_ACTIVE and DEVLINK_PORT_FN_OPSTATE_ATTACHED.
const (
	stateActive     uint8 = 1
	opstateAttached uint8 = 1
)

func decodePort(attrs attribute.Set) (Port, error) {
	function, err := attrs.Nested(unix.DEVLINK_ATTR_PORT_FUNCTION)
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
			MAC:      macOf(function[unix.DEVLINK_PORT_FUNCTION_ATTR_HW_ADDR]),
			Active:   function.Uint8(unix.DEVLINK_PORT_FN_ATTR_STATE) == stateActive,
			Attached: function.Uint8(unix.DEVLINK_PORT_FN_ATTR_OPSTATE) == opstateAttached,
		},
	}, nil
}

// macOf is "" for an address of zeros only, which is how drivers tell that there is none.
func macOf(address []byte) function.MAC {
	if len(bytes.Trim(address, "\x00")) == 0 {
		return ""
	}
	return function.MAC(net.HardwareAddr(address).String())
}
