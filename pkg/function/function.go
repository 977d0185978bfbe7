// SPDX-License-Identifier: Apache-2.0

// Package function defines the types that all programs share: a network function, its identity, and
// the interface that a pod wants, each with its validation. It accesses neither the machine nor a
// cluster.
package function

import (
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// Kind is the kind of a Function.
type Kind string

// Kinds of Functions.
const (
	PF Kind = "PF" // physical function; also a NIC without SR-IOV
	VF Kind = "VF" // virtual function
	SF Kind = "SF" // subfunction, on the auxiliary bus
)

// Class is the purpose of a Function, from its PCI base class.
type Class string

// Classes of Functions.
const (
	Network     Class = "network"     // PCI class 0x02
	Accelerator Class = "accelerator" // PCI class 0x12, such as FPGAs and look-aside engines
)

// VDPA describes a vDPA device: a virtio device whose data path is a Function.
type VDPA struct {
	Name   string // as given to "vdpa dev add": "vdpa0"; "" if the Function has no vDPA device
	Driver string // on the vDPA bus: "virtio_vdpa" or "vhost_vdpa"; "" if none is bound
	// name in /dev with vhost_vdpa, such as "vhost-vdpa-0"; "" with another driver
	CharDevice string
}

// RDMAMode says who can open the node's RDMA devices, see "rdma system show". The zero value means
// unknown.
type RDMAMode string

const (
	RDMAShared RDMAMode = "shared" // processes in any network namespace
	// only processes in the device's network namespace
	RDMAExclusive RDMAMode = "exclusive"
)

// Function is a network function or accelerator of the node, as the kernel shows it.
//
// While a Function exists, only these fields change: Netdev, Driver and what a driver creates
// (Passthrough, NoNetdev, RDMA, RDMAUnknown, RDMADevices, RDMAMode, PKey, VDPA, IOMMUGroup,
// DDPProfile), PFDriver, PFName, PFAltNames, LinkType, LinkUp, AdminDown, LinkSpeed, SwitchID,
// NumVFs, VFOffset, VFStride, NUMANodes, DataDirectRoots, DataDirectAwaited, HostUse and
// DefaultRoute. Moving the netdev and the RDMA devices to a pod changes Netdev, and also HostUse and
// DefaultRoute if the host uses the netdev.
type Function struct {
	ID    ID
	Kind  Kind
	Class Class
	PF    pci.Address // of the parent PF; of a PF its own
	// PF's netdev on the host; while it is away, the last known name; "" if it never had one
	PFName string
	// PFAltNames are the other names of that netdev (IFLA_PROP_LIST), sorted; while it is away, the
	// last known ones; nil if none are known. The slice belongs to the inventory and must not be
	// changed.
	PFAltNames []string
	PFDriver   string // kernel driver of the PF; "" if none is bound
	Index      int    // a VF's index at its PF, an SF's sfnum, -1 for a PF
	NumVFs     int    // number of VFs of a PF; 0 for a VF or SF
	// VFOffset and VFStride are values of a PF's SR-IOV capability: the routing ID of VF i is the
	// PF's plus VFOffset plus i times VFStride (PCI Express 6.0, section 9.2.1.2). They may change
	// with NumVFs. Both are 0 without SR-IOV, and for a VF or SF.
	VFOffset, VFStride int
	// maximum number of VFs of a PF (sriov_totalvfs); 0 without SR-IOV, and for a VF or SF
	TotalVFs int
	// Vendor and Device are PCI ids in lower-case hex without prefix: "15b3", "101e". An SF has its
	// PF's.
	Vendor, Device string
	// number that the firmware assigns to the device, in decimal; "" if none
	ACPIIndex string
	Driver    string // kernel driver; "" if none is bound
	// Passthrough is how Driver hands the Function to a program, if the kernel shows it; see
	// HandedBy.
	Passthrough Passthrough
	NUMANode    int // node of the Function's memory; -1 if the kernel does not know
	// NUMANodes are NUMANode and the other nodes of its socket at the smallest distance, in the
	// order of deviceattribute.GetNUMANodeAttribute of k8s.io/dynamic-resource-allocation; nil if
	// there are no others. The slice belongs to the inventory and must not be changed.
	NUMANodes []int
	// root complex, "pci0000:3a", as in attribute resource.kubernetes.io/pcieRoot; "" if unknown
	PCIeRoot string
	// DataDirectRoots are the root complexes of the Data Direct functions of the PF's card, sorted:
	// a ConnectX-8 has them as a second way to memory, for example to a GPU beside it. A VF or SF
	// uses them only if Data Direct was enabled for it, which the kernel does not show. The slice
	// belongs to the inventory and must not be changed.
	DataDirectRoots []string
	// DataDirectAwaited says that DataDirectRoots is unknown, because a card has not answered yet. It
	// is false once the cards have answered, or have had 10 s for it.
	DataDirectAwaited bool
	// name in /dev/vfio: "42", or "noiommu-42" without an IOMMU; "" without a group, and for an SF
	IOMMUGroup string
	// of an SF: "mlx5_core.sf.4", which changes when the SF is created again; "" for a PF or VF
	AuxDevice string
	// Netdev is the name of the netdev on the host; "" while it is in a pod, or if there is none.
	// If there are several, it is the netdev of a vDPA device on virtio_vdpa, which carries the
	// data, or else the port's own, and never a representor: the first by phys_port_name, dev_port
	// and order of creation.
	Netdev string
	// NoNetdev is set if there is no netdev in any network namespace, because the Function has no
	// driver or its driver has created none.
	NoNetdev bool
	// HostUse is how the host itself uses the netdev, as a predicate: "is a port of bridge br0",
	// "has address 10.1.0.5/24"; "" if it does not. While that cannot be read, it says so for all
	// Functions with a netdev on the host, and for a Function of which it could never be read whether
	// it has a netdev.
	HostUse string
	// "ether" or "infiniband", of the netdev; while it is away, the last known one, or else the
	// PF's; "" if unknown
	LinkType string
	// the Function has an RDMA device, on the host or in a pod (rdma system set netns exclusive)
	RDMA bool
	// whether it has one cannot be read; RDMA is false then
	RDMAUnknown bool
	// RDMADevices are the names of the RDMA devices, sorted, such as "mlx5_2"; while they are in a
	// pod, the last known ones. The slice belongs to the inventory and must not be changed.
	RDMADevices []string
	// RDMAMode says who can open the RDMA devices; "" if unknown, and without RDMA devices. An SF
	// that does not exist yet has its PF's.
	RDMAMode RDMAMode
	// first InfiniBand partition key, such as "0x7fff"; while in a pod, the last known one; "" with
	// another link type
	PKey string
	VDPA VDPA // vDPA device on top of the Function
	// Dynamic Device Personalization package of the PF, such as "ICE OS Default Package"; only
	// driver ice reports it
	DDPProfile string
	// DefaultRoute is set if the node's default route uses the Function's netdev, directly or
	// through a bond, a bridge or a VLAN. While routes cannot be read, it is set for all Functions
	// with a netdev.
	DefaultRoute bool
	// the PF has a carrier, or had one when its netdev was last seen; true if the netdev was never
	// seen
	LinkUp bool
	// AdminDown is set if the PF has no carrier because its netdev on the host is administratively
	// down (IFF_UP is not set).
	AdminDown bool
	// LinkSpeed is the PF's link speed in Mbit/s, as its driver last reported it; 0 if it never did.
	LinkSpeed int
	// SwitchID identifies the eswitch of the PF, in hex (phys_switch_id of its netdev); "" if the
	// driver reports none; while the netdev is away, the last known one
	SwitchID string
	// the SF does not exist yet, and is created when it is allocated; see [PotentialSF]
	Potential bool
}

// OfPF returns a PF with only the fields that identify it.
func OfPF(address pci.Address) Function {
	return Function{ID: ID{Address: address}, Kind: PF, Class: Network, PF: address, Index: -1}
}

// PotentialSF returns an SF that the PF could have, as the inventory would show it, without the
// fields that depend on its driver.
func PotentialSF(pf Function, sfnum uint32) Function {
	return Function{
		ID: SubfunctionID(pf.ID.Address, sfnum), Kind: SF, Class: pf.Class, PF: pf.ID.Address,
		PFName: pf.PFName, PFAltNames: pf.PFAltNames,
		PFDriver: pf.PFDriver, Index: int(sfnum), Vendor: pf.Vendor, Device: pf.Device,
		NUMANode: pf.NUMANode, NUMANodes: pf.NUMANodes,
		PCIeRoot: pf.PCIeRoot, DataDirectRoots: pf.DataDirectRoots,
		DataDirectAwaited: pf.DataDirectAwaited, LinkType: pf.LinkType, RDMAMode: pf.RDMAMode,
		DDPProfile: pf.DDPProfile, LinkUp: pf.LinkUp,
		AdminDown: pf.AdminDown, LinkSpeed: pf.LinkSpeed, SwitchID: pf.SwitchID, Potential: true,
	}
}
