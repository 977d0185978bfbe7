// SPDX-License-Identifier: Apache-2.0

package function

import "strings"

// Passthrough is the kernel interface by which a driver hands a whole device to a program. A device
// that is handed to a program has no netdev.
type Passthrough string

// The kernel interfaces that hand devices to programs. The empty value is for a driver that keeps
// the device to the kernel.
const (
	VFIO Passthrough = "vfio" // Documentation/driver-api/vfio.rst
	UIO  Passthrough = "uio"  // Documentation/driver-api/uio-howto.rst
)

// PassthroughOf judges a driver by its name, for a device that the driver is not bound to yet and
// for a kernel that shows nothing better. The variants of vfio-pci for single devices end in
// vfio_pci, such as mlx5_vfio_pci, pds_vfio_pci and virtio_vfio_pci (drivers/vfio/pci). The kernel
// takes "-" and "_" in the names of modules for the same. igb_uio is DPDK's.
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

// HandedBy is the kernel interface by which the Function's driver hands the Function to a program,
// "" for none.
func (f Function) HandedBy() Passthrough {
	if f.Passthrough != "" {
		return f.Passthrough
	}
	return PassthroughOf(f.Driver)
}

// Userspace says whether the Function's driver hands it to a program, so that it has no netdev.
func (f Function) Userspace() bool { return f.Netdev == "" && f.HandedBy() != "" }
