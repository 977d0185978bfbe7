// SPDX-License-Identifier: Apache-2.0

package function

import "fmt"

// NoLink returns why the Function's PF has no link and what to do about it, or "" if it has a link.
func (f Function) NoLink() string {
	pf := fmt.Sprintf("PF %s (%s)", f.PFName, f.PF)
	switch {
	case f.LinkUp:
		return ""
	case f.AdminDown:
		return pf + " is administratively down: " + HowToSetUp(f.PFName)
	}
	return pf + " has no link: check its cable and the xPU"
}

// HowToSetUp explains how to set up a netdev permanently.
func HowToSetUp(netdev string) string {
	const how = "set it up by \"ip link set %s up\", and at boot by the host's network " +
		"configuration"
	return fmt.Sprintf(how, netdev)
}
