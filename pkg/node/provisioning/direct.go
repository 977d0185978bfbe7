// SPDX-License-Identifier: Apache-2.0

package provisioning

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"go.opentelemetry.io/otel/attribute"
	"golang.org/x/sync/errgroup"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/keylock"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
)

// DirectOptions configure a [Direct].
type DirectOptions struct {
	// Installation marks the objects of this node at the OPI agents.
	Installation opi.Installation
	// Changed is called when the result of [Direct.Away] may have changed. It must not block.
	Changed func()
	// FailedGrace has the meaning of [opi.Config.FailedGrace].
	FailedGrace time.Duration
	// Debounce is how long an OPI agent may be out of reach before [Direct.Away] reports it. The
	// default is 500 ms, so that the kubelet learns it within a second.
	Debounce time.Duration
	Registry prometheus.Registerer
	// Card describes the card of a PF, which an OPI agent may know too. It may be nil.
	Card func(pci.Address) function.Card
	// OwnMAC returns the permanent MAC address of a Function, or "" if it is not known. It may be
	// nil if no xPU of the configuration needs such addresses.
	OwnMAC func(function.ID) function.MAC
	// Tracer records the stages of Ports; nil records nothing.
	Tracer *tracing.Tracer
	Log    logr.Logger
}

// Direct is the [Provisioner] that calls the OPI agents itself. It trusts the journal: the caller
// records the Port before it calls Provision, and records the release of the Port before it calls
// Deprovision.
type Direct struct {
	config    *Config
	xpus      []*xpuSession
	functions keylock.Locks[function.ID]
	journal   *journal.Journal
	options   DirectOptions
	connected *prometheus.GaugeVec
	errors    *prometheus.CounterVec
}

var _ Provisioner = (*Direct)(nil)

// NewDirect returns a provisioner. [Direct.Run] connects it to the OPI agents.
func NewDirect(config *Config, records *journal.Journal, options DirectOptions) (*Direct, error) {
	options.Debounce = cmp.Or(options.Debounce, 500*time.Millisecond)
	factory := promauto.With(options.Registry)
	d := &Direct{
		config: config, journal: records, options: options,
		connected: factory.NewGaugeVec(prometheus.GaugeOpts{
			Name: "xpu_direct_connected",
			Help: "1 while there is a connection to the OPI agent of an xPU, else 0, by xPU.",
		}, []string{"xpu"}),
		errors: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_direct_opi_errors_total",
			Help: "Failed operations on OPI agents, by xPU and operation.",
		}, []string{"xpu", "operation"}),
	}

	for _, xpu := range config.XPUs {
		x, err := newXPUSession(xpu, d)
		if err != nil {
			return nil, fmt.Errorf("xPU %s: %w", xpu.Name, err)
		}
		d.xpus = append(d.xpus, x)
	}

	return d, nil
}

// Run keeps the connections to the OPI agents up until ctx ends. Each time a connection comes up,
// Run verifies all Ports of the journal, because an agent that was restarted may have forgotten
// them.
func (d *Direct) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, x := range d.xpus {
		group.Go(func() error { return x.Run(ctx) })
	}
	group.Go(func() error { <-ctx.Done(); return nil })
	return group.Wait()
}

// Away returns why the OPI agent of the Function's xPU has been out of reach for longer than
// [DirectOptions.Debounce]. See [Provisioner].
func (d *Direct) Away(f function.Function) string {
	x := d.xpuOf(f.PF)
	if x == nil {
		return ""
	}

	health := x.Health()
	if !health.Away {
		return ""
	}

	const format = "the OPI agent of xPU %s at %s cannot be reached; check that it runs, and the " +
		"certificates of both sides"
	message := fmt.Sprintf(format, x.xpu.Name, x.xpu.Endpoint)
	if health.Err != nil {
		message += ": " + strings.ReplaceAll(health.Err.Error(), "\n", "; ")
	}

	return message
}

// PortID names the Port as the xPU's eswitch names the Function, if the agent has said which of its
// host's PFs it serves, or knows Functions by number. See [Provisioner].
func (d *Direct) PortID(f function.Function) string {
	x := d.xpuOf(f.PF)
	if x == nil {
		return ""
	}

	pf, of := x.hostPF(f.PF), ""
	switch f.Kind {
	case function.VF:
		of = fmt.Sprintf("vf%d", f.Index)
	case function.SF:
		number, _ := f.ID.SFNum()
		of = fmt.Sprintf("sf%d", number)
	}

	if id := opi.PortIDAt(pf, of); pf != "" && len(id) >= opi.MinID {
		return id
	}
	return "" // a whole PF of a card that names no controllers, or an agent that says nothing
}

// NeedsOwnMAC reads the dialect in the configuration. See [Provisioner].
func (d *Direct) NeedsOwnMAC(pf pci.Address) bool {
	x := d.xpuOf(pf)
	return x != nil && needsOwnMAC(x.xpu.Dialect)
}

// Provision has the OPI agent serve the Port. See [Provisioner].
func (d *Direct) Provision(ctx context.Context, a journal.Attachment) (_ Provisioned, err error) {
	network, known := d.config.Networks[a.Port.Network]
	switch x := d.xpuOf(a.PF); {
	case x == nil:
		err = fmt.Errorf("no xPU of the configuration has PF %s; add it to its pfs", a.PF)
	case !known:
		err = errors.New("networks of the configuration has no such network; add it, or name " +
			"another one")
	case isRequest(a) && !network.allows(a.Pod.Namespace): // pods that have joined stay
		err = fmt.Errorf("Forbidden: networks[%s].allowedNamespaces of the configuration does "+
			"not have namespace %q", a.Port.Network, a.Pod.Namespace)
	case a.Port.AssignAddresses:
		err = errors.New("ipam.type xpu needs xpu-controller, which has the networks' addresses; " +
			"use another IPAM plugin in direct mode")
	default:
		traced, end := d.options.Tracer.Stage(ctx, a.Owner(), "serve Port",
			attribute.String("xpu.function", a.Function.String()),
			attribute.String("xpu.name", x.xpu.Name),
			attribute.String("xpu.network", a.Port.Network))
		err = x.work(traced, a.Function, func(ctx context.Context) error {
			return x.ensure(ctx, a)
		})
		end(err)
	}

	if err != nil {
		return Provisioned{}, fmt.Errorf("the xPU does not serve Function %s in network %s: %w",
			a.Function, a.Port.Network, err)
	}

	return Provisioned{
		MTU: cmp.Or(int(network.MTU),
			d.xpuOf(a.PF).MTU(d.options.Installation.NetworkID(a.Port.Network))),
	}, nil
}

// Deprovision has the OPI agent delete the Port, and waits until the agent has none. See
// [Provisioner].
func (d *Direct) Deprovision(ctx context.Context, a journal.Attachment) error {
	x := d.xpuOf(a.PF)
	if x == nil {
		d.options.Log.Info("No xPU of the configuration has the PF: the Port is taken to be gone",
			"function", a.Function, "pf", a.PF)
		return nil
	}

	err := x.work(ctx, a.Function, func(ctx context.Context) error {
		id, err := portID(a)
		if err != nil {
			return err
		}
		return x.DeletePort(ctx, id)
	})

	if errors.Is(err, opi.ErrUnknown) {
		return fmt.Errorf("the xPU may still serve Function %s, which is kept from other pods; "+
			"look at what the OPI agent has there, "+
			"and delete the port of this id: %w", a.Function, err)
	}

	if err != nil {
		return fmt.Errorf("the xPU may still serve Function %s: %w", a.Function, err)
	}

	return nil
}

// xpuOf returns the xPU whose configuration names the PF, otherwise the xPU that takes every PF,
// otherwise nil.
func (d *Direct) xpuOf(pf pci.Address) *xpuSession {
	var every *xpuSession
	for _, x := range d.xpus {
		if slices.Contains(x.xpu.PFs, pf) {
			return x
		}
		if len(x.xpu.PFs) == 0 {
			every = x
		}
	}

	return every
}

// xpuSession is an XPU of the configuration and the session with its OPI agent. It is safe for
// concurrent use.
type xpuSession struct {
	*opi.Session
	xpu     XPU
	direct  *Direct
	changed notify.Signal // notified when the connection comes up or is lost
	// the PFs of the host as the agent reported them last; nil before
	reported atomic.Pointer[[]opi.HostPF]
	log      logr.Logger
}

func newXPUSession(xpu XPU, d *Direct) (*xpuSession, error) {
	dialect, err := dialects.Named(xpu.Dialect)
	if err != nil {
		return nil, err
	}

	config := opi.Config{Endpoint: xpu.Endpoint, Dialect: dialect,
		Installation: d.options.Installation, FailedGrace: d.options.FailedGrace,
		Stats: d.options.Tracer.ClientHandler()}
	if xpu.VTEP != "" {
		if config.VTEP, err = netip.ParseAddr(xpu.VTEP); err != nil {
			return nil, fmt.Errorf("vtep: %w", err)
		}
	}
	if xpu.TLS != nil {
		config.ReloadTLS = xpu.TLS.load
	}

	x := &xpuSession{xpu: xpu, direct: d, log: d.options.Log.WithValues("xpu", xpu.Name)}
	connected := d.connected.WithLabelValues(xpu.Name) // the metric is 0 from the start
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
		Failed: func(operation string, _ error) {
			d.errors.WithLabelValues(xpu.Name, operation).Inc()
		},
	})

	return x, err
}

// verify has the agent serve the networks of the configuration and the Ports that the journal has
// for this xPU. It retries Ports until the agent serves them or ctx ends. It tries networks once,
// so that a problem is in the log before a pod needs the network.
func (x *xpuSession) verify(ctx context.Context) {
	x.askForPFs(ctx)

	var networks sync.WaitGroup
	defer networks.Wait()

	for name, network := range x.direct.config.Networks {
		networks.Go(func() {
			bounded, cancel := context.WithTimeout(ctx, verifyTimeout)
			defer cancel()
			if err := x.EnsureNetwork(bounded, x.network(name, network)); err != nil &&
				ctx.Err() == nil {
				x.log.Error(err, "The xPU does not serve a network; it is tried again when a "+
					"Port needs it", "network", name)
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

// verifyPort has the agent serve the Function's Port if the journal has one. It reads the journal
// under the Function's lock, so that it does not create a Port that is being deleted.
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

// isRequest reports whether the pod does not have the Function yet.
func isRequest(a journal.Attachment) bool { return a.State == "" || a.State == journal.Reserved }

// ensure asks the agent once to serve a Port. The network of a Port in the journal may be missing
// in the configuration, because the configuration has changed since.
func (x *xpuSession) ensure(ctx context.Context, a journal.Attachment) error {
	network, known := x.direct.config.Networks[a.Port.Network]
	if !known {
		return fmt.Errorf("networks of the configuration has no network %s any more",
			a.Port.Network)
	}
	if isRequest(a) && !network.allows(a.Pod.Namespace) {
		return fmt.Errorf("Forbidden: network %s does not allow namespace %q", a.Port.Network,
			a.Pod.Namespace)
	}

	if needsOwnMAC(x.xpu.Dialect) {
		own := x.direct.options.OwnMAC(a.Function)
		if err := checkOwnMAC(x.xpu.Name, a.Function, own, a.Port.MAC); err != nil {
			return &opi.Error{Kind: opi.ErrInvalid, Field: "MAC", Detail: err.Error()}
		}
	}

	mine := x.direct.options.Installation
	id, err := portID(a)
	port := mine.Port(id, a.Port.MAC, a.Port.Network)
	addresses := a.Interface.Addresses
	if len(addresses) == 0 {
		addresses = a.Port.Addresses // the program that drives the Function uses them
	}

	for _, prefix := range addresses {
		port.Addresses = append(port.Addresses, prefix.Addr())
	}

	if err != nil {
		return err
	}

	return x.EnsurePort(ctx, port, x.network(a.Port.Network, network))
}

// portID returns the id of the attachment's Port at the agent. It depends only on what the journal
// has from the start, so that a Port is found again after a crash.
func portID(a journal.Attachment) (string, error) {
	if a.Port != nil && a.Port.ID != "" {
		return a.Port.ID, nil
	}
	return opi.PortID(a.Function)
}

// askForPFs asks the agent once which of its host's PFs it serves. What it said before stays if it
// does not answer.
func (x *xpuSession) askForPFs(ctx context.Context) {
	bounded, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()

	pfs, err := x.HostPFs(bounded)
	if err != nil {
		x.log.Info("The OPI agent does not say which PFs it serves", "error", err.Error())
		return
	}
	x.reported.Store(&pfs)
}

// hostPF returns the name that the xPU's eswitch has for a PF, or "" if it is not known. An agent
// that knows PFs by number has the number of the PCI function.
func (x *xpuSession) hostPF(address pci.Address) string {
	if x.Traits().Numbered {
		_, number, _ := strings.Cut(string(address), ".")
		return "pf" + number
	}

	reported := x.reported.Load()
	if reported == nil || x.direct.options.Card == nil {
		return ""
	}

	card := x.direct.options.Card(address)
	i := slices.IndexFunc(*reported, func(pf opi.HostPF) bool { return pf.Is(address, card) })
	if i < 0 {
		return ""
	}
	return (*reported)[i].Name
}

// network returns the form in which the agent gets a network of the configuration.
func (x *xpuSession) network(name string, declared Network) opi.Network {
	n := x.direct.options.Installation.Network(name, declared.VLAN, declared.VNI)
	n.MTU, n.SourceFilter = int(declared.MTU), opi.SourceFilter(declared.SourceFilter)
	return n
}

// work repeats a request to the agent as [converge] does, under the lock of the Function.
func (x *xpuSession) work(
	ctx context.Context, id function.ID, ask func(context.Context) error,
) error {
	unlock, err := x.direct.functions.Lock(ctx, id)
	if err != nil {
		return fmt.Errorf("its Port is being verified: %w", err)
	}
	defer unlock()

	return converge(ctx, x.changed.Subscribe, func(ctx context.Context) error {
		err := ask(ctx)
		if err == nil {
			return nil
		}
		return obstacle{
			error: fmt.Errorf("xPU %s at %s: %w", x.xpu.Name, x.xpu.Endpoint, err),
			never: errors.Is(err, opi.ErrInvalid) || errors.Is(err, opi.ErrUnsupported) ||
				errors.Is(err, opi.ErrUnknown),
		}
	})
}
