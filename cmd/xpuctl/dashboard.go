// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/inspect/dashboard"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect/explain"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate/pciids"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// dashboardOptions are the options of xpuctl dashboard.
type dashboardOptions struct {
	cluster       *clusterFlags
	agents, gates string
	port          int
}

func dashboardCommand() *cobra.Command {
	o := &dashboardOptions{cluster: &clusterFlags{}}
	c := &cobra.Command{
		Use:   "dashboard",
		Short: "Show the cluster in the browser, as it changes",
		Long: `Serves one page on the loopback interface, until it is interrupted. The page shows what is wrong, nodes with their PFs and
Functions, pods, pools, networks, xPUs and programs as they change; for a pod the stages of "xpuctl explain" as a timeline; and
for a node what its agent says.

The address that is printed has a token, which is new each time: whoever has the address sees what you may see. The page only
reads, with your rights. What you may not read is said, and which role lets you. What is stale, because the cluster does not
answer, is said with its time. Agents are asked by a program in their pods, when you open a node or a pod, which needs the right
to create pods/exec in the namespace of xpu-agent. In direct mode only the agents know, and all are asked.

If you may not read pods, claims and XPUPorts of all namespaces, those of the namespace of your context are shown.`,
		Example: `  xpuctl dashboard

  # On another machine, with the same port here and there:
  ssh -t -L 8765:127.0.0.1:8765 admin@host xpuctl dashboard --port 8765`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return o.run(c) },
	}

	o.cluster.addTo(c.Flags())
	o.cluster.addNamespaceTo(c.Flags(), "")
	addAgentsFlag(c.Flags(), &o.agents)
	addGatesFlag(c.Flags(), &o.gates)
	c.Flags().IntVar(&o.port, "port", 0, "port to listen on; any free one if 0")

	return c
}

func (o *dashboardOptions) run(c *cobra.Command) error {
	if o.port < 0 || o.port > 65535 {
		return fmt.Errorf("--port %d: must be between 0 and 65535", o.port)
	}
	if _, err := schedule.NewFeatures(schedule.NewestKubernetes, o.gates); err != nil {
		return err
	}

	agents, err := newAgents(c.Context(), o.cluster, o.agents)
	if err != nil {
		return err
	}
	api, err := o.cluster.client(c.Context())
	if err != nil {
		return err
	}
	fallback, err := o.cluster.namespace()
	if err != nil {
		return err
	}
	name, err := o.cluster.name()
	if err != nil {
		return err
	}

	sources := explain.Sources{Reader: api, State: agents.State,
		Schedule: (&explainOptions{cluster: o.cluster, gates: o.gates}).schedule}
	d := dashboard.New(dashboard.Options{
		Client: api, Cluster: name, AgentNamespace: o.agents,
		Namespace: o.cluster.overrides.Context.Namespace, Fallback: fallback,
		State: func(ctx context.Context, node string) (*nodestate.State, error) {
			state, err := agents.State(ctx, node)
			if err == nil {
				pciids.AddNames(state, "/")
			}
			return state, err
		},
		Explain: func(ctx context.Context, pod types.NamespacedName) (*explain.Pod, error) {
			return explain.Of(ctx, sources, pod)
		},
		Now: time.Now, Pause: dashboard.DefaultPause,
	})

	listener, err := dashboard.Listen(o.port)
	if err != nil {
		return fmt.Errorf("--port %d: %w", o.port, err)
	}
	if err := terminal.Line(c.OutOrStdout(), "%s", d.URL(listener)); err != nil {
		return err
	}
	return d.Serve(c.Context(), listener)
}

// name returns what people call the cluster: the context, or else its address.
func (f *clusterFlags) name() (string, error) {
	loaded, err := f.load()
	if err != nil {
		return "", err
	}

	raw, err := loaded.RawConfig()
	if err != nil {
		return "", err
	}
	config, err := loaded.ClientConfig()
	if err != nil {
		return "", err
	}
	return cmp.Or(f.overrides.CurrentContext, raw.CurrentContext, config.Host), nil
}
