// SPDX-License-Identifier: Apache-2.0

package opi_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/evpngw"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// recorder records the callbacks of a session.
type recorder struct {
	mu         sync.Mutex
	ups        []bool
	failed     []string
	changed    chan struct{}
	upContexts chan context.Context // one for each call of Up
}

// open runs a session until the test ends.
func open(t *testing.T, config opi.Config, debounce time.Duration) (*opi.Session, *recorder) {
	t.Helper()
	return openWith(t,
		config, opi.SessionOptions{Debounce: debounce, CheckTimeout: 5 * time.Second})
}

func openWith(
	t *testing.T, config opi.Config, options opi.SessionOptions,
) (*opi.Session, *recorder) {
	t.Helper()
	r := &recorder{changed: make(chan struct{}, 1000), upContexts: make(chan context.Context, 1000)}
	options.Log = testr.New(t)
	options.Connection = func(up bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.ups = append(r.ups, up)
	}

	options.Up = func(ctx context.Context) { r.upContexts <- ctx }
	options.Changed = func() { r.changed <- struct{}{} }
	options.Failed = func(operation string, _ error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.failed = append(r.failed, operation)
	}

	s, err := opi.NewSession(config, options)
	ok(t, err)
	must.Run(t, s.Run)

	return s, r
}

// waitFor waits until is returns true for the session's health, and checks only when the session
// reports a change.
func (r *recorder) waitFor(t *testing.T, s *opi.Session, what string, is func(opi.Health) bool) {
	t.Helper()
	for !is(s.Health()) {
		select {
		case <-r.changed:
		case <-time.After(30 * time.Second):
			t.Fatalf("not %s: %+v", what, s.Health())
		}
	}
}

func answers(h opi.Health) bool { return h == opi.Health{Known: true, Connected: true} }

// TestSessionHealth covers a connection that comes up, fails to answer, goes down, is away, and
// comes up again.
func TestSessionHealth(t *testing.T) {
	a := opitest.Start(t)
	const debounce = 300 * time.Millisecond
	s, r := open(t, a.Config(), debounce)
	r.waitFor(t, s, "answering", answers)
	first := <-r.upContexts

	before := time.Now()
	a.Stop()
	r.waitFor(t, s, "down", func(h opi.Health) bool { return h.Known && !h.Connected })
	if h := s.Health(); (h.Away || h.Err != nil) && time.Since(before) < debounce {
		t.Errorf("%+v after %s already", h, time.Since(before))
	}

	<-first.Done()
	r.waitFor(t, s, "away, with the reason", func(h opi.Health) bool {
		return h.Away &&
			errors.Is(h.Err, opi.ErrUnavailable)
	})

	if after := time.Since(before); after < debounce {
		t.Errorf("away after %s", after)
	}
	if h := s.Health(); h.Connected || !h.Known {
		t.Errorf("away: %+v", h)
	}

	a.FailNext("GetBridgePort", 3, codes.Internal, "card on fire")
	ok(t, a.Run())
	r.waitFor(t, s, "connected without an answer", func(h opi.Health) bool {
		return !h.Connected && h.Err != nil && strings.Contains(h.Err.Error(), "card on fire")
	})
	r.waitFor(t, s, "answering again", answers)
	if second := <-r.upContexts; second.Err() != nil {
		t.Error("the context of Up ended with the connection up")
	}

	r.mu.Lock()
	defer r.mu.Unlock()

	if len(r.ups) != 3 || !r.ups[0] || r.ups[1] || !r.ups[2] {
		t.Errorf("connections %v, want up, down, up", r.ups)
	}
	if len(r.failed) == 0 || r.failed[0] != "Check" {
		t.Errorf("failed operations %q, want Check", r.failed)
	}
}

// TestSessionLost checks that the loss of the connection is reported at once, without the debounce.
func TestSessionLost(t *testing.T) {
	a := opitest.Start(t)
	s, r := open(t, a.Config(), time.Hour)
	r.waitFor(t, s, "answering", answers)
	up := <-r.upContexts

	a.Stop()
	ctx := within(t, 5*time.Second)
	for s.Health().Connected {
		select {
		case <-r.changed:
		case <-ctx.Done():
			t.Fatalf("the loss is not reported: %+v", s.Health())
		}
	}

	select {
	case <-up.Done():
	case <-ctx.Done():
		t.Error("the context of Up has not ended")
	}
	if h := s.Health(); h.Away {
		t.Errorf("%+v before the debounce has ended", h)
	}
}

// TestSessionAwaitsUp checks that Run returns only after Up has, because Up uses the session.
func TestSessionAwaitsUp(t *testing.T) {
	a := opitest.Start(t)
	started, ended := make(chan struct{}), atomic.Bool{}
	s, err := opi.NewSession(a.Config(), opi.SessionOptions{
		Debounce: time.Hour, CheckTimeout: 5 * time.Second, Log: testr.New(t),
		Connection: func(bool) {}, Changed: func() {}, Failed: func(string, error) {},
		Up: func(ctx context.Context) {
			close(started)
			<-ctx.Done()
			for range 10_000 {
				runtime.Gosched() // lets Run return, if it does not wait
			}
			ended.Store(true)
		},
	})

	ok(t, err)
	stop := must.Run(t, s.Run)
	<-started
	stop()
	if !ended.Load() {
		t.Error("Run has returned before Up")
	}
}

// TestSessionHangs checks that an agent which hangs while its connection stays up is away, and is
// back once it answers. It may have been restarted behind a proxy.
func TestSessionHangs(t *testing.T) {
	a := opitest.Start(t)
	s, r := openWith(t, a.Config(), opi.SessionOptions{
		Debounce: 20 * time.Millisecond, CheckInterval: 20 * time.Millisecond,
		CheckTimeout: 50 * time.Millisecond,
	})

	r.waitFor(t, s, "answering", answers)
	first := <-r.upContexts
	a.Set(func(b *opitest.Behaviour) { b.Hung = true })

	r.waitFor(t, s, "away", func(h opi.Health) bool {
		return !h.Connected && h.Away &&
			errors.Is(h.Err, opi.ErrTimeout)
	})

	<-first.Done()
	a.Set(func(b *opitest.Behaviour) { b.Hung = false })
	r.waitFor(t, s, "answering again", answers)
	if second := <-r.upContexts; second.Err() != nil {
		t.Error("the context of Up ended while the agent answers")
	}
}

// TestSessionConnectsLate checks that the agent is not away if the connection comes up just when
// the debounce ends.
func TestSessionConnectsLate(t *testing.T) {
	const debounce = 50 * time.Millisecond
	a := opitest.Start(t)
	var s *opi.Session
	told := make(chan opi.Health, 1)
	s, err := opi.NewSession(a.Config(), opi.SessionOptions{
		Debounce: debounce, CheckTimeout: 5 * time.Second, Log: testr.New(t),
		Connection: func(bool) {
			// long enough for the goroutine that waits for the debounce to continue
			time.Sleep(2 * debounce)
			told <- s.Health()
		},
		Changed: func() {}, Failed: func(string, error) {},
	})

	ok(t, err)
	must.Run(t, s.Run)
	if h := <-told; !h.Connected || h.Away {
		t.Errorf("as the connection came up: %+v", h)
	}
}

// TestSessionNeverConnected checks that an agent that never answered is away, and that no port is
// created.
func TestSessionNeverConnected(t *testing.T) {
	a := opitest.Start(t)
	a.Stop()
	s, r := open(t, a.Config(), 50*time.Millisecond)
	r.waitFor(t, s, "away", func(h opi.Health) bool { return h.Known && h.Away && h.Err != nil })
	wantError(t, s.EnsurePort(within(t, time.Second), port1, blue), opi.ErrUnavailable)
	ok(t, a.Run())
	r.waitFor(t, s, "answering", answers)
}

// TestSessionNetworks checks that a network is ensured once for all ports, and again when the agent
// may have changed or lost it.
func TestSessionNetworks(t *testing.T) {
	a := opitest.Start(t)
	s, r := open(t, a.Config(), time.Millisecond)
	r.waitFor(t, s, "answering", answers)

	made := func(want int) {
		t.Helper()
		if got := a.Calls("CreateLogicalBridge"); got != want {
			t.Errorf("CreateLogicalBridge was called %d times, want %d", got, want)
		}
	}

	asked := func() int { return a.Calls("GetLogicalBridge") }

	var ports sync.WaitGroup
	for _, port := range []opi.Port{port1, port2} {
		ports.Go(func() { ok(t, s.EnsurePort(t.Context(), port, blue)) })
	}

	ports.Wait()
	made(1)
	before := asked()
	ok(t, s.EnsurePort(t.Context(), port1, blue))
	if asked() != before {
		t.Error("the agent was asked for a network that it was seen to have")
	}

	ok(t, s.EnsureNetwork(t.Context(), blue))
	if asked() != before {
		t.Error("EnsureNetwork asked for a network that the agent was seen to have")
	}

	other := blue
	other.VLAN = 11
	wantError(t, s.EnsurePort(t.Context(), port1, other), opi.ErrConflict, "VLAN 10, not 11")

	// Another client deletes the network.
	c := dial(t, a.Config())
	ok(t, errors.Join(c.DeletePort(t.Context(), port1.ID), c.DeletePort(t.Context(), port2.ID),
		c.DeleteNetwork(t.Context(), blue.ID)))
	ok(t, s.EnsurePort(t.Context(), port1, blue))
	made(2)

	ok(t, errors.Join(s.DeletePort(t.Context(), port1.ID), s.DeleteNetwork(t.Context(), blue.ID)))
	ok(t, s.EnsurePort(t.Context(), port2, blue))
	made(3)
	list, err := s.ListPorts(t.Context())
	ok(t, err)
	if len(list) != 1 || list[0].ID != port2.ID {
		t.Errorf("ports %+v", list)
	}

	r.mu.Lock()
	defer r.mu.Unlock()

	if len(r.failed) != 1 || r.failed[0] != "EnsureNetwork" {
		t.Errorf("failed operations %q, want only that of the conflict", r.failed)
	}
}

// TestSessionNetworkBusy checks that waiting for another call for the same network ends with the
// context.
func TestSessionNetworkBusy(t *testing.T) {
	a := opitest.Start(t)
	s, r := open(t, a.Config(), time.Millisecond)
	r.waitFor(t, s, "answering", answers)
	a.Set(func(b *opitest.Behaviour) { b.UpDelay = time.Hour })
	ctx, cancel := context.WithCancel(t.Context())
	slow := make(chan error, 1)
	go func() { slow <- s.EnsureNetwork(ctx, blue) }()

	for a.Calls("CreateLogicalBridge") == 0 {
		time.Sleep(time.Millisecond)
	}

	wantError(t, s.EnsurePort(within(t, 20*time.Millisecond), port1, blue), opi.ErrTimeout,
		"another call for it has not ended")
	wantError(t, s.DeleteNetwork(within(t, 20*time.Millisecond), blue.ID), opi.ErrTimeout,
		"another call for it has not ended")
	cancel()
	wantError(t, <-slow, opi.ErrTimeout)
}

// lateAnswers is an agent with a hook that runs after a Get and before its answer is returned.
type lateAnswers struct {
	opi.Agent
	network, port *atomic.Pointer[func()]
}

func (l lateAnswers) Network(ctx context.Context, id string) (opi.NetworkStatus, error) {
	got, err := l.Agent.Network(ctx, id)
	once(l.network, err)
	return got, err
}

func (l lateAnswers) Port(ctx context.Context, id string) (opi.PortStatus, error) {
	got, err := l.Agent.Port(ctx, id)
	once(l.port, err)
	return got, err
}

func once(happens *atomic.Pointer[func()], err error) {
	if err != nil {
		return
	}
	if do := happens.Swap(nil); do != nil {
		(*do)()
	}
}

// TestAnswerFromBeforeARestart checks that an answer from before a restart is not trusted, and that
// the object is created again.
func TestAnswerFromBeforeARestart(t *testing.T) {
	a := opitest.Start(t)
	late := lateAnswers{network: new(atomic.Pointer[func()]), port: new(atomic.Pointer[func()])}
	config := a.Config()
	config.Dialect.New = func(conn grpc.ClientConnInterface) opi.Agent {
		return lateAnswers{evpngw.Dialect().New(conn), late.network, late.port}
	}
	s, r := open(t, config, time.Minute)
	r.waitFor(t, s, "answering", answers)

	restart := func() {
		a.Kill()
		r.waitFor(t, s, "down", func(h opi.Health) bool { return !h.Connected })
		if err := a.Run(); err != nil {
			t.Error(err)
		}
		r.waitFor(t, s, "answering again", answers)
	}

	late.network.Store(&restart)
	ok(t, s.EnsureNetwork(t.Context(), blue))
	if got := a.Networks(); len(got) != 1 {
		t.Errorf("the agent has the networks %q, want the one that was ensured", got)
	}

	late.port.Store(&restart)
	ok(t, s.EnsurePort(t.Context(), port1, blue))
	if got := a.Ports(); len(got) != 1 {
		t.Errorf("the agent has the ports %q, want the one that was ensured", got)
	}
}
