// SPDX-License-Identifier: Apache-2.0

package opi_test

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// delayRPC makes each call of the RPC take this long, even if the client gives up.
func delayRPC(a *opitest.Agent, rpc string, d time.Duration) {
	a.Set(func(b *opitest.Behaviour) { b.Slow = map[string]time.Duration{rpc: d} })
}

// TestSlowCreate checks that the client waits for an agent that takes longer to create a port than
// an answer to Get may take.
func TestSlowCreate(t *testing.T) {
	t.Parallel()
	a, c := start(t)
	delayRPC(a, "CreateBridgePort", 6*time.Second)
	ok(t, c.EnsurePort(t.Context(), port1))
	if calls := a.Calls("CreateBridgePort"); calls != 1 {
		t.Errorf("%d calls, want 1", calls)
	}
}

// TestCallThatOutlivesItsCaller checks that a call which is still running is not repeated.
func TestCallThatOutlivesItsCaller(t *testing.T) {
	a, c := start(t)
	delayRPC(a, "CreateBridgePort", 500*time.Millisecond)
	wantError(t, c.EnsurePort(within(t, 50*time.Millisecond), port1), opi.ErrTimeout)

	for range 3 {
		wantError(t, c.EnsurePort(within(t, 50*time.Millisecond), port1), opi.ErrTimeout,
			"has not answered", "create port")
	}

	ok(t, c.EnsurePort(t.Context(), port1))
	if calls := a.Calls("CreateBridgePort"); calls != 1 {
		t.Errorf("%d calls, want 1", calls)
	}

	delayRPC(a, "DeleteBridgePort", 500*time.Millisecond)
	wantError(t, c.DeletePort(within(t, 50*time.Millisecond), port1.ID), opi.ErrTimeout)
	ok(t, c.EnsurePort(t.Context(), port1))
	if got := a.Ports(); len(got) != 1 {
		t.Errorf("the agent has %q after a deletion that came first", got)
	}
	if overlaps := a.Overlaps(); overlaps != 0 {
		t.Errorf("%d calls while another for the port ran", overlaps)
	}
}

// TestDeletionWaitsForCreate checks that a port is not reported as gone while it is being created.
func TestDeletionWaitsForCreate(t *testing.T) {
	a, c := start(t)
	delayRPC(a, "CreateBridgePort", 300*time.Millisecond)
	wantError(t, c.EnsurePort(within(t, 50*time.Millisecond), port1), opi.ErrTimeout)
	_, err := c.GetPort(within(t, 50*time.Millisecond), port1.ID)
	wantError(t, err, opi.ErrTimeout, "has not answered")
	wantError(t, c.DeletePort(within(t, 50*time.Millisecond), port1.ID), opi.ErrTimeout,
		"has not answered")
	ok(t, c.DeletePort(t.Context(), port1.ID))
	if created, got := a.Calls("CreateBridgePort"), a.Ports(); created != 1 || len(got) != 0 {
		t.Errorf("after %d calls the agent has %q, want none", created, got)
	}
}

// TestSlowNetwork checks the same for networks.
func TestSlowNetwork(t *testing.T) {
	a, c := start(t)
	delayRPC(a, "CreateLogicalBridge", 300*time.Millisecond)
	wantError(t, c.EnsureNetwork(within(t, 50*time.Millisecond), red), opi.ErrTimeout)
	ok(t, c.EnsureNetwork(t.Context(), red))
	if calls := a.Calls("CreateLogicalBridge"); calls != 2 {
		t.Errorf("%d calls, want one for each network", calls)
	}
}

// TestLostCreate checks that a missing port is not reported as gone while a create call with a lost
// answer may still take effect.
func TestLostCreate(t *testing.T) {
	a, c := start(t)
	a.FailNext("CreateBridgePort", 1, codes.Unavailable, "connection lost")
	wantError(t, c.EnsurePort(t.Context(), port1), opi.ErrUnavailable, "connection lost")
	wantError(t, c.DeletePort(within(t, 300*time.Millisecond), port1.ID), opi.ErrTimeout,
		"may still", "create port")
	_, err := c.GetPort(t.Context(), port1.ID)
	wantError(t, err, opi.ErrUnavailable, "may still", "create port")
	late := dial(t, a.Config())
	ok(t, late.EnsurePort(t.Context(), port1)) // the call takes effect
	ok(t, c.DeletePort(t.Context(), port1.ID))
	if got := a.Ports(); len(got) != 0 {
		t.Errorf("the agent has %q", got)
	}
}

// TestLostDelete checks that a port is not reported as up while a delete call with a lost answer
// may still take effect.
func TestLostDelete(t *testing.T) {
	a, c := start(t)
	ok(t, c.EnsurePort(t.Context(), port1))
	a.FailNext("DeleteBridgePort", 1, codes.Unavailable, "connection lost")
	wantError(t, c.DeletePort(t.Context(), port1.ID), opi.ErrUnavailable, "connection lost")
	wantError(t, c.EnsurePort(within(t, 300*time.Millisecond), port1), opi.ErrTimeout, "may still",
		"delete port")
	a.Lose(port1.ID) // the call takes effect
	ok(t, c.EnsurePort(t.Context(), port1))
}

// TestSlowAgentAnswers checks that slow calls do not block health checks.
func TestSlowAgentAnswers(t *testing.T) {
	a, c := start(t)
	delayRPC(a, "CreateBridgePort", time.Second)

	for i := range 20 {
		id, err := opi.PortID(subfunction(i))
		ok(t, err)
		p := opi.Port{ID: id, MAC: []byte{2, 0, 0, 0, 0, byte(i)}, Networks: port1.Networks}
		go func() { _ = c.EnsurePort(t.Context(), p) }()
	}

	must.Eventually(t, "many calls run", func() bool { return a.Calls("CreateBridgePort") >= 8 })
	ok(t, c.Check(within(t, 500*time.Millisecond)))
}
