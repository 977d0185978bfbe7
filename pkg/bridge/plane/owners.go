// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"maps"
	"slices"
	"sync"
)

// owners knows which port a representor belongs to, and which network a VXLAN port belongs to. The
// netdevs themselves do not say so: a representor may lose its name or be removed, and the events
// of a bridge port have no alias. The data plane writes owners while Watch reads them.
type owners struct {
	mu      sync.RWMutex
	byIndex map[int]Object          // by ifindex
	netdevs map[Object]map[int]bool // ifindexes
}

func newOwners() *owners {
	return &owners{byIndex: map[int]Object{}, netdevs: map[Object]map[int]bool{}}
}

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
	return slices.Sorted(maps.Keys(o.netdevs[owner]))
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
	if o.netdevs[owner] == nil {
		o.netdevs[owner] = map[int]bool{}
	}

	o.netdevs[owner][index] = true
}

// remove leaves a netdev without an owner.
func (o *owners) remove(index int) {
	o.mu.Lock()
	defer o.mu.Unlock()

	owner, owned := o.byIndex[index]
	if !owned {
		return
	}

	delete(o.byIndex, index)
	if delete(o.netdevs[owner], index); len(o.netdevs[owner]) == 0 {
		delete(o.netdevs, owner)
	}
}
