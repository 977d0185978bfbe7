package provisioning

import (
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
)

// MAC is the address of a Function that no one asked another one for: locally administered, unicast, and the same each
// time for the same Function of a node.
func MAC(node string, f inventory.ID) netdev.MAC { return claim.DerivedMAC("", node, f) }
