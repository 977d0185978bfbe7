// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
)

// fakePlane is a data plane in memory.
type fakePlane struct {
	networks  map[string]uint32 // VNIs
	segments  map[string]plane.Segment
	ports     map[string]string // networks and VLANs
	vrfs      map[string]plane.VRF
	svis      map[string]plane.SVI
	failure   error             // of all calls
	vtep      netip.Addr        // of the uplink
	functions map[string]string // ports by MAC
	vlanAware bool
	mtu       int // the largest MTU of networks
}

func newFakePlane(vlanAware bool) *fakePlane {
	return &fakePlane{
		networks: map[string]uint32{}, ports: map[string]string{}, vlanAware: vlanAware,
		segments: map[string]plane.Segment{},
		vrfs:     map[string]plane.VRF{}, svis: map[string]plane.SVI{},
	}
}

func (p *fakePlane) VLANAware() bool { return p.vlanAware }

func (p *fakePlane) EnsureNetwork(n plane.Segment) (mtu int, err error) {
	if p.failure == nil {
		p.networks[n.ID], p.segments[n.ID] = n.VNI, n
	}
	return p.mtu, p.failure
}

func (p *fakePlane) CheckVTEP(_ uint32, vtep netip.Addr) error {
	if vtep.IsValid() && p.vtep.IsValid() && vtep != p.vtep {
		return fmt.Errorf("%s %w: netdev p0 has %s", vtep, plane.ErrOtherVTEP, p.vtep)
	}
	return nil
}

func (p *fakePlane) PortWithMAC(mac net.HardwareAddr) (id string, err error) {
	if id := p.functions[mac.String()]; id != "" {
		return id, nil
	}
	return "", errors.New("0 functions have it")
}

func (p *fakePlane) RemoveNetwork(id string) error {
	if p.failure == nil {
		delete(p.networks, id)
	}
	return p.failure
}

func (p *fakePlane) Attach(port string, to plane.Membership) error {
	if p.failure == nil {
		p.ports[port] = ""
		for _, n := range to.Networks {
			p.ports[port] += fmt.Sprintf("%s@%d ", n.ID, n.VLAN)
		}
		p.ports[port] = strings.TrimSpace(p.ports[port])
	}
	return p.failure
}

func (p *fakePlane) Detach(port string) error {
	if p.failure == nil {
		delete(p.ports, port)
	}
	return p.failure
}

func (p *fakePlane) EnsureVRF(v plane.VRF) error {
	if p.failure == nil {
		p.vrfs[v.ID] = v
	}
	return p.failure
}

func (p *fakePlane) RemoveVRF(id string) error {
	if p.failure == nil {
		delete(p.vrfs, id)
	}
	return p.failure
}

func (p *fakePlane) IsStale(string) bool { return false }

func (p *fakePlane) EnsureSVI(s plane.SVI) error {
	if p.failure == nil {
		p.svis[s.ID] = s
	}
	return p.failure
}

func (p *fakePlane) RemoveSVI(s plane.SVI) error {
	if p.failure == nil {
		delete(p.svis, s.ID)
	}
	return p.failure
}

func (p *fakePlane) Sweep(plane.Wanted) error       { return nil }
func (p *fakePlane) Netdevs() ([]string, error)     { return nil, nil }
func (p *fakePlane) Watch(func(plane.Change)) error { return nil }
func (p *fakePlane) Close()                         {}

// fakeFilter is a source filter that does nothing.
type fakeFilter struct{}

func (fakeFilter) Sweep() error   { return nil }
func (fakeFilter) Restore() error { return nil }

// fakeCounters are the counters of a port and of a network's VXLAN port.
type fakeCounters struct{}

func (fakeCounters) All() (map[plane.Object]plane.Traffic, error) {
	return map[plane.Object]plane.Traffic{
		{Kind: plane.KindPort, ID: p1}: {
			TransmittedFrames: 1, TransmittedBytes: 2, ReceivedFrames: 3, ReceivedBytes: 4,
			Dropped: 5, Filtered: 6,
		},
		{Kind: plane.KindNetwork, ID: "net-blue"}: {TransmittedFrames: 11, Filtered: 12},
	}, nil
}

func (c fakeCounters) Port(id string) (plane.Traffic, bool, error) {
	all, err := c.All()
	traffic, counted := all[plane.Object{Kind: plane.KindPort, ID: id}]
	return traffic, counted, err
}

// newTestAgent returns an agent with a fake data plane, and with the networks net-blue (VLAN 10)
// and net-red (VLAN 20, VNI 200).
func newTestAgent(t *testing.T) (*Agent, *fakePlane) {
	t.Helper()
	fake := newFakePlane(false)
	a := open(t, filepath.Join(t.TempDir(), "state.db"), fake)
	s := networkServer{Agent: a}
	for id, spec := range map[string]*evpn.LogicalBridgeSpec{
		"net-blue": {VlanId: 10}, "net-red": {VlanId: 20, Vni: proto.Uint32(200)},
	} {
		if _, err := s.CreateLogicalBridge(t.Context(), &evpn.CreateLogicalBridgeRequest{
			LogicalBridgeId: id, LogicalBridge: &evpn.LogicalBridge{Spec: spec},
		}); err != nil {
			t.Fatal(err)
		}
	}

	return a, fake
}

// open starts an agent with a state file and a data plane.
func open(t *testing.T, path string, p dataPlane) *Agent {
	t.Helper()
	config := Config{State: path, Plane: plane.Config{Uplinks: []plane.Uplink{{Name: "p0"}}}}
	a, err := newAgent(config, testr.New(t), withPlane(p))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.state.Close() })
	t.Cleanup(a.queue.ShutDown)

	a.reconcileAll()
	return a
}

// withPlane returns what newAgent opens its data plane with.
func withPlane(p dataPlane) func() (opened, error) {
	return func() (opened, error) { return opened{p, fakeFilter{}, fakeCounters{}}, nil }
}

// accessPort returns the spec of an ACCESS port.
func accessPort(mac string, networks ...string) *evpn.BridgePortSpec {
	hw, _ := net.ParseMAC(mac)
	return &evpn.BridgePortSpec{MacAddress: hw, Ptype: evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS,
		LogicalBridges: networks}
}

func trunkPort(mac string, networks ...string) *evpn.BridgePortSpec {
	spec := accessPort(mac, networks...)
	spec.Ptype = evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK
	return spec
}

const (
	blue = "//network.opiproject.org/bridges/net-blue"
	red  = "//network.opiproject.org/bridges/net-red"
	p1   = "vf-0000-03-00-2"
	mac1 = "02:00:00:00:00:01"
	mac2 = "02:00:00:00:00:02"
)

func (a *Agent) create(
	t *testing.T, id string, spec *evpn.BridgePortSpec,
) (*evpn.BridgePort, error) {
	return portServer{Agent: a}.CreateBridgePort(t.Context(),
		&evpn.CreateBridgePortRequest{BridgePortId: id, BridgePort: &evpn.BridgePort{Spec: spec}})
}

func (a *Agent) delete(t *testing.T, id string, allowMissing bool) error {
	_, err := portServer{Agent: a}.DeleteBridgePort(t.Context(),
		&evpn.DeleteBridgePortRequest{Name: portNames.prefix + id, AllowMissing: allowMissing})
	return err
}

func (a *Agent) update(
	t *testing.T, id string, spec *evpn.BridgePortSpec, allowMissing bool, mask ...string,
) (*evpn.BridgePort, error) {
	req := &evpn.UpdateBridgePortRequest{
		BridgePort:   &evpn.BridgePort{Name: portNames.prefix + id, Spec: spec},
		AllowMissing: allowMissing,
	}
	if mask != nil {
		req.UpdateMask = &fieldmaskpb.FieldMask{Paths: mask}
	}
	return portServer{Agent: a}.UpdateBridgePort(t.Context(), req)
}

func wantCode(t *testing.T, err error, code codes.Code, text string) {
	t.Helper()
	if status.Code(err) != code || !strings.Contains(status.Convert(err).Message(), text) {
		t.Errorf("got %v, want %s with %q", err, code, text)
	}
}

func TestCreatePortStatusCodes(t *testing.T) {
	a, _ := newTestAgent(t)
	if _, err := a.create(t, p1, accessPort(mac1, blue)); err != nil {
		t.Fatal(err)
	}

	trunk := accessPort(mac2, blue)
	trunk.Ptype = evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK
	untyped := accessPort(mac2, blue)
	untyped.Ptype = 0
	tests := []struct {
		name string
		id   string
		spec *evpn.BridgePortSpec
		code codes.Code
		says string
	}{
		{"the same again", p1, accessPort(mac1, blue), codes.OK, ""},
		{"the same, network by the proto's name", p1, accessPort(mac1, "logicalBridges/net-blue"),
			codes.OK, ""},
		{"another MAC", p1, accessPort(mac2, blue), codes.AlreadyExists, mac1},
		{"another network", p1, accessPort(mac1, red), codes.AlreadyExists, "net-blue"},
		{"MAC in use", "vf-0000-03-00-3", accessPort(mac1, blue), codes.AlreadyExists, p1},
		{"MAC in use elsewhere", "vf-0000-03-00-3", accessPort(mac1, red), codes.OK, ""},
		{"no id", "", accessPort(mac2, blue), codes.InvalidArgument, "bridge_port_id"},
		{"bad id", "Port_1", accessPort(mac2, blue), codes.InvalidArgument, "4-63 characters"},
		{"no spec", "vf-4", nil, codes.InvalidArgument, "spec"},
		{"no MAC", "vf-4", accessPort("", blue), codes.InvalidArgument, "mac_address"},
		{
			"a router's MAC", "vf-4", accessPort("72:74:00:00:00:01", blue), codes.InvalidArgument,
			"must not begin with 72:74",
		},
		{"MAC of 8 bytes", "vf-4", accessPort("02:00:00:00:00:00:00:01", blue),
			codes.InvalidArgument, "8 bytes"},
		{"group MAC", "vf-4", accessPort("01:00:5e:00:00:01", blue), codes.InvalidArgument,
			"unicast"},
		{"zero MAC", "vf-4", accessPort("00:00:00:00:00:00", blue), codes.InvalidArgument,
			"not zero"},
		{"no type", "vf-4", untyped, codes.InvalidArgument, "ptype"},
		{"trunk", "vf-4", trunk, codes.Unimplemented, "TRUNK"},
		{"no network", "vf-4", accessPort(mac2), codes.InvalidArgument, "exactly one"},
		{"two networks", "vf-4", accessPort(mac2, blue, red), codes.InvalidArgument,
			"exactly one"},
		{"network by VLAN", "vf-4", accessPort(mac2, "10"), codes.InvalidArgument,
			"logical_bridges"},
		{"missing network", "vf-4", accessPort(mac2, networkNames.prefix+"net-none"),
			codes.NotFound, "net-none"},
	}

	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := a.create(t, test.id, test.spec)
			wantCode(t, err, test.code, test.says)
		})
	}
}

// TestOneVLANSpace checks what a VLAN-aware data plane allows and refuses.
func TestOneVLANSpace(t *testing.T) {
	a, fake := newTestAgent(t)
	fake.vlanAware = true

	trunk := func(mac string, networks ...string) *evpn.BridgePortSpec {
		spec := accessPort(mac, networks...)
		spec.Ptype = evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK
		return spec
	}

	if _, err := a.create(t, p1, trunk(mac1, red, blue)); err != nil {
		t.Fatal(err)
	}
	if got, want := fake.ports[p1], "net-blue@10 net-red@20"; got != want {
		t.Errorf("the data plane has %q, want %q", got, want)
	}

	tests := []struct {
		name string
		id   string
		spec *evpn.BridgePortSpec
		code codes.Code
		says string
	}{
		{"the same in another order", p1, trunk(mac1, blue, red), codes.OK, ""},
		{"as an access port", p1, accessPort(mac1, blue), codes.AlreadyExists,
			"TRUNK port with MAC " + mac1 + " on logical bridge net-blue, net-red"},
		{"no network", "vf-4", trunk(mac2), codes.InvalidArgument, "names each that it carries"},
		{"a network twice", "vf-4", trunk(mac2, blue, "logicalBridges/net-blue"),
			codes.InvalidArgument, "only once"},
		{"a missing network", "vf-4", trunk(mac2, blue, networkNames.prefix+"net-none"),
			codes.NotFound, "net-none"},
		{"MAC in use in its second network", "vf-4", accessPort(mac1, red), codes.AlreadyExists,
			p1},
	}

	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := a.create(t, test.id, test.spec)
			wantCode(t, err, test.code, test.says)
		})
	}

	s := networkServer{Agent: a}
	_, err := s.CreateLogicalBridge(t.Context(),
		&evpn.CreateLogicalBridgeRequest{
			LogicalBridgeId: "net-green",
			LogicalBridge:   &evpn.LogicalBridge{Spec: &evpn.LogicalBridgeSpec{VlanId: 20}},
		})

	wantCode(t, err, codes.AlreadyExists, "net-red")
	_, err = s.DeleteLogicalBridge(t.Context(), &evpn.DeleteLogicalBridgeRequest{Name: red})
	wantCode(t, err, codes.FailedPrecondition, p1)

	_, err = s.UpdateLogicalBridge(t.Context(),
		&evpn.UpdateLogicalBridgeRequest{LogicalBridge: &evpn.LogicalBridge{
			Name: blue, Spec: &evpn.LogicalBridgeSpec{VlanId: 20},
		}})

	wantCode(t, err, codes.AlreadyExists, "net-red")
	_, err = s.UpdateLogicalBridge(t.Context(),
		&evpn.UpdateLogicalBridgeRequest{LogicalBridge: &evpn.LogicalBridge{
			Name: blue, Spec: &evpn.LogicalBridgeSpec{VlanId: 11},
		}})

	wantCode(t, err, codes.OK, "")
	if got, want := fake.ports[p1], "net-blue@11 net-red@20"; got != want {
		t.Errorf("after the VLAN id changed the data plane has %q, want %q", got, want)
	}

	// Two networks have the same VLAN id, from a time with the other mode. Clients can ask for them
	// again.
	fake.vlanAware = false
	create := func(id string) error {
		_, err := s.CreateLogicalBridge(t.Context(),
			&evpn.CreateLogicalBridgeRequest{
				LogicalBridgeId: id,
				LogicalBridge:   &evpn.LogicalBridge{Spec: &evpn.LogicalBridgeSpec{VlanId: 40}},
			})
		return err
	}

	wantCode(t, errors.Join(create("net-pink"), create("net-grey")), codes.OK, "")
	fake.vlanAware = true
	wantCode(t, errors.Join(create("net-pink"), create("net-grey")), codes.OK, "")
	wantCode(t, create("net-gold"), codes.AlreadyExists, "vlan_id 40")
}

func TestNetworkStatusCodes(t *testing.T) {
	a, fake := newTestAgent(t)
	fake.vtep = netip.MustParseAddr("10.0.0.1")
	vtep := func(length int32, address ...byte) *evpn.LogicalBridgeSpec {
		addr := &netcommon.IPAddress{V4OrV6: &netcommon.IPAddress_V6Addr{V6Addr: address}}
		if len(address) == 4 {
			v4 := binary.BigEndian.Uint32(address)
			addr.V4OrV6 = &netcommon.IPAddress_V4Addr{V4Addr: v4}
		}
		return &evpn.LogicalBridgeSpec{
			VlanId: 1, Vni: proto.Uint32(77),
			VtepIpPrefix: &netcommon.IPPrefix{Len: length, Addr: addr},
		}
	}
	noVNI := vtep(24, 10, 0, 0, 1)
	noVNI.Vni = nil
	tests := []struct {
		name string
		id   string
		spec *evpn.LogicalBridgeSpec
		code codes.Code
		says string
	}{
		{"the same again", "net-blue", &evpn.LogicalBridgeSpec{VlanId: 10}, codes.OK, ""},
		{"another VLAN", "net-blue", &evpn.LogicalBridgeSpec{VlanId: 11}, codes.AlreadyExists,
			"VLAN 10"},
		{"another VNI", "net-blue", &evpn.LogicalBridgeSpec{VlanId: 10, Vni: proto.Uint32(5)},
			codes.AlreadyExists, "VNI 0"},
		{"no id", "", &evpn.LogicalBridgeSpec{VlanId: 10}, codes.OK, ""},
		{"bad id", "net", &evpn.LogicalBridgeSpec{VlanId: 10}, codes.InvalidArgument, "4-63"},
		{"no spec", "net-green", nil, codes.InvalidArgument, "spec"},
		{"VLAN 0", "net-green", &evpn.LogicalBridgeSpec{}, codes.InvalidArgument, "1-4094"},
		{"VLAN 4095", "net-green", &evpn.LogicalBridgeSpec{VlanId: 4095},
			codes.InvalidArgument, "1-4094"},
		{"VNI 0", "net-green", &evpn.LogicalBridgeSpec{VlanId: 1, Vni: proto.Uint32(0)},
			codes.InvalidArgument, "1-16777215"},
		{"VNI too large", "net-green", &evpn.LogicalBridgeSpec{
			VlanId: 1, Vni: proto.Uint32(1 << 24),
		}, codes.InvalidArgument, "1-16777215"},
		{"VNI in use", "net-green", &evpn.LogicalBridgeSpec{VlanId: 1, Vni: proto.Uint32(200)},
			codes.AlreadyExists, "net-red"},
		{"VTEP without a VNI", "net-green", noVNI, codes.InvalidArgument, "without a vni"},
		{"VTEP without an address", "net-green", vtep(24), codes.InvalidArgument, "vtep_ip_prefix"},
		{"VTEP of 5 bytes", "net-green", vtep(24, 10, 0, 0, 0, 1), codes.InvalidArgument,
			"vtep_ip_prefix"},
		{"VTEP without a length", "net-green", vtep(0, 10, 0, 0, 1), codes.InvalidArgument,
			"prefix length"},
		{"VTEP with a long length", "net-green", vtep(33, 10, 0, 0, 1), codes.InvalidArgument,
			"prefix length"},
		{"VTEP of another machine", "net-green", vtep(24, 10, 0, 0, 2), codes.InvalidArgument,
			"10.0.0.2 is not an address of the uplink: netdev p0 has 10.0.0.1"},
		{"VTEP over IPv6", "net-green", vtep(64, netip.MustParseAddr("fd00::2").AsSlice()...),
			codes.InvalidArgument, "fd00::2 is not an address of the uplink"},
		{"VTEP of the uplink", "net-vtep", vtep(24, 10, 0, 0, 1), codes.OK, ""},
		{"the same VTEP again", "net-vtep", vtep(24, 10, 0, 0, 1), codes.OK, ""},
		{"VTEP 0.0.0.0", "net-vtep", vtep(0, 0, 0, 0, 0), codes.AlreadyExists, "and VTEP 10.0.0.1"},
		{"any VTEP", "net-red", &evpn.LogicalBridgeSpec{
			VlanId: 20, Vni: proto.Uint32(200), VtepIpPrefix: vtep(0, 0, 0, 0, 0).VtepIpPrefix,
		}, codes.OK, ""},
	}

	s := networkServer{Agent: a}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := s.CreateLogicalBridge(t.Context(), &evpn.CreateLogicalBridgeRequest{
				LogicalBridgeId: test.id, LogicalBridge: &evpn.LogicalBridge{Spec: test.spec},
			})
			wantCode(t, err, test.code, test.says)
		})
	}

	t.Run("VNI without an uplink", func(t *testing.T) {
		uplinks := a.cfg.Plane.Uplinks
		defer func() { a.cfg.Plane.Uplinks = uplinks }()
		a.cfg.Plane.Uplinks = nil
		_, err := s.CreateLogicalBridge(t.Context(),
			&evpn.CreateLogicalBridgeRequest{
				LogicalBridgeId: "net-green",
				LogicalBridge: &evpn.LogicalBridge{
					Spec: &evpn.LogicalBridgeSpec{VlanId: 1, Vni: proto.Uint32(7)},
				},
			})

		wantCode(t, err, codes.FailedPrecondition, "--uplink")
	})

	t.Run("delete in use", func(t *testing.T) {
		if _, err := a.create(t, p1, accessPort(mac1, blue)); err != nil {
			t.Fatal(err)
		}
		_, err := s.DeleteLogicalBridge(t.Context(), &evpn.DeleteLogicalBridgeRequest{Name: blue})
		wantCode(t, err, codes.FailedPrecondition, p1)
	})

	t.Run("missing", func(t *testing.T) {
		_, err := s.GetLogicalBridge(t.Context(),
			&evpn.GetLogicalBridgeRequest{Name: "logicalBridges/net-none"})
		wantCode(t, err, codes.NotFound, "net-none")
		_, err = s.DeleteLogicalBridge(t.Context(),
			&evpn.DeleteLogicalBridgeRequest{Name: "logicalBridges/net-none"})
		wantCode(t, err, codes.NotFound, "net-none")
		_, err = s.DeleteLogicalBridge(t.Context(),
			&evpn.DeleteLogicalBridgeRequest{Name: "logicalBridges/net-none", AllowMissing: true})
		wantCode(t, err, codes.OK, "")
		_, err = s.GetLogicalBridge(t.Context(),
			&evpn.GetLogicalBridgeRequest{Name: "somebody/net-none"})
		wantCode(t, err, codes.InvalidArgument, "logicalBridges/<id>")
	})

	t.Run("update", func(t *testing.T) {
		update := func(spec *evpn.LogicalBridgeSpec, mask ...string) error {
			_, err := s.UpdateLogicalBridge(t.Context(),
				&evpn.UpdateLogicalBridgeRequest{
					LogicalBridge: &evpn.LogicalBridge{Name: blue, Spec: spec},
					UpdateMask:    &fieldmaskpb.FieldMask{Paths: mask},
				})
			return err
		}

		wantCode(t, update(&evpn.LogicalBridgeSpec{VlanId: 12}, "spec.vlan_id"), codes.OK, "")
		wantCode(t, update(&evpn.LogicalBridgeSpec{}, "spec.vlan_id"),
			codes.InvalidArgument, "vlan_id")
		if got := a.networks.objects["net-blue"].spec.GetVlanId(); got != 12 {
			t.Errorf("VLAN %d, want 12", got)
		}

		for _, test := range []struct {
			name  string
			spec  *evpn.LogicalBridgeSpec
			masks []string
			want  *evpn.LogicalBridgeSpec
		}{
			{"a field is added", &evpn.LogicalBridgeSpec{Vni: proto.Uint32(12)}, nil,
				&evpn.LogicalBridgeSpec{VlanId: 12, Vni: proto.Uint32(12)}},
			{"a client that does not know of VNIs", &evpn.LogicalBridgeSpec{VlanId: 13}, nil,
				&evpn.LogicalBridgeSpec{VlanId: 13, Vni: proto.Uint32(12)}},
			{"what only the agent sets", nil, []string{"status", "status.oper_status", "name"},
				&evpn.LogicalBridgeSpec{VlanId: 13, Vni: proto.Uint32(12)}},
			{"a field is removed", nil, []string{"spec.vni", "status"},
				&evpn.LogicalBridgeSpec{VlanId: 13}},
			{"the whole spec", &evpn.LogicalBridgeSpec{VlanId: 12}, []string{"*"},
				&evpn.LogicalBridgeSpec{VlanId: 12}},
		} {
			wantCode(t, update(test.spec, test.masks...), codes.OK, "")
			got := a.networks.objects["net-blue"].spec
			if diff := cmp.Diff(test.want, got, protocmp.Transform()); diff != "" {
				t.Errorf("%s: -want +got\n%s", test.name, diff)
			}
		}

		wantCode(t, update(nil), codes.InvalidArgument, "spec is required")
		wantCode(t, update(nil, "spec.status"), codes.InvalidArgument, "update_mask")
	})
}

func TestUpdatePort(t *testing.T) {
	a, fake := newTestAgent(t)
	_, err := a.update(t, p1, accessPort(mac1, blue), false)
	wantCode(t, err, codes.NotFound, p1)
	if _, err := a.update(t, p1, accessPort(mac1, blue), true); err != nil {
		t.Fatal(err)
	}

	tests := []struct {
		name string
		spec *evpn.BridgePortSpec
		mask []string
		want *evpn.BridgePortSpec // nil: InvalidArgument
	}{
		{"MAC only", accessPort(mac2, red), []string{"spec.mac_address"}, accessPort(mac2, blue)},
		{"networks only", accessPort(mac1, red), []string{"spec.logical_bridges"},
			accessPort(mac2, red)},
		{"whole spec", accessPort(mac1, blue), nil, accessPort(mac1, blue)},
		{"no such field", accessPort(mac2, red), []string{"spec.nothing"}, nil},
		{"the name", accessPort(mac2, red), []string{"name"}, accessPort(mac1, blue)},
		{"the status", accessPort(mac2, red), []string{"status"}, accessPort(mac1, blue)},
		{"a required field taken away", &evpn.BridgePortSpec{}, []string{"spec.mac_address"}, nil},
	}

	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := a.update(t, p1, test.spec, false, test.mask...)
			if test.want == nil {
				wantCode(t, err, codes.InvalidArgument, "")
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got.GetSpec(), protocmp.Transform()); diff != "" {
				t.Errorf("spec (-want +got):\n%s", diff)
			}
			if !strings.HasPrefix(fake.ports[p1], networksOf(a.ports.objects[p1].spec)[0]+"@") {
				t.Errorf("the data plane has it in %s", fake.ports[p1])
			}
		})
	}
}

// TestDeleteThatFails checks that a port whose removal fails stays and says why, also after a
// restart, and that it is removed as soon as possible.
func TestDeleteThatFails(t *testing.T) {
	a, fake := newTestAgent(t)
	if _, err := a.create(t, p1, accessPort(mac1, blue)); err != nil {
		t.Fatal(err)
	}

	fake.failure = errors.New("device or resource busy")
	wantCode(t, a.delete(t, p1, true), codes.Internal, "device or resource busy")
	wantCode(t, a.delete(t, p1, true), codes.Internal, "device or resource busy")

	if err := a.Close(); err != nil {
		t.Fatal(err)
	}

	a = open(t, a.cfg.State, fake)
	got, err := portServer{Agent: a}.GetBridgePort(t.Context(),
		&evpn.GetBridgePortRequest{Name: "bridgePorts/" + p1})
	if err != nil {
		t.Fatal(err)
	}
	if got.Status.OperStatus != evpn.BPOperStatus_BP_OPER_STATUS_TO_BE_DELETED ||
		got.Status.Components[0].Details != "device or resource busy" {
		t.Errorf("status %v, want TO_BE_DELETED with the reason", got.Status)
	}

	_, err = a.create(t, p1, accessPort(mac1, blue))
	wantCode(t, err, codes.FailedPrecondition, "being deleted")
	_, err = a.update(t, p1, accessPort(mac1, blue), false)
	wantCode(t, err, codes.FailedPrecondition, "being deleted")

	fake.failure = nil
	if a.retry() {
		t.Error("something still fails")
	}
	if len(a.ports.objects) != 0 || len(fake.ports) != 0 {
		t.Errorf("left: %v on the data plane, %d in the agent", fake.ports, len(a.ports.objects))
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if a = open(t, a.cfg.State, fake); len(a.ports.objects) != 0 {
		t.Error("the port is in the state again")
	}
}

func TestCreateSurvivesRestart(t *testing.T) {
	a, fake := newTestAgent(t)
	if _, err := a.create(t, p1, accessPort(mac1, red)); err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}

	clear(fake.networks)
	clear(fake.ports)
	open(t, a.cfg.State, fake)
	if diff := cmp.Diff(map[string]uint32{"net-blue": 0, "net-red": 200},
		fake.networks); diff != "" {
		t.Errorf("networks (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]string{p1: "net-red@20"}, fake.ports); diff != "" {
		t.Errorf("ports (-want +got):\n%s", diff)
	}
}

func TestPage(t *testing.T) {
	ids := []string{"aaaa", "bbbb", "cccc", "dddd", "eeee"}
	var got []string
	token := ""
	for range 10 {
		part, next, err := page(ids, 2, token)
		if err != nil {
			t.Fatal(err)
		}

		got = append(got, part...)
		// This also deletes the id in the token.
		ids = slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return id == "bbbb" })
		if token = next; token == "" {
			break
		}
	}

	if want := []string{"aaaa", "bbbb", "cccc", "dddd", "eeee"}; !slices.Equal(got, want) {
		t.Errorf("got %s, want %s", got, want)
	}
	if _, _, err := page(ids, -1, ""); status.Code(err) != codes.InvalidArgument {
		t.Errorf("negative size: %v", err)
	}
	if _, _, err := page(ids, 1, "!"); status.Code(err) != codes.InvalidArgument {
		t.Errorf("bad token: %v", err)
	}

	many := make([]string, 300)
	for size, want := range map[int32]int{0: 50, 250: 250, 1000: 250} {
		for i := range many {
			many[i] = "id-" + strings.Repeat("x", i/100+1)
		}
		if part, next, err := page(many, size, ""); err != nil || len(part) != want || next == "" {
			t.Errorf("size %d: %d, %q, %v, want %d", size, len(part), next, err, want)
		}
	}
}

func TestMetrics(t *testing.T) {
	a, fake := newTestAgent(t)
	if _, err := a.create(t, p1, accessPort(mac1, blue)); err != nil {
		t.Fatal(err)
	}

	fake.failure = errors.New("no netdev")
	if _, err := a.create(t, "vf-0000-03-00-3", accessPort(mac2, blue)); err != nil {
		t.Fatal(err)
	}

	info := &grpc.UnaryServerInfo{FullMethod: evpn.BridgePortService_GetBridgePort_FullMethodName}
	fail := func(context.Context, any) (any, error) { return nil, status.Error(codes.NotFound, "") }
	_, _ = a.observe(t.Context(), nil, info, fail)

	const want = `
# HELP opi_bridge_networks Logical bridges, by state.
# TYPE opi_bridge_networks gauge
opi_bridge_networks{state="deleting"} 0
opi_bridge_networks{state="down"} 0
opi_bridge_networks{state="up"} 2
# HELP opi_bridge_ports Bridge ports, by state.
# TYPE opi_bridge_ports gauge
opi_bridge_ports{state="deleting"} 0
opi_bridge_ports{state="down"} 1
opi_bridge_ports{state="up"} 1
# HELP opi_bridge_svis SVIs, by state.
# TYPE opi_bridge_svis gauge
opi_bridge_svis{state="deleting"} 0
opi_bridge_svis{state="down"} 0
opi_bridge_svis{state="up"} 0
# HELP opi_bridge_vrfs VRFs, by state.
# TYPE opi_bridge_vrfs gauge
opi_bridge_vrfs{state="deleting"} 0
opi_bridge_vrfs{state="down"} 0
opi_bridge_vrfs{state="up"} 0
`

	names := []string{"opi_bridge_networks", "opi_bridge_ports", "opi_bridge_vrfs",
		"opi_bridge_svis"}
	if err := testutil.CollectAndCompare(a, strings.NewReader(want), names...); err != nil {
		t.Error(err)
	}
	if n := testutil.CollectAndCount(a, "opi_bridge_rpc_duration_seconds"); n != 1 {
		t.Errorf("%d RPC series, want 1", n)
	}
}

func TestRecoverPanic(t *testing.T) {
	a, _ := newTestAgent(t)
	defect := func(context.Context, any) (any, error) { panic("defect") }
	_, err := a.recoverPanic(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: "/x/Y"}, defect)
	wantCode(t, err, codes.Internal, "")
}

func FuzzNames(f *testing.F) {
	for _, seed := range []string{blue, "logicalBridges/net-blue", "bridgePorts/" + p1, "net-blue",
		"//network.opiproject.org/bridges/../x", "logicalBridges/", strings.Repeat("a", 63)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, name string) {
		for _, k := range []names{networkNames, portNames, vrfNames, sviNames} {
			id, err := k.parseName(name)
			if err != nil {
				if status.Code(err) != codes.InvalidArgument {
					t.Errorf("%q: %v", name, err)
				}
				continue
			}

			if name != k.prefix+id && name != k.protoAlias+id {
				t.Errorf("%q was read as %q", name, id)
			}
		}
		_, _, _ = page([]string{"aaaa"}, 1, name)
	})
}
