// SPDX-License-Identifier: Apache-2.0

package function

import "fmt"

// NoLink says why the Function's PF has no link, which has two reasons and two remedies; "" if it
// has one.
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

// HowToSetUp says how a netdev that is down is set up, and stays so.
func HowToSetUp(netdev string) string {
	const how = "set it up by \"ip link set %s up\", and at boot by the host's network " +
		"configuration"
	return fmt.Sprintf(how, netdev)
}
