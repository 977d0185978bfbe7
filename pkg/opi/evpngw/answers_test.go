// SPDX-License-Identifier: Apache-2.0

package evpngw_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	inventory "github.com/opiproject/opi-api/inventory/v1/gen/go"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/evpngw"
)

// answers is a connection to an agent that gives prepared answers. A method without answers returns
// an empty message. The last answer of a method is repeated.
type answers map[string][]answer

// answer is what an agent answers to one call.
type answer struct {
	message proto.Message
	err     error
}

func (a answers) Invoke(
	_ context.Context, method string, _, reply any, _ ...grpc.CallOption,
) error {
	name := path.Base(method)
	if len(a[name]) == 0 {
		return nil
	}

	next := a[name][0]
	if len(a[name]) > 1 {
		a[name] = a[name][1:]
	}
	if next.message != nil {
		proto.Merge(reply.(proto.Message), next.message)
	}

	return next.err
}

func (answers) NewStream(
	context.Context, *grpc.StreamDesc, string, ...grpc.CallOption,
) (grpc.ClientStream, error) {
	return nil, errors.ErrUnsupported
}

func fails(code codes.Code, message string) answer {
	return answer{err: status.Error(code, message)}
}

// bridges is a page of a list of LogicalBridges.
func bridges(next string, ids ...string) answer {
	page := &evpn.ListLogicalBridgesResponse{NextPageToken: next}
	for _, id := range ids {
		page.LogicalBridges = append(page.LogicalBridges, bridge(id, nil))
	}
	return answer{message: page}
}

func bridge(id string, s *evpn.LogicalBridgeStatus) *evpn.LogicalBridge {
	return &evpn.LogicalBridge{
		Name: "//network.opiproject.org/bridges/" + id,
		Spec: &evpn.LogicalBridgeSpec{VlanId: 10}, Status: s,
	}
}

// TestPages checks that a list is complete or an error, because a missing object would be created
// again.
func TestPages(t *testing.T) {
	const most = 16 << 10
	many := slices.Repeat([]string{"a"}, most)
	manyPages := make([]answer, 0, 2<<10)
	for i := range cap(manyPages) {
		manyPages = append(manyPages, bridges(fmt.Sprint(i)))
	}

	for name, test := range map[string]struct {
		pages   []answer
		want    []string
		kind    error // of the dialect
		problem string
	}{
		"no objects":              {pages: []answer{bridges("")}},
		"before the first object": {pages: []answer{fails(codes.NotFound, "no bridges")}},
		"two pages": {
			pages: []answer{bridges("t", "a", "b"), bridges("", "c")},
			want:  []string{"a", "b", "c"},
		},
		"an empty page before more": {
			pages: []answer{bridges("t"), bridges("", "c")}, want: []string{"c"},
		},
		"as many as there may be": {pages: []answer{bridges("", many...)}, want: many},
		"one more than there may be": {
			pages: []answer{bridges("t", many...), bridges("", "b")},
			kind:  opi.ErrUnsupported, problem: "more than 16384 objects",
		},
		"pages without end": {
			pages: manyPages, kind: opi.ErrUnsupported, problem: "more than 1024 pages",
		},
		"the same page again": {
			pages: []answer{bridges("t", "a")},
			kind:  opi.ErrUnsupported, problem: "the same page token again",
		},
		"a lost object": {
			pages: []answer{fails(codes.NotFound, "unable to find key bridges/a")},
			kind:  opi.ErrFailed, problem: "because it has lost one",
		},
		"a restart between pages": {
			pages: []answer{bridges("t", "a"), fails(codes.NotFound, "no page token t")},
			kind:  opi.ErrUnavailable, problem: "forgot the page token",
		},
		"a lost object on a later page": {
			pages: []answer{bridges("t", "a"), fails(codes.NotFound, "no key bridges/b")},
			kind:  opi.ErrUnavailable, problem: "forgot the page token",
		},
		"an error on the first page": {
			pages: []answer{fails(codes.Internal, "disk full")}, problem: "disk full",
		},
		"an error on a later page": {
			pages:   []answer{bridges("t", "a"), fails(codes.Internal, "disk full")},
			problem: "disk full",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			agent := evpngw.Dialect().New(answers{"ListLogicalBridges": test.pages})
			all, err := agent.Networks(t.Context())
			if !says(err, test.problem) || test.kind != nil && !errors.Is(err, test.kind) {
				t.Errorf("error %v, want a %v that says %q", err, test.kind, test.problem)
			}

			var got []string
			for _, n := range all {
				got = append(got, n.ID)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("networks (-want +got):\n%s", diff)
			}
		})
	}
}

// TestErrors checks that an error of the agent is returned for each call that a method makes.
func TestErrors(t *testing.T) {
	const id = "a"
	vni := uint32(7)
	port := opi.Port{ID: id, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Networks: []string{"blue"}}
	trunk := port
	trunk.Trunk = true

	bare := answer{message: &evpn.BridgePort{}} // the agent is asked for its list then
	serving := answer{message: &healthpb.HealthCheckResponse{
		Status: healthpb.HealthCheckResponse_SERVING,
	}}
	up := answer{message: bridge("blue", &evpn.LogicalBridgeStatus{
		OperStatus: evpn.LBOperStatus_LB_OPER_STATUS_UP,
	})}

	noHealth := fails(codes.Unimplemented, "unknown service")
	gateway := opi.Gateway{VRF: "a", MAC: port.MAC, Prefixes: []netip.Prefix{
		netip.MustParsePrefix("10.1.0.1/24"), netip.MustParsePrefix("fd00::1/64"),
	}}

	// second returns the error of a call that returns a value too
	second := func(_ any, err error) error { return err }

	for name, test := range map[string]struct {
		call func(ctx context.Context, a opi.Agent) error
		// rpcs are the calls to the agent. Each of them fails in a subtest of its own.
		rpcs []string
		// answers are the agent's answers to the other calls.
		answers answers
	}{
		"Alive": {
			call: func(ctx context.Context, a opi.Agent) error { return a.Alive(ctx) },
			rpcs: []string{"GetBridgePort"},
		},
		"Network": {
			call: func(ctx context.Context, a opi.Agent) error {
				return second(a.Network(ctx, id))
			},
			rpcs: []string{"GetLogicalBridge", "ListLogicalBridges"},
		},
		"CreateNetwork": {
			call: func(ctx context.Context, a opi.Agent) error {
				return a.CreateNetwork(ctx, opi.Network{ID: id, VLAN: 10, VNI: &vni}, netip.Addr{})
			},
			rpcs:    []string{"Check", "ListVrfs", "CreateLogicalBridge"},
			answers: answers{"Check": {noHealth}},
		},
		"DeleteNetwork": {
			call: func(ctx context.Context, a opi.Agent) error { return a.DeleteNetwork(ctx, id) },
			rpcs: []string{"ListBridgePorts", "DeleteLogicalBridge"},
		},
		"Port": {
			call: func(ctx context.Context, a opi.Agent) error {
				return second(a.Port(ctx, id))
			},
			rpcs:    []string{"GetBridgePort", "ListBridgePorts"},
			answers: answers{"GetBridgePort": {bare}},
		},
		"Ports": {
			call: func(ctx context.Context, a opi.Agent) error { return second(a.Ports(ctx)) },
			rpcs: []string{"ListBridgePorts"},
		},
		"CreatePort": {
			call: func(ctx context.Context, a opi.Agent) error { return a.CreatePort(ctx, port) },
			rpcs: []string{"ListBridgePorts", "CreateBridgePort"},
		},
		"CreatePort of a trunk": {
			call: func(ctx context.Context, a opi.Agent) error {
				return a.CreatePort(ctx, trunk)
			},
			rpcs:    []string{"GetLogicalBridge", "ListBridgePorts", "CreateBridgePort"},
			answers: answers{"GetLogicalBridge": {up}},
		},
		"RetryPort": {
			call: func(ctx context.Context, a opi.Agent) error { return a.RetryPort(ctx, port) },
			rpcs: []string{"UpdateBridgePort"},
		},
		"DeletePort": {
			call: func(ctx context.Context, a opi.Agent) error { return a.DeletePort(ctx, id) },
			rpcs: []string{"DeleteBridgePort"},
		},
		"VRF": {
			call: func(ctx context.Context, a opi.Agent) error { return second(a.VRF(ctx, id)) },
			rpcs: []string{"GetVrf", "ListVrfs"},
		},
		"CreateVRF": {
			call: func(ctx context.Context, a opi.Agent) error {
				return a.CreateVRF(ctx, opi.VRF{ID: id, Loopback: gateway.Prefixes[0].Addr()})
			},
			rpcs: []string{"CreateVrf"},
		},
		"DeleteVRF": {
			call: func(ctx context.Context, a opi.Agent) error { return a.DeleteVRF(ctx, id) },
			rpcs: []string{"DeleteVrf"},
		},
		"Gateway": {
			call: func(ctx context.Context, a opi.Agent) error {
				return second(a.Gateway(ctx, id))
			},
			rpcs: []string{"GetSvi", "ListSvis"},
		},
		"CreateGateway": {
			call: func(ctx context.Context, a opi.Agent) error {
				return a.CreateGateway(ctx, id, gateway)
			},
			rpcs: []string{"CreateSvi"},
		},
		"DeleteGateway": {
			call: func(ctx context.Context, a opi.Agent) error { return a.DeleteGateway(ctx, id) },
			rpcs: []string{"DeleteSvi"},
		},
		"SetNetworkOptions": {
			call: func(ctx context.Context, a opi.Agent) error {
				return second(a.SetNetworkOptions(ctx, opi.Network{ID: id}))
			},
			rpcs: []string{"UpdateNetworkOptions"},
		},
		"SetPortOptions": {
			call: func(ctx context.Context, a opi.Agent) error {
				return a.SetPortOptions(ctx, port)
			},
			rpcs: []string{"UpdatePortOptions"},
		},
		"HostPFs": {
			call: func(ctx context.Context, a opi.Agent) error { return second(a.HostPFs(ctx)) },
			rpcs: []string{"Check", "GetInventory"},
			answers: answers{
				"Check": {serving}, "GetInventory": {{message: &inventory.Inventory{}}},
			},
		},
	} {
		for _, rpc := range test.rpcs {
			t.Run(name+"/"+rpc, func(t *testing.T) {
				t.Parallel()
				agent := answers{}
				for method, answered := range test.answers {
					agent[method] = slices.Clone(answered)
				}
				agent[rpc] = []answer{fails(codes.Internal, "disk full")}

				err := test.call(t.Context(), evpngw.Dialect().New(agent))
				if status.Code(err) != codes.Internal ||
					!strings.Contains(err.Error(), "disk full") {
					t.Errorf("error %v, want the agent's", err)
				}
			})
		}
	}
}

// TestAnsweredErrors checks the errors of an agent that are an answer.
func TestAnsweredErrors(t *testing.T) {
	port := opi.Port{ID: "a", Networks: []string{"blue"}}
	for name, test := range map[string]struct {
		rpc     string
		fails   answer
		call    func(ctx context.Context, a opi.Agent) error
		problem string // "" for success
	}{
		"alive without the port": {
			rpc: "GetBridgePort", fails: fails(codes.NotFound, "unable to find key"),
			call: func(ctx context.Context, a opi.Agent) error { return a.Alive(ctx) },
		},
		"alive without ports": {
			rpc: "GetBridgePort", fails: fails(codes.Unimplemented, "unknown service"),
			call: func(ctx context.Context, a opi.Agent) error { return a.Alive(ctx) },
		},
		"an Update that the agent cannot do": {
			rpc: "UpdateBridgePort", fails: fails(codes.Unimplemented, "not implemented"),
			call: func(ctx context.Context, a opi.Agent) error { return a.RetryPort(ctx, port) },
		},
		"an Update of a port that is gone": {
			rpc: "UpdateBridgePort", fails: fails(codes.NotFound, "unable to find key"),
			call: func(ctx context.Context, a opi.Agent) error { return a.RetryPort(ctx, port) },
		},
		"an Update that fails again": {
			rpc: "UpdateBridgePort", fails: fails(codes.Unknown, "netdev is down"),
			call: func(ctx context.Context, a opi.Agent) error { return a.RetryPort(ctx, port) },
		},
		"an Update that the agent does not answer": {
			rpc: "UpdateBridgePort", fails: fails(codes.Unavailable, "connection refused"),
			call:    func(ctx context.Context, a opi.Agent) error { return a.RetryPort(ctx, port) },
			problem: "connection refused",
		},
		"a port of an agent that has no lists": {
			rpc: "ListBridgePorts", fails: fails(codes.Unimplemented, "not implemented"),
			call: func(ctx context.Context, a opi.Agent) error { return a.CreatePort(ctx, port) },
		},
		"a VNI without VRFs": {
			rpc: "ListVrfs", fails: fails(codes.Unimplemented, "not implemented"),
			call: func(ctx context.Context, a opi.Agent) error {
				return a.CreateNetwork(ctx, opi.Network{ID: "a", VNI: new(uint32(7))}, netip.Addr{})
			},
		},
		"a port without its netdev": {
			rpc: "CreateBridgePort", fails: fails(codes.NotFound, "unable to find key vf3"),
			call: func(ctx context.Context, a opi.Agent) error {
				return a.CreatePort(ctx, port)
			},
			problem: "vf3, which is a netdev that is missing on the xPU",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			agent := evpngw.Dialect().New(answers{test.rpc: {test.fails}})
			if err := test.call(t.Context(), agent); !says(err, test.problem) {
				t.Errorf("error %v, want %q", err, test.problem)
			}
		})
	}
}

// TestStates checks the state of an object for each operational status and component.
func TestStates(t *testing.T) {
	components := func(states ...evpn.CompStatus) []*evpn.Component {
		var all []*evpn.Component
		for _, state := range states {
			all = append(all, &evpn.Component{Name: "frr", Status: state, Details: "no route"})
		}
		return all
	}
	const (
		isUp       = evpn.LBOperStatus_LB_OPER_STATUS_UP
		isDown     = evpn.LBOperStatus_LB_OPER_STATUS_DOWN
		isDeleted  = evpn.LBOperStatus_LB_OPER_STATUS_TO_BE_DELETED
		isBroken   = evpn.CompStatus_COMP_STATUS_ERROR
		isPending  = evpn.CompStatus_COMP_STATUS_PENDING
		isFinished = evpn.CompStatus_COMP_STATUS_SUCCESS
	)

	for name, test := range map[string]struct {
		oper       evpn.LBOperStatus
		components []*evpn.Component
		want       opi.Status
	}{
		"up":                      {oper: isUp, want: opi.Status{State: opi.StateUp}},
		"down without components": {oper: isDown, want: opi.Status{State: opi.StatePending}},
		"down and in progress": {
			oper: isDown, components: components(isPending, isFinished),
			want: opi.Status{State: opi.StatePending},
		},
		"down with an error": {
			oper: isDown, components: components(isPending, isBroken),
			want: opi.Status{State: opi.StateFailed, Detail: "frr: no route"},
		},
		"deleting with an error": {
			oper: isDeleted, components: components(isBroken),
			want: opi.Status{State: opi.StateDeleting, Detail: "frr: no route"},
		},
		"up with an error": {
			oper: isUp, components: components(isBroken, isBroken),
			want: opi.Status{State: opi.StateUp, Detail: "frr: no route; frr: no route"},
		},
		"more components than there may be": {
			oper: isDown, components: append(components(slices.Repeat(
				[]evpn.CompStatus{isPending}, 8)...), components(isBroken)...),
			want: opi.Status{State: opi.StatePending},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			agent := evpngw.Dialect().New(answers{"GetLogicalBridge": {{message: bridge("a",
				&evpn.LogicalBridgeStatus{OperStatus: test.oper, Components: test.components})}}})
			got, err := agent.Network(t.Context(), "a")
			if err != nil || got.Status != test.want {
				t.Errorf("%+v, error %v, want %+v", got.Status, err, test.want)
			}
		})
	}
}
