// SPDX-License-Identifier: Apache-2.0

package provisioning

import (
	"fmt"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
)

// MACs chooses the MAC addresses of Ports for which no address was requested.
type MACs struct {
	Node string
	// PF returns the PF of a Function, or "" if the Function is gone.
	PF func(function.ID) pci.Address
	// NeedsOwn is [Provisioner.NeedsOwnMAC].
	NeedsOwn func(pf pci.Address) bool
	// Own returns the permanent address of a Function, or "" if it is not known.
	Own func(function.ID) function.MAC
}

// Of returns the address of a Function's Port. It is the permanent address of the Function if its
// xPU needs that, and "" if that address is not known; [Provisioner.Provision] says so. Otherwise
// the address is locally administered, unicast, and always the same for the same Function of a
// node.
func (m MACs) Of(f function.ID) function.MAC {
	if m.NeedsOwn(m.PF(f)) {
		return m.Own(f)
	}
	return MAC(m.Node, f)
}

// MAC returns the address that is derived from a Function of a node.
func MAC(node string, f function.ID) function.MAC { return claim.DerivedMAC("", node, f) }

// needsOwnMAC reports whether OPI agents of a dialect know a Function by its permanent address.
func needsOwnMAC(dialect string) bool {
	known, err := dialects.Named(dialect)
	return err == nil && known.Traits.HardwareMAC
}

// checkOwnMAC returns an error unless the Port of a Function has the Function's permanent address,
// which is own.
func checkOwnMAC(xpu string, f function.ID, own, has function.MAC) error {
	switch {
	case own == "":
		return fmt.Errorf("xPU %s knows Functions by their permanent MAC addresses, and that of "+
			"Function %s is not known: its netdev has none, or was not on the host yet; see "+
			"permaddr in \"ip --details link\"", xpu, f)
	case own != has:
		return fmt.Errorf("xPU %s knows Function %s by its permanent MAC address %s; leave mac "+
			"out instead of asking for %s", xpu, f, own, has)
	}
	return nil
}
