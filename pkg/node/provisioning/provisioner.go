// Package provisioning has the xPU serve Functions that the device plugin handed out. There are two ways: [CRD] writes
// XPUPorts, which xpu-controller brings to the OPI agent, and [Direct] calls the OPI agent itself.
package provisioning

import (
	"context"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Request says what the xPU shall serve.
type Request struct {
	Function function.Function
	// DevicePool is the pool that the Function belongs to.
	DevicePool string
	// Network is the name of the network that the Port joins.
	Network string
	// MAC is that of the Function while it is attached; see [MAC].
	MAC function.MAC
	// Pod is empty where it is not known yet.
	Pod journal.Pod
}

// Port is what the xPU serves.
type Port struct {
	// MTU is that of the network in bytes, 0 where it sets none.
	MTU int
}

// Provisioner has the xPU serve Functions. Its methods may be called by several goroutines at once; for one Function
// only one at a time.
type Provisioner interface {
	// Provision returns once the xPU serves exactly this. A Port of the Function that is another one, or on its way out,
	// is replaced. It gives up when ctx ends, and soon where the network or the xPU is not declared; the error then says
	// what is missing, in the words of whoever knows best.
	Provision(ctx context.Context, r Request) (Port, error)
	// Deprovision returns nil once the xPU serves no Port of the Function any more, also if it never did.
	Deprovision(ctx context.Context, f function.Function) error
	// Away says why the xPU of the Function cannot be asked, in a sentence that says what to do; "" if it can, or if the
	// Function has none. It does not block.
	Away(f function.Function) string
}

// MAC is the address of a Function for which nobody asked for another one: locally administered, unicast, and always the
// same for the same Function of a node.
func MAC(node string, f function.ID) function.MAC { return claim.DerivedMAC("", node, f) }
