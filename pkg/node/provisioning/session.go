package provisioning

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
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
		return nil, err
	}
	config := opi.Config{Endpoint: xpu.Endpoint, Dialect: dialect}
	if xpu.TLS != nil {
		config.ReloadTLS = xpu.TLS.load
	}
	x := &xpuSession{xpu: xpu, direct: d, log: d.options.Log.WithValues("xpu", xpu.Name)}
	connected := m.connected.WithLabelValues(xpu.Name) // 0 until the connection comes up
	x.Session, err = opi.NewSession(config, opi.SessionOptions{
		Debounce: d.options.Debounce, CheckTimeout: verifyTimeout, Log: x.log,
		Connection: func(up bool) {
			value := 0.0
			if up {
				value = 1
			}
			connected.Set(value)
			x.changed.Notify()
		},
		Up:      x.verify,
		Changed: d.options.Changed,
		Failed:  func(operation string, _ error) { m.errors.WithLabelValues(xpu.Name, operation).Inc() },
	})
	return x, err
}

// verify has the agent serve the networks of the configuration and the Ports that the journal has for this xPU. It retries
// Ports until the agent serves them or ctx ends. Networks are tried once, so that a problem is in the log before a pod
// needs them.
func (x *xpuSession) verify(ctx context.Context) {
	var networks sync.WaitGroup
	defer networks.Wait()
	for name, network := range x.direct.config.Networks {
		networks.Go(func() {
			bounded, cancel := context.WithTimeout(ctx, verifyTimeout)
			defer cancel()
			if err := x.EnsureNetwork(bounded, opi.NewNetwork(name, network.VLAN, network.VNI)); err != nil && ctx.Err() == nil {
				x.log.Error(err, "The xPU does not serve a network; it is tried again when a Port needs it", "network", name)
			}
		})
	}
	var pending []function.ID
	for _, a := range x.direct.journal.All() {
		if wantsPort(a) && x.direct.xpuOf(a.PF) == x {
			pending = append(pending, a.Function)
		}
	}
	for pauses := retries(); ; {
		failed := verifyAll(ctx, pending, x.verifyPort)
		if len(failed) == 0 || !loop.Sleep(ctx, pauses.Step()) {
			return
		}
		pending = slices.Collect(maps.Keys(failed))
	}
}

// verifyPort has the agent serve the Function's Port if the journal has one. It reads the journal under the Function's
// lock, so that it does not create a Port that is being deleted.
func (x *xpuSession) verifyPort(ctx context.Context, id function.ID) error {
	unlock, err := x.direct.functions.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	a, _ := x.direct.journal.Get(id)
	if !wantsPort(a) {
		return nil
	}
	bounded, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()
	if err = x.ensure(bounded, a); err != nil && ctx.Err() == nil {
		x.log.Error(err, "The xPU does not serve a Port that it should", "function", id)
	}
	return err
}

// ensure asks the agent once to serve a Port. A Port of the journal may have a network that the configuration lacks by now.
func (x *xpuSession) ensure(ctx context.Context, a journal.Attachment) error {
	network, known := x.direct.config.Networks[a.Port.Network]
	if !known {
		return fmt.Errorf("networks of the configuration has no network %s any more", a.Port.Network)
	}
	port, err := opi.FunctionPort(a.Function, a.Port.MAC, a.Port.Network)
	if err != nil {
		return err
	}
	return x.EnsurePort(ctx, port, opi.NewNetwork(a.Port.Network, network.VLAN, network.VNI))
}

// work repeats a request to the agent as [converge] does. It holds the lock of the Function.
func (x *xpuSession) work(ctx context.Context, id function.ID, ask func(context.Context) error) error {
	unlock, err := x.direct.functions.Lock(ctx, id)
	if err != nil {
		return fmt.Errorf("its Port is being verified: %w", err)
	}
	defer unlock()
	return converge(ctx, x.changed.Subscribe, func(ctx context.Context) progress {
		err := ask(ctx)
		if err == nil {
			return progress{}
		}
		return progress{
			missing: fmt.Errorf("xPU %s at %s: %w", x.xpu.Name, x.xpu.Endpoint, err),
			never:   errors.Is(err, opi.ErrInvalid) || errors.Is(err, opi.ErrUnsupported),
		}
	})
}

// metrics are those of direct mode.
type metrics struct {
	connected *prometheus.GaugeVec
	errors    *prometheus.CounterVec
}

func newMetrics(registry prometheus.Registerer) *metrics {
	factory := promauto.With(registry)
	return &metrics{
		connected: factory.NewGaugeVec(prometheus.GaugeOpts{
			Name: "xpu_direct_connected", Help: "1 while there is a connection to the OPI agent of an xPU, else 0, by xPU.",
		}, []string{"xpu"}),
		errors: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_direct_opi_errors_total", Help: "Failed operations on OPI agents, by xPU and operation.",
		}, []string{"xpu", "operation"}),
	}
}
