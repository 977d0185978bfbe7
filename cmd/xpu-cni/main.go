// SPDX-License-Identifier: Apache-2.0

// Command xpu-cni is the CNI plugin that gives pods Functions: it passes what the container runtime
// asks for to the node's xpu-agent.
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
	// Without CNI_COMMAND, whatever the arguments, it says what it is.
	skel.PluginMainFuncs(plugin.Funcs(), cniversion.All, "xpu-cni "+version.String())
}

// paths are those in the file beside this binary.
func paths() (cni.Paths, error) {
	binary, err := os.Executable()
	if err != nil {
		return cni.Paths{}, err
	}
	return cni.ReadPaths(cni.PathsFile(binary))
}

// asked is the present moment; the zero value where the boot cannot be told, so that the clock
// decides.
func asked() uptime.Moment {
	id, err := uptime.BootID("/proc")
	if err != nil {
		return uptime.Moment{}
	}
	return uptime.Of(id)
}
