// SPDX-License-Identifier: Apache-2.0

// Package card identifies the cards of a node's PFs. It asks cards and kernel in the background,
// because a card may be slow to answer, or hang.
package card

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/cardid"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// These are the pauses between requests to a PF that fails to answer.
const (
	firstRetry   = time.Second
	slowestRetry = 10 * time.Minute
)

// Options configures [Cards]. Functions, SysRoot and Changed are required.
type Options struct {
	Functions func() []function.Function // returns the Functions of the node
	SysRoot   string                     // path where the host's sysfs is mounted, "/sys"
	// Changed is called on any goroutine after the Card of a PF has changed, or is complete. It must
	// not block.
	Changed func()
	// Card returns the card of a PF, without the MAC address. If Card is nil, [cardid.Read] is
	// used.
	Card func(pf pci.Address) (function.Card, error)
	// PermanentMAC returns the permanent MAC address of a netdev, or "" if it has none. If
	// PermanentMAC is nil, the kernel is asked.
	PermanentMAC func(netdev string) (function.MAC, error)
	Log          logr.Logger
}

// Cards knows the cards of a node's PFs. Several goroutines may call its methods at once, but Run
// may be called only once.
type Cards struct {
	options Options
	mutex   sync.Mutex
	pfs     map[pci.Address]*pf
}

// pf is what is known about a PF that exists.
type pf struct {
	card     function.Card
	answered bool // completely, at least once
	asked    question
	cancel   context.CancelFunc // ends the requests to the PF
}

// question identifies a request to a PF. A new request is necessary after a change of the driver,
// which may report more, or of the netdev, which may have another address.
type question struct {
	address        pci.Address
	driver, netdev string
}

// New returns Cards that know nothing until [Cards.Run] is called.
func New(options Options) *Cards {
	if options.Card == nil {
		options.Card = func(pf pci.Address) (function.Card, error) {
			return cardid.Read(options.SysRoot, pf)
		}
	}

	if options.PermanentMAC == nil {
		options.PermanentMAC = permanentMAC
	}
	return &Cards{options: options, pfs: map[pci.Address]*pf{}}
}

// Of returns what is known about the card of a PF at present.
func (c *Cards) Of(address pci.Address) function.Card {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if known := c.pfs[address]; known != nil {
		return known.card
	}
	return function.Card{}
}

// Answer is like Of. answered is false while the PF has not answered completely, so that parts of
// the card may be unknown.
func (c *Cards) Answer(address pci.Address) (card function.Card, answered bool) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if known := c.pfs[address]; known != nil {
		return known.card, known.answered
	}
	return function.Card{}, false
}

// Run asks all PFs, and after each value from changes the PFs that are new or have another driver
// or netdev. It returns when ctx ends. It never waits for an answer of a PF.
func (c *Cards) Run(ctx context.Context, changes <-chan struct{}) error {
	for {
		c.look(ctx)
		if !loop.Wait(ctx, changes, 0) {
			return nil
		}
	}
}

// look starts the requests that are necessary, and forgets PFs that no longer exist.
func (c *Cards) look(ctx context.Context) {
	there := map[pci.Address]bool{}
	c.mutex.Lock()
	defer c.mutex.Unlock()

	for _, f := range c.options.Functions() {
		if f.Kind != function.PF {
			continue
		}
		there[f.PF] = true
		c.ask(ctx, question{f.PF, f.Driver, f.Netdev})
	}

	for address, known := range c.pfs {
		if !there[address] {
			known.cancel()
			delete(c.pfs, address)
		}
	}
}

// ask starts to ask a PF, unless it was asked the same already. The caller holds the mutex.
func (c *Cards) ask(ctx context.Context, q question) {
	known := c.pfs[q.address]
	if known != nil {
		away := question{q.address, q.driver, known.asked.netdev}
		if q == known.asked || q.netdev == "" && away == known.asked { // the netdev is in a pod
			return
		}
		known.cancel()
	} else {
		known = &pf{}
		c.pfs[q.address] = known
	}

	ctx, known.cancel = context.WithCancel(ctx)
	known.asked = q
	go c.untilAnswered(ctx, q)
}

// untilAnswered asks a PF until it answers or ctx ends.
func (c *Cards) untilAnswered(ctx context.Context, q question) {
	loop.Retry(ctx, firstRetry, slowestRetry, func(ctx context.Context) error {
		card, cardErr := c.options.Card(q.address)
		var macErr error
		if q.netdev != "" {
			card.MAC, macErr = c.options.PermanentMAC(q.netdev)
		}
		err := errors.Join(cardErr, macErr)
		c.learn(ctx, q.address, card, err == nil)
		return err
	}, func(err error, pause time.Duration) {
		c.options.Log.Info("A card did not say which one it is; asking again", "pf", q.address,
			"error", err.Error(), "retry", pause.String())
	})
}

// learn stores an answer. Parts that the answer lacks keep their values.
func (c *Cards) learn(
	ctx context.Context, address pci.Address, answer function.Card, complete bool,
) {
	c.mutex.Lock()
	known := c.pfs[address]
	if ctx.Err() != nil || known == nil { // asked again, or gone
		c.mutex.Unlock()
		return
	}

	before := known.card
	known.card = function.Card{
		Serial: cmp.Or(answer.Serial, before.Serial), Board: cmp.Or(answer.Board, before.Board),
		MAC: cmp.Or(answer.MAC, before.MAC),
	}

	changed := known.card != before || complete && !known.answered
	known.answered = known.answered || complete
	c.mutex.Unlock()

	if changed {
		c.options.Changed()
	}
}
