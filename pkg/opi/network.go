package opi

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Network is an L2 segment on the xPU. In OPI it is a LogicalBridge.
type Network struct {
	ID   string  // 4-63 characters of a-z, 0-9, '-'; see [NetworkID]
	VLAN uint16  // 1-4094
	VNI  *uint32 // VXLAN network identifier, 1-16777215; nil keeps the network on this xPU
}

// NetworkStatus is a network as the agent has it.
type NetworkStatus struct {
	Network
	State  State
	Detail string // what the agent says about failures; may be empty
}

func (n Network) check(op string) error {
	if err := checkID(op, n.ID); err != nil {
		return err
	}
	if n.VLAN < 1 || n.VLAN > 4094 {
		return invalid(op, n.ID, "VLAN", fmt.Sprintf("%d is not in 1-4094", n.VLAN))
	}
	if n.VNI != nil && (*n.VNI < 1 || *n.VNI > 1<<24-1) {
		return invalid(op, n.ID, "VNI", fmt.Sprintf("%d is not in 1-16777215", *n.VNI))
	}
	return nil
}

// differs says how the agent's network differs from the one wanted; empty if it does not. Only what we set is
// compared: agents fill in the rest, such as a VTEP address.
func (n Network) differs(got Network) string {
	if got.VLAN != n.VLAN {
		return fmt.Sprintf("the agent has it with VLAN %d, not %d", got.VLAN, n.VLAN)
	}
	if got.vni() != n.vni() {
		return fmt.Sprintf("the agent has it with VNI %d, not %d (0 is none)", got.vni(), n.vni())
	}
	return ""
}

// vni is 0 where there is none.
func (n Network) vni() uint32 {
	if n.VNI == nil {
		return 0
	}
	return *n.VNI
}

// EnsureNetwork returns nil once the agent says that the network is up with exactly this VLAN and VNI. A network of
// the same id with others is ErrConflict and stays as it is: ports may be using it.
func (c *Client) EnsureNetwork(ctx context.Context, n Network) error {
	const op = "ensure network"
	if err := n.check(op); err != nil {
		return err
	}
	last := nothingHeard
	up, err := poll(ctx, func(ctx context.Context) (bool, error) {
		got, err := c.getNetwork(ctx, op, n.ID)
		if errors.Is(err, ErrNotFound) {
			last = "created, not up yet"
			return false, c.createNetwork(ctx, op, n)
		}
		if err != nil {
			return false, err
		}
		last = "the network is " + got.State.String() + ": " + got.Detail
		if got.State == StateDeleting {
			return false, nil
		}
		if difference := n.differs(got.Network); difference != "" {
			return false, &Error{Kind: ErrConflict, Op: op, ID: n.ID, Detail: difference}
		}
		if got.State == StateFailed {
			return false, &Error{Kind: ErrFailed, Op: op, ID: n.ID, Detail: got.Detail}
		}
		return got.State == StateUp, nil
	})
	if err == nil && !up {
		return timeout(ctx, op, n.ID, last)
	}
	return err
}

// DeleteNetwork returns nil once the agent says that there is no such network. It is ErrInUse while ports use it.
func (c *Client) DeleteNetwork(ctx context.Context, id string) error {
	const op = "delete network"
	if err := checkID(op, id); err != nil {
		return err
	}
	refused := c.agent.DeleteNetwork(ctx, id)
	if errors.Is(refused, ErrInUse) || refused != nil && status.Code(refused) != codes.NotFound && !outcomeUnknown(refused) {
		return c.failure(ctx, op, id, refused)
	}
	last := "the network is still there"
	gone, err := poll(ctx, func(ctx context.Context) (bool, error) {
		got, err := c.getNetwork(ctx, op, id)
		if errors.Is(err, ErrNotFound) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
		last = "the network is " + got.State.String() + ": " + got.Detail
		if refused != nil && got.State != StateDeleting {
			return false, c.failure(ctx, op, id, refused)
		}
		return false, nil
	})
	if err == nil && !gone {
		return timeout(ctx, op, id, last)
	}
	return err
}

func (c *Client) getNetwork(ctx context.Context, op, id string) (NetworkStatus, error) {
	got, err := c.agent.Network(ctx, id)
	if err != nil {
		return NetworkStatus{}, c.failure(ctx, op, id, err)
	}
	return got, nil
}

// createNetwork returns nil if the network may be there now; whether it is the right one is for the caller to see.
func (c *Client) createNetwork(ctx context.Context, op string, n Network) error {
	err := c.agent.CreateNetwork(ctx, n)
	if err == nil {
		return nil
	}
	if outcomeUnknown(err) {
		if _, getErr := c.agent.Network(ctx, n.ID); getErr == nil {
			return nil
		}
	}
	return c.failure(ctx, op, n.ID, err)
}
