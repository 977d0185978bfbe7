// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"context"
	"errors"
)

// SourceFilter says which source addresses the frames of a network's ports may have.
type SourceFilter string

const (
	// the port's MAC address, and its addresses if it has any; "" is the same
	SourceFilterAddresses SourceFilter = "Addresses"
	SourceFilterMAC       SourceFilter = "MAC"  // the port's MAC address
	SourceFilterNone      SourceFilter = "None" // any
)

// Options has what only some agents can be told of networks and ports: MTU, SourceFilter and
// Addresses. The others return an [ErrUnsupported], or an error of which [Agent.Kind] says so. All
// calls may be repeated.
type Options interface {
	// SetNetworkOptions tells an agent of a network that it has. mtu is the largest, in bytes, with
	// which frames reach other xPUs; 0 if the network ends at this xPU.
	SetNetworkOptions(ctx context.Context, n Network) (mtu int, err error)
	// SetPortOptions tells an agent of a port that it has.
	SetPortOptions(ctx context.Context, p Port) error
}

// setOptions calls set, unless the agent is known to have no options. again says that the object
// may be another one since.
func (c *Client) setOptions(
	ctx context.Context, op string, o object, set func(context.Context) error,
) (again bool, err error) {
	if c.noOptions.Load() {
		return false, nil
	}

	err = c.failure(ctx, op, o.id, c.change(ctx, o, update, set))
	switch {
	case errors.Is(err, ErrUnsupported):
		c.noOptions.Store(true)
		return false, nil
	case errors.Is(err, ErrNotFound): // somebody else has deleted the object
		return true, nil
	}

	return true, err
}

// MTU is the largest, in bytes, with which frames of a network reach other xPUs, as the agent said
// when the network was last ensured; 0 if it did not.
func (c *Client) MTU(network string) int {
	mtu, _ := c.mtus.Load(network)
	known, _ := mtu.(int)
	return known
}
