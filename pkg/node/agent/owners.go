// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/node/cdi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/dra"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/hooks"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
)

// owners has the parts that attach Functions to their owners and release them, and that run the
// hooks after a release.
type owners struct {
	journal   *journal.Journal
	hooks     *hooks.Queue
	lifecycle *lifecycle.Manager
	files     *dra.CDIFiles // nil in direct mode
	// defects finds the problems of a Function whoever has it.
	defects *health.Checker
	// provisionFailed and elsewhere find problems of a Function that is to be offered.
	provisionFailed, elsewhere health.Source
	log                        logr.Logger
}

func newOwners(
	env *environment, hardware *hardware, kubelet *kubelet, backend *backend, pools *pools,
) (*owners, error) {
	o := &owners{
		journal: env.journal, log: env.log,
		provisionFailed: backend.provisionFailed, elsewhere: pools.conflicts.elsewhere,
	}

	reports := &reports{node: env.config.NodeName, claim: backend.report}
	options := lifecycle.Options{
		BootID: hardware.bootID, Setup: hardware.setup, Kubelet: kubelet.pods,
		Announce: hardware.engine.Announce, Seen: hardware.inventory.Get,
		Driver: hardware.inventory.Driver, Inode: hardware.inventory.Inode,
		Unusable: pools.unusable, RDMA: pools.rdma.of, Serve: backend.serve,
		Quarantined: reports.quarantine, Unquarantined: reports.release, Report: reports.loss,
		Changed: env.outputs.Notify, Reserved: pools.conflicts.reserved, Tracer: env.tracer,
		SweepEvery: env.config.times.sweep, AbandonedAfter: env.config.times.abandoned,
	}

	var err error
	if api := backend.api; api != nil {
		if o.files, err = openCDIFiles(env, hardware, pools); err != nil {
			return nil, err
		}
		reports.recorder = api.recorder
		options.Claims, options.Expose = dra.API{Client: api.clientset}, o.files.Expose
	}

	o.hooks, err = hooks.New(hooks.Options{
		Journal: env.journal, Deprovision: backend.provisioner.Deprovision,
		Log:  env.log.WithName("hooks"),
		Node: env.config.NodeName, Dir: env.config.HooksDir, Timeout: env.config.HookTimeout,
		Attempts: env.config.HookAttempts,
		Recorder: reports.recorder, Changed: env.outputs.Notify,
	}, env.registry)
	if err != nil {
		return nil, err
	}

	options.Hooks = o.hooks
	o.lifecycle = lifecycle.New(env.journal, hardware.engine, hardware.inventory, options,
		env.log.WithName("lifecycle"))
	o.defects = &health.Checker{
		Pool: pools.PoolOf, Held: env.held, Fault: hardware.faults.Fault,
		XPUAway:     backend.provisioner.Away,
		Cordoned:    pools.cordons.Of,
		Quarantined: o.lifecycle.Quarantined, Lost: o.lifecycle.Lost,
	}

	return o, env.registry.Register(o.lifecycle)
}

// openCDIFiles opens the directory of CDI files, by which containers of claims get their devices.
// Other containers get theirs from the kubelet.
func openCDIFiles(env *environment, hardware *hardware, pools *pools) (*dra.CDIFiles, error) {
	dir, err := cdi.Open(env.config.CDIDir)
	if err != nil {
		return nil, err
	}
	return &dra.CDIFiles{
		Dir: dir, Journal: env.journal, DeviceNodes: hardware.nodes,
		Function: pools.Get, DevicePool: pools.DevicePool, Log: env.log.WithName("dra"),
	}, nil
}

// offer returns the checker of the problems of Functions for one way of publishing. releasePending
// reports the Functions whose release takes too long for this way.
func (o *owners) offer(releasePending health.Source) *health.Checker {
	checker := *o.defects
	checker.ProvisionFailed, checker.ReleasePending = o.provisionFailed, releasePending
	checker.InUse = o.elsewhere
	return &checker
}

// recover makes the node match the journal before requests are served. Failures are retried later
// and do not delay other Functions.
func (o *owners) recover(ctx context.Context) {
	begin := time.Now()
	if err := o.lifecycle.Recover(ctx); err != nil {
		o.log.Error(err, "Some Functions of the last run are not back yet")
	}
	o.log.Info("Recovered", "attachments", len(o.journal.All()), "took",
		time.Since(begin).String())
}

// setUpAgain completes the setup of Functions that pods had before the agent started. It runs in
// parallel to the other parts, because a card may take long.
func (o *owners) setUpAgain(ctx context.Context) error {
	if err := o.lifecycle.SetUp(ctx); err != nil && ctx.Err() == nil {
		o.log.Error(err,
			"Some Functions are not what pods were promised: delete those pods that do not start")
	}
	return nil
}
