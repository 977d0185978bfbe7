package provisioning

import (
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// MAC is the address of a Function that no one asked another one for: locally administered, unicast, and the same each
// time for the same Function of a node.
func MAC(node string, f function.ID) function.MAC { return claim.DerivedMAC("", node, f) }
