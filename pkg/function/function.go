// SPDX-License-Identifier: Apache-2.0

// Package function has the types that all programs share: a network function, its identity, and
// what a pod wants its interface to be, with the validation of each. It accesses neither the
// machine nor a cluster.
package function

import (
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
	Name       string // as given to "vdpa dev add": "vdpa0"; "" if the Function has no vDPA device
	Driver     string // of the vDPA bus: "virtio_vdpa", "vhost_vdpa", "" if none is bound
	CharDevice string // name in /dev with vhost_vdpa, "vhost-vdpa-0"; "" with another driver
}

// RDMAMode says who can open the RDMA devices of the node: "rdma system show". The zero value says
// that it is not known.
type RDMAMode string

const (
	RDMAShared RDMAMode = "shared" // all, from whatever network namespace
	// only those who are in the network namespace that the device is in
	RDMAExclusive RDMAMode = "exclusive"
)

// Function is a PCI network function of the node, or an accelerator, as the kernel shows it. While
// it exists, only Netdev, Driver and what a driver makes (Passthrough, NoNetdev, RDMA, RDMADevices,
// RDMAMode, PKey, VDPA, IOMMUGroup, DDPProfile), PFDriver, PFName, LinkType, LinkUp, AdminDown,
// LinkSpeed, NumVFs, VFOffset, VFStride, HostUse and DefaultRoute change. A move of the netdev and
// the RDMA devices to a pod changes Netdev and, if the host uses the netdev, HostUse and
// DefaultRoute.
type Function struct {
	ID    ID
	Kind  Kind
	Class Class
	PF    pci.Address // of the parent PF; a PF's own
	// PF's netdev on the host; the last one known while it is away, "" if it never had one
	PFName   string
	PFDriver string // kernel driver of the PF, "" if none is bound
	Index    int    // VF's index at its PF, SF's sfnum, -1 for a PF
	NumVFs   int    // how many VFs a PF has; 0 for a VF or SF
	// VFOffset and VFStride are those of a PF's SR-IOV capability: the routing ID of VF i is the
	// PF's plus VFOffset plus i times VFStride (PCI Express 6.0, section 9.2.1.2). They may change
	// with NumVFs. Both are 0 without SR-IOV, and for a VF or SF.
	VFOffset, VFStride int
	// how many VFs a PF can have (sriov_totalvfs); 0 without SR-IOV, and for a VF or SF
	TotalVFs int
	// Vendor and Device are PCI ids in lower-case hex without prefix: "15b3", "101e". An SF has its
	// PF's.
	Vendor, Device string
	// number that the firmware gives the device, in decimal; "" if it gives none
	ACPIIndex string
	Driver    string // kernel driver, "" if none is bound
	// Passthrough is what the kernel shows of the way in which Driver hands the Function to a
	// program; see HandedBy.
	Passthrough Passthrough
	NUMANode    int // node of the Function's memory, -1 if the kernel does not know
	// root complex, "pci0000:3a", as in attribute resource.kubernetes.io/pcieRoot; "" if unknown
	PCIeRoot string
	// name in /dev/vfio: "42", or "noiommu-42" without an IOMMU; "" without a group, and for an SF
	IOMMUGroup string
	// of an SF: "mlx5_core.sf.4", which changes when the SF is made again; "" for a PF or VF
	AuxDevice string
	// Netdev is the name of the netdev on the host; "" while it is in a pod, or if there is none.
	// Of several it is the one of a vDPA device on virtio_vdpa, which carries the data, or else the
	// port's own and never a representor's: the first by phys_port_name, dev_port and the order in
	// which the kernel made them.
	Netdev string
	// NoNetdev says that there is no netdev in any network namespace: the Function has no driver,
	// or one that has made none.
	NoNetdev bool
	// HostUse is what the host itself uses the netdev for, as a predicate: "is a port of bridge
	// br0", "has address 10.1.0.5/24"; "" for nothing. While that cannot be read, it says so for
	// all Functions with a netdev on the host.
	HostUse string
	// "ether" or "infiniband": the netdev's, the last known while it is away, or else the PF's; ""
	// if unknown
	LinkType string
	// whether the Function has an RDMA device, on the host or in a pod (rdma system set netns
	// exclusive)
	RDMA bool
	// RDMADevices are the names of the RDMA devices, sorted: "mlx5_2"; the last ones known while
	// they are in a pod. The slice belongs to the inventory and must not be changed.
	RDMADevices []string
	// RDMAMode says who can open the RDMA devices; "" if it could not be read, and without RDMA
	// devices. An SF that does not exist has its PF's.
	RDMAMode RDMAMode
	// first InfiniBand partition key, "0x7fff"; the last one known while in a pod, "" with another
	// link type
	PKey string
	VDPA VDPA // vDPA device on top of the Function
	// Dynamic Device Personalization package of the PF, "ICE OS Default Package"; only the driver
	// ice tells it
	DDPProfile string
	// DefaultRoute says whether the node's default route goes over the Function's netdev, directly
	// or through a bond, a bridge or a VLAN. While the routes cannot be read, it is true for all
	// Functions with a netdev.
	DefaultRoute bool
	// the PF has a carrier, or had one when its netdev was last seen; true if it was never seen
	LinkUp bool
	// AdminDown says that the PF has no carrier because its netdev, which is on the host, is set
	// down (IFF_UP is not set).
	AdminDown bool
	// LinkSpeed is a PF's, in Mbit/s, as its driver told it last; 0 if it never did, and for a VF
	// or SF.
	LinkSpeed int
	Potential bool // the SF does not exist yet: it is made when it is allocated, see [PotentialSF]
}

// OfPF is what names a PF, for questions about its card. It has nothing else of the PF.
func OfPF(address pci.Address) Function {
	return Function{ID: ID{Address: address}, Kind: PF, Class: Network, PF: address, Index: -1}
}

// PotentialSF is an SF that the PF could have, as the inventory would show it, without what its
// driver makes.
func PotentialSF(pf Function, sfnum uint32) Function {
	return Function{
		ID: SubfunctionID(pf.ID.Address, sfnum), Kind: SF, Class: pf.Class, PF: pf.ID.Address,
		PFName:   pf.PFName,
		PFDriver: pf.PFDriver, Index: int(sfnum), Vendor: pf.Vendor, Device: pf.Device,
		NUMANode: pf.NUMANode,
		PCIeRoot: pf.PCIeRoot, LinkType: pf.LinkType, RDMAMode: pf.RDMAMode,
		DDPProfile: pf.DDPProfile, LinkUp: pf.LinkUp,
		AdminDown: pf.AdminDown, Potential: true,
	}
}
