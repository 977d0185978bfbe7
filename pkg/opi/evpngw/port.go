package evpngw

import (
	"context"
	"fmt"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// Port implements [opi.Agent].
func (a agent) Port(ctx context.Context, id string) (opi.PortStatus, error) {
	got, err := a.ports.GetBridgePort(ctx, &evpn.GetBridgePortRequest{Name: portPrefix + id})
	if err != nil {
		return opi.PortStatus{}, err
	}
	if got.GetSpec() == nil {
		return opi.PortStatus{}, unverifiable("GetBridgePort")
	}
	return portStatus(got), nil
}

// Ports implements [opi.Agent].
func (a agent) Ports(ctx context.Context) ([]opi.PortStatus, error) {
	var all []opi.PortStatus
	token := ""
	for {
		page, err := a.ports.ListBridgePorts(ctx, &evpn.ListBridgePortsRequest{PageSize: pageSize, PageToken: token})
		if status.Code(err) == codes.NotFound && token == "" {
			return nil, nil // the reference agent, as long as no port was ever made
		}
		if status.Code(err) == codes.NotFound {
			return nil, &opi.Error{Kind: opi.ErrUnavailable, Detail: "the agent forgot the page token, it was probably restarted", Err: err}
		}
		if err != nil {
			return nil, err
		}
		for _, bp := range page.GetBridgePorts() {
			all = append(all, portStatus(bp))
		}
		if token = page.GetNextPageToken(); token == "" {
			return all, nil
		}
	}
}

// CreatePort implements [opi.Agent].
func (a agent) CreatePort(ctx context.Context, p opi.Port) error {
	if p.Trunk {
		// A trunk to a network that does not exist leaves references behind in the reference agent that make the
		// other networks undeletable.
		for _, id := range p.Networks {
			if err := a.networkUp(ctx, id); err != nil {
				return err
			}
		}
	}
	_, err := a.ports.CreateBridgePort(ctx, &evpn.CreateBridgePortRequest{BridgePortId: p.ID, BridgePort: &evpn.BridgePort{Spec: spec(p)}})
	if status.Code(err) == codes.NotFound {
		return &opi.Error{Kind: opi.ErrNetworkMissing, Detail: status.Convert(err).Message(), Err: err}
	}
	return err
}

func (a agent) networkUp(ctx context.Context, id string) error {
	got, err := a.Network(ctx, id)
	switch {
	case status.Code(err) == codes.NotFound:
		return &opi.Error{Kind: opi.ErrNetworkMissing, Detail: id, Err: err}
	case err != nil:
		return err
	case got.State != opi.StateUp:
		return &opi.Error{Kind: opi.ErrNetworkMissing, Detail: fmt.Sprintf("%s is %s: %s", id, got.State, got.Detail)}
	}
	return nil
}

// RetryPort is an Update that changes nothing, the one safe use of Update: changing a port in place leaves agents with
// ports and networks that cannot be deleted any more. An agent that was restarted does not try again by itself. Agents
// without Update are left to themselves.
func (a agent) RetryPort(ctx context.Context, p opi.Port) error {
	_, err := a.ports.UpdateBridgePort(ctx, &evpn.UpdateBridgePortRequest{BridgePort: &evpn.BridgePort{Name: portPrefix + p.ID, Spec: spec(p)}})
	switch status.Code(err) {
	case codes.Unimplemented, codes.NotFound, codes.Unknown:
		return nil // Get tells what came of it
	}
	return err
}

// DeletePort implements [opi.Agent].
func (a agent) DeletePort(ctx context.Context, id string) error {
	_, err := a.ports.DeleteBridgePort(ctx, &evpn.DeleteBridgePortRequest{Name: portPrefix + id, AllowMissing: true})
	return err
}

func spec(p opi.Port) *evpn.BridgePortSpec {
	spec := &evpn.BridgePortSpec{MacAddress: p.MAC, Ptype: evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS}
	if p.Trunk {
		spec.Ptype = evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK
	}
	for _, id := range p.Networks {
		spec.LogicalBridges = append(spec.LogicalBridges, networkPrefix+id)
	}
	return spec
}

func portStatus(bp *evpn.BridgePort) opi.PortStatus {
	p := opi.PortStatus{Port: opi.Port{
		ID:    lastSegment(bp.GetName()),
		MAC:   bp.GetSpec().GetMacAddress(),
		Trunk: bp.GetSpec().GetPtype() == evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK,
	}}
	for _, name := range bp.GetSpec().GetLogicalBridges() {
		p.Networks = append(p.Networks, lastSegment(name))
	}
	state := bp.GetStatus().GetOperStatus()
	p.Status = statusOf(state == evpn.BPOperStatus_BP_OPER_STATUS_UP, state == evpn.BPOperStatus_BP_OPER_STATUS_TO_BE_DELETED,
		bp.GetStatus().GetComponents())
	return p
}
