// SPDX-License-Identifier: Apache-2.0

package quirk

var iavf = []Quirk{{
	Driver: "iavf", Name: "late netdev",
	Does: "makes the netdev of a VF by a work item, after the write of sriov_numvfs has returned",
	Answer: "a VF with a driver and without a netdev is not offered, the pool is not Supplied, " +
		"and an attach waits up to 2 s",
	Source: "iavf_finish_config in drivers/net/ethernet/intel/iavf/iavf_main.c",
	Row:    "VFs made by `spec.numVFs`; EBUSY and ERANGE become a condition",
}}
