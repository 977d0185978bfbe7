package setup

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// driverOf is the name of the driver that is bound to a device, "" if none is.
func driverOf(d sysfs.Dir) (string, error) {
	driver, err := d.Link("driver")
	if driver == "" && err == nil && !d.Exists() {
		err = fmt.Errorf("is gone from this node: %w", fs.ErrNotExist)
	}
	return driver, err
}

// hasDriver says what to do where the node does not have a driver.
func (p *PCIDrivers) hasDriver(driver string) error {
	if sysfs.Root(p.SysRoot).PCIDriver(driver).Exists() {
		return nil
	}
	return fmt.Errorf("the node does not have that driver: load the module, as by \"modprobe %s\"", driver)
}

// overrideOf is the driver that alone may be bound to a device, "" where any may.
func overrideOf(d sysfs.Dir) (string, error) {
	name, err := d.Attribute("driver_override")
	if name == "(null)" { // what printf makes of none
		return "", nil
	}
	return name, err
}

// harmless are the drivers that other devices in an IOMMU group may have while a program has the group: they do no DMA
// (driver_managed_dma in the kernel). The kernel also allows vfio drivers, but another program may have their devices.
var harmless = []string{"", "pcieport", "pci-stub"}

// isolated returns an error if a program must not have the device. That is so without an IOMMU, which keeps the device
// from the node's memory, unless the administrator allows that, and if other devices in its IOMMU group are in use.
func (p *PCIDrivers) isolated(d sysfs.Dir) error {
	group, err := d.Link("iommu_group")
	if err != nil {
		return err
	}
	mode, _ := sysfs.Root(p.SysRoot).Dir("module/vfio/parameters").Attribute("enable_unsafe_noiommu_mode")
	if group == "" && mode != "Y" {
		return errors.New("it has no IOMMU group: turn the IOMMU on, in the firmware and by the kernel's command line " +
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
		return fmt.Errorf("its IOMMU group %s also has %s: a program gets all devices of a group or none",
			group, strings.Join(peers, ", "))
	}
	return nil
}
