package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cniserver"
	"github.com/opiproject/xpu-device-plugin/pkg/node/deviceplugin"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/hooks"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/source"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/pkg/node/setup"
	"github.com/opiproject/xpu-device-plugin/pkg/node/sriov"
)

// assemble makes the parts and tells them of each other, in the order in which data flows.
func (a *agent) assemble(ctx context.Context, engine *netdev.Engine) (err error) {
	bootID, err := readBootID(a.config.ProcRoot)
	if err != nil {
		return err
	}
	a.inventory = inventory.New(inventory.Options{
		SysRoot: a.config.SysRoot, Changed: a.inputs.Notify, Registry: a.registry, Log: a.log.WithName("inventory"),
	})
	a.faults = health.NewReporters(health.ReportersOptions{
		SysRoot: a.config.SysRoot, Devlink: a.devlink,
		Follow:  func(ctx context.Context, changed func()) { devlink.Follow(ctx, "", changed, a.log.WithName("health")) },
		Changed: a.outputs.Notify, Registry: a.registry, Log: a.log.WithName("health"),
	})
	a.assembleOutfits(engine, bootID)
	if a.mode, err = a.newMode(); err != nil {
		return err
	}
	if err := a.declare(); err != nil {
		return err
	}
	if err := a.assembleLifecycle(ctx, engine, bootID); err != nil {
		return err
	}
	if err := a.assembleSupply(); err != nil {
		return err
	}
	if err := a.assembleDevicePlugin(); err != nil {
		return err
	}
	a.cni = cniserver.New(cniserver.Options{
		Socket: a.config.CNISocket, SpoolDir: a.config.SpoolDir,
		Functions: a.tracker, Pools: a.tracker, Journal: a.journal, Lifecycle: a.lifecycle,
		Provisioner: a.mode.provisioner(),
		MAC:         func(id function.ID) function.MAC { return provisioning.MAC(a.config.NodeName, id) },
		Ready:       func(context.Context) error { return errors.Join(a.poolsKnown(), a.journal.Writable()) },
		Reporter:    a.mode.reporter(),
		AllowKeys:   a.config.CNIAllowKeys,
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

// assembleOutfits makes what has Functions fit for whom they are handed out to.
func (a *agent) assembleOutfits(engine *netdev.Engine, bootID string) {
	a.sfs = &sriov.SFMaker{
		Devlink: a.devlink, Functions: a.inventory, Changes: a.inputs.Subscribe, Changed: a.inputs.Notify,
		Log: a.log.WithName("sfs"),
	}
	a.setup = &setup.Runner{SFs: a.sfs, Drivers: &setup.PCIDrivers{
		SysRoot: a.config.SysRoot, DevRoot: a.config.DevRoot, ProcRoot: a.config.ProcRoot, BootID: bootID,
		Functions: a.inventory, Changes: a.inputs.Subscribe, Engine: engine, Log: a.log.WithName("drivers"),
	}}
}

// assembleLifecycle makes what decides who has a Function, and what follows a release.
func (a *agent) assembleLifecycle(ctx context.Context, engine *netdev.Engine, bootID string) error {
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
	pods := podresources.NewTracker(a.kubelet, a.log.WithName("kubelet"))
	a.uses = &conflicts{tracker: a.tracker, pods: pods, changed: a.outputs.Notify, times: a.config.times}
	a.lifecycle = lifecycle.New(a.journal, engine, a.inventory, lifecycle.Options{
		BootID: bootID, Setup: a.setup, Hooks: a.hooks, Kubelet: pods, Claims: a.mode.claims(), Devices: a.mode.devices(),
		Announcer: engine, Functions: a.inventory,
		Ports:   ports{functions: a.inventory, provisioner: a.mode.provisioner(), claims: a.mode.claimServed},
		Users:   &users{reporter: a.mode.reporter(), recorder: recorder, node: a.config.NodeName},
		Changed: a.outputs.Notify, Taken: a.uses.taken,
		SweepEvery: a.config.times.sweep, AbandonedAfter: a.config.times.abandoned,
	}, a.log.WithName("lifecycle"))
	a.uses.lifecycle = a.lifecycle
	return nil
}

// declare makes what knows the pools.
func (a *agent) declare() (err error) {
	if a.config.ConfigFile != "" {
		options := source.FileOptions{
			Path: a.config.ConfigFile, ResourcePrefix: a.config.ResourcePrefix, Changed: a.inputs.Notify,
			Registry: a.registry, Log: a.log.WithName("declare"),
		}
		if a.config.Provisioner == ProvisionerDirect {
			options.Check = checkStandalone
		}
		if a.file, err = source.OpenFile(options); err != nil {
			return err
		}
	}
	functions := setup.OwnDrivers{Functions: a.inventory, Journal: a.journal}
	a.tracker = pool.NewTracker(functions, a.mode.declarations(a.file), a.sfs.NoSFs, a.log.WithName("pool"))
	return nil
}

// assembleSupply makes what gives PFs the VFs that pools ask for.
func (a *agent) assembleSupply() error {
	a.vfs = &sriov.VFs{
		SysRoot: a.config.SysRoot, Functions: a.inventory, Pools: a.tracker, Journal: a.journal, Assignments: a.kubelet,
		NetdevUse: sriov.NetdevUse, Changed: a.outputs.Notify, Metrics: sriov.NewMetrics(a.registry),
		Log: a.log.WithName("vfs"),
	}
	return a.registry.Register(a.vfs)
}

// assembleDevicePlugin makes what speaks to the kubelet about extended resources.
func (a *agent) assembleDevicePlugin() (err error) {
	var cdi *deviceplugin.CDI
	if a.config.UseCDI {
		if cdi, err = deviceplugin.NewCDI(a.config.CDIDir); err != nil {
			return err
		}
	}
	a.plugins = &deviceplugin.Manager{
		KubeletDir: a.config.KubeletDir,
		Pools:      a.tracker,
		Health:     a.health(a.lifecycle.Releasing),
		Allocator: &podAllocator{
			node: a.config.NodeName, functions: a.inventory, lifecycle: a.lifecycle,
			provisioner: a.mode.provisioner(), log: a.log.WithName("deviceplugin"),
		},
		Contents:    &deviceplugin.Contents{Nodes: a.deviceNodes()},
		DeviceInfo:  deviceplugin.NewDeviceInfo(a.config.DeviceInfoDir),
		CDI:         cdi,
		Assignments: a.kubelet, AllocateTimeout: a.config.times.allocate,
		Metrics: deviceplugin.NewMetrics(a.registry),
		Log:     a.log.WithName("deviceplugin"),
	}
	return nil
}

// deviceNodes looks up the device nodes of Functions.
func (a *agent) deviceNodes() devnode.Finder {
	return devnode.Finder{SysRoot: a.config.SysRoot, DevRoot: a.config.DevRoot}
}

// health says what is wrong with Functions. Ways of publishing differ in when they want to hear of a release.
func (a *agent) health(releasePending health.Source) *health.Checker {
	return &health.Checker{
		Fault:           a.faults.Fault,
		XPUAway:         a.mode.provisioner().Away,
		ProvisionFailed: a.mode.provisionFailed(),
		ReleasePending:  releasePending,
		Lost:            a.lifecycle.Lost,
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
