// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"sync"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// answers has what devices answered that may take seconds, or hang. It asks in the background, and
// repeats a question until the device has answered it once. Several goroutines may call its methods
// at once.
type answers struct {
	ctx context.Context // ends all requests
	// wait is how long a caller waits for the first answer to a question; negative for no limit.
	wait time.Duration
	// changed is called on any goroutine after an answer for which no caller waits, and when a device
	// has had its time for one.
	changed  func()
	pause    time.Duration // after the first request of a question that failed
	patience time.Duration // for how long an answer is awaited; 0 if nobody asks

	mutex sync.Mutex
	known map[pci.Address]*answer
}

// question identifies a request to a device. Another device at the address must be asked again, and
// so must one with another netdev, if the answer comes with the netdev.
type question struct {
	instance instance
	netdev   string // "" for an answer that does not change
}

// answer is what a device said to a question.
type answer struct {
	question
	text string // "" if the device said nothing, has not answered yet, or failed to answer
	err  error  // of the last request
	// first is closed after the first request. callerWaits says that a caller waits for it.
	first       chan struct{}
	callerWaits bool
	// awaited says that an answer is expected soon, so that others may wait for it.
	awaited bool
	stop    context.CancelFunc
}

// cardPatience is how long others wait for the answer of a device. A device answers within a second
// as a rule; one that hangs must not keep the node's devices from pods.
const cardPatience = 10 * time.Second

func newAnswers(wait time.Duration) *answers {
	return &answers{
		ctx: context.Background(), wait: wait, changed: func() {}, pause: retry,
		known: map[pci.Address]*answer{},
	}
}

// follow sets the context of all requests, and what is called after answers.
func (a *answers) follow(ctx context.Context, changed func()) { a.ctx, a.changed = ctx, changed }

// of returns the answer of a device to a question, as far as it is known. ask asks the device. While
// the same device has not answered another question yet, its last answer counts.
func (a *answers) of(
	address pci.Address, q question, ask func() (string, error),
) (text string, err error) {
	a.mutex.Lock()
	defer a.mutex.Unlock()

	known := a.known[address]
	if known == nil || known.question != q {
		known = a.begin(known, q, ask)
		a.known[address] = known
		a.await(known)
	}

	return known.text, known.err
}

// awaited reports whether the answer of a device is expected soon.
func (a *answers) awaited(address pci.Address) bool {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	known := a.known[address]
	return known != nil && known.awaited
}

// begin begins to ask a device. before is its answer to another question, or nil. The caller must
// hold the mutex.
func (a *answers) begin(before *answer, q question, ask func() (string, error)) *answer {
	ctx, stop := context.WithCancel(a.ctx)
	one := &answer{question: q, first: make(chan struct{}), stop: stop}
	if before != nil {
		before.stop()
		if before.instance == q.instance {
			one.text = before.text
		}
	}

	if a.patience > 0 {
		one.awaited = true
		time.AfterFunc(a.patience, func() { a.giveUp(one) })
	}
	go loop.Retry(ctx, a.pause, slowestRetry, func(context.Context) error {
		text, err := ask()
		a.learn(one, text, err)
		return err
	}, func(error, time.Duration) {}) // each scan reports the error

	return one
}

// await waits for the first answer, for as long as callers wait. The caller must hold the mutex,
// which is free meanwhile.
func (a *answers) await(one *answer) {
	var over <-chan time.Time
	switch {
	case a.wait == 0:
		return
	case a.wait > 0:
		over = time.After(a.wait)
	}

	one.callerWaits = true
	a.mutex.Unlock()
	select {
	case <-one.first:
	case <-over:
	}

	a.mutex.Lock()
	one.callerWaits = false
}

// learn stores what a device answered.
func (a *answers) learn(one *answer, text string, err error) {
	a.mutex.Lock()
	isNews := !one.callerWaits && (err == nil || one.err == nil || one.err.Error() != err.Error())
	one.text, one.err = text, err
	if err != nil {
		one.text = ""
	} else {
		one.awaited = false
	}
	select {
	case <-one.first:
	default:
		close(one.first)
	}
	a.mutex.Unlock()

	if isNews {
		a.changed()
	}
}

// giveUp ends the time that others wait for an answer.
func (a *answers) giveUp(one *answer) {
	a.mutex.Lock()
	awaited := one.awaited
	one.awaited = false
	a.mutex.Unlock()

	if awaited {
		a.changed()
	}
}

// forget ends the requests to devices that are gone.
func (a *answers) forget(gone func(pci.Address) bool) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	for address, known := range a.known {
		if gone(address) {
			known.stop()
			delete(a.known, address)
		}
	}
}
