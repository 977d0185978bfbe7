// SPDX-License-Identifier: Apache-2.0

package service

import (
	"maps"
	"slices"
)

// multimap maps a key, such as a VLAN id, to the ids of the objects that have it.
type multimap map[string]map[string]bool

func (m multimap) add(id string, keys []string) {
	for _, key := range keys {
		if m[key] == nil {
			m[key] = map[string]bool{}
		}
		m[key][id] = true
	}
}

func (m multimap) remove(id string, keys []string) {
	for _, key := range keys {
		if delete(m[key], id); len(m[key]) == 0 {
			delete(m, key)
		}
	}
}

// get returns the ids under a key, sorted.
func (m multimap) get(key string) []string { return slices.Sorted(maps.Keys(m[key])) }

// anyExcept returns some id under a key that is not except, or "" if there is no such id.
func (m multimap) anyExcept(key, except string) string {
	for id := range m[key] {
		if id != except {
			return id
		}
	}
	return ""
}
