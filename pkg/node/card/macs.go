// SPDX-License-Identifier: Apache-2.0

package card

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// MACOptions configures [MACs]. Functions and Changed are required.
type MACOptions struct {
	Functions func() []function.Function // returns the Functions of the node
	// Recorded returns the address that a Function in a pod had before it was attached, or "". It
	// may be nil.
	Recorded func(function.ID) function.MAC
	// Changed is called on any goroutine after an address has changed. It must not block.
	Changed func()
	// Permanent has the meaning of [Options.PermanentMAC].
	Permanent func(netdev string) (function.MAC, error)
	Log       logr.Logger
}

// MACs knows the permanent MAC addresses of VFs and SFs. The address of a Function whose netdev is
// in a pod is remembered. Several goroutines may call its methods at once, but Run may be called
// only once.
type MACs struct {
	options MACOptions
	mutex   sync.Mutex
	known   map[function.ID]permanent
}

// permanent is the address of a netdev, "" if it has none.
type permanent struct {
	netdev, driver string
	mac            function.MAC
}

// NewMACs returns MACs that know only what is recorded until [MACs.Run] is called.
func NewMACs(options MACOptions) *MACs {
	if options.Permanent == nil {
		options.Permanent = permanentMAC
	}
	return &MACs{options: options, known: map[function.ID]permanent{}}
}

// Of returns the permanent address of a Function, or "" if it has none or it is not known.
func (m *MACs) Of(id function.ID) function.MAC {
	mac, _ := m.Answer(id)
	return mac
}

// Answer is like Of. answered is false if the address is not known, and true if it is known that
// there is none.
func (m *MACs) Answer(id function.ID) (mac function.MAC, answered bool) {
	m.mutex.Lock()
	known, ok := m.known[id]
	m.mutex.Unlock()

	if !ok && m.options.Recorded != nil {
		mac = m.options.Recorded(id)
		return mac, mac != ""
	}
	return known.mac, ok
}

// Run reads the addresses of netdevs, and after each value from changes the addresses of new
// netdevs. It repeats reads that fail. It returns when ctx ends.
func (m *MACs) Run(ctx context.Context, changes <-chan struct{}) error {
	for pauses := loop.Backoff(firstRetry, slowestRetry); ; {
		var pause time.Duration // until the next change
		if err := m.read(); err != nil {
			pause = pauses.Step()
			m.options.Log.Info("The MAC addresses of some VFs are not known; reading them again",
				"error", err.Error(), "retry", pause.String())
		} else {
			pauses = loop.Backoff(firstRetry, slowestRetry)
		}

		if !loop.Wait(ctx, changes, pause) {
			return nil
		}
	}
}

// read reads the addresses that are not known yet, and forgets Functions that are gone.
func (m *MACs) read() error {
	var errs []error
	changed := false
	there := map[function.ID]bool{}
	for _, f := range m.options.Functions() {
		there[f.ID] = true
		if f.Kind == function.PF || f.Netdev == "" {
			m.left(f.ID)
			continue
		}
		if !m.isNew(f) {
			continue
		}

		mac, err := m.options.Permanent(f.Netdev)
		if err != nil {
			errs = append(errs, fmt.Errorf("Function %s: %w", f.ID, err))
			continue
		}
		changed = m.set(f, mac) || changed
	}

	changed = m.forget(there) || changed
	if changed {
		m.options.Changed()
	}
	return errors.Join(errs...)
}

// left notes that the Function's netdev is not on the host. Its address is read again when a netdev
// comes, because that may be another one of the same name.
func (m *MACs) left(id function.ID) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if known, ok := m.known[id]; ok {
		known.netdev = ""
		m.known[id] = known
	}
}

// isNew reports whether the Function has another netdev or driver than when it was read.
func (m *MACs) isNew(f function.Function) bool {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	known, ok := m.known[f.ID]
	return !ok || known.netdev != f.Netdev || known.driver != f.Driver
}

func (m *MACs) set(f function.Function, mac function.MAC) (changed bool) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	known, ok := m.known[f.ID]
	changed = !ok || known.mac != mac
	m.known[f.ID] = permanent{netdev: f.Netdev, driver: f.Driver, mac: mac}
	return changed
}

// forget removes the Functions that are not in there.
func (m *MACs) forget(there map[function.ID]bool) (changed bool) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	for id := range m.known {
		if !there[id] {
			changed = true
			delete(m.known, id)
		}
	}
	return changed
}
