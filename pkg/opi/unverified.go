// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"context"
	"errors"
	"slices"
	"sync"
)

// This file is for agents that do not report their ports: see [Traits.Verifies]. The success of a
// call is the only evidence of its effect. It is valid for the connection on which the agent
// answered, because an agent that was restarted may have forgotten its ports.

// accepted holds the ports that an agent accepted. The zero value is empty. Safe for concurrent
// use.
type accepted struct {
	mu    sync.Mutex
	ports map[string]acceptedPort // by id
}

// acceptedPort is a port and the number of the connection on which the agent accepted it.
type acceptedPort struct {
	Port
	connection int64
}

func (a *accepted) get(id string) (port acceptedPort, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	port, ok = a.ports[id]
	return port, ok
}

func (a *accepted) add(p Port, connection int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ports == nil {
		a.ports = map[string]acceptedPort{}
	}
	a.ports[p.ID] = acceptedPort{p, connection}
}

func (a *accepted) remove(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.ports, id)
}

// ensureUnverified returns nil once the agent has accepted the port on the present connection. A
// port that the agent accepted with other properties is deleted first, because agents keep the
// properties of a port that is created twice.
func (c *Client) ensureUnverified(ctx context.Context, p Port) error {
	o := c.ports.object(p.ID)
	return await(ctx, ensurePort, p.ID, func(ctx context.Context) (bool, string, error) {
		if progress, err := c.waitForChange(ctx, ensurePort, o); err != nil {
			return false, progress, err
		}

		has, known := c.accepted.get(p.ID)
		differs := known && !(has.Equal(p) && slices.Equal(has.VLANs, p.VLANs))
		switch doubt := c.changes.doubt(o, deletion); {
		case differs:
			return false, "", c.deleteUnverified(ctx, ensurePort, p.ID)
		case doubt != "": // the lost deletion would delete the new port
			return false, doubt, nil
		case known && has.connection == c.connections.Load():
			return true, "", nil
		}

		err := c.change(ctx, o, creation, func(ctx context.Context) error {
			connection := max(1, c.connections.Load()) // the call makes the first connection
			err := c.agent.CreatePort(ctx, p)
			if err == nil {
				c.accepted.add(p, connection)
			}
			return err
		})
		return false, "created", c.failure(ctx, ensurePort, p.ID, err)
	})
}

// deleteUnverified returns nil once the agent has accepted the deletion of the port. It always
// calls the agent, because only the agent knows whether it has the port.
func (c *Client) deleteUnverified(ctx context.Context, op, id string) error {
	if err := checkID(op, id); err != nil {
		return err
	}

	o := c.ports.object(id)
	called := false
	return await(ctx, op, id, func(ctx context.Context) (bool, string, error) {
		if progress, err := c.waitForChange(ctx, op, o); err != nil {
			return false, progress, err
		}

		// A lost creation may still be carried out after the deletion, which is then repeated.
		doubt := c.changes.doubt(o, creation)
		if called && doubt != "" {
			return false, doubt, nil
		}

		c.accepted.remove(id)
		called = true
		err := c.change(ctx, o, deletion, func(ctx context.Context) error {
			err := c.agent.DeletePort(ctx, id)
			if errors.Is(err, ErrNotFound) {
				return nil
			}
			return err
		})
		if err != nil {
			return false, "", c.failure(ctx, op, id, err)
		}

		return doubt == "", doubt, nil
	})
}
