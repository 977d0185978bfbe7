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

// slow has calls of this RPC take so long, whoever waits for them.
func slow(a *opitest.Agent, rpc string, d time.Duration) {
	a.Set(func(b *opitest.Behaviour) { b.Slow = map[string]time.Duration{rpc: d} })
}

// TestSlowCreate: an agent that takes longer for a port than for an answer to Get is waited for.
func TestSlowCreate(t *testing.T) {
	t.Parallel()
	a, c := start(t)
	slow(a, "CreateBridgePort", 6*time.Second)
	ok(t, c.EnsurePort(t.Context(), port1))
	if calls := a.Calls("CreateBridgePort"); calls != 1 {
		t.Errorf("%d calls, want 1", calls)
	}
}

// TestCallThatOutlivesItsCaller: what the agent is still at is not asked for again.
func TestCallThatOutlivesItsCaller(t *testing.T) {
	a, c := start(t)
	slow(a, "CreateBridgePort", 500*time.Millisecond)
	wantError(t, c.EnsurePort(within(t, 50*time.Millisecond), port1), opi.ErrTimeout)

	for range 3 {
		wantError(t, c.EnsurePort(within(t, 50*time.Millisecond), port1), opi.ErrTimeout,
			"has not answered", "create port")
	}

	ok(t, c.EnsurePort(t.Context(), port1))
	if calls := a.Calls("CreateBridgePort"); calls != 1 {
		t.Errorf("%d calls, want 1", calls)
	}

	slow(a, "DeleteBridgePort", 500*time.Millisecond)
	wantError(t, c.DeletePort(within(t, 50*time.Millisecond), port1.ID), opi.ErrTimeout)
	ok(t, c.EnsurePort(t.Context(), port1))
	if got := a.Ports(); len(got) != 1 {
		t.Errorf("the agent has %q after a deletion that came first", got)
	}
	if overlaps := a.Overlaps(); overlaps != 0 {
		t.Errorf("%d calls while another for the port ran", overlaps)
	}
}

// TestDeletionWaitsForCreate: a port that is still being made is not gone.
func TestDeletionWaitsForCreate(t *testing.T) {
	a, c := start(t)
	slow(a, "CreateBridgePort", 300*time.Millisecond)
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

// TestSlowNetwork: networks are made as ports are.
func TestSlowNetwork(t *testing.T) {
	a, c := start(t)
	slow(a, "CreateLogicalBridge", 300*time.Millisecond)
	wantError(t, c.EnsureNetwork(within(t, 50*time.Millisecond), red), opi.ErrTimeout)
	ok(t, c.EnsureNetwork(t.Context(), red))
	if calls := a.Calls("CreateLogicalBridge"); calls != 2 {
		t.Errorf("%d calls, want one for each network", calls)
	}
}

// TestLostCreate: the agent may still be at a call whose answer was lost. What is not there yet
// may come.
func TestLostCreate(t *testing.T) {
	a, c := start(t)
	a.FailNext("CreateBridgePort", 1, codes.Unavailable, "connection lost")
	wantError(t, c.EnsurePort(t.Context(), port1), opi.ErrUnavailable, "connection lost")
	wantError(t, c.DeletePort(within(t, 300*time.Millisecond), port1.ID), opi.ErrTimeout,
		"may still", "create port")
	_, err := c.GetPort(t.Context(), port1.ID)
	wantError(t, err, opi.ErrUnavailable, "may still", "create port")
	late := dial(t, a.Config())
	ok(t, late.EnsurePort(t.Context(), port1)) // it comes
	ok(t, c.DeletePort(t.Context(), port1.ID))
	if got := a.Ports(); len(got) != 0 {
		t.Errorf("the agent has %q", got)
	}
}

// TestLostDelete: a port that is up may still be deleted by a call whose answer was lost.
func TestLostDelete(t *testing.T) {
	a, c := start(t)
	ok(t, c.EnsurePort(t.Context(), port1))
	a.FailNext("DeleteBridgePort", 1, codes.Unavailable, "connection lost")
	wantError(t, c.DeletePort(t.Context(), port1.ID), opi.ErrUnavailable, "connection lost")
	wantError(t, c.EnsurePort(within(t, 300*time.Millisecond), port1), opi.ErrTimeout, "may still",
		"delete port")
	a.Lose(port1.ID) // it is
	ok(t, c.EnsurePort(t.Context(), port1))
}

// TestSlowAgentAnswers: calls that take long do not keep the agent from being asked whether it is
// alive.
func TestSlowAgentAnswers(t *testing.T) {
	a, c := start(t)
	slow(a, "CreateBridgePort", time.Second)

	for i := range 20 {
		id, err := opi.PortID(subfunction(i))
		ok(t, err)
		p := opi.Port{ID: id, MAC: []byte{2, 0, 0, 0, 0, byte(i)}, Networks: port1.Networks}
		go func() { _ = c.EnsurePort(t.Context(), p) }()
	}

	must.Eventually(t, "many calls run", func() bool { return a.Calls("CreateBridgePort") >= 8 })
	ok(t, c.Check(within(t, 500*time.Millisecond)))
}
