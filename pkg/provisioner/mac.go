package provisioner

import (
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/link"
)

// MAC is the address of a Function that no one asked another one for: locally administered, unicast, and the same each
// time for the same Function of a node.
func MAC(node string, f inventory.ID) link.MAC { return claim.DerivedMAC("", node, f) }
