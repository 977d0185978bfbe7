// SPDX-License-Identifier: Apache-2.0

package reconciling

import (
	"sync"
	"time"
)

// Durations measures how long something has been the case. Its zero value is ready for use. Safe
// for concurrent use.
type Durations[K comparable] struct{ since sync.Map } // time.Time by K

// Elapsed returns the time since the first call for the key.
func (d *Durations[K]) Elapsed(key K) time.Duration {
	now := time.Now()
	since, _ := d.since.LoadOrStore(key, now)
	return now.Sub(since.(time.Time))
}

// Reset lets the next call of Elapsed for the key return 0.
func (d *Durations[K]) Reset(key K) { d.since.Delete(key) }

// Retain resets all keys except for those to be kept.
func (d *Durations[K]) Retain(keep func(K) bool) {
	for key := range d.since.Range {
		if !keep(key.(K)) {
			d.since.Delete(key)
		}
	}
}
