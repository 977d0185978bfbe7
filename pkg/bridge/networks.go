// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
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

func (s networkServer) CreateLogicalBridge(
	ctx context.Context, req *evpn.CreateLogicalBridgeRequest,
) (*evpn.LogicalBridge, error) {
	id := cmp.Or(req.GetLogicalBridgeId(), "lb-"+strings.ToLower(rand.Text()))
	return s.networks.create(ctx, id, req.GetLogicalBridge().GetSpec())
}

func (s networkServer) GetLogicalBridge(
	ctx context.Context, req *evpn.GetLogicalBridgeRequest,
) (*evpn.LogicalBridge, error) {
	return s.networks.get(ctx, req.GetName())
}

func (s networkServer) ListLogicalBridges(
	ctx context.Context, req *evpn.ListLogicalBridgesRequest,
) (*evpn.ListLogicalBridgesResponse, error) {
	networks, next, err := s.networks.list(ctx, req.GetPageSize(), req.GetPageToken())
	return &evpn.ListLogicalBridgesResponse{LogicalBridges: networks, NextPageToken: next}, err
}

func (s networkServer) UpdateLogicalBridge(
	ctx context.Context, req *evpn.UpdateLogicalBridgeRequest,
) (*evpn.LogicalBridge, error) {
	return s.networks.update(ctx, req.GetLogicalBridge(), req.GetUpdateMask(),
		req.GetAllowMissing())
}

func (s networkServer) DeleteLogicalBridge(
	ctx context.Context, req *evpn.DeleteLogicalBridgeRequest,
) (*emptypb.Empty, error) {
	return s.networks.delete(ctx, req.GetName(), req.GetAllowMissing())
}

// newNetworks makes the collection of networks, without those in the state file.
func newNetworks(a *Agent) *collection[*evpn.LogicalBridgeSpec, *evpn.LogicalBridge] {
	return &collection[*evpn.LogicalBridgeSpec, *evpn.LogicalBridge]{
		kind: networkKind, agent: a, objects: map[string]*network{}, by: index{},
		failed: map[string]bool{},
		keys:   networkKeys, valid: validNetwork, check: a.checkNetwork, options: a.networkOptions,
		scope: func(id string, _ *evpn.LogicalBridgeSpec) (string, []string) {
			return "", []string{id}
		},
		describe: func(spec *evpn.LogicalBridgeSpec) string {
			return fmt.Sprintf("with VLAN %d and VNI %d", spec.GetVlanId(), spec.GetVni())
		},
		checkUnused: func(who client, id string) error {
			if port := a.ports.by.other(keyNetwork(id), ""); port != "" {
				return status.Errorf(codes.FailedPrecondition, "logical bridge %s is in use by %s",
					id, a.name(who, task{taskPort, port}))
			}
			return nil
		},
		most: func(r Rule) *int { return r.MostNetworks },
		realise: func(id string, _ *evpn.LogicalBridgeSpec, changed bool) error {
			mtu, err := a.plane.ensureNetwork(a.segment(id))
			a.mu.Lock()
			a.carried[id] = mtu
			a.mu.Unlock()

			if changed {
				// the network's VLAN id or filter may be another one
				a.ports.reconcileEach(a.ports.by.of(keyNetwork(id)))
			}

			return cmp.Or(err, a.checkMTU(id))
		},
		remove:    func(id string) error { return a.plane.removeNetwork(id) },
		failureOf: func(n *network) error { return n.failure },
		message: func(
			name string, spec *evpn.LogicalBridgeSpec, oper state, components ...*evpn.Component,
		) *evpn.LogicalBridge {
			m := &evpn.LogicalBridge{Name: name, Spec: spec}
			if oper != 0 {
				m.Status = &evpn.LogicalBridgeStatus{
					OperStatus: evpn.LBOperStatus(oper), Components: components,
				}
			}
			return m
		},
		operStatus: func(m *evpn.LogicalBridge) state {
			return state(m.GetStatus().GetOperStatus())
		},
	}
}

// Keys of networks.
const keyVXLAN = "vxlan" // those with a VNI

func keyVLAN(vlan uint32) string { return fmt.Sprintf("vlan/%d", vlan) }
func keyVNI(vni uint32) string   { return fmt.Sprintf("vni/%d", vni) }

func networkKeys(spec *evpn.LogicalBridgeSpec) []string {
	keys := []string{keyVLAN(spec.GetVlanId())}
	if spec.Vni != nil {
		keys = append(keys, keyVXLAN, keyVNI(spec.GetVni()))
	}
	return keys
}

// validNetwork returns what is wrong with a spec by itself.
func validNetwork(spec *evpn.LogicalBridgeSpec) error {
	vlan, vni := spec.GetVlanId(), spec.GetVni()
	switch {
	case spec == nil:
		return errors.New("spec is required")
	case vlan < 1 || vlan > maxVLAN:
		return fmt.Errorf("vlan_id %d: must be 1-%d", vlan, maxVLAN)
	case spec.GetVtepIpPrefix() != nil:
		return errors.New(
			"vtep_ip_prefix: must not be set, it is the address of the agent's uplink",
		)
	case spec.Vni != nil && (vni < 1 || vni > maxVNI):
		return fmt.Errorf("vni %d: must be 1-%d, or absent", vni, maxVNI)
	}

	return nil
}

func (a *Agent) checkNetwork(
	who client, id string, spec *evpn.LogicalBridgeSpec,
) (*evpn.LogicalBridgeSpec, error) {
	refuse := func(code codes.Code, format string, args ...any) (*evpn.LogicalBridgeSpec, error) {
		return nil, status.Errorf(code, "logical bridge %s: %s", id, fmt.Sprintf(format, args...))
	}
	// An object was valid when it was made. It may be asked for again although another data plane
	// would refuse it.
	var before *evpn.LogicalBridgeSpec
	if have := a.networks.objects[id]; have != nil {
		if before = have.spec; !have.deleting && proto.Equal(before, spec) {
			return spec, nil
		}
	}

	if err := validNetwork(spec); err != nil {
		return refuse(codes.InvalidArgument, "%v", err)
	}
	if err := who.checkSegment(id, before, spec); err != nil {
		return nil, err
	}

	vlan, vni := spec.GetVlanId(), spec.GetVni()
	sameVLAN, sameVNI := a.networks.by.other(keyVLAN(vlan), id), a.networks.by.other(keyVNI(vni),
		id)
	switch {
	case sameVLAN != "" && a.plane.filtersVLANs():
		return refuse(codes.AlreadyExists, "vlan_id %d is already in use by %s, and the data "+
			"plane %s has one network for each VLAN id",
			vlan, a.name(who, task{taskNetwork, sameVLAN}), DataPlaneVLANAware)
	case spec.Vni == nil:
		return spec, nil
	case uplinkFor(a.cfg.Uplinks, vni) == nil:
		return refuse(codes.FailedPrecondition,
			"vni %d: the agent has no uplink to send VXLAN from (--uplink)", vni)
	case sameVNI != "":
		return refuse(codes.AlreadyExists, "vni %d is already in use by %s", vni,
			a.name(who, task{taskNetwork, sameVNI}))
	}

	return spec, nil
}

// segment describes a network to the data plane. One that is missing from the state has VLAN id 0,
// which no network has.
func (a *Agent) segment(id string) segment {
	s := segment{id: id}
	if n := a.networks.objects[id]; n != nil {
		s.vlan, s.vni = uint16(n.spec.GetVlanId()), n.spec.GetVni()
	}
	return s
}
