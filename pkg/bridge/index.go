// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"maps"
	"slices"
)

// index finds the ids of objects by what they have, such as a VLAN id, without a look at each
// object.
type index map[string]map[string]bool // ids by key

func (x index) add(id string, keys []string) {
	for _, key := range keys {
		if x[key] == nil {
			x[key] = map[string]bool{}
		}
		x[key][id] = true
	}
}

func (x index) remove(id string, keys []string) {
	for _, key := range keys {
		if delete(x[key], id); len(x[key]) == 0 {
			delete(x, key)
		}
	}
}

// of returns the ids that have a key, sorted.
func (x index) of(key string) []string { return slices.Sorted(maps.Keys(x[key])) }

// other returns an id other than this one that has a key, "" if there is none.
func (x index) other(key, than string) string {
	for id := range x[key] {
		if id != than {
			return id
		}
	}
	return ""
}
