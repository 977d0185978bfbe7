// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// content is what a container gets of one Function. Its Info is the Function's entry in
// PCIDEVICE_.._INFO.
type content struct {
	function function.Function
	devnode.Set
}

// contentOf returns what a container gets of a Function of the pool. It fails if the container
// could not use the Function. byCDI says that the container gets its device nodes by CDI, and not
// from the kubelet.
func contentOf(
	nodes *devnode.Finder, f function.Function, p pool.Pool, byCDI bool,
) (content, error) {
	set, err := nodes.Of(f, devnode.Wish{
		Driver: string(p.Spec.Driver), Options: p.Options(f),
		VhostNet: devicePlugin(p).NeedVhostNet, Remembered: !byCDI,
	})
	if err != nil {
		return content{}, fmt.Errorf("Function %s: %w", f.ID, err)
	}

	set.Info["generic"] = map[string]string{"deviceID": f.ID.String()}
	if extra := devicePlugin(p).AdditionalInfo; extra != nil {
		set.Info["extra"] = map[string]string{}
		for _, key := range []string{"*", string(f.ID.Address), f.ID.String()} {
			maps.Copy(set.Info["extra"], extra[key])
		}
	}

	return content{function: f, Set: set}, nil
}

// devicePlugin returns spec.devicePlugin of the pool.
func devicePlugin(p pool.Pool) v1alpha1.DevicePluginSpec {
	return ptr.Deref(p.Spec.DevicePlugin, v1alpha1.DevicePluginSpec{})
}

// response returns the answer to the kubelet for one container, in the format of
// sriov-network-device-plugin.
func response(
	resource string, contents []content, byCDI bool,
) *pluginapi.ContainerAllocateResponse {
	ids := make([]string, 0, len(contents))
	info := map[string]map[string]map[string]string{}
	out := &pluginapi.ContainerAllocateResponse{}
	seen := map[string]bool{}
	for _, c := range contents {
		id := c.function.ID.String()
		ids = append(ids, id)
		info[id] = c.Info

		if byCDI && len(c.Nodes) > 0 {
			name := cdiKind + "=" + cdiDeviceName(resource, c.function.ID)
			out.CdiDevices = append(out.CdiDevices, &pluginapi.CDIDevice{Name: name})
		}

		for _, n := range c.Nodes {
			if !byCDI && !seen[n.HostPath] {
				seen[n.HostPath] = true
				out.Devices = append(out.Devices,
					&pluginapi.DeviceSpec{
						HostPath: n.HostPath, ContainerPath: n.Path, Permissions: n.Permissions,
					})
			}
		}
	}

	text, _ := json.Marshal(info) // maps of strings have no error
	name := environmentName(resource)
	out.Envs = map[string]string{name: strings.Join(ids, ","), name + "_INFO": string(text)}

	return out
}

// environmentName returns the name of the variable with the Functions' IDs:
// "PCIDEVICE_INTEL_COM_DPDK-1" for "intel.com/dpdk-1". Programs expect the hyphen, although shells
// do not accept it.
func environmentName(resource string) string {
	return "PCIDEVICE_" + strings.ToUpper(strings.NewReplacer("/", "_", ".", "_").Replace(resource))
}
