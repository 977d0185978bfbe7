// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/printers"

	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
	"github.com/opiproject/xpu-device-plugin/pkg/uninstall"
)

func uninstallCommand() *cobra.Command {
	cluster := &clusterFlags{}
	o := uninstall.Options{}
	var dryRun, yes bool
	c := &cobra.Command{
		Use:   "uninstall",
		Short: "Delete what was declared to xpu-device-plugin, before its programs go",
		Long: `Deletes the XPUTenants, DevicePools, XPUPorts, XPUNetworks and XPUs of the cluster, each kind when the one before it is gone, and
the Services by which xpu-controller makes XPUs. xpu-controller must still run: it has the OPI agents let go of the ports and
networks, and takes the finalizers away. The programs and the CRDs stay, for helm or kubectl to delete.

Nothing is deleted while pods have Functions: they need the agents of their nodes to end.

With --dry-run it prints what it would delete, and which pods keep it from that, and changes nothing. On
a terminal it prints the same and asks before it deletes, unless there is --yes.

Exit codes: 0 if everything is gone, 1 if pods have Functions, if objects have not gone in time, or if no xpu-controller is
ready, 2 for failures. It may be run again at any time.`,
		Example: `  xpuctl uninstall --dry-run
  xpuctl uninstall
  helm uninstall xpu --namespace xpu-system

  # The card of an xPU is dead, or xpu-controller cannot be started again. OPI agents are not asked:
  xpuctl uninstall --force`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if o.Timeout < 0 {
				return fmt.Errorf("--timeout %s: must be 0s or longer", o.Timeout)
			}
			o.Namespace = cluster.overrides.Context.Namespace
			o.Report = func(sentence string) { terminal.Line(c.OutOrStdout(), "%s", sentence) }
			asks := !dryRun && !yes && isTerminal(c.InOrStdin())
			return runUninstall(c, cluster, o, dryRun, asks)
		},
	}

	cluster.addTo(c.Flags())
	cluster.addNamespaceTo(c.Flags(), "xpu-system")
	c.Flags().Lookup("namespace").Usage = "namespace of xpu-controller"
	c.Flags().DurationVar(&o.Timeout, "timeout", 2*time.Minute,
		"how long to wait for objects to go")
	c.Flags().BoolVar(&dryRun, "dry-run", false,
		"print what would be deleted, and what keeps it from that; change nothing")
	c.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask on a terminal")
	c.Flags().BoolVar(&o.Force, "force", false,
		"take the finalizers away of objects that have not gone by then. Their OPI agents are "+
			"not asked, and may serve their ports on")

	return c
}

func runUninstall(
	c *cobra.Command, cluster *clusterFlags, o uninstall.Options, dryRun, asks bool,
) error {
	api, err := cluster.client(c.Context())
	if err != nil {
		return err
	}

	if asks {
		err = uninstall.DryRun(c.Context(), api, o)
		if err == nil && !confirm(c.Context(), c.InOrStdin(), c.OutOrStdout()) {
			fmt.Fprintln(c.OutOrStdout(), "nothing was deleted")
			return answerNo(c)
		}
	}

	carryOut, done := uninstall.Run, "nothing is left that was declared to xpu-device-plugin"
	if dryRun {
		carryOut, done = uninstall.DryRun, "nothing keeps xpuctl uninstall from it"
	}

	if err == nil {
		err = carryOut(c.Context(), api, o)
	}
	return sayOutcome(c, o, done, err)
}

// sayOutcome says that all is done, or what kept xpuctl uninstall from it.
func sayOutcome(c *cobra.Command, o uninstall.Options, done string, err error) error {
	var remains *uninstall.RemainsError
	var inUse *uninstall.InUseError
	switch {
	case err == nil:
		_, err = fmt.Fprintln(c.OutOrStdout(), done)
		return err
	case errors.As(err, &inUse):
		fmt.Fprintln(c.ErrOrStderr(), "pods have Functions, and need the agents of their nodes "+
			"to end. Delete these first, and what makes them:")
		for _, pod := range inUse.Pods {
			terminal.Line(c.ErrOrStderr(), "  %s", pod)
		}
	case errors.As(err, &remains):
		fmt.Fprintf(c.ErrOrStderr(), "%ss that have not gone in %s. See to what they wait for "+
			"and run this again, or use --force:\n",
			remains.Kind, o.Timeout)
		for _, object := range remains.Objects {
			terminal.Line(c.ErrOrStderr(), "  %s", object)
		}
	case errors.Is(err, uninstall.ErrNoController):
		terminal.Line(c.ErrOrStderr(), "%v. Install it again, tell its namespace, or use --force",
			err)
	default:
		return err
	}

	return answerNo(c)
}

// isTerminal reports whether a person is at the other end of the input.
func isTerminal(in io.Reader) bool {
	file, isFile := in.(*os.File)
	return isFile && printers.IsTerminal(file)
}

// confirm asks whether what was printed is to be deleted. No answer is no, and an interrupt too.
func confirm(ctx context.Context, in io.Reader, out io.Writer) bool {
	fmt.Fprint(out, "Delete all of this? [y/N] ")
	answers := make(chan string, 1)
	go func() { // until the program ends, because a read of a terminal cannot be ended
		answer, _ := bufio.NewReader(in).ReadString('\n') // "" is no
		answers <- answer
	}()

	select {
	case <-ctx.Done():
		fmt.Fprintln(out)
		return false
	case answer := <-answers:
		return slices.Contains([]string{"y", "yes"}, strings.ToLower(strings.TrimSpace(answer)))
	}
}
