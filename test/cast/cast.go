// SPDX-License-Identifier: Apache-2.0

// Package cast records what commands print with its times, in the format asciicast v2
// (https://docs.asciinema.org/manual/asciicast/v2/), and draws a recording as an animated SVG.
package cast

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// Recording is what a terminal showed.
type Recording struct {
	// Width and Height are the terminal's, in characters.
	Width, Height int
	Title         string
	Events        []Event
}

// Event is output.
type Event struct {
	// At is the time since the beginning.
	At   time.Duration
	Text string
}

// header is the first line of the format.
type header struct {
	Version int    `json:"version"`
	Width   int    `json:"width"`
	Height  int    `json:"height"`
	Title   string `json:"title,omitempty"`
}

// Write writes a recording. Times are rounded to milliseconds.
func (r Recording) Write(w io.Writer) error {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(header{2, r.Width, r.Height, r.Title}); err != nil {
		return err
	}

	for _, event := range r.Events {
		seconds := float64(event.At.Milliseconds()) / 1000
		if err := encoder.Encode([]any{seconds, "o", event.Text}); err != nil {
			return err
		}
	}

	_, err := w.Write(out.Bytes())
	return err
}

// Read reads a recording. Other events than output are an error.
func Read(r io.Reader) (Recording, error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	if !lines.Scan() {
		return Recording{}, errors.Join(errors.New("the recording is empty"), lines.Err())
	}

	var h header
	if err := json.Unmarshal(lines.Bytes(), &h); err != nil {
		return Recording{}, fmt.Errorf("line 1: %w", err)
	}
	if h.Version != 2 || h.Width < 1 || h.Height < 1 {
		return Recording{}, fmt.Errorf("line 1: version %d, %d x %d: must be version 2, with a "+
			"width and a height", h.Version, h.Width, h.Height)
	}

	recording := Recording{Width: h.Width, Height: h.Height, Title: h.Title}
	for number := 2; lines.Scan(); number++ {
		event, err := parseEvent(lines.Bytes())
		if err != nil {
			return Recording{}, fmt.Errorf("line %d: %w", number, err)
		}
		if n := len(recording.Events); n > 0 && event.At < recording.Events[n-1].At {
			return Recording{}, fmt.Errorf("line %d: is earlier than the line before it", number)
		}
		recording.Events = append(recording.Events, event)
	}

	return recording, lines.Err()
}

func parseEvent(line []byte) (Event, error) {
	var seconds float64
	var kind, text string
	fields := []any{&seconds, &kind, &text}
	if err := json.Unmarshal(line, &fields); err != nil {
		return Event{}, err
	}
	if kind != "o" || len(fields) != 3 {
		return Event{}, fmt.Errorf("event %q: must be [seconds, \"o\", text]", kind)
	}

	return Event{time.Duration(seconds * float64(time.Second)).Round(time.Millisecond), text}, nil
}
