package controller

import (
	"sync"
	"time"
)

// durations measures for how long something has been the case. Its zero value is ready for use. Safe for concurrent use.
type durations[K comparable] struct{ since sync.Map } // time.Time by K

// elapsed is the time since the first call for the key.
func (d *durations[K]) elapsed(key K) time.Duration {
	now := time.Now()
	since, _ := d.since.LoadOrStore(key, now)
	return now.Sub(since.(time.Time))
}

// reset has the next call of elapsed start anew.
func (d *durations[K]) reset(key K) { d.since.Delete(key) }

// retain resets all keys but these.
func (d *durations[K]) retain(keep func(K) bool) {
	for key := range d.since.Range {
		if !keep(key.(K)) {
			d.since.Delete(key)
		}
	}
}
