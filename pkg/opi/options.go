// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"context"
	"errors"
)

// SourceFilter restricts the source addresses of frames from a network's ports.
type SourceFilter string

const (
	// the port's MAC address, and its IP addresses if it has any; the default, like ""
	SourceFilterAddresses SourceFilter = "Addresses"
	SourceFilterMAC       SourceFilter = "MAC"  // the port's MAC address
	SourceFilterNone      SourceFilter = "None" // no restriction
)

// Options are calls that only some agents implement, for MTU, SourceFilter and Addresses. Other
// agents return an [ErrUnsupported], or an error that [Agent.Kind] classifies so. All calls may be
// repeated.
type Options interface {
	// SetNetworkOptions sets the options of an existing network. mtu is the largest MTU, in bytes,
	// of frames to other xPUs; 0 if the network ends at this xPU.
	SetNetworkOptions(ctx context.Context, n Network) (mtu int, err error)
	// SetPortOptions sets the options of an existing port.
	SetPortOptions(ctx context.Context, p Port) error
}

// setOptions calls set, unless the agent is known not to implement options. again reports that the
// object must be read again, because it may have been replaced meanwhile.
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
	case errors.Is(err, ErrNotFound): // another client deleted the object
		return true, nil
	case err == nil:
		c.hasOptions.Store(true)
	}

	return true, err
}

// MTU returns the largest MTU, in bytes, of frames of the network to other xPUs, as the agent
// reported when the network was last ensured. It returns 0 if the agent did not report it.
func (c *Client) MTU(network string) int {
	mtu, _ := c.mtus.Load(network)
	known, _ := mtu.(int)
	return known
}
