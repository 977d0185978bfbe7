// SPDX-License-Identifier: Apache-2.0

// Package agent puts the node's agent together. Data flows one way: the inventory discovers
// Functions, pools select them, the device plugin and the DRA driver publish and allocate them, the
// xPU is provisioned, CNI or NRI says when a pod's network namespace is there, and the lifecycle
// attaches them, releases them and has the post-delete hooks run.
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
	"github.com/opiproject/xpu-device-plugin/pkg/node/handover"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
)

// Run works until ctx ends. It returns an error only if it cannot work at all, or if the agent that
// took the node over from this one is gone.
func Run(ctx context.Context, config Config, registry *prometheus.Registry, log logr.Logger) error {
	tracer, err := tracing.Dial(ctx, config.TracingEndpoint, "xpu-agent", log)
	if err != nil {
		return fmt.Errorf("--tracing-endpoint: %w", err)
	}
	defer tracer.Stop(ctx)

	a := &agent{config: config, log: log, registry: registry, tracer: tracer}
	served, err := a.serveReadiness(ctx)
	if err != nil {
		return err
	}
	defer served()

	// Without a UID its sockets have the names of those of an agent that is still there.
	if config.Provisioner == ProvisionerCRD && config.PodUID != "" {
		if err := a.openFront(ctx); err != nil {
			return err
		}
		defer a.front.close()
	}

	if a.predecessor, err = a.takeOver(ctx); err != nil {
		return err
	}

	if a.predecessor != nil {
		defer a.predecessor.Close() // which tells it that this agent has ended
	}

	successor, err := a.work(ctx)
	if err != nil || successor == nil {
		return err
	}

	return a.standAside(ctx, successor)
}

// work has the node until ctx ends, or until another agent asks for it, which it returns.
func (a *agent) work(ctx context.Context) (*handover.Successor, error) {
	config := a.config
	var err error
	if a.journal, err = takeJournal(ctx, filepath.Join(config.StateDir, "journal.db"),
		a.waitForTheOther, a.log); err != nil {
		return nil, err
	}
	defer a.journal.Close()

	if config.Provisioner == ProvisionerCRD && a.front == nil {
		if err := a.openFront(ctx); err != nil {
			return nil, err
		}
		defer a.front.close()
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

	a.setReadiness(a.ready)
	return a.run(ctx)
}

// takeJournal waits until an agent that is shutting down has closed the journal. Until then this
// agent must do nothing, not even open its sockets, as the other agent serves them. waiting is
// called when there is such an agent.
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

// run works until ctx ends, a part cannot work at all, or another agent asks for the node, which it
// returns.
func (a *agent) run(ctx context.Context) (successor *handover.Successor, err error) {
	// What serves the kubelet's device plugin API outlives the rest if another agent has asked: it
	// passes on what comes while the kubelet does not know that one yet.
	lingering, stop := context.WithCancel(ctx)
	a.stopLingering = stop
	a.lingering, lingering = errgroup.WithContext(lingering)
	group, ctx := errgroup.WithContext(ctx)
	// Subscriptions come before what they listen to is started, so that nothing is missed.
	forTracker, forPlugins, forConflicts := a.inputs.Subscribe(ctx), a.outputs.Subscribe(
		lingering,
	), a.outputs.Subscribe(ctx)
	forLifecycle, forCards := a.inputs.Subscribe(ctx), a.inputs.Subscribe(ctx)
	functionsForVFs, poolsForVFs := a.inputs.Subscribe(ctx), a.outputs.Subscribe(ctx)

	// The parts that others depend on end last, so that requests that run when ctx ends can finish.
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
		// Functions are brought back whether the API server is there or not.
		if !a.inventory.Synced(ctx) || !a.faults.Synced(ctx) {
			return nil
		}

		a.recover(ctx)
		a.conflicts.look(ctx)
		running, ctx := errgroup.WithContext(ctx)
		a.lingering.Go(func() error { return a.plugins.Run(lingering, forPlugins) })
		running.Go(func() error { return failure(ctx, lingering) })
		running.Go(func() error { return a.track(ctx, forTracker) })
		running.Go(func() error { return a.cards.Run(ctx, forCards) })
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
		// Allocates that run may finish while the parts that they need still work
		if !errors.Is(err, errSucceeded) {
			a.stopLingering()
			err = errors.Join(err, a.lingering.Wait())
		}

		return err
	})

	err = group.Wait()
	if errors.Is(err, errSucceeded) {
		return successor, nil
	}

	a.stopLingering()
	if errors.Is(err, context.Canceled) {
		err = nil
	}

	return nil, err
}

// prepareReleases has the engine do now what the first release would wait for, and says why
// releases are slow if they are.
func (a *agent) prepareReleases() error {
	if err := a.engine.SeesUppers(); err != nil {
		a.log.Info("The kernel does not say whether something is on top of a netdev. Each "+
			"release finds out by many requests, "+
			"and takes 0.1 s longer or more where the kernel has loaded VLANs", "reason",
			err.Error())
	}
	return nil
}

// track keeps the pools current. When they have changed, it first looks for conflicts, and then
// wakes those who publish.
func (a *agent) track(ctx context.Context, changes <-chan struct{}) error {
	if a.clustered != nil && !a.clustered.synced(ctx) {
		return nil
	}
	return a.tracker.Run(ctx, changes, func() {
		a.conflicts.look(ctx)
		a.outputs.Notify()
	})
}

// recover makes the node match the journal before requests are served. What fails is retried later
// and does not hold up other Functions.
func (a *agent) recover(ctx context.Context) {
	begin := time.Now()
	if err := a.lifecycle.Recover(ctx); err != nil {
		a.log.Error(err, "Some Functions of the last run are not back yet")
	}
	a.log.Info("Recovered", "attachments", len(a.journal.All()), "took", time.Since(begin).String())
}

// setUpAgain sets up the Functions again that pods had before the agent started. It runs beside the
// other parts, as a card may take long.
func (a *agent) setUpAgain(ctx context.Context) error {
	if err := a.lifecycle.SetUp(ctx); err != nil && ctx.Err() == nil {
		a.log.Error(err,
			"Some Functions are not what pods were promised: delete those pods that do not start")
	}
	return nil
}

// ready says why the agent cannot serve pods now.
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

// servePort is Serve of [lifecycle.Options].
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

// reportLoss is Report of [lifecycle.Options]: the status of the claim and an event of the pod say
// that the pod lost its Function, and what the user can do, or that the pod has its Function again.
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

// reportQuarantine is Quarantined of [lifecycle.Options]. The pod may be gone soon, so that the
// node has the event too.
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

// reportRelease is Unquarantined of [lifecycle.Options].
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
