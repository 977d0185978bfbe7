package devlink

import (
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

var eswitchModes = map[uint16]EswitchMode{
	unix.DEVLINK_ESWITCH_MODE_LEGACY:    Legacy,
	unix.DEVLINK_ESWITCH_MODE_SWITCHDEV: Switchdev,
}

// EswitchMode asks for the mode of a PF's eswitch. EOPNOTSUPP: the PF has none. A mode that is neither of those known
// here is its number, such as "2".
func (c *Conn) EswitchMode(d Device) (EswitchMode, error) {
	mode, err := c.eswitchMode(d)
	if err != nil {
		return "", fmt.Errorf("devlink dev eswitch show %s: %w", d, err)
	}
	return mode, nil
}

func (c *Conn) eswitchMode(d Device) (EswitchMode, error) {
	messages, err := c.do(unix.DEVLINK_CMD_ESWITCH_GET, d)
	if err != nil {
		return "", err
	}
	attrs, err := one(messages)
	if err != nil {
		return "", err
	}
	if !attrs.Has(unix.DEVLINK_ATTR_ESWITCH_MODE) {
		return "", fmt.Errorf("no mode: %w", unix.EOPNOTSUPP)
	}
	n := attrs.Uint16(unix.DEVLINK_ATTR_ESWITCH_MODE)
	if mode, known := eswitchModes[n]; known {
		return mode, nil
	}
	return EswitchMode(fmt.Sprint(n)), nil
}

// SetEswitchMode changes the mode of a PF's eswitch. Drivers may make netdevs of the PF anew with it, and refuse it
// while Functions are in use.
func (c *Conn) SetEswitchMode(d Device, mode EswitchMode) error {
	for n, name := range eswitchModes {
		if name != mode {
			continue
		}
		number := nl.NewRtAttr(unix.DEVLINK_ATTR_ESWITCH_MODE, nl.Uint16Attr(n))
		_, err := c.do(unix.DEVLINK_CMD_ESWITCH_SET, d, number)
		if err != nil {
			return fmt.Errorf("devlink dev eswitch set %s mode %s: %w", d, mode, err)
		}
		return nil
	}
	return fmt.Errorf("eswitch mode %q of %s: must be %s or %s", mode, d, Legacy, Switchdev)
}
