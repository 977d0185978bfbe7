// SPDX-License-Identifier: Apache-2.0

// Package devlink implements the part of the kernel's devlink (Documentation/networking/devlink)
// that this project needs: the eswitch of a PF, the ports behind its Functions, subfunctions, rate
// objects and health reporters. The numbers are defined in include/uapi/linux/devlink.h.
//
// Errors begin with the equivalent command of devlink(8) and contain the kernel's message, if there
// is one. They match the error number of the kernel by [errors.Is], for example
// [golang.org/x/sys/unix.EOPNOTSUPP].
package devlink

import (
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// Device is the handle of a devlink instance, such as "pci/0000:3b:00.0". It is comparable.
type Device struct {
	Bus  string // "pci", "auxiliary"
	Name string // on the bus: a PCI address, or "mlx5_core.sf.4"
}

// OfPCI returns the devlink instance of the PCI device at the address.
func OfPCI(address pci.Address) Device { return Device{Bus: "pci", Name: string(address)} }

// String returns the handle as devlink(8) writes it.
func (d Device) String() string { return d.Bus + "/" + d.Name }

// EswitchMode is how the eswitch of a PF forwards frames.
type EswitchMode string

// These are the modes of an eswitch.
const (
	Legacy    EswitchMode = "legacy"    // the card forwards by MAC and VLAN
	Switchdev EswitchMode = "switchdev" // the representors decide where frames go
)

var eswitchModes = []EswitchMode{
	unix.DEVLINK_ESWITCH_MODE_LEGACY: Legacy, unix.DEVLINK_ESWITCH_MODE_SWITCHDEV: Switchdev,
}

// EswitchMode returns the mode of a PF's eswitch. A mode that only later kernels have is returned
// as a number, such as "2". The error matches EOPNOTSUPP if there is no eswitch.
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

// SetEswitchMode changes the mode of a PF's eswitch. Some drivers replace the PF's netdev, and some
// refuse the change while Functions are in use.
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

// Info is what the driver reports about a device.
type Info struct {
	Serial string // serial number of the card, or "" if the driver does not report it
	// Fixed holds the versions of parts that cannot change, such as "board.id". Running holds the
	// versions of what runs on the device, such as "fw.app.name".
	Fixed, Running map[string]string
}

// Info returns what the driver of a device reports. The error matches EOPNOTSUPP if the driver
// reports nothing.
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
	Port               int    // index of its port, or -1 for the device itself
	Name               string // "fw_fatal", "tx"
	Failed             bool   // not recovered from an error
	Errors, Recoveries uint64 // how many there were
}

// Reporters lists the health reporters of all devices and ports in the Conn's namespace.
func (c *Conn) Reporters() (reporters []Reporter, err error) {
	defer explain(&err, "health show")
	return list(c, unix.DEVLINK_CMD_HEALTH_REPORTER_GET, decodeReporter)
}

// Handle returns the device or port of the reporter as devlink(8) writes it, such as
// "pci/0000:3b:00.0" or "pci/0000:3b:00.0/1".
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
		// State 0 is healthy (enum devlink_health_reporter_state). Every other state is an error.
		Failed:     reporter.Uint8(unix.DEVLINK_ATTR_HEALTH_REPORTER_STATE) != 0,
		Errors:     reporter.Uint64(unix.DEVLINK_ATTR_HEALTH_REPORTER_ERR_COUNT),
		Recoveries: reporter.Uint64(unix.DEVLINK_ATTR_HEALTH_REPORTER_RECOVER_COUNT),
	}, nil
}
