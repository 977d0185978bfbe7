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
	// reason is one of those of the condition Supplied.
	reason string
	// message says what is missing and what to do, without the PF.
	message string
	// final says that to try again would cost the VFs that there are, for what was refused just now.
	final bool
}

func problemf(reason, format string, arguments ...any) *problem {
	return &problem{reason: reason, message: fmt.Sprintf(format, arguments...)}
}

func (p *problem) shortage(pf pci.Address) v1alpha1.Shortage {
	return v1alpha1.Shortage{PF: string(pf), Reason: p.reason, Message: fmt.Sprintf("PF %s %s", pf, p.message)}
}
