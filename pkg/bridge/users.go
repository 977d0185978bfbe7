// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"maps"
	"slices"
	"sync"
)

// users are what needs netdevs, as tasks by ifindex: the ports of representors, which may lose
// their name or be removed, and the networks of VXLAN ports, since the events of a bridge port have
// no alias. The data plane writes them, and watch reads them.
type users struct {
	mu      sync.RWMutex
	byIndex map[int]task
	byUser  map[task]map[int]bool
}

func newUsers() *users { return &users{byIndex: map[int]task{}, byUser: map[task]map[int]bool{}} }

// of returns who needs a netdev.
func (u *users) of(index int) (task, bool) {
	u.mu.RLock()
	defer u.mu.RUnlock()
	t, used := u.byIndex[index]
	return t, used
}

// netdevs returns the ifindexes of those that a user needs, sorted.
func (u *users) netdevs(user task) []int {
	u.mu.RLock()
	defer u.mu.RUnlock()
	return slices.Sorted(maps.Keys(u.byUser[user]))
}

// set notes that a user needs a netdev, instead of who did before. It tells whether that is new.
func (u *users) set(index int, user task) (changed bool) {
	if before, used := u.of(index); used && before == user {
		return false
	}

	u.remove(index)
	u.mu.Lock()
	defer u.mu.Unlock()

	u.byIndex[index] = user
	if u.byUser[user] == nil {
		u.byUser[user] = map[int]bool{}
	}

	u.byUser[user][index] = true
	return true
}

func (u *users) remove(index int) {
	u.mu.Lock()
	defer u.mu.Unlock()

	user, used := u.byIndex[index]
	if !used {
		return
	}

	delete(u.byIndex, index)
	if delete(u.byUser[user], index); len(u.byUser[user]) == 0 {
		delete(u.byUser, user)
	}
}
