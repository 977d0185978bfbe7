// SPDX-License-Identifier: Apache-2.0

package service

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path"
	"slices"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/access"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
)

// sviServer serves SviService.
type sviServer struct {
	evpn.UnimplementedSviServiceServer
	*Agent
}

func (s sviServer) CreateSvi(ctx context.Context, req *evpn.CreateSviRequest) (*evpn.Svi, error) {
	id := cmp.Or(req.GetSviId(), "svi-"+strings.ToLower(rand.Text()))
	return s.svis.create(ctx, id, req.GetSvi().GetSpec())
}

func (s sviServer) GetSvi(ctx context.Context, req *evpn.GetSviRequest) (*evpn.Svi, error) {
	return s.svis.get(ctx, req.GetName())
}

func (s sviServer) ListSvis(
	ctx context.Context, req *evpn.ListSvisRequest,
) (*evpn.ListSvisResponse, error) {
	svis, next, err := s.svis.list(ctx, req.GetPageSize(), req.GetPageToken())
	return &evpn.ListSvisResponse{Svis: svis, NextPageToken: next}, err
}

func (s sviServer) UpdateSvi(ctx context.Context, req *evpn.UpdateSviRequest) (*evpn.Svi, error) {
	return s.svis.update(ctx, req.GetSvi(), req.GetUpdateMask(), req.GetAllowMissing())
}

func (s sviServer) DeleteSvi(
	ctx context.Context, req *evpn.DeleteSviRequest,
) (*emptypb.Empty, error) {
	return s.svis.delete(ctx, req.GetName(), req.GetAllowMissing())
}

// sviSchema is the schema of SVIs.
type sviSchema struct{}

var _ schema[*evpn.SviSpec, *evpn.Svi] = sviSchema{}

// keyVRF is the key of the SVIs in a VRF.
func keyVRF(id string) string { return "vrf/" + id }

// networkOfSVI and vrfOfSVI return the ids in a spec.
func networkOfSVI(spec *evpn.SviSpec) string { return path.Base(spec.GetLogicalBridge()) }
func vrfOfSVI(spec *evpn.SviSpec) string     { return path.Base(spec.GetVrf()) }

func (sviSchema) keys(spec *evpn.SviSpec) []string {
	return []string{keyVRF(vrfOfSVI(spec)), keyNetwork(networkOfSVI(spec))}
}

// maxPrefixes limits the addresses of a gateway.
const maxPrefixes = 16

func (sviSchema) validate(spec *evpn.SviSpec) error {
	mac, n := net.HardwareAddr(spec.GetMacAddress()), len(spec.GetGwIpPrefix())
	switch {
	case spec == nil:
		return errors.New("spec is required")
	case checkMAC(mac) != nil:
		return checkMAC(mac)
	case n < 1 || n > maxPrefixes:
		return fmt.Errorf("gw_ip_prefix: has %d, must have 1-%d", n, maxPrefixes)
	case spec.GetRemoteAs() != 0 && !spec.GetEnableBgp():
		return errors.New("remote_as: must be absent without enable_bgp")
	}
	if _, err := vrfNames.parseName(spec.GetVrf()); err != nil {
		return fmt.Errorf("vrf: %s", status.Convert(err).Message())
	}
	if _, err := networkNames.parseName(spec.GetLogicalBridge()); err != nil {
		return fmt.Errorf("logical_bridge: %s", status.Convert(err).Message())
	}

	given := map[netip.Addr]bool{}
	for i, message := range spec.GetGwIpPrefix() {
		prefix := prefixOf(message)
		if !isGateway(prefix) {
			return fmt.Errorf("gw_ip_prefix[%d] %v: must be an IPv4 or IPv6 unicast address with the "+
				"length of its subnet, 1-31 or 1-127, and neither the subnet's first address nor "+
				"an IPv4 subnet's last one", i, message)
		}
		given[prefix.Addr()] = true
	}

	if len(given) < n {
		return errors.New("gw_ip_prefix: must have each address only once")
	}

	return nil
}

// prefixOf returns the address and prefix length in a message. It is zero if the message has none,
// or none that is valid.
func prefixOf(message *netcommon.IPPrefix) netip.Prefix {
	address, length := addressIn(message), message.GetLen()
	if !address.IsValid() || address.IsUnspecified() || address.Is4In6() || length < 1 ||
		int(length) > address.BitLen() {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(address, int(length))
}

// addressIn returns the address in a message. It is zero if the message has none.
func addressIn(message *netcommon.IPPrefix) netip.Addr {
	switch bytes := message.GetAddr().GetV4OrV6().(type) {
	case *netcommon.IPAddress_V4Addr:
		return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, bytes.V4Addr)))
	case *netcommon.IPAddress_V6Addr:
		if len(bytes.V6Addr) == net.IPv6len {
			return netip.AddrFrom16([16]byte(bytes.V6Addr))
		}
	}
	return netip.Addr{}
}

// isAny reports whether a message has the unspecified address, 0.0.0.0 or ::, of any length.
func isAny(message *netcommon.IPPrefix) bool {
	address := addressIn(message)
	return address.IsValid() && address.IsUnspecified()
}

// isHost reports whether a machine can have the address and be reached from other subnets by it.
func isHost(address netip.Addr) bool {
	return address.IsValid() && address.IsGlobalUnicast() &&
		(!address.Is4() || address.As4()[0] != 0 && address.As4()[0] < 224)
}

// isGateway reports whether a gateway can have the address in a subnet. A subnet of two IPv4
// addresses has no first and last one that is special (RFC 3021).
func isGateway(prefix netip.Prefix) bool {
	address := prefix.Addr()
	linkLocal := address.Is6() && address.IsLinkLocalUnicast()
	if !prefix.IsValid() || prefix.IsSingleIP() || !isHost(address) && !linkLocal {
		return false
	}
	if prefix.Bits() == address.BitLen()-1 {
		return true
	}
	subnet := prefix.Masked()
	return address != subnet.Addr() && (address.Is6() || address != netaddr.Last(subnet))
}

// prefixesOf returns the addresses of a gateway with the lengths of their subnets.
func prefixesOf(spec *evpn.SviSpec) []netip.Prefix {
	var prefixes []netip.Prefix
	for _, message := range spec.GetGwIpPrefix() {
		prefixes = append(prefixes, prefixOf(message))
	}
	return prefixes
}

func (sviSchema) describe(spec *evpn.SviSpec) string {
	var texts []string
	for _, prefix := range prefixesOf(spec) {
		texts = append(texts, prefix.String())
	}
	return fmt.Sprintf("in VRF %s on logical bridge %s with MAC %s and %s", vrfOfSVI(spec),
		networkOfSVI(spec), net.HardwareAddr(spec.GetMacAddress()), strings.Join(texts, ", "))
}

func (sviSchema) canSee(client access.Client, id string, spec *evpn.SviSpec) bool {
	if spec == nil {
		return client.CanSeeSVI(id)
	}
	return client.CanSeeSVI(id) && client.CanSeeVRF(vrfOfSVI(spec)) &&
		client.CanSeeNetwork(networkOfSVI(spec))
}

func (sviSchema) canSeeAll(client access.Client) bool { return client.CanSeeAllSVIs() }

func (sviSchema) limit(client access.Client) int { return client.MaxSVIs() }

func (sviSchema) message(
	name string, spec *evpn.SviSpec, oper state, components ...*evpn.Component,
) *evpn.Svi {
	m := &evpn.Svi{Name: name, Spec: spec}
	if oper != 0 {
		m.Status = &evpn.SviStatus{OperStatus: evpn.SVIOperStatus(oper), Components: components}
	}
	return m
}

func (sviSchema) operStatus(m *evpn.Svi) state { return state(m.GetStatus().GetOperStatus()) }

// sviController brings the data plane to SVIs.
type sviController struct{ *Agent }

// check returns a spec with the names of its VRF and network in the form that the agent gives them,
// and with its addresses sorted.
func (c sviController) check(
	client access.Client, id string, spec *evpn.SviSpec,
) (*evpn.SviSpec, error) {
	refuse := func(
		code codes.Code, reason refusal.Reason, format string, args ...any,
	) (*evpn.SviSpec, error) {
		return nil, refusal.New(code, reason, "SVI %s: %s", id, fmt.Sprintf(format, args...))
	}
	err := cmp.Or(c.svis.validate(spec), checkNoRouter(spec.GetMacAddress()))
	if err != nil {
		return refuse(codes.InvalidArgument, refusal.InvalidSpec, "%v", err)
	}
	if spec.GetEnableBgp() {
		return refuse(codes.Unimplemented, refusal.NoBGP, "enable_bgp: the agent speaks no BGP: "+
			"leave it out, and run a routing daemon such as FRR beside the agent")
	}

	network, vrf := networkOfSVI(spec), vrfOfSVI(spec)
	switch v := c.vrfs.objects[vrf]; {
	case v == nil:
		return refuse(codes.NotFound, refusal.VRFMissing, "vrf: VRF %s does not exist", vrf)
	case v.deleting:
		return nil, c.vrfs.beingDeleted(vrf)
	}
	switch n := c.networks.objects[network]; {
	case n == nil:
		return refuse(codes.NotFound, refusal.NetworkMissing,
			"logical_bridge: logical bridge %s does not exist", network)
	case n.deleting:
		return nil, c.networks.beingDeleted(network)
	}

	if err := c.checkConflicts(client, id, spec); err != nil {
		return nil, err
	}

	prefixes := slices.Clone(spec.GetGwIpPrefix())
	slices.SortStableFunc(prefixes, func(a, b *netcommon.IPPrefix) int {
		return prefixOf(a).Addr().Compare(prefixOf(b).Addr())
	})

	return &evpn.SviSpec{
		Vrf: vrfNames.prefix + vrf, LogicalBridge: networkNames.prefix + network,
		MacAddress: spec.GetMacAddress(), GwIpPrefix: prefixes,
	}, nil
}

// checkConflicts returns a gRPC status if another object has the network, a MAC address, an address
// or a subnet of an SVI.
func (c sviController) checkConflicts(
	client access.Client, id string, spec *evpn.SviSpec,
) error {
	refuse := func(
		reason refusal.Reason, kind plane.ObjectKind, other, format string, args ...any,
	) error {
		return refusal.New(codes.AlreadyExists, reason, "SVI %s: %s by %s", id,
			fmt.Sprintf(format, args...), c.textFor(client, plane.Object{Kind: kind, ID: other}))
	}

	network := networkOfSVI(spec)
	if other := c.svis.otherWithKey(keyNetwork(network), id); other != "" {
		return refuse(refusal.NetworkHasSVI, plane.KindSVI, other,
			"logical bridge %s has a gateway already, made", network)
	}

	mac := net.HardwareAddr(spec.GetMacAddress())
	if other := c.ports.otherWithKey(keyMAC(network, mac), ""); other != "" {
		return refuse(refusal.MACInUse, plane.KindPort, other,
			"mac_address %s is already in use on logical bridge %s", mac, network)
	}

	prefixes := prefixesOf(spec)
	for port := range c.ports.byKey.All(keyNetwork(network)) {
		for _, address := range c.addressesIn(network, port) {
			if hasAddress(prefixes, address) {
				return refuse(refusal.AddressInUse, plane.KindPort, port,
					"gw_ip_prefix: %s is already in use on logical bridge %s", address, network)
			}
		}
	}

	for other := range c.svis.byKey.All(keyVRF(vrfOfSVI(spec))) {
		if other == id {
			continue
		}
		theirs := prefixesOf(c.svis.objects[other].spec)
		if prefix, overlap := overlapping(prefixes, theirs); overlap {
			return refuse(refusal.SubnetInUse, plane.KindSVI, other,
				"gw_ip_prefix: the subnet of %s is already in use in the same VRF", prefix)
		}
	}

	return nil
}

func hasAddress(prefixes []netip.Prefix, address netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Addr() == address })
}

// overlapping returns a prefix in some whose subnet overlaps with the subnet of a prefix in others.
// The link-local subnet does not count, because each network has it.
func overlapping(some, others []netip.Prefix) (one netip.Prefix, overlap bool) {
	for _, a := range some {
		for _, b := range others {
			if a.Overlaps(b) && !a.Addr().IsLinkLocalUnicast() {
				return a, true
			}
		}
	}
	return netip.Prefix{}, false
}

// gatewayAt returns the id of the SVI that has an address in a network, or "".
func (a *Agent) gatewayAt(address netip.Addr, network string) string {
	svi := a.svis.otherWithKey(keyNetwork(network), "")
	if svi != "" && hasAddress(prefixesOf(a.svis.objects[svi].spec), address) {
		return svi
	}
	return ""
}

// gatewayWithMAC returns the id of the SVI of a network if it has a MAC address, or "".
func (a *Agent) gatewayWithMAC(network string, mac net.HardwareAddr) string {
	svi := a.svis.otherWithKey(keyNetwork(network), "")
	if svi == "" || !bytes.Equal(a.svis.objects[svi].spec.GetMacAddress(), mac) {
		return ""
	}
	return svi
}

func (c sviController) checkUnused(access.Client, string) error { return nil }

func (c sviController) apply(id string, spec *evpn.SviSpec, _ bool) error {
	return c.plane.EnsureSVI(c.svi(id, spec))
}

func (c sviController) remove(id string) error {
	return c.plane.RemoveSVI(c.svi(id, c.svis.objects[id].spec))
}

// effectiveFailure returns the failure of the SVI, or else of its VRF or network.
func (c sviController) effectiveFailure(s *svi) error {
	if s.failure != nil {
		return s.failure
	}
	vrfID, networkID := vrfOfSVI(s.spec), networkOfSVI(s.spec)
	if v := c.vrfs.objects[vrfID]; v == nil || v.failure != nil {
		return downBecause(vrfID, v)
	}
	if n := c.networks.objects[networkID]; n == nil || n.failure != nil {
		return downBecause(networkID, n)
	}
	return nil
}

// svi describes an SVI to the data plane.
func (a *Agent) svi(id string, spec *evpn.SviSpec) plane.SVI {
	return plane.SVI{
		ID: id, Network: a.segment(networkOfSVI(spec)), VRF: vrfOfSVI(spec),
		MAC: spec.GetMacAddress(), Prefixes: prefixesOf(spec),
	}
}

// reconcileSVIs reconciles the SVIs that have a key.
func (a *Agent) reconcileSVIs(key string) { a.svis.reconcileEach(a.svis.withKey(key)) }
