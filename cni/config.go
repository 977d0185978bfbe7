package cni

import (
	"cmp"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
)

const (
	// addTimeout is how long ADD may take where the configuration does not say it. The kubelet gives the runtime 4
	// minutes for a pod's sandbox with all of its networks (twice --runtime-request-timeout); one network that cannot be
	// had in half of that is given up, which leaves time to undo it and to say why.
	addTimeout = 2 * time.Minute
	// askTimeout is how long the agent has for any other command, and askTimeout again the IPAM plugin.
	askTimeout = 30 * time.Second
)

// config is what the shim itself needs of a network configuration. The agent gets all of it.
type config struct {
	CNIVersion string `json:"cniVersion"`
	Name       string `json:"name"`

	// IPAM names the IPAM plugin. It is empty for an interface without addresses.
	IPAM types.IPAM `json:"ipam"`

	// Socket is where the agent listens.
	Socket string `json:"socket"`
	// SpoolDir is where requests are left for an agent that is away.
	SpoolDir string `json:"spoolDir"`
	// Timeout is how long ADD may take.
	Timeout duration `json:"timeout"`

	RuntimeConfig struct {
		// DeviceInfoFile is a path that the runtime wants the device's description in; may be empty.
		DeviceInfoFile string `json:"CNIDeviceInfoFile"`
	} `json:"runtimeConfig"`
}

// interfaceFirst says that the IPAM plugin works on the interface in the pod, which has to be there before the plugin
// runs: DHCP asks over it.
func (c config) interfaceFirst() bool { return c.IPAM.Type == "dhcp" }

// duration is a [time.Duration] that is written as "90s".
type duration time.Duration

// UnmarshalJSON implements [json.Unmarshaler].
func (d *duration) UnmarshalJSON(data []byte) error {
	if string(data) == "null" {
		return nil
	}
	var text string
	if err := json.Unmarshal(data, &text); err != nil {
		return fmt.Errorf(`timeout: %s is not a duration; write it like "90s"`, data)
	}
	parsed, err := time.ParseDuration(text)
	if err != nil || parsed <= 0 {
		return fmt.Errorf(`timeout: %q is not a duration of more than 0; write it like "90s"`, text)
	}
	*d = duration(parsed)
	return nil
}

// parseConfig reads a network configuration, whose file for the device's description must be in deviceInfoDir. The error
// is a [types.Error].
func parseConfig(data []byte, deviceInfoDir string) (config, error) {
	var c config
	if err := json.Unmarshal(data, &c); err != nil {
		return config{}, types.NewError(types.ErrInvalidNetworkConfig, "network configuration", err.Error())
	}
	c.CNIVersion = cmp.Or(c.CNIVersion, "0.1.0") // what no version means in the specification
	c.Socket = cmp.Or(c.Socket, wire.DefaultSocket)
	c.SpoolDir = cmp.Or(c.SpoolDir, wire.DefaultSpoolDir)
	c.Timeout = cmp.Or(c.Timeout, duration(addTimeout))
	if err := c.validate(deviceInfoDir); err != nil {
		return config{}, types.NewError(types.ErrInvalidNetworkConfig, "network configuration "+c.Name, err.Error())
	}
	return c, nil
}

// salvageConfig reads the valid fields of a network configuration. The error says what is wrong with the others. DEL needs
// no more: ADD has failed with the same configuration, and the runtime would repeat for ever a DEL that refuses it too.
func salvageConfig(data []byte, deviceInfoDir string) (config, error) {
	c, wrong := parseConfig(data, deviceInfoDir)
	if wrong == nil {
		return c, nil
	}
	var fields map[string]json.RawMessage
	_ = json.Unmarshal(data, &fields) // what is no JSON object has no fields
	for field, value := range fields {
		alone, _ := json.Marshal(map[string]json.RawMessage{field: value})
		if _, err := parseConfig(alone, deviceInfoDir); err != nil {
			delete(fields, field)
		}
	}
	valid, _ := json.Marshal(fields)
	c, err := parseConfig(valid, deviceInfoDir)
	if err != nil { // no two fields depend on each other today
		c, _ = parseConfig([]byte("{}"), deviceInfoDir)
	}
	return c, wrong
}

func (c config) validate(deviceInfoDir string) error {
	if !filepath.IsAbs(c.Socket) {
		return fmt.Errorf("socket: %q must be an absolute path", c.Socket)
	}
	if !filepath.IsAbs(c.SpoolDir) {
		return fmt.Errorf("spoolDir: %q must be an absolute path", c.SpoolDir)
	}
	if strings.ContainsRune(c.IPAM.Type, filepath.Separator) {
		return fmt.Errorf("ipam.type: %q must be the name of a plugin, not a path", c.IPAM.Type)
	}
	if file := c.RuntimeConfig.DeviceInfoFile; file != "" && file != filepath.Join(deviceInfoDir, filepath.Base(file)) {
		return fmt.Errorf("runtimeConfig.CNIDeviceInfoFile: %q must be a file in %s", file, deviceInfoDir)
	}
	return nil
}
