// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"os"

	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/control"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/lifecycle"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/node"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/preflight"
	"github.com/opiproject/xpu-device-plugin/test/devcluster/state"
)

func upCommand(o *options) *cobra.Command {
	var cluster lifecycle.Options
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start a cluster and wait until its nodes are Ready",
		Long: `Up starts a cluster in namespaces of its own and returns when all nodes are Ready. What is not built yet is
built first. If the start fails, the reason is printed and everything is taken down again.`,
		Example: `  devcluster up
  devcluster up --name infra --nodes 3
  devcluster up --multus --kube-proxy`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			manager, err := o.manager()
			if err != nil {
				return err
			}
			if err := preflight.Run(manager.Store.Root, cluster.KubeProxy); err != nil {
				return err
			}

			set, err := build(cmd.Context(), o)
			if err != nil {
				return err
			}

			return manager.Up(cmd.Context(), o.name, cluster, set)
		},
	}

	cmd.Flags().IntVar(&cluster.Nodes, "nodes", 1, "number of nodes, named node1, node2, ...")
	cmd.Flags().BoolVar(&cluster.Multus, "multus", false,
		"give pods the networks that their annotations name, by Multus")
	cmd.Flags().BoolVar(&cluster.KubeProxy, "kube-proxy", false,
		"have the addresses of Services lead to pods, by kube-proxy (needs nft)")

	return o.versionFlags(o.nameFlag(cmd))
}

func downCommand(o *options) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "down",
		Short: "End a cluster and remove all that is left of it",
		Example: `  devcluster down
  devcluster down --all`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			manager, err := o.manager()
			if err != nil {
				return err
			}

			names := []string{o.name}
			if all {
				if names, err = manager.Store.Names(); err != nil {
					return err
				}
			}

			var failed []error
			for _, name := range names {
				failed = append(failed, manager.Down(cmd.Context(), name))
			}

			return errors.Join(failed...)
		},
	}

	cmd.Flags().BoolVar(&all, "all", false, "all clusters")
	o.nameFlag(cmd)
	cmd.MarkFlagsMutuallyExclusive("all", "name")

	return cmd
}

// runClusterCommand runs PID 1 of a cluster; up starts it.
func runClusterCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "run-cluster DIR",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return lifecycle.RunCluster(cmd.Context(), state.Dir(args[0]))
		},
	}
}

// runNodeCommand runs PID 1 of a node; the cluster's supervisor starts it.
func runNodeCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "run-node DIR",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if err := os.Setenv("PATH", node.Path()); err != nil {
				return err
			}
			// A node is never shut down orderly, only killed, like by a power failure.
			return node.Run(context.Background(), state.NodeDir(args[0]),
				control.NewReporter(os.NewFile(node.EventsFD, "events")))
		},
	}
}
