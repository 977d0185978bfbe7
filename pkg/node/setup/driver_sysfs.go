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
	if driver == "" && err == nil && !d.Exists() {
		err = fmt.Errorf("is gone from this node: %w", fs.ErrNotExist)
	}
	return driver, err
}

// hasDriver returns nil if the kernel has the driver. Otherwise the error says what to do.
func (p *PCIDrivers) hasDriver(driver string) error {
	if sysfs.Root(p.SysRoot).PCIDriver(driver).Exists() {
		return nil
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
		if err == nil && member != filepath.Base(string(d)) && !slices.Contains(harmless, driver) {
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

// awaitUnused waits a short time until no program has the device's IOMMU group open. While a
// program has it open, an unbind from vfio-pci blocks, and a process that waits for it in the
// kernel cannot be killed.
func (p *PCIDrivers) awaitUnused(ctx context.Context, d sysfs.Dir) error {
	group, err := d.Link("iommu_group")
	if err != nil || group == "" {
		return err
	}

	ctx, cancel := context.WithTimeoutCause(ctx, endTime, errors.New("is still in use"))
	defer cancel()

	err = wait.PollUntilContextCancel(ctx, 20*time.Millisecond,
		true, func(context.Context) (bool, error) {
			return !p.isOpen(d, group), nil
		})
	if err != nil {
		return p.stillUsed(d, context.Cause(ctx))
	}

	return nil
}

// isOpen reports whether a program has the group open. Only one program can have it open
// (vfio_group_fops_open), so isOpen tries to open it. Without the privilege for that, isOpen
// reports whether the device is enabled, as it is while a program has it open
// (vfio_pci_core_enable).
func (p *PCIDrivers) isOpen(d sysfs.Dir, group string) bool {
	for _, node := range nodesOf(group) {
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
	return err == nil && enabled != 0
}

// nodesOf lists the possible paths of a group's device node below /dev. The name of the node has a
// prefix for a group without an IOMMU.
func nodesOf(group string) []string {
	return []string{"vfio/" + group, "vfio/" + quirk.NoIOMMUPrefix + group}
}

// stillUsed adds the processes that have the device's IOMMU group open to an error: "process 4711
// (dpdk-testpmd)". It compares only the name of the device node, because the directory is below the
// root of that process.
func (p *PCIDrivers) stillUsed(d sysfs.Dir, err error) error {
	group, groupErr := d.Link("iommu_group")
	if groupErr != nil || group == "" {
		return err
	}

	nodes := nodesOf(group)
	descriptors, _ := filepath.Glob(filepath.Join(p.ProcRoot, "[0-9]*/fd/*"))
	var holders []string
	for _, fd := range descriptors {
		target, _ := os.Readlink(fd) // the process may have ended
		if slices.ContainsFunc(nodes, func(node string) bool {
			return strings.HasSuffix(target, "/"+node)
		}) {
			process := filepath.Dir(filepath.Dir(fd))
			name, _ := os.ReadFile(filepath.Join(process, "comm"))
			holders = append(holders,
				fmt.Sprintf("process %s (%s)", filepath.Base(process),
					strings.TrimSpace(string(name))))
		}
	}

	if len(holders) == 0 {
		return fmt.Errorf("IOMMU group %s: %w", group, err)
	}

	return fmt.Errorf("IOMMU group %s is open in %s, which must end first: %w",
		group, strings.Join(slices.Compact(holders), ", "), err)
}
