// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"slices"
	"sync"

	"github.com/opiproject/xpu-device-plugin/pkg/multimap"
)

// owners knows which port a representor belongs to, and which network a VXLAN port belongs to. The
// netdevs themselves do not say so: a representor may lose its name or be removed, and the events
// of a bridge port have no alias. The data plane writes owners while Watch reads them.
type owners struct {
	mu      sync.RWMutex
	byIndex map[int]Object             // by ifindex
	netdevs multimap.Sets[Object, int] // ifindexes
}

func newOwners() *owners { return &owners{byIndex: map[int]Object{}} }

// get returns the owner of a netdev.
func (o *owners) get(index int) (owner Object, owned bool) {
	o.mu.RLock()
	defer o.mu.RUnlock()
	owner, owned = o.byIndex[index]
	return owner, owned
}

// netdevsOf returns the ifindexes of the netdevs that an object owns, sorted.
func (o *owners) netdevsOf(owner Object) []int {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return slices.Sorted(o.netdevs.All(owner))
}

// set makes an object the only owner of a netdev.
func (o *owners) set(index int, owner Object) {
	if before, owned := o.get(index); owned && before == owner {
		return
	}

	o.remove(index)
	o.mu.Lock()
	defer o.mu.Unlock()

	o.byIndex[index] = owner
	o.netdevs.Add(owner, index)
}

// remove leaves a netdev without an owner.
func (o *owners) remove(index int) {
	o.mu.Lock()
	defer o.mu.Unlock()

	if owner, owned := o.byIndex[index]; owned {
		delete(o.byIndex, index)
		o.netdevs.Remove(owner, index)
	}
}
