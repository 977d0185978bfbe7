package deviceplugin

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// Contents looks up what a container gets of a Function: device nodes and environment. The environment is that of
// sriov-network-device-plugin.
type Contents struct {
	Nodes devnode.Finder
}

// content is what a container gets of one Function.
type content struct {
	function function.Function
	// info is the Function's entry in PCIDEVICE_.._INFO: values by subject and name.
	info  map[string]map[string]string
	nodes []devnode.Node
}

// of looks up what a container gets of a Function of the pool. It fails where the container could not use it.
func (c *Contents) of(f function.Function, p pool.Pool) (content, error) {
	options := p.Options(f)
	set, err := c.Nodes.Of(f, devnode.Wish{
		Driver: string(p.Spec.Driver), RDMA: options.RDMA, VDPA: options.VDPA != "", VhostNet: devicePlugin(p).NeedVhostNet,
	})
	if err != nil {
		return content{}, fmt.Errorf("Function %s: %w", f.ID, err)
	}
	out := content{function: f, info: set.Info, nodes: set.Nodes}
	out.info["generic"] = map[string]string{"deviceID": f.ID.String()}
	if extra := devicePlugin(p).AdditionalInfo; extra != nil {
		out.info["extra"] = map[string]string{}
		for _, key := range []string{"*", string(f.ID.Address), f.ID.String()} {
			maps.Copy(out.info["extra"], extra[key])
		}
	}
	return out, nil
}

// devicePlugin is how the device plugin offers the pool.
func devicePlugin(p pool.Pool) v1alpha1.DevicePluginSpec {
	if p.Spec.DevicePlugin == nil {
		return v1alpha1.DevicePluginSpec{}
	}
	return *p.Spec.DevicePlugin
}

// response is what the kubelet is told of one container. Nodes are left out where the container gets them by CDI.
func response(resource string, contents []content, withNodes bool) (*pluginapi.ContainerAllocateResponse, error) {
	ids := make([]string, 0, len(contents))
	info := map[string]map[string]map[string]string{}
	out := &pluginapi.ContainerAllocateResponse{}
	seen := map[string]bool{}
	for _, c := range contents {
		id := c.function.ID.String()
		ids = append(ids, id)
		info[id] = c.info
		for _, n := range c.nodes {
			if withNodes && !seen[n.Host] {
				seen[n.Host] = true
				out.Devices = append(out.Devices,
					&pluginapi.DeviceSpec{HostPath: n.Host, ContainerPath: n.Container, Permissions: n.Permissions})
			}
		}
	}
	text, err := json.Marshal(info)
	if err != nil {
		return nil, err
	}
	name := environmentName(resource)
	out.Envs = map[string]string{name: strings.Join(ids, ","), name + "_INFO": string(text)}
	return out, nil
}

// environmentName is the name of the variable that has the Functions' IDs: "intel.com/dpdk-1" gives
// "PCIDEVICE_INTEL_COM_DPDK-1". Programs look for this name, with the hyphen that no shell likes.
func environmentName(resource string) string {
	return "PCIDEVICE_" + strings.ToUpper(strings.NewReplacer("/", "_", ".", "_").Replace(resource))
}
