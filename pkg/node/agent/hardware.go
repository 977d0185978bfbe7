// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/uptime"
	"github.com/opiproject/xpu-device-plugin/pkg/node/card"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory/witness"
	"github.com/opiproject/xpu-device-plugin/pkg/node/setup"
	"github.com/opiproject/xpu-device-plugin/pkg/node/sriov"
)

// hardware has the parts that know the node's Functions, set them up, and move their netdevs.
type hardware struct {
	bootID    string
	devlink   *devlink.Conn
	engine    *netdev.Engine
	inventory *inventory.Inventory
	verifier  *witness.Verifier
	cards     *card.Cards
	macs      *card.MACs
	faults    *health.Reporters
	sfs       *sriov.SFMaker
	setup     *setup.Runner
	nodes     *devnode.Finder
	log       logr.Logger
}

// openHardware makes the parts, and connects to the kernel. The caller must call close.
func openHardware(env *environment) (h *hardware, err error) {
	h = &hardware{
		nodes: &devnode.Finder{SysRoot: env.config.SysRoot, DevRoot: env.config.DevRoot},
		log:   env.log,
	}
	if h.bootID, err = uptime.BootID(env.config.ProcRoot); err != nil {
		return nil, err
	}
	if h.devlink, err = devlink.Dial(""); err != nil {
		return nil, err
	}

	h.engine, err = netdev.New(netdev.Options{
		ProcRoot: env.config.ProcRoot, SysRoot: env.config.SysRoot, Eswitches: h.devlink,
	})
	if err != nil {
		h.devlink.Close()
		return nil, err
	}

	h.inventory = inventory.New(inventory.Options{
		SysRoot: env.config.SysRoot, Changed: env.inputs.Notify, Registry: env.registry,
		Log: env.log.WithName("inventory"),
	})

	h.verifier = witness.NewVerifier(witness.Options{
		SysRoot: env.config.SysRoot, Functions: h.inventory.Snapshot, Ports: h.devlink.Ports,
		Changed: env.outputs.Notify, Log: env.log.WithName("witness"),
	})

	h.cards = card.New(card.Options{
		Functions: h.inventory.Snapshot, SysRoot: env.config.SysRoot, Changed: env.outputs.Notify,
		Log: env.log.WithName("cards"),
	})

	h.macs = card.NewMACs(card.MACOptions{
		Functions: h.inventory.Snapshot, Changed: env.outputs.Notify,
		Recorded: func(id function.ID) function.MAC {
			if a, held := env.journal.Get(id); held && a.Before != nil {
				return a.Before.Identity.Permanent
			}
			return ""
		},
		Log: env.log.WithName("macs"),
	})

	h.faults = health.NewReporters(health.ReportersOptions{
		SysRoot: env.config.SysRoot, Devlink: h.devlink,
		Follow: func(ctx context.Context, changed func()) {
			devlink.Follow(ctx, "", changed, env.log.WithName("health"))
		},
		Changed: env.outputs.Notify, Registry: env.registry, Log: env.log.WithName("health"),
	})

	h.sfs = &sriov.SFMaker{
		Devlink: h.devlink, Functions: h.inventory, Fault: h.faults.Fault,
		Changes: env.inputs.Subscribe, Changed: env.inputs.Notify,
		Log: env.log.WithName("sfs"),
	}

	h.setup = &setup.Runner{SFs: h.sfs, Drivers: &setup.PCIDrivers{
		SysRoot: env.config.SysRoot, DevRoot: env.config.DevRoot, ProcRoot: env.config.ProcRoot,
		BootID: h.bootID, Functions: h.inventory, Fault: h.faults.Fault,
		Changes: env.inputs.Subscribe, Engine: h.engine, Log: env.log.WithName("drivers"),
	}}

	return h, nil
}

// pfOf returns the PF of a Function, or "" if the Function is gone.
func (h *hardware) pfOf(id function.ID) pci.Address {
	f, _ := h.inventory.Get(id)
	return f.PF
}

// close closes the connections to the kernel.
func (h *hardware) close() {
	h.engine.Close()
	h.devlink.Close()
}

// synced waits until the Functions and their faults have been read once. It returns false if ctx
// ended first.
func (h *hardware) synced(ctx context.Context) bool {
	return h.inventory.Synced(ctx) && h.faults.Synced(ctx)
}

// prepareReleases does the work that the first release would wait for. If releases will be slow, it
// logs why.
func (h *hardware) prepareReleases(context.Context) error {
	if err := h.engine.SeesUppers(); err != nil {
		h.log.Info("The kernel does not say whether something is on top of a netdev. Each "+
			"release finds out by many requests, "+
			"and takes 0.1 s longer or more where the kernel has loaded VLANs", "reason",
			err.Error())
	}
	return nil
}
