// Package agent puts the node's agent together. Data flows one way: the inventory discovers Functions, pools select
// them, the device plugin and the DRA driver publish them, the xPU is provisioned, CNI or NRI says when a pod's network
// namespace is there and the attacher moves them, and the releaser brings them back and has the post-delete hooks run.
package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/opiproject/xpu-device-plugin/pkg/attach"
	"github.com/opiproject/xpu-device-plugin/pkg/cniserver"
	"github.com/opiproject/xpu-device-plugin/pkg/declare"
	"github.com/opiproject/xpu-device-plugin/pkg/deviceplugin"
	"github.com/opiproject/xpu-device-plugin/pkg/health"
	"github.com/opiproject/xpu-device-plugin/pkg/hooks"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/link"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
	"github.com/opiproject/xpu-device-plugin/pkg/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/provisioner"
	"github.com/opiproject/xpu-device-plugin/pkg/release"
)

// agent has the parts that it needs whichever way it works.
type agent struct {
	config   Config
	log      logr.Logger
	registry *prometheus.Registry

	journal   *journal.Journal
	inventory *inventory.Inventory
	tracker   *pool.Tracker
	attacher  *attach.Attacher
	releaser  *release.Releaser
	releases  *releases
	hooks     *hooks.Queue
	uses      *uses
	plugins   *deviceplugin.Manager
	cni       *cniserver.Server
	// file is nil without a configuration file.
	file *declare.File
	mode mode

	// inputs wakes who decides which Function is in which pool; outputs wakes who tells the world about pools and
	// health.
	inputs, outputs notify.Signal
}

// mode is what differs between an agent with an API server and one without.
type mode interface {
	// provisioner has the xPU serve what the device plugin hands out.
	provisioner() provisioner.Provisioner
	// declarations are the DevicePools; file is nil without a configuration file.
	declarations(file *declare.File) pool.Declarations
	// provisionFailed knows Functions whose Port the xPU refused; it may be nil.
	provisionFailed() health.Source
	// recorder tells of post-delete hooks that are given up; nil where there is nobody to tell.
	recorder(ctx context.Context) (hooks.Recorder, error)
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
	records, err := journal.Open(filepath.Join(config.StateDir, "journal.db"))
	if err != nil {
		return err
	}
	defer records.Close()
	engine, err := link.New(link.Options{})
	if err != nil {
		return err
	}
	defer engine.Close()
	kubelet, err := podresources.NewClient(config.KubeletDir)
	if err != nil {
		return err
	}
	defer kubelet.Close()
	a := &agent{config: config, log: log, registry: registry, journal: records}
	if err := a.assemble(ctx, engine, kubelet); err != nil {
		return err
	}
	return a.run(ctx)
}

// assemble makes the parts and tells them of each other, in the order in which data flows.
func (a *agent) assemble(ctx context.Context, engine *link.Engine, kubelet *podresources.Client) (err error) {
	bootID, err := readBootID(a.config.ProcRoot)
	if err != nil {
		return err
	}
	a.inventory = inventory.New(inventory.Options{
		SysRoot: a.config.SysRoot, Changed: a.inputs.Notify, Registry: a.registry, Log: a.log.WithName("inventory"),
	})
	if a.mode, err = a.newMode(); err != nil {
		return err
	}
	if err := a.assembleRelease(ctx, engine, kubelet, bootID); err != nil {
		return err
	}
	a.attacher = attach.New(a.journal, engine, a.inventory, a.releaser, bootID, a.log.WithName("attach"))
	if err := a.declare(); err != nil {
		return err
	}
	a.uses = &uses{
		journal: a.journal, tracker: a.tracker, pods: podresources.NewTracker(kubelet, a.log.WithName("kubelet")),
		changed: a.outputs.Notify, log: a.log.WithName("uses"), times: a.config.times,
	}
	if err := a.assembleDevicePlugin(kubelet); err != nil {
		return err
	}
	a.cni = cniserver.New(cniserver.Options{
		Socket: a.config.CNISocket, SpoolDir: a.config.SpoolDir,
		Functions: a.inventory, Pools: a.tracker, Journal: a.journal, Attacher: a.attacher, Releaser: a.releases,
		Engine:      engine,
		Assignments: kubelet,
		Provisioner: a.mode.provisioner(),
		MAC:         func(id inventory.ID) link.MAC { return provisioner.MAC(a.config.NodeName, id) },
		Ready:       func(context.Context) error { return errors.Join(a.poolsKnown(), a.journal.Writable()) },
		Reporter:    a.mode.reporter(),
		AddTimeout:  a.config.times.add,
		Metrics:     cniserver.NewMetrics(a.registry),
		Log:         a.log.WithName("cni"),
	})
	return a.mode.complete()
}

func (a *agent) newMode() (mode, error) {
	if a.config.Provisioner == ProvisionerDirect {
		return newStandalone(a)
	}
	return newClustered(a)
}

// assembleRelease makes what brings Functions back.
func (a *agent) assembleRelease(
	ctx context.Context, engine *link.Engine, kubelet *podresources.Client, bootID string,
) error {
	recorder, err := a.mode.recorder(ctx)
	if err != nil {
		return err
	}
	a.hooks, err = hooks.New(a.journal, a.inventory, a.mode.provisioner(), hooks.Options{
		Node: a.config.NodeName, Dir: a.config.HooksDir, Timeout: a.config.HookTimeout, Attempts: a.config.HookAttempts,
		Recorder: recorder, Changed: a.outputs.Notify,
	}, a.registry, a.log.WithName("hooks"))
	if err != nil {
		return err
	}
	log := a.log.WithName("release")
	a.releaser = release.New(a.journal, engine, a.inventory, release.Options{BootID: bootID, Hooks: a.hooks}, log)
	a.releases = &releases{
		releaser: a.releaser, journal: a.journal, assigned: kubelet, changed: a.outputs.Notify, log: log,
		times: a.config.times,
	}
	return nil
}

// declare makes what knows the pools.
func (a *agent) declare() (err error) {
	if a.config.ConfigFile != "" {
		options := declare.FileOptions{
			Path: a.config.ConfigFile, ResourcePrefix: a.config.ResourcePrefix, Changed: a.inputs.Notify,
			Registry: a.registry, Log: a.log.WithName("declare"),
		}
		if a.config.Provisioner == ProvisionerDirect {
			options.Check = checkStandalone
		}
		if a.file, err = declare.OpenFile(options); err != nil {
			return err
		}
	}
	a.tracker = pool.NewTracker(a.inventory, a.mode.declarations(a.file), a.log.WithName("pool"))
	return nil
}

// assembleDevicePlugin makes what speaks to the kubelet about extended resources.
func (a *agent) assembleDevicePlugin(kubelet *podresources.Client) (err error) {
	var cdi *deviceplugin.CDI
	if a.config.UseCDI {
		if cdi, err = deviceplugin.NewCDI(a.config.CDIDir); err != nil {
			return err
		}
	}
	a.plugins = &deviceplugin.Manager{
		KubeletDir: a.config.KubeletDir, Registration: a.config.Registration,
		Pools:  a.tracker,
		Health: a.health(a.releases.releasing),
		Provisioner: &allocations{
			node: a.config.NodeName, journal: a.journal, attacher: a.attacher, releases: a.releases, provisioner: a.mode.provisioner(),
		},
		Contents:    &deviceplugin.Contents{SysRoot: a.config.SysRoot, DevRoot: a.config.DevRoot},
		DeviceInfo:  deviceplugin.NewDeviceInfo(a.config.DeviceInfoDir),
		CDI:         cdi,
		Assignments: kubelet, AllocateTimeout: a.config.times.allocate,
		Metrics: deviceplugin.NewMetrics(a.registry),
		Log:     a.log.WithName("deviceplugin"),
	}
	return nil
}

// health says what is wrong with Functions. Ways of publishing differ in when they want to hear of a release.
func (a *agent) health(releasePending health.Source) *health.Checker {
	return &health.Checker{
		XPUAway:         a.mode.provisioner().Away,
		ProvisionFailed: a.mode.provisionFailed(),
		ReleasePending:  releasePending,
		InUse:           a.uses.elsewhere,
	}
}

func readBootID(procRoot string) (string, error) {
	id, err := os.ReadFile(filepath.Join(procRoot, "sys/kernel/random/boot_id"))
	if err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}

func (a *agent) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	// Subscriptions come before what they listen to is started, so that nothing is missed.
	forTracker, forPlugins, forUses := a.inputs.Subscribe(ctx), a.outputs.Subscribe(ctx), a.outputs.Subscribe(ctx)

	// What others work with ends after them: a request that runs when ctx ends is given the time to end well.
	lasting, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	group.Go(func() error { return a.inventory.Run(lasting) })
	group.Go(func() error { return a.mode.connect(lasting) })
	group.Go(func() error { return serve(ctx, a.config.ListenAddress, a.registry, a.ready, a.log) })
	if a.file != nil {
		group.Go(func() error { return a.file.Run(ctx) })
	}
	group.Go(func() error {
		defer end()
		// Functions are brought back whether the API server is there or not.
		if !a.inventory.Synced(ctx) {
			return nil
		}
		a.recover(ctx)
		a.uses.look(ctx)
		running, ctx := errgroup.WithContext(ctx)
		running.Go(func() error { return a.track(ctx, forTracker) })
		running.Go(func() error { return a.hooks.Run(ctx) })
		running.Go(func() error { return a.releases.run(ctx) })
		running.Go(func() error { return a.uses.run(ctx, forUses) })
		running.Go(func() error { return a.cni.Run(ctx) })
		running.Go(func() error { return a.plugins.Run(ctx, forPlugins) })
		running.Go(func() error { return a.mode.serve(ctx) })
		running.Go(func() error { return trim(ctx) })
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

// startTime is how long a start needs memory: until the slices of many Functions are read, made and compared.
const startTime = 3 * time.Second

// trim gives back, once, what only the start needed. It is as much again as the agent keeps, and the Go runtime would
// hold on to it for minutes.
func trim(ctx context.Context) error {
	select {
	case <-ctx.Done():
	case <-time.After(startTime):
		debug.FreeOSMemory()
	}
	return nil
}

// recover brings the journal and the world together before anybody asks for anything. What cannot be done now is tried
// again later; it must not keep the other Functions from work.
func (a *agent) recover(ctx context.Context) {
	begin := time.Now()
	if err := a.releaser.Recover(ctx); err != nil {
		a.log.Error(err, "Some Functions of the last run are not back yet")
	}
	a.log.Info("Recovered", "attachments", len(a.journal.All()), "took", time.Since(begin).String())
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
