// SPDX-License-Identifier: Apache-2.0

package service

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"path"
	"slices"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/access"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/sourcefilter"
)

// portServer serves BridgePortService.
type portServer struct {
	evpn.UnimplementedBridgePortServiceServer
	*Agent
}

func (s portServer) CreateBridgePort(
	ctx context.Context, req *evpn.CreateBridgePortRequest,
) (*evpn.BridgePort, error) {
	spec := req.GetBridgePort().GetSpec()
	if id := req.GetBridgePortId(); id != "" {
		return s.ports.create(ctx, id, spec)
	}

	// The id says which Function the port is for. Without an id, its MAC says so. A client that may
	// not know of all ports could find out about others' Functions by their MACs.
	id, err := "", errors.New("the client may not know of all ports")
	if access.FromContext(ctx).CanSeeAll() {
		id, err = s.plane.PortWithMAC(spec.GetMacAddress())
	}

	if err != nil {
		return nil, refusal.New(codes.InvalidArgument, refusal.NoFunction,
			"bridge_port_id is required: it tells which netdev represents the port, by name or "+
				"PCI address, and the MAC address does not: %v", err)
	}

	return s.ports.create(ctx, id, spec)
}

func (s portServer) GetBridgePort(
	ctx context.Context, req *evpn.GetBridgePortRequest,
) (*evpn.BridgePort, error) {
	return s.ports.get(ctx, req.GetName())
}

func (s portServer) ListBridgePorts(
	ctx context.Context, req *evpn.ListBridgePortsRequest,
) (*evpn.ListBridgePortsResponse, error) {
	ports, next, err := s.ports.list(ctx, req.GetPageSize(), req.GetPageToken())
	return &evpn.ListBridgePortsResponse{BridgePorts: ports, NextPageToken: next}, err
}

func (s portServer) UpdateBridgePort(
	ctx context.Context, req *evpn.UpdateBridgePortRequest,
) (*evpn.BridgePort, error) {
	return s.ports.update(ctx, req.GetBridgePort(), req.GetUpdateMask(), req.GetAllowMissing())
}

func (s portServer) DeleteBridgePort(
	ctx context.Context, req *evpn.DeleteBridgePortRequest,
) (*emptypb.Empty, error) {
	return s.ports.delete(ctx, req.GetName(), req.GetAllowMissing())
}

// portSchema is the schema of ports.
type portSchema struct{}

var _ schema[*evpn.BridgePortSpec, *evpn.BridgePort] = portSchema{}

// networksOf returns the ids of a port's networks, sorted. There is one unless the port is a trunk.
func networksOf(spec *evpn.BridgePortSpec) []string {
	ids := make([]string, len(spec.GetLogicalBridges()))
	for i, name := range spec.GetLogicalBridges() {
		ids[i] = path.Base(name)
	}
	return ids
}

// keyNetwork is the key of the ports of a network.
func keyNetwork(id string) string { return "network/" + id }

// keyMAC is the key of the port that has a MAC address in a network.
func keyMAC(network string, mac net.HardwareAddr) string {
	return "mac/" + network + "/" + string(mac)
}

func (portSchema) keys(spec *evpn.BridgePortSpec) []string {
	var keys []string
	for _, id := range networksOf(spec) {
		keys = append(keys, keyNetwork(id), keyMAC(id, spec.GetMacAddress()))
	}
	return keys
}

func (portSchema) validate(spec *evpn.BridgePortSpec) error {
	mac, n := net.HardwareAddr(spec.GetMacAddress()), len(spec.GetLogicalBridges())
	access := spec.GetPtype() == evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS
	trunk := spec.GetPtype() == evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK
	switch {
	case spec == nil:
		return errors.New("spec is required")
	case checkMAC(mac) != nil:
		return checkMAC(mac)
	case !access && !trunk:
		return errors.New("ptype: must be ACCESS or TRUNK")
	case access && n != 1:
		return fmt.Errorf("logical_bridges: has %d, an ACCESS port has exactly one", n)
	case trunk && n == 0:
		return errors.New("logical_bridges: has none, a TRUNK port names each that it carries")
	}

	named := map[string]bool{}
	for _, name := range spec.GetLogicalBridges() {
		network, err := networkNames.parseName(name)
		if err != nil {
			return fmt.Errorf("logical_bridges: %s", status.Convert(err).Message())
		}
		named[network] = true
	}

	if len(named) < n {
		return errors.New("logical_bridges: must name each only once")
	}

	return nil
}

// checkMAC returns an error if neither a port nor a gateway can have a MAC address.
func checkMAC(mac net.HardwareAddr) error {
	if len(mac) != 6 || mac[0]&1 != 0 || bytes.Equal(mac, make([]byte, 6)) {
		return fmt.Errorf("mac_address %s (%d bytes): must be the 6 bytes of a unicast address "+
			"that is not zero", mac, len(mac))
	}
	return nil
}

// checkNoRouter returns an error if an xPU may have the MAC address as a router. It is separate
// from checkMAC, because the state file of an older version may contain such an address.
func checkNoRouter(address []byte) error {
	if mac := net.HardwareAddr(address); sourcefilter.IsRouterMAC(mac) {
		return fmt.Errorf("mac_address %s: must not begin with 72:74, because xPUs have such "+
			"addresses as routers", mac)
	}
	return nil
}

func (portSchema) describe(spec *evpn.BridgePortSpec) string {
	ptype := strings.TrimPrefix(spec.GetPtype().String(), "BRIDGE_PORT_TYPE_")
	mac := net.HardwareAddr(spec.GetMacAddress())
	networks := strings.Join(networksOf(spec), ", ")
	return fmt.Sprintf("as %s port with MAC %s on logical bridge %s", ptype, mac, networks)
}

func (portSchema) canSee(client access.Client, id string, spec *evpn.BridgePortSpec) bool {
	return client.CanSeePort(id, networksOf(spec))
}

func (portSchema) canSeeAll(client access.Client) bool { return client.CanSeeAll() }

func (portSchema) limit(client access.Client) int { return client.MaxPorts() }

func (portSchema) message(
	name string, spec *evpn.BridgePortSpec, oper state, components ...*evpn.Component,
) *evpn.BridgePort {
	m := &evpn.BridgePort{Name: name, Spec: spec}
	if oper != 0 {
		m.Status = &evpn.BridgePortStatus{OperStatus: oper, Components: components}
	}
	return m
}

func (portSchema) operStatus(m *evpn.BridgePort) state { return m.GetStatus().GetOperStatus() }

// portController brings the data plane to ports.
type portController struct{ *Agent }

// check returns a spec with the names of its networks in the form that the agent gives them,
// sorted.
func (c portController) check(
	client access.Client, id string, spec *evpn.BridgePortSpec,
) (*evpn.BridgePortSpec, error) {
	refuse := func(
		code codes.Code, reason refusal.Reason, format string, args ...any,
	) (*evpn.BridgePortSpec, error) {
		return nil, refusal.New(code, reason, "bridge port %s: %s", id,
			fmt.Sprintf(format, args...))
	}
	trunk := spec.GetPtype() == evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK
	if trunk && !c.plane.VLANAware() {
		return refuse(codes.Unimplemented, refusal.NoTrunks, plane.NoTrunks)
	}
	err := cmp.Or(c.ports.validate(spec), checkNoRouter(spec.GetMacAddress()))
	if err != nil {
		return refuse(codes.InvalidArgument, refusal.InvalidSpec, "%v", err)
	}

	mac := net.HardwareAddr(spec.GetMacAddress())
	var networks []string
	for _, network := range networksOf(spec) {
		switch n := c.networks.objects[network]; {
		case n == nil:
			return refuse(codes.NotFound, refusal.NetworkMissing,
				"logical_bridges: logical bridge %s does not exist", network)
		case n.deleting:
			return nil, c.networks.beingDeleted(network)
		}

		if other := c.ports.otherWithKey(keyMAC(network, mac), id); other != "" {
			return refuse(codes.AlreadyExists, refusal.MACInUse,
				"mac_address %s is already in use on logical bridge %s by %s",
				mac, network, c.textFor(client, plane.Object{Kind: plane.KindPort, ID: other}))
		}

		if other := c.gatewayWithMAC(network, mac); other != "" {
			return refuse(codes.AlreadyExists, refusal.MACInUse,
				"mac_address %s is already in use on logical bridge %s by %s",
				mac, network, c.textFor(client, plane.Object{Kind: plane.KindSVI, ID: other}))
		}

		networks = append(networks, networkNames.prefix+network)
	}

	slices.Sort(networks)
	return &evpn.BridgePortSpec{
		MacAddress: mac, Ptype: spec.GetPtype(), LogicalBridges: networks,
	}, nil
}

func (c portController) checkUnused(access.Client, string) error { return nil }

func (c portController) apply(id string, spec *evpn.BridgePortSpec, changed bool) error {
	if changed {
		if err := c.plane.Detach(id); err != nil {
			return err
		}
	}
	return c.plane.Attach(id, c.membership(id, spec))
}

func (c portController) remove(id string) error { return c.plane.Detach(id) }

// effectiveFailure returns the failure of the port, or else of one of its networks.
func (c portController) effectiveFailure(p *port) error {
	if p.failure != nil {
		return p.failure
	}

	if err := checkNoRouter(p.spec.GetMacAddress()); err != nil { // from an older version
		return err
	}
	for _, id := range networksOf(p.spec) {
		if n := c.networks.objects[id]; n == nil || n.failure != nil {
			return downBecause(id, n)
		}
	}

	return nil
}

// membership describes a port to the data plane.
func (a *Agent) membership(id string, spec *evpn.BridgePortSpec) plane.Membership {
	m := plane.Membership{
		MAC:     spec.GetMacAddress(),
		Trunk:   spec.GetPtype() == evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK,
		Sources: map[string]plane.Sources{},
	}

	for _, network := range networksOf(spec) {
		m.Networks = append(m.Networks, a.segment(network))
		filter := a.filterOf(network)
		sources := plane.Sources{Filtered: filter != opibridge.SourceFilter_SOURCE_FILTER_NONE}
		if filter == opibridge.SourceFilter_SOURCE_FILTER_ADDRESSES {
			sources.Addresses = a.addressesIn(network, id)
			sources.Shared = a.portOptions.byID[id].GetShared()
		}
		m.Sources[network] = sources
	}

	return m
}
