// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"sync"

	"k8s.io/cli-runtime/pkg/printers"

	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// progress tells on a terminal how far long work is, in one line that is gone at the end.
type progress struct {
	to    io.Writer // nil if it is no terminal
	what  string
	total int

	mutex sync.Mutex
	done  int
}

// unknownTotal is the total of work of which it is not known how much it is.
const unknownTotal = 0

// newProgress has something to tell only if there are several steps. What is the program's own
// text, because it is written next to what moves the cursor.
func newProgress(to io.Writer, what string, total int) *progress {
	to = terminal.Raw(to)
	if !printers.IsTerminal(to) || total == 1 {
		to = nil
	}
	return &progress{to: to, what: what, total: total}
}

// step says that one more step is done.
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

// end takes the line away.
func (p *progress) end() {
	if p.to != nil {
		fmt.Fprint(p.to, "\r\x1b[K") // CSI EL of ECMA-48: erase the line
	}
}
