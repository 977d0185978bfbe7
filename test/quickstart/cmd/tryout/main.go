// SPDX-License-Identifier: Apache-2.0

// Command tryout is what the pods of scripts/quickstart run.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/net/icmp"

	"github.com/opiproject/xpu-device-plugin/test/ping"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "tryout:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	cmd := &cobra.Command{
		Use:           "tryout",
		Short:         "What the pods of scripts/quickstart run",
		SilenceUsage:  true,
		SilenceErrors: true,
	}

	cmd.AddCommand(&cobra.Command{
		Use:   "wait",
		Short: "Wait until the pod ends",
		Args:  cobra.NoArgs,
		Run:   func(cmd *cobra.Command, _ []string) { <-cmd.Context().Done() },
	}, &cobra.Command{
		Use:   "remove PATH...",
		Short: "Remove files and directories with all that is in them; those that are missing are fine",
		Args:  cobra.MinimumNArgs(1),
		RunE:  func(_ *cobra.Command, paths []string) error { return remove(paths) },
	}, &cobra.Command{
		Use:   "present PATH...",
		Short: "Print which of the paths are there, one a line",
		Args:  cobra.MinimumNArgs(1),
		RunE:  func(cmd *cobra.Command, paths []string) error { return present(cmd.OutOrStdout(), paths) },
	}, pingCommand())

	return cmd
}

func pingCommand() *cobra.Command {
	var within time.Duration
	cmd := &cobra.Command{
		Use:   "ping ADDRESS",
		Short: "Say whether an IPv4 address answers, and exit with 1 if it does not",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			to, err := netip.ParseAddr(args[0])
			if err != nil || !to.Is4() {
				return fmt.Errorf("address %q: must be an IPv4 address", args[0])
			}
			return send(to, within)
		},
	}

	cmd.Flags().DurationVar(&within, "within", 10*time.Second, "how long to try")
	return cmd
}

func send(to netip.Addr, within time.Duration) error {
	conn, err := icmp.ListenPacket("ip4:icmp", "0.0.0.0")
	if err != nil {
		return err
	}
	defer conn.Close()

	begin := time.Now()
	answered, err := ping.Send(conn, to, within)
	if err != nil {
		return err
	}
	if !answered {
		return fmt.Errorf("no answer from %s within %s", to, within)
	}

	fmt.Printf("%s answers after %s\n", to, time.Since(begin).Round(time.Millisecond))
	return nil
}

// present prints which paths are there. It fails if it cannot find out of one.
func present(out io.Writer, paths []string) error {
	for _, path := range paths {
		_, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		fmt.Fprintln(out, path)
	}
	return nil
}

func remove(paths []string) error {
	var errs []error
	for _, path := range paths {
		errs = append(errs, os.RemoveAll(path))
	}
	return errors.Join(errs...)
}
