// SPDX-License-Identifier: Apache-2.0

// Package devlink is the part of the kernel's devlink (Documentation/networking/devlink) that this
// project needs: the eswitch of a PF, the ports behind its Functions, subfunctions, rate objects
// and health reporters. The numbers are those of linux/devlink.h.
//
// Errors begin with the equivalent command of devlink(8), hold the kernel's message if there is
// one, and match its error number by [errors.Is]: [golang.org/x/sys/unix.EOPNOTSUPP] and others.
package devlink

import (
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// Device is a devlink instance by its handle: "pci/0000:3b:00.0". It is comparable.
type Device struct {
	Bus  string // "pci", "auxiliary"
	Name string // on the bus: a PCI address, or "mlx5_core.sf.4"
}

// OfPCI is the instance of the PCI device at the address.
func OfPCI(address pci.Address) Device { return Device{Bus: "pci", Name: string(address)} }

// String is the handle as devlink(8) writes it.
func (d Device) String() string { return d.Bus + "/" + d.Name }

// EswitchMode is how a PF switches the frames of its Functions.
type EswitchMode string

// The modes of an eswitch.
const (
	Legacy    EswitchMode = "legacy"    // by MAC and VLAN, in the card
	Switchdev EswitchMode = "switchdev" // as its representors say
)

var eswitchModes = []EswitchMode{
	unix.DEVLINK_ESWITCH_MODE_LEGACY: Legacy, unix.DEVLINK_ESWITCH_MODE_SWITCHDEV: Switchdev,
}

// EswitchMode asks for the mode of a PF's eswitch. A later kernel's mode is a number, such as "2".
// EOPNOTSUPP: there is no eswitch.
func (c *Conn) EswitchMode(d Device) (mode EswitchMode, err error) {
	defer explain(&err, "dev eswitch show %s", d)
	attrs, err := c.ask(unix.DEVLINK_CMD_ESWITCH_GET, d)
	if err != nil {
		return "", err
	}
	if !attrs.Has(unix.DEVLINK_ATTR_ESWITCH_MODE) {
		return "", fmt.Errorf("no mode: %w", unix.EOPNOTSUPP)
	}
	return word(eswitchModes, attrs.Uint16(unix.DEVLINK_ATTR_ESWITCH_MODE)), nil
}

// SetEswitchMode changes the mode. Drivers may replace netdevs of the PF, and refuse a change while
// Functions are in use.
func (c *Conn) SetEswitchMode(d Device, mode EswitchMode) (err error) {
	number := slices.Index(eswitchModes, mode)
	if number < 0 {
		return fmt.Errorf("eswitch mode %q of %s: must be %s or %s", mode, d, Legacy, Switchdev)
	}
	defer explain(&err, "dev eswitch set %s mode %s", d, mode)
	_, err = c.do(unix.DEVLINK_CMD_ESWITCH_SET,
		d, nl.NewRtAttr(unix.DEVLINK_ATTR_ESWITCH_MODE, nl.Uint16Attr(uint16(number))))
	return err
}

// Info is what the driver of a device tells of it.
type Info struct {
	Serial string // serial number of the card, "" if it tells none
	// Fixed are the versions of what cannot change, such as "board.id", Running those of what runs
	// on it, such as "fw.app.name".
	Fixed, Running map[string]string
}

// Info asks the driver of a device. EOPNOTSUPP: it tells nothing.
func (c *Conn) Info(d Device) (info Info, err error) {
	defer explain(&err, "dev info %s", d)
	messages, err := c.do(unix.DEVLINK_CMD_INFO_GET, d)
	if err != nil {
		return info, err
	}

	info.Fixed, info.Running = map[string]string{}, map[string]string{}
	versions := map[uint16]map[string]string{
		unix.DEVLINK_ATTR_INFO_VERSION_FIXED:   info.Fixed,
		unix.DEVLINK_ATTR_INFO_VERSION_RUNNING: info.Running,
	}

	for _, message := range messages {
		for kind, value := range attribute.All(message) {
			if kind == unix.DEVLINK_ATTR_INFO_SERIAL_NUMBER {
				info.Serial = unix.ByteSliceToString(value)
			}

			if versions[kind] == nil {
				continue
			}

			version, err := attribute.Parse(value)
			if err != nil {
				return info, err
			}

			versions[kind][version.Text(unix.DEVLINK_ATTR_INFO_VERSION_NAME)] = version.Text(
				unix.DEVLINK_ATTR_INFO_VERSION_VALUE,
			)
		}
	}

	return info, nil
}

// Reporter is a health reporter of a device or of one of its ports.
type Reporter struct {
	Device             Device
	Port               int    // index of the port that it belongs to, -1 for the device's own
	Name               string // "fw_fatal", "tx"
	Failed             bool   // it did not recover from an error
	Errors, Recoveries uint64 // how many there were
}

// Reporters lists the health reporters of all devices and ports in the Conn's namespace.
func (c *Conn) Reporters() (reporters []Reporter, err error) {
	defer explain(&err, "health show")
	return list(c, unix.DEVLINK_CMD_HEALTH_REPORTER_GET, decodeReporter)
}

// Handle is the device or port of the reporter as devlink(8) writes it: "pci/0000:3b:00.0",
// "pci/0000:3b:00.0/1".
func (r Reporter) Handle() string {
	if r.Port < 0 {
		return r.Device.String()
	}
	return fmt.Sprintf("%s/%d", r.Device, r.Port)
}

func decodeReporter(attrs attribute.Set) (Reporter, error) {
	reporter, err := attribute.Parse(attrs[unix.DEVLINK_ATTR_HEALTH_REPORTER])
	if err != nil {
		return Reporter{}, fmt.Errorf("health reporter: %w", err)
	}

	port := -1
	if attrs.Has(unix.DEVLINK_ATTR_PORT_INDEX) {
		port = int(attrs.Uint32(unix.DEVLINK_ATTR_PORT_INDEX))
	}

	return Reporter{
		Device: deviceOf(attrs),
		Port:   port,
		Name:   reporter.Text(unix.DEVLINK_ATTR_HEALTH_REPORTER_NAME),
		// 0 is healthy, all else an error
		Failed:     reporter.Uint8(unix.DEVLINK_ATTR_HEALTH_REPORTER_STATE) != 0,
		Errors:     reporter.Uint64(unix.DEVLINK_ATTR_HEALTH_REPORTER_ERR_COUNT),
		Recoveries: reporter.Uint64(unix.DEVLINK_ATTR_HEALTH_REPORTER_RECOVER_COUNT),
	}, nil
}
