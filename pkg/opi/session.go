// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/keylock"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// SessionOptions configure a [Session]. Up may be nil. No function except Up may block.
type SessionOptions struct {
	// Debounce is how long an agent may fail to answer before [Health.Away] becomes true.
	Debounce time.Duration
	// CheckInterval is the period of health checks. They are needed because an agent can hang while
	// its connection stays up. Default 10 s.
	CheckInterval time.Duration
	// CheckTimeout bounds one health check.
	CheckTimeout time.Duration

	// Connection is called after each change of [Health.Connected], in order, and after the first
	// attempt failed.
	Connection func(up bool)
	// Up is called in its own goroutine each time the agent starts to answer. Its context ends when
	// the agent stops answering. The agent may have been restarted, so everything that it should
	// serve must be verified.
	Up func(ctx context.Context)
	// Changed is called when [Session.Health] may have changed.
	Changed func()
	// Failed is called for each failed operation. operation is the name of the [Client] method.
	Failed func(operation string, err error)
	Log    logr.Logger
}

// Health is the state of a [Session]'s agent. The zero value means that nothing is known yet.
type Health struct {
	// Known is set after the agent has answered, or failed to answer, for the first time.
	Known bool
	// Connected is set while there is a connection and the agent answers.
	Connected bool
	// Away is set when the agent has not answered for as long as the debounce.
	Away bool
	// Err is why the agent does not answer. It is nil if the agent answers, or if the reason is not
	// known yet.
	Err error
}

// Session keeps the connection to one OPI agent, finds out why the agent does not answer, and
// creates networks before their ports. It is safe for concurrent use, but there should be one call
// for a port at a time.
type Session struct {
	client  *Client
	options SessionOptions
	// by id, because concurrent calls for one network would undo each other's work
	networks keylock.Locks[string]

	confirmed sync.Map // Network by id, as confirmed by the agent since it started to answer

	// held while health changes and the change is reported, so that reports are in order
	reportMu sync.Mutex
	mu       sync.Mutex
	health   Health
}

// NewSession returns a session. It does not connect; [Session.Run] does.
func NewSession(config Config, options SessionOptions) (*Session, error) {
	client, err := Dial(config)
	if err != nil {
		return nil, err
	}
	options.CheckInterval = cmp.Or(options.CheckInterval, 10*time.Second)
	return &Session{client: client, options: options}, nil
}

// Run keeps the connection up until ctx ends, and then closes it. It returns an error only if it
// ends earlier.
func (s *Session) Run(ctx context.Context) error {
	var monitors sync.WaitGroup
	defer monitors.Wait()

	stop := func() {}
	defer func() { stop() }()

	startMonitor := func(connected bool) {
		var monitorCtx context.Context
		monitorCtx, stop = context.WithCancel(ctx)
		monitors.Go(func() { s.monitor(monitorCtx, connected) })
	}

	startMonitor(false)
	connected := false
	err := s.client.Watch(ctx, func(now bool) {
		changed := now || connected // the first attempt may fail
		connected = now

		if changed {
			// The old monitor must stop first, because it would still change the health.
			stop()
		}

		if !now {
			s.report(ctx, false)
		}

		if changed {
			startMonitor(now)
		}
	})

	if ctx.Err() != nil {
		err = nil
	}

	return errors.Join(err, s.client.Close())
}

// monitor checks the agent's health periodically until ctx ends, which is when the connection comes
// up or goes down. Without a connection it starts after the debounce, and finds out the reason.
func (s *Session) monitor(ctx context.Context, connected bool) {
	var up upCall
	defer up.stop()

	if !connected {
		if !loop.Sleep(ctx, s.options.Debounce) {
			return
		}
		s.update(ctx, func(h *Health) { h.Away = true })
	}

	failing := time.Now() // since when the agent has not answered
	for pauses := retries(); ; {
		bounded, cancel := context.WithTimeout(ctx, s.options.CheckTimeout)
		err := s.client.Check(bounded)
		cancel()
		if ctx.Err() != nil {
			return
		}

		_ = s.countFailure("Check", err)
		pause := s.options.CheckInterval
		if err == nil && connected {
			if s.report(ctx, true) {
				up.start(ctx, s.options.Up)
			}
			failing, pauses = time.Time{}, retries()
		} else {
			pause = pauses.Step()
			failing = cmp.Or(failing, time.Now())
			away := time.Since(failing) >= s.options.Debounce
			if away {
				up.stop()
				s.report(ctx, false)
			}

			s.update(ctx, func(h *Health) {
				if !h.Connected {
					h.Err, h.Away = err, h.Away || away
				}
			})
		}

		if !loop.Sleep(ctx, pause) {
			return
		}
	}
}

func retries() *wait.Backoff { return loop.Backoff(100*time.Millisecond, 10*time.Second) }

// upCall is a running call of [SessionOptions.Up].
type upCall struct {
	cancel context.CancelFunc
	done   sync.WaitGroup
}

func (u *upCall) start(ctx context.Context, up func(context.Context)) {
	if up == nil {
		return
	}
	u.stop()
	ctx, u.cancel = context.WithCancel(ctx)
	u.done.Go(func() { up(ctx) })
}

// stop cancels the call and waits for its end.
func (u *upCall) stop() {
	if u.cancel != nil {
		u.cancel()
		u.done.Wait()
	}
}

// report records whether the agent answers, unless ctx has ended, and calls the callbacks if that
// is new. It returns whether it is new. The error of an unavailable agent stays until the agent
// answers.
func (s *Session) report(ctx context.Context, up bool) (isNew bool) {
	s.reportMu.Lock()
	defer s.reportMu.Unlock()

	if ctx.Err() != nil {
		return false
	}

	s.mu.Lock()
	isNew = up != s.health.Connected || !s.health.Known

	if up != s.health.Connected {
		s.health = Health{Connected: up}
		s.confirmed.Clear()
	}

	s.health.Known = true
	s.mu.Unlock()

	if isNew {
		s.options.Log.Info("Connection to OPI agent changed", "connected", up)
		s.options.Connection(up)
		s.options.Changed()
	}

	return isNew
}

// update changes the health, unless ctx has ended, which lasts as long as the connection's state.
func (s *Session) update(ctx context.Context, change func(*Health)) {
	s.reportMu.Lock()
	defer s.reportMu.Unlock()

	if ctx.Err() != nil {
		return
	}

	s.mu.Lock()
	before := s.health
	change(&s.health)
	after := s.health
	s.mu.Unlock()
	isNew := fmt.Sprint(after.Err) != fmt.Sprint(before.Err)
	if isNew && after.Err != nil {
		s.options.Log.Info("OPI agent does not answer", "error", after.Err.Error())
	}

	if isNew || after.Away != before.Away {
		s.options.Changed()
	}
}

// Health returns the state of the agent. It does not block.
func (s *Session) Health() Health {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.health
}

// EnsurePort calls [Client.EnsureNetwork] for each network of the port, and then
// [Client.EnsurePort]. The networks are in the order of port.Networks. It skips networks that the
// agent has confirmed since the connection came up.
func (s *Session) EnsurePort(ctx context.Context, port Port, networks ...Network) error {
	if err := s.client.checkTrunk(port); err != nil { // before its networks are made
		return s.countFailure("EnsurePort", err)
	}

	port.VLANs = nil
	for _, network := range networks {
		port.VLANs = append(port.VLANs, network.VLAN)
	}

	return s.retryAfterReconnect(func() error {
		if err := s.ensureNetworks(ctx, networks, false); err != nil {
			return err
		}

		err := s.client.EnsurePort(ctx, port)
		// the agent was just restarted, or another client deleted a network
		if errors.Is(err, ErrNetworkMissing) {
			if err := s.ensureNetworks(ctx, networks, true); err != nil {
				return err
			}
			err = s.client.EnsurePort(ctx, port)
		}

		return s.countFailure("EnsurePort", err)
	})
}

func (s *Session) ensureNetworks(ctx context.Context, networks []Network, force bool) error {
	for _, network := range networks {
		if err := s.ensureNetwork(ctx, network, force); err != nil {
			return err
		}
	}
	return nil
}

// EnsureNetwork is like [Client.EnsureNetwork], but does nothing if the agent has confirmed this
// network since it started to answer; see [Session.ListNetworks].
func (s *Session) EnsureNetwork(ctx context.Context, network Network) error {
	return s.ensureNetwork(ctx, network, false)
}

func (s *Session) ensureNetwork(ctx context.Context, network Network, force bool) error {
	unlock, err := s.networks.Lock(ctx, network.ID)
	if err != nil {
		return timeout(ctx, "ensure network", network.ID, "another call for it has not ended")
	}
	defer unlock()

	if confirmed, known := s.confirmed.Load(network.ID); !force && known &&
		confirmed.(Network).sameAs(network) {
		return nil
	}

	return s.retryAfterReconnect(func() error {
		if err := s.countFailure("EnsureNetwork",
			s.client.EnsureNetwork(ctx, network)); err != nil {
			s.confirmed.Delete(network.ID)
			return err
		}
		s.confirmed.Store(network.ID, network)
		return nil
	})
}

// retryAfterReconnect calls do, and again if the connection was replaced meanwhile, because the
// agent may have been restarted after it confirmed the result.
func (s *Session) retryAfterReconnect(do func() error) error {
	for {
		before := s.client.connections.Load()
		if err := do(); err != nil || s.client.connections.Load() == before {
			return err
		}
	}
}

// DeleteNetwork is like [Client.DeleteNetwork].
func (s *Session) DeleteNetwork(ctx context.Context, id string) error {
	unlock, err := s.networks.Lock(ctx, id)
	if err != nil {
		return timeout(ctx, "delete network", id, "another call for it has not ended")
	}
	defer unlock()
	s.confirmed.Delete(id)
	return s.countFailure("DeleteNetwork", s.client.DeleteNetwork(ctx, id))
}

// DeletePort is like [Client.DeletePort].
func (s *Session) DeletePort(ctx context.Context, id string) error {
	return s.countFailure("DeletePort", s.client.DeletePort(ctx, id))
}

// GetPort is like [Client.GetPort].
func (s *Session) GetPort(ctx context.Context, id string) (PortStatus, error) {
	port, err := s.client.GetPort(ctx, id)
	if errors.Is(err, ErrNotFound) {
		return port, err
	}
	return port, s.countFailure("GetPort", err)
}

// ListPorts is like [Client.ListPorts].
func (s *Session) ListPorts(ctx context.Context) ([]PortStatus, error) {
	ports, err := s.client.ListPorts(ctx)
	return ports, s.countFailure("ListPorts", err)
}

// ListNetworks is like [Client.ListNetworks]. A network that is not up at the agent is ensured
// again when it is needed next.
func (s *Session) ListNetworks(ctx context.Context) ([]NetworkStatus, error) {
	networks, err := s.client.ListNetworks(ctx)
	if err != nil {
		return nil, s.countFailure("ListNetworks", err)
	}

	up := map[string]bool{}
	for _, n := range networks {
		up[n.ID] = n.State == StateUp
	}

	for id := range s.confirmed.Range {
		if !up[id.(string)] {
			s.confirmed.Delete(id)
		}
	}

	return networks, nil
}

// ListGateways is like [Client.ListGateways]. A network whose gateway or VRF is not up at the agent
// is ensured again when it is needed next.
func (s *Session) ListGateways(
	ctx context.Context,
) (vrfs []VRFStatus, gateways []GatewayStatus, err error) {
	vrfs, gateways, err = s.client.ListGateways(ctx)
	if err != nil {
		return nil, nil, s.countFailure("ListGateways", err)
	}

	routing := NewRouting(vrfs, gateways)
	for id, confirmed := range s.confirmed.Range {
		want := confirmed.(Network).Gateway
		if want != nil && !routing.Serves(id.(string), *want) {
			s.confirmed.Delete(id)
		}
	}

	return vrfs, gateways, nil
}

// DeleteGateway is like [Client.DeleteGateway].
func (s *Session) DeleteGateway(ctx context.Context, id string) error {
	network := strings.TrimSuffix(id, gatewaySuffix)
	unlock, err := s.networks.Lock(ctx, network)
	if err != nil {
		return timeout(ctx, "delete gateway", id, "another call for its network has not ended")
	}
	defer unlock()
	s.confirmed.Delete(network)
	return s.countFailure("DeleteGateway", s.client.DeleteGateway(ctx, id))
}

// DeleteVRF is like [Client.DeleteVRF].
func (s *Session) DeleteVRF(ctx context.Context, id string) error {
	return s.countFailure("DeleteVRF", s.client.DeleteVRF(ctx, id))
}

// Traits returns what the agent can do.
func (s *Session) Traits() Traits { return s.client.traits }

// MTU is like [Client.MTU].
func (s *Session) MTU(network string) int { return s.client.MTU(network) }

// Peer is like [Client.Peer].
func (s *Session) Peer() string { return s.client.Peer() }

func (s *Session) countFailure(operation string, err error) error {
	if err != nil {
		s.options.Failed(operation, err)
	}
	return err
}
