// SPDX-License-Identifier: Apache-2.0

package bridge

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
)

// hanging is a data plane that does not answer while hang is set.
type hanging struct {
	*paper
	hang chan struct{}
}

func (h *hanging) attach(port string, to membership) error {
	if h.hang != nil {
		<-h.hang
	}
	return h.paper.attach(port, to)
}

// TestHang: while the data plane hangs, objects can be read, changes fail by their deadline, and
// the agent says that it does not serve.
func TestHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		plane := &hanging{paper: &paper{networks: map[string]uint32{}, ports: map[string]string{}},
			hang: make(chan struct{})}
		a := open(t, t.TempDir()+"/state.db", plane)
		told := make(chan bool, 10)
		a.cfg.Stuck = func(is bool) { told <- is }
		createNetwork(t, a, "net-blue", 10)
		done := make(chan error)
		go func() {
			_, err := a.create(t, p1, access(mac1, blue))
			done <- err
		}()

		synctest.Wait()

		got, err := portServer{Agent: a}.GetBridgePort(t.Context(),
			&evpn.GetBridgePortRequest{Name: portKind.prefix + p1})
		if err != nil || got.GetStatus().GetOperStatus() != stateDown {
			t.Errorf("the port is %v, %v; want it down", got, err)
		}
		if list, err := (portServer{Agent: a}).ListBridgePorts(t.Context(),
			&evpn.ListBridgePortsRequest{}); err != nil || len(list.GetBridgePorts()) != 1 {
			t.Errorf("list: %v, %v", list, err)
		}

		ctx, cancel := context.WithTimeout(t.Context(), stuckAfter/2)
		defer cancel()

		_, err = a.ports.create(ctx, "vf-0000-03-00-3", access(mac2, blue))
		wantCode(t, err, codes.DeadlineExceeded, "at work on something else")
		if len(told) != 0 {
			t.Errorf("told %t after half the time", <-told)
		}

		time.Sleep(stuckAfter)
		close(plane.hang)
		if err := <-done; err != nil {
			t.Error(err)
		}
		if stuck, and, then := <-told, <-told, len(told); !stuck || and || then > 0 {
			t.Errorf("told %t, %t and %d more, want that work is stuck, and then that it is not",
				stuck, and, then)
		}

		got, err = portServer{Agent: a}.GetBridgePort(t.Context(),
			&evpn.GetBridgePortRequest{Name: portKind.prefix + p1})
		if err != nil || got.GetStatus().GetOperStatus() != stateUp {
			t.Errorf("the port is %v, %v; want it up", got, err)
		}
	})
}

// TestPageOfLargeObjects: a page fits into an answer that clients take, and the pages together have
// all objects.
func TestPageOfLargeObjects(t *testing.T) {
	a, plane := onPaper(t)
	plane.vlans = true
	var networks []string
	for range 4094 {
		networks = append(networks,
			networkKind.prefix+"a-network-whose-id-has-as-many-characters-as-an-id-may-ever-have")
	}

	large := access(mac1, networks...)
	large.Ptype = evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK
	const ports = 30
	for i := range ports {
		a.ports.keep("port-"+string(rune('a'+i/10))+string(rune('a'+i%10)),
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
