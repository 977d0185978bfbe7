// Package agent puts the node's agent together. Data flows one way: the inventory discovers Functions, pools select
// them, the device plugin and the DRA driver publish them, the xPU is provisioned, CNI or NRI says when a pod's network
// namespace is there, and the lifecycle takes them there and back and has the post-delete hooks run.
package agent

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cniserver"
	"github.com/opiproject/xpu-device-plugin/pkg/node/deviceplugin"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/hooks"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/source"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/pkg/node/setup"
	"github.com/opiproject/xpu-device-plugin/pkg/node/sriov"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

// agent has the parts that it needs whichever way it works.
type agent struct {
	config   Config
	log      logr.Logger
	registry *prometheus.Registry

	journal   *journal.Journal
	kubelet   *podresources.Client
	devlink   *devlink.Conn
	inventory *inventory.Inventory
	faults    *health.Reporters
	sfs       *sriov.SFMaker
	vfs       *sriov.VFs
	setup     *setup.Runner
	tracker   *pool.Tracker
	lifecycle *lifecycle.Manager
	hooks     *hooks.Queue
	uses      *conflicts
	plugins   *deviceplugin.Manager
	cni       *cniserver.Server
	// file is nil without a configuration file.
	file *source.File
	mode mode

	// inputs wakes who decides which Function is in which pool; outputs wakes who tells the world about pools and
	// health.
	inputs, outputs notify.Signal
}

// mode is what differs between an agent with an API server and one without.
type mode interface {
	// provisioner has the xPU serve what the device plugin hands out.
	provisioner() provisioning.Provisioner
	// declarations are the DevicePools; file is nil without a configuration file.
	declarations(file *source.File) pool.Declarations
	// provisionFailed knows Functions whose Port the xPU refused; it may be nil.
	provisionFailed() health.Source
	// recorder tells of post-delete hooks that are given up; nil where there is nobody to tell.
	recorder(ctx context.Context) (hooks.Recorder, error)
	// claims says what the API server knows of claims; nil without one.
	claims() lifecycle.Claims
	// claimServed returns once the xPU serves what a claim has, as Serve of [lifecycle.Options] does.
	claimServed(ctx context.Context, a journal.Attachment) error
	// devices lets containers get what is attached; nil where the kubelet does that alone.
	devices() lifecycle.Devices
	// reporter tells the users of claims what became of them.
	reporter() cniserver.Reporter
	// complete makes the parts that need all the others.
	complete() error
	// connect works until ctx ends, from the start.
	connect(ctx context.Context) error
	// synced waits until declarations can be read; false means that ctx ended before.
	synced(ctx context.Context) bool
	// serve works until ctx ends, once Functions are known and what the last run left is recovered.
	serve(ctx context.Context) error
	// ready says why pods could not be served now.
	ready() error
}

// Run works until ctx ends. It returns an error only if it cannot work at all.
func Run(ctx context.Context, config Config, registry *prometheus.Registry, log logr.Logger) error {
	records, err := takeJournal(ctx, filepath.Join(config.StateDir, "journal.db"), log)
	if err != nil {
		return err
	}
	defer records.Close()
	eswitches, err := devlink.Dial("")
	if err != nil {
		return err
	}
	defer eswitches.Close()
	engine, err := netdev.New(netdev.Options{ProcRoot: config.ProcRoot, Rates: lifecycle.Rates{Eswitches: eswitches}})
	if err != nil {
		return err
	}
	defer engine.Close()
	kubelet := podresources.NewClient(config.KubeletDir, podresources.Self{Namespace: config.Namespace, Name: config.PodName})
	a := &agent{config: config, log: log, registry: registry, journal: records, kubelet: kubelet, devlink: eswitches}
	if err := a.assemble(ctx, engine); err != nil {
		return err
	}
	return a.run(ctx)
}

// takeJournal waits for an agent that has the journal still, as it was told to end and another one in its place has been
// started already. Until then this one must do nothing: not even open its sockets, which are those of the other.
func takeJournal(ctx context.Context, path string, log logr.Logger) (*journal.Journal, error) {
	for told := false; ; told = true {
		records, err := journal.Open(path)
		if !errors.Is(err, journal.ErrLocked) || ctx.Err() != nil {
			return records, err
		}
		if !told {
			log.Info("Waiting for another agent to end, which has the journal", "path", path)
		}
	}
}

func (a *agent) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	// Subscriptions come before what they listen to is started, so that nothing is missed.
	forTracker, forPlugins, forUses := a.inputs.Subscribe(ctx), a.outputs.Subscribe(ctx), a.outputs.Subscribe(ctx)
	forLifecycle := a.inputs.Subscribe(ctx)
	functionsForVFs, poolsForVFs := a.inputs.Subscribe(ctx), a.outputs.Subscribe(ctx)

	// What others work with ends after them: a request that runs when ctx ends is given the time to end well.
	lasting, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	group.Go(func() error { return a.inventory.Run(lasting) })
	group.Go(func() error { return a.faults.Run(lasting) })
	group.Go(func() error { return a.mode.connect(lasting) })
	group.Go(func() error { return a.sfs.Watch(ctx) })
	group.Go(func() error { return serve(ctx, a.config.ListenAddress, a.registry, a.ready, a.log) })
	if a.file != nil {
		group.Go(func() error { return a.file.Run(ctx) })
	}
	group.Go(func() error {
		defer end()
		// Functions are brought back whether the API server is there or not.
		if !a.inventory.Synced(ctx) || !a.faults.Synced(ctx) {
			return nil
		}
		a.recover(ctx)
		a.uses.look(ctx)
		running, ctx := errgroup.WithContext(ctx)
		running.Go(func() error { return a.track(ctx, forTracker) })
		running.Go(func() error { return a.vfs.Run(ctx, functionsForVFs, poolsForVFs) })
		running.Go(func() error { return a.hooks.Run(ctx) })
		running.Go(func() error { return a.lifecycle.Run(ctx, forLifecycle) })
		running.Go(func() error { return a.fitOut(ctx) })
		running.Go(func() error { return a.uses.run(ctx, forUses) })
		running.Go(func() error { return a.cni.Run(ctx) })
		running.Go(func() error { return a.plugins.Run(ctx, forPlugins) })
		running.Go(func() error { return a.mode.serve(ctx) })
		running.Go(func() error { return trim(ctx, a.log) })
		return running.Wait()
	})
	err := group.Wait()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// track keeps the pools current.
func (a *agent) track(ctx context.Context, changes <-chan struct{}) error {
	if !a.mode.synced(ctx) {
		return nil
	}
	return a.tracker.Run(ctx, changes, func() { a.poolsChanged(ctx) })
}

// poolsChanged looks whether pods have Functions of the pools as they are now, and tells of both.
func (a *agent) poolsChanged(ctx context.Context) {
	a.uses.look(ctx)
	a.outputs.Notify()
}

// recover brings the journal and the world together before anybody asks for anything. What cannot be done now is tried
// again later; it must not keep the other Functions from work.
func (a *agent) recover(ctx context.Context) {
	begin := time.Now()
	if err := a.lifecycle.Recover(ctx); err != nil {
		a.log.Error(err, "Some Functions of the last run are not back yet")
	}
	a.log.Info("Recovered", "attachments", len(a.journal.All()), "took", time.Since(begin).String())
}

// setUp has Functions set up again for owners that have them since before the start. A card that takes its time
// must not keep the others from work.
func (a *agent) fitOut(ctx context.Context) error {
	if err := a.lifecycle.SetUp(ctx); err != nil && ctx.Err() == nil {
		a.log.Error(err, "Some Functions are not what pods were promised: delete those pods that do not start")
	}
	return nil
}

// ready says why pods could not be served now.
func (a *agent) ready() error {
	if err := a.poolsKnown(); err != nil {
		return err
	}
	return a.mode.ready()
}

func (a *agent) poolsKnown() error {
	if _, known := a.tracker.Pools(); !known {
		return errors.New("DevicePools and Functions have not been read yet")
	}
	return nil
}
