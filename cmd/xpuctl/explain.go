// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/inspect/explain"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/report"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
)

// explainOptions are the options of xpuctl explain.
type explainOptions struct {
	cluster        *clusterFlags
	agents, output string
}

func explainCommand() *cobra.Command {
	o := &explainOptions{cluster: &clusterFlags{}}
	parent := &cobra.Command{
		Use: "explain", Short: "Tell the life of a pod's interfaces, and what is wrong with them",
	}

	c := &cobra.Command{
		Use:   "pod NAME",
		Short: "Tell the life of a pod's interfaces, stage by stage, and what is wrong",
		Long: `Tells for each Function of a pod how far it is: requested, allocated, provisioned at the xPU, bound, prepared, attached, running,
and for a pod that ends, released; when that was, and what it waits for. Then it puts the interface in the pod and the port at
the xPU next to each other, and says in one sentence what is wrong.

It reads the pod, its claims, XPUPorts and events; asks the agent of the node by a program in its pod, if it may (create
pods/exec in the namespace of xpu-agent); and for a pod without a node what "xpuctl schedule" would say.

Exit codes: 0 if nothing is wrong, 1 if something is, or the pod is not ready yet, 2 if the cluster cannot be asked.`,
		Example: `  xpuctl explain pod web
  xpuctl explain pod web -n shop -o json`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error { return o.run(c, args[0]) },
	}

	o.cluster.addTo(c.Flags())
	o.cluster.addNamespaceTo(c.Flags(), "")
	addAgentsFlag(c.Flags(), &o.agents)
	addOutputFlag(c, &o.output, "text", "json", "yaml")
	parent.AddCommand(c)

	return parent
}

func (o *explainOptions) run(c *cobra.Command, name string) error {
	if err := checkOutput(o.output, "text", "json", "yaml"); err != nil {
		return err
	}

	agents, err := newAgents(o.cluster, o.agents)
	if err != nil {
		return err
	}

	namespace, err := o.cluster.namespace()
	if err != nil {
		return err
	}

	pod, err := explain.Of(c.Context(),
		explain.Sources{Reader: agents.Reader, State: agents.State, Schedule: o.schedule},
		types.NamespacedName{Namespace: cmp.Or(namespace, corev1.NamespaceDefault), Name: name})
	if err != nil {
		return err
	}
	if err := o.print(c, pod); err != nil {
		return err
	}
	if !pod.OK {
		return answerNo(c)
	}

	return nil
}

func (o *explainOptions) print(c *cobra.Command, pod *explain.Pod) error {
	if o.output == "text" {
		return pod.Text(c.OutOrStdout())
	}
	return printValue(c.OutOrStdout(), o.output, pod)
}

// schedule reproduces what the scheduler would do with a pod, if it were the only pending one.
func (o *explainOptions) schedule(
	ctx context.Context, pod *corev1.Pod,
) (why []string, node string, err error) {
	config, err := o.cluster.restConfig()
	if err != nil {
		return nil, "", err
	}

	version, err := clusterVersion(config)
	if err != nil {
		return nil, "", err
	}

	features, err := schedule.NewFeatures(version, "")
	if err != nil {
		return nil, "", err
	}

	clients, err := snapshot.NewClients(config)
	if err != nil {
		return nil, "", err
	}

	from, err := snapshot.List(ctx, clients)
	if err != nil {
		return nil, "", err
	}

	decision, err := schedule.New(ctx, from, features).Schedule(ctx, pod)
	if err != nil {
		return nil, "", err
	}

	answer := report.New(features.Kubernetes)
	answer.Add(decision)

	return answer.Pods[0].Why(), decision.Node, nil
}
