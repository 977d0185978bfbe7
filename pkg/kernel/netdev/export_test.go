// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"net/netip"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// AddAddress adds an address as Attach does.
func AddAddress(netNS string, index int, address netip.Prefix) error {
	pod, err := dial(netNS)
	if err != nil {
		return err
	}
	defer pod.close()
	return addAddress(pod, index, address)
}

// AddRoute adds a route as Attach does.
func AddRoute(netNS string, index int, route function.Route) error {
	pod, err := dial(netNS)
	if err != nil {
		return err
	}
	defer pod.close()
	return addRoute(pod, index, route)
}

// WithoutSettings is the snapshot as an older agent took it.
func (s Snapshot) WithoutSettings() Snapshot {
	s.Settings = nil
	return s
}

// WithoutUppers makes the engine work as with a kernel that does not say what is on a netdev.
func (e *Engine) WithoutUppers() {
	e.uppers.once.Do(func() { e.uppers.err = errors.New("not wanted by a test") })
}

// Upper says whether something is on top of a netdev of the host.
func (e *Engine) Upper(name string) (has, known bool, err error) {
	l, err := e.host.named(name)
	if err != nil {
		return false, false, err
	}
	return e.upper(l)
}

// BreakUppers has the program fail that looks what is on a netdev, until mend is called.
func (e *Engine) BreakUppers() (mend func(), err error) {
	works := e.uppers.program
	broken, err := works.Clone()
	if err != nil {
		return nil, err
	}
	e.uppers.program = broken
	return func() { e.uppers.program = works }, broken.Close()
}

// Rebind binds the driver of a device again.
func (e *Engine) Rebind(ctx context.Context, who Identity, intend func(string) error) error {
	return e.rebind(ctx, who, intend)
}

// CookieOf is what tells a network namespace from every other one.
func CookieOf(netNS string) (uint64, error) {
	c, err := dial(netNS)
	if err != nil {
		return 0, err
	}
	defer c.close()
	return c.cookie, nil
}
