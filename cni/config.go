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

	IPAM ipam `json:"ipam"`

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

// ipam is the part of the configuration that says who gives addresses.
type ipam struct {
	// Type is the name of the IPAM plugin; empty for no addresses.
	Type string `json:"type"`
}

// none says that the interface gets no addresses.
func (i ipam) none() bool { return i.Type == "" }

// needsInterface says that the plugin works on the interface in the pod, which then has to be there before it runs:
// DHCP asks over it.
func (i ipam) needsInterface() bool { return i.Type == "dhcp" }

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

// parseConfig reads a network configuration. The error is a [types.Error].
func parseConfig(data []byte) (config, error) {
	var c config
	if err := json.Unmarshal(data, &c); err != nil {
		return config{}, types.NewError(types.ErrInvalidNetworkConfig, "network configuration", err.Error())
	}
	c.CNIVersion = cmp.Or(c.CNIVersion, "0.1.0") // what no version means in the specification
	c.Socket = cmp.Or(c.Socket, wire.DefaultSocket)
	c.SpoolDir = cmp.Or(c.SpoolDir, wire.DefaultSpoolDir)
	c.Timeout = cmp.Or(c.Timeout, duration(addTimeout))
	if err := c.validate(); err != nil {
		return config{}, types.NewError(types.ErrInvalidNetworkConfig, "network configuration "+c.Name, err.Error())
	}
	return c, nil
}

// salvageConfig reads what can be read of a network configuration, and says what cannot. DEL needs no more: with the
// configuration that it refused, ADD has failed, and the runtime would repeat for ever a DEL that refuses it too.
func salvageConfig(data []byte) (config, error) {
	c, wrong := parseConfig(data)
	if wrong == nil {
		return c, nil
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(data, &fields); err != nil {
		fields = nil
	}
	for field, value := range fields {
		alone, err := json.Marshal(map[string]json.RawMessage{field: value})
		if err == nil {
			_, err = parseConfig(alone)
		}
		if err != nil {
			delete(fields, field)
		}
	}
	good, err := json.Marshal(fields)
	if err == nil {
		c, err = parseConfig(good)
	}
	if err != nil { // not as far as is known: each field is good by itself
		c, _ = parseConfig([]byte("{}"))
	}
	return c, wrong
}

func (c config) validate() error {
	paths := []struct{ field, value string }{
		{"socket", c.Socket},
		{"spoolDir", c.SpoolDir},
	}
	for _, path := range paths {
		if !filepath.IsAbs(path.value) {
			return fmt.Errorf("%s: %q must be an absolute path", path.field, path.value)
		}
	}
	if strings.ContainsRune(c.IPAM.Type, filepath.Separator) {
		return fmt.Errorf("ipam.type: %q must be the name of a plugin, not a path", c.IPAM.Type)
	}
	return nil
}

// checkDeviceInfoFile refuses a file that is not directly in a directory. The error is a [types.Error].
func (c config) checkDeviceInfoFile(dir string) error {
	file := c.RuntimeConfig.DeviceInfoFile
	if file == "" || file == filepath.Join(dir, filepath.Base(file)) {
		return nil
	}
	return types.NewError(types.ErrInvalidNetworkConfig, "network configuration "+c.Name,
		fmt.Sprintf("runtimeConfig.CNIDeviceInfoFile: %q must be a file in %s", file, dir))
}
