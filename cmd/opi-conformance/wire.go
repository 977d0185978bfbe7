// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
	"github.com/opiproject/xpu-device-plugin/pkg/conformance/netdevwire"
)

// wireCommand returns the command that passes frames between a netdev and its own input and output.
func wireCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "wire NETDEV",
		Short: "Pass frames between a netdev and standard input and output, for --wire",
		Long: `wire sends each line of its input as an Ethernet frame from a netdev of this machine, and prints each frame that
arrives there, in hexadecimal digits. It prints "ready" first, and ends with its input. The command of --wire may run
it, on this machine or by ssh on the machine that has the functions. It needs CAP_NET_RAW.`,
		Example: `  # In a command for --wire, where the function of the port is ens1f0v3 of the machine host.
  exec ssh host opi-conformance wire ens1f0v3`,
		Args: cobra.ExactArgs(1), SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			wire, err := netdevwire.Open(args[0])
			if err != nil {
				return err
			}
			return errors.Join(pass(cmd.Context(), wire, cmd.InOrStdin(), cmd.OutOrStdout()),
				wire.Close())
		},
	}
}

// pass passes frames until the input ends.
func pass(ctx context.Context, wire conformance.Wire, in io.Reader, out io.Writer) error {
	if _, err := fmt.Fprintln(out, conformance.Ready); err != nil {
		return err
	}

	ended := make(chan error, 1)
	go func() { ended <- sendLines(wire, in) }()
	for {
		select {
		case frame := <-wire.Frames():
			if _, err := fmt.Fprintln(out, hex.EncodeToString(frame)); err != nil {
				return err
			}
		case err := <-ended:
			return err
		case <-ctx.Done():
			return nil
		}
	}
}

// sendLines sends the frames of an input.
func sendLines(wire conformance.Wire, in io.Reader) error {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		frame, err := hex.DecodeString(lines.Text())
		if err != nil {
			return fmt.Errorf("input: %w", err)
		}
		if err := wire.Send(frame); err != nil {
			return fmt.Errorf("send: %w", err)
		}
	}
	return lines.Err()
}
