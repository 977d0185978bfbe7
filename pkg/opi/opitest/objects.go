// SPDX-License-Identifier: Apache-2.0

package opitest

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"path"
	"regexp"
	"slices"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
	"k8s.io/apimachinery/pkg/util/uuid"
)

// Prefixes of the reference agent's real object names.
const (
	networkPrefix = "//network.opiproject.org/bridges/"
	portPrefix    = "//network.opiproject.org/ports/"
)

// networkNames and portNames return the prefixes of object names.
func (a *Agent) networkNames() string {
	if a.behaviour.ProtoNames {
		return "logicalBridges/"
	}
	return networkPrefix
}

func (a *Agent) portNames() string {
	if a.behaviour.ProtoNames {
		return "bridgePorts/"
	}
	return portPrefix
}

var (
	idForm   = regexp.MustCompile(`^[a-z][a-z0-9-]{2,61}[a-z0-9]$`)
	uuidForm = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}$`)
)

func chooseID(wanted string) (string, error) {
	if wanted == "" {
		return string(uuid.NewUUID()), nil
	}

	if !idForm.MatchString(wanted) || uuidForm.MatchString(wanted) {
		return "", unknown("user-settable ID must begin with a letter, be 4 to 63 characters, "+
			"only contain lowercase, digits "+
			"and hyphens, and not be a UUID (got: '%s')", wanted)
	}

	return wanted, nil
}

// find resolves a resource name with this prefix. Other well-formed names, such as the proto's own
// bridgePorts/{id}, are NotFound.
func (t table) find(prefix, name string) (string, *object, error) {
	if name == "" {
		return "", nil, unknown("missing required field: name")
	}
	if !wellFormed(name) {
		return "", nil, unknown("resource name %q is malformed", name)
	}

	id := path.Base(name)
	o := t[id]
	if o == nil || name != prefix+id {
		return id, nil, status.Errorf(codes.NotFound, "unable to find key %s", name)
	}

	return id, o, nil
}

type networkServer struct {
	evpn.UnimplementedLogicalBridgeServiceServer
	agent *Agent
}

func (a *Agent) networkMessage(id string, n *object) *evpn.LogicalBridge {
	spec := proto.CloneOf(n.network)
	if spec.VtepIpPrefix == nil && !a.behaviour.V02 { // the reference agent always sets it
		spec.VtepIpPrefix = &netcommon.IPPrefix{
			Addr: &netcommon.IPAddress{V4OrV6: &netcommon.IPAddress_V4Addr{}},
		}
	}

	state := evpn.LBOperStatus_LB_OPER_STATUS_DOWN
	switch {
	case n.dying:
		state = evpn.LBOperStatus_LB_OPER_STATUS_TO_BE_DELETED
	case n.up:
		state = evpn.LBOperStatus_LB_OPER_STATUS_UP
	}

	return &evpn.LogicalBridge{
		Name: a.networkNames() + id, Spec: spec,
		Status: &evpn.LogicalBridgeStatus{OperStatus: state, Components: a.components(n, "lgm")},
	}
}

func (s networkServer) CreateLogicalBridge(
	_ context.Context, req *evpn.CreateLogicalBridgeRequest,
) (*evpn.LogicalBridge, error) {
	spec := req.GetLogicalBridge().GetSpec()
	switch {
	case spec == nil:
		return nil, unknown("missing required field: logical_bridge.spec")
	case spec.GetVlanId() == 0:
		return nil, unknown("missing required field: logical_bridge.spec.vlan_id")
	case spec.GetVlanId() > 4095:
		return nil, status.Errorf(codes.InvalidArgument,
			"VlanId value (%d) have to be between 1 and 4095", spec.GetVlanId())
	}

	id, err := chooseID(req.GetLogicalBridgeId())
	if err != nil {
		return nil, err
	}
	if old := s.agent.networks[id]; old != nil {
		return s.agent.networkMessage(id, old), nil
	}
	if s.agent.behaviour.V02 {
		return s.createV02(id, spec)
	}

	for _, other := range s.agent.networks {
		if spec.Vni != nil && other.network.Vni != nil && *spec.Vni == *other.network.Vni {
			return nil, unknown("the VNI is already in use")
		}
	}

	n := &object{network: proto.CloneOf(spec), macs: map[string]string{}}
	s.agent.realise(n)
	s.agent.networks[id], s.agent.networksEver = n, true

	return s.agent.networkMessage(id, n), nil
}

func (s networkServer) GetLogicalBridge(
	_ context.Context, req *evpn.GetLogicalBridgeRequest,
) (*evpn.LogicalBridge, error) {
	if s.agent.behaviour.Blind {
		return &evpn.LogicalBridge{}, nil
	}
	id, n, err := s.agent.networks.find(s.agent.networkNames(), req.GetName())
	if err != nil {
		return nil, err
	}
	return s.agent.networkMessage(id, n), nil
}

func (s networkServer) DeleteLogicalBridge(
	_ context.Context, req *evpn.DeleteLogicalBridgeRequest,
) (*emptypb.Empty, error) {
	id, n, err := s.agent.networks.find(s.agent.networkNames(), req.GetName())
	if status.Code(err) == codes.NotFound && req.GetAllowMissing() {
		return &emptypb.Empty{}, nil
	}
	if err != nil {
		return nil, err
	}
	if s.agent.behaviour.V02 {
		return s.deleteV02(id)
	}
	if len(n.macs) > 0 || s.agent.gatewayOf(id) != "" {
		return nil, unknown("the LogicalBridge is not empty")
	}

	s.agent.kill(n)
	return &emptypb.Empty{}, nil
}

type portServer struct {
	evpn.UnimplementedBridgePortServiceServer
	agent *Agent
}

func (a *Agent) portMessage(id string, p *object) *evpn.BridgePort {
	state := evpn.BPOperStatus_BP_OPER_STATUS_DOWN
	switch {
	case p.dying:
		state = evpn.BPOperStatus_BP_OPER_STATUS_TO_BE_DELETED
	case p.up:
		state = evpn.BPOperStatus_BP_OPER_STATUS_UP
	}

	spec := proto.CloneOf(p.port)
	spec.LogicalBridges = slices.DeleteFunc(spec.LogicalBridges, func(name string) bool {
		return path.Base(name) == a.behaviour.LeavesOut
	})
	if a.behaviour.Untold {
		spec = &evpn.BridgePortSpec{MacAddress: spec.GetMacAddress()}
	}

	return &evpn.BridgePort{
		Name: a.portNames() + id, Spec: spec,
		Status: &evpn.BridgePortStatus{OperStatus: state, Components: a.components(p, "lci")},
	}
}

// checkPort accepts any number of bytes as a MAC address, like the reference agent.
func checkPort(spec *evpn.BridgePortSpec) error {
	networks := spec.GetLogicalBridges()
	switch {
	case spec == nil:
		return unknown("missing required field: bridge_port.spec")
	case len(spec.GetMacAddress()) == 0:
		return unknown("missing required field: bridge_port.spec.mac_address")
	case spec.GetPtype() == evpn.BridgePortType_BRIDGE_PORT_TYPE_UNSPECIFIED:
		return unknown("missing required field: bridge_port.spec.ptype")
	case spec.GetPtype() == evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS && len(networks) != 1:
		return status.Errorf(codes.InvalidArgument,
			"ACCESS type must have exactly one LogicalBridge, got %d", len(networks))
	}

	for _, name := range networks {
		if !wellFormed(name) {
			return status.Errorf(codes.InvalidArgument, "LogicalBridge name %q is malformed", name)
		}
	}

	return nil
}

func (s portServer) CreateBridgePort(
	_ context.Context, req *evpn.CreateBridgePortRequest,
) (*evpn.BridgePort, error) {
	if err := checkPort(req.GetBridgePort().GetSpec()); err != nil {
		return nil, err
	}
	id, err := chooseID(req.GetBridgePortId())
	if err != nil {
		return nil, err
	}
	return s.create(id, req.GetBridgePort().GetSpec())
}

func (s portServer) create(id string, spec *evpn.BridgePortSpec) (*evpn.BridgePort, error) {
	if old := s.agent.ports[id]; old != nil {
		return s.agent.portMessage(id, old), nil
	}
	if s.agent.behaviour.V02 {
		return s.createV02(id, spec)
	}
	if len(spec.GetLogicalBridges()) == 0 && !s.agent.networksEver {
		return nil, unknown("key not found")
	}

	mac := string(spec.GetMacAddress())
	for _, name := range spec.GetLogicalBridges() {
		n := s.agent.networks[path.Base(name)]
		if n == nil || n.dying || name != s.agent.networkNames()+path.Base(name) {
			// the preceding networks keep their reference
			return nil, unknown("the referenced Logical Bridge has not been found")
		}
		if other, taken := n.macs[mac]; taken {
			return nil, unknown("the Logical Bridge is already associated with the bridge port "+
				"mac %s of %s", net.HardwareAddr(mac), other)
		}

		n.macs[mac] = id
	}

	p := &object{port: proto.CloneOf(spec)}
	s.agent.realise(p)
	s.agent.ports[id], s.agent.portsEver = p, true

	return s.agent.portMessage(id, p), nil
}

func (s portServer) GetBridgePort(
	_ context.Context, req *evpn.GetBridgePortRequest,
) (*evpn.BridgePort, error) {
	if s.agent.behaviour.Blind {
		return &evpn.BridgePort{}, nil
	}

	id, p, err := s.agent.ports.find(s.agent.portNames(), req.GetName())
	if err != nil {
		return nil, err
	}
	if s.agent.behaviour.V02 {
		return s.getV02(id, p)
	}

	return s.agent.portMessage(id, p), nil
}

func (s portServer) ListBridgePorts(
	_ context.Context, req *evpn.ListBridgePortsRequest,
) (*evpn.ListBridgePortsResponse, error) {
	ids, next, err := s.agent.page(s.agent.ports, s.agent.portsEver, req)
	reply := &evpn.ListBridgePortsResponse{NextPageToken: next}
	for _, id := range ids {
		reply.BridgePorts = append(reply.BridgePorts, s.agent.portMessage(id, s.agent.ports[id]))
	}
	return reply, err
}

func (s networkServer) ListLogicalBridges(
	_ context.Context, req *evpn.ListLogicalBridgesRequest,
) (*evpn.ListLogicalBridgesResponse, error) {
	ids, next, err := s.agent.page(s.agent.networks, s.agent.networksEver, req)
	reply := &evpn.ListLogicalBridgesResponse{NextPageToken: next}
	for _, id := range ids {
		reply.LogicalBridges = append(reply.LogicalBridges,
			s.agent.networkMessage(id, s.agent.networks[id]))
	}
	return reply, err
}

// page returns the ids on one page of a list, like the reference agent: at most 250, and 50 if the
// request has no size.
func (a *Agent) page(objects table, ever bool, req interface {
	GetPageSize() int32
	GetPageToken() string
}) (ids []string, next string, err error) {
	start, known := a.pages[req.GetPageToken()]
	listed := slices.DeleteFunc(slices.Sorted(maps.Keys(objects)), func(id string) bool {
		return objects[id].unlisted
	})
	switch {
	case a.behaviour.Blind:
		return nil, "", nil
	case !ever && !a.behaviour.V02:
		return nil, "", status.Error(codes.NotFound, "unable to find key")
	case req.GetPageSize() < 0:
		return nil, "", status.Error(codes.InvalidArgument, "negative PageSize is not allowed")
	case a.behaviour.Endless:
		ids, start = listed, len(a.pages)
	case req.GetPageToken() != "" && (!known || a.behaviour.ForgetPages):
		return nil, "", status.Errorf(codes.NotFound, "unable to find pagination token %s",
			req.GetPageToken())
	default:
		ids = listed
		start = min(start, len(ids))
		end := min(start+min(cmp.Or(int(req.GetPageSize()), 50), 250), len(ids))
		if end == len(ids) {
			return ids[start:], "", nil
		}
		ids, start = ids[start:end], end
	}

	next = fmt.Sprintf("page-%d", len(a.pages))
	a.pages[next] = start

	return ids, next, nil
}

// UpdateBridgePort neither checks the networks nor moves references, like the reference agent.
func (s portServer) UpdateBridgePort(
	_ context.Context, req *evpn.UpdateBridgePortRequest,
) (*evpn.BridgePort, error) {
	spec := req.GetBridgePort().GetSpec()
	if err := checkPort(spec); err != nil {
		return nil, err
	}

	id, p, err := s.agent.ports.find(s.agent.portNames(), req.GetBridgePort().GetName())
	if status.Code(err) == codes.NotFound && req.GetAllowMissing() && !s.agent.behaviour.V02 {
		return s.create(id, spec)
	}
	if err != nil {
		return nil, err
	}
	if p.dying {
		return nil, unknown("BridgePort %s in to be deleted status", id)
	}
	if mask := req.GetUpdateMask(); mask != nil && !mask.IsValid(req.GetBridgePort()) {
		return nil, unknown("invalid field path: %v", mask.GetPaths())
	}

	p.port = proto.CloneOf(spec)
	if !s.agent.behaviour.V02 {
		s.agent.realise(p)
	}

	return s.agent.portMessage(id, p), nil
}

func (s portServer) DeleteBridgePort(
	_ context.Context, req *evpn.DeleteBridgePortRequest,
) (*emptypb.Empty, error) {
	id, p, err := s.agent.ports.find(s.agent.portNames(), req.GetName())
	if status.Code(err) == codes.NotFound && req.GetAllowMissing() {
		return &emptypb.Empty{}, nil
	}
	if err != nil {
		return nil, err
	}
	if s.agent.behaviour.V02 {
		return s.deleteV02(id, p)
	}
	if p.dying {
		return &emptypb.Empty{}, nil
	}

	for _, name := range p.port.GetLogicalBridges() {
		if s.agent.networks[path.Base(name)] == nil {
			return nil, unknown("unable to find key %s", name) // its network was deleted first
		}
	}

	s.agent.kill(p)
	return &emptypb.Empty{}, nil
}
