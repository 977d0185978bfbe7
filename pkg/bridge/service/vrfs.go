// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/access"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
)

// vrfServer serves VrfService.
type vrfServer struct {
	evpn.UnimplementedVrfServiceServer
	*Agent
}

func (s vrfServer) CreateVrf(ctx context.Context, req *evpn.CreateVrfRequest) (*evpn.Vrf, error) {
	id := cmp.Or(req.GetVrfId(), "vrf-"+strings.ToLower(rand.Text()))
	return s.vrfs.create(ctx, id, req.GetVrf().GetSpec())
}

func (s vrfServer) GetVrf(ctx context.Context, req *evpn.GetVrfRequest) (*evpn.Vrf, error) {
	return s.vrfs.get(ctx, req.GetName())
}

func (s vrfServer) ListVrfs(
	ctx context.Context, req *evpn.ListVrfsRequest,
) (*evpn.ListVrfsResponse, error) {
	vrfs, next, err := s.vrfs.list(ctx, req.GetPageSize(), req.GetPageToken())
	return &evpn.ListVrfsResponse{Vrfs: vrfs, NextPageToken: next}, err
}

func (s vrfServer) UpdateVrf(ctx context.Context, req *evpn.UpdateVrfRequest) (*evpn.Vrf, error) {
	return s.vrfs.update(ctx, req.GetVrf(), req.GetUpdateMask(), req.GetAllowMissing())
}

func (s vrfServer) DeleteVrf(
	ctx context.Context, req *evpn.DeleteVrfRequest,
) (*emptypb.Empty, error) {
	return s.vrfs.delete(ctx, req.GetName(), req.GetAllowMissing())
}

// vrfSchema is the schema of VRFs.
type vrfSchema struct{}

var _ schema[*evpn.VrfSpec, *evpn.Vrf] = vrfSchema{}

func (vrfSchema) keys(*evpn.VrfSpec) []string { return nil }

func (vrfSchema) validate(spec *evpn.VrfSpec) error {
	switch loopback := spec.GetLoopbackIpPrefix(); {
	case spec == nil:
		return errors.New("spec is required")
	case spec.GetVtepIpPrefix() != nil && spec.Vni == nil:
		return errors.New("vtep_ip_prefix: must be absent without a vni")
	case loopback == nil: // the API requires it
		return errors.New("loopback_ip_prefix: is required; give the VRF an address of its own, " +
			"such as 203.0.113.1/32")
	case !isHost(prefixOf(loopback).Addr()):
		return fmt.Errorf("loopback_ip_prefix %v: must be an IPv4 or IPv6 unicast address that is "+
			"not link-local, with its prefix length", loopback)
	}
	return nil
}

func (vrfSchema) describe(spec *evpn.VrfSpec) string {
	return fmt.Sprintf("with loopback %s", prefixOf(spec.GetLoopbackIpPrefix()))
}

func (vrfSchema) canSee(client access.Client, id string, _ *evpn.VrfSpec) bool {
	return client.CanSeeVRF(id)
}

func (vrfSchema) canSeeAll(client access.Client) bool { return client.CanSeeAllVRFs() }

func (vrfSchema) limit(client access.Client) int { return client.MaxVRFs() }

func (vrfSchema) message(
	name string, spec *evpn.VrfSpec, oper state, components ...*evpn.Component,
) *evpn.Vrf {
	m := &evpn.Vrf{Name: name, Spec: spec}
	if oper != 0 {
		m.Status = &evpn.VrfStatus{OperStatus: evpn.VRFOperStatus(oper), Components: components}
	}
	return m
}

func (vrfSchema) operStatus(m *evpn.Vrf) state { return state(m.GetStatus().GetOperStatus()) }

// vrfController brings the data plane to VRFs.
type vrfController struct{ *Agent }

func (c vrfController) check(
	_ access.Client, id string, spec *evpn.VrfSpec,
) (*evpn.VrfSpec, error) {
	if err := c.vrfs.validate(spec); err != nil {
		return nil, refusal.New(codes.InvalidArgument, refusal.InvalidSpec, "VRF %s: %v", id, err)
	}
	if spec.Vni != nil {
		return nil, refusal.New(codes.Unimplemented, refusal.NoL3VNI,
			"VRF %s: vni %d: routes between machines (EVPN type 5) need a routing daemon such as "+
				"FRR beside the agent, which makes the VXLAN port of the VRF; make the VRF without "+
				"vni, and reach its gateways from other xPUs by the VNIs of the logical bridges",
			id, spec.GetVni())
	}
	return spec, nil
}

func (c vrfController) checkUnused(client access.Client, id string) error {
	svi := c.svis.otherWithKey(keyVRF(id), "")
	if svi == "" {
		return nil
	}
	return refusal.New(codes.FailedPrecondition, refusal.VRFInUse, "VRF %s is in use by %s", id,
		c.textFor(client, plane.Object{Kind: plane.KindSVI, ID: svi}))
}

func (c vrfController) apply(id string, spec *evpn.VrfSpec, _ bool) error {
	return c.plane.EnsureVRF(plane.VRF{
		ID: id, Loopback: prefixOf(spec.GetLoopbackIpPrefix()).Addr(),
	})
}

func (c vrfController) remove(id string) error { return c.plane.RemoveVRF(id) }

func (c vrfController) effectiveFailure(v *vrf) error { return v.failure }
