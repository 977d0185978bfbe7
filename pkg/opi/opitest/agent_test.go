// SPDX-License-Identifier: Apache-2.0

package opitest

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	inventory "github.com/opiproject/opi-api/inventory/v1/gen/go"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
)

// peer is a plain gRPC client of an agent.
type peer struct {
	t        *testing.T
	networks evpn.LogicalBridgeServiceClient
	ports    evpn.BridgePortServiceClient
	inv      inventory.InventoryServiceClient
}

func dial(t *testing.T, a *Agent) peer {
	t.Helper()
	conn, err := grpc.NewClient(a.address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })

	return peer{
		t: t, networks: evpn.NewLogicalBridgeServiceClient(conn),
		ports: evpn.NewBridgePortServiceClient(conn),
		inv:   inventory.NewInventoryServiceClient(conn),
	}
}

func (p peer) createNetwork(id string, spec *evpn.LogicalBridgeSpec) (*evpn.LogicalBridge, error) {
	return p.networks.CreateLogicalBridge(p.t.Context(), &evpn.CreateLogicalBridgeRequest{
		LogicalBridgeId: id, LogicalBridge: &evpn.LogicalBridge{Spec: spec},
	})
}

func (p peer) createPort(id string, spec *evpn.BridgePortSpec) (*evpn.BridgePort, error) {
	return p.ports.CreateBridgePort(p.t.Context(), &evpn.CreateBridgePortRequest{
		BridgePortId: id, BridgePort: &evpn.BridgePort{Name: "ignored", Spec: spec},
	})
}

func (p peer) getNetwork(id string) (*evpn.LogicalBridge, error) {
	return p.networks.GetLogicalBridge(p.t.Context(),
		&evpn.GetLogicalBridgeRequest{Name: networkPrefix + id})
}

func (p peer) getPort(name string) (*evpn.BridgePort, error) {
	return p.ports.GetBridgePort(p.t.Context(), &evpn.GetBridgePortRequest{Name: name})
}

func (p peer) deletePort(name string, allowMissing bool) error {
	_, err := p.ports.DeleteBridgePort(p.t.Context(),
		&evpn.DeleteBridgePortRequest{Name: name, AllowMissing: allowMissing})
	return err
}

func (p peer) deleteNetwork(id string) error {
	_, err := p.networks.DeleteLogicalBridge(p.t.Context(),
		&evpn.DeleteLogicalBridgeRequest{Name: networkPrefix + id})
	return err
}

func (p peer) updatePort(
	id string, spec *evpn.BridgePortSpec, mask []string, allowMissing bool,
) (*evpn.BridgePort, error) {
	req := &evpn.UpdateBridgePortRequest{
		BridgePort: &evpn.BridgePort{Name: portPrefix + id, Spec: spec}, AllowMissing: allowMissing,
	}
	if mask != nil {
		req.UpdateMask = &fieldmaskpb.FieldMask{Paths: mask}
	}
	return p.ports.UpdateBridgePort(p.t.Context(), req)
}

// want fails the test unless err has the code and contains the text.
func (p peer) want(err error, code codes.Code, text string) {
	p.t.Helper()
	if status.Code(err) != code || !strings.Contains(status.Convert(err).Message(), text) {
		p.t.Errorf("got %v, want code %s with %q", err, code, text)
	}
}

func (p peer) ok(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

var (
	mac1 = []byte{2, 0, 0, 0, 0, 1}
	mac2 = []byte{2, 0, 0, 0, 0, 2}
)

func access(mac []byte, networks ...string) *evpn.BridgePortSpec {
	return &evpn.BridgePortSpec{MacAddress: mac, Ptype: evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS,
		LogicalBridges: networks}
}

func trunk(mac []byte, networks ...string) *evpn.BridgePortSpec {
	return &evpn.BridgePortSpec{MacAddress: mac, Ptype: evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK,
		LogicalBridges: networks}
}

const (
	blue = networkPrefix + "net-blue"
	red  = networkPrefix + "net-red"
	p1   = "vf-0000-03-00-2"
	p2   = "vf-0000-03-00-3"
)

// TestObservedBehaviour has one case for each observation of a live opi-evpn-bridge. Each starts
// with the networks net-blue (VLAN 10) and net-red (VLAN 20) and no port.
func TestObservedBehaviour(t *testing.T) {
	tests := []struct {
		name string
		run  func(p peer, a *Agent)
	}{
		{"create new is DOWN and PENDING", func(p peer, a *Agent) {
			lb, err := p.createNetwork("net-new", &evpn.LogicalBridgeSpec{VlanId: 30})
			p.ok(err)
			if lb.Status.OperStatus != evpn.LBOperStatus_LB_OPER_STATUS_DOWN ||
				lb.Status.Components[0].Status != evpn.CompStatus_COMP_STATUS_PENDING {
				p.t.Errorf("network is %v", lb.Status)
			}

			bp, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			if bp.Status.OperStatus != evpn.BPOperStatus_BP_OPER_STATUS_DOWN ||
				bp.Status.Components[0].Status != evpn.CompStatus_COMP_STATUS_PENDING {
				p.t.Errorf("port is %v", bp.Status)
			}
		}},
		{"create of another spec gives the old object", func(p peer, a *Agent) {
			_, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			bp, err := p.createPort(p1, access(mac2, red))
			p.ok(err)
			if !proto.Equal(bp.Spec, access(mac1, blue)) {
				p.t.Errorf("got %v", bp.Spec)
			}

			lb, err := p.createNetwork("net-blue", &evpn.LogicalBridgeSpec{VlanId: 99})
			p.ok(err)
			if lb.Spec.VlanId != 10 {
				p.t.Errorf("got VLAN %d", lb.Spec.VlanId)
			}
		}},
		{"create while TO_BE_DELETED gives the dying object", func(p peer, a *Agent) {
			a.Set(func(b *Behaviour) { b.StuckDelete = true })
			_, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			p.ok(p.deletePort(portPrefix+p1, false))
			bp, err := p.createPort(p1, access(mac2, blue))
			p.ok(err)
			if bp.Status.OperStatus != evpn.BPOperStatus_BP_OPER_STATUS_TO_BE_DELETED ||
				!bytes.Equal(bp.Spec.MacAddress, mac1) {
				p.t.Errorf("got %v", bp)
			}
		}},
		{"create without id chooses a UUID, name is ignored", func(p peer, a *Agent) {
			bp, err := p.createPort("", access(mac1, blue))
			p.ok(err)
			if id := strings.TrimPrefix(bp.Name, portPrefix); !uuidForm.MatchString(id) {
				p.t.Errorf("name %q", bp.Name)
			}
		}},
		{"create with a bad id", func(p peer, a *Agent) {
			for _, id := range []string{"Net_1", "abc", "123e4567-e89b-42d3-a456-426614174000"} {
				_, err := p.createPort(id, access(mac1, blue))
				p.want(err, codes.Unknown, "user-settable ID must")
				_, err = p.createNetwork(id, &evpn.LogicalBridgeSpec{VlanId: 30})
				p.want(err, codes.Unknown, "user-settable ID must")
			}
		}},
		{"required field absent", func(p peer, a *Agent) {
			_, err := p.createPort(p1, nil)
			p.want(err, codes.Unknown, "missing required field")
			_, err = p.createPort(p1, access(nil, blue))
			p.want(err, codes.Unknown, "missing required field")
			_, err = p.createPort(p1,
				&evpn.BridgePortSpec{MacAddress: mac1, LogicalBridges: []string{blue}})
			p.want(err, codes.Unknown, "missing required field")
			_, err = p.createNetwork("net-new", &evpn.LogicalBridgeSpec{})
			p.want(err, codes.Unknown, "missing required field")
			_, err = p.getPort("")
			p.want(err, codes.Unknown, "missing required field")
		}},
		{"invalid argument", func(p peer, a *Agent) {
			_, err := p.createNetwork("net-new", &evpn.LogicalBridgeSpec{VlanId: 5000})
			p.want(err, codes.InvalidArgument, "")
			_, err = p.createPort(p1, access(mac1))
			p.want(err, codes.InvalidArgument, "")
			_, err = p.createPort(p1, access(mac1, blue, red))
			p.want(err, codes.InvalidArgument, "")
			_, err = p.createPort(p1, access(mac1, "no name"))
			p.want(err, codes.InvalidArgument, "")
		}},
		{"VLAN 4095 and a VLAN twice are taken", func(p peer, a *Agent) {
			_, err := p.createNetwork("net-last", &evpn.LogicalBridgeSpec{VlanId: 4095})
			p.ok(err)
			_, err = p.createNetwork("net-twin", &evpn.LogicalBridgeSpec{VlanId: 10})
			p.ok(err)
		}},
		{"MAC addresses of any length are taken", func(p peer, a *Agent) {
			_, err := p.createPort(p1, access([]byte{1, 2, 3}, blue))
			p.ok(err)
			_, err = p.createPort(p2, access([]byte("00:11:22:33:44:55"), blue))
			p.ok(err)
		}},
		{"network does not exist", func(p peer, a *Agent) {
			for _, name := range []string{
				networkPrefix + "net-none", "4", "logicalBridges/net-blue",
			} {
				_, err := p.createPort(p1, access(mac1, name))
				p.want(err, codes.Unknown, "the referenced Logical Bridge has not been found")
			}
		}},
		{"same MAC on the same network", func(p peer, a *Agent) {
			_, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			_, err = p.createPort(p2, access(mac1, blue))
			p.want(err, codes.Unknown, "already associated with the bridge port mac")
		}},
		{"a trunk to a missing network leaves a phantom reference", func(p peer, a *Agent) {
			_, err := p.createPort(p1, trunk(mac1, blue, networkPrefix+"net-none"))
			p.want(err, codes.Unknown, "has not been found")
			_, err = p.createPort(p1, trunk(mac1, blue))
			p.want(err, codes.Unknown, "already associated")
			p.want(p.deleteNetwork("net-blue"), codes.Unknown, "is not empty")
		}},
		{"VNI in use", func(p peer, a *Agent) {
			_, err := p.createNetwork("net-vni1",
				&evpn.LogicalBridgeSpec{VlanId: 30, Vni: proto.Uint32(100)})
			p.ok(err)
			_, err = p.createNetwork("net-vni2",
				&evpn.LogicalBridgeSpec{VlanId: 31, Vni: proto.Uint32(100)})
			p.want(err, codes.Unknown, "the VNI is already in use")
		}},
		{"trunk of all networks before there was one", func(p peer, a *Agent) {
			a.Kill()
			p.ok(a.Run())
			_, err := dial(p.t, a).createPort(p1, trunk(mac1))
			p.want(err, codes.Unknown, "key not found")
		}},
		{"get, update, delete of what is missing", func(p peer, a *Agent) {
			_, err := p.getPort(portPrefix + p1)
			p.want(err, codes.NotFound, "")
			_, err = p.updatePort(p1, access(mac1, blue), nil, false)
			p.want(err, codes.NotFound, "")
			p.want(p.deletePort(portPrefix+p1, false), codes.NotFound, "")
			p.ok(p.deletePort(portPrefix+p1, true))
			_, err = p.updatePort(p1, access(mac1, blue), nil, true)
			p.ok(err)
			_, err = p.getPort(portPrefix + p1)
			p.ok(err)
		}},
		{"the names of the proto are nobody's", func(p peer, a *Agent) {
			_, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			_, err = p.getPort("bridgePorts/" + p1)
			p.want(err, codes.NotFound, "")
		}},
		{"malformed name", func(p peer, a *Agent) {
			_, err := p.getPort("//network opi/ports/x")
			p.want(err, codes.Unknown, "malformed")
			p.want(p.deletePort("//network opi/ports/x", true), codes.Unknown, "malformed")
		}},
		{"delete is done at once", func(p peer, a *Agent) {
			_, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			p.ok(p.deletePort(portPrefix+p1, false))
			_, err = p.getPort(portPrefix + p1)
			p.want(err, codes.NotFound, "")
			p.ok(p.deleteNetwork("net-blue"))
		}},
		{"delete that cannot be done stays TO_BE_DELETED with an error", func(p peer, a *Agent) {
			a.Set(func(b *Behaviour) { b.StuckDelete = true })
			_, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			p.ok(p.deletePort(portPrefix+p1, false))
			bp, err := p.getPort(portPrefix + p1)
			p.ok(err)
			if bp.Status.OperStatus != evpn.BPOperStatus_BP_OPER_STATUS_TO_BE_DELETED ||
				bp.Status.Components[0].Status != evpn.CompStatus_COMP_STATUS_ERROR {
				p.t.Errorf("got %v", bp.Status)
			}
		}},
		{"delete and update while TO_BE_DELETED", func(p peer, a *Agent) {
			a.Set(func(b *Behaviour) { b.StuckDelete = true })
			_, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			p.ok(p.deletePort(portPrefix+p1, false))
			p.ok(p.deletePort(portPrefix+p1, false))
			_, err = p.updatePort(p1, access(mac1, blue), nil, false)
			p.want(err, codes.Unknown, "in to be deleted status")
		}},
		{"update checks required fields before the mask", func(p peer, a *Agent) {
			_, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			_, err = p.updatePort(p1, &evpn.BridgePortSpec{MacAddress: mac2},
				[]string{"spec.mac_address"}, false)
			p.want(err, codes.Unknown, "missing required field")
		}},
		{"update with a bad mask", func(p peer, a *Agent) {
			_, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			_, err = p.updatePort(p1, access(mac1, blue), []string{"spec.nothing"}, false)
			p.want(err, codes.Unknown, "invalid field path")
		}},
		{"update of networks does not move the references", func(p peer, a *Agent) {
			_, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			_, err = p.updatePort(p1, access(mac1, networkPrefix+"net-none"), nil, false)
			p.ok(err)
			_, err = p.updatePort(p1, access(mac1, red), nil, false)
			p.ok(err)
			p.want(p.deleteNetwork("net-blue"), codes.Unknown, "is not empty")
			p.ok(p.deleteNetwork("net-red"))
			_, err = p.getNetwork("net-red")
			p.want(err, codes.NotFound, "")
			if err := p.deletePort(portPrefix+p1, true); err == nil {
				p.t.Error("a port whose network is gone was deleted")
			}
		}},
		{"an update that changes nothing realises again", func(p peer, a *Agent) {
			a.Set(func(b *Behaviour) {
				b.Realise = func(string) error { return errors.New("no netdev") }
			})
			_, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			bp, err := p.getPort(portPrefix + p1)
			p.ok(err)
			if bp.Status.OperStatus != evpn.BPOperStatus_BP_OPER_STATUS_DOWN ||
				bp.Status.Components[0].Details != "no netdev" {
				p.t.Errorf("got %v, want DOWN and an error", bp.Status)
			}

			a.Set(func(b *Behaviour) { b.Realise = nil })
			_, err = p.updatePort(p1, access(mac1, blue), nil, false)
			p.ok(err)
			bp, err = p.getPort(portPrefix + p1)
			p.ok(err)
			if bp.Status.OperStatus != evpn.BPOperStatus_BP_OPER_STATUS_UP {
				p.t.Errorf("got %v, want UP", bp.Status)
			}
		}},
		{"delete of a network in use", func(p peer, a *Agent) {
			_, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			p.want(p.deleteNetwork("net-blue"), codes.Unknown, "the LogicalBridge is not empty")
		}},
		{"list before there was a port is NotFound, after it is empty", func(p peer, a *Agent) {
			_, err := p.ports.ListBridgePorts(p.t.Context(), &evpn.ListBridgePortsRequest{})
			p.want(err, codes.NotFound, "")
			_, err = p.createPort(p1, access(mac1, blue))
			p.ok(err)
			p.ok(p.deletePort(portPrefix+p1, false))
			list, err := p.ports.ListBridgePorts(p.t.Context(), &evpn.ListBridgePortsRequest{})
			p.ok(err)
			if len(list.BridgePorts) != 0 {
				p.t.Errorf("got %v", list)
			}
		}},
		{"list pages", func(p peer, a *Agent) {
			for i := range 260 {
				_, err := p.createPort("", access([]byte{2, 0, 0, 0, byte(i >> 8), byte(i)}, blue))
				p.ok(err)
			}

			_, err := p.ports.ListBridgePorts(p.t.Context(),
				&evpn.ListBridgePortsRequest{PageSize: -1})
			p.want(err, codes.InvalidArgument, "")
			_, err = p.ports.ListBridgePorts(p.t.Context(),
				&evpn.ListBridgePortsRequest{PageToken: "nobody's"})
			p.want(err, codes.NotFound, "")
			list, err := p.ports.ListBridgePorts(p.t.Context(), &evpn.ListBridgePortsRequest{})
			p.ok(err)
			if len(list.BridgePorts) != 50 {
				p.t.Errorf("default page has %d", len(list.BridgePorts))
			}

			list, err = p.ports.ListBridgePorts(p.t.Context(),
				&evpn.ListBridgePortsRequest{PageSize: 1000})
			p.ok(err)
			if len(list.BridgePorts) != 250 {
				p.t.Errorf("largest page has %d", len(list.BridgePorts))
			}

			list, err = p.ports.ListBridgePorts(p.t.Context(),
				&evpn.ListBridgePortsRequest{PageSize: 1000, PageToken: list.NextPageToken})
			p.ok(err)
			if len(list.BridgePorts) != 10 || list.NextPageToken != "" {
				p.t.Errorf("last page has %d and token %q", len(list.BridgePorts),
					list.NextPageToken)
			}
		}},
		{"inventory ends the process", func(p peer, a *Agent) {
			_, err := p.inv.GetInventory(p.t.Context(), &inventory.GetInventoryRequest{Name: "x"})
			p.want(err, codes.Unavailable, "")
		}},
		{"the VTEP comes back filled in", func(p peer, a *Agent) {
			lb, err := p.getNetwork("net-blue")
			p.ok(err)
			if lb.Spec.VtepIpPrefix == nil {
				p.t.Error("no vtep_ip_prefix")
			}
		}},
		{"a graceful stop deletes everything, also when persistent", func(p peer, a *Agent) {
			a.Set(func(b *Behaviour) { b.Persistent = true })
			_, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			a.Stop()
			if got := append(a.Ports(), a.Networks()...); len(got) != 0 {
				p.t.Errorf("still there: %s", got)
			}
		}},
		{"a crash loses everything", func(p peer, a *Agent) {
			_, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			a.Kill()
			if got := append(a.Ports(), a.Networks()...); len(got) != 0 {
				p.t.Errorf("still there: %s", got)
			}
		}},
		{"after a crash a persistent agent has stale UP and forgotten DOWN",
			func(p peer, a *Agent) {
				a.Set(func(b *Behaviour) { b.Persistent = true })
				_, err := p.createPort(p1, access(mac1, blue))
				p.ok(err)
				_, err = p.getPort(portPrefix + p1)
				p.ok(err)
				a.Set(func(b *Behaviour) { b.UpDelay = time.Hour })
				_, err = p.createPort(p2, access(mac2, blue))
				p.ok(err)
				a.Set(func(b *Behaviour) { b.UpDelay = 0 })
				a.Kill()
				p.ok(a.Run())
				p = dial(p.t, a)
				for id, want := range map[string]evpn.BPOperStatus{
					p1: evpn.BPOperStatus_BP_OPER_STATUS_UP,
					p2: evpn.BPOperStatus_BP_OPER_STATUS_DOWN,
				} {
					bp, err := p.getPort(portPrefix + id)
					p.ok(err)
					if bp.Status.OperStatus != want {
						p.t.Errorf("%s is %v, want %v", id, bp.Status.OperStatus, want)
					}
				}

				_, err = p.updatePort(p2, access(mac2, blue), nil, false)
				p.ok(err)
				bp, err := p.getPort(portPrefix + p2)
				p.ok(err)
				if bp.Status.OperStatus != evpn.BPOperStatus_BP_OPER_STATUS_UP {
					p.t.Errorf("after an update %s is %v", p2, bp.Status.OperStatus)
				}
			}},
		{"a blind agent", func(p peer, a *Agent) {
			a.Set(func(b *Behaviour) { b.Blind = true })
			_, err := p.createPort(p1, access(mac1, blue))
			p.ok(err)
			bp, err := p.getPort(portPrefix + p1)
			p.ok(err)
			list, err := p.ports.ListBridgePorts(p.t.Context(), &evpn.ListBridgePortsRequest{})
			p.ok(err)
			if bp.Spec != nil || len(list.BridgePorts) != 0 {
				p.t.Errorf("got %v and %v", bp, list)
			}
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			a := Start(t)
			p := dial(t, a)
			_, err := p.createNetwork("net-blue", &evpn.LogicalBridgeSpec{VlanId: 10})
			p.ok(err)
			_, err = p.createNetwork("net-red", &evpn.LogicalBridgeSpec{VlanId: 20})
			p.ok(err)
			test.run(p, a)
		})
	}
}

func TestFaults(t *testing.T) {
	a := Start(t)
	p := dial(t, a)
	a.FailNext("CreateLogicalBridge", 2, codes.ResourceExhausted, "busy")
	a.DropNext("CreateLogicalBridge", 1)

	for range 2 {
		_, err := p.createNetwork("net-blue", &evpn.LogicalBridgeSpec{VlanId: 10})
		p.want(err, codes.ResourceExhausted, "busy")
	}

	if got := a.Networks(); len(got) != 0 {
		t.Errorf("a failed create made %s", got)
	}

	_, err := p.createNetwork("net-blue", &evpn.LogicalBridgeSpec{VlanId: 10})
	p.want(err, codes.Unavailable, "")
	if got := a.Networks(); !slices.Equal(got, []string{"net-blue"}) {
		t.Errorf("after a dropped create there is %s", got)
	}
	if got := a.Calls("CreateLogicalBridge"); got != 3 {
		t.Errorf("%d calls, want 3", got)
	}

	a.Set(func(b *Behaviour) { b.Unimplemented = []string{"GetLogicalBridge"} })
	_, err = p.getNetwork("net-blue")
	p.want(err, codes.Unimplemented, "")
}
