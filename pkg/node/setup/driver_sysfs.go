// SPDX-License-Identifier: Apache-2.0

package setup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// driverOf returns the name of the driver that is bound to a device, or "" if none is.
func driverOf(d sysfs.Dir) (string, error) {
	driver, err := d.Link("driver")
	if driver == "" && err == nil {
		if _, err = os.Lstat(string(d)); errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("is gone from this node: %w", fs.ErrNotExist)
		}
	}
	return driver, err
}

// hasDriver returns nil if the kernel has the driver. Otherwise the error says what to do.
func (p *PCIDrivers) hasDriver(driver string) error {
	root := sysfs.Root(p.SysRoot)
	if root.PCIDriver(driver).Exists() {
		return nil
	}

	// Modules have "-" in their names where most of their drivers have "_", and modprobe takes both.
	for _, other := range []string{
		strings.ReplaceAll(driver, "-", "_"), strings.ReplaceAll(driver, "_", "-"),
	} {
		if root.PCIDriver(other).Exists() {
			return fmt.Errorf("the node does not have that driver, but %s: ask for that name", other)
		}
	}
	return fmt.Errorf("the node does not have that driver: load the module, as by \"modprobe %s\"",
		driver)
}

// overrideOf returns the only driver that may be bound to a device, or "" if any may.
func overrideOf(d sysfs.Dir) (string, error) {
	name, err := d.Attribute("driver_override")
	if name == "(null)" { // printf's text for no name
		return "", nil
	}
	return name, err
}

// harmless are the drivers that other devices in an IOMMU group may have while a program has the
// group, because these drivers do no DMA (driver_managed_dma in the kernel). A device with a vfio
// driver may belong to another program.
var harmless = []string{"", "pcieport", "pci-stub"}

// isolated returns an error if a program must not have the device. Either the device has no IOMMU
// and the administrator does not allow that, or another device in its IOMMU group is in use.
func (p *PCIDrivers) isolated(d sysfs.Dir) error {
	group, err := d.Link("iommu_group")
	if err != nil {
		return err
	}

	mode, _ := sysfs.Root(p.SysRoot).Dir("module/vfio/parameters").
		Attribute("enable_unsafe_noiommu_mode")
	if group == "" && mode != "Y" {
		return errors.New("it has no IOMMU group: turn the IOMMU on, in the firmware and by the " +
			"kernel's command line " +
			"(intel_iommu=on), or the no-IOMMU mode of vfio (enable_unsafe_noiommu_mode)")
	}

	members := d.Dir("iommu_group/devices")
	names, err := members.Sorted()
	if err != nil {
		return err
	}

	var peers []string
	for _, member := range names {
		driver, err := members.Dir(member).Link("driver")
		if err != nil {
			return fmt.Errorf("driver of %s in its IOMMU group %s: %w", member, group, err)
		}
		if member != d.Base() && !slices.Contains(harmless, driver) {
			peers = append(peers, fmt.Sprintf("%s (driver %s)", member, driver))
		}
	}

	if len(peers) > 0 {
		return fmt.Errorf("its IOMMU group %s also has %s: a program gets all devices of a group "+
			"or none",
			group, strings.Join(peers, ", "))
	}

	return nil
}

// vfioNodes are nodes by which a program can use a device. Paths are below /dev.
type vfioNodes struct {
	group string // name of the device's IOMMU group; "" without one
	// ofGroup has the possible paths of the group's node, which has a prefix for a group without an
	// IOMMU.
	ofGroup []string
	// ofDevice has the paths of the device's own node, for programs that use iommufd; empty on a
	// kernel without such nodes.
	ofDevice []string
}

func vfioNodesOf(d sysfs.Dir) (vfioNodes, error) {
	group, err := d.Link("iommu_group")
	if err != nil || group == "" {
		return vfioNodes{}, err
	}

	nodes := vfioNodes{
		group: group, ofGroup: []string{"vfio/" + group, "vfio/" + quirk.NoIOMMUPrefix + group},
	}
	devices, err := d.Dir(sysfs.VFIODevices).Sorted()
	for _, name := range devices {
		nodes.ofDevice = append(nodes.ofDevice, "vfio/devices/"+name)
	}
	return nodes, err
}

// awaitUnused waits a short time until no program uses the device. While a program uses it, an
// unbind from vfio-pci blocks, and a process that waits for it in the kernel cannot be killed.
func (p *PCIDrivers) awaitUnused(ctx context.Context, d sysfs.Dir) error {
	nodes, err := vfioNodesOf(d)
	if err != nil || nodes.group == "" {
		return err
	}

	ctx, cancel := context.WithTimeoutCause(ctx, endTime, errors.New("is still in use"))
	defer cancel()

	err = wait.PollUntilContextCancel(ctx, 20*time.Millisecond,
		true, func(context.Context) (bool, error) {
			return !p.isOpen(d, nodes), nil
		})
	if err != nil {
		return p.stillUsed(nodes, context.Cause(ctx))
	}

	return nil
}

// isOpen reports whether a program uses the device. Only one program can have the group open, and
// none while the device is bound to an iommufd (vfio_group_fops_open), so isOpen tries to open the
// group. Without the privilege for that, and on a kernel without nodes of groups, isOpen reports
// whether the device is enabled, as it is while a program uses it (vfio_pci_core_enable).
//
// The kernel does not show a program that has opened the device's own node and not bound it to an
// iommufd yet. A device counts as used while the kernel does not say whether it is.
func (p *PCIDrivers) isOpen(d sysfs.Dir, nodes vfioNodes) bool {
	for _, node := range nodes.ofGroup {
		fd, err := unix.Open(filepath.Join(p.DevRoot, node), unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err == nil {
			_ = unix.Close(fd)
			return false
		}
		if errors.Is(err, unix.EBUSY) {
			return true
		}
	}

	enabled, err := d.Number("enable") // the number of times the device was enabled
	unknown := err != nil && !errors.Is(err, fs.ErrNotExist)
	return unknown || enabled != 0
}

// stillUsed adds the processes that have one of the nodes open to an error: "process 4711
// (dpdk-testpmd)". It compares only the name of the device node, because the directory is below the
// root of that process.
func (p *PCIDrivers) stillUsed(nodes vfioNodes, err error) error {
	if nodes.group == "" {
		return err
	}

	paths := slices.Concat(nodes.ofGroup, nodes.ofDevice)
	descriptors, _ := filepath.Glob(filepath.Join(p.ProcRoot, "[0-9]*/fd/*"))
	var holders []string
	for _, fd := range descriptors {
		target, _ := os.Readlink(fd) // the process may have ended
		// The kernel removes the device's own node before it waits for programs.
		target = strings.TrimSuffix(target, " (deleted)")
		if slices.ContainsFunc(paths, func(path string) bool {
			return strings.HasSuffix(target, "/"+path)
		}) {
			process := filepath.Dir(filepath.Dir(fd))
			name, _ := os.ReadFile(filepath.Join(process, "comm"))
			holders = append(holders,
				fmt.Sprintf("process %s (%s)", filepath.Base(process),
					strings.TrimSpace(string(name))))
		}
	}

	if len(holders) == 0 {
		return fmt.Errorf("IOMMU group %s: %w", nodes.group, err)
	}

	return fmt.Errorf("IOMMU group %s is open in %s, which must end first: %w",
		nodes.group, strings.Join(slices.Compact(holders), ", "), err)
}
