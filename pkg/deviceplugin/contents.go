package deviceplugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/pool"
)

// Contents looks up what a container gets of a Function: device nodes and environment. The environment is that of
// sriov-network-device-plugin.
type Contents struct {
	// SysRoot is where the host's sysfs is, "/sys".
	SysRoot string
	// DevRoot is where the host's device nodes can be looked for, "/dev". What containers are given is below /dev in any
	// case.
	DevRoot string
}

// Paths of device nodes, for the host and for containers.
const (
	devVFIO     = "/dev/vfio/vfio"
	devVhostNet = "/dev/vhost-net"
	devTun      = "/dev/net/tun"
	devRDMACM   = "/dev/infiniband/rdma_cm"
)

// content is what a container gets of one Function.
type content struct {
	function inventory.Function
	// info is the Function's entry in PCIDEVICE_.._INFO: values by subject and name.
	info  map[string]map[string]string
	nodes []deviceNode
	// rdma are names of RDMA devices that the pool asks for.
	rdma []string
	// vdpa says whether the pool asks for the Function's vDPA device.
	vdpa bool
	// vhostNet says whether the container gets the node of that name.
	vhostNet bool
}

// deviceNode is a file below /dev.
type deviceNode struct {
	host, container string
	permissions     string // some of "rwm", as cgroups have it
}

// of looks up what a container gets of a Function of the pool. It fails where the container could not use it.
func (c *Contents) of(f inventory.Function, p pool.Pool) (content, error) {
	out := content{function: f, info: map[string]map[string]string{"generic": {"deviceID": f.ID.String()}}}
	options := p.Options(f)
	steps := []struct {
		wanted bool
		add    func(*content) error
	}{
		{f.Driver == "vfio-pci", c.vfio},
		{slices.Contains(uioDrivers, f.Driver), c.uio},
		{options.VDPA != "", c.vdpa},
		{options.RDMA, c.rdma},
		{devicePlugin(p).NeedVhostNet, c.vhost},
	}
	for _, step := range steps {
		if !step.wanted {
			continue
		}
		if err := step.add(&out); err != nil {
			return content{}, fmt.Errorf("Function %s: %w", f.ID, err)
		}
	}
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

// uioDrivers hand a device to a program, without an IOMMU in between.
var uioDrivers = []string{"igb_uio", "uio", "uio_pci_generic"}

func (c *Contents) vfio(out *content) error {
	group := out.function.IOMMUGroup
	if group == "" {
		return errors.New("is bound to vfio-pci but has no IOMMU group: turn the IOMMU on, or the no-IOMMU mode of vfio")
	}
	// Without an IOMMU the node on the host has a prefix, which programs do not know.
	host, container := "/dev/vfio/"+group, "/dev/vfio/"+strings.TrimPrefix(group, "noiommu-")
	out.nodes = append(out.nodes, deviceNode{devVFIO, devVFIO, "rw"}, deviceNode{host, container, "rw"})
	out.info["vfio"] = map[string]string{"mount": devVFIO, "dev-mount": container}
	return nil
}

func (c *Contents) uio(out *content) error {
	names, err := list(filepath.Join(c.device(out.function), "uio"))
	if err != nil {
		return err
	}
	if len(names) == 0 {
		return fmt.Errorf("is bound to %s but has no UIO device", out.function.Driver)
	}
	path := "/dev/" + names[0]
	out.nodes = append(out.nodes, deviceNode{path, path, "rwm"})
	out.info["uio"] = map[string]string{"mount": path}
	return nil
}

func (c *Contents) vdpa(out *content) error {
	device := out.function.VDPA
	if device.Name == "" {
		return errors.New("has no vDPA device, which its pool asks for: make one with vdpa(8)")
	}
	out.vdpa, out.info["vdpa"] = true, map[string]string{}
	if device.CharDevice != "" {
		path := "/dev/" + device.CharDevice
		out.nodes = append(out.nodes, deviceNode{path, path, "rwm"})
		out.info["vdpa"]["mount"] = path
	}
	return nil
}

func (c *Contents) rdma(out *content) error {
	if len(out.function.RDMADevices) == 0 {
		return errors.New("has no RDMA device, which its pool asks for: load the RDMA driver of the NIC")
	}
	out.rdma = out.function.RDMADevices
	info := map[string]string{"rdma_dev": out.rdma[0]}
	out.info["rdma"] = info
	// Each directory has an entry for every character device, which is below /dev/infiniband: uverbs0, umad0, issm0.
	for _, class := range []string{"infiniband_verbs", "infiniband_mad"} {
		names, err := list(filepath.Join(c.device(out.function), class))
		if err != nil {
			return err
		}
		for _, name := range names {
			path := "/dev/infiniband/" + name
			out.nodes = append(out.nodes, deviceNode{path, path, "rw"})
			info[strings.TrimRight(name, "0123456789")] = path
		}
	}
	if c.exists(devRDMACM) {
		out.nodes = append(out.nodes, deviceNode{devRDMACM, devRDMACM, "rw"})
		info["rdma_cm"] = devRDMACM
	}
	return nil
}

func (c *Contents) vhost(out *content) error {
	for _, path := range []string{devVhostNet, devTun} {
		if !c.exists(path) {
			return fmt.Errorf("its pool needs %s, which the node does not have: load the modules vhost_net and tun", path)
		}
		out.nodes = append(out.nodes, deviceNode{path, path, "rw"})
	}
	out.vhostNet = true
	out.info["vhost"] = map[string]string{"net-mount": devVhostNet, "tun-mount": devTun}
	return nil
}

func (c *Contents) exists(devicePath string) bool {
	_, err := os.Stat(filepath.Join(c.DevRoot, strings.TrimPrefix(devicePath, "/dev/")))
	return err == nil
}

// device is the directory of a Function in sysfs.
func (c *Contents) device(f inventory.Function) string {
	if f.Kind == inventory.SF {
		return filepath.Join(c.SysRoot, "bus/auxiliary/devices", f.AuxDevice)
	}
	return filepath.Join(c.SysRoot, "bus/pci/devices", string(f.ID.Address))
}

// list returns the names in a directory, sorted. A directory that is not there has none.
func list(dir string) ([]string, error) {
	f, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	slices.Sort(names)
	return names, err
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
			if withNodes && !seen[n.host] {
				seen[n.host] = true
				out.Devices = append(out.Devices,
					&pluginapi.DeviceSpec{HostPath: n.host, ContainerPath: n.container, Permissions: n.permissions})
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
