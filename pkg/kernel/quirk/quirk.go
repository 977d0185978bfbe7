// Package quirk names what single drivers do otherwise than the rest, and has what the code needs to know of it. The code
// does not ask which driver it meets where it can do without: what one driver needs is done for all, if it harms none.
package quirk

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// CarrierPatience is how long a PF may take to have its carrier back. igb was seen to take 0.3-5 s. See "rates need a
	// carrier".
	CarrierPatience = 5 * time.Second
	// DDPDriver is the only driver that tells its DDP package by devlink, and DDPVersion is the version that it tells it
	// as. See "DDP package".
	DDPDriver  = "ice"
	DDPVersion = "fw.app.name"
	// NoIOMMUGroup is what vfio calls groups that it makes up where there is no IOMMU, and NoIOMMUPrefix the prefix of
	// their device nodes. See "groups without an IOMMU".
	NoIOMMUGroup  = "vfio-noiommu"
	NoIOMMUPrefix = "noiommu-"
	// VirtioDriver binds PCI devices whose netdev is that of a virtio device below them. See "netdev below virtio".
	VirtioDriver = "virtio-pci"
)

// errNotSupported is the kernel's ENOTSUPP (include/linux/errno.h).
const errNotSupported = unix.Errno(524)

// NotSupported says whether the kernel or a driver has no such thing. See "ENOTSUPP".
func NotSupported(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, errNotSupported)
}

// Quirk is one thing that a driver does.
type Quirk struct {
	// Driver is the name of the kernel module.
	Driver string
	// Name is what the code's comments call it.
	Name string
	// Does is what the driver does, and Answer what this project does about it.
	Does, Answer string
	// Source is the place in the kernel that shows it.
	Source string
	// Row is the row of docs/reference/hardware.md that counts on the answer.
	Row string
}

// All are the quirks of all drivers.
func All() []Quirk {
	return []Quirk{{
		Driver: "ice", Name: "DDP package",
		Does:   "tells the Dynamic Device Personalization package that it loaded as a running version of devlink. Asking takes its firmware a while",
		Answer: "only PFs with this driver are asked, and only once for each time that it was bound or reloaded",
		Source: "Documentation/networking/devlink/ice.rst",
		Row:    "PFs and VFs found: address, PF, index, driver, NUMA node, IOMMU group, PCIe root",
	}, {
		Driver: "igb", Name: "rates need a carrier",
		Does:   "refuses the rate of a VF while the PF has no carrier, as for some seconds after it made VFs",
		Answer: "a refused rate is tried again when the carrier comes, but not for longer than 5 s or half of the caller's time",
		Source: "igb_ndo_set_vf_bw in drivers/net/ethernet/intel/igb/igb_main.c",
		Row:    "maximum rate of a VF is set / has an effect",
	}, {
		Driver: "igbvf", Name: "MAC after a reset",
		Does:   "refuses, for a VF that is not trusted, every MAC but the one that the PF gave the VF, which it reads only when it resets the VF: when its netdev goes down",
		Answer: "a netdev that refuses its MAC is set up and down, and then takes it",
		Source: "igbvf_set_mac and igbvf_reset in drivers/net/ethernet/intel/igbvf/netdev.c",
		Row:    "MAC of a VF",
	}, {
		Driver: "mlx5_core", Name: "number of a PF",
		Does:   "numbers PFs at the eswitch as its physical ports, which need not be the PCI function's number",
		Answer: "the number is that of the PF's other Functions at the eswitch, or of its physical port; only without both is it that of the PCI function",
		Source: "mlx5_get_dev_index in drivers/net/ethernet/mellanox/mlx5/core",
		Row:    "subfunctions found, and made by `spec.sfs`",
	}, {
		Driver: "mlx5_core", Name: "devlink instances of auxiliary devices",
		Does:   "has a devlink instance for each SF, and one for the netdev of each PF, VF and SF (auxiliary/mlx5_core.eth.2)",
		Answer: "a health reporter belongs to the Function that the instance's device is below in sysfs",
		Source: "mlx5e_create_devlink in drivers/net/ethernet/mellanox/mlx5/core/en/devlink.c",
		Row:    "health reporters: unhealthy and tainted, and back",
	}, {
		Driver: "mlx5_core", Name: "representors come first",
		Does:   "makes the representors of VFs before the VFs' PCI devices are there",
		Answer: "opi-bridge also asks which PF would have a VF, by sriov_offset and sriov_stride",
		Source: "mlx5_device_enable_sriov in drivers/net/ethernet/mellanox/mlx5/core/sriov.c",
		Row:    "a VF's representor by devlink, and by `phys_port_name`",
	}, {
		Driver: "several", Name: "ENOTSUPP",
		Does:   "return ENOTSUPP (524), which is not meant for programs and has no text, in place of EOPNOTSUPP",
		Answer: "both mean the same",
		Source: "include/linux/errno.h",
		Row:    "VFs made by `spec.numVFs`; EBUSY and ERANGE become a condition",
	}, {
		Driver: "vfio-pci", Name: "groups without an IOMMU",
		Does:   "makes up an IOMMU group where there is none, in its no-IOMMU mode. Its name says so, and its device node has a prefix that programs do not know",
		Answer: "the container gets the node without the prefix. Only a DevicePool may ask for it, not a claim",
		Source: "vfio_noiommu_group_alloc in drivers/vfio/group.c",
		Row:    "vfio-pci for a claim or pool",
	}, {
		Driver: "vfio-pci", Name: "unbinding waits for programs",
		Does:   "keeps whoever unbinds it waiting in the kernel as long as a program has the device open, and such a process cannot be killed",
		Answer: "a Function is taken back only when no program has its group open; an order that waits is not given twice",
		Source: "vfio_unregister_group_dev in drivers/vfio/vfio_main.c",
		Row:    "vfio-pci for a claim or pool",
	}, {
		Driver: "virtio-pci", Name: "netdev below virtio",
		Does:   "has no netdev in the PCI device's directory: it is in that of the virtio device below",
		Answer: "it is looked for there too",
		Source: "drivers/virtio/virtio.c and drivers/net/virtio_net.c",
		Row:    "netdev moved and given back, with all its properties",
	}}
}
