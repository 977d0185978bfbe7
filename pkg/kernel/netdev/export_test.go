// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"net/netip"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// AddAddress adds an address in the same way as Attach.
func AddAddress(netNS string, index int, address netip.Prefix) error {
	pod, err := dial(netNS)
	if err != nil {
		return err
	}
	defer pod.close()
	return addAddress(pod, index, address)
}

// AddRoute adds a route in the same way as Attach.
func AddRoute(netNS string, index int, route function.Route) error {
	pod, err := dial(netNS)
	if err != nil {
		return err
	}
	defer pod.close()
	return addRoute(pod, index, route)
}

// WithoutSettings returns the snapshot as an older agent would have taken it.
func (s Snapshot) WithoutSettings() Snapshot {
	s.Settings = nil
	return s
}

// WithoutUppers makes the engine work as with a kernel that cannot run the program of uppers.
func (e *Engine) WithoutUppers() {
	e.uppers.once.Do(func() { e.uppers.err = errors.New("not wanted by a test") })
}

// Upper reports whether something is stacked on a netdev of the host.
func (e *Engine) Upper(name string) (has, known bool, err error) {
	l, err := e.host.named(name)
	if err != nil {
		return false, false, err
	}
	return e.upper(l)
}

// BreakUppers makes the program of uppers fail until mend is called.
func (e *Engine) BreakUppers() (mend func(), err error) {
	works := e.uppers.program
	broken, err := works.Clone()
	if err != nil {
		return nil, err
	}
	e.uppers.program = broken
	return func() { e.uppers.program = works }, broken.Close()
}

// Rebind unbinds the driver of a device and binds it again.
func (e *Engine) Rebind(ctx context.Context, who Identity, intend func(string) error) error {
	return e.rebind(ctx, who, intend)
}

// CheckNodeGUID compares the node GUID of the RDMA devices of a device.
func (e *Engine) CheckNodeGUID(who Identity, want function.GUID) error {
	return e.checkNodeGUID(who, want)
}

// CookieOf returns the SO_NETNS_COOKIE of a network namespace.
func CookieOf(netNS string) (uint64, error) {
	c, err := dial(netNS)
	if err != nil {
		return 0, err
	}
	defer c.close()
	return c.cookie, nil
}

// UseRDMA replaces the kernel's RDMA system.
func (e *Engine) UseRDMA(system rdmaSystem) { e.rdma = system }
