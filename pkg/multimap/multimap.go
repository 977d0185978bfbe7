// SPDX-License-Identifier: Apache-2.0

// Package multimap maps a key to several values, for example an index of objects.
package multimap

import (
	"iter"
	"maps"
)

// Sets maps each key to a set of values. A key whose last value is removed is not in the map any
// more. The zero value is empty and ready for use. Not safe for concurrent use.
type Sets[K, V comparable] map[K]map[V]struct{}

// Add adds a value to the set of a key.
func (s *Sets[K, V]) Add(key K, value V) {
	if *s == nil {
		*s = Sets[K, V]{}
	}

	values := (*s)[key]
	if values == nil {
		values = map[V]struct{}{}
		(*s)[key] = values
	}
	values[value] = struct{}{}
}

// Remove removes a value from the set of a key.
func (s Sets[K, V]) Remove(key K, value V) {
	if delete(s[key], value); len(s[key]) == 0 {
		delete(s, key)
	}
}

// Has reports whether a value is in the set of a key.
func (s Sets[K, V]) Has(key K, value V) bool {
	_, has := s[key][value]
	return has
}

// All returns the values of a key, in no particular order.
func (s Sets[K, V]) All(key K) iter.Seq[V] { return maps.Keys(s[key]) }
