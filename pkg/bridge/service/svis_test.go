// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// prefixMessage returns the message of an address with a prefix length, such as 10.1.0.1/24.
func prefixMessage(t testing.TB, text string) *netcommon.IPPrefix {
	t.Helper()
	prefix, err := netip.ParsePrefix(text)
	must.Succeed(t, err)
	m := &netcommon.IPPrefix{Len: int32(prefix.Bits()), Addr: &netcommon.IPAddress{}}
	if b := prefix.Addr().AsSlice(); prefix.Addr().Is4() {
		m.Addr.V4OrV6 = &netcommon.IPAddress_V4Addr{
			V4Addr: uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3]),
		}
	} else {
		m.Addr.V4OrV6 = &netcommon.IPAddress_V6Addr{V6Addr: b}
	}
	return m
}

const gatewayMAC = "02:00:00:00:ff:01"

// gateway returns the spec of an SVI in vrf-one.
func gateway(t testing.TB, network string, prefixes ...string) *evpn.SviSpec {
	t.Helper()
	mac, err := net.ParseMAC(gatewayMAC)
	must.Succeed(t, err)
	spec := &evpn.SviSpec{Vrf: "vrfs/vrf-one", LogicalBridge: network, MacAddress: mac}
	for _, text := range prefixes {
		spec.GwIpPrefix = append(spec.GwIpPrefix, prefixMessage(t, text))
	}
	return spec
}

// vrfSpec returns a valid spec of a VRF.
func vrfSpec(t testing.TB) *evpn.VrfSpec {
	return &evpn.VrfSpec{LoopbackIpPrefix: prefixMessage(t, "203.0.113.1/32")}
}

// withVRFs returns an agent with the VRFs vrf-one and vrf-two.
func withVRFs(t *testing.T) (*Agent, *fakePlane) {
	t.Helper()
	a, fake := newTestAgent(t)
	for _, id := range []string{"vrf-one", "vrf-two"} {
		_, err := a.vrfs.create(t.Context(), id, vrfSpec(t))
		must.Succeed(t, err)
	}
	return a, fake
}

// wantRefusal checks the code, the reason and the text of an error.
func wantRefusal(
	t *testing.T, err error, code codes.Code, reason refusal.Reason, text string,
) {
	t.Helper()
	if status.Code(err) != code || refusal.Of(err) != reason ||
		!strings.Contains(fmt.Sprint(err), text) {
		t.Errorf("got %s %v, want %s %s with %q", refusal.Of(err), err, code, reason, text)
	}
}

func TestVRFSpecs(t *testing.T) {
	a, fake := newTestAgent(t)
	for name, test := range map[string]struct {
		spec   *evpn.VrfSpec
		code   codes.Code
		reason refusal.Reason
		says   string
	}{
		"no spec": {nil, codes.InvalidArgument, refusal.InvalidSpec, "spec is required"},
		"an L3 VNI": {
			&evpn.VrfSpec{
				Vni: proto.Uint32(9000), LoopbackIpPrefix: vrfSpec(t).GetLoopbackIpPrefix(),
			}, codes.Unimplemented, refusal.NoL3VNI,
			"FRR beside the agent",
		},
		"an L3 VNI with its VTEP": {
			&evpn.VrfSpec{
				Vni: proto.Uint32(9000), VtepIpPrefix: prefixMessage(t, "198.51.100.1/24"),
				LoopbackIpPrefix: vrfSpec(t).GetLoopbackIpPrefix(),
			}, codes.Unimplemented, refusal.NoL3VNI, "make the VRF without vni",
		},
		"a VTEP alone": {
			&evpn.VrfSpec{VtepIpPrefix: prefixMessage(t, "198.51.100.1/24")},
			codes.InvalidArgument, refusal.InvalidSpec, "vtep_ip_prefix: must be absent",
		},
		"no loopback": {
			&evpn.VrfSpec{}, codes.InvalidArgument, refusal.InvalidSpec,
			"loopback_ip_prefix: is required",
		},
		"an empty loopback": {
			&evpn.VrfSpec{LoopbackIpPrefix: &netcommon.IPPrefix{}}, codes.InvalidArgument,
			refusal.InvalidSpec, "loopback_ip_prefix",
		},
		"a multicast loopback": {
			&evpn.VrfSpec{LoopbackIpPrefix: prefixMessage(t, "224.0.0.5/32")},
			codes.InvalidArgument, refusal.InvalidSpec, "loopback_ip_prefix",
		},
	} {
		_, err := a.vrfs.create(t.Context(), "vrf-bad", test.spec)
		t.Run(name, func(t *testing.T) { wantRefusal(t, err, test.code, test.reason, test.says) })
	}

	got, err := vrfServer{Agent: a}.CreateVrf(t.Context(), &evpn.CreateVrfRequest{
		Vrf: &evpn.Vrf{Spec: &evpn.VrfSpec{LoopbackIpPrefix: prefixMessage(t, "10.0.0.1/24")}},
	})
	must.Succeed(t, err)
	id := strings.TrimPrefix(got.GetName(), vrfNames.prefix)
	if want := netip.MustParseAddr("10.0.0.1"); fake.vrfs[id].Loopback != want ||
		got.GetStatus().GetOperStatus() != evpn.VRFOperStatus_VRF_OPER_STATUS_UP {
		t.Errorf("the VRF is %v with loopback %s, want %s", got, fake.vrfs[id].Loopback, want)
	}
}

func TestSVISpecs(t *testing.T) {
	a, _ := withVRFs(t)
	_, err := a.create(t, p1, accessPort(mac1, blue))
	must.Succeed(t, err)
	_, err = optionsServer{Agent: a}.UpdatePortOptions(t.Context(),
		&opibridge.UpdatePortOptionsRequest{Options: &opibridge.PortOptions{
			Name: portNames.prefix + p1, Addresses: []string{"10.1.0.2"},
		}})
	must.Succeed(t, err)
	_, err = a.svis.create(t.Context(), "svi-red", gateway(t, red, "10.2.0.1/24", "fd00:2::1/64"))
	must.Succeed(t, err)

	many := make([]string, maxPrefixes+1)
	for i := range many {
		many[i] = fmt.Sprintf("10.%d.0.1/24", 10+i)
	}

	change := func(change func(*evpn.SviSpec)) *evpn.SviSpec {
		spec := gateway(t, blue, "10.1.0.1/24")
		change(spec)
		return spec
	}
	mac := func(text string) *evpn.SviSpec {
		return change(func(s *evpn.SviSpec) { s.MacAddress, _ = net.ParseMAC(text) })
	}

	const invalid = codes.InvalidArgument
	for name, test := range map[string]struct {
		spec   *evpn.SviSpec
		code   codes.Code
		reason refusal.Reason
		says   string
	}{
		"no spec": {nil, invalid, refusal.InvalidSpec, "spec is required"},
		"no MAC":  {mac(""), invalid, refusal.InvalidSpec, "mac_address"},
		"multicast MAC": {
			mac("01:00:5e:00:00:01"), invalid, refusal.InvalidSpec, "mac_address",
		},
		"a router's MAC": {
			mac("72:74:00:00:00:01"), invalid, refusal.InvalidSpec, "must not begin with 72:74",
		},
		"no address": {gateway(t, blue), invalid, refusal.InvalidSpec, "has 0, must have 1-16"},
		"too many":   {gateway(t, blue, many...), invalid, refusal.InvalidSpec, "has 17"},
		"twice": {
			gateway(t, blue, "10.1.0.1/24", "10.1.0.1/16"), invalid, refusal.InvalidSpec,
			"only once",
		},
		"first address": {
			gateway(t, blue, "10.1.0.0/24"), invalid, refusal.InvalidSpec, "gw_ip_prefix[0]",
		},
		"last address": {
			gateway(t, blue, "10.1.0.5/24", "10.1.0.255/24"), invalid, refusal.InvalidSpec,
			"gw_ip_prefix[1]",
		},
		"one host": {
			gateway(t, blue, "10.1.0.1/32"), invalid, refusal.InvalidSpec, "gw_ip_prefix[0]",
		},
		"loopback": {
			gateway(t, blue, "127.0.0.2/8"), invalid, refusal.InvalidSpec, "gw_ip_prefix[0]",
		},
		"IPv4 link-local": {
			gateway(t, blue, "169.254.0.1/16"), invalid, refusal.InvalidSpec, "gw_ip_prefix[0]",
		},
		"multicast": {
			gateway(t, blue, "ff02::1/64"), invalid, refusal.InvalidSpec, "gw_ip_prefix[0]",
		},
		"IPv4 in IPv6": {
			gateway(t, blue, "::ffff:10.1.0.1/112"), invalid, refusal.InvalidSpec,
			"gw_ip_prefix[0]",
		},
		"no length": {
			change(func(s *evpn.SviSpec) { s.GwIpPrefix[0].Len = 0 }), invalid,
			refusal.InvalidSpec, "gw_ip_prefix[0]",
		},
		"negative length": {
			change(func(s *evpn.SviSpec) { s.GwIpPrefix[0].Len = -1 }), invalid,
			refusal.InvalidSpec, "gw_ip_prefix[0]",
		},
		"BGP": {
			change(func(s *evpn.SviSpec) { s.EnableBgp, s.RemoteAs = true, 65000 }),
			codes.Unimplemented, refusal.NoBGP, "FRR beside the agent",
		},
		"AS without BGP": {
			change(func(s *evpn.SviSpec) { s.RemoteAs = 65000 }), invalid, refusal.InvalidSpec,
			"remote_as",
		},
		"bad VRF": {
			change(func(s *evpn.SviSpec) { s.Vrf = "vrf-one" }), invalid, refusal.InvalidSpec,
			"vrf: VRF name",
		},
		"bad network": {
			change(func(s *evpn.SviSpec) { s.LogicalBridge = "../x" }), invalid,
			refusal.InvalidSpec, "logical_bridge: ",
		},
		"no such VRF": {
			change(func(s *evpn.SviSpec) { s.Vrf = "vrfs/vrf-none" }), codes.NotFound,
			refusal.VRFMissing, "VRF vrf-none does not exist",
		},
		"no such network": {
			gateway(t, "logicalBridges/net-none", "10.1.0.1/24"), codes.NotFound,
			refusal.NetworkMissing, "logical bridge net-none does not exist",
		},
		"network with a gateway": {
			gateway(t, red, "10.3.0.1/24"), codes.AlreadyExists, refusal.NetworkHasSVI,
			"by SVI svi-red",
		},
		"MAC of a port": {
			mac(mac1), codes.AlreadyExists, refusal.MACInUse, "by bridge port " + p1,
		},
		"address of a port": {
			gateway(t, blue, "10.1.0.2/24"), codes.AlreadyExists, refusal.AddressInUse,
			"by bridge port " + p1,
		},
		"subnet of another network": {
			gateway(t, blue, "10.2.0.9/16"), codes.AlreadyExists, refusal.SubnetInUse,
			"the subnet of 10.2.0.9/16 is already in use in the same VRF by SVI svi-red",
		},
	} {
		_, err := a.svis.create(t.Context(), "svi-blue", test.spec)
		t.Run(name, func(t *testing.T) { wantRefusal(t, err, test.code, test.reason, test.says) })
	}

	other := change(func(s *evpn.SviSpec) { s.Vrf = "vrfs/vrf-two" })
	other.GwIpPrefix = append(other.GwIpPrefix, prefixMessage(t, "10.2.0.1/24"),
		prefixMessage(t, "fe80::1/64"), prefixMessage(t, "10.4.0.0/31"))
	_, err = a.svis.create(t.Context(), "svi-blue", other)
	must.Succeed(t, err)
}

// TestSVILifecycle checks that SVIs behave as the other objects do.
func TestSVILifecycle(t *testing.T) {
	a, fake := withVRFs(t)
	ctx, name := t.Context(), sviNames.prefix+"svi-blue"
	spec := gateway(t, "logicalBridges/net-blue", "fd00:1::1/64", "10.1.0.1/24")
	got, err := a.svis.create(ctx, "svi-blue", spec)
	must.Succeed(t, err)
	want := &evpn.Svi{
		Name: name,
		Spec: gateway(t, blue, "10.1.0.1/24", "fd00:1::1/64"),
		Status: &evpn.SviStatus{
			OperStatus: evpn.SVIOperStatus_SVI_OPER_STATUS_UP,
			Components: []*evpn.Component{{
				Name: "svi", Status: evpn.CompStatus_COMP_STATUS_SUCCESS,
			}},
		},
	}
	want.Spec.Vrf = vrfNames.prefix + "vrf-one"
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("created (-want +got):\n%s", diff)
	}

	slices.Reverse(spec.GwIpPrefix)
	_, err = a.svis.create(ctx, "svi-blue", spec)
	must.Succeed(t, err)
	_, err = a.svis.create(ctx, "svi-blue", gateway(t, blue, "10.9.0.1/24"))
	wantRefusal(t, err, codes.AlreadyExists, refusal.OtherSpec,
		"in VRF vrf-one on logical bridge net-blue with MAC 02:00:00:00:ff:01 and 10.1.0.1/24, "+
			"fd00:1::1/64")

	// Without a mask only the fields that are given change.
	got, err = a.svis.update(ctx, &evpn.Svi{Name: name, Spec: &evpn.SviSpec{
		GwIpPrefix: []*netcommon.IPPrefix{prefixMessage(t, "10.7.0.1/24")},
	}}, nil, false)
	must.Succeed(t, err)
	if prefixes := prefixesOf(got.GetSpec()); len(prefixes) != 1 ||
		prefixes[0].String() != "10.7.0.1/24" || vrfOfSVI(got.GetSpec()) != "vrf-one" {
		t.Errorf("after the update: %v", got)
	}
	_, err = a.svis.update(ctx, &evpn.Svi{Name: name, Spec: &evpn.SviSpec{}},
		&fieldmaskpb.FieldMask{Paths: []string{"spec.gw_ip_prefix"}}, false)
	wantRefusal(t, err, codes.InvalidArgument, refusal.InvalidSpec, "gw_ip_prefix: has 0")

	// Objects that others need stay.
	_, err = a.vrfs.delete(ctx, vrfNames.prefix+"vrf-one", false)
	wantRefusal(t, err, codes.FailedPrecondition, refusal.VRFInUse, "in use by SVI svi-blue")
	_, err = a.networks.delete(ctx, blue, false)
	wantRefusal(t, err, codes.FailedPrecondition, refusal.NetworkInUse, "in use by SVI svi-blue")
	_, err = a.create(t, p1, accessPort(gatewayMAC, blue))
	wantRefusal(t, err, codes.AlreadyExists, refusal.MACInUse, "by SVI svi-blue")

	// What it needs is seen at the SVI.
	a.vrfs.objects["vrf-one"].failure = errors.New("its netdev is missing")
	got, err = a.svis.get(ctx, name)
	must.Succeed(t, err)
	if details := got.GetStatus().GetComponents()[0].GetDetails(); got.GetStatus().GetOperStatus() !=
		evpn.SVIOperStatus_SVI_OPER_STATUS_DOWN ||
		details != "vrf-one is down: its netdev is missing" {
		t.Errorf("without its VRF: %v", got)
	}
	a.vrfs.objects["vrf-one"].failure = nil

	// A delete that fails is tried again.
	fake.failure = errors.New("the kernel is busy")
	_, err = a.svis.delete(ctx, name, false)
	wantRefusal(t, err, codes.Internal, refusal.NotDeletedYet, "the kernel is busy")
	_, err = a.svis.create(ctx, "svi-blue", spec)
	wantRefusal(t, err, codes.FailedPrecondition, refusal.BeingDeleted, "is being deleted")
	fake.failure = nil
	if a.retry() || len(fake.svis) > 0 {
		t.Errorf("after another try the data plane has %v", fake.svis)
	}

	_, err = a.svis.delete(ctx, name, true)
	must.Succeed(t, err)
	_, err = a.svis.delete(ctx, name, false)
	wantRefusal(t, err, codes.NotFound, refusal.Missing, "does not exist")
	_, err = a.vrfs.delete(ctx, vrfNames.prefix+"vrf-one", false)
	must.Succeed(t, err)
	if len(fake.vrfs) != 1 {
		t.Errorf("VRFs %v, want one", fake.vrfs)
	}
}

// TestRoutingSurvivesRestart checks that VRFs and SVIs are in the state file, and that the data plane
// gets them before the ports.
func TestRoutingSurvivesRestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	a := open(t, path, newFakePlane(true))
	createNetwork(t, a, "net-blue", 10)
	_, err := a.vrfs.create(t.Context(), "vrf-one", vrfSpec(t))
	must.Succeed(t, err)
	_, err = a.svis.create(t.Context(), "svi-blue", gateway(t, blue, "10.1.0.1/24"))
	must.Succeed(t, err)
	must.Succeed(t, a.Close())

	fake := newFakePlane(true)
	a = open(t, path, fake)
	if svi := fake.svis["svi-blue"]; svi.Network.VLAN != 10 || svi.VRF != "vrf-one" ||
		len(svi.Prefixes) != 1 || len(fake.vrfs) != 1 {
		t.Errorf("after the restart: %v, %v", fake.vrfs, fake.svis)
	}
	if want := a.wanted(); len(want.SVIs) != 1 || !slices.Equal(want.VRFs, []string{"vrf-one"}) {
		t.Errorf("wanted: %+v", want)
	}
}

// TestRoutingOfClients checks that the rules of clients hold for VRFs and SVIs.
func TestRoutingOfClients(t *testing.T) {
	a, _ := withVRFs(t)
	_, err := a.svis.create(t.Context(), "svi-red", gateway(t, red, "10.2.0.1/24"))
	must.Succeed(t, err)
	one := as(t, "{subject: CN=a, networks: [net-blue], vlans: [], vnis: [], vrfs: [vrf-one, vrf-a-*], "+
		"svis: [svi-a-*, svi-red], mostVRFs: 2, mostSVIs: 1}")
	none := as(t, "{subject: CN=b, networks: ['*'], ports: ['*'], vlans: [], vnis: []}")

	vrf := func(id string) error {
		_, err := a.vrfs.create(one, id, vrfSpec(t))
		return err
	}
	wantRefusal(t, vrf("vrf-b-1"), codes.PermissionDenied, refusal.NotInRule, "VRF vrf-b-1")
	wantRefusal(t, vrf("vrf-two"), codes.PermissionDenied, refusal.NotInRule, "VRF vrf-two")
	must.Succeed(t, vrf("vrf-a-1"))
	wantRefusal(t, vrf("vrf-a-2"), codes.ResourceExhausted, refusal.LimitReached, "has 2")

	svi := func(id, network, vrf, prefix string) error {
		spec := gateway(t, network, prefix)
		spec.Vrf = "vrfs/" + vrf
		_, err := a.svis.create(one, id, spec)
		return err
	}
	wantRefusal(t, svi("svi-b-1", blue, "vrf-one", "10.1.0.1/24"), codes.PermissionDenied,
		refusal.NotInRule, "SVI svi-b-1")
	wantRefusal(t, svi("svi-a-1", red, "vrf-one", "10.1.0.1/24"), codes.PermissionDenied,
		refusal.NotInRule, "SVI svi-a-1")
	wantRefusal(t, svi("svi-a-1", blue, "vrf-two", "10.1.0.1/24"), codes.PermissionDenied,
		refusal.NotInRule, "SVI svi-a-1")
	err = svi("svi-a-1", blue, "vrf-one", "10.2.0.1/16")
	wantRefusal(t, err, codes.AlreadyExists, refusal.SubnetInUse, "by an SVI of another client")
	if strings.Contains(fmt.Sprint(err), "svi-red") {
		t.Errorf("%v names an SVI of another client", err)
	}
	must.Succeed(t, svi("svi-a-1", blue, "vrf-one", "10.1.0.1/24"))
	wantRefusal(t, svi("svi-a-2", blue, "vrf-one", "10.9.0.1/24"), codes.AlreadyExists,
		refusal.NetworkHasSVI, "svi-a-1")

	// The client may see the id svi-red, and not its network.
	_, err = a.svis.get(one, sviNames.prefix+"svi-red")
	wantRefusal(t, err, codes.PermissionDenied, refusal.NotInRule, "svi-red")
	svis, _, err := a.svis.list(one, 0, "")
	if err != nil || len(svis) != 1 || svis[0].GetName() != sviNames.prefix+"svi-a-1" {
		t.Errorf("list of SVIs: %v, %v", svis, err)
	}

	vrfs, _, err := a.vrfs.list(none, 0, "")
	if err != nil || len(vrfs) != 0 {
		t.Errorf("a client without VRFs sees %v, %v", vrfs, err)
	}
	svis, _, err = a.svis.list(none, 0, "")
	if err != nil || len(svis) != 0 {
		t.Errorf("a client without SVIs sees %v, %v", svis, err)
	}
	_, err = a.networks.delete(none, blue, false)
	wantRefusal(t, err, codes.FailedPrecondition, refusal.NetworkInUse,
		"in use by an SVI of another client")
}

// FuzzPrefix checks that the prefixes of messages are valid or refused.
func FuzzPrefix(f *testing.F) {
	f.Add(true, uint32(10<<24|1), []byte{}, int32(24))
	f.Add(false, uint32(0), netip.MustParseAddr("fd00::1").AsSlice(), int32(64))
	f.Add(false, uint32(0), []byte{1, 2, 3}, int32(-5))
	f.Fuzz(func(t *testing.T, is4 bool, v4 uint32, v6 []byte, length int32) {
		m := &netcommon.IPPrefix{Len: length, Addr: &netcommon.IPAddress{}}
		if m.Addr.V4OrV6 = (&netcommon.IPAddress_V6Addr{V6Addr: v6}); is4 {
			m.Addr.V4OrV6 = &netcommon.IPAddress_V4Addr{V4Addr: v4}
		}

		prefix := prefixOf(m)
		if prefix.IsValid() && (prefix.Addr().Is4() != is4 || prefix.Bits() != int(length)) {
			t.Errorf("%v is %s", m, prefix)
		}
		if isGateway(prefix) && (prefix.Addr().IsMulticast() || prefix.Addr().IsLoopback() ||
			prefix.Addr().IsUnspecified() || prefix.Bits() < 1) {
			t.Errorf("%s is a gateway", prefix)
		}
	})
}
