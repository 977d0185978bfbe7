// SPDX-License-Identifier: Apache-2.0

package stage

import (
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
)

// Tells reports whether the PF reports its VFs at all.
func Tells(p personality.Personality) bool { return p.Value("get") == personality.OK }

// Grants reports whether a pod must get the setting of a knob, because the driver applies and
// reports it.
func Grants(p personality.Personality, knob string) bool {
	field, _, special := strings.Cut(knob, ".")
	switch {
	case knob == "mac" && !Tells(p):
		return true // the netdev's own MAC is the only one
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
