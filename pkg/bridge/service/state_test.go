// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/protobuf/proto"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// record is a record of the state file.
type record struct {
	bucket, id string
	value      []byte
}

// writeState makes a state file from records.
func writeState(t testing.TB, path string, records []record) {
	t.Helper()
	file, err := boltfile.Open(path, func(*boltfile.Tx) error { return nil })
	must.Succeed(t, err)

	must.Succeed(t, file.Update(func(tx *boltfile.Tx) error {
		for _, r := range records {
			if err := tx.CreateBucket(r.bucket); err != nil {
				return err
			}
			if r.id == "" {
				continue // bbolt has no such key
			}
			if err := tx.Put(r.bucket, []byte(r.id), r.value); err != nil {
				return err
			}
		}
		return nil
	}))

	must.Succeed(t, file.Close())
}

// FuzzState checks that a state file with any records is refused as corrupt, or that every object
// in it can be served. The package boltfile checks the form of the file itself, and has a fuzz
// target too.
func FuzzState(f *testing.F) {
	marshal := func(m proto.Message) []byte {
		data, err := proto.Marshal(m)
		must.Succeed(f, err)
		return data
	}

	network := marshal(&evpn.LogicalBridge{Spec: segmentOf(10, 1000)})
	port := marshal(&evpn.BridgePort{Spec: accessPort(mac1, blue)})
	leaving := marshal(&evpn.BridgePort{
		Spec: accessPort(mac1, blue), Status: &evpn.BridgePortStatus{OperStatus: stateDeleting},
	})
	filter := marshal(&opibridge.NetworkOptions{
		SourceFilter: opibridge.SourceFilter_SOURCE_FILTER_MAC, Mtu: 1500,
	})
	addresses := marshal(&opibridge.PortOptions{Addresses: []string{"10.1.0.2"}})
	vrf := marshal(&evpn.Vrf{Spec: &evpn.VrfSpec{
		LoopbackIpPrefix: prefixMessage(f, "10.0.0.1/32"),
	}})
	svi := marshal(&evpn.Svi{Spec: gateway(f, blue, "10.1.0.1/24", "fd00:1::1/64")})
	f.Add("net-blue", network, p1, port, filter, addresses, "vrf-one", vrf, "svi-blue", svi)
	f.Add("net-red", network, p1, leaving, []byte{}, []byte{}, "vrf-one", vrf, "svi-blue", svi)
	// These records have no spec, an unknown filter, and no IP address.
	f.Add("net-blue", []byte{}, p1, []byte{}, []byte{8, 99}, []byte{10, 1, 'x'}, "vrf-one",
		[]byte{}, "svi-blue", []byte{})
	f.Add("../x", network, "P", marshal(&evpn.BridgePort{Spec: accessPort("", blue)}),
		filter, addresses, "V", vrf, "S", marshal(&evpn.Svi{Spec: &evpn.SviSpec{}}))

	f.Fuzz(func(
		t *testing.T, networkID string, network []byte, portID string,
		port, networkOptions, portOptions []byte, vrfID string, vrf []byte, sviID string,
		svi []byte,
	) {
		path := filepath.Join(must.MemoryDir(t), "state.db")
		writeState(t, path, []record{
			{networkNames.bucket, networkID, network}, {portNames.bucket, portID, port},
			{networkNames.bucket + "-options", networkID, networkOptions},
			{portNames.bucket + "-options", portID, portOptions},
			{vrfNames.bucket, vrfID, vrf}, {sviNames.bucket, sviID, svi},
		})

		a, err := newAgent(Config{State: path, SourceFilter: true}, logr.Discard(),
			withPlane(newFakePlane(true)))
		if errors.Is(err, boltfile.ErrCorrupt) {
			return
		}

		must.Succeed(t, err)
		defer a.Close()

		for id, n := range a.networks.objects {
			if s := a.segment(id); s.VLAN < 1 || s.VLAN > plane.MaxVLAN || s.VNI > plane.MaxVNI ||
				n.spec == nil {
				t.Errorf("network %q is %+v", id, s)
			}
		}

		for id, p := range a.ports.objects {
			if m := a.membership(id, p.spec); len(m.Networks) == 0 || len(m.MAC) != 6 {
				t.Errorf("port %q is %+v", id, m)
			}
		}

		for id, s := range a.svis.objects {
			d := a.svi(id, s.spec)
			if len(d.Prefixes) == 0 || len(d.MAC) != 6 || d.VRF == "" {
				t.Errorf("SVI %q is %+v", id, d)
			}
		}

		a.reconcileAll()
		for _, list := range []func() error{
			func() error { _, _, err := a.networks.list(t.Context(), 0, ""); return err },
			func() error { _, _, err := a.ports.list(t.Context(), 0, ""); return err },
			func() error { _, _, err := a.vrfs.list(t.Context(), 0, ""); return err },
			func() error { _, _, err := a.svis.list(t.Context(), 0, ""); return err },
		} {
			must.Succeed(t, list())
		}
	})
}

// TestStateWithStrangeRecords checks that the error names a record that no agent can have written.
func TestStateWithStrangeRecords(t *testing.T) {
	networks, ports := record{bucket: networkNames.bucket}, record{bucket: portNames.bucket}
	for says, r := range map[string]record{
		"": {networkNames.bucket, "net-blue",
			marshalled(t, &evpn.LogicalBridge{Spec: segmentOf(10)})},
		`logical-bridges "net-blue": vlan_id 70000: must be 1-4094`: {
			networkNames.bucket, "net-blue",
			marshalled(t, &evpn.LogicalBridge{Spec: segmentOf(70000)}),
		},
		`logical-bridges "net-blue": spec is required`: {networkNames.bucket, "net-blue", nil},
		`logical-bridges "../x"`: {
			networkNames.bucket, "../x", marshalled(t, &evpn.LogicalBridge{Spec: segmentOf(10)}),
		},
		`bridge-ports "` + p1 + `": logical_bridges: has 0, an ACCESS port has exactly one`: {
			portNames.bucket, p1, marshalled(t, &evpn.BridgePort{Spec: accessPort(mac1)}),
		},
		`vrfs "vrf-one": spec is required`: {vrfNames.bucket, "vrf-one", nil},
		`svis "svi-blue": gw_ip_prefix: has 0, must have 1-16`: {
			sviNames.bucket, "svi-blue", marshalled(t, &evpn.Svi{Spec: gateway(t, blue)}),
		},
		`vxlan-remotes "net-blue": ParseAddr("x")`: {remotesBucket, "net-blue", []byte("x")},
		`bridge-ports-options "` + p1 + `": options of bridge port `: {
			portNames.bucket + "-options",
			p1, marshalled(t, &opibridge.PortOptions{Addresses: []string{"x"}}),
		},
	} {
		path := filepath.Join(t.TempDir(), "state.db")
		writeState(t, path, []record{networks, ports, r})
		a, err := newAgent(Config{State: path}, logr.Discard(), withPlane(newFakePlane(false)))
		if says == "" {
			must.Succeed(t, err)
			must.Succeed(t, a.Close())
			continue
		}

		if !errors.Is(err, boltfile.ErrCorrupt) || !strings.Contains(err.Error(), says) ||
			!strings.Contains(err.Error(), "--new-state") {
			t.Errorf("%v, want %v that says %q and what to do", err, boltfile.ErrCorrupt, says)
		}
	}
}

// TestStateWithRouterMAC checks that the agent starts with a port of an older version that has a MAC
// address of routers, and says why the port is down.
func TestStateWithRouterMAC(t *testing.T) {
	port := accessPort("72:74:00:00:00:01", blue)
	path := filepath.Join(t.TempDir(), "state.db")
	writeState(t, path, []record{
		{networkNames.bucket, "net-blue", marshalled(t, &evpn.LogicalBridge{Spec: segmentOf(10)})},
		{portNames.bucket, p1, marshalled(t, &evpn.BridgePort{Spec: port})},
	})

	a, err := newAgent(Config{State: path}, logr.Discard(), withPlane(newFakePlane(false)))
	must.Succeed(t, err)
	defer a.Close()

	a.reconcileAll()
	err = portController{a}.effectiveFailure(a.ports.objects[p1])
	if err == nil || !strings.Contains(err.Error(), "must not begin with 72:74") {
		t.Errorf("failure %v", err)
	}
}

func marshalled(t *testing.T, m proto.Message) []byte {
	t.Helper()
	data, err := proto.Marshal(m)
	must.Succeed(t, err)
	return data
}
