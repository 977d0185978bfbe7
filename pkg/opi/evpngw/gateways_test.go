// SPDX-License-Identifier: Apache-2.0

package evpngw_test

import (
	"testing"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/evpngw"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// FuzzGateway checks that what is kept of an agent's answer is bounded, and that a gateway whose
// answer lacks a field is unknown.
func FuzzGateway(f *testing.F) {
	address := func(bytes ...byte) *netcommon.IPPrefix {
		return &netcommon.IPPrefix{Len: 24, Addr: &netcommon.IPAddress{
			V4OrV6: &netcommon.IPAddress_V6Addr{V6Addr: bytes},
		}}
	}
	for _, svi := range []*evpn.Svi{
		{},
		{Name: "svis/a", Spec: &evpn.SviSpec{
			Vrf: "vrfs/a", LogicalBridge: "bridges/a", MacAddress: []byte{2, 0, 0, 0, 0, 1},
			GwIpPrefix: []*netcommon.IPPrefix{{Len: -1, Addr: &netcommon.IPAddress{
				V4OrV6: &netcommon.IPAddress_V4Addr{V4Addr: 1},
			}}},
		}, Status: &evpn.SviStatus{OperStatus: evpn.SVIOperStatus_SVI_OPER_STATUS_UP}},
		{Spec: &evpn.SviSpec{
			Vrf: "a", LogicalBridge: "a", MacAddress: make([]byte, 100),
			GwIpPrefix: []*netcommon.IPPrefix{address(1, 2, 3), nil, address(make([]byte, 16)...)},
		}},
	} {
		text, err := proto.Marshal(svi)
		must.Succeed(f, err)
		f.Add(text)
	}

	f.Fuzz(func(t *testing.T, text []byte) {
		svi := &evpn.Svi{}
		if proto.Unmarshal(text, svi) != nil {
			return
		}
		agent := evpngw.Dialect().New(answers{"ListSvis": {{message: &evpn.ListSvisResponse{
			Svis: []*evpn.Svi{svi},
		}}}})
		all, err := agent.Gateways(t.Context())
		if err != nil || len(all) != 1 {
			t.Fatalf("gateways %+v, error %v", all, err)
		}

		g := all[0]
		if len(g.MAC) > 32 || len(g.Prefixes) > opi.MaxPrefixes+1 || len(g.ID) > 600 ||
			len(g.VRF) > 600 || len(g.Network) > 600 {
			t.Errorf("the gateway is kept as %+v", g)
		}
		known := g.VRF != "" && g.Network != "" && len(g.MAC) > 0 && len(g.Prefixes) > 0
		for _, p := range g.Prefixes {
			known = known && p.Addr().IsValid()
		}
		if !known && g.State != opi.StateUnknown && g.State != opi.StateDeleting {
			t.Errorf("an incomplete gateway is %s", g.State)
		}
	})
}
