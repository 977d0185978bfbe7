// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/dra"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/nri"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/pkg/node/upgrade"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// claims has the parts that publish Functions by DRA, prepare claims, attach their Functions, and
// describe the node to the API server.
type claims struct {
	env   *environment
	api   *apiServer
	pools *pools

	registration *upgrade.Registration
	files        *dra.CDIFiles
	checker      *health.Checker
	nri          *nri.Plugin
	driver       *dra.Driver
	features     *dra.Features
	slices       *dra.SliceWriter
	publisher    *dra.Publisher
	ahead        *provisioning.Ahead
	reporter     *pool.Reporter
}

// newClaims makes the parts. It returns nil in direct mode.
func newClaims(
	env *environment, hardware *hardware, kubelet *kubelet, backend *backend, pools *pools,
	owners *owners, registration *upgrade.Registration,
) *claims {
	if backend.api == nil {
		return nil
	}

	c := &claims{
		env: env, api: backend.api, pools: pools, registration: registration,
		files: owners.files, checker: owners.offer(owners.lifecycle.Overdue),
		nri: &nri.Plugin{
			Socket: env.config.NRISocket, Journal: env.journal, Lifecycle: owners.lifecycle,
			Claimed: kubelet.pods.Claimed,
			Report:  backend.report, Log: env.log.WithName("nri"),
		},
	}

	c.driver = &dra.Driver{
		Function:         pools.Get,
		DevicePool:       pools.DevicePool,
		WaitForPort:      c.api.Wait,
		Journal:          env.journal,
		Lifecycle:        owners.lifecycle,
		Report:           backend.report,
		RuntimeConnected: c.nri.AwaitConnected,
		PodTerminating:   dra.API{Client: c.api.clientset}.Terminating,
		CDI:              c.files,
		Node:             env.config.NodeName,
		Pools:            pools.Pools,
		Health:           c.checker,
		Changes:          env.outputs.Subscribe,
		Metrics:          c.api.metrics,
		Tracer:           env.tracer,
		Log:              env.log.WithName("dra"),
		ProvisionTimeout: env.config.ProvisionTimeout,
	}

	c.publish(hardware, owners)
	return c
}

// publish makes the parts that describe the node to the API server.
func (c *claims) publish(hardware *hardware, owners *owners) {
	config, log := c.env.config, c.env.log
	c.features = &dra.Features{
		Client: c.api.clientset, Node: config.NodeName, Changed: c.env.outputs.Notify,
		Log: log.WithName("features"),
	}

	c.slices = &dra.SliceWriter{
		Client: c.api.clientset, Node: config.NodeName, HandleError: c.handleError,
		NodeUID: c.api.NodeUID,
	}

	c.publisher = &dra.Publisher{
		Node: config.NodeName, Pools: c.pools.Pools, Health: c.checker,
		Ahead: c.api.ProvisionedAhead, Features: c.features.Current,
		Losses: &dra.Losses{
			Node: config.NodeName, Journal: c.env.journal,
			MissingFor: hardware.inventory.MissingFor, Replaced: owners.lifecycle.Replaced,
		},
		Publish: c.slices.PublishResources, Stale: c.slices.Stale,
		Metrics: c.api.metrics, Log: log.WithName("publish"),
	}

	c.ahead = &provisioning.Ahead{
		API: c.api.API, Pools: c.pools.Pools, Node: config.NodeName, Namespace: config.Namespace,
		OwnMAC: hardware.macs.Of, Log: log.WithName("ahead"),
		Free: func(f function.Function) bool {
			return !c.env.held(f.ID) && len(c.checker.Problems(f)) == 0
		},
	}

	agent := &v1alpha1.XPUNodeAgent{Version: version.String()}
	if config.PodName != "" {
		agent.Namespace = config.Namespace
	}
	c.reporter = &pool.Reporter{
		Tracker: c.pools.Tracker, API: c.api.API, Agent: agent,
		// A Function in use counts as a Function without a problem.
		Problems: owners.defects.Problems,
		Card:     hardware.cards.Answer, MAC: hardware.macs.Answer,
		Supply: c.pools.vfs.Supply, Fallbacks: c.features.Fallbacks,
		Verified: hardware.verifier.Condition,
		Log:      log.WithName("pool"),
	}
}

// handleError handles errors of the background task that writes ResourceSlices. If the API server
// lacks a feature, the features are asked for again. If it refuses a slice, lists are left out.
func (c *claims) handleError(ctx context.Context, err error, msg string) {
	if _, dropped := errors.AsType[*resourceslice.DroppedFieldsError](err); dropped ||
		apierrors.IsInvalid(err) {
		c.features.Recheck()
	}
	if apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) {
		c.features.Refused()
	}
	c.driver.HandleError(ctx, err, msg)
}

// Run publishes Functions by DRA, prepares claims, and reports their status until ctx ends. It is
// called after the recovery, when the Functions are known. It does nothing in direct mode.
func (c *claims) Run(ctx context.Context) error {
	if c == nil {
		return nil
	}

	outputs, inputs := &c.env.outputs, &c.env.inputs
	changes, declared := outputs.Subscribe(ctx), inputs.Subscribe(ctx)
	parts := []part{
		c.features.Run,
		c.api.ports.Run,
		onChange(ctx, outputs, c.ahead.Run),
		onChange(ctx, outputs, c.publisher.Run),
		func(ctx context.Context) error { return c.reporter.Run(ctx, changes, declared) },
		c.api.status.Run,
		c.removeLeftovers,
		c.nri.Run,
	}

	// The pools must be known, because a claim may get its network and device nodes from its pool.
	if loop.Until(ctx, outputs.Subscribe, func() bool { return c.pools.known() == nil }) != nil {
		return nil
	}

	c.files.Recover(c.env.journal.All())
	for _, attachment := range c.env.journal.All() {
		c.api.status.Report(attachment.Claim)
	}

	c.registration.Open(c.driver)
	defer c.registration.Close()
	defer c.slices.Stop()

	return runAll(ctx, parts)
}

func (c *claims) removeLeftovers(ctx context.Context) error {
	return c.driver.RemoveLeftovers(ctx, upgrade.DriverDir(c.env.config.KubeletDir),
		c.env.config.CDIDir, c.env.copies)
}
