// Package provisioning has the xPU serve the Functions that the device plugin allocates. [CRD] writes XPUPorts, which
// xpu-controller brings to the OPI agent. [Direct] calls the OPI agent itself.
package provisioning

import (
	"context"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Provisioner has the xPU serve Functions. Its methods may be called by several goroutines at once; for one Function
// only one at a time.
type Provisioner interface {
	// Provision returns once the xPU serves exactly the Port of the attachment, which must have one. Of the other fields it
	// reads Function, PF and Pod, which is empty where the pod is not known yet. It replaces a Port of the Function that
	// differs or is being deleted. It gives up when ctx ends, and after a few seconds if the network or the xPU is not
	// declared. The error says what is missing. mtu is the MTU of the network in bytes, 0 if the network sets none.
	Provision(ctx context.Context, a journal.Attachment) (mtu int, err error)
	// Deprovision returns nil once the xPU serves no Port of the attachment's Function. It reads Function and PF.
	Deprovision(ctx context.Context, a journal.Attachment) error
	// Away says why the xPU of the Function cannot be reached, and what to do; "" if it can, or if the Function has no xPU.
	// It does not block.
	Away(f function.Function) string
}

// MAC is the address of a Function for which nobody asked for another one: locally administered, unicast, and always the
// same for the same Function of a node.
func MAC(node string, f function.ID) function.MAC { return claim.DerivedMAC("", node, f) }
