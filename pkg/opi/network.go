package opi

import (
	"context"
	"errors"
	"fmt"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Network is an L2 segment on the xPU. In OPI it is a LogicalBridge.
type Network struct {
	ID   string  // 4-63 characters of a-z, 0-9, '-'; see [NetworkID]
	VLAN uint16  // 1-4094
	VNI  *uint32 // VXLAN network identifier, 1-16777215; nil keeps the network on this xPU
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
func (n Network) differs(spec *evpn.LogicalBridgeSpec) string {
	if spec.GetVlanId() != uint32(n.VLAN) {
		return fmt.Sprintf("the agent has it with VLAN %d, not %d", spec.GetVlanId(), n.VLAN)
	}
	// proto3 agents are seen to report an absent VNI as 0.
	want := uint32(0)
	if n.VNI != nil {
		want = *n.VNI
	}
	if spec.GetVni() != want {
		return fmt.Sprintf("the agent has it with VNI %d, not %d (0 is none)", spec.GetVni(), want)
	}
	return ""
}

// EnsureNetwork returns nil once the agent says that the network is up with exactly this VLAN and VNI. A network of
// the same id with others is ErrConflict and stays as it is: ports may be using it.
func (c *Client) EnsureNetwork(ctx context.Context, n Network) error {
	const op = "ensure network"
	if err := n.check(op); err != nil {
		return err
	}
	last := "the agent has not said anything about it"
	up, err := poll(ctx, func(ctx context.Context) (bool, error) {
		got, err := c.getNetwork(ctx, op, n.ID)
		if errors.Is(err, ErrNotFound) {
			last = "created, not up yet"
			return false, c.createNetwork(ctx, op, n)
		}
		if err != nil {
			return false, err
		}
		state, detail := networkState(got)
		last = "the network is " + state.String() + ": " + detail
		if state == StateDeleting {
			return false, nil
		}
		if difference := n.differs(got.GetSpec()); difference != "" {
			return false, &Error{Kind: ErrConflict, Op: op, ID: n.ID, Detail: difference}
		}
		if state == StateFailed {
			return false, &Error{Kind: ErrFailed, Op: op, ID: n.ID, Detail: detail}
		}
		return state == StateUp, nil
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
	_, err := c.networks.DeleteLogicalBridge(ctx, &evpn.DeleteLogicalBridgeRequest{Name: networkPrefix + id, AllowMissing: true})
	if status.Code(err) == codes.FailedPrecondition {
		return &Error{Kind: ErrInUse, Op: op, ID: id, Detail: status.Convert(err).Message(), Err: err}
	}
	if err != nil && status.Code(err) != codes.NotFound && !outcomeUnknown(err) {
		return failure(ctx, op, id, err)
	}
	refused := err
	last := "the network is still there"
	gone, err := poll(ctx, func(ctx context.Context) (bool, error) {
		got, err := c.getNetwork(ctx, op, id)
		if errors.Is(err, ErrNotFound) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
		state, detail := networkState(got)
		last = "the network is " + state.String() + ": " + detail
		if refused != nil && state != StateDeleting {
			return false, failure(ctx, op, id, refused)
		}
		return false, nil
	})
	if err == nil && !gone {
		return timeout(ctx, op, id, last)
	}
	return err
}

func (c *Client) getNetwork(ctx context.Context, op, id string) (*evpn.LogicalBridge, error) {
	got, err := c.networks.GetLogicalBridge(ctx, &evpn.GetLogicalBridgeRequest{Name: networkPrefix + id})
	if err != nil {
		return nil, failure(ctx, op, id, err)
	}
	if got.GetSpec() == nil {
		return nil, &Error{Kind: ErrUnsupported, Op: op, ID: id, Detail: "the agent's GetLogicalBridge answers without a spec, so nothing can be verified"}
	}
	return got, nil
}

// createNetwork returns nil if the network may be there now; whether it is the right one is for the caller to see.
func (c *Client) createNetwork(ctx context.Context, op string, n Network) error {
	_, err := c.networks.CreateLogicalBridge(ctx, &evpn.CreateLogicalBridgeRequest{
		LogicalBridgeId: n.ID,
		LogicalBridge:   &evpn.LogicalBridge{Spec: &evpn.LogicalBridgeSpec{VlanId: uint32(n.VLAN), Vni: n.VNI}},
	})
	if err == nil {
		return nil
	}
	if outcomeUnknown(err) {
		if _, getErr := c.getNetwork(ctx, op, n.ID); getErr == nil {
			return nil
		}
	}
	return failure(ctx, op, n.ID, err)
}

func networkState(lb *evpn.LogicalBridge) (State, string) {
	detail, failed := componentErrors(lb.GetStatus().GetComponents())
	switch lb.GetStatus().GetOperStatus() {
	case evpn.LBOperStatus_LB_OPER_STATUS_UP:
		return StateUp, detail
	case evpn.LBOperStatus_LB_OPER_STATUS_TO_BE_DELETED:
		return StateDeleting, detail
	}
	if failed {
		return StateFailed, detail
	}
	return StatePending, detail
}
