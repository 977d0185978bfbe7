package evpngw

import (
	"context"
	"math"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// Network implements [opi.Agent].
func (a agent) Network(ctx context.Context, id string) (opi.NetworkStatus, error) {
	got, err := a.networks.GetLogicalBridge(ctx, &evpn.GetLogicalBridgeRequest{Name: networkPrefix + id})
	if err != nil {
		return opi.NetworkStatus{}, err
	}
	if got.GetSpec() == nil {
		return opi.NetworkStatus{}, unverifiable("GetLogicalBridge")
	}
	n := opi.NetworkStatus{Network: opi.Network{ID: id, VLAN: uint16(min(got.GetSpec().GetVlanId(), math.MaxUint16))}}
	// proto3 agents are seen to report an absent VNI as 0.
	if vni := got.GetSpec().GetVni(); vni != 0 {
		n.VNI = &vni
	}
	state := got.GetStatus().GetOperStatus()
	n.Status = statusOf(state == evpn.LBOperStatus_LB_OPER_STATUS_UP, state == evpn.LBOperStatus_LB_OPER_STATUS_TO_BE_DELETED,
		got.GetStatus().GetComponents())
	return n, nil
}

// CreateNetwork implements [opi.Agent].
func (a agent) CreateNetwork(ctx context.Context, n opi.Network) error {
	_, err := a.networks.CreateLogicalBridge(ctx, &evpn.CreateLogicalBridgeRequest{
		LogicalBridgeId: n.ID,
		LogicalBridge:   &evpn.LogicalBridge{Spec: &evpn.LogicalBridgeSpec{VlanId: uint32(n.VLAN), Vni: n.VNI}},
	})
	return err
}

// DeleteNetwork implements [opi.Agent].
func (a agent) DeleteNetwork(ctx context.Context, id string) error {
	_, err := a.networks.DeleteLogicalBridge(ctx, &evpn.DeleteLogicalBridgeRequest{Name: networkPrefix + id, AllowMissing: true})
	if status.Code(err) == codes.FailedPrecondition {
		return &opi.Error{Kind: opi.ErrInUse, Detail: status.Convert(err).Message(), Err: err}
	}
	return err
}
