// SPDX-License-Identifier: Apache-2.0

package quirk

import "time"

// CarrierPatience is how long a PF may take to get its carrier back. The igb driver needs 0.3 to 5
// s. See "rates need a carrier".
const CarrierPatience = 5 * time.Second

var igb = []Quirk{{
	Driver: "igb", Name: "rates need a carrier",
	Does: "refuses the rate of a VF while the PF has no carrier, as for some seconds after it " +
		"made VFs",
	Answer: "a refused rate is tried again when the carrier comes, but not for longer than 5 s " +
		"or half of the caller's time",
	Source: "igb_ndo_set_vf_bw in drivers/net/ethernet/intel/igb/igb_main.c",
	Row:    "maximum rate of a VF is set / has an effect",
}}
