// Package function has the words that the rest is about: a network function, its identity, and what a pod wants its
// interface to be, with what makes each valid. It touches neither the machine nor a cluster, so that every program can use
// it.
package function

import (
	"slices"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// Kind is what a Function is.
type Kind string

// The kinds of Functions.
const (
	PF Kind = "PF" // physical function; also a NIC without SR-IOV
	VF Kind = "VF" // virtual function
	SF Kind = "SF" // subfunction, on the auxiliary bus
)

// Class is what a Function is for, by its PCI base class.
type Class string

// The classes of Functions.
const (
	Network     Class = "network"     // PCI class 0x02
	Accelerator Class = "accelerator" // PCI class 0x12, such as FPGAs and look-aside engines
)

// VDPA is a vDPA device: a virtio device whose data path is a Function's.
type VDPA struct {
	// Name is the vDPA device's, as given to "vdpa dev add": "vdpa0". It is "" where the Function has none.
	Name string
	// Driver of the vDPA bus is "virtio_vdpa" or "vhost_vdpa", "" if none is bound.
	Driver string
	// CharDevice is the name in /dev that vhost_vdpa gives it, "vhost-vdpa-0"; "" with another driver.
	CharDevice string
}

// Function is a PCI network function of the node, or an accelerator, as the kernel shows it. While it exists, only
// these change: Netdev, Driver and what a driver makes (RDMA, RDMADevices, PKey, VDPA, IOMMUGroup, DDPProfile),
// PFDriver, PFName, LinkType, LinkUp, NumVFs and DefaultRoute. A pod that takes the netdev and the RDMA devices changes
// nothing but Netdev and, where the node's default route goes over it, DefaultRoute.
type Function struct {
	ID    ID
	Kind  Kind
	Class Class
	// PF is the address of the parent PF; a PF's own.
	PF pci.Address
	// PFName is the name of the PF's netdev on the host; the last one known if it is away, "" if it never had one.
	PFName string
	// PFDriver is the kernel driver that is bound to the PF, "" if none is.
	PFDriver string
	// Index is the VF's index at its PF, the SF's sfnum, and -1 for a PF.
	Index int
	// NumVFs is how many VFs a PF has; 0 for a VF or SF.
	NumVFs int
	// Vendor and Device are PCI ids in lower-case hex without prefix: "15b3", "101e". An SF has its PF's.
	Vendor, Device string
	// ACPIIndex is the number that the firmware gives the device, in decimal; "" if it gives none.
	ACPIIndex string
	// Driver is the kernel driver that is bound, "" if none is.
	Driver string
	// NUMANode is the node of the Function's memory, -1 if the kernel does not know.
	NUMANode int
	// PCIeRoot is the root complex, "pci0000:3a", as in attribute resource.kubernetes.io/pcieRoot; "" if unknown.
	PCIeRoot string
	// IOMMUGroup is the name of the Function's group in /dev/vfio: "42", or "noiommu-42" where vfio-pci works without
	// an IOMMU. It is "" where there is none, and for an SF.
	IOMMUGroup string
	// AuxDevice is the name of an SF's auxiliary device, "mlx5_core.sf.4"; "" for a PF or VF. It is not the same after
	// the SF was made again.
	AuxDevice string
	// Netdev is the name of the Function's netdev while it is on the host; "" while it is in a pod, or if there is
	// none.
	Netdev string
	// LinkType is "ether" or "infiniband": of the Function's netdev, while that is away the last one known, and if
	// there was none the PF's. It is "" if that is unknown too.
	LinkType string
	// RDMA says whether the Function has an RDMA device, on the host or, if RDMA devices belong to network namespaces
	// (rdma system set netns exclusive), in a pod.
	RDMA bool
	// RDMADevices are the names of the RDMA devices, sorted: "mlx5_2". While they are in a pod they are the last ones
	// known; none if they never were on the host. The slice belongs to the inventory and must not be changed.
	RDMADevices []string
	// PKey is the first entry of the InfiniBand partition table, "0x7fff", the last one known while the RDMA device is
	// in a pod; "" with another link type.
	PKey string
	// VDPA is the vDPA device on top of the Function, its zero value if there is none.
	VDPA VDPA
	// DDPProfile is the name of the Dynamic Device Personalization package that the PF runs, "ICE OS Default Package",
	// as devlink tells it (fw.app.name). Only the driver ice does; the profiles of X700 cards, which i40e loads, are
	// not to be seen in sysfs or devlink.
	DDPProfile string
	// DefaultRoute says whether the node's default route goes over the Function's netdev, be it through a bond, a
	// bridge or a VLAN. While the routes cannot be read, it is true for all Functions with a netdev.
	DefaultRoute bool
	// LinkUp says whether the PF has a carrier; while the PF's netdev is away, whether it had one. True if that was
	// never seen.
	LinkUp bool
	// Potential says that there is no such SF yet: it is made when it is allocated. The inventory knows none of these; see
	// [PotentialSF].
	Potential bool
}

// userspaceDrivers hand a device to a program instead of the kernel.
var userspaceDrivers = [...]string{"vfio-pci", "uio_pci_generic", "igb_uio"}

// Userspace says whether the Function's driver hands it to a program: it has no netdev then, and never will.
func (f Function) Userspace() bool {
	return f.Netdev == "" && slices.Contains(userspaceDrivers[:], f.Driver)
}

// PotentialSF is an SF that the PF could have, as the inventory would show it but for what only its driver decides: the
// netdev, the auxiliary device, RDMA and vDPA.
func PotentialSF(pf Function, sfnum uint32) Function {
	return Function{
		ID: SubfunctionID(pf.ID.Address, sfnum), Kind: SF, Class: pf.Class, PF: pf.ID.Address, PFName: pf.PFName,
		PFDriver: pf.PFDriver, Index: int(sfnum), Vendor: pf.Vendor, Device: pf.Device, NUMANode: pf.NUMANode,
		PCIeRoot: pf.PCIeRoot, LinkType: pf.LinkType, DDPProfile: pf.DDPProfile, LinkUp: pf.LinkUp, Potential: true,
	}
}
