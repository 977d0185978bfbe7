// SPDX-License-Identifier: Apache-2.0

// Command simhost simulates the SmartNICs of one host until it is stopped.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"syscall"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

// ready is the line of JSON that simhost prints when the host is ready.
type ready struct {
	// XPUNetNS is a path of the xPU's network namespace, valid while simhost runs.
	XPUNetNS string `json:"xpuNetNS"`
	// SysRoot is the directory that stands for the host's /sys.
	SysRoot   string     `json:"sysRoot"`
	Functions []function `json:"functions"`
}

type function struct {
	Address     string `json:"address"`
	Netdev      string `json:"netdev"`
	Representor string `json:"representor"`
	PortID      string `json:"portID,omitempty"` // of a VF
}

type options struct {
	root, name, host, xpu string
	card                  simulate.Card
	cards                 int
	gb300                 bool
	uplink                simulate.Uplink
	uplinkAddress         string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "simhost:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "simhost",
		Short: "Simulate the SmartNICs of one host",
		Long: `simhost shows a sysfs tree with the PFs and VFs of SmartNICs below ROOT/sys, makes their netdevs
in the host's network namespace and the representors in the xPU's. It prints one line of JSON when
all is there, follows what happens to the netdevs, makes and removes VFs when
ROOT/sys/bus/pci/devices/<PF>/sriov_numvfs is written, and removes everything when it ends.
A PF has a link while its representor, pf0hpf for the first one, is up.`,
		Example: `  simhost --root /tmp/node1 --host-netns /proc/4711/ns/net --pfs 2 --vfs 8
  echo 0 > /tmp/node1/sys/bus/pci/devices/0000:3b:00.0/sriov_numvfs`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return run(cmd.Context(), o, cmd.OutOrStdout())
		},
	}

	flags := cmd.Flags()
	flags.StringVar(&o.root, "root", "", "directory for the tree (required)")
	flags.StringVar(&o.name, "name", "",
		"name of the host, from which MAC addresses are derived; the root by default")
	flags.StringVar(&o.host, "host-netns", "/proc/self/ns/net",
		"path of the host's network namespace")
	flags.StringVar(&o.xpu, "xpu-netns", "", "path of the xPU's network namespace, made if it is "+
		"missing; one without a path by default")
	flags.IntVar(&o.cards, "cards", 1, "number of cards")
	flags.BoolVar(&o.gb300, "gb300", false, "four ConnectX-8 with Data Direct and a GPU behind each, "+
		"as in a compute tray of GB300, reconstructed from documents; of the flags for cards only "+
		"--vfs counts")
	flags.StringVar(&o.card.Bus, "bus", "3b", "PCI bus of the first card, two hex digits")
	flags.IntVar(&o.card.PFs, "pfs", 2, "PFs of each card")
	flags.IntVar(&o.card.VFs, "vfs", 8, "VFs of each PF")
	flags.IntVar(&o.card.TotalVFs, "total-vfs",
		0, "VFs that each PF can have; --vfs, but at least 8, by default")
	flags.IntVar(&o.card.NUMANode, "numa-node", 0, "NUMA node of the cards, -1 for none")
	flags.StringVar(&o.card.Serial, "serial",
		"", "serial number in the card's Vital Product Data; none by default")
	flags.IntVar(&o.card.Controller, "controller", 0,
		"number by which the xPU knows the host, as in c1pf0vf3; 0 for none")
	flags.StringVar(&o.uplink.NetNS, "uplink-netns",
		"", "path of the network namespace with the bridge that the xPU is connected to")
	flags.StringVar(&o.uplink.Bridge, "uplink-bridge",
		"", "name of that bridge, made if it is missing")
	flags.StringVar(&o.uplink.Name, "uplink-name", "p0",
		"name of the uplink in the xPU's network namespace")
	flags.StringVar(&o.uplinkAddress, "uplink-address",
		"", "address of the uplink with prefix length")
	_ = cmd.MarkFlagRequired("root")
	cmd.MarkFlagsRequiredTogether("uplink-netns", "uplink-bridge")

	return cmd
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	config := simulate.Config{
		Root: o.root, Name: o.name, HostNS: o.host,
		Log: logr.FromSlogHandler(slog.NewTextHandler(os.Stderr, nil)),
	}
	if config.Cards, err = simulate.Repeat(o.card, o.cards); err != nil {
		return err
	}
	if o.gb300 {
		config.Cards = simulate.GB300(o.card.VFs)
	}

	if o.uplink.NetNS != "" {
		if o.uplinkAddress != "" {
			if o.uplink.Address, err = netip.ParsePrefix(o.uplinkAddress); err != nil {
				return fmt.Errorf("--uplink-address: %w", err)
			}
		}
		config.Uplink = &o.uplink
	}

	xpu, err := openXPU(o.xpu)
	if err != nil {
		return fmt.Errorf("network namespace of the xPU: %w", err)
	}
	defer func() { err = errors.Join(err, xpu.close()) }()

	config.XPUNS = xpu.path
	h, err := simulate.New(ctx, config)
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, h.Close())
		_ = os.Remove(o.root) // fails while anything else is in it
	}()

	if err := json.NewEncoder(out).Encode(readiness(h, xpu.path)); err != nil {
		return err
	}

	<-ctx.Done()
	return nil
}

func readiness(h *simulate.Host, xpu string) ready {
	r := ready{XPUNetNS: xpu, SysRoot: h.SysRoot()}
	for _, f := range h.Functions() {
		line := function{Address: string(f.Address), Netdev: f.Netdev, Representor: f.Representor}
		if f.Index >= 0 {
			line.PortID = f.PortID()
		}
		r.Functions = append(r.Functions, line)
	}

	return r
}
