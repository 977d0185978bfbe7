// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// addSocketFlag adds the flag for the socket at which the agent serves administrators.
func addSocketFlag(flags *pflag.FlagSet, client *nodestate.Client) {
	flags.StringVar(&client.Socket, "socket", nodestate.DefaultSocket,
		filepath.Base(nodestate.DefaultSocket)+" in the directory of --state-dir of the agent")
}

// stateCommand returns the command that "xpuctl" executes in the agents' pods. Their image has no
// other program.
func stateCommand() *cobra.Command {
	var client nodestate.Client
	var verify bool
	cmd := &cobra.Command{
		Use:   "state",
		Short: "Print what the agent that runs here knows of its node, in JSON",
		Long: `Asks the agent that runs on this machine for its Functions, who has them, and the post-delete hooks that were given up,
and prints its answer in JSON. "xpuctl discover --node" and others show it to people.`,
		Example: `  kubectl -n xpu-system exec ds/xpu-agent -- /xpu-agent state
  kubectl -n xpu-system exec ds/xpu-agent -- /xpu-agent state --verify`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ask := client.State
			if verify {
				ask = client.Verify
			}
			state, err := ask(cmd.Context())
			if err != nil {
				return err
			}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(state)
		},
	}

	addSocketFlag(cmd.Flags(), &client)
	cmd.Flags().BoolVar(&verify, "verify", false,
		"have the Functions compared with what sriovnet says first, which takes up to some seconds")
	return cmd
}

// readyCommand returns the readiness probe. It uses a socket, because two agents share a node's
// port while one replaces the other.
func readyCommand() *cobra.Command {
	var client nodestate.Client
	cmd := &cobra.Command{
		Use:   "ready",
		Short: "Tell whether the agent of this pod is ready",
		Long: `Asks the agent that serves --ready-socket whether it is ready, and prints why it is not. An agent is ready when the kubelet knows
what it offers and the container runtime is connected; one that has handed the node over to another agent stays ready until it is
ended.`,
		Example: `  kubectl -n xpu-system exec ds/xpu-agent -- /xpu-agent ready --socket=/run/xpu-agent-pod/ready.sock`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), 5*time.Second)
			defer cancel()
			return client.Ready(ctx)
		},
	}

	cmd.Flags().StringVar(&client.Socket, "socket", "", "the agent's --ready-socket")
	_ = cmd.MarkFlagRequired("socket")

	return cmd
}

func releaseCommand() *cobra.Command {
	var client nodestate.Client
	var wanted nodestate.Release
	cmd := &cobra.Command{
		Use:   "release FUNCTION [--hook=NAME | --as-it-is]",
		Short: "Free a Function of this machine that is quarantined or waits for a post-delete hook",
		Long: `Has the agent that runs on this machine try a quarantined Function again, or let it go as it is with --as-it-is. With --hook, the
post-delete hook that keeps a Function from being free is given up: it becomes a dead letter, and the hooks after it run.
"xpuctl release" does the same from afar.`,
		Example: `  xpu-agent release 0000:3b:02.1
  xpu-agent release 0000:3b:02.1 --as-it-is
  xpu-agent release 0000:3b:02.1 --hook=10-notify`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if wanted.Function, err = function.ParseID(args[0]); err != nil {
				return err
			}

			outcome, err := client.Release(cmd.Context(), wanted)
			if err != nil {
				return err
			}

			fmt.Fprintln(cmd.OutOrStdout(), outcome)
			return nil
		},
	}

	addSocketFlag(cmd.Flags(), &client)
	cmd.Flags().StringVar(&wanted.Hook, "hook", "",
		"name of the hook, which must be the one that the Function waits for")
	cmd.Flags().BoolVar(&wanted.PortGone, "port-gone", false,
		"affirm that the xPU serves no Port of the Function any more, so that the hook "+
			nodestate.PortHook+" may be given up")
	cmd.Flags().BoolVar(&wanted.AsItIs, "as-it-is", false,
		"let the quarantined Function go without another try: its next owner gets it as it is")
	cmd.MarkFlagsMutuallyExclusive("hook", "as-it-is")

	return cmd
}
