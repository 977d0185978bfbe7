// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/connectivity"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect/explain"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// testOptions are the options of xpuctl test.
type testOptions struct {
	connectivity.Options
	cluster       *clusterFlags
	keep, cleanup bool
}

func testCommand() *cobra.Command {
	o := &testOptions{cluster: &clusterFlags{}}
	c := &cobra.Command{
		Use:   "test [--network NAME] [--nodes NAME,...]",
		Short: "Test by pods of its own whether pods get Functions, and packets arrive",
		Long: `Makes a pod with a Function for each network on each node, in namespace ` + connectivity.DefaultNamespace + ` or another one, and checks: the time until
they are Ready; that their interfaces have the MAC address, the addresses and the MTU of claim, XPUPort and network; that packets
pass within a network, small ones and ones of the full MTU, IPv4 and IPv6; that none pass between two networks, unless the xPUs
route between them; and that claims and XPUPorts are gone and Functions are free once the pods are deleted. With one node there
are two pods of each network.

Each pod takes a Function for the time of the test. Where none is free, or none is offered in this way, a node is not tested, which
is said. The pods run a program of the image of xpu-agent without privileges. It is pulled only if a node does not have it;
--image-pull-secret names Secrets for that. They get what to do by an annotation, and say what came of it in their logs, so that no right to
run programs in pods is needed. You need the rights to make and delete pods and ResourceClaimTemplates (with --resource:
NetworkAttachmentDefinitions), to patch pods and read their logs, and to read claims and the kinds of xpu-device-plugin; without
-n also to make and delete namespaces. What xPUs count is not compared, because their OPI agents say it to Prometheus only.

When a check fails, it prints what "xpuctl explain pod" says, and writes an archive as "xpuctl bundle" does. In the end it deletes
what it has made, also after an interrupt, and when its terminal or the reader of its output goes away; a second interrupt ends
it at once, and --cleanup deletes what is left. Pods that are left end after 8 times --timeout if they have a node, and wait on
if they have none.

Exit codes: 0 if all checks hold, 1 if one does not (FAIL) or could not be tested (----), 2 if the test could not be carried out.`,
		Example: `  xpuctl test --class xpu-fast

  # Two networks, and some nodes:
  xpuctl test --class xpu-fast --network blue,red --nodes node1,node2

  # By the device plugin and Multus, in a namespace that the network allows:
  xpuctl test --resource xpu.opiproject.org/plain --network blue -n default

  # What an earlier test has left:
  xpuctl test --cleanup`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return o.run(c) },
	}

	f := c.Flags()
	o.cluster.addTo(f)
	o.cluster.addNamespaceTo(f, "")
	f.Lookup("namespace").Usage = "existing namespace for the pods; " +
		connectivity.DefaultNamespace + " is made if empty"
	addAgentsFlag(f, &o.Agents)
	f.StringSliceVar(&o.Networks, "network", nil,
		"XPUNetworks; the first two by name that pods of the namespace may join if empty")
	f.StringSliceVar(&o.Nodes, "nodes", nil,
		"nodes that get pods; all that offer Functions in this way if empty")
	f.StringVar(&o.Class, "class", "",
		"DeviceClass by which pods claim Functions; needed where there is more than one way")
	f.StringVar(&o.Resource, "resource", "",
		"extended resource by which pods get Functions from the device plugin, with Multus")
	f.StringVar(&o.Image, "image", "",
		"image of xpu-agent; as the DaemonSet in --agent-namespace says if empty")
	f.StringSliceVar(&o.PullSecrets, "image-pull-secret", nil,
		"Secrets of the namespace (-n) by which nodes pull the image")
	f.DurationVar(&o.Timeout, "timeout", 2*time.Minute, "how long each step may take")
	f.BoolVar(&o.keep, "keep", false, "leave the pods, and do not check that Functions are freed")
	f.BoolVar(&o.cleanup, "cleanup", false, "only delete what earlier tests have left")
	c.MarkFlagsMutuallyExclusive("keep", "cleanup")
	c.MarkFlagsMutuallyExclusive("class", "resource")

	return c
}

func (o *testOptions) run(c *cobra.Command) error {
	if o.Timeout <= 0 {
		return fmt.Errorf("--timeout %s: must be longer than 0", o.Timeout)
	}
	o.Namespace = o.cluster.overrides.Context.Namespace
	if o.Namespace == "" && len(o.PullSecrets) > 0 {
		return errors.New("--image-pull-secret: needs -n with the namespace of the Secrets")
	}

	cluster, err := o.reach(c.Context())
	if err != nil {
		return err
	}
	if o.cleanup {
		ctx, cancel := context.WithTimeout(c.Context(), o.Timeout)
		defer cancel()
		if err := connectivity.Cleanup(ctx, cluster.API, o.Namespace); err != nil {
			return err
		}
		return terminal.Line(c.OutOrStdout(), "nothing of a test is left in namespace %s",
			cmp.Or(o.Namespace, connectivity.DefaultNamespace))
	}

	test, err := connectivity.Plan(c.Context(), cluster, o.Options)
	if err != nil {
		return err
	}
	if err := terminal.Line(c.OutOrStdout(), "%s", test); err != nil {
		return err
	}

	good, err := o.carryOut(c, test)
	if err != nil {
		return err
	}
	if !good {
		return answerNo(c)
	}
	return nil
}

// reach returns the cluster that the flags mean.
func (o *testOptions) reach(ctx context.Context) (connectivity.Cluster, error) {
	api, err := o.cluster.client(ctx)
	if err != nil {
		return connectivity.Cluster{}, err
	}
	config, err := o.cluster.restConfig()
	if err != nil {
		return connectivity.Cluster{}, err
	}
	config.Timeout = 0 // logs are followed as long as the test takes
	core, err := typedcorev1.NewForConfig(config)
	if err != nil {
		return connectivity.Cluster{}, err
	}

	log := func(ctx context.Context, namespace, pod string) (io.ReadCloser, error) {
		return core.Pods(namespace).GetLogs(pod, &corev1.PodLogOptions{Follow: true}).Stream(ctx)
	}
	return connectivity.Cluster{API: api, Log: log}, nil
}

// carryOut runs the test, and deletes what it has made, whatever comes.
func (o *testOptions) carryOut(c *cobra.Command, test *connectivity.Test) (good bool, err error) {
	ctx, stop := withoutReader(c.Context())
	defer stop()
	c.SetContext(ctx)

	fails := false
	report := func(check connectivity.Check) {
		fails = fails || !check.OK && !check.Untested
		printCheck(c, check)
	}
	good, err = test.Run(c.Context(), report)
	if c.Context().Err() != nil {
		fmt.Fprintln(c.ErrOrStderr(), "interrupted: deleting what the test has made")
	} else if err == nil && fails {
		o.diagnose(c, test)
	}

	if o.keep {
		return good, errors.Join(err, terminal.Line(c.OutOrStdout(),
			"the pods are in namespace %s; --cleanup deletes them", test.Namespace()))
	}
	freed, failed := test.Release(context.WithoutCancel(c.Context()), report)
	return good && freed, errors.Join(err, failed)
}

// withoutReader keeps the program alive until stop is called, even if nobody reads its output any
// more. A closed pipe is only an error of writing. A closed terminal ends the context, unless the
// program was started to outlive it, as nohup does.
func withoutReader(parent context.Context) (ctx context.Context, stop func()) {
	broken := make(chan os.Signal, 1)
	signal.Notify(broken, syscall.SIGPIPE) // else the first line into a closed pipe ends the program
	ctx, stopped := parent, func() {}
	if !signal.Ignored(syscall.SIGHUP) {
		ctx, stopped = signal.NotifyContext(parent, syscall.SIGHUP)
	}

	return ctx, func() {
		stopped()
		signal.Stop(broken)
	}
}

// printCheck prints a check and its notes.
func printCheck(c *cobra.Command, check connectivity.Check) {
	paint := terminal.NewPainter(c.OutOrStdout())
	verdict := paint(terminal.Good, "ok  ")
	if check.Untested {
		verdict = paint(terminal.Strong, "----")
	} else if !check.OK {
		verdict = paint(terminal.Bad, "FAIL")
	}

	fmt.Fprintf(c.OutOrStdout(), "%s %6s  %s\n", verdict, shortened(check.Took),
		terminal.Escape(check.Name))
	for _, note := range check.Notes {
		terminal.Line(c.OutOrStdout(), "               %s", note)
	}
}

// shortened returns a time in at most six characters, up to a quarter of an hour.
func shortened(d time.Duration) time.Duration {
	switch {
	case d >= time.Second:
		return d.Round(100 * time.Millisecond)
	case d >= 10*time.Millisecond:
		return d.Round(time.Millisecond)
	case d >= time.Millisecond:
		return d.Round(100 * time.Microsecond)
	}
	return d.Round(time.Microsecond)
}

// mostExplained is how many failed pods are explained.
const mostExplained = 2

// diagnose explains failed pods, and writes the archive for a bug report. What cannot be found out
// is no failure of the test.
func (o *testOptions) diagnose(c *cobra.Command, test *connectivity.Test) {
	agents, err := newAgents(c.Context(), o.cluster, o.Agents)
	if err != nil {
		terminal.Line(c.ErrOrStderr(), "%v", err)
		return
	}

	explainer := &explainOptions{cluster: o.cluster, agents: o.Agents}
	sources := explain.Sources{
		Reader: agents.Reader, State: agents.State, Schedule: explainer.schedule,
	}
	failed := test.Failed()
	for _, name := range failed[:min(mostExplained, len(failed))] {
		pod, err := explain.Of(c.Context(), sources,
			types.NamespacedName{Namespace: test.Namespace(), Name: name})
		if err == nil {
			err = errors.Join(blank(c), pod.Text(c.OutOrStdout()))
		}
		if err != nil {
			terminal.Line(c.ErrOrStderr(), "explain pod %s: %v", name, err)
		}
	}

	archive := &bundleOptions{cluster: o.cluster, agents: o.Agents, lines: defaultLogLines}
	if err := archive.write(c); err != nil {
		terminal.Line(c.ErrOrStderr(), "bundle: %v", err)
		return
	}
	blank(c)
	terminal.Line(c.OutOrStdout(), "for a bug report, see \"xpuctl bundle --help\": %s", archive.file)
}
