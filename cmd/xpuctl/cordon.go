// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
	"unicode"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/pkg/cordon"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// cordonOptions are the options of xpuctl cordon and uncordon.
type cordonOptions struct {
	cluster  *clusterFlags
	cordoned bool
	reason   string
	dryRun   bool
}

// longestReason is the bound of spec.cordons[].reason in an XPUNode, in bytes.
const longestReason = 256

func cordonCommand() *cobra.Command {
	o := &cordonOptions{cluster: &clusterFlags{}, cordoned: true}
	c := o.command("cordon", "Keep new pods away from the Functions of a card, node, PF or XPU",
		`Keeps new pods away from Functions, as kubectl cordon keeps them away from a node: their devices get the taint
xpu.opiproject.org/cordoned, and extended resources count them as unhealthy. Pods that have such a Function keep it; but the kubelet
refuses those with extended resources if their node restarts meanwhile. They are listed, but for those with an extended resource
without a network, which only the agents know.

NAME is the serial number of a card, the name of a node or of an XPU, or a node and the PCI address or netdev of a PF. The
cordons are in spec.cordons of the XPUNodes, so that agents and nodes that restart keep them.

Exit codes: 0 if all is done, 2 for failures, also if it is not known who has the Functions.`,
		`  # Before new firmware: which pods are left?
  xpuctl cordon xpu card-a --reason "new firmware"

  xpuctl cordon card MT2251X00001
  xpuctl cordon pf node1/0000:3b:00.0 --dry-run
  xpuctl uncordon xpu card-a`)
	c.Flags().StringVar(&o.reason, "reason", "", "what others read about it, at most 256 bytes")
	return c
}

func uncordonCommand() *cobra.Command {
	o := &cordonOptions{cluster: &clusterFlags{}}
	return o.command("uncordon", "Take back what xpuctl cordon did",
		`Gives the Functions of a card, node, PF or XPU to new pods again. NAME is as for xpuctl cordon.

Exit codes: 0 if all is done, 2 for failures.`,
		`  xpuctl uncordon xpu card-a
  xpuctl uncordon node node1`)
}

func (o *cordonOptions) command(name, short, long, example string) *cobra.Command {
	c := &cobra.Command{
		Use: name + " (card|node|pf|xpu) NAME", Short: short, Long: long, Example: example,
		Args: cobra.ExactArgs(2), ValidArgsFunction: cordonNames,
		RunE: func(c *cobra.Command, args []string) error {
			return o.run(c, cordon.Kind(args[0]), args[1])
		},
	}

	o.cluster.addTo(c.Flags())
	c.Flags().BoolVar(&o.dryRun, "dry-run", false, "only say which PFs are meant, and who has them")
	return c
}

func (o *cordonOptions) run(c *cobra.Command, kind cordon.Kind, name string) error {
	if len(o.reason) > longestReason || strings.ContainsFunc(o.reason, unicode.IsControl) {
		return fmt.Errorf("--reason: must be one line of at most %d bytes", longestReason)
	}

	api, err := o.cluster.client(c.Context())
	if err != nil {
		return err
	}
	targets, err := cordon.Resolve(c.Context(), api, kind, name)
	if err != nil {
		return err
	}

	var changed []cordon.Target
	if !o.dryRun {
		if changed, err = cordon.Set(c.Context(), api, targets, o.cordoned, o.reason); err != nil {
			for _, target := range changed {
				terminal.Line(c.OutOrStdout(), "%s is done", target)
			}
			return err
		}
	}

	return o.print(c, api, targets, changed)
}

// print says what was done with each PF, and who has its Functions. It returns an error if that is not
// known.
func (o *cordonOptions) print(
	c *cobra.Command, api client.Reader, targets, changed []cordon.Target,
) error {
	var users []cordon.User
	var unknown error
	if o.cordoned {
		var err error
		if users, err = cordon.Users(c.Context(), api, targets); err != nil {
			unknown = fmt.Errorf("which pods have their Functions is not known: %w", err)
		}
	}

	done, already := "uncordoned", "was not cordoned"
	if o.cordoned {
		done, already = "cordoned", "was cordoned already"
	}
	for _, target := range targets {
		switch {
		case o.dryRun:
			terminal.Line(c.OutOrStdout(), "%s would be %s", target, done)
		case slices.Contains(changed, target):
			terminal.Line(c.OutOrStdout(), "%s %s", target, done)
		default:
			terminal.Line(c.OutOrStdout(), "%s %s", target, already)
		}
		for _, user := range users {
			if user.Target == target {
				terminal.Line(c.OutOrStdout(), "  in use: %s", user)
			}
		}
	}

	return unknown
}
