package quirk

// What several drivers do with the VFs of a PF. Personalities of cards (test/qemu/zoo) say which ones.
var vfs = []Quirk{{
	Driver: "several", Name: "VFs reset",
	Does: "reset a VF when the PF sets its MAC, VLAN or trust. For 20 to 300 ms the PF answers EAGAIN or EBUSY to the next " +
		"change, and the VF's driver to its MAC and to being set up",
	Answer: "the VF is waited for, and nothing is set that is so already: each try would reset it again",
	Source: "i40e_ndo_set_vf_mac in drivers/net/ethernet/intel/i40e/i40e_virtchnl_pf.c",
	Row:    "MAC of a VF",
}, {
	Driver: "several", Name: "silent PF",
	Does: "do not tell of a VF at that moment: around a reset, while the PF is down. " +
		"The kernel then leaves the VF out of its answer, without an error",
	Answer: "a VF that was known and is not told now is unknown: an error and another try, never taken for equal",
	Source: "rtnl_fill_vfinfo in net/core/rtnetlink.c",
	Row:    "netdev moved and given back, with all its properties",
}, {
	Driver: "several", Name: "MAC of zeros",
	Does:   "tell zeros as the MAC of a VF that has no administrative one, and refuse zeros",
	Answer: "the MAC of the VF's own netdev counts as restored, which isolates the next owner, and the difference is noted",
	Source: "bnx2x_set_vf_mac in drivers/net/ethernet/broadcom/bnx2x/bnx2x_sriov.c",
	Row:    "MAC of a VF",
}, {
	Driver: "several", Name: "MAC of the VF's own",
	Does:   "tell the MAC that the VF chose where no administrative one was set",
	Answer: "what was told is given back; it is then an administrative one",
	Source: "bnxt_get_vf_config in drivers/net/ethernet/broadcom/bnxt/bnxt_sriov.c",
	Row:    "MAC of a VF",
}, {
	Driver: "several", Name: "effect comes later",
	Does:   "answer success, and set the MAC or the trust some time later",
	Answer: "what was set is read back, for a bounded time, before the pod has the Function and before it is let go",
	Source: "qed_iov_pf_task in drivers/net/ethernet/qlogic/qed/qed_sriov.c",
	Row:    "MAC of a VF",
}, {
	Driver: "several", Name: "success without effect",
	Does:   "answer success to what they do not do, or do not tell what they did",
	Answer: "what was set is read back; what is not told as it was asked is an error that names the field",
	Source: "ixgbe_ndo_set_vf_link_state in drivers/net/ethernet/intel/ixgbe/ixgbe_sriov.c",
	Row:    "VLAN and QoS of a VF, enforced by the PF",
}, {
	Driver: "several", Name: "speed as a rate",
	Does:   "tell the speed of the link as the maximum rate of a VF that has none, and cannot take a rate away",
	Answer: "a rate that is the speed of the link limits nothing, and is no difference to none",
	Source: "qed_get_vf_config in drivers/net/ethernet/qlogic/qed/qed_sriov.c",
	Row:    "maximum rate of a VF is set / has an effect",
}}
