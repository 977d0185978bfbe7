// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
)

// pluginName is the name of the shim's binary.
const pluginName = "xpu-cni"

const (
	// addTimeout limits an ADD if the configuration has no timeout. It is half of the time that the
	// kubelet gives the runtime for a pod's sandbox with all of its networks. The rest is for
	// undoing a network that failed.
	addTimeout = 2 * time.Minute
	// maxTimeout is the longest timeout of a configuration. It is longer than any runtime waits.
	maxTimeout = 10 * time.Minute
	// maxDetails limits an error about a network configuration or an IPAM plugin, in bytes, because
	// the error quotes text of a tenant or of the plugin and becomes a pod's event.
	maxDetails = 4096
	// askTimeout limits any other command of the agent, and each command of the IPAM plugin.
	askTimeout = 30 * time.Second
)

// config has the fields of a network configuration that the shim itself needs. The agent gets the
// whole configuration.
type config struct {
	CNIVersion string `json:"cniVersion"`
	Name       string `json:"name"`
	Type       string `json:"type"`

	IPAM          types.IPAM    `json:"ipam"`    // empty for an interface without addresses
	Timeout       time.Duration `json:"timeout"` // of ADD
	RuntimeConfig struct {
		// DeviceInfoFile is where the runtime expects the device's description; may be empty.
		DeviceInfoFile string `json:"CNIDeviceInfoFile"`
	} `json:"runtimeConfig"`
}

// site has the values of the node and the runtime with which a network configuration must agree.
type site struct {
	Paths
	deviceInfoDir string
	containerID   string // "" for GC and STATUS
}

// interfaceFirst reports whether the interface must be in the pod before the IPAM plugin runs,
// because DHCP uses it.
func (c config) interfaceFirst() bool { return c.IPAM.Type == "dhcp" }

// parseConfig parses a network configuration. The error is a [types.Error] that names everything
// that is wrong. Fields that are missing or invalid get their defaults.
func parseConfig(data []byte, here site) (config, error) {
	c := config{Timeout: addTimeout}
	fields := struct {
		*config
		Paths
		Timeout any `json:"timeout"`
	}{config: &c}

	errs := []error{json.Unmarshal(data, &fields)} // skips fields of a wrong type

	if fields.Timeout != nil {
		text, _ := fields.Timeout.(string)
		if c.Timeout, _ = time.ParseDuration(text); c.Timeout <= 0 || c.Timeout > maxTimeout {
			errs = append(errs,
				fmt.Errorf(`timeout: %.64v is not a duration; write it like "90s", more than 0 and `+
					`at most %s`, fields.Timeout, maxTimeout))
			c.Timeout = addTimeout
		}
	}

	c.Name = c.Name[:min(len(c.Name), maxNetwork)] // for errors and files
	// a missing version means 0.1.0 in the specification
	c.CNIVersion = cmp.Or(c.CNIVersion, "0.1.0")
	errs = append(errs, here.checkPath("socket", fields.Socket, here.Socket),
		here.checkPath("spoolDir", fields.SpoolDir, here.SpoolDir))
	errs = append(errs, c.checkIPAM(), c.checkDeviceInfoFile(here))

	if err := errors.Join(errs...); err != nil {
		return c, types.NewError(types.ErrInvalidNetworkConfig,
			strings.TrimSpace("network configuration "+c.Name), bounded(err.Error()))
	}

	return c, nil
}

// bounded returns a text, cut to maxDetails.
func bounded(text string) string {
	return strings.ToValidUTF8(text[:min(len(text), maxDetails)], "")
}

// checkPath refuses a path of a network configuration that is not the node's.
func (site) checkPath(field, path, nodes string) error {
	if path == "" || path == nodes {
		return nil
	}
	return fmt.Errorf("%s: %q is not this node's, which is %q; leave %s out: the node's "+
		"administrator sets it for all networks, "+
		"in the file xpu-cni.json beside the plugin", field, path, nodes, field)
}

// checkIPAM refuses an IPAM plugin that is a path, and the shim itself, which would run itself
// without end. It removes both from the configuration.
func (c *config) checkIPAM() (err error) {
	switch {
	case c.IPAM.Type == wire.IPAM:
		c.IPAM = types.IPAM{} // the agent does it
	case strings.ContainsRune(c.IPAM.Type, filepath.Separator):
		err = fmt.Errorf("ipam.type: %q must be the name of a plugin, not a path", c.IPAM.Type)
	case c.IPAM.Type == pluginName || c.IPAM.Type != "" && c.IPAM.Type == c.Type:
		err = fmt.Errorf("ipam.type: %q is this plugin, which gives no addresses", c.IPAM.Type)
	}

	if err != nil {
		c.IPAM.Type = ""
	}

	return err
}

// checkDeviceInfoFile refuses a file outside the directory for descriptions, and a file that may
// belong to another container. It removes both from the configuration. Multus names the file by
// network, container ID and interface.
func (c *config) checkDeviceInfoFile(here site) (err error) {
	file := c.RuntimeConfig.DeviceInfoFile
	switch {
	case file == "":
		return nil
	case file != filepath.Join(here.deviceInfoDir, filepath.Base(file)):
		err = fmt.Errorf("runtimeConfig.CNIDeviceInfoFile: %q must be a file in %s",
			file, here.deviceInfoDir)
	case !strings.Contains(filepath.Base(file), here.containerID):
		err = fmt.Errorf("runtimeConfig.CNIDeviceInfoFile: %q must have the container ID %s in "+
			"its name, because another "+
			"container's file would be replaced", file, here.containerID)
	default:
		return nil
	}

	c.RuntimeConfig.DeviceInfoFile = ""
	return err
}
