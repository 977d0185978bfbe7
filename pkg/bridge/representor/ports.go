// SPDX-License-Identifier: Apache-2.0

package representor

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

// errTimeout says that the kernel has not answered in time. A driver may hang in the call, and then
// nothing can end it.
var errTimeout = errors.New("the kernel does not answer")

// listTimeout is more than a driver takes to list its ports, and less than a client waits.
const listTimeout = 2 * time.Second

// PortLister lists devlink ports. Because a driver may hang meanwhile, it makes one call at a time
// and waits for it no longer than 2 s. While a call hangs, List fails at once. Several goroutines
// may use a PortLister.
type PortLister struct {
	call func() ([]devlink.Port, error)

	mu      sync.Mutex
	pending *listing
}

// NewPortLister returns a PortLister that lists by call.
func NewPortLister(call func() ([]devlink.Port, error)) *PortLister {
	return &PortLister{call: call}
}

// listing is one call. Its ports and err are valid once done is closed.
type listing struct {
	began time.Time
	done  chan struct{}
	ports []devlink.Port
	err   error
}

// List returns the ports as they are after List was called.
func (l *PortLister) List() ([]devlink.Port, error) {
	l.mu.Lock()
	defer l.mu.Unlock()

	if l.pending != nil {
		if _, err := l.wait(); errors.Is(err, errTimeout) {
			return nil, err
		}
	}

	next := &listing{began: time.Now(), done: make(chan struct{})}
	l.pending = next
	go func() {
		next.ports, next.err = l.call()
		close(next.done)
	}()

	return l.wait()
}

// wait returns the result of the pending call. A result that came after the timeout is returned
// too, but an unfinished call is an errTimeout then.
func (l *PortLister) wait() ([]devlink.Port, error) {
	pending := l.pending
	timeout := time.NewTimer(time.Until(pending.began.Add(listTimeout)))
	defer timeout.Stop()

	select {
	case <-pending.done:
	default:
		select {
		case <-pending.done:
		case <-timeout.C:
			waited := time.Since(pending.began).Round(time.Second)
			return nil, fmt.Errorf("%w for %s", errTimeout, waited)
		}
	}

	l.pending = nil
	return pending.ports, pending.err
}
