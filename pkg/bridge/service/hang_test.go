// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
)

// hangingPlane is a data plane in which Attach hangs until release is closed.
type hangingPlane struct {
	*fakePlane
	release chan struct{}
}

func (h *hangingPlane) Attach(port string, to plane.Membership) error {
	<-h.release
	return h.fakePlane.Attach(port, to)
}

// TestHang checks that, while the data plane hangs, objects can be read, changes fail at their
// deadline, and the agent reports that it is stuck.
func TestHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hanging := &hangingPlane{fakePlane: newFakePlane(false), release: make(chan struct{})}
		a := open(t, t.TempDir()+"/state.db", hanging)
		reports := make(chan bool, 10)
		a.cfg.Stuck = func(stuck bool) { reports <- stuck }
		createNetwork(t, a, "net-blue", 10)
		done := make(chan error)
		go func() {
			_, err := a.create(t, p1, accessPort(mac1, blue))
			done <- err
		}()

		synctest.Wait()

		got, err := portServer{Agent: a}.GetBridgePort(t.Context(),
			&evpn.GetBridgePortRequest{Name: portNames.prefix + p1})
		if err != nil || got.GetStatus().GetOperStatus() != stateDown {
			t.Errorf("the port is %v, %v; want it down", got, err)
		}
		if list, err := (portServer{Agent: a}).ListBridgePorts(t.Context(),
			&evpn.ListBridgePortsRequest{}); err != nil || len(list.GetBridgePorts()) != 1 {
			t.Errorf("list: %v, %v", list, err)
		}

		ctx, cancel := context.WithTimeout(t.Context(), stuckAfter/2)
		defer cancel()

		_, err = a.ports.create(ctx, "vf-0000-03-00-3", accessPort(mac2, blue))
		wantCode(t, err, codes.DeadlineExceeded, "at work on something else")
		if len(reports) != 0 {
			t.Errorf("reported %t after half the time", <-reports)
		}

		time.Sleep(stuckAfter)
		close(hanging.release)
		if err := <-done; err != nil {
			t.Error(err)
		}
		first, second, more := <-reports, <-reports, len(reports)
		if !first || second || more > 0 {
			t.Errorf("reported %t, %t and %d more, want stuck, and then not stuck",
				first, second, more)
		}

		got, err = portServer{Agent: a}.GetBridgePort(t.Context(),
			&evpn.GetBridgePortRequest{Name: portNames.prefix + p1})
		if err != nil || got.GetStatus().GetOperStatus() != stateUp {
			t.Errorf("the port is %v, %v; want it up", got, err)
		}
	})
}

// TestPageOfLargeObjects checks that a page fits into an answer that clients accept, and that the
// pages together have all objects.
func TestPageOfLargeObjects(t *testing.T) {
	a, fake := newTestAgent(t)
	fake.vlanAware = true
	var networks []string
	for range 4094 {
		networks = append(networks,
			networkNames.prefix+"a-network-whose-id-has-as-many-characters-as-an-id-may-ever-have")
	}

	large := accessPort(mac1, networks...)
	large.Ptype = evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK
	const ports = 30
	for i := range ports {
		a.ports.insert("port-"+string(rune('a'+i/10))+string(rune('a'+i%10)),
			&port{spec: large, failure: errors.New("large")})
	}

	var seen []string
	for token := ""; ; {
		list, err := portServer{Agent: a}.ListBridgePorts(t.Context(),
			&evpn.ListBridgePortsRequest{PageToken: token})
		if err != nil {
			t.Fatal(err)
		}
		if size := proto.Size(list); size > 4<<20 {
			t.Fatalf("a page of %d bytes", size)
		}

		for _, p := range list.GetBridgePorts() {
			seen = append(seen, p.GetName())
		}

		if token = list.GetNextPageToken(); token == "" {
			break
		}
	}

	if len(seen) != ports || !slices.IsSorted(seen) || len(slices.Compact(seen)) != ports {
		t.Errorf("%d ports: %v", len(seen), seen)
	}
}
