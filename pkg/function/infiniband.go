// SPDX-License-Identifier: Apache-2.0

package function

import (
	"errors"
	"fmt"
)

// Link types of Functions (ARPHRD_* of include/uapi/linux/if_arp.h), as [Function.LinkType] has them.
const (
	Ethernet   = "ether"
	InfiniBand = "infiniband"
)

// ErrNoMAC refuses a MAC for an InfiniBand interface.
var ErrNoMAC = errors.New("must be absent: an InfiniBand interface has no MAC address that can be " +
	"set: set vf.portGUID")

// CheckLinkType returns an error if an interface asks the Function for what only Functions of another
// link type have. A Function whose link type is unknown may have everything. network is the
// XPUNetwork that the interface joins, or "".
func (f Function) CheckLinkType(i Interface, network string) error {
	switch {
	case f.LinkType == InfiniBand && network != "":
		return fmt.Errorf("network %q: must be absent: Function %s is InfiniBand, and an xPU has ports "+
			"and networks for Ethernet only (OPI)", network, f.ID)
	case f.LinkType == InfiniBand && i.MAC != "":
		return fmt.Errorf("mac: Function %s: %w", f.ID, ErrNoMAC)
	case f.LinkType == Ethernet && i.VF.Identified():
		return fmt.Errorf("vf.nodeGUID, vf.portGUID: must be absent: Function %s is Ethernet, and GUIDs "+
			"are for VFs of InfiniBand", f.ID)
	}
	return nil
}
