// SPDX-License-Identifier: Apache-2.0

package quirk

var igbvf = []Quirk{{
	Driver: "igbvf", Name: "MAC after a reset",
	Does: "refuses, for a VF that is not trusted, every MAC but the one that the PF gave the VF, " +
		"which it reads only when it resets the VF: when its netdev goes down",
	Answer: "a netdev that refuses its MAC is set up and down, and then takes it",
	Source: "igbvf_set_mac and igbvf_reset in drivers/net/ethernet/intel/igbvf/netdev.c",
	Row:    "MAC of a VF",
}}
