// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/pkg/inspect"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate/pciids"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate/view"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// discoverOptions are the options of xpuctl discover.
type discoverOptions struct {
	cluster                    *clusterFlags
	node, agents, root, socket string
	output                     string
	verify                     bool
}

// discoverForms are its output formats, and verifyForms the formats with --verify.
var (
	discoverForms = []string{"text", "wide", "json", "yaml", "svg", "html"}
	verifyForms   = []string{"text", "json", "yaml"}
)

func discoverCommand() *cobra.Command {
	o := &discoverOptions{cluster: &clusterFlags{}}
	c := &cobra.Command{
		Use:   "discover [--node NAME]",
		Short: "Show the network cards of a host, their PFs, VFs and SFs, and who has them",
		Long: `Shows cards, PFs, VFs and SFs with driver, netdev, NUMA node and PCIe root, the DevicePools that have them, the pods that
have them, and what keeps them from pods. Cards have their names if the PCI ID database is installed where xpuctl runs, which
Debian has as package pci.ids and Fedora as hwdata.

With --node, the agent of that node of the cluster is asked, by a program in its pod; that needs the right to create
pods/exec in the namespace of xpu-agent. Without, it is this host: its agent is asked if one runs, which only root may do, and
otherwise the kernel, which knows nothing of pools and pods.

With --verify, the PFs, VFs and SFs are compared with what sriovnet says of them, a library that reads the same kernel by other
code, and the comparison is shown instead. A difference means that one of the two misreads the card: please report it. What
one of them cannot say is unknown, which is no difference. It changes nothing, and takes up to some seconds.

Exit codes: 0 for success; with --verify 1 if there is a difference, and 2 if nothing could be compared.`,
		Example: `  # This host:
  sudo xpuctl discover

  # A node of the cluster, every VF in a line of its own:
  xpuctl discover --node node1 -o wide

  # A picture for a ticket:
  xpuctl discover --node node1 -o svg > node1.svg
  xpuctl discover --node node1 -o html > node1.html

  # Whether another reader of the kernel says the same of the cards:
  sudo xpuctl discover --verify
  xpuctl discover --node node1 --verify -o json

  # A host whose file system is mounted elsewhere:
  xpuctl discover --root /host`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return o.run(c) },
	}

	f := c.Flags()
	o.cluster.addTo(f)
	f.StringVar(&o.node, "node", "", "node of the cluster; this host if empty")
	f.StringVar(&o.root, "root",
		"/", "where the host's file system is; what is elsewhere than / has no agent to ask")
	f.StringVar(&o.socket, "socket", nodestate.DefaultSocket,
		"where the agent of this host listens")
	f.BoolVar(&o.verify, "verify", false,
		"compare the Functions with what sriovnet says of them, and show the differences; with "+
			"-o text, json or yaml")
	addAgentsFlag(f, &o.agents)
	addOutputFlag(c, &o.output, discoverForms...)

	return c
}

func (o *discoverOptions) run(c *cobra.Command) error {
	if o.verify {
		return o.runVerify(c)
	}
	if err := checkOutput(o.output, discoverForms...); err != nil {
		return err
	}

	state, err := o.state(c.Context())
	if err != nil {
		return err
	}
	pciids.AddNames(state, o.root)
	return printState(c.OutOrStdout(), o.output, state)
}

// state returns the node's state from the best source: a remote agent, the local agent, or the
// kernel.
func (o *discoverOptions) state(ctx context.Context) (*nodestate.State, error) {
	if o.node != "" {
		agents, err := newAgents(ctx, o.cluster, o.agents)
		if err != nil {
			return nil, err
		}
		return agents.State(ctx, o.node)
	}

	if filepath.Clean(o.root) == "/" {
		client := nodestate.Client{Socket: o.socket}
		if client.Runs() {
			return client.State(ctx)
		}
	}

	return kernelState(ctx, o.root)
}

func printState(to io.Writer, form string, state *nodestate.State) error {
	switch form {
	case "svg":
		return view.SVG(terminal.Raw(to), state)
	case "html":
		return view.HTML(terminal.Raw(to), state)
	case "json", "yaml":
		return printValue(to, form, state)
	}

	paint := terminal.NewPainter(to)
	return view.Tree(to, state,
		view.TreeOptions{All: form == "wide", Paint: func(condition, text string) string {
			return paint(tones[condition], text)
		}})
}

// tones maps conditions of Functions to colours.
var tones = map[string]terminal.Tone{
	"free": terminal.Good, "used": terminal.Strong,
	"releasing": terminal.Faint, "troubled": terminal.Bad,
}

// newAgents reaches the agents of the cluster that the flags mean.
func newAgents(
	ctx context.Context, cluster *clusterFlags, namespace string,
) (inspect.Agents, error) {
	config, err := cluster.restConfig()
	if err != nil {
		return inspect.Agents{}, err
	}

	reader, err := cluster.client(ctx)
	if err != nil {
		return inspect.Agents{}, fmt.Errorf("cluster: %w", err)
	}
	return inspect.Agents{Config: config, Reader: reader, Namespace: namespace}, nil
}
