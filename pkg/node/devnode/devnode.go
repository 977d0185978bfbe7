// Package devnode finds the files below /dev that a program needs to use a Function: those of its IOMMU group, its UIO,
// RDMA and vDPA devices.
package devnode

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// Paths of device nodes, for the host and for containers.
const (
	vfio     = "/dev/vfio/vfio"
	vhostNet = "/dev/vhost-net"
	tun      = "/dev/net/tun"
	rdmaCM   = "/dev/infiniband/rdma_cm"
)

// Finder looks device nodes up. Its methods may be called by several goroutines at once.
type Finder struct {
	// SysRoot is where the host's sysfs is, "/sys".
	SysRoot string
	// DevRoot is where the host's device nodes are seen, "/dev". Containers get paths below /dev in any case.
	DevRoot string
}

// Wish is what a container is to get of a Function, beside the device nodes of its driver.
type Wish struct {
	// Driver is the one that will be bound when the container starts; "" is the one that is bound now.
	Driver string
	// Options are ignored with a driver that hands the Function to a program: it has no RDMA and vDPA devices then.
	pool.Options
	// VhostNet asks for the nodes that a virtual machine monitor needs for a software NIC.
	VhostNet bool
}

// Set is what a container gets of one Function.
type Set struct {
	Nodes []*specs.DeviceNode
	// Info says what the nodes are, by subject and name, as sriov-network-device-plugin does: "vfio" has "mount" and
	// "dev-mount", "rdma" has "rdma_dev", "uverbs", "umad", "issm" and "rdma_cm", "vdpa" and "uio" have "mount", "vhost" has
	// "net-mount" and "tun-mount". Values are paths in the container, except that rdma_dev is a device name.
	Info map[string]map[string]string
}

// uioDrivers hand a device to a program without the protection of an IOMMU.
var uioDrivers = []string{"igb_uio", "uio", "uio_pci_generic"}

// Of looks up what a container gets of a Function. It fails if the container could not use the Function. The error's text
// follows the Function's name in a sentence.
func (f *Finder) Of(of function.Function, wish Wish) (Set, error) {
	of.Driver = cmp.Or(wish.Driver, of.Driver)
	isVFIO, isUIO := of.Driver == "vfio-pci", slices.Contains(uioDrivers, of.Driver)
	set := Set{Info: map[string]map[string]string{}}
	for _, part := range []struct {
		wanted  bool
		subject string // in Info
		find    func(function.Function) ([]*specs.DeviceNode, map[string]string, error)
	}{
		{isVFIO, "vfio", f.vfio},
		{isUIO, "uio", f.uio},
		{wish.VDPA != "" && !isVFIO && !isUIO, "vdpa", f.vdpa},
		{wish.RDMA && !isVFIO && !isUIO, "rdma", f.rdma},
		{wish.VhostNet, "vhost", f.vhost},
	} {
		if !part.wanted {
			continue
		}
		nodes, info, err := part.find(of)
		if err != nil {
			return Set{}, err
		}
		set.Nodes, set.Info[part.subject] = append(set.Nodes, nodes...), info
	}
	return set, nil
}

// node is a node with the same path in the container.
func node(path, permissions string) *specs.DeviceNode {
	return &specs.DeviceNode{Path: path, HostPath: path, Permissions: permissions}
}

func (f *Finder) vfio(of function.Function) ([]*specs.DeviceNode, map[string]string, error) {
	group := of.IOMMUGroup
	if group == "" {
		return nil, nil,
			errors.New("is bound to vfio-pci but has no IOMMU group: turn the IOMMU on, or the no-IOMMU mode of vfio")
	}
	// Without an IOMMU the node on the host has a prefix, which programs do not know.
	host, container := "/dev/vfio/"+group, "/dev/vfio/"+strings.TrimPrefix(group, quirk.NoIOMMUPrefix)
	nodes := []*specs.DeviceNode{node(vfio, "rw"), {Path: container, HostPath: host, Permissions: "rw"}}
	return nodes, map[string]string{"mount": vfio, "dev-mount": container}, nil
}

func (f *Finder) uio(of function.Function) ([]*specs.DeviceNode, map[string]string, error) {
	names, err := f.device(of).Dir("uio").Sorted()
	if err != nil {
		return nil, nil, err
	}
	if len(names) == 0 {
		return nil, nil, fmt.Errorf("is bound to %s but has no UIO device", of.Driver)
	}
	path := "/dev/" + names[0]
	return []*specs.DeviceNode{node(path, "rwm")}, map[string]string{"mount": path}, nil
}

func (f *Finder) vdpa(of function.Function) ([]*specs.DeviceNode, map[string]string, error) {
	if of.VDPA.Name == "" {
		return nil, nil, errors.New("has no vDPA device, which its pool asks for: make one with vdpa(8)")
	}
	if of.VDPA.CharDevice == "" {
		return nil, map[string]string{}, nil
	}
	path := "/dev/" + of.VDPA.CharDevice
	return []*specs.DeviceNode{node(path, "rwm")}, map[string]string{"mount": path}, nil
}

func (f *Finder) rdma(of function.Function) ([]*specs.DeviceNode, map[string]string, error) {
	if len(of.RDMADevices) == 0 {
		return nil, nil, errors.New("has no RDMA device, which its pool asks for: load the RDMA driver of the NIC")
	}
	var nodes []*specs.DeviceNode
	info := map[string]string{"rdma_dev": of.RDMADevices[0]}
	// Each directory has an entry for every character device, which is below /dev/infiniband: uverbs0, umad0, issm0.
	for _, class := range []string{"infiniband_verbs", "infiniband_mad"} {
		names, err := f.device(of).Dir(class).Sorted()
		if err != nil {
			return nil, nil, err
		}
		for _, name := range names {
			path := "/dev/infiniband/" + name
			nodes = append(nodes, node(path, "rw"))
			info[strings.TrimRight(name, "0123456789")] = path
		}
	}
	if f.exists(rdmaCM) {
		nodes = append(nodes, node(rdmaCM, "rw"))
		info["rdma_cm"] = rdmaCM
	}
	return nodes, info, nil
}

func (f *Finder) vhost(function.Function) ([]*specs.DeviceNode, map[string]string, error) {
	for _, path := range []string{vhostNet, tun} {
		if !f.exists(path) {
			return nil, nil,
				fmt.Errorf("its pool needs %s, which the node does not have: load the modules vhost_net and tun", path)
		}
	}
	info := map[string]string{"net-mount": vhostNet, "tun-mount": tun}
	return []*specs.DeviceNode{node(vhostNet, "rw"), node(tun, "rw")}, info, nil
}

func (f *Finder) exists(devicePath string) bool {
	_, err := os.Stat(filepath.Join(f.DevRoot, strings.TrimPrefix(devicePath, "/dev/")))
	return err == nil
}

// device is the directory of a Function in sysfs.
func (f *Finder) device(of function.Function) sysfs.Dir {
	if of.Kind == function.SF {
		return sysfs.Root(f.SysRoot).Auxiliary(of.AuxDevice)
	}
	return sysfs.Root(f.SysRoot).PCI(of.ID.Address)
}
