package opi

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/keylock"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// SessionOptions configure a [Session]. Up may be nil. No function but Up may block.
type SessionOptions struct {
	// Debounce is how long an agent may be away before [Health.Away] says so.
	Debounce time.Duration
	// CheckTimeout bounds one question whether the agent answers.
	CheckTimeout time.Duration

	// Connection is called each time the connection came up or went down, in order.
	Connection func(up bool)
	// Up is called in a goroutine of its own each time the connection came up. Its context ends when the connection goes
	// down. The agent may have been restarted, so everything that it has to serve must be verified.
	Up func(ctx context.Context)
	// Changed is called when [Session.Health] may say something else than before.
	Changed func()
	// Failed is called for each operation on the agent that failed. operation is the name of the method of [Client].
	Failed func(operation string, err error)
	Log    logr.Logger
}

// Health is what a [Session] knows of its agent. Its zero value means that nothing is known yet.
type Health struct {
	// Known says that the connection came up once, or that an attempt to connect failed.
	Known bool
	// Connected says that there is a connection, so that it is worth asking the agent.
	Connected bool
	// Answers says that the agent has answered since the connection came up.
	Answers bool
	// Away says that there has been no connection for as long as the debounce says.
	Away bool
	// Err is why the agent does not answer; nil if it does, or if that is not known yet.
	Err error
}

// Session keeps the connection to one OPI agent, finds out why the agent does not answer, and has networks served before their
// ports. It is safe for concurrent use, but there should be one call for a port at a time.
type Session struct {
	client   *Client
	options  SessionOptions
	networks keylock.Locks[string] // by id: calls for the same network would undo each other's work

	served sync.Map // Network by id: what the agent was seen to have since the connection came up

	mu     sync.Mutex
	health Health
}

// NewSession makes a session. It does not connect: [Session.Run] does.
func NewSession(config Config, options SessionOptions) (*Session, error) {
	client, err := Dial(config)
	if err != nil {
		return nil, err
	}
	return &Session{client: client, options: options}, nil
}

// Run keeps the connection up until ctx ends, and closes it then. It returns an error only if it ended before.
func (s *Session) Run(ctx context.Context) error {
	var tasks sync.WaitGroup
	defer tasks.Wait()
	stop := func() {}
	defer func() { stop() }()
	begin := func(up bool) {
		var during context.Context
		during, stop = context.WithCancel(ctx)
		tasks.Go(func() { s.diagnose(during, up) })
		if up && s.options.Up != nil {
			tasks.Go(func() { s.options.Up(during) })
		}
	}
	begin(false)
	err := s.client.Watch(ctx, func(up bool) {
		if !up && !s.Health().Connected { // the first attempt failed
			s.report(up)
			return
		}
		stop() // before the health is of this connection, which the last one's diagnosis would still change
		s.report(up)
		begin(up)
	})
	if ctx.Err() != nil {
		err = nil
	}
	return errors.Join(err, s.client.Close())
}

// report records that the connection is up or down. What was known of an agent that was and is away stays.
func (s *Session) report(up bool) {
	s.mu.Lock()
	if up || s.health.Connected {
		s.health = Health{Connected: up}
		s.served.Clear()
	}
	s.health.Known = true
	s.mu.Unlock()
	s.options.Log.Info("Connection to OPI agent changed", "connected", up)
	s.options.Connection(up)
	s.options.Changed()
}

// diagnose checks the agent until it answers or ctx ends, and records why it does not answer, which may change from check to
// check. Without a connection it begins after the debounce.
func (s *Session) diagnose(ctx context.Context, connected bool) {
	if !connected {
		if !loop.Sleep(ctx, s.options.Debounce) {
			return
		}
		s.update(ctx, func(h *Health) { h.Away = true })
	}
	for pauses := loop.Backoff(100*time.Millisecond, 10*time.Second); ; {
		bounded, cancel := context.WithTimeout(ctx, s.options.CheckTimeout)
		err := s.client.Check(bounded)
		cancel()
		if ctx.Err() != nil {
			return // the connection came or went meanwhile
		}
		_ = s.counted("Check", err)
		s.update(ctx, func(h *Health) { h.Err, h.Answers = err, err == nil && connected })
		if err == nil || !loop.Sleep(ctx, pauses.Step()) {
			return
		}
	}
}

// update changes the health, unless ctx, which lasts as long as the connection does, has ended.
func (s *Session) update(ctx context.Context, change func(*Health)) {
	s.mu.Lock()
	if ctx.Err() != nil {
		s.mu.Unlock()
		return
	}
	before := s.health
	change(&s.health)
	after := s.health
	s.mu.Unlock()
	news := fmt.Sprint(after.Err) != fmt.Sprint(before.Err)
	if news && after.Err != nil {
		s.options.Log.Info("OPI agent does not answer", "error", after.Err.Error())
	}
	if news || after.Away != before.Away || after.Answers != before.Answers {
		s.options.Changed()
	}
}

// Health says what is known of the agent. It does not block.
func (s *Session) Health() Health {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.health
}

// EnsurePort is [Client.EnsureNetwork] and then [Client.EnsurePort]. It skips the network if the agent was seen to have
// exactly this one since the connection came up.
func (s *Session) EnsurePort(ctx context.Context, port Port, network Network) error {
	if err := s.network(ctx, network, false); err != nil {
		return err
	}
	err := s.client.EnsurePort(ctx, port)
	if errors.Is(err, ErrNetworkMissing) { // the agent was restarted a moment ago, or somebody removed the network
		if err := s.EnsureNetwork(ctx, network); err != nil {
			return err
		}
		err = s.client.EnsurePort(ctx, port)
	}
	return s.counted("EnsurePort", err)
}

// EnsureNetwork is [Client.EnsureNetwork]. It always asks the agent.
func (s *Session) EnsureNetwork(ctx context.Context, network Network) error {
	return s.network(ctx, network, true)
}

func (s *Session) network(ctx context.Context, network Network, ask bool) error {
	unlock, err := s.networks.Lock(ctx, network.ID)
	if err != nil {
		return timeout(ctx, "ensure network", network.ID, "another call for it has not ended")
	}
	defer unlock()
	if served, known := s.served.Load(network.ID); !ask && known && network.differs(served.(Network)) == "" {
		return nil
	}
	if err := s.counted("EnsureNetwork", s.client.EnsureNetwork(ctx, network)); err != nil {
		return err
	}
	s.served.Store(network.ID, network)
	return nil
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

// ListPorts is [Client.ListPorts].
func (s *Session) ListPorts(ctx context.Context) ([]PortStatus, error) {
	ports, err := s.client.ListPorts(ctx)
	return ports, s.counted("ListPorts", err)
}

func (s *Session) counted(operation string, err error) error {
	if err != nil {
		s.options.Failed(operation, err)
	}
	return err
}
