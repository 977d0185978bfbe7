package hooks

import (
	"bytes"
	"strings"

	"github.com/go-logr/logr"
)

const (
	// maxOutput is how many bytes of one run's output are logged.
	maxOutput = 64 << 10
	// maxLine is how many bytes a line in the log has at most.
	maxLine = 4 << 10
	// maxLast is how many bytes of the last line go into an error.
	maxLast = 200
)

// lines logs what is written to it, line by line, up to a limit. The rest is taken and forgotten, so that whoever
// writes can go on.
type lines struct {
	log logr.Logger

	partial []byte
	written int // bytes, also of what is not logged
	// last is the beginning of the last line that is not empty.
	last string
}

// Write never fails.
func (l *lines) Write(p []byte) (int, error) {
	total := len(p)
	p = p[:min(total, max(0, maxOutput-l.written))]
	l.written += total
	for len(p) > 0 {
		line, rest, complete := bytes.Cut(p, []byte("\n"))
		if room := maxLine - len(l.partial); len(line) > room {
			line, rest, complete = p[:room], p[room:], true
		}
		l.partial = append(l.partial, line...)
		if complete {
			l.flush()
		}
		p = rest
	}
	return total, nil
}

// flush logs a line.
func (l *lines) flush() {
	line := strings.TrimRight(strings.ToValidUTF8(string(l.partial), "\uFFFD"), " \t\r")
	l.partial = l.partial[:0]
	if line == "" {
		return
	}
	l.log.Info("Post-delete hook says", "output", line)
	l.last = strings.ToValidUTF8(line[:min(len(line), maxLast)], "")
}

// end logs what has no line break.
func (l *lines) end() {
	l.flush()
	if l.written > maxOutput {
		l.log.Info("Post-delete hook wrote too much; the rest is not logged", "bytes", maxOutput)
	}
}
