// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/tools/events"

	"github.com/opiproject/xpu-device-plugin/pkg/node/dra"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/hooks"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
)

// owners has the parts that attach Functions to their owners and release them, and that run the
// hooks after a release.
type owners struct {
	hooks     *hooks.Queue
	lifecycle *lifecycle.Manager
	journal   *journal.Journal
	// defects finds the problems of a Function whoever has it.
	defects *health.Checker
	// provisionFailed and elsewhere find problems of a Function that is to be offered.
	provisionFailed, elsewhere health.Source
	log                        logr.Logger
}

// newOwners makes the parts. files is nil in direct mode.
func newOwners(
	env *environment, h *hardware, k *kubelet, b *backend, p *pools, files *dra.CDIFiles,
) (*owners, error) {
	reports := &reports{node: env.config.NodeName, claim: b.report}
	var recorder events.EventRecorder
	var claims lifecycle.Claims
	var expose func(journal.Attachment) error
	if b.api != nil {
		recorder, claims, expose = b.api.recorder, dra.API{Client: b.api.clientset}, files.Expose
		reports.recorder = recorder
	}

	queue, err := hooks.New(hooks.Options{
		Journal: env.journal, Deprovision: b.provisioner.Deprovision,
		Log:  env.log.WithName("hooks"),
		Node: env.config.NodeName, Dir: env.config.HooksDir, Timeout: env.config.HookTimeout,
		Attempts: env.config.HookAttempts,
		Recorder: recorder, Changed: env.outputs.Notify,
	}, env.registry)
	if err != nil {
		return nil, err
	}

	manager := lifecycle.New(env.journal, h.engine, h.inventory, lifecycle.Options{
		BootID: h.bootID, Setup: h.setup, Hooks: queue, Kubelet: k.pods, Claims: claims,
		Expose: expose, Announce: h.engine.Announce, Seen: h.inventory.Get,
		Driver: h.inventory.Driver, Unusable: p.unusable, Serve: b.serve, Tracer: env.tracer,
		Quarantined: reports.quarantine, Unquarantined: reports.release, Report: reports.loss,
		Changed: env.outputs.Notify, Reserved: p.conflicts.reserved,
		SweepEvery: env.config.times.sweep, AbandonedAfter: env.config.times.abandoned,
	}, env.log.WithName("lifecycle"))

	return &owners{
		hooks: queue, lifecycle: manager, journal: env.journal,
		defects: &health.Checker{
			Pool: p.PoolOf, Held: env.held, Fault: h.faults.Fault, XPUAway: b.provisioner.Away,
			Quarantined: manager.Quarantined, Lost: manager.Lost,
		},
		provisionFailed: b.provisionFailed, elsewhere: p.conflicts.elsewhere, log: env.log,
	}, env.registry.Register(manager)
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
