package devlink

import (
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

var eswitchModes = []EswitchMode{
	unix.DEVLINK_ESWITCH_MODE_LEGACY: Legacy, unix.DEVLINK_ESWITCH_MODE_SWITCHDEV: Switchdev,
}

// EswitchMode asks for the mode of a PF's eswitch. EOPNOTSUPP: the PF has none. A mode that is neither of those known
// here is its number, such as "2".
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

// SetEswitchMode changes the mode of a PF's eswitch. Drivers may make netdevs of the PF anew with it, and refuse it
// while Functions are in use.
func (c *Conn) SetEswitchMode(d Device, mode EswitchMode) (err error) {
	number := slices.Index(eswitchModes, mode)
	if number < 0 {
		return fmt.Errorf("eswitch mode %q of %s: must be %s or %s", mode, d, Legacy, Switchdev)
	}
	defer explain(&err, "dev eswitch set %s mode %s", d, mode)
	_, err = c.do(unix.DEVLINK_CMD_ESWITCH_SET, d, nl.NewRtAttr(unix.DEVLINK_ATTR_ESWITCH_MODE, nl.Uint16Attr(uint16(number))))
	return err
}
