package devlink

import (
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// RunningVersions are what runs on a device, as "devlink dev info" shows it, by name: "fw.app.name". EOPNOTSUPP: its
// driver tells none.
func (c *Conn) RunningVersions(d Device) (versions map[string]string, err error) {
	defer explain(&err, "dev info %s", d)
	messages, err := c.do(unix.DEVLINK_CMD_INFO_GET, d)
	if err != nil {
		return nil, err
	}
	versions = map[string]string{}
	for _, message := range messages {
		for kind, value := range attribute.All(message) {
			if kind != unix.DEVLINK_ATTR_INFO_VERSION_RUNNING {
				continue
			}
			version, err := attribute.Parse(value)
			if err != nil {
				return nil, err
			}
			versions[version.Text(unix.DEVLINK_ATTR_INFO_VERSION_NAME)] = version.Text(unix.DEVLINK_ATTR_INFO_VERSION_VALUE)
		}
	}
	return versions, nil
}
