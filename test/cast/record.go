// SPDX-License-Identifier: Apache-2.0

package cast

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"
)

const (
	// perKey is how long a key takes of who types a command.
	perKey = 40 * time.Millisecond
	// thinking is how long they take before a command.
	thinking = 800 * time.Millisecond
)

// recorder appends what is written to a recording.
type recorder struct {
	recording *Recording
	screen    io.Writer // sees it too

	mutex sync.Mutex
	// typed is the time that typing takes, which does not pass really.
	typed time.Duration
	begin time.Time
}

// Record runs commands with bash, one after the other, as if they were typed, until one fails. What
// they print goes to the screen too. Times are real, except for the typing.
func Record(
	ctx context.Context, screen io.Writer, title string, width, height int, commands []string,
) (Recording, error) {
	recording := Recording{Width: width, Height: height, Title: title}
	r := &recorder{recording: &recording, screen: screen, begin: time.Now()}
	for i, command := range commands {
		if i > 0 {
			_, _ = r.Write([]byte("\n"))
		}

		r.typeIn(command)
		cmd := exec.CommandContext(ctx, "bash", "-c", command)
		cmd.Stdout, cmd.Stderr = r, r
		cmd.Env = append(os.Environ(), fmt.Sprintf("COLUMNS=%d", width))
		if err := cmd.Run(); err != nil {
			return recording, fmt.Errorf("%s: %w", command, err)
		}
	}

	return recording, nil
}

// typeIn types a command after a prompt.
func (r *recorder) typeIn(command string) {
	_, _ = r.Write([]byte("$ "))
	r.pass(thinking)
	for _, key := range command {
		_, _ = r.Write([]byte(string(key)))
		r.pass(perKey)
	}
	_, _ = r.Write([]byte("\n"))
}

func (r *recorder) pass(time time.Duration) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.typed += time
}

// Write records output of a command.
func (r *recorder) Write(text []byte) (int, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()

	at := (time.Since(r.begin) + r.typed).Round(time.Millisecond)
	r.recording.Events = append(r.recording.Events, Event{at, string(text)})
	return r.screen.Write(text)
}
