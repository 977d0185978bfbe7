// SPDX-License-Identifier: Apache-2.0

package opitest

import (
	"context"
	"path"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
)

// This file implements VRFs and gateways, which the API calls Vrfs and Svis.

// Prefixes of the reference agent's real object names.
const (
	vrfPrefix     = "//network.opiproject.org/vrfs/"
	gatewayPrefix = "//network.opiproject.org/svis/"
)

// mainVRF is the VRF that versions after v0.2.0 create when they start.
const mainVRF = "GRD"

// GatewayRPCs returns the names of all calls for VRFs and gateways, for [Behaviour.Unimplemented].
func GatewayRPCs() []string {
	return []string{
		"CreateVrf", "GetVrf", "ListVrfs", "DeleteVrf", "CreateSvi", "GetSvi", "ListSvis",
		"DeleteSvi",
	}
}

func (o *object) isGateway() bool { return o.vrf != nil || o.gateway != nil }

// gatewayOf returns the id of the gateway of a network, or "".
func (a *Agent) gatewayOf(network string) string {
	for id, g := range a.gateways {
		if path.Base(g.gateway.GetLogicalBridge()) == network {
			return id
		}
	}
	return ""
}

// VRFs returns the ids of all VRFs that clients created, sorted.
func (a *Agent) VRFs() []string { return a.ids(&a.vrfs) }

// Gateways returns the ids of all gateways, sorted.
func (a *Agent) Gateways() []string { return a.ids(&a.gateways) }

// GatewaySpec returns what a gateway was created with, or nil.
func (a *Agent) GatewaySpec(id string) *evpn.SviSpec {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.gateways[id] == nil {
		return nil
	}
	return proto.CloneOf(a.gateways[id].gateway)
}

// LoseGateway removes a gateway, as if another client had deleted it.
func (a *Agent) LoseGateway(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.gateways, id)
}

// ChangeGateway changes a gateway, as if another client had done it.
func (a *Agent) ChangeGateway(id string, change func(*evpn.SviSpec)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.gateways[id] != nil {
		change(a.gateways[id].gateway)
	}
}

type vrfServer struct {
	evpn.UnimplementedVrfServiceServer
	agent *Agent
}

func (a *Agent) vrfMessage(id string, v *object) *evpn.Vrf {
	state := evpn.VRFOperStatus_VRF_OPER_STATUS_DOWN
	switch {
	case v.dying:
		state = evpn.VRFOperStatus_VRF_OPER_STATUS_TO_BE_DELETED
	case v.up:
		state = evpn.VRFOperStatus_VRF_OPER_STATUS_UP
	}
	return &evpn.Vrf{
		Name: vrfPrefix + id, Spec: proto.CloneOf(v.vrf),
		Status: &evpn.VrfStatus{OperStatus: state, Components: a.components(v, "frr")},
	}
}

// maxNetdevName is the length of a netdev's name. The reference agent names the netdev after the
// VRF's id.
const maxNetdevName = 15

func (s vrfServer) CreateVrf(
	_ context.Context, req *evpn.CreateVrfRequest,
) (*evpn.Vrf, error) {
	spec := req.GetVrf().GetSpec()
	if spec.GetLoopbackIpPrefix() == nil {
		return nil, unknown("missing required field: vrf.spec.loopback_ip_prefix")
	}

	id, err := chooseID(req.GetVrfId())
	if err != nil {
		return nil, err
	}
	if old := s.agent.vrfs[id]; old != nil {
		return s.agent.vrfMessage(id, old), nil
	}

	v := &object{vrf: proto.CloneOf(spec)}
	if s.agent.behaviour.Options || len(id) <= maxNetdevName {
		s.agent.realise(v)
	}
	s.agent.vrfs[id] = v

	return s.agent.vrfMessage(id, v), nil
}

func (s vrfServer) GetVrf(_ context.Context, req *evpn.GetVrfRequest) (*evpn.Vrf, error) {
	if s.agent.behaviour.Blind {
		return &evpn.Vrf{}, nil
	}
	id, v, err := s.agent.vrfs.find(vrfPrefix, req.GetName())
	if err != nil {
		return nil, err
	}
	return s.agent.vrfMessage(id, v), nil
}

func (s vrfServer) ListVrfs(
	_ context.Context, req *evpn.ListVrfsRequest,
) (*evpn.ListVrfsResponse, error) {
	ids, next, err := s.agent.page(s.agent.vrfs, true, req)
	reply := &evpn.ListVrfsResponse{NextPageToken: next}
	for _, id := range ids {
		reply.Vrfs = append(reply.Vrfs, s.agent.vrfMessage(id, s.agent.vrfs[id]))
	}
	if has := s.agent.behaviour; err == nil && next == "" && !has.V02 && !has.Options {
		reply.Vrfs = append(reply.Vrfs, &evpn.Vrf{Name: vrfPrefix + mainVRF})
	}
	return reply, err
}

func (s vrfServer) DeleteVrf(
	_ context.Context, req *evpn.DeleteVrfRequest,
) (*emptypb.Empty, error) {
	id, v, err := s.agent.vrfs.find(vrfPrefix, req.GetName())
	if status.Code(err) == codes.NotFound && req.GetAllowMissing() {
		return &emptypb.Empty{}, nil
	}
	if err != nil {
		return nil, err
	}

	for _, g := range s.agent.gateways {
		if path.Base(g.gateway.GetVrf()) == id {
			return nil, unknown("the VRF is not empty")
		}
	}

	s.agent.kill(v)
	return &emptypb.Empty{}, nil
}

type gatewayServer struct {
	evpn.UnimplementedSviServiceServer
	agent *Agent
}

func (a *Agent) gatewayMessage(id string, g *object) *evpn.Svi {
	state := evpn.SVIOperStatus_SVI_OPER_STATUS_DOWN
	switch {
	case g.dying:
		state = evpn.SVIOperStatus_SVI_OPER_STATUS_TO_BE_DELETED
	case g.up:
		state = evpn.SVIOperStatus_SVI_OPER_STATUS_UP
	}

	spec := proto.CloneOf(g.gateway)
	if a.behaviour.Untold {
		spec.GwIpPrefix = nil
	}

	return &evpn.Svi{
		Name: gatewayPrefix + id, Spec: spec,
		Status: &evpn.SviStatus{OperStatus: state, Components: a.components(g, "frr")},
	}
}

// hasIPv6 reports whether a gateway has an IPv6 address.
func hasIPv6(spec *evpn.SviSpec) bool {
	for _, prefix := range spec.GetGwIpPrefix() {
		if _, is := prefix.GetAddr().GetV4OrV6().(*netcommon.IPAddress_V6Addr); is {
			return true
		}
	}
	return false
}

// CreateSvi ends the process of an agent that is not like opi-bridge if the gateway has an IPv6
// address.
func (s gatewayServer) CreateSvi(
	_ context.Context, req *evpn.CreateSviRequest,
) (*evpn.Svi, error) {
	spec := req.GetSvi().GetSpec()
	switch {
	case spec == nil, len(spec.GetMacAddress()) == 0, len(spec.GetGwIpPrefix()) == 0:
		return nil, unknown("missing required field: svi.spec")
	case hasIPv6(spec) && !s.agent.behaviour.Options:
		go s.agent.Kill() // Kill waits for this call
		return nil, status.Error(codes.Unavailable, "error reading from server: EOF")
	}

	id, err := chooseID(req.GetSviId())
	if err != nil {
		return nil, err
	}
	if old := s.agent.gateways[id]; old != nil {
		return s.agent.gatewayMessage(id, old), nil
	}

	network, vrf := path.Base(spec.GetLogicalBridge()), path.Base(spec.GetVrf())
	switch {
	case s.agent.vrfs[vrf] == nil || s.agent.vrfs[vrf].dying:
		return nil, unknown("the referenced VRF has not been found")
	case s.agent.networks[network] == nil || s.agent.networks[network].dying:
		return nil, unknown("the referenced Logical Bridge has not been found")
	case s.agent.gatewayOf(network) != "":
		return nil, unknown("the Logical Bridge is already associated with an SVI interface")
	}

	g := &object{gateway: proto.CloneOf(spec)}
	s.agent.realise(g)
	s.agent.gateways[id], s.agent.gatewaysEver = g, true

	return s.agent.gatewayMessage(id, g), nil
}

func (s gatewayServer) GetSvi(_ context.Context, req *evpn.GetSviRequest) (*evpn.Svi, error) {
	if s.agent.behaviour.Blind {
		return &evpn.Svi{}, nil
	}
	id, g, err := s.agent.gateways.find(gatewayPrefix, req.GetName())
	if err != nil {
		return nil, err
	}
	return s.agent.gatewayMessage(id, g), nil
}

func (s gatewayServer) ListSvis(
	_ context.Context, req *evpn.ListSvisRequest,
) (*evpn.ListSvisResponse, error) {
	ids, next, err := s.agent.page(s.agent.gateways, s.agent.gatewaysEver, req)
	reply := &evpn.ListSvisResponse{NextPageToken: next}
	for _, id := range ids {
		reply.Svis = append(reply.Svis, s.agent.gatewayMessage(id, s.agent.gateways[id]))
	}
	return reply, err
}

func (s gatewayServer) DeleteSvi(
	_ context.Context, req *evpn.DeleteSviRequest,
) (*emptypb.Empty, error) {
	_, g, err := s.agent.gateways.find(gatewayPrefix, req.GetName())
	if status.Code(err) == codes.NotFound && req.GetAllowMissing() {
		return &emptypb.Empty{}, nil
	}
	if err != nil {
		return nil, err
	}
	s.agent.kill(g)
	return &emptypb.Empty{}, nil
}

// ChangeVRF changes a VRF, or makes one, as if another client had done it.
func (a *Agent) ChangeVRF(id string, change func(*evpn.VrfSpec)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.vrfs[id] == nil {
		a.vrfs[id] = &object{up: true, vrf: &evpn.VrfSpec{LoopbackIpPrefix: &netcommon.IPPrefix{
			Addr: &netcommon.IPAddress{V4OrV6: &netcommon.IPAddress_V4Addr{V4Addr: 192<<24 | 8}},
			Len:  32,
		}}}
	}
	change(a.vrfs[id].vrf)
}
