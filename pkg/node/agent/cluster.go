// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cdi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/dra"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/nri"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/source"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/pkg/node/upgrade"
)

// clustered has the additional parts of an agent with an API server. It reads DevicePools and
// writes XPUPorts there, and can publish Functions by DRA.
type clustered struct {
	*agent
	api       *kubeapi.API
	ports     *provisioning.CRD
	clientset kubernetes.Interface
	metrics   *dra.Metrics
	status    *dra.StatusReporter
	driver    *dra.Driver // not ready for use before attach

	// Set by attach.
	checker *health.Checker
	nri     *nri.Plugin
}

// provisionByCluster makes the parts that read DevicePools from the API server and write XPUPorts
// to it.
func (a *agent) provisionByCluster(ctx context.Context) error {
	api, err := kubeapi.New(a.config.Kubernetes, a.config.NodeName, kubeapi.Events{
		DeclarationsChanged: a.inputs.Notify, PortsChanged: a.outputs.Notify,
	})
	if err != nil {
		return err
	}
	if err := a.openFile(nil); err != nil {
		return err
	}

	clientset := a.clientset
	if a.recorder, err = kubeapi.NewRecorder(ctx, clientset); err != nil {
		return err
	}

	metrics := dra.NewMetrics(a.registry)
	c := &clustered{
		agent: a, api: api, clientset: clientset, metrics: metrics, driver: &dra.Driver{},
		ports: &provisioning.CRD{
			API: api, Journal: a.journal, Node: a.config.NodeName, Namespace: a.config.Namespace,
			// conflicts is made later
			InUse: func(id function.ID) bool { return a.conflicts.mayBeInUse(id) },
			Log:   a.log.WithName("provision"),
		},
		status: dra.NewStatusReporter(clientset.ResourceV1(), a.journal, metrics,
			a.log.WithName("status")),
	}

	a.clustered = c
	a.provisioner, a.connect, a.provisionFailed = c.ports, api.Run, api.ProvisionFailed
	a.declarations = &source.Merged{Declarations: api, File: a.file, Log: a.log.WithName("declare")}
	a.claims, a.expose, a.report = dra.API{Client: clientset}, c.driver.Expose, c.status.Report
	a.claimServed = func(ctx context.Context, attachment journal.Attachment) error {
		return api.Serves(ctx, attachment.Claim.Namespace, attachment.Claim.UID,
			attachment.Function)
	}

	return nil
}

// register makes the client for the API server, and the DRA driver known to the kubelet.
func (a *agent) register(ctx context.Context) (err error) {
	// Protobuf keeps the opaque parameters in a claim's allocation byte by byte. JSON drops white
	// space, and the API server refuses a status in which they differ.
	verbatim := rest.CopyConfig(a.config.Kubernetes)
	verbatim.ContentType = runtime.ContentTypeProtobuf
	verbatim.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	if a.clientset, err = kubernetes.NewForConfig(verbatim); err != nil {
		return fmt.Errorf("client for the API server: %w", err)
	}

	a.registration, err = upgrade.Register(ctx, upgrade.RegisterOptions{
		Client: a.clientset, Node: a.config.NodeName, PodUID: a.config.PodUID,
		KubeletDir: a.config.KubeletDir, CDIDir: a.config.CDIDir, Log: a.log.WithName("dra"),
	})

	return err
}

// apiPatience is how long the API server may take to answer before this is logged. The client
// library retries silently.
const apiPatience = 5 * time.Second

// synced waits until declarations can be read. It returns false if ctx ended first.
func (c *clustered) synced(ctx context.Context) bool {
	waiting := time.AfterFunc(apiPatience, func() {
		c.log.Info("Waiting for the API server; nothing is offered before DevicePools are read",
			"server", c.config.Kubernetes.Host)
	})
	defer waiting.Stop()
	return c.api.Synced(ctx)
}

// attach makes the parts that prepare claims and attach their Functions.
func (c *clustered) attach() error {
	c.checker = c.health(c.lifecycle.Overdue)
	cdi, err := cdi.Open(c.config.CDIDir)
	if err != nil {
		return err
	}

	c.nri = &nri.Plugin{
		Socket: c.config.NRISocket, Journal: c.journal, Lifecycle: c.lifecycle,
		Claimed: c.kubelet.Claimed,
		Report:  c.status.Report, Log: c.log.WithName("nri"),
	}

	*c.driver = dra.Driver{
		Function:         c.tracker.Get,
		DevicePool:       c.tracker.DevicePool,
		WaitForPort:      c.api.Wait,
		Journal:          c.journal,
		Lifecycle:        c.lifecycle,
		DeviceNodes:      c.nodes,
		Report:           c.status.Report,
		RuntimeConnected: c.nri.AwaitConnected,
		PodTerminating:   dra.API{Client: c.clientset}.Terminating,
		CDI:              cdi,
		Node:             c.config.NodeName,
		Pools:            c.tracker.Pools,
		Health:           c.checker,
		Changes:          c.outputs.Subscribe,
		Metrics:          c.metrics,
		Tracer:           c.tracer,
		Log:              c.log.WithName("dra"),
		ProvisionTimeout: c.config.ProvisionTimeout,
	}

	return nil
}

// serve publishes Functions by DRA, prepares claims, and reports their status until ctx ends. It is
// called after the recovery, when the Functions are known.
func (c *clustered) serve(ctx context.Context) error {
	forPublisher, forReporter, forAhead := c.outputs.Subscribe(ctx), c.outputs.Subscribe(
		ctx,
	), c.outputs.Subscribe(ctx)
	declaredForReporter := c.inputs.Subscribe(ctx)
	// The pools must be known, because a claim may get its network and device nodes from its pool.
	if loop.Until(ctx, c.outputs.Subscribe, func() bool { return c.poolsKnown() == nil }) != nil {
		return nil
	}

	c.driver.Recover(c.journal.All())
	for _, attachment := range c.journal.All() {
		c.status.Report(attachment.Claim)
	}

	c.registration.Open(c.driver)
	defer c.registration.Close()

	features := &dra.Features{
		Client: c.clientset, Node: c.config.NodeName, Changed: c.outputs.Notify,
		Log: c.log.WithName("features"),
	}

	slices := &dra.SliceWriter{Client: c.clientset, Node: c.config.NodeName,
		HandleError: func(ctx context.Context, err error, msg string) {
			if _, dropped := errors.AsType[*resourceslice.DroppedFieldsError](err); dropped ||
				apierrors.IsInvalid(err) {
				features.Recheck()
			}
			c.driver.HandleError(ctx, err, msg)
		}}

	defer slices.Stop()
	publisher := &dra.Publisher{
		Node: c.config.NodeName, Pools: c.tracker.Pools, Health: c.checker,
		Ahead: c.api.ProvisionedAhead, Features: features.Current,
		Publish: slices.PublishResources, Metrics: c.metrics, Log: c.log.WithName("publish"),
	}

	ahead := &provisioning.Ahead{
		API: c.api, Pools: c.tracker.Pools, Node: c.config.NodeName, Namespace: c.config.Namespace,
		Log: c.log.WithName("ahead"),
		Free: func(f function.Function) bool {
			_, used := c.journal.Get(f.ID)
			return !used && len(c.checker.Problems(f)) == 0
		},
	}

	// A Function in use counts as a Function without a problem.
	problems := &health.Checker{
		Pool: c.tracker.PoolOf, Held: c.held, Fault: c.faults.Fault, XPUAway: c.provisioner.Away,
		Quarantined: c.lifecycle.Quarantined, Lost: c.lifecycle.Lost,
	}

	reporter := &pool.Reporter{
		Tracker: c.tracker, API: c.api, Problems: problems.Problems, Card: c.cards.Of,
		Supply: c.vfs.Supply, Fallbacks: features.Fallbacks, Verified: c.verifier.Condition,
		Log: c.log.WithName("pool"),
	}

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return features.Run(ctx) })
	group.Go(func() error { return c.ports.Run(ctx) })
	group.Go(func() error { return ahead.Run(ctx, forAhead) })
	group.Go(func() error { return publisher.Run(ctx, forPublisher) })
	group.Go(func() error { return reporter.Run(ctx, forReporter, declaredForReporter) })
	group.Go(func() error { return c.status.Run(ctx) })
	group.Go(func() error {
		return c.driver.RemoveLeftovers(ctx, upgrade.DriverDir(c.config.KubeletDir), c.config.CDIDir)
	})
	group.Go(func() error { return c.nri.Run(ctx) })

	return group.Wait()
}
