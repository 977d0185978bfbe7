package controller

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// Agent is what the reconcilers use of an OPI agent. [opi.Client] is one.
type Agent interface {
	EnsureNetwork(ctx context.Context, n opi.Network) error
	DeleteNetwork(ctx context.Context, id string) error
	EnsurePort(ctx context.Context, p opi.Port) error
	DeletePort(ctx context.Context, id string) error
	ListPorts(ctx context.Context) ([]opi.PortStatus, error)
	Check(ctx context.Context) error
}

// Connection is an Agent and the way to it.
type Connection interface {
	Agent
	// Watch keeps the connection up and reports, in order, each time it came up or went down, until the context
	// ends. Its first report comes soon, also if there is no connection.
	Watch(ctx context.Context, changed func(connected bool)) error
	Close() error
}

// Dialer makes a Connection without waiting for it.
type Dialer func(opi.Config) (Connection, error)

// connection is what is known of an XPU's agent.
type connection struct {
	agent Agent // nil unless there is a Connection that has reported
	state connectivity
	since time.Time // of the state
	why   string    // why there is no Connection; empty if there is one
}

// connectivity is whether an agent can be reached.
type connectivity int

const (
	unknown connectivity = iota // not known yet; a report will come
	connected
	disconnected
)

// Clients has a Connection to the OPI agent of each XPU, by the XPU's name, and tells when one comes or goes. Safe for
// concurrent use.
type Clients struct {
	dial    Dialer
	metrics *metrics
	log     logr.Logger

	mu        sync.Mutex
	agents    map[string]*agent
	refused   map[string]connection // XPUs whose configuration does not allow a Connection
	listeners []func(xpu string, up bool)
	watches   sync.WaitGroup
	closed    bool
}

// agent is a Connection whose failures are counted.
type agent struct {
	Connection
	xpu         string
	metrics     *metrics
	fingerprint string
	cancel      context.CancelFunc

	// Under the lock of Clients.
	state connectivity
	since time.Time
}

func newClients(dial Dialer, m *metrics, log logr.Logger) *Clients {
	return &Clients{dial: dial, metrics: m, log: log, agents: map[string]*agent{}, refused: map[string]connection{}}
}

// Start closes every connection once the context ends.
func (c *Clients) Start(ctx context.Context) error {
	<-ctx.Done()
	c.mu.Lock()
	c.closed = true
	agents := c.agents
	c.agents = map[string]*agent{}
	c.mu.Unlock()
	for _, a := range agents {
		c.end(a)
	}
	c.watches.Wait()
	return nil
}

// connect has a connection to the XPU's agent with this configuration. The fingerprint stands for everything in it:
// while it stays the same the connection stays.
func (c *Clients) connect(xpu, fingerprint string, config opi.Config) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errors.New("the controller is shutting down")
	}
	if a := c.agents[xpu]; a != nil {
		if a.fingerprint == fingerprint {
			return nil
		}
		delete(c.agents, xpu)
		c.end(a)
	}
	connection, err := c.dial(config)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	a := &agent{Connection: connection, xpu: xpu, metrics: c.metrics, fingerprint: fingerprint, cancel: cancel}
	c.agents[xpu] = a
	delete(c.refused, xpu)
	c.watches.Go(func() {
		if err := connection.Watch(ctx, func(up bool) { c.report(a, up) }); err != nil && ctx.Err() == nil {
			c.log.Error(err, "connection to OPI agent is not watched any more", "xpu", xpu)
		}
	})
	return nil
}

// refuse closes the connection to the XPU's agent, if there is one, and tells the listeners that there is none.
func (c *Clients) refuse(xpu, why string) {
	c.mu.Lock()
	known := c.refused[xpu].why == why
	c.closeLocked(xpu)
	c.refused[xpu] = connection{state: disconnected, since: time.Now(), why: why}
	c.mu.Unlock()
	if !known {
		c.tell(xpu, false)
	}
}

// disconnect forgets the XPU.
func (c *Clients) disconnect(xpu string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closeLocked(xpu)
	delete(c.refused, xpu)
}

func (c *Clients) closeLocked(xpu string) {
	if a := c.agents[xpu]; a != nil {
		delete(c.agents, xpu)
		c.end(a)
	}
}

func (c *Clients) end(a *agent) {
	a.cancel()
	if err := a.Close(); err != nil {
		c.log.Error(err, "closing the connection to an OPI agent", "xpu", a.xpu)
	}
}

// report takes note of a connection that came or went, and tells the listeners.
func (c *Clients) report(a *agent, up bool) {
	c.mu.Lock()
	if c.agents[a.xpu] != a {
		c.mu.Unlock()
		return
	}
	a.state, a.since = disconnected, time.Now()
	if up {
		a.state = connected
	}
	c.mu.Unlock()
	c.log.Info("connection to OPI agent changed", "xpu", a.xpu, "connected", up)
	c.tell(a.xpu, up)
}

// tell has the listeners look at the XPU.
func (c *Clients) tell(xpu string, up bool) {
	c.mu.Lock()
	listeners := c.listeners
	c.mu.Unlock()
	for _, listen := range listeners {
		listen(xpu, up)
	}
}

// contact says how the XPU's agent can be reached.
func (c *Clients) contact(xpu string) connection {
	c.mu.Lock()
	defer c.mu.Unlock()
	if a := c.agents[xpu]; a != nil && a.state != unknown {
		return connection{agent: a, state: a.state, since: a.since}
	}
	return c.refused[xpu]
}

// source enqueues requests when the connection to an XPU's agent comes up or goes down.
func (c *Clients) source(requests func(ctx context.Context, xpu string, up bool) []reconcile.Request) source.Source {
	return source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.listeners = append(c.listeners, func(xpu string, up bool) {
			for _, request := range requests(ctx, xpu, up) {
				queue.Add(request)
			}
		})
		return nil
	})
}

func (a *agent) counted(operation string, err error) error {
	a.metrics.failed(a.xpu, operation, err)
	return err
}

func (a *agent) EnsureNetwork(ctx context.Context, n opi.Network) error {
	return a.counted("EnsureNetwork", a.Connection.EnsureNetwork(ctx, n))
}

func (a *agent) DeleteNetwork(ctx context.Context, id string) error {
	return a.counted("DeleteNetwork", a.Connection.DeleteNetwork(ctx, id))
}

func (a *agent) EnsurePort(ctx context.Context, p opi.Port) error {
	return a.counted("EnsurePort", a.Connection.EnsurePort(ctx, p))
}

func (a *agent) DeletePort(ctx context.Context, id string) error {
	return a.counted("DeletePort", a.Connection.DeletePort(ctx, id))
}

func (a *agent) ListPorts(ctx context.Context) ([]opi.PortStatus, error) {
	ports, err := a.Connection.ListPorts(ctx)
	return ports, a.counted("ListPorts", err)
}

func (a *agent) Check(ctx context.Context) error {
	return a.counted("Check", a.Connection.Check(ctx))
}
