// SPDX-License-Identifier: Apache-2.0

package health

import (
	"fmt"
	"maps"
	"sync"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// Cordons are the PFs whose Functions no new pod gets, because an administrator says so. The zero
// value has none. The methods are safe for concurrent use.
type Cordons struct {
	mutex   sync.Mutex
	reasons map[pci.Address]string
}

// Set replaces the cordons, and reports whether they are others than before.
func (c *Cordons) Set(cordons []v1alpha1.Cordon) (changed bool) {
	reasons := map[pci.Address]string{}
	for _, cordon := range cordons {
		reasons[pci.Address(cordon.PF)] = cordon.Reason
	}

	c.mutex.Lock()
	defer c.mutex.Unlock()

	changed = !maps.Equal(c.reasons, reasons)
	c.reasons = reasons
	return changed
}

// Of returns the message about the cordon of a Function's PF, which may be the Function itself. It
// returns "" if there is none.
func (c *Cordons) Of(f function.Function) (message string) {
	c.mutex.Lock()
	defer c.mutex.Unlock()

	for _, pf := range []pci.Address{f.PF, f.ID.Address} {
		reason, cordoned := c.reasons[pf]
		switch {
		case cordoned && reason == "":
			return fmt.Sprintf("PF %s is cordoned; xpuctl uncordon gives it back to new pods", pf)
		case cordoned:
			return fmt.Sprintf("PF %s is cordoned (%s); xpuctl uncordon gives it back to new pods", pf,
				reason)
		}
	}
	return ""
}
