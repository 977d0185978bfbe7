// SPDX-License-Identifier: Apache-2.0

// Command demo shows the life of a few pods on a real cluster. See the project's README.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/test/e2e/story"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "\ndemo:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	world := &story.World{
		Cluster: story.Devcluster{Name: "demo"},
		Detail:  func(format string, args ...any) { fmt.Printf("        "+format+"\n", args...) },
	}

	var keep bool
	var acts int
	cmd := &cobra.Command{
		Use:           "demo",
		Short:         "Tell the story of a few pods whose network functions come from SmartNICs",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(*cobra.Command, []string) (err error) {
			if all := len(world.Acts()); acts < 1 || acts > all {
				return fmt.Errorf("--acts: %d must be 1 to %d", acts, all)
			}

			for _, path := range []*string{&world.Source, &world.Bin, &world.Cluster.Program} {
				if *path, err = filepath.Abs(*path); err != nil {
					return err
				}
			}

			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return tell(cmd.Context(), world, acts, keep)
		},
	}

	flags := cmd.PersistentFlags()
	flags.StringVar(&world.Source, "source", ".", "root of the project")
	flags.StringVar(&world.Bin, "bin", "bin", "directory of the built programs and images")
	flags.StringVar(&world.Cluster.Program, "devcluster", "bin/devcluster",
		"the devcluster program")
	flags.StringVar(&world.Cluster.Kubernetes, "kubernetes", "",
		"an older Kubernetes, such as 1.34")
	flags.StringVar(&world.Cluster.Runtime, "runtime",
		"", "containerd-2 or cri-o, in place of containerd 1.7")
	flags.StringVar(&world.Cluster.Multus, "multus-version", "", "an older Multus, such as 4.2")
	flags.StringVar(&world.StateDir, "state", "/var/lib/xpu-device-plugin/demo",
		"directory for logs")
	cmd.Flags().BoolVar(&keep, "keep", false, "leave everything up at the end")
	cmd.Flags().IntVar(&acts, "acts", len(world.Acts()), "how many acts to tell; the last one is "+
		"direct mode, which takes the custom resources away")

	cmd.AddCommand(&cobra.Command{
		Use:   "down",
		Short: "End what an earlier demo left up",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return world.End(cmd.Context()) },
	})

	several := &cobra.Command{
		Use: "multicluster",
		Short: "Tell the story of several clusters: hosts in those of tenants, their xPUs in " +
			"that of infra",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return tellFederation(cmd.Context(), story.NewFederation(*world))
		},
	}

	var out string
	dashboard := &cobra.Command{
		Use: "dashboard",
		Short: "Let pods come and go for some minutes beside Prometheus, and write what the " +
			"dashboard shows",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if err := world.End(cmd.Context()); err != nil {
				return fmt.Errorf("what an earlier demo left: %w", err)
			}
			defer func() {
				err = errors.Join(err, world.End(context.WithoutCancel(cmd.Context())))
			}()
			return run(cmd.Context(), world.DashboardSteps(out), 0)
		},
	}

	dashboard.Flags().StringVar(&out, "out", "dashboard.json",
		"file for the panels with their series")
	cmd.AddCommand(several, dashboard)

	return cmd
}

// tellFederation runs the story of several clusters.
func tellFederation(ctx context.Context, federation *story.Federation) (err error) {
	if err := federation.End(ctx); err != nil {
		return fmt.Errorf("what an earlier demo left: %w", err)
	}

	defer func() {
		if endErr := federation.End(context.WithoutCancel(ctx)); err == nil {
			err = endErr
		}
	}()

	begin := time.Now()
	if err := run(ctx, federation.Steps(), 0); err != nil {
		return err
	}

	fmt.Printf("\nThe story holds: %.1fs\n", time.Since(begin).Seconds())
	return nil
}

// run runs steps and prints them with numbers after the given one.
func run(ctx context.Context, steps []story.Step, number int) error {
	for _, step := range steps {
		number++
		begin := time.Now()
		fmt.Printf("%d. %s\n", number, step.Title)
		if err := step.Run(ctx); err != nil {
			return fmt.Errorf("step %d does not hold: %w", number, err)
		}
		fmt.Printf("   %6.2fs\n", time.Since(begin).Seconds())
	}
	return nil
}

func tell(ctx context.Context, world *story.World, acts int, keep bool) (err error) {
	if err := world.End(ctx); err != nil {
		return fmt.Errorf("what an earlier demo left: %w", err)
	}

	defer func() {
		if keep {
			fmt.Print(usage(world.Cluster))
			return
		}
		// An interrupted story is cleaned up too.
		if endErr := world.End(context.WithoutCancel(ctx)); err == nil {
			err = endErr
		}
	}()

	begin, number := time.Now(), 0
	for n, act := range world.Acts()[:acts] {
		fmt.Printf("\nAct %d. %s\n\n", n+1, act.Title)
		if err := run(ctx, act.Steps, number); err != nil {
			return err
		}
		number += len(act.Steps)
	}

	fmt.Printf("\nThe story holds: %.1fs\n", time.Since(begin).Seconds())
	return nil
}

func usage(cluster story.Devcluster) string {
	kubeconfig, err := cluster.Run(context.Background(), "kubeconfig")
	if err != nil {
		return "\n" + err.Error() + "\n"
	}

	return fmt.Sprintf(`
The cluster is still up. To use it:
  export KUBECONFIG=%[3]s
  alias kubectl='%[1]s kubectl --name %[2]s --'   # where there is no kubectl
  alias on='%[1]s exec --name %[2]s'
  kubectl get nodes,resourceslices,net-attach-def
  on node1 -- ip link
  make demo-down
`, cluster.Program, cluster.Name, strings.TrimSpace(kubeconfig))
}
