// SPDX-License-Identifier: Apache-2.0

package control

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// ErrEnded is returned if a process ended before it was ready and gave no reason.
var ErrEnded = errors.New("ended while it started")

// Reporter writes events. It is safe for concurrent use.
type Reporter struct {
	mu    sync.Mutex
	out   io.WriteCloser
	start time.Time
}

// NewReporter returns a Reporter that writes to out. Times are relative to now.
func NewReporter(out io.WriteCloser) *Reporter { return &Reporter{out: out, start: time.Now()} }

// Stage reports a finished stage.
func (r *Reporter) Stage(format string, args ...any) {
	r.write(Event{Stage: fmt.Sprintf(format, args...)})
}

// Finish writes the last event: ready, or failed if err is not nil.
func (r *Reporter) Finish(err error) {
	event := Event{Ready: err == nil}
	if err != nil {
		event.Error = err.Error()
	}
	r.write(event)
	r.out.Close()
}

func (r *Reporter) write(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e.Seconds = time.Since(r.start).Seconds()
	// The reader may be gone, which does not matter.
	_ = json.NewEncoder(r.out).Encode(e)
}

// Follow reads events until the last one, and calls stage for each stage. It returns nil when
// everything is ready.
func Follow(in io.Reader, stage func(Event)) error {
	decoder := json.NewDecoder(in)
	for {
		var e Event
		if err := decoder.Decode(&e); err != nil {
			if errors.Is(err, io.EOF) {
				return ErrEnded
			}
			return err
		}

		switch {
		case e.Error != "":
			return errors.New(e.Error)
		case e.Ready:
			return nil
		default:
			stage(e)
		}
	}
}
