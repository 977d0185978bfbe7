package bridge

import (
	"context"
	"crypto/rand"
	"maps"
	"slices"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
)

// networkServer serves LogicalBridgeService.
type networkServer struct {
	evpn.UnimplementedLogicalBridgeServiceServer
	*Agent
}

func (s networkServer) CreateLogicalBridge(_ context.Context, req *evpn.CreateLogicalBridgeRequest) (*evpn.LogicalBridge, error) {
	id := req.GetLogicalBridgeId()
	if id == "" {
		id = "lb-" + strings.ToLower(rand.Text())
	}
	if err := networkKind.parseID(id); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.createNetwork(id, req.GetLogicalBridge().GetSpec())
}

func (s networkServer) GetLogicalBridge(_ context.Context, req *evpn.GetLogicalBridgeRequest) (*evpn.LogicalBridge, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	id, n, err := lookup(networkKind, s.networks, req.GetName())
	if err != nil {
		return nil, err
	}
	return networkMessage(id, n), nil
}

func (s networkServer) ListLogicalBridges(_ context.Context, req *evpn.ListLogicalBridgesRequest) (*evpn.ListLogicalBridgesResponse, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	ids, next, err := page(slices.Sorted(maps.Keys(s.networks)), req.GetPageSize(), req.GetPageToken())
	if err != nil {
		return nil, err
	}
	reply := &evpn.ListLogicalBridgesResponse{NextPageToken: next}
	for _, id := range ids {
		reply.LogicalBridges = append(reply.LogicalBridges, networkMessage(id, s.networks[id]))
	}
	return reply, nil
}

func (s networkServer) UpdateLogicalBridge(_ context.Context, req *evpn.UpdateLogicalBridgeRequest) (*evpn.LogicalBridge, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id, n, err := lookup(networkKind, s.networks, req.GetLogicalBridge().GetName())
	if status.Code(err) == codes.NotFound && req.GetAllowMissing() {
		return s.createNetwork(id, req.GetLogicalBridge().GetSpec())
	}
	if err != nil {
		return nil, err
	}
	if n.deleting {
		return nil, networkKind.beingDeleted(id)
	}
	want := &evpn.LogicalBridge{Spec: proto.CloneOf(n.spec)}
	if err := applyMask(want, req.GetLogicalBridge(), req.GetUpdateMask()); err != nil {
		return nil, err
	}
	if proto.Equal(want.GetSpec(), n.spec) {
		s.reconcileNetwork(id)
		return networkMessage(id, n), nil
	}
	if err := s.checkNetwork(id, want.GetSpec()); err != nil {
		return nil, err
	}
	if err := s.store.put(networkKind, id, want); err != nil {
		return nil, err
	}
	n.spec = want.GetSpec()
	s.reconcileNetwork(id)
	s.reconcilePortsOf(id) // its VLAN id may be another
	return networkMessage(id, n), nil
}

func (s networkServer) DeleteLogicalBridge(_ context.Context, req *evpn.DeleteLogicalBridgeRequest) (*emptypb.Empty, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id, n, err := lookup(networkKind, s.networks, req.GetName())
	if status.Code(err) == codes.NotFound && req.GetAllowMissing() {
		return &emptypb.Empty{}, nil
	}
	if err != nil {
		return nil, err
	}
	for port, p := range s.ports {
		if p.in(id) {
			return nil, status.Errorf(codes.FailedPrecondition, "logical bridge %s is in use by bridge port %s", id, port)
		}
	}
	dying := &evpn.LogicalBridge{Spec: n.spec, Status: &evpn.LogicalBridgeStatus{OperStatus: stateDeleting.network}}
	return s.deleteObject(networkKind, id, &n.object, dying, s.reconcileNetwork)
}

// createNetwork makes a network, or gives the one that is there already if it is the same.
func (a *Agent) createNetwork(id string, spec *evpn.LogicalBridgeSpec) (*evpn.LogicalBridge, error) {
	have := a.networks[id]
	// What is there was right when it was made; with another data plane it may not be allowed any more.
	if have != nil && !have.deleting && proto.Equal(have.spec, spec) {
		return networkMessage(id, have), nil
	}
	if err := a.checkNetwork(id, spec); err != nil {
		return nil, err
	}
	if have != nil {
		if have.deleting {
			return nil, networkKind.beingDeleted(id)
		}
		return nil, status.Errorf(codes.AlreadyExists, "logical bridge %s exists with VLAN %d and VNI %d", id, have.spec.GetVlanId(), have.spec.GetVni())
	}
	n := &network{spec: proto.CloneOf(spec)}
	if err := a.store.put(networkKind, id, &evpn.LogicalBridge{Spec: n.spec}); err != nil {
		return nil, err
	}
	a.networks[id] = n
	a.reconcileNetwork(id)
	return networkMessage(id, n), nil
}

func (a *Agent) checkNetwork(id string, spec *evpn.LogicalBridgeSpec) error {
	vlan, vni := spec.GetVlanId(), spec.GetVni()
	sameVLAN := a.networkWith(id, func(n *network) bool { return n.spec.GetVlanId() == vlan })
	sameVNI := a.networkWith(id, func(n *network) bool { return n.hasVNI() && n.spec.GetVni() == vni })
	switch {
	case spec == nil:
		return status.Errorf(codes.InvalidArgument, "logical bridge %s: spec is required", id)
	case vlan < 1 || vlan > 4094:
		return status.Errorf(codes.InvalidArgument, "logical bridge %s: vlan_id %d: must be 1-4094", id, vlan)
	case sameVLAN != "" && a.plane.filtersVLANs():
		return status.Errorf(codes.AlreadyExists, "logical bridge %s: vlan_id %d is already in use by logical bridge %s, "+
			"and the data plane %s has one network for each VLAN id", id, vlan, sameVLAN, DataPlaneVLANAware)
	case spec.GetVtepIpPrefix() != nil:
		return status.Errorf(codes.InvalidArgument,
			"logical bridge %s: vtep_ip_prefix: must not be set, it is the address of the agent's uplink", id)
	case spec.Vni == nil:
		return nil
	case vni < 1 || vni > 1<<24-1:
		return status.Errorf(codes.InvalidArgument, "logical bridge %s: vni %d: must be 1-16777215, or absent", id, vni)
	case a.cfg.Uplink == "":
		return status.Errorf(codes.FailedPrecondition,
			"logical bridge %s: vni %d: the agent has no uplink to send VXLAN from (--uplink)", id, vni)
	case sameVNI != "":
		return status.Errorf(codes.AlreadyExists, "logical bridge %s: vni %d is already in use by logical bridge %s", id, vni, sameVNI)
	}
	return nil
}

// networkWith is a network other than id that has a property, "" if there is none.
func (a *Agent) networkWith(id string, property func(*network) bool) string {
	for other, n := range a.networks {
		if other != id && property(n) {
			return other
		}
	}
	return ""
}

func networkMessage(id string, n *network) *evpn.LogicalBridge {
	return &evpn.LogicalBridge{
		Name: networkKind.prefix + id,
		Spec: proto.CloneOf(n.spec),
		Status: &evpn.LogicalBridgeStatus{
			OperStatus: stateOf(n.deleting, n.failure).network,
			Components: []*evpn.Component{component("bridge", n.failure)},
		},
	}
}
