package devlink

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// Reporters lists the health reporters of all devices and ports in the Conn's namespace.
func (c *Conn) Reporters() (reporters []Reporter, err error) {
	defer explain(&err, "health show")
	return list(c, unix.DEVLINK_CMD_HEALTH_REPORTER_GET, decodeReporter)
}

// Handle is what the reporter belongs to as devlink(8) writes it: "pci/0000:3b:00.0", with "/" and the port's index
// for a port's.
func (r Reporter) Handle() string {
	if r.Port < 0 {
		return r.Device.String()
	}
	return fmt.Sprintf("%s/%d", r.Device, r.Port)
}

// stateHealthy is DEVLINK_HEALTH_REPORTER_STATE_HEALTHY; the kernel has one other, an error.
const stateHealthy uint8 = 0

func decodeReporter(attrs attribute.Set) (Reporter, error) {
	reporter, err := attrs.Nested(unix.DEVLINK_ATTR_HEALTH_REPORTER)
	if err != nil {
		return Reporter{}, fmt.Errorf("health reporter: %w", err)
	}
	port := -1
	if attrs.Has(unix.DEVLINK_ATTR_PORT_INDEX) {
		port = int(attrs.Uint32(unix.DEVLINK_ATTR_PORT_INDEX))
	}
	return Reporter{
		Device:     deviceOf(attrs),
		Port:       port,
		Name:       reporter.Text(unix.DEVLINK_ATTR_HEALTH_REPORTER_NAME),
		Failed:     reporter.Uint8(unix.DEVLINK_ATTR_HEALTH_REPORTER_STATE) != stateHealthy,
		Errors:     reporter.Uint64(unix.DEVLINK_ATTR_HEALTH_REPORTER_ERR_COUNT),
		Recoveries: reporter.Uint64(unix.DEVLINK_ATTR_HEALTH_REPORTER_RECOVER_COUNT),
	}, nil
}
