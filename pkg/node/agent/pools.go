// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/setup"
	"github.com/opiproject/xpu-device-plugin/pkg/node/sriov"
	"github.com/opiproject/xpu-device-plugin/pkg/node/traffic"
)

// pools has the parts that assign Functions to DevicePools, and create the VFs that DevicePools ask
// for.
type pools struct {
	*pool.Tracker
	vfs       *sriov.VFs
	rdma      *rdmaMoves
	conflicts *conflicts
	cordons   *cordons

	backend *backend
	kubelet *kubelet
	// changed is called when pools have changed.
	changed func()
}

func newPools(
	env *environment, hardware *hardware, kubelet *kubelet, backend *backend,
) (*pools, error) {
	functions := setup.OwnDrivers{Functions: hardware.inventory, Journal: env.journal}
	tracker := pool.NewTracker(functions, backend.declarations, hardware.sfs.NoSFs,
		env.log.WithName("pool"))

	p := &pools{
		Tracker: tracker, backend: backend, kubelet: kubelet, changed: env.outputs.Notify,
		rdma: &rdmaMoves{
			sysRoot: env.config.SysRoot, find: tracker.Get, poolOf: tracker.PoolOf,
		},
		cordons: &cordons{changed: env.outputs.Notify, log: env.log.WithName("cordons")},
		conflicts: &conflicts{
			journal: env.journal, tracker: tracker, kubelet: kubelet, changed: env.outputs.Notify,
			times: env.config.times,
		},
		vfs: &sriov.VFs{
			SysRoot: env.config.SysRoot, Functions: hardware.inventory, Pools: tracker,
			Journal: env.journal, Assignments: kubelet.pods,
			HostNetdevs: func() (hostuse.Netdevs, error) { return hostuse.Read("") },
			Fault:       hardware.faults.Fault,
			Changed:     env.outputs.Notify, Metrics: sriov.NewMetrics(env.registry),
			Log: env.log.WithName("vfs"),
		},
	}

	if backend.api != nil {
		p.cordons.current = backend.api.Cordons
	}

	counts := &traffic.Collector{
		Functions: hardware.inventory.Snapshot, Attachments: env.journal.All,
		PoolOf: func(id function.ID) string {
			of, _ := tracker.PoolOf(id)
			return of.Name
		},
		Kernel: hardware.engine, Log: env.log.WithName("traffic"),
	}

	return p, errors.Join(env.registry.Register(p.vfs), env.registry.Register(counts))
}

// track keeps the pools up to date. When they have changed, it first looks for conflicts, and then
// notifies the publishers.
func (p *pools) track(ctx context.Context, changes <-chan struct{}) error {
	if !p.backend.synced(ctx) {
		return nil
	}

	p.cordons.read(ctx) // before the Functions are published
	return p.Tracker.Run(ctx, changes, func() {
		p.kubelet.refresh(ctx)
		p.changed()
	})
}

// known returns an error until the pools have been read once.
func (p *pools) known() error {
	if _, known := p.Pools(); !known {
		return errors.New("DevicePools and Functions have not been read yet")
	}
	return nil
}

// unusable implements Unusable of [lifecycle.Options]. A Function that does not exist any more is
// not judged.
func (p *pools) unusable(id function.ID, driver string) (reason string) {
	f, exists := p.Get(id)
	if !exists {
		return ""
	}
	of, _ := p.PoolOf(id)
	problem, _ := health.Unusable(f, of, driver)
	return problem.Message
}
