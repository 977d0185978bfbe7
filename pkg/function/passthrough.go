// SPDX-License-Identifier: Apache-2.0

package function

import "strings"

// Passthrough is the kernel interface through which a driver hands a whole device to a program.
// Such a device has no netdev.
type Passthrough string

// Kernel interfaces for passthrough. The empty value is for a driver that keeps the device in the
// kernel.
const (
	VFIO Passthrough = "vfio" // Documentation/driver-api/vfio.rst
	UIO  Passthrough = "uio"  // Documentation/driver-api/uio-howto.rst
)

// PassthroughOf classifies a driver by its name, for a device that is not bound to the driver yet,
// and for a kernel that shows nothing better. Variants of vfio-pci for specific devices end in
// vfio_pci, such as mlx5_vfio_pci, pds_vfio_pci and virtio_vfio_pci (drivers/vfio/pci). The kernel
// treats "-" and "_" in names of modules as equal. igb_uio is DPDK's.
func PassthroughOf(driver string) Passthrough {
	module := strings.ReplaceAll(driver, "-", "_")
	switch {
	case module == "vfio_pci" || strings.HasSuffix(module, "_vfio_pci"):
		return VFIO
	case module == "uio" || strings.HasPrefix(module, "uio_") || module == "igb_uio":
		return UIO
	}
	return ""
}

// HandedBy returns the kernel interface through which the Function's driver hands the Function to a
// program, or "".
func (f Function) HandedBy() Passthrough {
	if f.Passthrough != "" {
		return f.Passthrough
	}
	return PassthroughOf(f.Driver)
}

// vfioDriver is the driver that stands for all drivers that hand Functions to programs by VFIO.
const vfioDriver = "vfio-pci"

// HasDriver reports whether the Function is bound to the driver with this name. A variant of
// vfio-pci counts as vfio-pci too.
func (f Function) HasDriver(name string) bool {
	return name == f.Driver || name == vfioDriver && f.HandedBy() == VFIO
}

// Userspace reports whether the Function's driver hands it to a program, so that it has no netdev.
func (f Function) Userspace() bool { return f.Netdev == "" && f.HandedBy() != "" }
