// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/pkg/inspect"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// versionOptions are the options of xpuctl version.
type versionOptions struct {
	cluster        *clusterFlags
	agents, output string
	client         bool
}

// versions are the versions of both sides.
type versions struct {
	Client     string            `json:"client"`
	Kubernetes string            `json:"kubernetes,omitempty"`
	Programs   []inspect.Program `json:"programs,omitempty"`
}

func versionCommand() *cobra.Command {
	o := &versionOptions{cluster: &clusterFlags{}}
	c := &cobra.Command{
		Use:   "version",
		Short: "Print the version of xpuctl, and of what is deployed in the cluster",
		Long: `Prints the version of xpuctl in the first line; and below it, if the kubeconfig has a cluster, those of Kubernetes and of the
programs of xpu-device-plugin there, as the images of their workloads say. "xpuctl status" has what the agents themselves say.

Exit codes: 0, or 2 if the cluster cannot be asked.`,
		Example: `  xpuctl version
  xpuctl version --client`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return o.run(c) },
	}

	o.cluster.addTo(c.Flags())
	addAgentsFlag(c.Flags(), &o.agents)
	c.Flags().BoolVar(&o.client, "client", false, "print the version of xpuctl only")
	addOutputFlag(c, &o.output, "text", "json", "yaml")

	return c
}

func (o *versionOptions) run(c *cobra.Command) error {
	if err := checkOutput(o.output, "text", "json", "yaml"); err != nil {
		return err
	}

	found := versions{Client: version.String()}
	var failed error
	if !o.client && o.cluster.isConfigured() {
		failed = o.ask(c.Context(), &found)
	}

	if o.output != "text" {
		return errors.Join(printValue(c.OutOrStdout(), o.output, found), failed)
	}
	return errors.Join(found.print(c), failed)
}

// versionPatience bounds how long a cluster is asked that may not be there.
const versionPatience = 10 * time.Second

// ask adds the versions in the cluster.
func (o *versionOptions) ask(ctx context.Context, found *versions) (err error) {
	ctx, cancel := context.WithTimeout(ctx, versionPatience)
	defer cancel()
	config, err := o.cluster.restConfig()
	if err != nil {
		return err
	}
	if config.Timeout == 0 {
		config.Timeout = versionPatience
	}
	if found.Kubernetes, err = clusterVersion(ctx, config); err != nil {
		return err
	}

	reader, err := o.cluster.client(ctx)
	if err != nil {
		return err
	}
	found.Programs, err = inspect.Versions(ctx, reader, o.agents)
	return err
}

// print prints the client's version alone in the first line, for scripts.
func (v versions) print(c *cobra.Command) error {
	if _, err := fmt.Fprintln(c.OutOrStdout(), v.Client); err != nil || v.Kubernetes == "" {
		return err
	}

	table := inspect.Table{Header: []string{"PROGRAM", "NAMESPACE", "VERSION", "IMAGE"}, Rows: []inspect.Row{
		{Cells: []string{"Kubernetes", "", v.Kubernetes, ""}},
	}}
	for _, p := range v.Programs {
		table.Rows = append(table.Rows,
			inspect.Row{Cells: []string{p.Name, p.Namespace, p.Version, p.Image}})
	}
	if len(v.Programs) == 0 {
		terminal.Line(c.ErrOrStderr(), "no program of xpu-device-plugin is deployed there")
	}
	return errors.Join(blank(c), table.Write(c.OutOrStdout(), true))
}
