// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// errNoAnswer says that the kernel has not answered in time: a driver may hang in it, and then
// there is no way to end the call.
var errNoAnswer = errors.New("the kernel does not answer")

// devlinkLimit is more than a driver takes to list its ports, and less than a client waits.
const devlinkLimit = 2 * time.Second

// patience calls something that may hang, one call at a time, and gives up waiting after a limit.
// While a call hangs, others fail at once.
type patience[T any] struct {
	limit time.Duration
	call  func() (T, error)

	mu      sync.Mutex
	pending *answer[T]
}

// answer is a call at work, and what it returned once done is closed.
type answer[T any] struct {
	began time.Time
	done  chan struct{}
	value T
	err   error
}

// do returns the answer to a call that began after it was asked for. The error is errNoAnswer if
// that takes too long.
func (p *patience[T]) do() (value T, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.pending != nil {
		if _, err := p.wait(); errors.Is(err, errNoAnswer) {
			return value, err
		}
	}

	a := &answer[T]{began: time.Now(), done: make(chan struct{})}
	p.pending = a
	go func() {
		a.value, a.err = p.call()
		close(a.done)
	}()

	return p.wait()
}

func (p *patience[T]) wait() (value T, err error) {
	a := p.pending
	select {
	case <-a.done: // also if that was after the limit
		p.pending = nil
		return a.value, a.err
	default:
	}

	late := time.NewTimer(time.Until(a.began.Add(p.limit)))
	defer late.Stop()

	select {
	case <-a.done:
		p.pending = nil
		return a.value, a.err
	case <-late.C:
		return value, fmt.Errorf("%w for %s", errNoAnswer, time.Since(a.began).Round(time.Second))
	}
}
