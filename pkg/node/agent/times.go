package agent

import (
	"cmp"
	"time"
)

// times shortens what tests would wait for. Zero stands for what is otherwise: a constant of this package or of the
// package that is told.
type times struct {
	sweep, abandoned, conflict, allocate, add time.Duration
}

func (t times) conflictInterval() time.Duration { return cmp.Or(t.conflict, conflictInterval) }
