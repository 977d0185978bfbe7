// SPDX-License-Identifier: Apache-2.0

package evpngw

import (
	"context"
	"encoding/binary"
	"net/netip"
	"slices"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// This file has the calls for VRFs and gateways, which the API calls Vrfs and Svis.

// The prefixes of names that an agent gets until it has answered with names of its own.
const (
	vrfPrefix     = "//network.opiproject.org/vrfs/"
	gatewayPrefix = "//network.opiproject.org/svis/"
)

// VRF implements [opi.Gateways].
func (a agent) VRF(ctx context.Context, id string) (opi.VRFStatus, error) {
	return lookup[opi.VRFStatus]{
		noun: "VRF", get: a.getVRF, list: a.VRFs,
		id:         func(v opi.VRFStatus) string { return v.ID },
		status:     func(v *opi.VRFStatus) *opi.Status { return &v.Status },
		consistent: func(opi.VRFStatus, opi.VRFStatus) bool { return true },
	}.find(ctx, id)
}

func (a agent) getVRF(ctx context.Context, id string) (opi.VRFStatus, error) {
	got, err := a.vrfs.GetVrf(ctx, &evpn.GetVrfRequest{Name: a.vrfNames.name(id)})
	if err != nil {
		return opi.VRFStatus{}, err
	}
	v := vrfStatus(got)
	v.ID = id
	return v, nil
}

// VRFs implements [opi.Gateways]. It leaves out the VRF of opi-evpn-bridge itself, because that is
// no client's.
func (a agent) VRFs(ctx context.Context) ([]opi.VRFStatus, error) {
	return list(vrfStatus, func(token string) ([]*evpn.Vrf, string, error) {
		page, err := a.vrfs.ListVrfs(ctx,
			&evpn.ListVrfsRequest{PageSize: pageSize, PageToken: token})
		for _, v := range page.GetVrfs() {
			a.vrfNames.learn(v.GetName(), lastSegment(v.GetName()))
		}
		return slices.DeleteFunc(page.GetVrfs(), isMain), page.GetNextPageToken(), err
	})
}

// CreateVRF implements [opi.Gateways].
func (a agent) CreateVRF(ctx context.Context, v opi.VRF) error {
	made, err := a.vrfs.CreateVrf(ctx, &evpn.CreateVrfRequest{
		VrfId: v.ID,
		Vrf:   &evpn.Vrf{Spec: &evpn.VrfSpec{LoopbackIpPrefix: prefixOf(v.Loopback)}},
	})
	a.vrfNames.learn(made.GetName(), v.ID)
	return err
}

// DeleteVRF implements [opi.Gateways].
func (a agent) DeleteVRF(ctx context.Context, id string) error {
	_, err := a.vrfs.DeleteVrf(ctx,
		&evpn.DeleteVrfRequest{Name: a.vrfNames.name(id), AllowMissing: true})
	if status.Code(err) == codes.FailedPrecondition {
		return &opi.Error{
			Kind: opi.ErrInUse, Detail: opi.Short(status.Convert(err).Message()), Err: err,
		}
	}
	return err
}

// Gateway implements [opi.Gateways].
func (a agent) Gateway(ctx context.Context, id string) (opi.GatewayStatus, error) {
	return lookup[opi.GatewayStatus]{
		noun: "gateway", get: a.getGateway, list: a.Gateways,
		id:         func(g opi.GatewayStatus) string { return g.ID },
		status:     func(g *opi.GatewayStatus) *opi.Status { return &g.Status },
		consistent: func(opi.GatewayStatus, opi.GatewayStatus) bool { return true },
	}.find(ctx, id)
}

func (a agent) getGateway(ctx context.Context, id string) (opi.GatewayStatus, error) {
	got, err := a.gateways.GetSvi(ctx, &evpn.GetSviRequest{Name: a.gatewayNames.name(id)})
	if err != nil {
		return opi.GatewayStatus{}, err
	}
	g := gatewayStatus(got)
	g.ID = id
	return g, nil
}

// Gateways implements [opi.Gateways].
func (a agent) Gateways(ctx context.Context) ([]opi.GatewayStatus, error) {
	return list(gatewayStatus, func(token string) ([]*evpn.Svi, string, error) {
		page, err := a.gateways.ListSvis(ctx,
			&evpn.ListSvisRequest{PageSize: pageSize, PageToken: token})
		for _, g := range page.GetSvis() {
			a.gatewayNames.learn(g.GetName(), lastSegment(g.GetName()))
		}
		return page.GetSvis(), page.GetNextPageToken(), err
	})
}

// CreateGateway implements [opi.Gateways].
func (a agent) CreateGateway(ctx context.Context, network string, g opi.Gateway) error {
	spec := &evpn.SviSpec{
		Vrf: a.vrfNames.name(g.VRF), LogicalBridge: a.networkNames.name(network), MacAddress: g.MAC,
	}
	for _, p := range g.Prefixes {
		prefix := prefixOf(p.Addr())
		prefix.Len = int32(p.Bits())
		spec.GwIpPrefix = append(spec.GwIpPrefix, prefix)
	}

	id := opi.GatewayID(network)
	made, err := a.gateways.CreateSvi(ctx,
		&evpn.CreateSviRequest{SviId: id, Svi: &evpn.Svi{Spec: spec}})
	a.gatewayNames.learn(made.GetName(), id)
	if status.Code(err) == codes.NotFound {
		return &opi.Error{
			Kind: opi.ErrNetworkMissing, Detail: opi.Short(status.Convert(err).Message()), Err: err,
		}
	}

	return err
}

// DeleteGateway implements [opi.Gateways].
func (a agent) DeleteGateway(ctx context.Context, id string) error {
	_, err := a.gateways.DeleteSvi(ctx,
		&evpn.DeleteSviRequest{Name: a.gatewayNames.name(id), AllowMissing: true})
	return err
}

func vrfStatus(v *evpn.Vrf) opi.VRFStatus {
	s := opi.VRFStatus{
		VRF: opi.VRF{
			ID:       lastSegment(v.GetName()),
			Loopback: addressOf(v.GetSpec().GetLoopbackIpPrefix().GetAddr()),
		},
		VNI: v.GetSpec().GetVni(),
	}

	state := v.GetStatus().GetOperStatus()
	s.Status = statusOf(state == evpn.VRFOperStatus_VRF_OPER_STATUS_UP,
		state == evpn.VRFOperStatus_VRF_OPER_STATUS_TO_BE_DELETED, v.GetStatus().GetComponents())
	if !s.Loopback.IsValid() {
		s.Status = incomplete(s.Status, "its loopback")
	}

	return s
}

func gatewayStatus(svi *evpn.Svi) opi.GatewayStatus {
	spec := svi.GetSpec()
	mac := spec.GetMacAddress()
	g := opi.GatewayStatus{
		ID: lastSegment(svi.GetName()), Network: lastSegment(spec.GetLogicalBridge()),
		Gateway: opi.Gateway{
			VRF: lastSegment(spec.GetVrf()), MAC: slices.Clone(mac[:min(len(mac), maxMAC)]),
		},
	}

	prefixes := spec.GetGwIpPrefix()
	known := len(prefixes) > 0
	// One address more than a gateway may have makes it differ from each that is wanted.
	for _, p := range prefixes[:min(len(prefixes), opi.MaxPrefixes+1)] {
		address := addressOf(p.GetAddr())
		known = known && address.IsValid()
		g.Prefixes = append(g.Prefixes, netip.PrefixFrom(address, int(p.GetLen())))
	}

	state := svi.GetStatus().GetOperStatus()
	g.Status = statusOf(state == evpn.SVIOperStatus_SVI_OPER_STATUS_UP,
		state == evpn.SVIOperStatus_SVI_OPER_STATUS_TO_BE_DELETED,
		svi.GetStatus().GetComponents())
	switch {
	case g.VRF == "":
		g.Status = incomplete(g.Status, "its VRF")
	case g.Network == "":
		g.Status = incomplete(g.Status, "its network")
	case len(g.MAC) == 0:
		g.Status = incomplete(g.Status, "its MAC address")
	case !known:
		g.Status = incomplete(g.Status, "its addresses")
	}

	return g
}

// addressOf returns the address in a message, or the zero value if it has none.
func addressOf(message *netcommon.IPAddress) netip.Addr {
	switch bytes := message.GetV4OrV6().(type) {
	case *netcommon.IPAddress_V4Addr:
		return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, bytes.V4Addr)))
	case *netcommon.IPAddress_V6Addr:
		address, _ := netip.AddrFromSlice(bytes.V6Addr)
		if address.Is6() {
			return address
		}
	}
	return netip.Addr{}
}
