package provisioning

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/keylock"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// DirectOptions configure a [Direct].
type DirectOptions struct {
	// Changed is called when [Direct.Away] may say something else than before. It must not block.
	Changed func()
	// Debounce is how long an OPI agent may be out of reach before it counts as away. The default is 500 ms, so that the
	// kubelet learns it within a second.
	Debounce time.Duration
	Registry prometheus.Registerer
	Log      logr.Logger
}

// Direct is the [Provisioner] that calls the OPI agents itself. It trusts the journal: the caller records the Port before
// Provision, and that it releases the Port before Deprovision.
type Direct struct {
	config    *Config
	xpus      []*xpuSession
	functions keylock.Locks[function.ID]
	journal   *journal.Journal
	options   DirectOptions
}

var _ Provisioner = (*Direct)(nil)

// NewDirect makes a provisioner. [Direct.Run] connects it to the OPI agents.
func NewDirect(config *Config, records *journal.Journal, options DirectOptions) (*Direct, error) {
	options.Debounce = cmp.Or(options.Debounce, 500*time.Millisecond)
	d := &Direct{config: config, journal: records, options: options}
	metrics := newMetrics(options.Registry)
	for _, xpu := range config.XPUs {
		x, err := newXPUSession(xpu, d, metrics)
		if err != nil {
			return nil, fmt.Errorf("xPU %s: %w", xpu.Name, err)
		}
		d.xpus = append(d.xpus, x)
	}
	return d, nil
}

// Run keeps the connections to the OPI agents up until ctx ends. Each time a connection comes up, Run verifies all Ports of
// the journal: an agent that was restarted may have forgotten them.
func (d *Direct) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, x := range d.xpus {
		group.Go(func() error { return x.Run(ctx) })
	}
	group.Go(func() error { <-ctx.Done(); return nil })
	return group.Wait()
}

// Network is the name of the network of a pool, "" if it has none.
func (d *Direct) Network(pool string) string { return d.config.Pools[pool] }

// Away says that the OPI agent of the Function's xPU has not been reached for a while, and why. See [Provisioner].
func (d *Direct) Away(f function.Function) string {
	x := d.xpuOf(f.PF)
	if x == nil {
		return ""
	}
	health := x.Health()
	if !health.Away {
		return ""
	}
	const advice = "cannot be reached; check that it runs, and the certificates of both sides"
	message := fmt.Sprintf("the OPI agent of xPU %s at %s %s", x.xpu.Name, x.xpu.Endpoint, advice)
	if health.Err != nil {
		message += ": " + strings.ReplaceAll(health.Err.Error(), "\n", "; ")
	}
	return message
}

// Provision has the OPI agent serve the Port. See [Provisioner].
func (d *Direct) Provision(ctx context.Context, a journal.Attachment) (mtu int, err error) {
	network, known := d.config.Networks[a.Port.Network]
	switch x := d.xpuOf(a.PF); {
	case x == nil:
		err = fmt.Errorf("no xPU of the configuration has PF %s; add it to its pfs", a.PF)
	case !known:
		err = errors.New("networks of the configuration has no such network; add it, or name another one")
	default:
		err = x.work(ctx, a.Function, func(ctx context.Context) error { return x.ensure(ctx, a) })
	}
	if err != nil {
		return 0, fmt.Errorf("the xPU does not serve Function %s in network %s: %w", a.Function, a.Port.Network, err)
	}
	return int(network.MTU), nil
}

// Deprovision has the OPI agent delete the Port, and waits until it has none. See [Provisioner].
func (d *Direct) Deprovision(ctx context.Context, a journal.Attachment) error {
	x := d.xpuOf(a.PF)
	if x == nil {
		d.options.Log.Info("No xPU of the configuration has the PF: the Port is taken to be gone", "function", a.Function, "pf", a.PF)
		return nil
	}
	err := x.work(ctx, a.Function, func(ctx context.Context) error {
		id, err := opi.PortID(a.Function)
		if err != nil {
			return err
		}
		return x.DeletePort(ctx, id)
	})
	if err != nil {
		return fmt.Errorf("the xPU may still serve Function %s: %w", a.Function, err)
	}
	return nil
}

// xpuOf is the xPU that names the PF, else the one that takes every PF, else nil.
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
