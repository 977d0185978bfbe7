// SPDX-License-Identifier: Apache-2.0

package quirk

// NoIOMMUGroup is the name of a group that vfio makes up where there is no IOMMU. NoIOMMUPrefix is
// the prefix of such a group's device node. See "groups without an IOMMU".
const (
	NoIOMMUGroup  = "vfio-noiommu"
	NoIOMMUPrefix = "noiommu-"
)

var vfio = []Quirk{{
	Driver: "hisi_acc_vfio_pci, mlx5_vfio_pci, nvgrace_gpu_vfio_pci, pds_vfio_pci, qat_vfio_pci, " +
		"virtio_vfio_pci", Name: "variants of vfio-pci",
	Does: "hand a device to a program as vfio-pci does, under names of their own, " +
		"which differ from the names of their device operations (mlx5-vfio-pci)",
	Answer: "a driver hands devices to programs if the kernel shows a vfio-dev or uio directory " +
		"below the device, or the " +
		"driver's module among the holders of vfio_pci_core, vfio or uio; a name decides only " +
		"where the kernel shows neither, and which drivers pods and pools may ask for",
	Source: "drivers/vfio/pci; class vfio-dev in drivers/vfio/vfio_main.c",
	Row:    "vfio-pci for a claim or pool",
}, {
	Driver: "vfio-pci", Name: "groups without an IOMMU",
	Does: "makes up an IOMMU group where there is none, in its no-IOMMU mode. " +
		"Its name says so, and its device node has a prefix that programs do not know",
	Answer: "the container gets the node without the prefix. Only a DevicePool may ask for it, " +
		"not a claim",
	Source: "vfio_noiommu_group_alloc in drivers/vfio/group.c",
	Row:    "vfio-pci for a claim or pool",
}, {
	Driver: "vfio-pci", Name: "unbinding waits for programs",
	Does: "keeps whoever unbinds it waiting in the kernel " +
		"as long as a program has the device open, and such a process cannot be killed",
	Answer: "a Function is taken back only when no program has its group open; an order that " +
		"waits is not given twice",
	Source: "vfio_unregister_group_dev in drivers/vfio/vfio_main.c",
	Row:    "vfio-pci for a claim or pool",
}}
