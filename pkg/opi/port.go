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

	// Addresses are those that the port may send from, where the source filter of its networks looks at addresses; none: any. They are
	// for agents that have [Options], and not in a PortStatus.
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
	// StateUnknown is that of an object that the agent lists without telling what it is. Its other fields are not to be believed.
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
		return invalid(op, p.ID, "Networks", "has %d networks, want at least one, and no more for a port that is no trunk", len(p.Networks))
	}
	for i, id := range p.Networks {
		if !objectID.MatchString(id) || !owner.Owns(id) {
			return invalid(op, p.ID, "Networks", "%q is not the id of a network of installation %s", id, owner)
		}
		if slices.Contains(p.Networks[:i], id) {
			return invalid(op, p.ID, "Networks", "%s is in it twice", id)
		}
	}
	return nil
}

// Equal tells whether two ports are the same but for their options; the order of networks does not matter.
func (p Port) Equal(q Port) bool {
	return p.ID == q.ID && p.Trunk == q.Trunk && bytes.Equal(p.MAC, q.MAC) &&
		slices.Equal(slices.Sorted(slices.Values(p.Networks)), slices.Sorted(slices.Values(q.Networks)))
}

// maxMade bounds how often EnsurePort creates a port that somebody else keeps changing.
const maxMade = 3

// EnsurePort returns nil once the agent says that the port is up with exactly this MAC address, type and networks.
//
// A port of the same id that differs or is being deleted is deleted and created anew: a port that is changed in place
// leaves agents with ports and networks that cannot be deleted any more. One that is not the installation's stays as it is,
// which is ErrConflict. A port that is found failed is retried once; one that stays failed for [Config.FailedGrace] is ErrFailed.
// The networks must exist (ErrNetworkMissing). A port of the same id that the agent does not tell enough of stays too, which is
// ErrUnknown.
func (c *Client) EnsurePort(ctx context.Context, p Port) error {
	const op = "ensure port"
	if err := p.check(op, c.installation); err != nil {
		return err
	}
	made, mayRetry := 0, true
	var failed time.Time // since when the port is failed
	told := false        // its options
	tell := func(ctx context.Context) (again bool, err error) {
		told = true
		return c.setOptions(ctx, op, p.ID, func(ctx context.Context) error { return c.agent.SetPortOptions(ctx, p) })
	}
	return await(ctx, op, p.ID, func(ctx context.Context) (done bool, said string, err error) {
		got, err := c.agent.Port(ctx, p.ID)
		err = c.failure(ctx, op, p.ID, err)
		missing := errors.Is(err, ErrNotFound)
		if err != nil && !missing {
			return false, "", err
		}
		if !missing && got.State != StateDeleting { // a dying one is waited for, whosever it is
			if owner := c.ownerOf(got); owner != "" {
				return false, "", &Error{Kind: ErrConflict, Op: op, ID: p.ID, Detail: "it belongs to " + owner}
			}
		}
		if missing || got.State == StateDeleting || !got.Equal(p) {
			if made == maxMade {
				const detail = "somebody else changes it: it was made %d times and is again MAC %s, networks %s, %s"
				return false, "", &Error{
					Kind: ErrConflict, Op: op, ID: p.ID, Detail: fmt.Sprintf(detail, made, got.MAC, got.Networks, got.State),
				}
			}
			made, mayRetry, failed = made+1, false, time.Time{}
			if !missing {
				if err := c.delete(ctx, c.ports, op, p.ID); err != nil {
					if stuck, ok := errors.AsType[*Error](err); ok {
						said = stuck.Detail
					}
					return false, said, err
				}
			}
			err := c.agent.CreatePort(ctx, p)
			told = err == nil && len(p.Addresses) == 0 // a port that was just made has no options
			if err := c.created(ctx, c.ports, op, p.ID, err); err != nil {
				return false, "", err
			}
			if !told {
				_, err = tell(ctx)
			}
			return false, "created, not up yet", err
		}
		if !told {
			if again, err := tell(ctx); again || err != nil {
				return false, got.of("port"), err
			}
		}
		said = got.of("port")
		if got.State != StateFailed {
			failed = time.Time{}
			return got.State == StateUp, said, nil
		}
		failed = cmp.Or(failed, time.Now())
		if mayRetry {
			mayRetry = false
			return false, said, c.failure(ctx, op, p.ID, c.agent.RetryPort(ctx, p))
		}
		return false, said, c.failedFor(failed, op, p.ID, got.Status)
	})
}

// failedFor returns ErrFailed for an object that has been failed since then, nil if it has not been for long.
func (c *Client) failedFor(since time.Time, op, id string, got Status) error {
	if time.Since(since) < c.failedGrace {
		return nil
	}
	return &Error{Kind: ErrFailed, Op: op, ID: id, Detail: got.Detail}
}

// DeletePort returns nil once the agent says that there is no such port, or that the port is somebody else's. Until then its
// Function must not be given to anyone else: the xPU may still forward for its last owner. [ErrUnknown]: the agent does not tell
// whose the port is, which was left alone.
func (c *Client) DeletePort(ctx context.Context, id string) error {
	return c.delete(ctx, c.ports, "delete port", id)
}

// GetPort tells what the agent has under this id, ErrNotFound if nothing, ErrUnknown if the agent does not tell enough.
func (c *Client) GetPort(ctx context.Context, id string) (PortStatus, error) {
	const op = "get port"
	if err := checkID(op, id); err != nil {
		return PortStatus{}, err
	}
	got, err := c.agent.Port(ctx, id)
	return got, c.failure(ctx, op, id, err)
}

// ListPorts gives all ports of the agent, also those of other clients, in the agent's order. The result is not a
// snapshot: a port made or deleted meanwhile may be in it or not. One of which the list does not tell enough is [StateUnknown].
func (c *Client) ListPorts(ctx context.Context) ([]PortStatus, error) {
	all, err := c.agent.Ports(ctx)
	return all, c.failure(ctx, "list ports", "", err)
}
