// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/pkg/inspect"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// statusOptions are the options of xpuctl status.
type statusOptions struct {
	cluster        *clusterFlags
	agents, output string
	wait           bool
	timeout        time.Duration
}

// statusPause is the time between two looks at the cluster with --wait.
const statusPause = 2 * time.Second

func statusCommand() *cobra.Command {
	o := &statusOptions{cluster: &clusterFlags{}}
	c := &cobra.Command{
		Use:   "status",
		Short: "Show whether everything of xpu-device-plugin in a cluster works",
		Long: `Shows the programs of xpu-device-plugin in a cluster, with their versions, and how many objects of each kind are ready. Below a
part is what is wrong with it. It only reads the API server, and asks no agent.

Exit codes: 0 if nothing is wrong, 1 if something is, or you may not read it, 2 if the cluster cannot be asked.`,
		Example: `  xpuctl status

  # After an installation, for a script:
  xpuctl status --wait --timeout 5m`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return o.run(c) },
	}

	f := c.Flags()
	o.cluster.addTo(f)
	addAgentsFlag(f, &o.agents)
	f.BoolVar(&o.wait, "wait", false, "wait until nothing is wrong")
	f.DurationVar(&o.timeout, "timeout", 5*time.Minute, "how long --wait waits")
	addOutputFlag(c, &o.output, "text", "json", "yaml")

	return c
}

func (o *statusOptions) run(c *cobra.Command) error {
	if err := checkOutput(o.output, "text", "json", "yaml"); err != nil {
		return err
	}
	if o.timeout <= 0 {
		return fmt.Errorf("--timeout %s: must be longer than 0", o.timeout)
	}

	found, err := o.look(c.Context())
	if err != nil {
		return err
	}

	if err := o.print(c, found); err != nil {
		return err
	}
	if !found.Good() {
		return answerNo(c)
	}
	return nil
}

// look returns the status. With --wait it looks again until nothing is wrong, or until the time is
// over; then it returns the last status. It is an error if the cluster has not answered by then.
func (o *statusOptions) look(ctx context.Context) (inspect.Installation, error) {
	waiting := ctx
	if o.wait {
		var cancel context.CancelFunc
		waiting, cancel = context.WithTimeout(ctx, o.timeout)
		defer cancel()
	}
	reader, err := o.cluster.client(waiting)
	if err != nil {
		return inspect.Installation{}, err
	}

	var last inspect.Installation
	for {
		found, err := inspect.Status(waiting, reader, o.agents, time.Now())
		switch {
		case err != nil && len(last.Parts) > 0 && waiting.Err() != nil && ctx.Err() == nil:
			return last, nil
		case err != nil || !o.wait || found.Good():
			return found, err
		}

		last = found
		if !loop.Sleep(waiting, statusPause) {
			return last, nil
		}
	}
}

func (o *statusOptions) print(c *cobra.Command, found inspect.Installation) error {
	if o.output != "text" {
		return printValue(c.OutOrStdout(), o.output, found)
	}
	config, err := o.cluster.restConfig()
	if err != nil {
		return err
	}
	kubernetes, err := clusterVersion(c.Context(), config)
	if err != nil {
		return err
	}

	return errors.Join(
		terminal.Line(c.OutOrStdout(), "xpuctl %s, Kubernetes %s", version.String(), kubernetes),
		blank(c),
		found.Table().Write(c.OutOrStdout(), true),
	)
}
