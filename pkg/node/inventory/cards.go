// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"sync"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// cards knows which card devices belong to. It reads their Vital Product Data in the background,
// because a device may take seconds to answer, or hang. It reads each device until it has answered
// once. Several goroutines may call its methods at once.
type cards struct {
	ctx  context.Context // ends all reads
	wait bool            // read at once, and not in the background
	read func(device sysfs.Dir) (string, error)
	// changed is called on any goroutine after an answer, and when a device has had its time for one.
	changed  func()
	pause    time.Duration // after the first failed read of a device
	patience time.Duration // for how long an answer is awaited

	mutex sync.Mutex
	known map[pci.Address]*cardID
}

// cardID is the identifier of the card that a device belongs to, from its Vital Product Data.
type cardID struct {
	instance instance
	id       string // "" if the data name no card, or are not known yet
	err      error  // of the last read
	// awaited says that an answer is expected soon, so that others may wait for it.
	awaited bool
	stop    context.CancelFunc
}

// cardPatience is how long others wait for the answer of a device. A device answers within a second
// as a rule; one that hangs must not keep the node's devices from pods.
const cardPatience = 10 * time.Second

func newCards(wait bool) *cards {
	return &cards{
		ctx: context.Background(), wait: wait, read: readCard, changed: func() {}, pause: retry,
		patience: cardPatience, known: map[pci.Address]*cardID{},
	}
}

// awaited reports whether the answer of a device is expected soon.
func (c *cards) awaited(address pci.Address) bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	card := c.known[address]
	return card != nil && card.awaited
}

// of returns the card that a device belongs to, as far as it is known.
func (c *cards) of(address pci.Address, now instance, dir sysfs.Dir) (id string, err error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	card := c.known[address]
	if card != nil && card.instance == now {
		return card.id, card.err
	}
	if card != nil {
		card.stop()
	}

	ctx, stop := context.WithCancel(c.ctx)
	card = &cardID{instance: now, stop: stop}
	c.known[address] = card
	if c.wait {
		card.id, card.err = c.read(dir)
		return card.id, card.err
	}

	card.awaited = true
	time.AfterFunc(c.patience, func() { c.giveUp(card) })
	go loop.Retry(ctx, c.pause, slowestRetry, func(context.Context) error {
		id, err := c.read(dir)
		c.learn(card, id, err)
		return err
	}, func(error, time.Duration) {}) // each scan reports the error

	return "", nil
}

// learn stores what a device answered.
func (c *cards) learn(card *cardID, id string, err error) {
	c.mutex.Lock()
	same := err != nil && card.err != nil && card.err.Error() == err.Error()
	card.id, card.err, card.awaited = id, err, card.awaited && err != nil
	c.mutex.Unlock()

	if !same {
		c.changed()
	}
}

// giveUp ends the time that others wait for an answer.
func (c *cards) giveUp(card *cardID) {
	c.mutex.Lock()
	awaited := card.awaited
	card.awaited = false
	c.mutex.Unlock()

	if awaited {
		c.changed()
	}
}

// forget ends the reads of devices that are gone.
func (c *cards) forget(gone func(pci.Address) bool) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	for address, card := range c.known {
		if gone(address) {
			card.stop()
			delete(c.known, address)
		}
	}
}
