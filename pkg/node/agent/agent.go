// SPDX-License-Identifier: Apache-2.0

// Package agent assembles and runs the node's agent. Data flows one way: the inventory discovers
// Functions, pools select them, and the device plugin and the DRA driver publish and allocate them.
// The xPU is provisioned. CNI or NRI reports the network namespace of a pod, and the lifecycle
// attaches the Functions to it, releases them, and lets the post-delete hooks run.
package agent

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/upgrade"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
)

// Run runs the agent until ctx ends. It returns an error only if the agent cannot work at all, or
// if a successor took over the node and then ended.
func Run(ctx context.Context, config Config, registry *prometheus.Registry, log logr.Logger) error {
	tracer, err := tracing.Dial(ctx, config.TracingEndpoint, "xpu-agent", log)
	if err != nil {
		return fmt.Errorf("--tracing-endpoint: %w", err)
	}
	defer tracer.Stop(ctx)

	a := &agent{config: config, log: log, registry: registry, tracer: tracer}
	if a.readiness, err = upgrade.ServeReadiness(ctx, config.ReadySocket); err != nil {
		return fmt.Errorf("--ready-socket: %w", err)
	}
	defer a.readiness.Close()

	// Without a UID, the sockets would have the names of the sockets of an agent that still runs.
	var known func(context.Context)
	if config.Provisioner == ProvisionerCRD && config.PodUID != "" {
		if err := a.register(ctx); err != nil {
			return err
		}
		defer a.registration.Close()
		known = func(ctx context.Context) { a.registration.Await(ctx, config.times.register) }
	}

	a.predecessor, err = upgrade.TakeOver(ctx, upgrade.Socket(config.StateDir), known, a.readiness,
		log)
	if err != nil {
		return err
	}

	if a.predecessor != nil {
		defer a.predecessor.Close() // shows the predecessor that this agent has ended
	}

	successor, err := a.work(ctx)
	if err != nil || successor == nil {
		return err
	}

	return a.standAside(ctx, successor)
}

// work runs the agent that has the node, until ctx ends, or until a successor asks for the node,
// which it returns.
func (a *agent) work(ctx context.Context) (*upgrade.Successor, error) {
	config := a.config
	var err error
	if a.journal, err = takeJournal(ctx, filepath.Join(config.StateDir, "journal.db"),
		a.readiness.SetReady, a.log); err != nil {
		return nil, err
	}
	defer a.journal.Close()

	if config.Provisioner == ProvisionerCRD && a.registration == nil {
		if err := a.register(ctx); err != nil {
			return nil, err
		}
		defer a.registration.Close()
	}

	if a.devlink, err = devlink.Dial(""); err != nil {
		return nil, err
	}
	defer a.devlink.Close()

	a.engine, err = netdev.New(netdev.Options{
		ProcRoot: config.ProcRoot, SysRoot: config.SysRoot, Eswitches: a.devlink,
	})
	if err != nil {
		return nil, err
	}
	defer a.engine.Close()

	self := podresources.Self{Namespace: config.Namespace, Name: config.PodName}
	a.kubelet, err = podresources.NewClient(config.KubeletDir, self, a.journal.HasAdminAccess,
		a.log.WithName("kubelet"))
	if err != nil {
		return nil, err
	}
	defer a.kubelet.Close()

	if err := a.assemble(ctx); err != nil {
		return nil, err
	}

	a.readiness.Set(a.ready)
	return a.run(ctx)
}

// takeJournal opens the journal. It waits until another agent that shuts down has closed it, and
// calls waiting before it does. Until then this agent must do nothing, and must not open its
// sockets, because the other agent serves them.
func takeJournal(
	ctx context.Context, path string, waiting func(), log logr.Logger,
) (*journal.Journal, error) {
	records, err := journal.Open(path)
	if errors.Is(err, boltfile.ErrLocked) {
		log.Info("Waiting for another agent to end, which has the journal", "path", path)
		waiting()
	}

	for errors.Is(err, boltfile.ErrLocked) && ctx.Err() == nil {
		records, err = journal.Open(path)
	}
	return records, err
}

// run runs the parts until ctx ends, until a part cannot work at all, or until a successor asks for
// the node, which it returns.
func (a *agent) run(ctx context.Context) (successor *upgrade.Successor, err error) {
	// The device plugin outlives the other parts if a successor has asked for the node: it forwards
	// calls while the kubelet does not know the successor yet.
	lingering, stop := context.WithCancel(ctx)
	a.stopLingering = stop
	a.lingering, lingering = errgroup.WithContext(lingering)
	group, ctx := errgroup.WithContext(ctx)
	// The subscriptions come first, so that no notification is missed.
	forTracker, forPlugins, forConflicts := a.inputs.Subscribe(ctx), a.outputs.Subscribe(
		lingering,
	), a.outputs.Subscribe(ctx)
	forLifecycle, forCards := a.inputs.Subscribe(ctx), a.inputs.Subscribe(ctx)
	forVerifier := a.inputs.Subscribe(ctx)
	functionsForVFs, poolsForVFs := a.inputs.Subscribe(ctx), a.outputs.Subscribe(ctx)

	// The parts that others depend on end last, so that running requests can finish when ctx ends.
	lasting, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()

	group.Go(func() error { return a.inventory.Run(lasting) })
	group.Go(func() error { return a.faults.Run(lasting) })
	group.Go(func() error { return a.connect(lasting) })
	group.Go(func() error { return a.sfs.Watch(ctx) })
	group.Go(a.prepareReleases)
	group.Go(func() error { return serveMonitoring(ctx, a.config, a.registry, a.ready, a.log) })
	group.Go(func() error { return serveProfiles(ctx, a.config.ProfilesAddress, a.log) })
	group.Go(func() error { return a.file.Run(ctx) })

	group.Go(func() error {
		defer end()
		// Functions are brought back even if there is no API server.
		if !a.inventory.Synced(ctx) || !a.faults.Synced(ctx) {
			return nil
		}

		a.recover(ctx)
		a.conflicts.refresh(ctx)
		running, ctx := errgroup.WithContext(ctx)
		a.lingering.Go(func() error { return a.plugins.Run(lingering, forPlugins) })
		running.Go(func() error { return causeOf(ctx, lingering) })
		running.Go(func() error { return a.track(ctx, forTracker) })
		running.Go(func() error { return a.cards.Run(ctx, forCards) })
		running.Go(func() error { return a.verifier.Run(ctx, forVerifier) })
		running.Go(func() error { return a.admin.Run(ctx) })
		running.Go(func() error { return a.vfs.Run(ctx, functionsForVFs, poolsForVFs) })
		running.Go(func() error { return a.conflicts.run(ctx, forConflicts) })

		if a.clustered != nil {
			running.Go(func() error { return a.clustered.serve(ctx) })
		}

		running.Go(func() error { return a.serveCNI(ctx) })
		running.Go(func() error { return a.lifecycle.Run(ctx, forLifecycle) })
		running.Go(func() error { return a.setUpAgain(ctx) })
		running.Go(func() error { return a.hooks.Run(ctx) })
		running.Go(func() error { return trim(ctx, a.log) })
		running.Go(func() error { return a.awaitSuccessor(ctx, &successor) })
		running.Go(func() error { return a.followPredecessor(ctx) })
		err := running.Wait()
		// Running Allocates may finish while the parts that they need still work.
		if !errors.Is(err, upgrade.ErrSucceeded) {
			a.stopLingering()
			err = errors.Join(err, a.lingering.Wait())
		}

		return err
	})

	err = group.Wait()
	if errors.Is(err, upgrade.ErrSucceeded) {
		return successor, nil
	}

	a.stopLingering()
	if errors.Is(err, context.Canceled) {
		err = nil
	}

	return nil, err
}

// prepareReleases does the work that the first release would wait for. If releases will be slow, it
// logs why.
func (a *agent) prepareReleases() error {
	if err := a.engine.SeesUppers(); err != nil {
		a.log.Info("The kernel does not say whether something is on top of a netdev. Each "+
			"release finds out by many requests, "+
			"and takes 0.1 s longer or more where the kernel has loaded VLANs", "reason",
			err.Error())
	}
	return nil
}

// track keeps the pools up to date. When they have changed, it first looks for conflicts, and then
// notifies the publishers.
func (a *agent) track(ctx context.Context, changes <-chan struct{}) error {
	if a.clustered != nil && !a.clustered.synced(ctx) {
		return nil
	}
	return a.tracker.Run(ctx, changes, func() {
		a.conflicts.refresh(ctx)
		a.outputs.Notify()
	})
}

// recover makes the node match the journal before requests are served. Failures are retried later
// and do not delay other Functions.
func (a *agent) recover(ctx context.Context) {
	begin := time.Now()
	if err := a.lifecycle.Recover(ctx); err != nil {
		a.log.Error(err, "Some Functions of the last run are not back yet")
	}
	a.log.Info("Recovered", "attachments", len(a.journal.All()), "took", time.Since(begin).String())
}

// setUpAgain completes the setup of Functions that pods had before the agent started. It runs in
// parallel to the other parts, because a card may take long.
func (a *agent) setUpAgain(ctx context.Context) error {
	if err := a.lifecycle.SetUp(ctx); err != nil && ctx.Err() == nil {
		a.log.Error(err,
			"Some Functions are not what pods were promised: delete those pods that do not start")
	}
	return nil
}

// ready returns why the agent cannot serve pods at the moment; nil if it can.
func (a *agent) ready() error {
	if err := a.poolsKnown(); err != nil {
		return err
	}
	if err := a.plugins.Registered(); err != nil || a.clustered == nil {
		return err
	}

	pools, _ := a.tracker.Pools()
	byClaim := slices.ContainsFunc(pools, func(p pool.Pool) bool {
		return p.Spec.Publish != v1alpha1.PublishDevicePlugin
	})
	if byClaim && !a.clustered.nri.Connected() { // extended resources do not need the runtime
		return fmt.Errorf("not connected to the container runtime at %s", a.config.NRISocket)
	}

	return nil
}

func (a *agent) poolsKnown() error {
	if _, known := a.tracker.Pools(); !known {
		return errors.New("DevicePools and Functions have not been read yet")
	}
	return nil
}

// servePort implements Serve of [lifecycle.Options].
func (a *agent) servePort(ctx context.Context, attachment journal.Attachment) error {
	switch {
	case attachment.Port != nil:
		_, err := a.provisioner.Provision(ctx, attachment)
		return err
	case attachment.Claim.UID != "" && a.claimServed != nil:
		return a.claimServed(ctx, attachment)
	}
	return nil
}

// reportLoss implements Report of [lifecycle.Options]. The status of the claim and an event of the
// pod say that the pod lost its Function, and what the user can do, or that the pod has its
// Function again.
func (a *agent) reportLoss(attachment journal.Attachment) {
	a.report(attachment.Claim)
	pod := attachment.Pod
	if a.recorder == nil || pod.Name == "" {
		return
	}

	kind, reason := corev1.EventTypeWarning, "FunctionLost"
	var message string
	switch name := attachment.Interface.Name; {
	case attachment.State != journal.Lost:
		kind, reason = corev1.EventTypeNormal, "FunctionBack"
		message = fmt.Sprintf("interface %s is in the pod again", name)
	case attachment.Interface.Userspace:
		message = "its device went, and a program that had it cannot get it back: delete the pod"
	default:
		message = fmt.Sprintf("the device of interface %s went: it comes back to the pod with "+
			"the device", name)
	}

	about := &corev1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
	}
	a.recorder.Eventf(about, nil, kind, reason, "Attach", "Function %s on node %s: %s",
		attachment.Function, a.config.NodeName, message)
}

// reportQuarantine implements Quarantined of [lifecycle.Options]. The node gets the event too,
// because the pod may be deleted soon.
func (a *agent) reportQuarantine(attachment journal.Attachment) {
	q := attachment.Quarantine
	if pod := attachment.Pod; pod.Name != "" {
		about := &corev1.ObjectReference{
			APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
		}
		a.event(about, corev1.EventTypeWarning, "FunctionQuarantined", attachment.Function,
			"is kept from other pods: "+q.Message)
	}

	a.event(a.nodeReference(), corev1.EventTypeWarning, "FunctionQuarantined", attachment.Function,
		"did not come back from its pod as it was, and is kept from others: "+q.Message)
}

// reportRelease implements Unquarantined of [lifecycle.Options].
func (a *agent) reportRelease(attachment journal.Attachment, outcome string) {
	a.event(a.nodeReference(), corev1.EventTypeNormal, "FunctionReleased", attachment.Function,
		"was quarantined, and "+outcome)
}

func (a *agent) nodeReference() *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: "v1", Kind: "Node", Name: a.config.NodeName, UID: types.UID(a.config.NodeName),
	}
}

// event records an event about a Function, if there is an API server.
func (a *agent) event(
	about *corev1.ObjectReference, kind, reason string, id function.ID, message string,
) {
	if a.recorder != nil {
		a.recorder.Eventf(about, nil, kind, reason, "Release", "Function %s on node %s: %s",
			id, a.config.NodeName, message)
	}
}
