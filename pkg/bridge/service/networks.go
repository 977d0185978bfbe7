// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/access"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
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

// networkSchema is the schema of networks.
type networkSchema struct{}

var _ schema[*evpn.LogicalBridgeSpec, *evpn.LogicalBridge] = networkSchema{}

const keyVXLAN = "vxlan" // the key of the networks with a VNI

func keyVLAN(vlan uint32) string { return fmt.Sprintf("vlan/%d", vlan) }
func keyVNI(vni uint32) string   { return fmt.Sprintf("vni/%d", vni) }

func (networkSchema) keys(spec *evpn.LogicalBridgeSpec) []string {
	keys := []string{keyVLAN(spec.GetVlanId())}
	if spec.Vni != nil {
		keys = append(keys, keyVXLAN, keyVNI(spec.GetVni()))
	}
	return keys
}

func (networkSchema) validate(spec *evpn.LogicalBridgeSpec) error {
	vlan, vni := spec.GetVlanId(), spec.GetVni()
	switch {
	case spec == nil:
		return errors.New("spec is required")
	case vlan < 1 || vlan > plane.MaxVLAN:
		return fmt.Errorf("vlan_id %d: must be 1-%d", vlan, plane.MaxVLAN)
	case spec.Vni != nil && (vni < 1 || vni > plane.MaxVNI):
		return fmt.Errorf("vni %d: must be 1-%d, or absent", vni, plane.MaxVNI)
	case spec.GetVtepIpPrefix() == nil:
		return nil
	case spec.Vni == nil:
		return errors.New("vtep_ip_prefix: must be absent without a vni")
	case !vtepOf(spec).IsValid():
		return fmt.Errorf("vtep_ip_prefix %v: must be an IPv4 or IPv6 address with its prefix "+
			"length", spec.GetVtepIpPrefix())
	}

	return nil
}

// vtepOf returns the address of the VXLAN tunnel endpoint in a spec. It is zero if the spec has
// none, or none that is valid.
func vtepOf(spec *evpn.LogicalBridgeSpec) netip.Addr {
	return prefixOf(spec.GetVtepIpPrefix()).Addr()
}

// withoutAnyVTEP returns a spec without a vtep_ip_prefix if that is the unspecified address,
// because clients of opi-evpn-bridge leave the choice to the agent in this way.
func withoutAnyVTEP(spec *evpn.LogicalBridgeSpec) *evpn.LogicalBridgeSpec {
	if !isAny(spec.GetVtepIpPrefix()) {
		return spec
	}
	without := proto.CloneOf(spec)
	without.VtepIpPrefix = nil
	return without
}

func (networkSchema) describe(spec *evpn.LogicalBridgeSpec) string {
	text := fmt.Sprintf("with VLAN %d and VNI %d", spec.GetVlanId(), spec.GetVni())
	if vtep := vtepOf(spec); vtep.IsValid() {
		text += fmt.Sprintf(" and VTEP %s", vtep)
	}
	return text
}

func (networkSchema) canSee(client access.Client, id string, _ *evpn.LogicalBridgeSpec) bool {
	return client.CanSeeNetwork(id)
}

func (networkSchema) canSeeAll(client access.Client) bool { return client.CanSeeAll() }

func (networkSchema) limit(client access.Client) int { return client.MaxNetworks() }

func (networkSchema) message(
	name string, spec *evpn.LogicalBridgeSpec, oper state, components ...*evpn.Component,
) *evpn.LogicalBridge {
	m := &evpn.LogicalBridge{Name: name, Spec: spec}
	if oper != 0 {
		m.Status = &evpn.LogicalBridgeStatus{
			OperStatus: evpn.LBOperStatus(oper), Components: components,
		}
	}
	return m
}

func (networkSchema) operStatus(m *evpn.LogicalBridge) state {
	return state(m.GetStatus().GetOperStatus())
}

// networkController brings the data plane to networks.
type networkController struct{ *Agent }

func (c networkController) check(
	client access.Client, id string, spec *evpn.LogicalBridgeSpec,
) (*evpn.LogicalBridgeSpec, error) {
	refuse := func(
		code codes.Code, reason refusal.Reason, format string, args ...any,
	) (*evpn.LogicalBridgeSpec, error) {
		return nil, refusal.New(code, reason, "logical bridge %s: %s", id,
			fmt.Sprintf(format, args...))
	}
	spec = withoutAnyVTEP(spec)
	// An existing spec was valid when it was made. A client may ask for it again although the
	// current mode of the data plane would refuse it.
	var before *evpn.LogicalBridgeSpec
	if have := c.networks.objects[id]; have != nil {
		if before = have.spec; !have.deleting && proto.Equal(before, spec) {
			return spec, nil
		}
	}

	if err := c.networks.validate(spec); err != nil {
		return refuse(codes.InvalidArgument, refusal.InvalidSpec, "%v", err)
	}
	if err := client.CheckSegments(id, before, spec); err != nil {
		return nil, err
	}

	vlan, vni := spec.GetVlanId(), spec.GetVni()
	sameVLAN := c.networks.otherWithKey(keyVLAN(vlan), id)
	sameVNI := c.networks.otherWithKey(keyVNI(vni), id)
	switch {
	case sameVLAN != "" && c.plane.VLANAware():
		other := c.textFor(client, plane.Object{Kind: plane.KindNetwork, ID: sameVLAN})
		return refuse(codes.AlreadyExists, refusal.VLANInUse, "vlan_id %d is already in use by "+
			"%s, and the data plane %s has one network for each VLAN id", vlan, other,
			plane.ModeVLANAware)
	case spec.Vni == nil:
		return spec, nil
	case plane.UplinkFor(c.cfg.Plane.Uplinks, vni) == nil:
		return refuse(codes.FailedPrecondition, refusal.NoUplink,
			"vni %d: the agent has no uplink to send VXLAN from (--uplink)", vni)
	case sameVNI != "":
		return refuse(codes.AlreadyExists, refusal.VNIInUse, "vni %d is already in use by %s", vni,
			c.textFor(client, plane.Object{Kind: plane.KindNetwork, ID: sameVNI}))
	}

	// An uplink whose addresses are unknown is no reason to refuse: the network is DOWN until they
	// are known and fit.
	if err := c.plane.CheckVTEP(vni, vtepOf(spec)); errors.Is(err, plane.ErrOtherVTEP) {
		return refuse(codes.InvalidArgument, refusal.OtherVTEP, "vtep_ip_prefix: %v", err)
	}

	return spec, nil
}

func (c networkController) checkUnused(client access.Client, id string) error {
	user := plane.Object{Kind: plane.KindPort, ID: c.ports.otherWithKey(keyNetwork(id), "")}
	if user.ID == "" {
		user = plane.Object{Kind: plane.KindSVI, ID: c.svis.otherWithKey(keyNetwork(id), "")}
	}
	if user.ID == "" {
		return nil
	}
	return refusal.New(codes.FailedPrecondition, refusal.NetworkInUse,
		"logical bridge %s is in use by %s", id, c.textFor(client, user))
}

func (c networkController) apply(id string, _ *evpn.LogicalBridgeSpec, changed bool) error {
	segment, err := c.sentRemotes.begin(c.segment(id))
	if err != nil {
		return err
	}

	mtu, err := c.plane.EnsureNetwork(segment)
	if err == nil {
		err = c.sentRemotes.end(segment)
	}

	c.mu.Lock()
	c.maxMTUs[id] = mtu
	c.mu.Unlock()

	if changed {
		// The gateway and the ports follow the network's VLAN id and source filter.
		c.reconcileSVIs(keyNetwork(id))
		c.ports.reconcileEach(c.ports.withKey(keyNetwork(id)))
	} else if c.plane.IsStale(c.svis.otherWithKey(keyNetwork(id), "")) {
		c.reconcileSVIs(keyNetwork(id))
	}

	return cmp.Or(err, c.checkMTU(id))
}

func (c networkController) remove(id string) error {
	if err := c.plane.RemoveNetwork(id); err != nil {
		return err
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.maxMTUs, id)
	return nil
}

func (c networkController) effectiveFailure(n *network) error { return n.failure }

// segment describes a network to the data plane. A network that does not exist has VLAN id 0, which
// no other network has.
func (a *Agent) segment(id string) plane.Segment {
	s := plane.Segment{ID: id}
	if n := a.networks.objects[id]; n != nil {
		s.VLAN, s.VNI = uint16(n.spec.GetVlanId()), n.spec.GetVni()
		s.VTEP = vtepOf(n.spec)
		if s.VNI != 0 {
			s.Remotes, s.Unicast = a.remotes.For(s.VNI)
		}
	}
	return s
}
