package devlink

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// RunningVersions are what runs on a device, as "devlink dev info" shows it, by name: "fw.app.name". EOPNOTSUPP: its
// driver tells none.
func (c *Conn) RunningVersions(d Device) (map[string]string, error) {
	messages, err := c.do(unix.DEVLINK_CMD_INFO_GET, d)
	if err != nil {
		return nil, fmt.Errorf("devlink dev info %s: %w", d, err)
	}
	versions := map[string]string{}
	for _, message := range messages {
		for kind, value := range attribute.All(message) {
			if kind != unix.DEVLINK_ATTR_INFO_VERSION_RUNNING {
				continue
			}
			version, err := attribute.Parse(value)
			if err != nil {
				return nil, fmt.Errorf("devlink dev info %s: %w", d, err)
			}
			versions[version.Text(unix.DEVLINK_ATTR_INFO_VERSION_NAME)] = version.Text(unix.DEVLINK_ATTR_INFO_VERSION_VALUE)
		}
	}
	return versions, nil
}
