// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"net/netip"
	"slices"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
)

func l3(kinds conformance.Kinds) []Case {
	return slices.Concat(
		of(conformance.L3, kinds.Vrf, crud()), about(conformance.L3, kinds.Vrf, vrfCases(kinds)),
		of(conformance.L3, kinds.Svi, crud()), about(conformance.L3, kinds.Svi, sviCases(kinds)),
		about(conformance.L3, kinds.Svi, l3Packets(kinds)),
	)
}

func vrfCases(kinds conformance.Kinds) []Case {
	k := kinds.Vrf
	const (
		loopback = "IPv4 or IPv6 loopback address prefix. Also serves as basis for RD in FRR"
		noRoutes = "Pods of the VRF have no routes to other networks."
	)
	set := func(p *netcommon.IPPrefix) func(*T, proto.Message) {
		return func(_ *T, spec proto.Message) { spec.(*evpn.VrfSpec).LoopbackIpPrefix = p }
	}
	v4 := conformance.IPPrefix(netip.MustParsePrefix("198.18.0.1/32"))

	return append(refusals(k, []refused{
		{
			name: "loopback-missing", source: "AIP-203", says: required, violation: noRoutes,
			spoil: set(nil),
		},
		{
			name: "loopback-of-5-bytes", says: loopback, violation: noRoutes,
			spoil: set(&netcommon.IPPrefix{Len: 64, Addr: &netcommon.IPAddress{
				Af:     netcommon.IpAf_IP_AF_INET6,
				V4OrV6: &netcommon.IPAddress_V6Addr{V6Addr: []byte{1, 2, 3, 4, 5}},
			}}),
		},
		{
			name: "loopback-length-of-129", says: lenV4, violation: noRoutes,
			spoil: set(&netcommon.IPPrefix{Addr: v4.GetAddr(), Len: 129}),
		},
		{
			name: "loopback-length-negative", says: lenV4, violation: noRoutes,
			spoil: set(&netcommon.IPPrefix{Addr: v4.GetAddr(), Len: -1}),
		},
		{
			name: "vni-of-25-bits", says: "VXLAN VNI for L3 EVPN. (RFC 7348: a VNI has 24 bits.)",
			violation: "Routes are in the VNI that the lower 24 bits say, which is another tenant's.",
			spoil: func(_ *T, spec proto.Message) {
				spec.(*evpn.VrfSpec).Vni = proto.Uint32(1<<24 + 5)
			},
		},
	}),
		Case{
			Name: "spec-missing-is-refused", Source: "AIP-203", Says: required,
			Violation: "A client that forgets the spec makes a VRF without routes, or ends the agent.",
			Run:       func(t *T) { wantNoSpecRefused(t, k) },
		},
		Case{
			Name: "loopback-of-ipv6-is-taken", Says: loopback, Violation: noRoutes,
			Run: func(t *T) {
				spec := &evpn.VrfSpec{
					LoopbackIpPrefix: conformance.IPPrefix(netip.MustParsePrefix("2001:db8::1/128")),
				}
				got, err := t.Create(k, t.NewID(k), spec)
				t.WantOK("Create with an IPv6 loopback address", err)
				t.WantSpec("the answer", got, spec)
			},
		},
		Case{
			Name: "with-an-svi-is-not-deleted", Source: "AIP-135",
			Says: "The API must fail with a FAILED_PRECONDITION error if child resources are " +
				"present.",
			Violation: "The deletion of a VRF takes the gateway away from pods that run.",
			Run: func(t *T) {
				svi := t.Have(kinds.Svi)
				vrf := svi.Spec.(*evpn.SviSpec).GetVrf()
				t.WantRefused("Delete of a VRF with an SVI", t.Delete(k, vrf, false))
				t.WantAsMade(svi)
			},
		},
		Case{
			Name: "without-its-svis-is-deleted", Source: "AIP-121", Says: strongDelete,
			Violation: "VRFs pile up at the agent.",
			Run: func(t *T) {
				svi := t.Have(kinds.Svi)
				vrf := svi.Spec.(*evpn.SviSpec).GetVrf()
				t.Prepare(func() {
					t.WantOK("Delete of the SVI", t.Delete(kinds.Svi, svi.Name, false))
					t.WantGone(kinds.Svi, svi.Name)
				})
				t.WantOK("Delete", t.Delete(k, vrf, false))
				t.WantGone(k, vrf)
			},
		},
	)
}

func sviCases(kinds conformance.Kinds) []Case {
	k := kinds.Svi
	const (
		gateway   = "The GW IP addresses assigned to the SVI"
		noGateway = "Pods of the network have no gateway."
	)
	set := func(change func(*evpn.SviSpec)) func(*T, proto.Message) {
		return func(_ *T, spec proto.Message) { change(spec.(*evpn.SviSpec)) }
	}

	return append(refusals(k, []refused{
		{
			name: "vrf-missing", source: "AIP-203", says: required, violation: noGateway,
			spoil: set(func(s *evpn.SviSpec) { s.Vrf = "" }),
		},
		{
			name: "logical-bridge-missing", source: "AIP-203", says: required,
			violation: noGateway, spoil: set(func(s *evpn.SviSpec) { s.LogicalBridge = "" }),
		},
		{
			name: "mac-address-missing", source: "AIP-203", says: required, violation: noGateway,
			spoil: set(func(s *evpn.SviSpec) { s.MacAddress = nil }),
		},
		{
			name: "gateway-missing", source: "AIP-203", says: required, violation: noGateway,
			spoil: set(func(s *evpn.SviSpec) { s.GwIpPrefix = nil }),
		},
		{
			name: "mac-address-of-5-bytes", says: "Svi's MAC address.", violation: noGateway,
			spoil: set(func(s *evpn.SviSpec) { s.MacAddress = []byte{2, 17, 0, 0, 1} }),
		},
		{
			name:      "mac-address-multicast",
			says:      "Svi's MAC address. (IEEE 802: a station has an individual address.)",
			violation: "Frames for the gateway go to all pods.",
			spoil:     set(func(s *evpn.SviSpec) { s.MacAddress = []byte{3, 17, 0, 0, 0, 1} }),
		},
		{
			name: "gateway-of-5-bytes", says: gateway, violation: noGateway,
			spoil: set(func(s *evpn.SviSpec) {
				s.GwIpPrefix = []*netcommon.IPPrefix{{Len: 64, Addr: &netcommon.IPAddress{
					Af:     netcommon.IpAf_IP_AF_INET6,
					V4OrV6: &netcommon.IPAddress_V6Addr{V6Addr: []byte{1, 2, 3, 4, 5}},
				}}}
			}),
		},
		{
			name: "gateway-length-of-129", says: lenV4, violation: noGateway,
			spoil: set(func(s *evpn.SviSpec) { s.GwIpPrefix[0].Len = 129 }),
		},
		{
			name: "vrf-that-does-not-exist", says: "Vrf name", violation: noGateway,
			spoil: func(t *T, spec proto.Message) {
				spec.(*evpn.SviSpec).Vrf = missing(t, kinds.Vrf)
			},
		},
		{
			name: "logical-bridge-that-does-not-exist", says: "Logical Bridge name",
			violation: noGateway,
			spoil: func(t *T, spec proto.Message) {
				spec.(*evpn.SviSpec).LogicalBridge = missing(t, kinds.LogicalBridge)
			},
		},
		{
			name: "remote-as-of-17-bits", level: conformance.Should,
			says:      "The remote AS used by BGP speakers on LB (1-65535)",
			violation: "A peering with pods is with another system, or never up.",
			spoil: set(func(s *evpn.SviSpec) {
				s.EnableBgp, s.RemoteAs = true, 1<<16+5
			}),
		},
	}),
		Case{
			Name: "spec-missing-is-refused", Source: "AIP-203", Says: required,
			Violation: "A client that forgets the spec makes an SVI of no network, or ends the agent.",
			Run:       func(t *T) { wantNoSpecRefused(t, k) },
		},
		Case{
			Name: "gateway-of-ipv6-is-taken", Says: gateway, Violation: noGateway,
			Run: func(t *T) {
				id, spec := t.Sample(k)
				spec.(*evpn.SviSpec).GwIpPrefix = []*netcommon.IPPrefix{
					conformance.IPPrefix(netip.MustParsePrefix("2001:db8:1::1/64")),
				}
				got, err := t.Create(k, id, spec)
				t.WantOK("Create with an IPv6 gateway", err)
				t.WantSpec("the answer", got, spec)
			},
		},
		Case{
			Name: "two-gateways-are-taken", Says: gateway, Violation: noGateway,
			Run: func(t *T) {
				id, spec := t.Sample(k)
				s := spec.(*evpn.SviSpec)
				s.GwIpPrefix = append(s.GwIpPrefix, t.Prefix(24))
				got, err := t.Create(k, id, spec)
				t.WantOK("Create with two gateways", err)
				t.WantSpec("the answer", got, spec)
			},
		},
		Case{
			Name: "keeps-its-logical-bridge", Source: "AIP-135",
			Says: "The API must fail with a FAILED_PRECONDITION error if child resources are " +
				"present.",
			Violation: "The deletion of a network ends the agent's gateway in an unknown state.",
			Run: func(t *T) {
				o := t.Have(k)
				bridge := o.Spec.(*evpn.SviSpec).GetLogicalBridge()
				t.WantRefused("Delete of the logical bridge of an SVI",
					t.Delete(kinds.LogicalBridge, bridge, false))
				t.WantAsMade(o)
			},
		},
	)
}
