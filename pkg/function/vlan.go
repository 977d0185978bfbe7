// SPDX-License-Identifier: Apache-2.0

package function

import (
	"errors"
	"fmt"
	"net/netip"
)

// VLAN is an interface in a pod on top of another one. Its frames have an 802.1Q tag there.
type VLAN struct {
	Name string `json:"name"` // see [ValidateInterfaceName]
	Tag  int    `json:"tag"`  // 1-4094
	// MTU in bytes, at most the MTU of the other interface; 0 means that MTU.
	MTU       int            `json:"mtu,omitempty"`
	Addresses []netip.Prefix `json:"addresses,omitempty"`
}

// validateVLANs reports VLANs that the kernel would reject. netdev is the name of the interface
// below them.
func validateVLANs(netdev string, vlans []VLAN) error {
	var errs []error
	names, tags := map[string]bool{netdev: true, "lo": true, "eth0": true}, map[int]bool{}
	for n, v := range vlans {
		if err := ValidateInterfaceName(v.Name); err != nil {
			errs = append(errs, fmt.Errorf("vlans[%d]: %w", n, err))
		} else if names[v.Name] {
			errs = append(errs, fmt.Errorf("vlans[%d] %q: is the name of another interface; choose "+
				"another name", n, v.Name))
		}

		if v.Tag < 1 || v.Tag > MaxVLAN || tags[v.Tag] {
			errs = append(errs, fmt.Errorf("vlans[%d] tag %d: must be 1-%d, and the tag of one VLAN", n,
				v.Tag, MaxVLAN))
		}
		if err := (Interface{Name: "any", MTU: v.MTU, Addresses: v.Addresses}).Validate(); err != nil {
			errs = append(errs, fmt.Errorf("vlans[%d]: %w", n, err))
		}
		names[v.Name], tags[v.Tag] = true, true
	}

	return errors.Join(errs...)
}
