// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/inspect/explain"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/report"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
)

// explainOptions are the options of xpuctl explain.
type explainOptions struct {
	cluster               *clusterFlags
	agents, output, gates string
}

func explainCommand() *cobra.Command {
	o := &explainOptions{cluster: &clusterFlags{}}
	parent := &cobra.Command{
		Use: "explain", Short: "Tell the life of a pod's interfaces, and what is wrong with them",
		Example: `  xpuctl explain pod web
  xpuctl explain pod/web -n shop`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			name, err := podOf(args)
			if err != nil {
				return err
			}
			return o.run(c, name)
		},
	}

	c := &cobra.Command{
		Use: "pod NAME", Aliases: []string{"pods", "po"},
		Short: "Tell the life of a pod's interfaces, stage by stage, and what is wrong",
		Long: `Tells for each Function of a pod how far it is: requested, allocated, provisioned at the xPU, bound, prepared, attached, running,
and for a pod that ends, released; when that was, and what it waits for. Then it puts the interface in the pod and the port at
the xPU next to each other, and says in one sentence what is wrong.

It reads the pod, its claims, XPUPorts and events; asks the agent of the node by a program in its pod, if it may (create
pods/exec in the namespace of xpu-agent); and for a pod without a node what "xpuctl schedule" would say, with the same
--feature-gates.

What you may not read, or what the cluster does not have, as in direct mode, is left out, and said at the end. ClusterRole
xpu-view, which view, edit and admin of Kubernetes include, lets you read what it needs.

Exit codes: 0 if nothing is wrong, 1 if something is, or is not known, or the pod is not ready yet, 2 if the cluster cannot
be asked.`,
		Example: `  xpuctl explain pod web
  xpuctl explain pod web -n shop -o json`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: firstArgument(namesOf[*corev1.PodList]),
		RunE:              func(c *cobra.Command, args []string) error { return o.run(c, args[0]) },
	}

	for _, command := range []*cobra.Command{parent, c} {
		o.cluster.addTo(command.Flags())
		o.cluster.addNamespaceTo(command.Flags(), "")
		addAgentsFlag(command.Flags(), &o.agents)
		addGatesFlag(command.Flags(), &o.gates)
		addOutputFlag(command, &o.output, "text", "json", "yaml")
	}
	parent.AddCommand(c)

	return parent
}

// podOf returns the name in "pod/NAME", which kubectl accepts too.
func podOf(args []string) (string, error) {
	if len(args) == 0 {
		return "", errors.New("name a pod, as in: xpuctl explain pod web")
	}

	kind, name, isPath := strings.Cut(args[0], "/")
	isPod := slices.Contains([]string{"pod", "pods", "po"}, kind)
	if len(args) > 1 || !isPath || !isPod || name == "" {
		return "", fmt.Errorf("explain %s: only pods can be explained, as in: xpuctl explain pod web; "+
			"kubectl get pods has the pods of a workload", strings.Join(args, " "))
	}
	return name, nil
}

func (o *explainOptions) run(c *cobra.Command, name string) error {
	if err := checkOutput(o.output, "text", "json", "yaml"); err != nil {
		return err
	}
	if _, err := schedule.NewFeatures(schedule.NewestKubernetes, o.gates); err != nil {
		return err
	}

	agents, err := newAgents(c.Context(), o.cluster, o.agents)
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
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("%w; --namespace names another namespace", err)
	}
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

	version, err := clusterVersion(ctx, config)
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

	return whyPending(ctx, from, version, o.gates, pod)
}

// whyPending returns why no node takes a pod of a cluster, or which node does. The cluster has a
// version of Kubernetes, and its scheduler these feature gates.
func whyPending(
	ctx context.Context, from *snapshot.Snapshot, version, gates string, pod *corev1.Pod,
) (why []string, node string, err error) {
	features, err := schedule.NewFeatures(version, gates)
	if err != nil {
		return nil, "", err
	}

	decision, err := schedule.New(ctx, from, features).Schedule(ctx, pod)
	if err != nil {
		return nil, "", err
	}

	answer := report.New(features)
	answer.Add(decision)

	why = answer.Pods[0].Why()
	for _, note := range []string{features.Note(), features.ListsNote(from.Slices)} {
		if note != "" && len(why) > 0 {
			why = append(why, note)
		}
	}
	return why, decision.Node, nil
}
