// SPDX-License-Identifier: Apache-2.0

package opitest

import (
	"path"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
)

// This file implements the differences of opi-evpn-bridge v0.2.0 (see [Behaviour.V02]). It carries
// out a call before it answers. It keeps objects in redis, but only its process remembers which
// objects its lists contain. It checks neither for conflicting objects nor whether an object is in
// use.

// createV02 implements CreateLogicalBridge. The specification is valid, and no network has the id.
func (s networkServer) createV02(
	id string, spec *evpn.LogicalBridgeSpec,
) (*evpn.LogicalBridge, error) {
	if spec.Vni != nil && spec.GetVtepIpPrefix() == nil {
		go s.agent.Kill() // Kill waits for this call
		return nil, status.Error(codes.Unavailable, "error reading from server: EOF")
	}

	for _, other := range s.agent.networks {
		if spec.Vni != nil && other.network.GetVni() == spec.GetVni() {
			return nil, unknown("file exists")
		}
	}

	n := &object{network: proto.CloneOf(spec), macs: map[string]string{}, up: true}
	s.agent.networks[id] = n
	return s.agent.networkMessage(id, n), nil
}

func (s networkServer) deleteV02(id string) (*emptypb.Empty, error) {
	delete(s.agent.networks, id)
	return &emptypb.Empty{}, nil
}

// createV02 implements CreateBridgePort. The specification is valid, and no port has the id.
func (s portServer) createV02(id string, spec *evpn.BridgePortSpec) (*evpn.BridgePort, error) {
	if err := s.agent.representorV02(id); err != nil {
		return nil, err
	}
	if err := s.agent.bridgesV02(spec); err != nil {
		return nil, err
	}

	p := &object{port: proto.CloneOf(spec), up: true}
	s.agent.ports[id] = p
	return s.agent.portMessage(id, p), nil
}

// getV02 returns only the MAC address, and says that every port is up.
func (s portServer) getV02(id string, p *object) (*evpn.BridgePort, error) {
	if err := s.agent.representorV02(id); err != nil {
		return nil, err
	}
	return &evpn.BridgePort{
		Name:   portPrefix + id,
		Spec:   &evpn.BridgePortSpec{MacAddress: p.port.GetMacAddress()},
		Status: &evpn.BridgePortStatus{OperStatus: evpn.BPOperStatus_BP_OPER_STATUS_UP},
	}, nil
}

// deleteV02 keeps the port with its status if deletion fails.
func (s portServer) deleteV02(id string, p *object) (*emptypb.Empty, error) {
	if err := s.agent.representorV02(id); err != nil {
		return nil, err
	}
	if err := s.agent.bridgesV02(p.port); err != nil {
		return nil, err
	}
	if s.agent.behaviour.StuckDelete { // the representor of a VF cannot be deleted as a link
		return nil, unknown("operation not supported")
	}

	delete(s.agent.ports, id)
	return &emptypb.Empty{}, nil
}

// representorV02 returns an error that names the missing netdev, where later versions name the
// object.
func (a *Agent) representorV02(id string) error {
	if realise := a.behaviour.Realise; realise != nil && realise(id) != nil {
		return status.Errorf(codes.NotFound, "unable to find key %s", id)
	}
	return nil
}

func (a *Agent) bridgesV02(spec *evpn.BridgePortSpec) error {
	for _, name := range spec.GetLogicalBridges() {
		if name != networkPrefix+path.Base(name) || a.networks[path.Base(name)] == nil {
			return status.Errorf(codes.NotFound, "unable to find key %s", name)
		}
	}
	return nil
}

// restartedV02 keeps the objects that are in redis.
func (a *Agent) restartedV02() {
	for _, objects := range []table{a.networks, a.ports, a.vrfs, a.gateways} {
		for _, o := range objects {
			o.unlisted = true
		}
	}
}
