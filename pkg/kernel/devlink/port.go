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
	// Controller is that of the host whose Function it is, 0 for the one that runs the eswitch; External says that it is
	// another one, as it is for all Functions that a DPU gives its host.
	Controller uint32
	External   bool
	// Number is that of a physical port. Drivers number PFs the same way.
	Number uint32
	PF     uint16 // number of the PF, not of its PCI function
	VF     uint16 // with flavour pcivf
	SF     uint32 // sfnum, with flavour pcisf
	// Netdev and NetdevIndex are those of the port's netdev, the representor, in the namespace of the Conn; "" and 0 where
	// it has none there.
	Netdev      string
	NetdevIndex int
	// Function is that of the Function behind the port; the zero value where the driver does not tell.
	Function Function
}

// Function is what devlink knows of the Function behind a port.
type Function struct {
	MAC function.MAC // hw_addr; "" where it has none yet
	// Active says that a subfunction's device shall be there, and Attached that a driver has it.
	Active, Attached bool
}

// Rate limits what a Function sends, in Mbit/s; 0 is no limit. devlink counts bytes per second.
type Rate struct {
	Share int // tx_share, guaranteed
	Max   int // tx_max
}

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
func (c *Conn) SetFunction(d Device, index uint32, to FunctionChange) (err error) {
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
	defer explain(&err, "port function set %s/%d%s", d, index, words)
	_, err = c.do(unix.DEVLINK_CMD_PORT_SET, d, portIndex(index), function)
	return err
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

// bytesPerMbit is what devlink counts where Rate has 1.
const bytesPerMbit = 1_000_000 / 8

// Rate asks for the limits of what the Function behind a port sends. exists is false where the port has no rate object,
// or is not there itself.
func (c *Conn) Rate(d Device, index uint32) (rate Rate, exists bool, err error) {
	defer explain(&err, "port function rate show %s/%d", d, index)
	attrs, err := c.ask(unix.DEVLINK_CMD_RATE_GET, d, portIndex(index))
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EOPNOTSUPP) { // EOPNOTSUPP: before Linux 5.14
		return Rate{}, false, nil
	}
	if err != nil {
		return Rate{}, false, err
	}
	return decodeRate(attrs), true, nil
}

func decodeRate(attrs attribute.Set) Rate {
	return Rate{
		Share: mbits(attrs.Uint64(unix.DEVLINK_ATTR_RATE_TX_SHARE)),
		Max:   mbits(attrs.Uint64(unix.DEVLINK_ATTR_RATE_TX_MAX)),
	}
}

// mbits rounds up: any limit at all is not 0, which would be none.
func mbits(bytesPerSecond uint64) int {
	return int(bytesPerSecond/bytesPerMbit + min(bytesPerSecond%bytesPerMbit, 1))
}

// SetRate limits what the Function behind a port sends. Only what differs is set, as there are drivers that have one
// of the limits only. If the kernel refuses one, both are what they were. EOPNOTSUPP: the driver has no such limit;
// ENODEV: the port has no rate object.
func (c *Conn) SetRate(d Device, index uint32, to Rate) (err error) {
	if to.Share < 0 || to.Max < 0 {
		return fmt.Errorf("rate of port %s/%d: share %d and max %d Mbit/s must not be negative", d, index, to.Share, to.Max)
	}
	defer explain(&err, "port function rate set %s/%d tx_share %dmbit tx_max %dmbit", d, index, to.Share, to.Max)
	port := portIndex(index)
	before, err := c.ask(unix.DEVLINK_CMD_RATE_GET, d, port)
	if err != nil {
		return err
	}
	now := decodeRate(before)
	var changes, undo []*nl.RtAttr
	note := func(kind int, now, to int) {
		if now != to {
			changes = append(changes, nl.NewRtAttr(kind, nl.Uint64Attr(uint64(to)*bytesPerMbit)))
			undo = append(undo, nl.NewRtAttr(kind, nl.Uint64Attr(before.Uint64(uint16(kind)))))
		}
	}
	note(unix.DEVLINK_ATTR_RATE_TX_SHARE, now.Share, to.Share)
	note(unix.DEVLINK_ATTR_RATE_TX_MAX, now.Max, to.Max)
	if len(changes) == 0 {
		return nil
	}
	if _, err = c.do(unix.DEVLINK_CMD_RATE_SET, d, append(changes, port)...); err == nil {
		return nil
	}
	if len(undo) > 1 { // the kernel sets the share, then the maximum, and leaves the one where it fails at the other
		if _, failed := c.do(unix.DEVLINK_CMD_RATE_SET, d, undo[0], port); failed != nil {
			return errors.Join(err, fmt.Errorf("put tx_share back: %w", failed))
		}
	}
	return err
}
