// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// Port is what backs a Function on the xPU. In OPI it is a BridgePort.
type Port struct {
	ID       string           // 4-63 characters of a-z, 0-9, '-'; see [PortID]
	MAC      net.HardwareAddr // 6 bytes, unicast, not zero: the Function's own
	Networks []string         // ids of the networks: exactly one unless Trunk
	Trunk    bool             // frames of the networks are told apart by their VLAN tags

	// Addresses are those that the port may send from, where the source filter of its networks
	// looks at addresses; none: any. They are for agents that have [Options], and not in a
	// PortStatus.
	Addresses []netip.Addr
}

// Port is the port of a Function in the installation's network of this name.
func (i Installation) Port(id string, mac function.MAC, network string) Port {
	return Port{ID: id, MAC: mac.HardwareAddr(), Networks: []string{i.NetworkID(network)}}
}

// Status is what an agent says about a port or a network.
type Status struct {
	State  State
	Detail string // about failures; may be empty
}

// of describes the status in a sentence. noun is "port" or "network".
func (s Status) of(noun string) string {
	return "the " + noun + " is " + s.State.String() + ": " + s.Detail
}

// State is the operational state of a port or a network.
type State int

const (
	StatePending  State = iota // the agent is at work
	StateUp                    // in service
	StateFailed                // the agent could not bring it into service
	StateDeleting              // asked to go, not gone
	// StateUnknown is that of an object that the agent lists without telling what it is. Its other
	// fields are not to be believed.
	StateUnknown
)

func (s State) String() string {
	return [...]string{"pending", "up", "failed", "being deleted", "unknown"}[s]
}

// PortStatus is a port as the agent has it.
type PortStatus struct {
	Port
	Status
}

func (p Port) check(op string, owner Installation) error {
	if err := checkID(op, p.ID); err != nil {
		return err
	}

	// Checked here because the reference agent takes any number of bytes.
	switch {
	case len(p.MAC) != 6:
		return invalid(op, p.ID, "MAC", "%q has %d bytes, want 6", p.MAC, len(p.MAC))
	case p.MAC[0]&1 != 0:
		return invalid(op, p.ID, "MAC", "%s is a group address, want a unicast one", p.MAC)
	case bytes.Equal(p.MAC, make([]byte, 6)):
		return invalid(op, p.ID, "MAC", "is all zero")
	}

	if len(p.Networks) == 0 || !p.Trunk && len(p.Networks) > 1 {
		return invalid(op, p.ID, "Networks", "has %d networks, want at least one, and no more "+
			"for a port that is no trunk", len(p.Networks))
	}

	for i, id := range p.Networks {
		if !objectID.MatchString(id) || !owner.Owns(id) {
			return invalid(op, p.ID, "Networks", "%q is not the id of a network of installation %s",
				id, owner)
		}
		if slices.Contains(p.Networks[:i], id) {
			return invalid(op, p.ID, "Networks", "%s is in it twice", id)
		}
	}

	return nil
}

// Equal tells whether two ports are the same but for their options; the order of networks does not
// matter.
func (p Port) Equal(q Port) bool {
	return p.ID == q.ID && p.Trunk == q.Trunk && bytes.Equal(p.MAC, q.MAC) &&
		slices.Equal(slices.Sorted(slices.Values(p.Networks)),
			slices.Sorted(slices.Values(q.Networks)))
}

// maxMade bounds how often EnsurePort creates a port that somebody else keeps changing.
const maxMade = 3

// EnsurePort returns nil once the agent says that the port is up with exactly this MAC address,
// type and networks.
//
// A port of the same id that differs or is being deleted is deleted and created anew: a port that
// is changed in place leaves agents with ports and networks that cannot be deleted any more. One
// that is not the installation's stays as it is, which is ErrConflict. A port that is found failed
// is retried once; one that stays failed for [Config.FailedGrace] is ErrFailed. The networks must
// exist (ErrNetworkMissing). A port of the same id that the agent does not tell enough of stays
// too, which is ErrUnknown.
func (c *Client) EnsurePort(ctx context.Context, p Port) error {
	if err := p.check(ensurePort, c.installation); err != nil {
		return err
	}
	e := ensuring{client: c, port: p, object: c.ports.object(p.ID), mayRetry: true}
	return await(ctx, ensurePort, p.ID, e.look)
}

const ensurePort = "ensure port"

// ensuring is a call of [Client.EnsurePort].
type ensuring struct {
	client *Client
	port   Port
	object object

	made     int       // how often it was made
	mayRetry bool      // a port that is found failed
	told     bool      // its options
	failed   time.Time // since when it is failed
}

// look is a step of [await].
func (e *ensuring) look(ctx context.Context) (done bool, said string, err error) {
	c, id := e.client, e.port.ID
	if said, err := c.answered(ctx, ensurePort, e.object); err != nil {
		return false, said, err
	}

	got, err := c.agent.Port(ctx, id)
	err = c.failure(ctx, ensurePort, id, err)
	missing := errors.Is(err, ErrNotFound)
	if err != nil && !missing {
		return false, "", err
	}

	c.changes.seen(e.object, !missing && got.State != StateDeleting)
	if !missing && got.State != StateDeleting { // a dying one is waited for, whosever it is
		if owner := c.ownerOf(got); owner != "" {
			return false, "", &Error{
				Kind: ErrConflict, Op: ensurePort, ID: id, Detail: "it belongs to " + owner,
			}
		}
	}

	if missing || got.State == StateDeleting || !got.Equal(e.port) {
		said, err = e.remake(ctx, got, missing)
		return false, said, err
	}

	said = got.of("port")
	if !e.told {
		if again, err := e.tell(ctx); again || err != nil {
			return false, said, err
		}
	}

	if got.State == StateFailed {
		return false, said, e.retry(ctx, got)
	}

	e.failed = time.Time{}
	if doubt := c.changes.doubt(e.object, deletion); doubt != "" {
		return false, doubt, nil
	}

	return got.State == StateUp, said, nil
}

// remake makes the port, after it has deleted what is there instead.
func (e *ensuring) remake(
	ctx context.Context, got PortStatus, missing bool,
) (said string, err error) {
	c, id := e.client, e.port.ID
	if e.made == maxMade {
		const detail = "somebody else changes it: it was made %d times and is again MAC %s, " +
			"networks %s, %s"
		return "", &Error{
			Kind: ErrConflict, Op: ensurePort, ID: id,
			Detail: fmt.Sprintf(detail, e.made, got.MAC, got.Networks, got.State),
		}
	}

	e.made, e.mayRetry, e.failed = e.made+1, false, time.Time{}
	if !missing {
		if err := c.delete(ctx, c.ports, ensurePort, id); err != nil {
			if stuck, ok := errors.AsType[*Error](err); ok {
				said = stuck.Detail
			}
			return said, err
		}
	}

	err = c.change(ctx, e.object, creation, func(ctx context.Context) error {
		return c.agent.CreatePort(ctx, e.port)
	})
	e.told = err == nil && len(e.port.Addresses) == 0 // a port that was just made has no options
	if err := c.created(ctx, c.ports, ensurePort, id, err); err != nil {
		return "", err
	}
	if !e.told {
		_, err = e.tell(ctx)
		return "created, not up yet", err
	}

	return "created, not up yet", nil
}

// tell tells the agent of the port's options. again says that the port may be another one since.
func (e *ensuring) tell(ctx context.Context) (again bool, err error) {
	e.told = true
	return e.client.setOptions(ctx, ensurePort, e.object, func(ctx context.Context) error {
		return e.client.agent.SetPortOptions(ctx, e.port)
	})
}

// retry has the agent try again once to bring a port that was found failed into service. Its error
// says that the port stays failed.
func (e *ensuring) retry(ctx context.Context, got PortStatus) error {
	e.failed = cmp.Or(e.failed, time.Now())
	if !e.mayRetry {
		return e.client.failedFor(e.failed, ensurePort, e.port.ID, got.Status)
	}

	e.mayRetry = false
	err := e.client.change(ctx, e.object, update, func(ctx context.Context) error {
		return e.client.agent.RetryPort(ctx, e.port)
	})
	return e.client.failure(ctx, ensurePort, e.port.ID, err)
}

// failedFor returns ErrFailed for an object that has been failed since then, nil if it has not been
// for long.
func (c *Client) failedFor(since time.Time, op, id string, got Status) error {
	if time.Since(since) < c.failedGrace {
		return nil
	}
	return &Error{Kind: ErrFailed, Op: op, ID: id, Detail: got.Detail}
}

// DeletePort returns nil once the agent says that there is no such port, or that the port is
// somebody else's. Until then its Function must not be given to anyone else: the xPU may still
// forward for its last owner. [ErrUnknown]: the agent does not tell whose the port is, which was
// left alone.
func (c *Client) DeletePort(ctx context.Context, id string) error {
	return c.delete(ctx, c.ports, "delete port", id)
}

// GetPort tells what the agent has under this id, ErrNotFound if nothing, ErrUnknown if the agent
// does not tell enough.
func (c *Client) GetPort(ctx context.Context, id string) (PortStatus, error) {
	const op = "get port"
	if err := checkID(op, id); err != nil {
		return PortStatus{}, err
	}

	o := c.ports.object(id)
	if _, err := c.answered(ctx, op, o); err != nil {
		return PortStatus{}, err
	}

	got, err := c.agent.Port(ctx, id)
	err = c.failure(ctx, op, id, err)
	if doubt := c.changes.doubt(o, creation); errors.Is(err, ErrNotFound) && doubt != "" {
		return PortStatus{}, &Error{Kind: ErrUnavailable, Op: op, ID: id, Detail: doubt, Err: err}
	}

	return got, err
}

// ListPorts gives all ports of the agent, also those of other clients, in the agent's order. The
// result is not a snapshot: a port made or deleted meanwhile may be in it or not. One of which the
// list does not tell enough is [StateUnknown].
func (c *Client) ListPorts(ctx context.Context) ([]PortStatus, error) {
	all, err := c.agent.Ports(ctx)
	return all, c.failure(ctx, "list ports", "", err)
}
