// SPDX-License-Identifier: Apache-2.0

// Command bench measures the project's performance goals, each beside a reference from the same
// run, and prints a table. docs/reference/benchmarks.md explains the rows.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
)

// bench is shared by the benchmarks.
type bench struct {
	source, bin, assets string
	quick               bool
	slow                bool // on an emulated machine: fewer runs

	// dir holds all written files and is removed at the end. runDir below it is in memory, like
	// /run.
	dir, runDir string

	cluster *cluster
}

// runs returns how often something is measured.
func (b *bench) runs(n int) int {
	switch {
	case b.quick:
		return 1
	case b.slow:
		return max(3, n/5)
	}
	return n
}

// warmUp returns the number of rounds before the counted ones.
func (b *bench) warmUp() int {
	if b.quick {
		return 0
	}
	return 1
}

// benchmark measures some rows of the table.
type benchmark struct {
	name string
	run  func(context.Context, *bench) ([]Measurement, error)
}

func benchmarks() []benchmark {
	return []benchmark{
		{"publish", measurePublish},
		{"restart", measureRestart},
		{"prepare", measurePrepare},
		{"attach", measureAttach},
		{"port", measurePort},
		{"bridge", measureBridge},
		{"memory", measureControllerMemory},
		{"failover", measureFailover},
		{"plugin", measurePlugins},
		{"vf", measureVF},
		{"allocate", measureAllocate},
		{"shim", measureShim},
		{"provision", measureProvision},
		{"size", measureSizes},
		{"writes", measureWrites},
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	b := &bench{}
	var only string
	var isolated, scale, schedule bool
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure what the project promises",
		Long: `bench runs the built programs in a network namespace of their own and prints one table: what,
the median of several runs with minimum and maximum, a reference measured in the same run with the ratio
to it, and the goal. A goal that is missed is no error: machines differ.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !isolated {
				return isolate(cmd.Context())
			}

			all := benchmarks()
			if scale {
				all = scaleBenchmarks()
			}

			if schedule {
				all = scheduleBenchmarks()
			}

			selected, err := selectBenchmarks(all, only)
			if err != nil {
				return err
			}

			return b.run(cmd.Context(), selected)
		},
	}

	flags := cmd.Flags()
	flags.StringVar(&b.source, "source", ".", "root of the project")
	flags.StringVar(&b.bin, "bin", "bin", "directory of the built programs and images")
	flags.StringVar(&b.assets, "assets", "bin/kubernetes", "directory of etcd and kube-apiserver")
	flags.BoolVar(&b.quick, "quick", false,
		"measure everything once, small: shows that it runs, not how fast")

	flags.StringVar(&only, "only", "", "regular expression: run only the benchmarks whose name "+
		"matches ("+strings.Join(names(benchmarks()), ", ")+
		"; with --scale "+strings.Join(names(scaleBenchmarks()), ", ")+"; with --schedule "+
		strings.Join(names(scheduleBenchmarks()), ", ")+")")

	flags.BoolVar(&scale, "scale", false,
		"measure what the control plane costs as clusters grow; takes an hour")
	flags.BoolVar(&schedule, "schedule", false,
		"measure xpuctl schedule; takes a quarter of an hour")
	flags.BoolVar(&isolated, "isolated", false, "")
	_ = flags.MarkHidden("isolated")

	return cmd
}

func names(all []benchmark) (out []string) {
	for _, m := range all {
		out = append(out, m.name)
	}
	return out
}

func selectBenchmarks(all []benchmark, only string) (out []benchmark, err error) {
	pattern, err := regexp.Compile(only)
	if err != nil {
		return nil, fmt.Errorf("--only: %w", err)
	}

	for _, m := range all {
		if pattern.MatchString(m.name) {
			out = append(out, m)
		}
	}

	if len(out) == 0 {
		return nil, fmt.Errorf("--only %q: matches none of %s",
			only, strings.Join(names(all), ", "))
	}

	return out, nil
}

// isolate runs the program again in a new network namespace, so that loopback, ports and netdevs
// are separate.
func isolate(ctx context.Context) error {
	if os.Geteuid() != 0 {
		return errors.New("needs root, to make network namespaces")
	}

	// The child is killed when the thread that started it ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	cmd := exec.CommandContext(ctx, "/proc/self/exe", append(os.Args[1:], "--isolated")...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGTERM,
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = time.Minute
	if err := cmd.Run(); err != nil {
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			os.Exit(1) // the child has printed the error
		}
		return err
	}

	return nil
}

// unmount removes a mount that may not exist.
func unmount(path string) error {
	err := unix.Unmount(path, unix.MNT_DETACH)
	if err == nil || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return fmt.Errorf("unmount %s: %w", path, err)
}

func (b *bench) run(ctx context.Context, selected []benchmark) (err error) {
	for _, path := range []*string{&b.source, &b.bin, &b.assets} {
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}

	ctrllog.SetLogger(logr.Discard()) // logs of the clients of API server and story
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	if b.dir, err = os.MkdirTemp("", "xpu-bench-"); err != nil {
		return err
	}

	defer func() {
		if b.cluster != nil {
			err = errors.Join(err, b.cluster.stop())
		}
		err = errors.Join(err, unmount(b.runDir), os.RemoveAll(b.dir))
	}()

	b.runDir = filepath.Join(b.dir, "run")
	if err := errors.Join(os.Mkdir(b.runDir, 0o755),
		unix.Mount("bench", b.runDir, "tmpfs", 0, "")); err != nil {
		return fmt.Errorf("mount %s: %w", b.runDir, err)
	}

	var measurements []Measurement
	for _, m := range selected {
		begin := time.Now()
		some, err := m.run(ctx, b)
		if err != nil { // print the measurements so far
			return errors.Join(fmt.Errorf("%s: %w", m.name, err),
				printTable(os.Stdout, measurements))
		}
		fmt.Fprintf(os.Stderr, "%-9s %5.1f s\n", m.name, time.Since(begin).Seconds())
		measurements = append(measurements, some...)
	}

	return printTable(os.Stdout, measurements)
}
