// SPDX-License-Identifier: Apache-2.0

// Package devnode finds the files below /dev that a program needs to use a Function: the nodes of
// its IOMMU group, and of its UIO, RDMA and vDPA devices.
package devnode

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// Finder finds device nodes. Several goroutines may call its methods at once.
type Finder struct {
	SysRoot string // path where the host's sysfs is mounted, "/sys"
	// DevRoot is the path where the agent sees the host's device nodes, "/dev". Containers get
	// paths below /dev in any case.
	DevRoot string
}

// Wish is what a container needs of a Function in addition to the device nodes of its driver.
type Wish struct {
	// Driver is the driver that will be bound when the container starts, or "" for the current
	// driver.
	Driver string
	// Options are ignored if the driver passes the Function to a program, because the Function then
	// has no RDMA and vDPA devices.
	pool.Options
	// VhostNet requests the nodes that a virtual machine monitor needs for a software NIC.
	VhostNet bool
	// Remembered says that the kubelet remembers the paths, even over a reboot. The set then lacks
	// nodes of VFIO devices, because the kernel numbers those anew at each binding, and the path
	// may be another Function's after a reboot.
	Remembered bool
}

// Set is what a container gets for one Function.
type Set struct {
	Nodes []*specs.DeviceNode
	// Info describes the nodes by the keys and fields of PCIDEVICE_.._INFO
	// (docs/reference/device-plugin.md). Values are paths in the container, except for rdma_dev,
	// which is a device name.
	Info map[string]map[string]string
}

// add adds a device node with the same path on the host and in the container, and its entry in
// Info.
func (s *Set) add(subject, name, path, permissions string) *specs.DeviceNode {
	node := &specs.DeviceNode{Path: path, HostPath: path, Permissions: permissions}
	s.Nodes = append(s.Nodes, node)
	s.Info[subject][name] = path
	return node
}

// Of returns what a container gets for a Function. It returns an error if the container could not
// use the Function. The text of the error continues a sentence that begins with the Function's
// name.
func (f *Finder) Of(of function.Function, wish Wish) (Set, error) {
	handedBy := of.HandedBy()
	if wish.Driver != "" && wish.Driver != of.Driver {
		of.Driver, handedBy = wish.Driver, function.PassthroughOf(wish.Driver)
	}

	isVFIO, isUIO := handedBy == function.VFIO, handedBy == function.UIO
	set := Set{Info: map[string]map[string]string{}}
	for _, part := range []struct {
		wanted  bool
		subject string // in Info
		find    func(*Set, function.Function) error
	}{
		{isVFIO, "vfio", func(set *Set, of function.Function) error {
			return f.vfio(set, of, wish.Remembered)
		}},
		{isUIO, "uio", f.uio},
		{wish.VDPA != "" && !isVFIO && !isUIO, "vdpa", vdpa},
		{wish.RDMA && !isVFIO && !isUIO, "rdma", f.rdma},
		{wish.VhostNet, "vhost", f.vhost},
	} {
		if !part.wanted {
			continue
		}
		set.Info[part.subject] = map[string]string{}
		if err := part.find(&set, of); err != nil {
			return Set{}, err
		}
	}

	return set, nil
}

// Bound reports whether a driver is bound to a Function now, or one that stands for it, as a variant
// of vfio-pci does for vfio-pci. "" is every driver. The nodes come with the driver.
func (f *Finder) Bound(of function.Function, driver string) (bool, error) {
	if driver == "" {
		return true, nil
	}

	device := f.device(of)
	now, err := device.Link("driver")
	if err != nil || now == "" {
		return false, err
	}
	by, err := device.Passthrough(now, sysfs.Root(f.SysRoot))
	return function.Function{Driver: now, Passthrough: by}.HasDriver(driver), err
}

// vfio adds the nodes of both of the kernel's interfaces, and the program chooses: its IOMMU group
// with a container of VFIO, and the device itself with iommufd, where the kernel has that.
func (f *Finder) vfio(set *Set, of function.Function, remembered bool) error {
	if of.IOMMUGroup == "" {
		return fmt.Errorf("is bound to %s but has no IOMMU group: turn the IOMMU on, or the "+
			"no-IOMMU mode of vfio", of.Driver)
	}

	device, err := f.vfioDevice(of)
	if err != nil {
		return err
	}

	// A kernel with nodes of devices may have none of groups (CONFIG_VFIO_GROUP).
	byGroup := device == "" || f.exists("vfio/"+of.IOMMUGroup)
	if remembered && !byGroup {
		return fmt.Errorf("has the node /dev/%s and none of its IOMMU group, and the number of "+
			"that node changes: run the agent with --use-cdi", device)
	}

	if byGroup {
		set.add("vfio", "mount", "/dev/vfio/vfio", "rw")
		node := set.add("vfio", "dev-mount",
			"/dev/vfio/"+strings.TrimPrefix(of.IOMMUGroup, quirk.NoIOMMUPrefix), "rw")
		// Without an IOMMU the path on the host has a prefix that programs do not know.
		node.HostPath = "/dev/vfio/" + of.IOMMUGroup
	}

	if device != "" && !remembered {
		set.add("vfio", "iommufd-mount", "/dev/iommu", "rw")
		set.add("vfio", "iommufd-dev-mount", "/dev/"+device, "rw")
	}

	return nil
}

// vfioDevice returns the path below /dev of the Function's own node, "vfio/devices/vfio0". It
// returns "" if this node or /dev/iommu is missing, as before Linux 6.6, without
// CONFIG_VFIO_DEVICE_CDEV, and without an IOMMU (Documentation/driver-api/vfio.rst and
// vfio_device_add in drivers/vfio/vfio.h).
func (f *Finder) vfioDevice(of function.Function) (string, error) {
	names, err := f.device(of).Dir(sysfs.VFIODevices).Sorted()
	if err != nil || len(names) == 0 || !f.exists("iommu") {
		return "", err
	}

	path := "vfio/devices/" + names[0]
	if !f.exists(path) {
		return "", nil
	}
	return path, nil
}

func (f *Finder) uio(set *Set, of function.Function) error {
	names, err := f.device(of).Dir("uio").Sorted()
	if err != nil {
		return err
	}
	if len(names) == 0 {
		return fmt.Errorf("is bound to %s but has no UIO device", of.Driver)
	}

	set.add("uio", "mount", "/dev/"+names[0], "rwm")
	return nil
}

func vdpa(set *Set, of function.Function) error {
	if of.VDPA.Name == "" {
		return errors.New("has no vDPA device, which its pool asks for: make one with vdpa(8)")
	}
	if of.VDPA.CharDevice != "" {
		set.add("vdpa", "mount", "/dev/"+of.VDPA.CharDevice, "rwm")
	}
	return nil
}

func (f *Finder) rdma(set *Set, of function.Function) error {
	if len(of.RDMADevices) == 0 {
		return errors.New("has no RDMA device, which its pool asks for: load the RDMA driver of " +
			"the NIC")
	}

	set.Info["rdma"]["rdma_dev"] = of.RDMADevices[0]
	nodes, err := f.device(of).RDMANodes()
	if err != nil {
		return err
	}
	for _, name := range nodes {
		set.add("rdma", strings.TrimRight(name, "0123456789"), "/dev/infiniband/"+name, "rw")
	}

	if f.exists("infiniband/rdma_cm") {
		set.add("rdma", "rdma_cm", "/dev/infiniband/rdma_cm", "rw")
	}

	return nil
}

func (f *Finder) vhost(set *Set, _ function.Function) error {
	for _, node := range []struct{ name, file string }{
		{"net-mount", "vhost-net"}, {"tun-mount", "net/tun"},
	} {
		if !f.exists(node.file) {
			return fmt.Errorf("its pool needs /dev/%s, which the node does not have: load the "+
				"modules vhost_net and tun", node.file)
		}
		set.add("vhost", node.name, "/dev/"+node.file, "rw")
	}
	return nil
}

// exists reports whether the host has a file below /dev.
func (f *Finder) exists(file string) bool {
	_, err := os.Stat(filepath.Join(f.DevRoot, file))
	return err == nil
}

func (f *Finder) device(of function.Function) sysfs.Dir {
	return sysfs.Root(f.SysRoot).Function(of)
}
