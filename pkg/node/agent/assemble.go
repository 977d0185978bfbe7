// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync/atomic"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/events"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/uptime"
	"github.com/opiproject/xpu-device-plugin/pkg/node/admin"
	"github.com/opiproject/xpu-device-plugin/pkg/node/card"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cniserver"
	"github.com/opiproject/xpu-device-plugin/pkg/node/deviceplugin"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/hooks"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory/witness"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/source"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/pkg/node/setup"
	"github.com/opiproject/xpu-device-plugin/pkg/node/sriov"
	"github.com/opiproject/xpu-device-plugin/pkg/node/traffic"
	"github.com/opiproject/xpu-device-plugin/pkg/node/upgrade"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
)

// agent has the parts of the agent, in the order in which they are made.
type agent struct {
	config   Config
	log      logr.Logger
	registry *prometheus.Registry
	tracer   *tracing.Tracer // nil for none

	// inputs notifies the parts that assign Functions to pools. outputs notifies the parts that
	// publish pools and health.
	inputs, outputs notify.Signal

	readiness *upgrade.Readiness
	// clientset and registration are nil in direct mode.
	clientset    kubernetes.Interface
	registration *upgrade.Registration
	// predecessor is the agent that handed over the node to this agent; nil if there was none.
	predecessor *upgrade.Predecessor
	// succeeded says that a successor has asked for the node.
	succeeded atomic.Bool
	// lingering are the parts that outlive the work when a successor has the node.
	lingering     *errgroup.Group
	stopLingering context.CancelFunc

	journal *journal.Journal
	kubelet *podresources.Client
	devlink *devlink.Conn
	engine  *netdev.Engine

	// The following fields depend on whether there is an API server or the agent is in direct mode.

	provisioner  provisioning.Provisioner
	file         *source.File // nil without a configuration file
	declarations pool.Declarations
	// connect runs provisioner and declarations until ctx ends.
	connect func(context.Context) error
	// report queues a write of the status of a claim.
	report func(journal.Claim)

	// The following fields are nil in direct mode.

	clustered *clustered
	// provisionFailed reports Functions whose Port the xPU refused.
	provisionFailed health.Source
	// recorder records events about Functions and failed post-delete hooks.
	recorder events.EventRecorder
	claims   lifecycle.Claims
	// claimServed implements Serve of [lifecycle.Options] for the Port of a claim.
	claimServed func(context.Context, journal.Attachment) error
	// expose gives the containers of claims their devices. Other containers get theirs from the
	// kubelet.
	expose func(journal.Attachment) error

	// The following fields are set in both modes.

	bootID    string
	inventory *inventory.Inventory
	verifier  *witness.Verifier
	cards     *card.Cards
	faults    *health.Reporters
	sfs       *sriov.SFMaker
	setup     *setup.Runner
	nodes     *devnode.Finder
	tracker   *pool.Tracker
	vfs       *sriov.VFs
	hooks     *hooks.Queue
	conflicts *conflicts
	lifecycle *lifecycle.Manager
	plugins   *deviceplugin.Manager
	cni       *cniserver.Server
	admin     *admin.Server
}

// assemble makes the parts in the order of their dependencies.
func (a *agent) assemble(ctx context.Context) error {
	provision := a.provisionByCluster
	if a.config.Provisioner == ProvisionerDirect {
		provision = a.provisionDirect
	}

	for _, stage := range []func(context.Context) error{
		provision, a.discover, a.release, a.allocate,
	} {
		if err := stage(ctx); err != nil {
			return err
		}
	}

	return nil
}

// discover makes the parts that know the node's Functions, set them up, assign them to pools, and
// create the VFs that pools ask for.
func (a *agent) discover(context.Context) error {
	bootID, err := uptime.BootID(a.config.ProcRoot)
	if err != nil {
		return err
	}

	a.bootID = bootID
	a.inventory = inventory.New(inventory.Options{
		SysRoot: a.config.SysRoot, Changed: a.inputs.Notify, Registry: a.registry,
		Log: a.log.WithName("inventory"),
	})

	a.kubelet.Auxiliary = a.inventory.Auxiliary
	a.verifier = witness.NewVerifier(witness.Options{
		SysRoot: a.config.SysRoot, Functions: a.inventory.Snapshot, Ports: a.devlink.Ports,
		Changed: a.outputs.Notify, Log: a.log.WithName("witness"),
	})

	a.cards = card.New(card.Options{
		Functions: a.inventory.Snapshot, SysRoot: a.config.SysRoot, Changed: a.outputs.Notify,
		Log: a.log.WithName("cards"),
	})

	a.faults = health.NewReporters(health.ReportersOptions{
		SysRoot: a.config.SysRoot, Devlink: a.devlink,
		Follow: func(ctx context.Context, changed func()) {
			devlink.Follow(ctx, "", changed, a.log.WithName("health"))
		},
		Changed: a.outputs.Notify, Registry: a.registry, Log: a.log.WithName("health"),
	})

	a.sfs = &sriov.SFMaker{
		Devlink: a.devlink, Functions: a.inventory, Fault: a.faults.Fault,
		Changes: a.inputs.Subscribe, Changed: a.inputs.Notify,
		Log: a.log.WithName("sfs"),
	}

	a.setup = &setup.Runner{SFs: a.sfs, Drivers: &setup.PCIDrivers{
		SysRoot: a.config.SysRoot, DevRoot: a.config.DevRoot, ProcRoot: a.config.ProcRoot,
		BootID:    a.bootID,
		Functions: a.inventory, Fault: a.faults.Fault, Changes: a.inputs.Subscribe,
		Engine: a.engine, Log: a.log.WithName("drivers"),
	}}

	a.nodes = &devnode.Finder{SysRoot: a.config.SysRoot, DevRoot: a.config.DevRoot}
	functions := setup.OwnDrivers{Functions: a.inventory, Journal: a.journal}
	a.tracker = pool.NewTracker(functions, a.declarations, a.sfs.NoSFs, a.log.WithName("pool"))
	a.vfs = &sriov.VFs{
		SysRoot: a.config.SysRoot, Functions: a.inventory, Pools: a.tracker, Journal: a.journal,
		Assignments: a.kubelet,
		HostNetdevs: func() (hostuse.Netdevs, error) {
			return hostuse.Read("")
		}, Fault: a.faults.Fault,
		Changed: a.outputs.Notify, Metrics: sriov.NewMetrics(a.registry),
		Log: a.log.WithName("vfs"),
	}

	poolOf := func(id function.ID) string {
		p, _ := a.tracker.PoolOf(id)
		return p.Name
	}

	counts := &traffic.Collector{
		Functions: a.inventory.Snapshot, Attachments: a.journal.All, PoolOf: poolOf,
		Kernel: a.engine, Log: a.log.WithName("traffic"),
	}

	return errors.Join(a.registry.Register(a.vfs), a.registry.Register(counts))
}

// openFile reads the configuration file, if there is one. adapt may be nil; see
// [source.FileOptions].
func (a *agent) openFile(adapt func(*v1alpha1.DevicePool) error) (err error) {
	if a.config.ConfigFile == "" {
		return nil
	}

	a.file, err = source.OpenFile(source.FileOptions{
		Path: a.config.ConfigFile, ResourcePrefix: a.config.ResourcePrefix, Adapt: adapt,
		Changed:  a.inputs.Notify,
		Registry: a.registry, Log: a.log.WithName("declare"),
	})

	return err
}

// release makes the parts that attach and release Functions, and run the hooks after a release.
func (a *agent) release(context.Context) (err error) {
	a.hooks, err = hooks.New(hooks.Options{
		Journal: a.journal, Deprovision: a.provisioner.Deprovision, Log: a.log.WithName("hooks"),
		Node: a.config.NodeName, Dir: a.config.HooksDir, Timeout: a.config.HookTimeout,
		Attempts: a.config.HookAttempts,
		Recorder: a.recorder, Changed: a.outputs.Notify,
	}, a.registry)

	if err != nil {
		return err
	}

	a.conflicts = &conflicts{
		tracker: a.tracker, pods: a.kubelet, changed: a.outputs.Notify, times: a.config.times,
	}
	a.lifecycle = lifecycle.New(a.journal, a.engine, a.inventory, lifecycle.Options{
		BootID: a.bootID, Setup: a.setup, Hooks: a.hooks, Kubelet: a.kubelet, Claims: a.claims,
		Expose:   a.expose,
		Announce: a.engine.Announce, Seen: a.inventory.Get, Driver: a.inventory.Driver,
		Unusable: a.unusable,
		Serve:    a.servePort, Tracer: a.tracer,
		Quarantined: a.reportQuarantine, Unquarantined: a.reportRelease, Report: a.reportLoss,
		Changed: a.outputs.Notify, Reserved: a.conflicts.reserved,
		SweepEvery: a.config.times.sweep, AbandonedAfter: a.config.times.abandoned,
	}, a.log.WithName("lifecycle"))

	a.conflicts.lifecycle = a.lifecycle
	return a.registry.Register(a.lifecycle)
}

// allocate makes the parts that allocate and attach Functions: the device plugin, the CNI server
// and the DRA driver.
func (a *agent) allocate(context.Context) (err error) {
	var cdi *deviceplugin.CDI
	if a.config.UseCDI {
		if cdi, err = deviceplugin.NewCDI(a.config.CDIDir); err != nil {
			return err
		}
	}

	a.plugins = &deviceplugin.Manager{
		KubeletDir: a.config.KubeletDir,
		Pools:      a.tracker.Pools,
		Problems:   a.health(a.lifecycle.Releasing).Problems,
		Allocator: &podAllocator{
			node: a.config.NodeName, find: a.inventory.Get, lifecycle: a.lifecycle,
			provisioner: a.provisioner,
			log:         a.log.WithName("deviceplugin"),
		},
		InUse:         a.held,
		Nodes:         *a.nodes,
		DeviceInfoDir: filepath.Join(a.config.DeviceInfoDir, "dp"),
		CDI:           cdi,
		Assigned:      a.kubelet.Assigned, AllocateTimeout: a.config.times.allocate,
		Metrics: deviceplugin.NewMetrics(a.registry),
		Log:     a.log.WithName("deviceplugin"),
	}

	inherited, err := a.predecessor.Listener()
	if err != nil {
		return err
	}

	a.cni = &cniserver.Server{
		BootID: a.bootID, Path: a.config.CNISocket, SpoolDir: a.config.SpoolDir,
		Inherited: inherited, Succeeded: a.succeeded.Load,
		Function: a.tracker.Get, Auxiliary: a.inventory.Auxiliary,
		Pools: a.tracker, Journal: a.journal, Lifecycle: a.lifecycle,
		Provisioner: a.provisioner,
		MAC: func(id function.ID) function.MAC {
			return provisioning.MAC(a.config.NodeName, id)
		},
		Ready:      func() error { return errors.Join(a.poolsKnown(), a.journal.Writable()) },
		Report:     a.report,
		AllowKeys:  a.config.CNIAllowKeys,
		AddTimeout: a.config.times.add,
		Metrics:    cniserver.NewMetrics(a.registry),
		Log:        a.log.WithName("cni"),
	}

	if a.clustered != nil {
		if err := a.clustered.attach(); err != nil {
			return err
		}
	}

	a.admin = &admin.Server{
		Socket:    filepath.Join(a.config.StateDir, filepath.Base(nodestate.DefaultSocket)),
		Node:      a.config.NodeName,
		Functions: a.inventory.Snapshot, Pools: a.tracker.Pools, Problems: a.problems,
		Card: a.cards.Of, Journal: a.journal,
		GiveUp: a.hooks.GiveUp, Release: a.lifecycle.Release,
		Verification: a.verifier.Last, Verify: a.verifier.Verify,
		Log: a.log.WithName("admin"),
	}

	return nil
}

// problems returns the problems of a Function with which its pool is published.
func (a *agent) problems(p pool.Pool, f function.Function) []function.Problem {
	if p.Spec.Publish == v1alpha1.PublishDRA && a.clustered != nil {
		return a.clustered.checker.Problems(f)
	}
	return a.plugins.Problems(f)
}

// health returns the checker of the problems of Functions for one way of publishing. releasePending
// reports the Functions whose release takes too long for this way.
func (a *agent) health(releasePending health.Source) *health.Checker {
	return &health.Checker{
		Pool: a.tracker.PoolOf, Held: a.held,
		Fault:           a.faults.Fault,
		XPUAway:         a.provisioner.Away,
		ProvisionFailed: a.provisionFailed,
		ReleasePending:  releasePending,
		Quarantined:     a.lifecycle.Quarantined,
		Lost:            a.lifecycle.Lost,
		InUse:           a.conflicts.elsewhere,
	}
}

// held reports whether a pod has the Function, or had it and the Function is not free yet.
func (a *agent) held(id function.ID) bool {
	_, held := a.journal.Get(id)
	return held
}

// unusable implements Unusable of [lifecycle.Options]. A Function that does not exist any more is
// not judged.
func (a *agent) unusable(id function.ID, driver string) (reason string) {
	f, exists := a.tracker.Get(id)
	if !exists {
		return ""
	}
	p, _ := a.tracker.PoolOf(id)
	problem, _ := health.Unusable(f, p, driver)
	return problem.Message
}

// machineID returns a name that no other node has, in any cluster.
func (a *agent) machineID() (string, error) {
	uuid, err := sysfs.Root(a.config.SysRoot).Dir("class/dmi/id").Attribute("product_uuid")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("what the firmware calls this machine: %w; set installation in the "+
			"file of --direct-config", err)
	}
	return a.config.NodeName + "/" + uuid, nil
}

// provisionDirect makes the parts of direct mode: the agent calls the OPI agents itself, and
// DevicePools come from a file.
func (a *agent) provisionDirect(context.Context) (err error) {
	config := &provisioning.Config{}
	if a.config.DirectConfig != "" {
		if config, err = provisioning.LoadConfig(a.config.DirectConfig); err != nil {
			return err
		}
	}

	if config.Installation == "" {
		if config.Installation, err = a.machineID(); err != nil {
			return err
		}
	}

	direct, err := provisioning.NewDirect(config, a.journal, provisioning.DirectOptions{
		Installation: opi.NewInstallation(config.Installation),
		Changed:      a.outputs.Notify, Registry: a.registry, Tracer: a.tracer,
		Log: a.log.WithName("provision"),
	})

	if err != nil {
		return err
	}

	a.provisioner, a.connect, a.report = direct, direct.Run, func(journal.Claim) {}
	err = a.openFile(func(p *v1alpha1.DevicePool) error {
		if p.Spec.Publish != v1alpha1.PublishDevicePlugin { // no part would publish the pool
			return fmt.Errorf("spec.publish: is %s, which needs an API server; with "+
				"--provisioner=direct it must be %s",
				p.Spec.Publish, v1alpha1.PublishDevicePlugin)
		}
		p.Spec.Network = cmp.Or(config.Pools[p.Name], p.Spec.Network)
		return nil
	})

	a.declarations = a.file
	return err
}
