package setup

import (
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// device is a PCI device in sysfs.
type device struct {
	sysfs.Dir
	root sysfs.Root
	name string // PCI address
}

// driver is the name of the driver that is bound, "" if none is.
func (d device) driver() (string, error) {
	driver, err := d.Link("driver")
	if driver == "" && err == nil && !d.Exists() {
		err = fmt.Errorf("is gone from this node: %w", fs.ErrNotExist)
	}
	return driver, err
}

// hasDriver says what to do where the node does not have a driver.
func (d device) hasDriver(driver string) error {
	if d.root.PCIDriver(driver).Exists() {
		return nil
	}
	return fmt.Errorf("the node does not have that driver: load the module, as by \"modprobe %s\"", driver)
}

// override is the driver that alone may be bound, "" where any may.
func (d device) override() (string, error) {
	name, err := d.Attribute("driver_override")
	if name == "(null)" { // what printf makes of none
		return "", nil
	}
	return name, err
}

// harmless are the drivers of other devices in an IOMMU group that let a program have its device: they do no DMA
// (driver_managed_dma in the kernel). Those of vfio do too, but are other programs' and there is one group for both.
var harmless = []string{"", "pcieport", "pci-stub"}

// group returns the name of the device's IOMMU group, "" where there is none, and the other devices in it that are in
// use, for people.
func (d device) group() (name string, peers []string, err error) {
	name, err = d.Link("iommu_group")
	if err != nil || name == "" {
		return "", nil, err
	}
	members := d.Dir.Dir("iommu_group/devices")
	names, err := members.Sorted()
	if err != nil {
		return "", nil, err
	}
	for _, member := range names {
		driver, err := members.Dir(member).Link("driver")
		if err == nil && member != d.name && !slices.Contains(harmless, driver) {
			peers = append(peers, fmt.Sprintf("%s (driver %s)", member, driver))
		}
	}
	return name, peers, nil
}

// users lists the netdevs on top of the device's, such as bonds, bridges and VLANs.
func (d device) users(netdev string) []string {
	dir, _, _ := d.Netdevs()
	links, _ := dir.Dir(netdev).Sorted()
	var users []string
	for _, name := range links {
		if upper, is := strings.CutPrefix(name, "upper_"); is {
			users = append(users, upper)
		}
	}
	return users
}
