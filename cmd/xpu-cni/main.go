// SPDX-License-Identifier: Apache-2.0

// Command xpu-cni is the CNI plugin that gives pods Functions. It sends the requests of the
// container runtime to the node's xpu-agent.
package main

import (
	"os"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	cniversion "github.com/containernetworking/cni/pkg/version"

	"github.com/opiproject/xpu-device-plugin/cni"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/uptime"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

func main() {
	plugin := cni.Plugin{
		DeviceInfoDir: cni.DefaultDeviceInfoDir, Paths: paths, Stdout: os.Stdout, Stderr: os.Stderr,
		Now: time.Now, Asked: asked,
	}
	// Without CNI_COMMAND it prints its name and version, whatever the arguments are.
	skel.PluginMainFuncs(plugin.Funcs(), cniversion.All, "xpu-cni "+version.String())
}

// paths returns the paths in the file next to this binary.
func paths() (cni.Paths, error) {
	binary, err := os.Executable()
	if err != nil {
		return cni.Paths{}, err
	}
	return cni.ReadPaths(cni.PathsFile(binary))
}

// asked returns the current moment. It returns the zero value if the boot ID cannot be read, so
// that the clock is used.
func asked() uptime.Moment {
	id, err := uptime.BootID("/proc")
	if err != nil {
		return uptime.Moment{}
	}
	return uptime.Of(id)
}
