// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"sync"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// stage is what the age of a record is counted from.
type stage string

const (
	sinceReserved stage = "reserved"
	sinceStopped  stage = "stopped"
	sinceLost     stage = "lost"
)

// ages are how long this process has seen records as they are. The clock of the machine may be set
// at any time, so no decision is made by the times in the journal: they only say whether a record
// is still the one that was seen. Another agent counts anew. The methods may be called by several
// goroutines at once; the zero value is ready for use.
type ages struct {
	mutex sync.Mutex
	seen  map[agedStage]sighting
}

type agedStage struct {
	id    function.ID
	stage stage
}

// sighting is what the journal says of the time of a stage, and when this process saw that first,
// by the monotonic clock.
type sighting struct{ recorded, first time.Time }

// of is how long ago this process first saw the record in the stage; 0 if this is the first time.
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

// observe has the ages of a record counted from now on, as far as they are not.
func (g *ages) observe(a journal.Attachment) {
	g.of(a, sinceReserved)
	if !a.StoppedAt.IsZero() {
		g.of(a, sinceStopped)
	}
	if !a.LostAt.IsZero() {
		g.of(a, sinceLost)
	}
}

// keep forgets all Functions but these.
func (g *ages) keep(ids map[function.ID]bool) {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	for key := range g.seen {
		if !ids[key.id] {
			delete(g.seen, key)
		}
	}
}
