// SPDX-License-Identifier: Apache-2.0

// Package card knows what tells the PFs of a node from those of all other cards. It asks cards and
// kernel in the background, as a card may take long to answer, or hang.
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

// Pauses between questions to a PF that could not be asked.
const (
	firstRetry   = time.Second
	slowestRetry = 10 * time.Minute
)

// Options of [Cards]. Functions, SysRoot and Changed are needed.
type Options struct {
	Functions func() []function.Function // those of the node
	SysRoot   string                     // where the host's sysfs is, "/sys"
	// Changed is called, by any goroutine, after a Card has changed. It must not block.
	Changed func()
	// Card says which card a PF belongs to, without the MAC address; nil asks it.
	Card func(pf pci.Address) (function.Card, error)
	// PermanentMAC returns the MAC address that a netdev was made with, "" if it has none; nil asks
	// the kernel.
	PermanentMAC func(netdev string) (function.MAC, error)
	Log          logr.Logger
}

// Cards knows the cards of a node's PFs. Its methods may be called by several goroutines at once,
// but Run only once.
type Cards struct {
	options Options
	mutex   sync.Mutex
	pfs     map[pci.Address]*pf
}

// pf is what is known of a PF, as long as it is there.
type pf struct {
	card   function.Card
	asked  question
	cancel context.CancelFunc // ends the attempts to get an answer
}

// question is of what a PF was asked. Another driver may tell more, and another netdev may have
// another address.
type question struct {
	address        pci.Address
	driver, netdev string
}

// New makes Cards; [Cards.Run] makes them work.
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

// Of returns what is known of a PF's card now.
func (c *Cards) Of(address pci.Address) function.Card {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if known := c.pfs[address]; known != nil {
		return known.card
	}
	return function.Card{}
}

// Run asks the PFs that are there, and after each value from changes those that are new or have
// another driver or netdev, until ctx ends. It does not wait for answers, then nor before.
func (c *Cards) Run(ctx context.Context, changes <-chan struct{}) error {
	for {
		c.look(ctx)
		if !loop.Wait(ctx, changes, 0) {
			return nil
		}
	}
}

// look asks what has to be asked, and forgets the PFs that went.
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

// ask starts to ask a PF, unless it was asked that already. The caller has the mutex.
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

// untilAnswered asks a PF until it has answered or ctx ends.
func (c *Cards) untilAnswered(ctx context.Context, q question) {
	loop.Retry(ctx, firstRetry, slowestRetry, func(ctx context.Context) error {
		card, cardErr := c.options.Card(q.address)
		var macErr error
		if q.netdev != "" {
			card.MAC, macErr = c.options.PermanentMAC(q.netdev)
		}
		c.learn(ctx, q.address, card)
		return errors.Join(cardErr, macErr)
	}, func(err error, pause time.Duration) {
		c.options.Log.Info("A card did not say which one it is; asking again", "pf", q.address,
			"error", err.Error(), "retry", pause.String())
	})
}

// learn keeps what was answered, and what was known before where nothing was.
func (c *Cards) learn(ctx context.Context, address pci.Address, answer function.Card) {
	c.mutex.Lock()
	known := c.pfs[address]
	if ctx.Err() != nil || known == nil { // it was asked anew, or went
		c.mutex.Unlock()
		return
	}

	before := known.card
	known.card = function.Card{
		Serial: cmp.Or(answer.Serial, before.Serial), Board: cmp.Or(answer.Board, before.Board),
		MAC: cmp.Or(answer.MAC, before.MAC),
	}

	changed := known.card != before
	c.mutex.Unlock()

	if changed {
		c.options.Changed()
	}
}
