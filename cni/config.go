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

const (
	// addTimeout is how long ADD may take if the configuration does not say it: half of what the kubelet gives the runtime for a
	// pod's sandbox with all of its networks. The rest is for undoing a network that failed.
	addTimeout = 2 * time.Minute
	// askTimeout is how long the agent may take for any other command, and how long the IPAM plugin may.
	askTimeout = 30 * time.Second
)

// config has the fields of a network configuration that the shim itself needs. The agent gets the whole configuration.
type config struct {
	CNIVersion string `json:"cniVersion"`
	Name       string `json:"name"`

	IPAM          types.IPAM    `json:"ipam"` // empty for an interface without addresses
	Socket        string        `json:"socket"`
	SpoolDir      string        `json:"spoolDir"`
	Timeout       time.Duration `json:"timeout"` // of ADD
	RuntimeConfig struct {
		DeviceInfoFile string `json:"CNIDeviceInfoFile"` // the runtime wants the device's description there; may be empty
	} `json:"runtimeConfig"`
}

// interfaceFirst says that the interface must be in the pod before the IPAM plugin runs: DHCP works over it.
func (c config) interfaceFirst() bool { return c.IPAM.Type == "dhcp" }

// parseConfig reads a network configuration. The file for the device's description must be in deviceInfoDir. The error is a
// [types.Error] that names everything that is wrong. Fields that are missing or wrong get their defaults.
func parseConfig(data []byte, deviceInfoDir string) (config, error) {
	c := config{Timeout: addTimeout}
	fields := struct {
		*config
		Timeout any `json:"timeout"`
	}{config: &c}
	errs := []error{json.Unmarshal(data, &fields)} // which skips fields of a wrong type
	if fields.Timeout != nil {
		text, _ := fields.Timeout.(string)
		if c.Timeout, _ = time.ParseDuration(text); c.Timeout <= 0 {
			errs = append(errs, fmt.Errorf(`timeout: %v is not a duration; write it like "90s", more than 0`, fields.Timeout))
			c.Timeout = addTimeout
		}
	}
	c.CNIVersion = cmp.Or(c.CNIVersion, "0.1.0") // what no version means in the specification
	absolute := func(field, path, fallback string) string {
		if path != "" && !filepath.IsAbs(path) {
			errs = append(errs, fmt.Errorf("%s: %q must be an absolute path", field, path))
			path = ""
		}
		return cmp.Or(path, fallback)
	}
	c.Socket = absolute("socket", c.Socket, wire.DefaultSocket)
	c.SpoolDir = absolute("spoolDir", c.SpoolDir, wire.DefaultSpoolDir)
	if c.IPAM.Type == wire.IPAM {
		c.IPAM = types.IPAM{} // the agent does it
	}
	if strings.ContainsRune(c.IPAM.Type, filepath.Separator) {
		errs = append(errs, fmt.Errorf("ipam.type: %q must be the name of a plugin, not a path", c.IPAM.Type))
		c.IPAM.Type = ""
	}
	if file := c.RuntimeConfig.DeviceInfoFile; file != "" && file != filepath.Join(deviceInfoDir, filepath.Base(file)) {
		errs = append(errs, fmt.Errorf("runtimeConfig.CNIDeviceInfoFile: %q must be a file in %s", file, deviceInfoDir))
		c.RuntimeConfig.DeviceInfoFile = ""
	}
	if err := errors.Join(errs...); err != nil {
		return c, types.NewError(types.ErrInvalidNetworkConfig, strings.TrimSpace("network configuration "+c.Name), err.Error())
	}
	return c, nil
}
