// SPDX-License-Identifier: Apache-2.0

package quirk

import (
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// NotSupported reports whether the error says that the kernel or the driver does not support a
// request. See "ENOTSUPP".
func NotSupported(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, notSupported)
}

// notSupported is ENOTSUPP of include/linux/errno.h.
const notSupported = unix.Errno(524)

const (
	// BusyPatience is how long one call retries while a driver is busy. See "busy after a change".
	BusyPatience = 5 * time.Second
	// SettleTime is how long an accepted value may take to be in effect. See "values that are
	// dropped".
	SettleTime = time.Second
)

// Busy reports whether the driver refuses a change only for a while. See "busy after a change".
func Busy(err error) bool { return isOne(err, unix.EAGAIN, unix.EBUSY) }

// Definite reports whether the driver would refuse the same change again. Errors that neither Busy
// nor Definite knows, such as EIO and ETIMEDOUT, may pass.
func Definite(err error) bool {
	return !Busy(err) && (NotSupported(err) || isOne(err, unix.EINVAL, unix.EPERM, unix.EACCES,
		unix.EADDRNOTAVAIL, unix.EPROTONOSUPPORT, unix.ERANGE, unix.EEXIST, unix.ENOSPC))
}

func isOne(err error, numbers ...unix.Errno) bool {
	return slices.ContainsFunc(numbers, func(n unix.Errno) bool { return errors.Is(err, n) })
}

var several = []Quirk{{
	Driver: "several", Name: "ENOTSUPP",
	Does: "return ENOTSUPP (524), which is not meant for programs and has no text, in place of " +
		"EOPNOTSUPP",
	Answer: "both mean the same",
	Source: "include/linux/errno.h",
	Row:    "VFs made by `spec.numVFs`; EBUSY and ERANGE become a condition",
}, {
	Driver: "several", Name: "busy after a change",
	Does: "reset a VF when its PF gets a MAC, VLAN or trust for it, and answer EAGAIN or EBUSY " +
		"for 20-300 ms to what comes " +
		"next (i40e, ice), iavf for seconds. fm10k answers EAGAIN to a MAC as long as its netdev is up",
	Answer: "what was accepted is not sent again, because it would reset the VF again. What is " +
		"refused is tried again, for at " +
		"most 5 s or half of the caller's time",
	Source: "i40e_ndo_set_vf_mac in drivers/net/ethernet/intel/i40e/i40e_virtchnl_pf.c, " +
		"ice_check_vf_ready_for_cfg in drivers/net/ethernet/intel/ice/ice_vf_lib.c",
	Row: "MAC of a VF",
}, {
	Driver: "several", Name: "a VF that is left out",
	Does: "tell nothing about a VF while they reset it (i40e, ice, ionic), about any while the " +
		"PF is down (bnx2x, octeontx2) or " +
		"detached (mlx5_core). The kernel leaves the VF out of its answer without an error",
	Answer: "the state of the VF is unknown: it is asked for again, and nothing is attached, " +
		"checked or released without it. " +
		"If the PF tells about no VF at all, as mlx5_core without an eswitch, a VF is attached " +
		"of whose PF nothing is wanted, " +
		"and then nothing is ordered of the PF",
	Source: "rtnl_fill_vfinfo in net/core/rtnetlink.c",
	Row:    "MAC of a VF",
}, {
	Driver: "several", Name: "zeros as a MAC",
	Does: "tell zeros as the MAC of a VF for which none was set, and refuse zeros (bnx2x, cxgb4, " +
		"hinic, liquidio, octeontx2, " +
		"qede; mlx4 with spoof check)",
	Answer: "the PF gets the MAC that the VF's netdev had before, or a locally administered one " +
		"for a VF without a netdev: the " +
		"pod's would reach the next owner",
	Source: "bnx2x_set_vf_mac in drivers/net/ethernet/broadcom/bnx2x/bnx2x_sriov.c",
	Row:    "MAC of a VF",
}, {
	Driver: "several", Name: "the VF's own values",
	Does: "tell the MAC that the VF gave itself as if the PF enforced it (igb, ixgbe, i40e, ice, " +
		"bnxt, bnx2x, sfc), and the " +
		"speed of the link as a VF's rate (qede, liquidio; bnx2x always 10000)",
	Answer: "a MAC and a rate are written back only if the attachment set them. A MAC that is " +
		"written back is an " +
		"administrative one afterwards, because the PF does not tell which it was",
	Source: "igb_ndo_get_vf_config in drivers/net/ethernet/intel/igb/igb_main.c, " +
		"qed_get_vf_config in drivers/net/ethernet/qlogic/qed/qed_sriov.c",
	Row: "MAC of a VF",
}, {
	Driver: "several", Name: "values that are dropped",
	Does: "accept a value and drop it: link state `enable` (ixgbe), QoS (bnx2x, qede), another " +
		"VLAN protocol (bnxt), the removal " +
		"of a rate (qede), a minimum rate (fm10k)",
	Answer: "what the PF enforces is read back. An attachment fails if it is not what was asked " +
		"for within 1 s",
	Source: "ixgbe_ndo_set_vf_link_state in drivers/net/ethernet/intel/ixgbe/ixgbe_sriov.c",
	Row:    "VLAN and QoS of a VF, enforced by the PF",
}, {
	Driver: "several", Name: "VFs that were not made",
	Does: "answer that VFs were made when there are none or fewer: bnxt while its PF is down or " +
		"short of resources, hns3 and " +
		"be2net after every failure, bnx2x above its maximum",
	Answer: "the VFs are counted after the driver has answered, and the condition Supplied has " +
		"both numbers",
	Source: "sriov_numvfs_store in drivers/pci/iov.c; bnxt_sriov_configure in " +
		"drivers/net/ethernet/broadcom/bnxt/bnxt_sriov.c",
	Row: "VFs made by `spec.numVFs`; EBUSY and ERANGE become a condition",
}, {
	Driver: "several", Name: "busy by EAGAIN",
	Does: "answer EAGAIN to a change of the number of VFs while they work on a VF: i40e, and " +
		"ice after a failed start",
	Answer: "means the same as EBUSY",
	Source: "i40e_pci_sriov_configure in drivers/net/ethernet/intel/i40e/i40e_virtchnl_pf.c",
	Row:    "VFs made by `spec.numVFs`; EBUSY and ERANGE become a condition",
}}
