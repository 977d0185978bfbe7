// SPDX-License-Identifier: Apache-2.0

package dialects_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"net"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const portID = "vf-0000-03-00-2"

var (
	wantedNetwork = opi.Network{ID: "net-blue", VLAN: 10}
	wantedPort    = opi.Port{
		ID: portID, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Networks: []string{"net-blue"},
	}
)

// hostile is a connection to an agent that gives the listed answers, one per call, and then fails.
// It records what the answers say about the port.
type hostile struct {
	mu      sync.Mutex
	answers []byte

	missing bool // reported: the port does not exist
	foreign bool // reported: the port is in another owner's network
	right   bool // reported: the port is up with the wanted properties
	created bool // a creation succeeded, or the agent reported that it has the port
	deleted bool // a deletion succeeded, or the agent reported that it has no port
}

// answer encodes an answer: a gRPC code, and a message or the text of an error.
func answer(code codes.Code, body []byte) []byte {
	length := binary.BigEndian.AppendUint16(nil, uint16(len(body)))
	return slices.Concat([]byte{byte(code)}, length, body)
}

func message(f *testing.F, m proto.Message) []byte {
	body, err := proto.Marshal(m)
	must.Succeed(f, err)
	return answer(codes.OK, body)
}

// Invoke implements [grpc.ClientConnInterface].
func (h *hostile) Invoke(
	_ context.Context, method string, _, reply any, _ ...grpc.CallOption,
) error {
	h.mu.Lock()
	defer h.mu.Unlock()

	if len(h.answers) < 3 {
		return status.Error(codes.Unavailable, "the agent does not answer any more")
	}

	code, length := codes.Code(h.answers[0]%17), int(binary.BigEndian.Uint16(h.answers[1:]))
	body := h.answers[3:]
	body = body[:min(length, len(body))]
	h.answers = h.answers[3+len(body):]

	if code != codes.OK {
		key, named := strings.CutPrefix(string(body), "unable to find key ")
		aNetdev := named && key != "" && !strings.Contains(key, "/") // the netdev of the port
		h.missing = h.missing || code == codes.NotFound && path.Base(method) == "GetBridgePort" &&
			!aNetdev
		h.accept(path.Base(method), code, string(body))
		return status.Error(code, string(body))
	}

	if err := proto.Unmarshal(body, reply.(proto.Message)); err != nil {
		return status.Error(codes.Internal, err.Error())
	}

	h.accept(path.Base(method), code, "")
	switch told := reply.(type) {
	case *evpn.BridgePort:
		if path.Base(method) == "GetBridgePort" {
			h.record(told)
		}
	case *evpn.ListBridgePortsResponse:
		for _, port := range told.GetBridgePorts() {
			if strings.HasSuffix(port.GetName(), portID) {
				h.record(port)
			}
		}
	}

	return nil
}

// accept records whether an answer is evidence of a creation or a deletion.
func (h *hostile) accept(method string, code codes.Code, text string) {
	says := func(what string) bool {
		return code == codes.Unknown && strings.Contains(text, what)
	}
	switch method {
	case "CreateBridgePort":
		h.created = h.created || code == codes.OK || says("already allocated")
	case "DeleteBridgePort":
		h.deleted = h.deleted || code == codes.OK || says("not allocated") || says("no port named")
	}
}

func (h *hostile) record(port *evpn.BridgePort) {
	spec := port.GetSpec()
	networks, trunk := spec.GetLogicalBridges(), spec.GetPtype() == evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK
	foreign := func(name string) bool { return !strings.HasPrefix(path.Base("/"+name), "net-") }
	h.foreign = h.foreign || slices.ContainsFunc(networks, foreign) || trunk && len(networks) == 0
	h.right = h.right ||
		!trunk && spec.GetPtype() != evpn.BridgePortType_BRIDGE_PORT_TYPE_UNSPECIFIED &&
			len(networks) == 1 &&
			strings.HasSuffix(networks[0], "net-blue") &&
			bytes.Equal(spec.GetMacAddress(), wantedPort.MAC) &&
			port.GetStatus().GetOperStatus() == evpn.BPOperStatus_BP_OPER_STATUS_UP
}

// NewStream implements [grpc.ClientConnInterface].
func (*hostile) NewStream(
	context.Context, *grpc.StreamDesc, string, ...grpc.CallOption,
) (grpc.ClientStream, error) {
	return nil, status.Error(codes.Unimplemented, "no streams")
}

// seeds adds answers that were observed.
func seeds(f *testing.F) {
	spec := &evpn.BridgePortSpec{
		MacAddress: wantedPort.MAC, Ptype: evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS,
		LogicalBridges: []string{"//network.opiproject.org/bridges/net-blue"},
	}

	up := &evpn.BridgePortStatus{OperStatus: evpn.BPOperStatus_BP_OPER_STATUS_UP}
	name := "//network.opiproject.org/ports/" + portID
	port := &evpn.BridgePort{Name: name, Spec: spec, Status: up}
	brief := &evpn.BridgePort{
		Name: name, Spec: &evpn.BridgePortSpec{MacAddress: wantedPort.MAC}, Status: up,
	}
	theirs := proto.CloneOf(port)
	theirs.Spec.LogicalBridges[0] = "//network.opiproject.org/bridges/other-red"

	network := &evpn.LogicalBridge{
		Name:   "//network.opiproject.org/bridges/net-blue",
		Spec:   &evpn.LogicalBridgeSpec{VlanId: 10},
		Status: &evpn.LogicalBridgeStatus{OperStatus: evpn.LBOperStatus_LB_OPER_STATUS_UP},
	}

	missing := answer(codes.NotFound, []byte("unable to find key "+name))
	list := func(next string, ports ...*evpn.BridgePort) []byte {
		return message(f, &evpn.ListBridgePortsResponse{BridgePorts: ports, NextPageToken: next})
	}
	none, unserved := list(""), answer(codes.Unimplemented, nil)

	for _, script := range [][][]byte{
		{missing, none, message(f, port), message(f, port)},
		{message(f, port), unserved, none, missing},
		{message(f, brief), list("", port), none, missing, none},
		{message(f, brief), none, message(f, brief)},
		{message(f, brief), list("2", theirs), list("2", port)},
		{message(f, theirs)},
		{answer(codes.NotFound, []byte("unable to find key "+portID)), list("", port)},
		{answer(codes.Unknown, []byte("the referenced Logical Bridge has not been found"))},
		{message(f, network), message(f, network)},
		{message(f, &evpn.BridgePort{}), message(f, &evpn.LogicalBridge{})},
		{answer(codes.Unknown, []byte("VF Device is already allocated"))},
		{answer(codes.Unknown, []byte("VF Device is not allocated"))},
	} {
		f.Add(slices.Concat(script...))
	}
}

// FuzzAgent gives arbitrary answers to each dialect, and checks that results are bounded and that
// unknown fields are not made up.
func FuzzAgent(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, answers []byte) {
		for _, name := range dialects.Names() {
			dialect, err := dialects.Named(name)
			must.Succeed(t, err)
			agent := func() opi.Agent { return dialect.New(&hostile{answers: answers}) }
			ctx := t.Context()

			port, err := agent().Port(ctx, portID)
			checkPort(t, port, err == nil)
			if err == nil && port.ID != portID {
				t.Errorf("asked for port %s, got %s", portID, port.ID)
			}

			ports, err := agent().Ports(ctx)
			for _, port := range ports {
				checkPort(t, port, err == nil && port.State != opi.StateUnknown)
			}

			network, err := agent().Network(ctx, wantedNetwork.ID)
			checkNetwork(t, network, err == nil)
			networks, err := agent().Networks(ctx)
			for _, network := range networks {
				checkNetwork(t, network, err == nil && network.State != opi.StateUnknown)
			}

			if pfs, _ := agent().HostPFs(ctx); len(pfs) > opi.MaxHostPFs {
				t.Errorf("%d PFs of the host", len(pfs))
			}
		}
	})
}

// maxText is the maximum length of a text that is kept: the errors of all components.
const maxText = 16 << 10

func checkPort(t *testing.T, p opi.PortStatus, told bool) {
	t.Helper()
	size := len(p.ID) + len(p.MAC) + len(p.Detail)
	for _, network := range p.Networks {
		size += len(network)
	}

	if size > maxText {
		t.Errorf("%d bytes are kept of a port", size)
	}
	if !told || p.State == opi.StateDeleting {
		return
	}
	if p.State == opi.StateUnknown || len(p.MAC) == 0 || len(p.Networks) == 0 && !p.Trunk {
		t.Errorf("%+v is not unknown", p)
	}
}

func checkNetwork(t *testing.T, n opi.NetworkStatus, told bool) {
	t.Helper()
	if size := len(n.ID) + len(n.Detail); size > maxText {
		t.Errorf("%d bytes are kept of a network", size)
	}
	if told && n.State != opi.StateDeleting && (n.State == opi.StateUnknown || n.VLAN == 0) {
		t.Errorf("%+v is not unknown", n)
	}
}

// FuzzClient gives arbitrary answers to the client, and checks that it reports a port as gone or up
// only if the agent did.
func FuzzClient(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, answers []byte) {
		for _, name := range dialects.Names() {
			dialect, err := dialects.Named(name)
			must.Succeed(t, err)

			id, wanted := portID, wantedPort
			if dialect.Traits.Numbered {
				id, wanted.ID, wanted.VLANs = "pf0vf2", "pf0vf2", []uint16{10}
			}

			if agent, err := runClient(t, dialect, answers,
				func(ctx context.Context, c *opi.Client) error {
					return c.DeletePort(ctx, id)
				}); err == nil && !agent.missing && !agent.foreign &&
				(dialect.Traits.Verifies || !agent.deleted) {
				t.Error("a port was taken for gone that the agent did not call missing or " +
					"somebody else's")
			}

			if agent, err := runClient(t, dialect, answers,
				func(ctx context.Context, c *opi.Client) error {
					return c.EnsurePort(ctx, wanted)
				}); err == nil && !agent.right && (dialect.Traits.Verifies || !agent.created) {
				t.Error("a port was taken for served that the agent did not say is up as wanted")
			}

			_, _ = runClient(t, dialect, answers, func(ctx context.Context, c *opi.Client) error {
				return c.EnsureNetwork(ctx, wantedNetwork)
			})
		}
	})
}

// runClient calls a client whose agent gives these answers.
func runClient(
	t *testing.T, dialect opi.Dialect, answers []byte,
	do func(ctx context.Context, c *opi.Client) error,
) (*hostile, error) {
	t.Helper()
	agent := &hostile{answers: answers}
	c, err := opi.Dial(opi.Config{
		Endpoint: "127.0.0.1:1", Installation: "net", FailedGrace: time.Millisecond,
		Dialect: opi.Dialect{
			Traits: dialect.Traits,
			New:    func(grpc.ClientConnInterface) opi.Agent { return dialect.New(agent) },
		},
	})

	must.Succeed(t, err)
	defer func() { _ = c.Close() }()

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()

	err = do(ctx, c)
	if err != nil && len(err.Error()) > maxText {
		t.Errorf("an error has %d bytes", len(err.Error()))
	}

	agent.mu.Lock()
	defer agent.mu.Unlock()

	return agent, err
}
