// SPDX-License-Identifier: Apache-2.0

package quirk

var mlx5 = []Quirk{{
	Driver: "mlx5_core", Name: "number of a PF",
	Does: "numbers PFs at the eswitch as its physical ports, which need not be the PCI " +
		"function's number",
	Answer: "the number is that of the PF's other Functions at the eswitch, or of its physical port; " +
		"only without both is it that of the PCI function",
	Source: "mlx5_get_dev_index in drivers/net/ethernet/mellanox/mlx5/core",
	Row:    "subfunctions found, and made by `spec.sfs`",
}, {
	Driver: "mlx5_core", Name: "devlink instances of auxiliary devices",
	Does: "has a devlink instance for each SF, and one for the netdev of each PF, VF and SF " +
		"(auxiliary/mlx5_core.eth.2)",
	Answer: "a health reporter belongs to the Function that the instance's device is below in sysfs",
	Source: "mlx5e_create_devlink in drivers/net/ethernet/mellanox/mlx5/core/en/devlink.c",
	Row:    "health reporters: unhealthy and tainted, and back",
}, {
	Driver: "mlx5_core", Name: "representors beside the PF's netdev",
	Does: "has the representors of a PF in switchdev mode in the net directory of the PF, in " +
		"any order",
	Answer: "the PF's netdev is the one whose phys_port_name is a physical port's, and never a " +
		"representor's",
	Source: "mlx5e_vport_rep_load in drivers/net/ethernet/mellanox/mlx5/core/en_rep.c; " +
		"net/devlink/port.c",
	Row: "PFs and VFs found: address, PF, index, driver, NUMA node, IOMMU group, PCIe root",
}, {
	Driver: "mlx5_core", Name: "representors come first",
	Does:   "makes the representors of VFs before the VFs' PCI devices are there",
	Answer: "opi-bridge also asks which PF would have a VF, by sriov_offset and sriov_stride",
	Source: "mlx5_device_enable_sriov in drivers/net/ethernet/mellanox/mlx5/core/sriov.c",
	Row:    "a VF's representor by devlink, and by `phys_port_name`",
}}
