// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// testCounters checks that a port counts what its pod sends, receives and may not send, and nothing
// while it has no netdev.
func testCounters(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "")
	x.start()
	x.network("net-blue", 10, 0)
	sender, receiver := newPod(t, x, rep1, 1), newPod(t, x, rep2, 2)
	x.port(rep1, "net-blue", sender.mac)
	x.port(rep2, "net-blue", receiver.mac)
	reach(t, sender, receiver)

	conn, err := grpc.NewClient(x.addr,
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	must.Succeed(t, err)
	t.Cleanup(func() { _ = conn.Close() })

	read := func(id string) (*opibridge.PortCounters, error) {
		return opibridge.NewCountersServiceClient(conn).GetPortCounters(x.ctx(),
			&opibridge.GetPortCountersRequest{Name: "bridgePorts/" + id})
	}
	counters := func(id string) *opibridge.PortCounters {
		t.Helper()
		c, err := read(id)
		must.Succeed(t, err)
		return c
	}

	const honest, spoofed, size = 7, 3, 100
	c := receiver.capture(t)
	sentBefore, receivedBefore := counters(rep1), counters(rep2)
	for range spoofed {
		sender.send(t, broadcast, net.HardwareAddr{2, 0, 0, 0, 0, 0x66}, etherTypeTest,
			make([]byte, size))
	}
	for range honest {
		sender.send(t, broadcast, sender.mac, etherTypeTest, make([]byte, size))
	}
	for range honest {
		c.next()
	}

	sent, received := counters(rep1), counters(rep2)
	// The kernels of the pods send frames of their own, such as router solicitations.
	for what, n := range map[string]struct{ got, want uint64 }{
		"frames that the sender transmitted": {
			sent.TransmittedFrames - sentBefore.TransmittedFrames, honest + spoofed,
		},
		"bytes that the sender transmitted": {
			sent.TransmittedBytes - sentBefore.TransmittedBytes, (honest + spoofed) * size,
		},
		"frames that the receiver got": {
			received.ReceivedFrames - receivedBefore.ReceivedFrames, honest,
		},
		"bytes that the receiver got": {
			received.ReceivedBytes - receivedBefore.ReceivedBytes, honest * size,
		},
	} {
		if n.got < n.want || n.got > n.want+(honest+spoofed)*size/2 {
			t.Errorf("%s: %d, want %d and little more", what, n.got, n.want)
		}
	}
	if got := sent.FilteredFrames - sentBefore.FilteredFrames; got != spoofed {
		t.Errorf("%d frames of the sender were filtered, want %d", got, spoofed)
	}
	if received.FilteredFrames != 0 {
		t.Errorf("%d frames of the receiver were filtered", received.FilteredFrames)
	}

	must.Succeed(t, x.client.DeletePort(x.ctx(), rep1))
	if _, err := read(rep1); status.Code(err) != codes.NotFound {
		t.Errorf("of a port that was deleted: %v", err)
	}
}
