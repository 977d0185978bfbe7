package bridge

import (
	"bytes"
	"context"
	"maps"
	"net"
	"slices"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
)

// portServer serves BridgePortService.
type portServer struct {
	evpn.UnimplementedBridgePortServiceServer
	*Agent
}

func (s portServer) CreateBridgePort(_ context.Context, req *evpn.CreateBridgePortRequest) (*evpn.BridgePort, error) {
	id := req.GetBridgePortId()
	if id == "" {
		return nil, status.Error(codes.InvalidArgument, "bridge_port_id is required: it tells which netdev represents the port, by name or PCI address")
	}
	if err := portKind.parseID(id); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.createPort(id, req.GetBridgePort().GetSpec())
}

func (s portServer) GetBridgePort(_ context.Context, req *evpn.GetBridgePortRequest) (*evpn.BridgePort, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	id, p, err := lookup(portKind, s.ports, req.GetName())
	if err != nil {
		return nil, err
	}
	return s.portMessage(id, p), nil
}

func (s portServer) ListBridgePorts(_ context.Context, req *evpn.ListBridgePortsRequest) (*evpn.ListBridgePortsResponse, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	ids, next, err := page(slices.Sorted(maps.Keys(s.ports)), req.GetPageSize(), req.GetPageToken())
	if err != nil {
		return nil, err
	}
	reply := &evpn.ListBridgePortsResponse{NextPageToken: next}
	for _, id := range ids {
		reply.BridgePorts = append(reply.BridgePorts, s.portMessage(id, s.ports[id]))
	}
	return reply, nil
}

// UpdateBridgePort takes the representor out before it puts it back in another way. An update that changes nothing
// tries again to realise the port.
func (s portServer) UpdateBridgePort(_ context.Context, req *evpn.UpdateBridgePortRequest) (*evpn.BridgePort, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id, p, err := lookup(portKind, s.ports, req.GetBridgePort().GetName())
	if status.Code(err) == codes.NotFound && req.GetAllowMissing() {
		return s.createPort(id, req.GetBridgePort().GetSpec())
	}
	if err != nil {
		return nil, err
	}
	if p.deleting {
		return nil, portKind.beingDeleted(id)
	}
	want := &evpn.BridgePort{Spec: proto.CloneOf(p.spec)}
	if err := applyMask(want, req.GetBridgePort(), req.GetUpdateMask()); err != nil {
		return nil, err
	}
	spec, err := s.checkPort(id, want.GetSpec())
	if err != nil {
		return nil, err
	}
	if !proto.Equal(spec, p.spec) {
		if err := s.store.put(portKind, id, &evpn.BridgePort{Spec: spec}); err != nil {
			return nil, err
		}
		p.spec = spec
		if err := s.plane.detach(id); err != nil {
			s.keepOutcome("port", id, &p.object, err)
			return s.portMessage(id, p), nil
		}
	}
	s.reconcilePort(id)
	return s.portMessage(id, p), nil
}

func (s portServer) DeleteBridgePort(_ context.Context, req *evpn.DeleteBridgePortRequest) (*emptypb.Empty, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id, p, err := lookup(portKind, s.ports, req.GetName())
	if status.Code(err) == codes.NotFound && req.GetAllowMissing() {
		return &emptypb.Empty{}, nil
	}
	if err != nil {
		return nil, err
	}
	dying := &evpn.BridgePort{Spec: p.spec, Status: &evpn.BridgePortStatus{OperStatus: stateDeleting.port}}
	return s.deleteObject(portKind, id, &p.object, dying, s.reconcilePort)
}

// createPort makes a port, or gives the one that is there already if it is the same.
func (a *Agent) createPort(id string, spec *evpn.BridgePortSpec) (*evpn.BridgePort, error) {
	spec, err := a.checkPort(id, spec)
	if err != nil {
		return nil, err
	}
	if have := a.ports[id]; have != nil {
		switch {
		case have.deleting:
			return nil, portKind.beingDeleted(id)
		case !proto.Equal(have.spec, spec):
			return nil, status.Errorf(codes.AlreadyExists, "bridge port %s exists as %s port with MAC %s on logical bridge %s",
				id, strings.TrimPrefix(have.spec.GetPtype().String(), "BRIDGE_PORT_TYPE_"), net.HardwareAddr(have.spec.GetMacAddress()), strings.Join(have.networks(), ", "))
		}
		return a.portMessage(id, have), nil
	}
	p := &port{spec: spec}
	if err := a.store.put(portKind, id, &evpn.BridgePort{Spec: spec}); err != nil {
		return nil, err
	}
	a.ports[id] = p
	a.reconcilePort(id)
	return a.portMessage(id, p), nil
}

// checkPort gives the spec in the form in which it is kept: with the names of its networks as we give them, sorted.
func (a *Agent) checkPort(id string, spec *evpn.BridgePortSpec) (*evpn.BridgePortSpec, error) {
	mac, n := net.HardwareAddr(spec.GetMacAddress()), len(spec.GetLogicalBridges())
	access := spec.GetPtype() == evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS
	trunk := spec.GetPtype() == evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK
	switch {
	case spec == nil:
		return nil, status.Errorf(codes.InvalidArgument, "bridge port %s: spec is required", id)
	case len(mac) != 6 || mac[0]&1 != 0 || bytes.Equal(mac, make([]byte, 6)):
		return nil, status.Errorf(codes.InvalidArgument,
			"bridge port %s: mac_address %s (%d bytes): must be the 6 bytes of a unicast address that is not zero", id, mac, len(mac))
	case !access && !trunk:
		return nil, status.Errorf(codes.InvalidArgument, "bridge port %s: ptype: must be ACCESS or TRUNK", id)
	case access && n != 1:
		return nil, status.Errorf(codes.InvalidArgument,
			"bridge port %s: logical_bridges: has %d, an ACCESS port has exactly one", id, n)
	case trunk && !a.plane.filtersVLANs():
		return nil, status.Errorf(codes.Unimplemented, "bridge port %s: %s", id, noTrunks)
	case trunk && n == 0:
		return nil, status.Errorf(codes.InvalidArgument,
			"bridge port %s: logical_bridges: has none, a TRUNK port names each that it carries", id)
	}
	var networks []string
	for _, name := range spec.GetLogicalBridges() {
		network, err := a.checkMember(id, name, mac)
		if err != nil {
			return nil, err
		}
		networks = append(networks, networkKind.prefix+network)
	}
	slices.Sort(networks)
	if len(slices.Compact(slices.Clone(networks))) < n {
		return nil, status.Errorf(codes.InvalidArgument, "bridge port %s: logical_bridges: must name each only once", id)
	}
	return &evpn.BridgePortSpec{MacAddress: bytes.Clone(mac), Ptype: spec.GetPtype(), LogicalBridges: networks}, nil
}

// checkMember gives the id of the network of this name, if a port with this MAC address may be in it.
func (a *Agent) checkMember(id, name string, mac net.HardwareAddr) (string, error) {
	network, err := networkKind.parseName(name)
	if err != nil {
		return "", status.Errorf(codes.InvalidArgument, "bridge port %s: logical_bridges: %s", id, status.Convert(err).Message())
	}
	switch n := a.networks[network]; {
	case n == nil:
		return "", status.Errorf(codes.NotFound, "bridge port %s: logical_bridges: logical bridge %s does not exist", id, network)
	case n.deleting:
		return "", networkKind.beingDeleted(network)
	}
	for other, p := range a.ports {
		if other != id && p.in(network) && bytes.Equal(p.spec.GetMacAddress(), mac) {
			return "", status.Errorf(codes.AlreadyExists,
				"bridge port %s: mac_address %s is already in use on logical bridge %s by bridge port %s", id, mac, network, other)
		}
	}
	return network, nil
}

func (a *Agent) portMessage(id string, p *port) *evpn.BridgePort {
	failure := a.failureOf(p)
	return &evpn.BridgePort{
		Name: portKind.prefix + id,
		Spec: proto.CloneOf(p.spec),
		Status: &evpn.BridgePortStatus{
			OperStatus: stateOf(p.deleting, failure).port,
			Components: []*evpn.Component{component("representor", failure)},
		},
	}
}
