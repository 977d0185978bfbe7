// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/keylock"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// SessionOptions configure a [Session]. Up may be nil. No function but Up may block.
type SessionOptions struct {
	// Debounce is how long an agent may fail to answer before [Health.Away] says so.
	Debounce time.Duration
	// CheckInterval is how often an agent is asked whether it still answers. Default 10 s. An agent
	// can hang while its connection stays.
	CheckInterval time.Duration
	// CheckTimeout bounds one such question.
	CheckTimeout time.Duration

	// Connection is called each time that [Health.Connected] changes, in order, and when the first
	// attempt failed.
	Connection func(up bool)
	// Up is called in a goroutine of its own each time that the agent begins to answer. Its context
	// ends when the agent does not answer any more. The agent may have been restarted, so
	// everything that it has to serve must be verified.
	Up func(ctx context.Context)
	// Changed is called when [Session.Health] may say something else than before.
	Changed func()
	// Failed is called for each operation on the agent that failed. operation is the name of the
	// method of [Client].
	Failed func(operation string, err error)
	Log    logr.Logger
}

// Health is what a [Session] knows of its agent. Its zero value means that nothing is known yet.
type Health struct {
	// Known says that the agent answered once, or that it failed to.
	Known bool
	// Connected says that there is a connection and the agent answers, so that it is worth asking.
	Connected bool
	// Away says that the agent has not answered for as long as the debounce says.
	Away bool
	// Err is why the agent does not answer; nil if it does, or if that is not known yet.
	Err error
}

// Session keeps the connection to one OPI agent, finds out why the agent does not answer, and has
// networks served before their ports. It is safe for concurrent use, but there should be one call
// for a port at a time.
type Session struct {
	client   *Client
	options  SessionOptions
	networks keylock.Locks[string] // by id: calls for the same network would undo each other's work

	served sync.Map // Network by id: what the agent was seen to have since it began to answer

	// held while health changes and the change is told, so that changes are told in their order
	telling sync.Mutex
	mu      sync.Mutex
	health  Health
}

// NewSession makes a session. It does not connect: [Session.Run] does.
func NewSession(config Config, options SessionOptions) (*Session, error) {
	client, err := Dial(config)
	if err != nil {
		return nil, err
	}
	options.CheckInterval = cmp.Or(options.CheckInterval, 10*time.Second)
	return &Session{client: client, options: options}, nil
}

// Run keeps the connection up until ctx ends, and closes it then. It returns an error only if it
// ended before.
func (s *Session) Run(ctx context.Context) error {
	var following sync.WaitGroup
	defer following.Wait()

	stop := func() {}
	defer func() { stop() }()

	begin := func(connected bool) {
		var during context.Context
		during, stop = context.WithCancel(ctx)
		following.Go(func() { s.follow(during, connected) })
	}

	begin(false)
	connected := false
	err := s.client.Watch(ctx, func(now bool) {
		changed := now || connected // the first attempt may fail
		connected = now

		if changed {
			// before the health is of this connection, which what follows the last one would still
			// change
			stop()
		}

		if !now {
			s.report(ctx, false)
		}

		if changed {
			begin(now)
		}
	})

	if ctx.Err() != nil {
		err = nil
	}

	return errors.Join(err, s.client.Close())
}

// follow asks the agent again and again whether it answers, until the connection comes or goes, at
// which ctx ends. Without a connection it begins after the debounce, and finds out why there is
// none.
func (s *Session) follow(ctx context.Context, connected bool) {
	var up upCall
	defer up.end()

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

		_ = s.counted("Check", err)
		pause := s.options.CheckInterval
		if err == nil && connected {
			if s.report(ctx, true) {
				up.begin(ctx, s.options.Up)
			}
			failing, pauses = time.Time{}, retries()
		} else {
			pause = pauses.Step()
			failing = cmp.Or(failing, time.Now())
			away := time.Since(failing) >= s.options.Debounce
			if away {
				up.end()
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

// upCall is a call of [SessionOptions.Up].
type upCall struct {
	stop context.CancelFunc
	done sync.WaitGroup
}

func (u *upCall) begin(ctx context.Context, up func(context.Context)) {
	if up == nil {
		return
	}
	u.end()
	ctx, u.stop = context.WithCancel(ctx)
	u.done.Go(func() { up(ctx) })
}

// end ends the call if it runs.
func (u *upCall) end() {
	if u.stop != nil {
		u.stop()
		u.done.Wait()
	}
}

// report records whether the agent can be asked, unless ctx has ended, and tells of it if that is
// news. Why an agent cannot be asked stays what it was while the agent cannot.
func (s *Session) report(ctx context.Context, up bool) (news bool) {
	s.telling.Lock()
	defer s.telling.Unlock()

	if ctx.Err() != nil {
		return false
	}

	s.mu.Lock()
	news = up != s.health.Connected || !s.health.Known

	if up != s.health.Connected {
		s.health = Health{Connected: up}
		s.served.Clear()
	}

	s.health.Known = true
	s.mu.Unlock()

	if news {
		s.options.Log.Info("Connection to OPI agent changed", "connected", up)
		s.options.Connection(up)
		s.options.Changed()
	}

	return news
}

// update changes the health, unless ctx, which lasts as long as the connection does, has ended.
func (s *Session) update(ctx context.Context, change func(*Health)) {
	s.telling.Lock()
	defer s.telling.Unlock()

	if ctx.Err() != nil {
		return
	}

	s.mu.Lock()
	before := s.health
	change(&s.health)
	after := s.health
	s.mu.Unlock()
	news := fmt.Sprint(after.Err) != fmt.Sprint(before.Err)
	if news && after.Err != nil {
		s.options.Log.Info("OPI agent does not answer", "error", after.Err.Error())
	}

	if news || after.Away != before.Away {
		s.options.Changed()
	}
}

// Health says what is known of the agent. It does not block.
func (s *Session) Health() Health {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.health
}

// EnsurePort is [Client.EnsureNetwork] and then [Client.EnsurePort]. It skips the network if the
// agent was seen to have exactly this one since the connection came up.
func (s *Session) EnsurePort(ctx context.Context, port Port, network Network) error {
	return s.lasting(func() error {
		if err := s.network(ctx, network, false); err != nil {
			return err
		}

		err := s.client.EnsurePort(ctx, port)
		// the agent was restarted a moment ago, or somebody removed the network
		if errors.Is(err, ErrNetworkMissing) {
			if err := s.network(ctx, network, true); err != nil {
				return err
			}
			err = s.client.EnsurePort(ctx, port)
		}

		return s.counted("EnsurePort", err)
	})
}

// EnsureNetwork is [Client.EnsureNetwork]. It does not ask an agent that was seen to have exactly
// this network since it began to answer; see [Session.ListNetworks].
func (s *Session) EnsureNetwork(ctx context.Context, network Network) error {
	return s.network(ctx, network, false)
}

func (s *Session) network(ctx context.Context, network Network, ask bool) error {
	unlock, err := s.networks.Lock(ctx, network.ID)
	if err != nil {
		return timeout(ctx, "ensure network", network.ID, "another call for it has not ended")
	}
	defer unlock()

	if served, known := s.served.Load(network.ID); !ask && known && served.(Network).same(network) {
		return nil
	}

	return s.lasting(func() error {
		if err := s.counted("EnsureNetwork", s.client.EnsureNetwork(ctx, network)); err != nil {
			s.served.Delete(network.ID)
			return err
		}
		s.served.Store(network.ID, network)
		return nil
	})
}

// lasting does something at the agent, and again if there was a new connection meanwhile: the agent
// may have been restarted since it said that it was done.
func (s *Session) lasting(do func() error) error {
	for {
		before := s.client.connections.Load()
		if err := do(); err != nil || s.client.connections.Load() == before {
			return err
		}
	}
}

// DeleteNetwork is [Client.DeleteNetwork].
func (s *Session) DeleteNetwork(ctx context.Context, id string) error {
	unlock, err := s.networks.Lock(ctx, id)
	if err != nil {
		return timeout(ctx, "delete network", id, "another call for it has not ended")
	}
	defer unlock()
	s.served.Delete(id)
	return s.counted("DeleteNetwork", s.client.DeleteNetwork(ctx, id))
}

// DeletePort is [Client.DeletePort].
func (s *Session) DeletePort(ctx context.Context, id string) error {
	return s.counted("DeletePort", s.client.DeletePort(ctx, id))
}

// GetPort is [Client.GetPort].
func (s *Session) GetPort(ctx context.Context, id string) (PortStatus, error) {
	port, err := s.client.GetPort(ctx, id)
	if errors.Is(err, ErrNotFound) {
		return port, err
	}
	return port, s.counted("GetPort", err)
}

// ListPorts is [Client.ListPorts].
func (s *Session) ListPorts(ctx context.Context) ([]PortStatus, error) {
	ports, err := s.client.ListPorts(ctx)
	return ports, s.counted("ListPorts", err)
}

// ListNetworks is [Client.ListNetworks]. A network that the agent does not have in service is asked
// for when it is needed next.
func (s *Session) ListNetworks(ctx context.Context) ([]NetworkStatus, error) {
	networks, err := s.client.ListNetworks(ctx)
	if err != nil {
		return nil, s.counted("ListNetworks", err)
	}

	up := map[string]bool{}
	for _, n := range networks {
		up[n.ID] = n.State == StateUp
	}

	for id := range s.served.Range {
		if !up[id.(string)] {
			s.served.Delete(id)
		}
	}

	return networks, nil
}

// MTU is [Client.MTU].
func (s *Session) MTU(network string) int { return s.client.MTU(network) }

// Peer is [Client.Peer].
func (s *Session) Peer() string { return s.client.Peer() }

func (s *Session) counted(operation string, err error) error {
	if err != nil {
		s.options.Failed(operation, err)
	}
	return err
}
