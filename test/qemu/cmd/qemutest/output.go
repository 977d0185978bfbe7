// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io"
	"sync"
)

// lockedWriter makes writes of several goroutines safe.
type lockedWriter struct {
	mu sync.Mutex
	to io.Writer
}

func (w *lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.to.Write(p)
}

// linePrefixer begins each line with the name of its source. Each write must consist of whole
// lines.
type linePrefixer struct {
	to     io.Writer
	prefix string
}

func (w *linePrefixer) Write(p []byte) (int, error) {
	var out bytes.Buffer
	for line := range bytes.Lines(p) {
		out.WriteString(w.prefix)
		out.Write(line)
	}

	if _, err := w.to.Write(out.Bytes()); err != nil {
		return 0, err
	}
	return len(p), nil
}
