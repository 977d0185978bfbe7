// Package sriov makes the Functions that DevicePools ask for. It works between the declaration of pools, which it
// reads, and their publication, which waits for nothing: pools have the Functions that are there.
package sriov

import (
	"fmt"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// problem is why a PF does not have what a DevicePool asks for. It becomes a [v1alpha1.Shortage].
type problem struct {
	reason  string // one of those of the condition Supplied
	message string // what is missing and what to do, without the PF
	// tried says that the number of VFs was written, in vain. Only a later try may help, not a Function that is released.
	tried bool
	// final says that another try would cost the VFs that there are.
	final bool
}

func problemf(reason, format string, arguments ...any) *problem {
	return &problem{reason: reason, message: fmt.Sprintf(format, arguments...)}
}

func (p *problem) shortage(pf pci.Address) v1alpha1.Shortage {
	return v1alpha1.Shortage{PF: string(pf), Reason: p.reason, Message: fmt.Sprintf("PF %s %s", pf, p.message)}
}
