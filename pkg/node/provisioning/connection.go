package provisioning

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/keylock"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
)

const (
	// verifyTimeout bounds one attempt to verify a Port or a network, the lock of which is held meanwhile.
	verifyTimeout = 15 * time.Second
	// verifyAtOnce is how many Ports of one xPU are verified at the same time.
	verifyAtOnce = 8
)

// xpuConnection is an XPU of the configuration and the connection to its OPI agent. Safe for concurrent use.
type xpuConnection struct {
	xpu      XPU
	client   *opi.Client
	direct   *Direct
	metrics  *metrics
	networks keylock.Locks[string] // by id: calls for the same network would undo each other's work
	changed  notify.Signal         // the connection came or went
	log      logr.Logger

	mutex     sync.Mutex
	connected bool
	since     time.Time       // when the connection went, if not connected
	why       string          // there is no connection; empty as long as it is not known
	served    map[string]bool // networks that the agent was seen to have since the connection came up, by id
}

func newXPUConnection(xpu XPU, d *Direct, m *metrics) (*xpuConnection, error) {
	dialect, err := dialects.Named(xpu.Dialect)
	if err != nil {
		return nil, fmt.Errorf("xPU %s: %w", xpu.Name, err)
	}
	config := opi.Config{Endpoint: xpu.Endpoint, Dialect: dialect}
	if xpu.TLS != nil {
		config.ReloadTLS = xpu.TLS.load
	}
	client, err := opi.Dial(config)
	if err != nil {
		return nil, fmt.Errorf("xPU %s: %w", xpu.Name, err)
	}
	log := d.log.WithValues("xpu", xpu.Name)
	return &xpuConnection{
		xpu: xpu, client: client, direct: d, metrics: m, log: log, since: time.Now(), served: map[string]bool{},
	}, nil
}

// run follows the connection until ctx ends. Between two reports of it there is one thing to do: verify what the agent
// has, or find out why it is away.
func (c *xpuConnection) run(ctx context.Context) error {
	var tasks sync.WaitGroup
	defer tasks.Wait()
	stop := func() {}
	begin := func(task func(context.Context)) {
		stop()
		var during context.Context
		during, stop = context.WithCancel(ctx)
		tasks.Go(func() { task(during) })
	}
	defer func() { stop() }()
	begin(c.diagnose)
	err := c.client.Watch(ctx, func(up bool) {
		c.report(up)
		if up {
			begin(c.verify)
		} else {
			begin(c.diagnose)
		}
	})
	return errors.Join(err, c.client.Close())
}

func (c *xpuConnection) report(up bool) {
	c.mutex.Lock()
	if c.connected && !up {
		c.since = time.Now()
	}
	c.connected, c.why, c.served = up, "", map[string]bool{}
	c.mutex.Unlock()
	c.metrics.report(c.xpu.Name, up)
	c.log.Info("Connection to OPI agent changed", "connected", up)
	c.changed.Notify()
	c.direct.options.Changed()
}

// away is nothing new until the debounce is over.
func (c *xpuConnection) away() string {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.connected || time.Since(c.since) < c.direct.options.Debounce {
		return ""
	}
	const advice = "cannot be reached; check that it runs, and the certificates of both sides"
	message := fmt.Sprintf("the OPI agent of xPU %s at %s %s", c.xpu.Name, c.xpu.Endpoint, advice)
	if c.why != "" {
		message += ": " + c.why
	}
	return message
}

// diagnose finds out why there is no connection, if there still is none after the debounce, again and again until ctx
// ends: who mends one thing should be told of the next.
func (c *xpuConnection) diagnose(ctx context.Context) {
	if !loop.Sleep(ctx, c.direct.options.Debounce) {
		return
	}
	c.direct.options.Changed()
	for pauses := retries(); ; {
		err := c.client.Check(ctx)
		if err == nil || ctx.Err() != nil {
			return // another report comes, or came
		}
		c.explain(oneLine(err))
		if !loop.Sleep(ctx, pauses.Step()) {
			return
		}
	}
}

// explain tells why there is no connection, if that is news.
func (c *xpuConnection) explain(why string) {
	c.mutex.Lock()
	known := c.why == why
	c.why = why
	c.mutex.Unlock()
	if known {
		return
	}
	c.log.Info("OPI agent cannot be reached", "error", why)
	c.direct.options.Changed()
}

// verify has the agent serve the networks of the configuration, and what the journal says of this xPU. Ports that the
// agent does not serve are tried again until it does, or until ctx ends.
func (c *xpuConnection) verify(ctx context.Context) {
	var networks sync.WaitGroup
	defer networks.Wait()
	for name, network := range c.direct.config.Networks {
		networks.Go(func() { c.verifyNetwork(ctx, name, network) })
	}
	pending := c.wanted()
	for pauses := retries(); ; {
		pending = c.verifyAll(ctx, pending)
		if len(pending) == 0 || ctx.Err() != nil {
			return
		}
		if !loop.Sleep(ctx, pauses.Step()) {
			return
		}
	}
}

// verifyNetwork has what is wrong with a network in the log before a pod needs it.
func (c *xpuConnection) verifyNetwork(ctx context.Context, name string, network Network) {
	bounded, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()
	if err := c.network(bounded, network.opi(name)); err != nil && ctx.Err() == nil {
		c.log.Error(err, "The xPU does not serve a network; it is tried again when a Port needs it", "network", name)
	}
}

// wanted are the Functions whose Ports this xPU is to serve.
func (c *xpuConnection) wanted() []function.ID {
	var ids []function.ID
	for _, a := range c.direct.journal.All() {
		if wantsPort(a) && c.direct.card(a.PF) == c {
			ids = append(ids, a.Function)
		}
	}
	return ids
}

// wantsPort says whether the xPU is to serve a Port for the attachment: one that is on its way out keeps what it has
// until it is deprovisioned, but does not get it again.
func wantsPort(a journal.Attachment) bool { return a.Port != nil && a.State != journal.Releasing }

// verifyAll returns those that failed.
func (c *xpuConnection) verifyAll(ctx context.Context, ids []function.ID) (failed []function.ID) {
	var mutex sync.Mutex
	var group errgroup.Group
	group.SetLimit(verifyAtOnce)
	for _, id := range ids {
		group.Go(func() error {
			if err := c.verifyOne(ctx, id); err != nil && ctx.Err() == nil {
				c.log.Error(err, "The xPU does not serve a Port that it should", "function", id)
				mutex.Lock()
				defer mutex.Unlock()
				failed = append(failed, id)
			}
			return nil
		})
	}
	_ = group.Wait() // the errors are in failed
	return failed
}

// verifyOne asks the journal under the Function's lock, so that a Port is not made again that is being deleted.
func (c *xpuConnection) verifyOne(ctx context.Context, id function.ID) error {
	unlock, err := c.direct.functions.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	a, ok := c.direct.journal.Get(id)
	if !ok || !wantsPort(a) {
		return nil
	}
	network, known := c.direct.config.Networks[a.Port.Network]
	if !known {
		return fmt.Errorf("networks of the configuration has no network %s any more", a.Port.Network)
	}
	port, err := opiPort(id, a.Port.Network, a.Port.MAC)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()
	return c.ensure(ctx, port, network.opi(a.Port.Network))
}

// until repeats what the agent is asked to do until it is done: after pauses, and when the connection changes. When ctx
// ends, or if it can never be done, it returns why it is not.
func (c *xpuConnection) until(ctx context.Context, ask func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	changes := c.changed.Subscribe(ctx)
	var why error
	for pauses := retries(); ; {
		err := ask(ctx)
		if err == nil {
			return nil
		}
		// An answer that was cut short says less than the one before.
		if why == nil || !errors.Is(err, opi.ErrTimeout) {
			why = fmt.Errorf("xPU %s at %s: %w", c.xpu.Name, c.xpu.Endpoint, err)
		}
		if errors.Is(err, opi.ErrInvalid) || errors.Is(err, opi.ErrUnsupported) {
			return why
		}
		if !loop.Wait(ctx, changes, pauses.Step()) {
			return why
		}
	}
}

// ensure has the agent serve the Port, in the network as the configuration has it: the agent may have another one under
// that id, of an earlier configuration.
func (c *xpuConnection) ensure(ctx context.Context, port opi.Port, network opi.Network) error {
	if err := c.network(ctx, network); err != nil {
		return err
	}
	err := c.counted("EnsurePort", c.client.EnsurePort(ctx, port))
	if !errors.Is(err, opi.ErrNetworkMissing) {
		return err
	}
	// The agent was just restarted, or somebody removed the network.
	c.setServed(network.ID, false)
	if err := c.network(ctx, network); err != nil {
		return err
	}
	return c.counted("EnsurePort", c.client.EnsurePort(ctx, port))
}

// network has the agent serve the network, unless it was seen to.
func (c *xpuConnection) network(ctx context.Context, network opi.Network) error {
	unlock, err := c.networks.Lock(ctx, network.ID)
	if err != nil {
		return fmt.Errorf("its network is not up yet: %w", err)
	}
	defer unlock()
	if c.isServed(network.ID) {
		return nil
	}
	if err := c.counted("EnsureNetwork", c.client.EnsureNetwork(ctx, network)); err != nil {
		return err
	}
	c.setServed(network.ID, true)
	return nil
}

func (c *xpuConnection) isServed(network string) bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.served[network]
}

func (c *xpuConnection) setServed(network string, served bool) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.served[network] = served
}

func (c *xpuConnection) remove(ctx context.Context, id string) error {
	err := c.counted("DeletePort", c.client.DeletePort(ctx, id))
	if errors.Is(err, opi.ErrNotFound) {
		return nil
	}
	return err
}

func (c *xpuConnection) counted(operation string, err error) error {
	if err != nil && !errors.Is(err, opi.ErrNetworkMissing) {
		c.metrics.failed(c.xpu.Name, operation)
	}
	return err
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
