// SPDX-License-Identifier: Apache-2.0

package stage

import (
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
)

// Tells says whether the PF tells of its VFs at all.
func Tells(p personality.Personality) bool { return p.Value("get") == personality.OK }

// Grants says whether a pod must get what the knob stands for, because the driver does what it is
// asked and tells of it.
func Grants(p personality.Personality, knob string) bool {
	field, _, special := strings.Cut(knob, ".")
	switch {
	case knob == "mac" && !Tells(p):
		return true // the netdev's own is all that there is
	case !Tells(p) || p.Value(field) != personality.OK ||
		special && p.Value(knob) != personality.OK:
		return false
	case knob == "vlan.ad":
		return p.Value("vlan.proto-told") == "yes"
	case knob == "qos":
		return p.Value("vlan") == personality.OK
	}

	return knob == "mac" || p.Value(field+".tell") == "value"
}
