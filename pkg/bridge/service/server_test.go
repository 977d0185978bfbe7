// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// served serves a test agent until the test ends.
func served(t *testing.T) *bufconn.Listener {
	t.Helper()
	a, fake := newTestAgent(t)
	fake.vlanAware = true
	listener, server := bufconn.Listen(1<<20), a.NewServer()
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()

	t.Cleanup(func() {
		server.Stop()
		must.Succeed(t, <-ended)
	})

	return listener
}

// TestPortWithoutID checks that the MAC selects the Function of a port without an id, but not for a
// client that may not know of all ports.
func TestPortWithoutID(t *testing.T) {
	a, fake := newTestAgent(t)
	fake.functions = map[string]string{mac1: "c1pf0vf7"}
	create := func(ctx context.Context, mac string) (*evpn.BridgePort, error) {
		return portServer{Agent: a}.CreateBridgePort(ctx, &evpn.CreateBridgePortRequest{
			BridgePort: &evpn.BridgePort{Spec: accessPort(mac, blue)},
		})
	}

	_, err := create(as(t, "{subject: CN=a, networks: ['*'], ports: [vf-*], vlans: [], vnis: []}"),
		mac1)
	wantCode(t, err, codes.InvalidArgument, "may not know of all ports")
	if reason := refusal.Of(err); reason != refusal.NoFunction {
		t.Errorf("reason %q", reason)
	}

	_, err = create(t.Context(), mac2)
	wantCode(t, err, codes.InvalidArgument, "bridge_port_id is required")
	got, err := create(t.Context(), mac1)
	wantCode(t, err, codes.OK, "")
	if got.GetName() != portNames.prefix+"c1pf0vf7" {
		t.Errorf("the port is %s", got.GetName())
	}
}

// TestLargeRequest checks that a TRUNK port may name as many logical bridges as there are VLAN ids,
// with the longest possible names, and that larger requests are refused.
func TestLargeRequest(t *testing.T) {
	listener := served(t)
	conn, err := grpc.NewClient("passthrough:///agent",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return listener.DialContext(ctx)
		}))

	must.Succeed(t, err)
	t.Cleanup(func() { _ = conn.Close() })

	create := func(networks int) error {
		spec := &evpn.BridgePortSpec{
			MacAddress: []byte{2, 0, 0, 0, 0, 1}, Ptype: evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK,
		}
		for i := range networks {
			spec.LogicalBridges = append(spec.LogicalBridges,
				networkNames.prefix+"net-"+strings.Repeat("x", 54)+fmt.Sprintf("%05d", i))
		}

		_, err := evpn.NewBridgePortServiceClient(conn).CreateBridgePort(t.Context(),
			&evpn.CreateBridgePortRequest{
				BridgePortId: p1, BridgePort: &evpn.BridgePort{Spec: spec},
			})

		return err
	}

	if err := create(plane.MaxVLAN); status.Code(err) != codes.NotFound ||
		refusal.Of(err) != refusal.NetworkMissing {
		t.Errorf("a request with all logical bridges: %v, want that the first does not exist", err)
	}
	if err := create(3 * plane.MaxVLAN); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a request with more than there can be: %v", err)
	}
}

// TestSilentClient checks that a connection on which the client sends nothing is closed.
func TestSilentClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, err := served(t).Dial()
		must.Succeed(t, err)
		begin := time.Now()

		if _, err := io.Copy(io.Discard, conn); err != nil {
			t.Logf("the connection ended with %v", err)
		}

		if took := time.Since(begin); took > 10*time.Second {
			t.Errorf("it stayed open for %s", took)
		}

		must.Succeed(t, conn.Close())
	})
}
