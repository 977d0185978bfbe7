package provisioning

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
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

// xpuSession is an XPU of the configuration and the session with its OPI agent. Safe for concurrent use.
type xpuSession struct {
	*opi.Session
	xpu     XPU
	direct  *Direct
	changed notify.Signal // the connection came or went
	log     logr.Logger
}

func newXPUSession(xpu XPU, d *Direct, m *metrics) (*xpuSession, error) {
	dialect, err := dialects.Named(xpu.Dialect)
	if err != nil {
		return nil, fmt.Errorf("xPU %s: %w", xpu.Name, err)
	}
	config := opi.Config{Endpoint: xpu.Endpoint, Dialect: dialect}
	if xpu.TLS != nil {
		config.ReloadTLS = xpu.TLS.load
	}
	x := &xpuSession{xpu: xpu, direct: d, log: d.options.Log.WithValues("xpu", xpu.Name)}
	x.Session, err = opi.NewSession(config, opi.SessionOptions{
		Debounce: d.options.Debounce, CheckTimeout: verifyTimeout, Log: x.log,
		Connection: func(up bool) {
			m.report(xpu.Name, up)
			x.changed.Notify()
		},
		Up:      x.verify,
		Changed: d.options.Changed,
		Failed:  func(operation string, _ error) { m.errors.WithLabelValues(xpu.Name, operation).Inc() },
	})
	if err != nil {
		return nil, fmt.Errorf("xPU %s: %w", xpu.Name, err)
	}
	m.report(xpu.Name, false)
	return x, nil
}

// verify has the agent serve the networks of the configuration, and what the journal says of this xPU. Ports that the
// agent does not serve are tried again until it does, or until ctx ends.
func (x *xpuSession) verify(ctx context.Context) {
	var networks sync.WaitGroup
	defer networks.Wait()
	for name, network := range x.direct.config.Networks {
		networks.Go(func() { x.verifyNetwork(ctx, name, network) })
	}
	var pending []function.ID
	for _, a := range x.direct.journal.All() {
		if wantsPort(a) && x.direct.xpuOf(a.PF) == x {
			pending = append(pending, a.Function)
		}
	}
	for pauses := retries(); ; {
		pending = x.verifyAll(ctx, pending)
		if len(pending) == 0 || !loop.Sleep(ctx, pauses.Step()) {
			return
		}
	}
}

// verifyNetwork has what is wrong with a network in the log before a pod needs it.
func (x *xpuSession) verifyNetwork(ctx context.Context, name string, network Network) {
	bounded, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()
	if err := x.EnsureNetwork(bounded, network.opi(name)); err != nil && ctx.Err() == nil {
		x.log.Error(err, "The xPU does not serve a network; it is tried again when a Port needs it", "network", name)
	}
}

// wantsPort says whether the xPU is to serve a Port for the attachment. An attachment that is on its way out keeps its
// Port until it is deprovisioned, but a Port that is missing is not made again for it.
func wantsPort(a journal.Attachment) bool { return a.Port != nil && a.State != journal.Releasing }

// verifyAll verifies the Ports of these Functions, and returns the Functions for which that failed.
func (x *xpuSession) verifyAll(ctx context.Context, ids []function.ID) (failed []function.ID) {
	var mutex sync.Mutex
	var group errgroup.Group
	group.SetLimit(verifyAtOnce)
	for _, id := range ids {
		group.Go(func() error {
			if err := x.verifyOne(ctx, id); err != nil && ctx.Err() == nil {
				x.log.Error(err, "The xPU does not serve a Port that it should", "function", id)
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

// verifyOne has the agent serve the Function's Port if the journal has one. It asks the journal under the Function's lock,
// so that it does not make a Port again that is being deleted.
func (x *xpuSession) verifyOne(ctx context.Context, id function.ID) error {
	unlock, err := x.direct.functions.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	a, ok := x.direct.journal.Get(id)
	if !ok || !wantsPort(a) {
		return nil
	}
	network, known := x.direct.config.Networks[a.Port.Network]
	if !known {
		return fmt.Errorf("networks of the configuration has no network %s any more", a.Port.Network)
	}
	port, err := opi.FunctionPort(id, a.Port.MAC, a.Port.Network)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()
	return x.EnsurePort(ctx, port, network.opi(a.Port.Network))
}

// until asks the agent again and again, after pauses and whenever the connection changes, until ask returns nil. When ctx
// ends, or if the agent can never do it, it returns why it was not done.
func (x *xpuSession) until(ctx context.Context, ask func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	changes := x.changed.Subscribe(ctx)
	var why error
	for pauses := retries(); ; {
		err := ask(ctx)
		if err == nil {
			return nil
		}
		// An answer that was cut short says less than the one before.
		if why == nil || !errors.Is(err, opi.ErrTimeout) {
			why = fmt.Errorf("xPU %s at %s: %w", x.xpu.Name, x.xpu.Endpoint, err)
		}
		if errors.Is(err, opi.ErrInvalid) || errors.Is(err, opi.ErrUnsupported) {
			return why
		}
		if !loop.Wait(ctx, changes, pauses.Step()) {
			return why
		}
	}
}
