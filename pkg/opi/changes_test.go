// SPDX-License-Identifier: Apache-2.0

package opi_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// hold makes the agent hold back each call of the RPC until open is called, or until the test ends.
func hold(t *testing.T, a *opitest.Agent, rpc string) (open func()) {
	gate := make(chan struct{})
	open = sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)

	a.Set(func(b *opitest.Behaviour) { b.Gates = map[string]<-chan struct{}{rpc: gate} })
	return open
}

// abandon makes a call that gives up once the agent has got the RPC.
func abandon(t *testing.T, a *opitest.Agent, rpc string, call func(context.Context) error) {
	t.Helper()
	ctx, giveUp := context.WithCancel(t.Context())
	defer giveUp()
	before, ended := a.Calls(rpc), make(chan error, 1)

	go func() { ended <- call(ctx) }()
	must.Eventually(t, "the agent has the call", func() bool { return a.Calls(rpc) > before })
	giveUp()

	wantError(t, <-ended, opi.ErrTimeout)
}

func ensurePort1(c *opi.Client) func(context.Context) error {
	return func(ctx context.Context) error { return c.EnsurePort(ctx, port1) }
}

// TestSlowCreate checks that the client waits for an agent that takes longer to create a port than
// an answer to Get may take.
func TestSlowCreate(t *testing.T) {
	t.Parallel()
	a, c := start(t)
	time.AfterFunc(6*time.Second, hold(t, a, "CreateBridgePort"))
	ok(t, c.EnsurePort(t.Context(), port1))
	if calls := a.Calls("CreateBridgePort"); calls != 1 {
		t.Errorf("%d calls, want 1", calls)
	}
}

// TestCallThatOutlivesItsCaller checks that a call which is still running is not repeated.
func TestCallThatOutlivesItsCaller(t *testing.T) {
	a, c := start(t)
	open := hold(t, a, "CreateBridgePort")
	abandon(t, a, "CreateBridgePort", ensurePort1(c))

	texts := map[string]bool{} // they go into conditions, which are written when a text changes
	for range 3 {
		err := c.EnsurePort(within(t, 50*time.Millisecond), port1)
		wantError(t, err, opi.ErrTimeout, "has not answered", "create port")
		texts[err.Error()] = true
	}
	if len(texts) > 1 {
		t.Errorf("errors differ: %v", texts)
	}

	open()
	ok(t, c.EnsurePort(t.Context(), port1))
	if calls := a.Calls("CreateBridgePort"); calls != 1 {
		t.Errorf("%d calls, want 1", calls)
	}

	open = hold(t, a, "DeleteBridgePort")
	abandon(t, a, "DeleteBridgePort", func(ctx context.Context) error {
		return c.DeletePort(ctx, port1.ID)
	})
	time.AfterFunc(100*time.Millisecond, open)
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
	open := hold(t, a, "CreateBridgePort")
	abandon(t, a, "CreateBridgePort", ensurePort1(c))

	_, err := c.GetPort(within(t, 50*time.Millisecond), port1.ID)
	wantError(t, err, opi.ErrTimeout, "has not answered")
	wantError(t, c.DeletePort(within(t, 50*time.Millisecond), port1.ID), opi.ErrTimeout,
		"has not answered")

	open()
	ok(t, c.DeletePort(t.Context(), port1.ID))
	if created, got := a.Calls("CreateBridgePort"), a.Ports(); created != 1 || len(got) != 0 {
		t.Errorf("after %d calls the agent has %q, want none", created, got)
	}
}

// TestSlowNetwork checks the same for networks.
func TestSlowNetwork(t *testing.T) {
	a, c := start(t)
	open := hold(t, a, "CreateLogicalBridge")
	abandon(t, a, "CreateLogicalBridge", func(ctx context.Context) error {
		return c.EnsureNetwork(ctx, red)
	})

	open()
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
	hold(t, a, "CreateBridgePort")

	for i := range 20 {
		id, err := opi.PortID(subfunction(i))
		ok(t, err)
		p := opi.Port{ID: id, MAC: []byte{2, 0, 0, 0, 0, byte(i)}, Networks: port1.Networks}
		go func() { _ = c.EnsurePort(t.Context(), p) }()
	}

	must.Eventually(t, "many calls run", func() bool { return a.Calls("CreateBridgePort") >= 8 })
	ok(t, c.Check(t.Context()))
}
