// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"sync"

	"k8s.io/cli-runtime/pkg/printers"

	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// progress shows the progress of long work on a terminal, in one line that is cleared at the end.
type progress struct {
	to    io.Writer // nil if it is not a terminal
	what  string
	total int

	mutex sync.Mutex
	done  int
}

// unknownTotal is the total of work of unknown size.
const unknownTotal = 0

// newProgress returns a progress that shows nothing unless there are several steps. The text what
// must be the program's own, because it is not escaped.
func newProgress(to io.Writer, what string, total int) *progress {
	to = terminal.Raw(to)
	if !printers.IsTerminal(to) || total == 1 {
		to = nil
	}
	return &progress{to: to, what: what, total: total}
}

// step reports one more finished step.
func (p *progress) step() {
	p.mutex.Lock()
	defer p.mutex.Unlock()

	p.done++
	switch {
	case p.to == nil:
	case p.total == unknownTotal:
		fmt.Fprintf(p.to, "\r%d %s", p.done, p.what)
	default:
		fmt.Fprintf(p.to, "\r%d/%d %s", p.done, p.total, p.what)
	}
}

// clear removes the line.
func (p *progress) clear() {
	if p.to != nil {
		fmt.Fprint(p.to, "\r\x1b[K") // CSI EL of ECMA-48: erase the line
	}
}
