// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"sync"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// stage is the moment in a record's life from which its age is counted.
type stage string

const (
	sinceReserved stage = "reserved"
	sinceStopped  stage = "stopped"
	sinceLost     stage = "lost"
)

// ages says how long this process has seen records in their current stage. Decisions do not use the
// times in the journal, because the machine's clock may be set at any time. Those times only say
// whether a record is still the same. Each agent counts from its own start. The methods may be
// called from several goroutines at once; the zero value is ready for use.
type ages struct {
	mutex sync.Mutex
	seen  map[agedStage]sighting
}

type agedStage struct {
	id    function.ID
	stage stage
}

// sighting has the time that the journal records for a stage, and the time at which this process
// saw it first, by the monotonic clock.
type sighting struct{ recorded, first time.Time }

// of returns how long ago this process first saw the record in the stage; 0 if this is the first
// time.
func (g *ages) of(a journal.Attachment, s stage) time.Duration {
	recorded := map[stage]time.Time{
		sinceReserved: a.ReservedAt, sinceStopped: a.StoppedAt, sinceLost: a.LostAt,
	}[s]
	key := agedStage{a.Function, s}

	g.mutex.Lock()
	defer g.mutex.Unlock()

	if g.seen == nil {
		g.seen = map[agedStage]sighting{}
	}

	seen, known := g.seen[key]
	if !known || !seen.recorded.Equal(recorded) {
		seen = sighting{recorded, time.Now()}
		g.seen[key] = seen
	}

	return time.Since(seen.first)
}

// observe starts to count the ages of a record that are not counted yet.
func (g *ages) observe(a journal.Attachment) {
	g.of(a, sinceReserved)
	if !a.StoppedAt.IsZero() {
		g.of(a, sinceStopped)
	}
	if !a.LostAt.IsZero() {
		g.of(a, sinceLost)
	}
}

// keep forgets all Functions except these.
func (g *ages) keep(ids map[function.ID]bool) {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	for key := range g.seen {
		if !ids[key.id] {
			delete(g.seen, key)
		}
	}
}
