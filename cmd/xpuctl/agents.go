// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// maxParallelAgents is how many agents are asked in parallel.
const maxParallelAgents = 16

func addAgentsFlag(f *pflag.FlagSet, namespace *string) {
	f.StringVar(namespace, "agent-namespace", inspect.AgentNamespace,
		"namespace of the pods of xpu-agent and xpu-controller")
}

func deadLettersCommand() *cobra.Command {
	cluster := &clusterFlags{}
	var namespace, node string
	c := &cobra.Command{
		Use: "dead-letters [--node NAME]",
		Short: "Show Functions that do not get free: quarantined ones, and those whose " +
			"post-delete hook fails",
		Long: `Asks the agents, by a program in their pods, for the Functions that are quarantined, since they did not come back from their pods
as they were; for Functions that are not free because a post-delete hook fails; and for the hooks that were given up: a person
has to do what these hooks have not done. An agent keeps its last 100. Functions that are quarantined or wait can be freed by
"xpuctl release".

Exit codes: 0 if there are none, 1 if there are some, 2 if an agent cannot be asked.`,
		Example: `  xpuctl dead-letters
  xpuctl dead-letters --node node1`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			agents, err := newAgents(c.Context(), cluster, namespace)
			if err != nil {
				return err
			}

			states, unasked := askAll(c, agents, node)
			if len(states) == 0 {
				return unasked
			}

			rows := 0
			for i, table := range []inspect.Table{
				quarantineTable(states), waitingTable(states), lettersTable(states),
			} {
				if i > 0 {
					err = blank(c)
				}
				if err = errors.Join(err, table.Write(c.OutOrStdout(), false)); err != nil {
					return err
				}
				rows += len(table.Rows)
			}

			if unasked == nil && rows > 0 {
				return answerNo(c)
			}

			return unasked
		},
	}

	cluster.addTo(c.Flags())
	c.Flags().StringVar(&node, "node", "", "node whose agent is asked; all if empty")
	addAgentsFlag(c.Flags(), &namespace)

	return c
}

func blank(c *cobra.Command) error {
	_, err := fmt.Fprintln(c.OutOrStdout())
	return err
}

// askAll asks the agent of a node, or all agents if node is "". It shows the progress if it takes
// long. It returns the answers, and an error about the nodes that have not answered. There is an
// error if there is no answer.
func askAll(c *cobra.Command, agents inspect.Agents, node string) ([]*nodestate.State, error) {
	nodes := []string{node}
	if node == "" {
		var err error
		if nodes, err = agents.Nodes(c.Context()); err != nil {
			return nil, err
		}
		if len(nodes) == 0 {
			return nil, fmt.Errorf("nobody could be asked: %w", agents.NoneErr())
		}
	}

	progress := newProgress(c.ErrOrStderr(), "agents asked", len(nodes))
	defer progress.clear()

	states, errs := make([]*nodestate.State, len(nodes)), make([]error, len(nodes))
	var group errgroup.Group
	group.SetLimit(maxParallelAgents)

	for i, name := range nodes {
		group.Go(func() error {
			defer progress.step()
			states[i], errs[i] = agents.State(c.Context(), name)
			return nil
		})
	}

	_ = group.Wait()
	states = slices.DeleteFunc(states, func(s *nodestate.State) bool { return s == nil })
	if len(nodes) > 1 && len(states) < len(nodes) {
		errs = append(errs, fmt.Errorf("%d of %d nodes have answered", len(states), len(nodes)))
	}
	return states, errors.Join(errs...)
}

func quarantineTable(states []*nodestate.State) inspect.Table {
	table := inspect.Table{
		Header: []string{"NODE", "FUNCTION", "POOL", "QUARANTINED", "TRIED AGAIN", "SINCE"},
		Empty:  "No Function is quarantined.",
	}

	for _, state := range states {
		for _, f := range state.Functions {
			if f.Attachment == nil || f.Attachment.Quarantine == nil {
				continue
			}

			q := f.Attachment.Quarantine
			table.Rows = append(table.Rows, inspect.Row{
				Cells: []string{
					state.Node, f.ID.String(), f.Pool, q.Reason,
					fmt.Sprintf("%d times", q.Attempts),
					duration.HumanDuration(state.Time.Sub(q.Since)),
				},
				Notes: []string{q.Message},
			})
		}
	}

	return table
}

func waitingTable(states []*nodestate.State) inspect.Table {
	table := inspect.Table{
		Header: []string{"NODE", "FUNCTION", "POOL", "WAITS FOR HOOK", "FAILED", "SINCE"},
		Empty:  "No Function waits for a post-delete hook.",
	}

	for _, state := range states {
		for _, f := range state.Functions {
			if f.Attachment == nil || f.Attachment.Hook == nil {
				continue
			}

			hook := f.Attachment.Hook
			row := inspect.Row{Cells: []string{
				state.Node, f.ID.String(), f.Pool, hook.Name,
				fmt.Sprintf("%d times", hook.Attempts),
				duration.HumanDuration(state.Time.Sub(waitsSince(f.Attachment))),
			}}

			if hook.Error != "" {
				row.Notes = []string{hook.Error}
			}

			table.Rows = append(table.Rows, row)
		}
	}

	return table
}

// waitsSince returns when the Function was restored and began to wait for its hooks. For a
// quarantined one, whose Port is deleted earlier, it returns when its release began.
func waitsSince(a *nodestate.Attachment) time.Time {
	if a.RestoredAt.IsZero() {
		return a.StoppedAt
	}
	return a.RestoredAt
}

func lettersTable(states []*nodestate.State) inspect.Table {
	table := inspect.Table{
		Header: []string{"NODE", "FUNCTION", "HOOK", "WAS OF", "ATTEMPTS", "GIVEN UP"},
		Empty:  "No post-delete hook was given up.",
	}

	for _, state := range states {
		for _, letter := range state.DeadLetters {
			table.Rows = append(table.Rows, inspect.Row{
				Cells: []string{
					state.Node, letter.Function.String(), letter.Hook, ownerOf(letter),
					fmt.Sprint(letter.Attempts), letter.Time.Format(time.DateTime + "Z"),
				},
				Notes: []string{letter.Error},
			})
		}
	}

	return table
}

func ownerOf(letter nodestate.DeadLetter) string {
	switch {
	case letter.Pod.Name != "":
		return "pod " + letter.Pod.Namespace + "/" + letter.Pod.Name
	case letter.Claim.Name != "":
		return "claim " + letter.Claim.Namespace + "/" + letter.Claim.Name
	}
	return ""
}

// releaseOptions are the options of xpuctl release.
type releaseOptions struct {
	cluster          *clusterFlags
	namespace, hook  string
	portGone, asItIs bool
}

func releaseCommand() *cobra.Command {
	o := &releaseOptions{cluster: &clusterFlags{}}
	c := &cobra.Command{
		Use: "release NODE FUNCTION [--as-it-is | --hook=NAME] | release xpu/NAME [FUNCTION " +
			"[--port-gone]]",
		Short: "Free Functions that are quarantined, or whose post-delete hook or card is dead",
		Long: `Frees what does not get free by itself, when the administrator knows more than the programs.

With a node and a Function that is quarantined, since it did not come back from its pod as it was, the agent tries it again at
once and says what came of it. With --as-it-is the Function is let go without that: its next pod gets it with whatever the last
one left, which the output names. Say so only once you have looked at the device.

With --hook, the post-delete hook that the Function waits for is given up: it becomes a dead letter, and the
hooks after it run. The hook "port", which has the xPU let go of the Function's Port, is only given up with --port-gone: if the
xPU still serves the Port, the next pod shares it. The agent is asked by a program in its pod.

With xpu/NAME, spec.abandon of the XPU is set: its XPUPorts go without its OPI agent being asked, and pods that end do not wait
for it. The Functions stay tainted until the agent is back and has let go of the ports; or until the XPU is deleted, which
says that the card is gone.

With xpu/NAME and a Function, the Function is added to spec.abandonedFunctions of the XPU: its XPUPort goes although the OPI agent
cannot delete the port, and no pod gets the Function. With --port-gone it is taken from there, and pods get it again.`,
		Example: `  # Which Functions wait, and for what?
  xpuctl dead-letters

  # The cause is mended, say the VF's own driver is bound again:
  xpuctl release node1 0000:3b:02.1

  # The device was looked at, and what it has harms no other pod:
  xpuctl release node1 0000:3b:02.1 --as-it-is

  # The administrator's hook 10-notify does not succeed any more:
  xpuctl release node1 0000:3b:02.1 --hook=10-notify

  # The card of an xPU does not answer, and will not:
  xpuctl release xpu/dpu-7

  # Its OPI agent cannot delete the port of a VF, and never will:
  xpuctl release xpu/dpu-7 0000:3b:02.1

  # It was restarted, and has no port of the VF any more:
  xpuctl release xpu/dpu-7 0000:3b:02.1 --port-gone`,
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: firstArgument(releaseNames),
		RunE:              o.run,
	}

	o.cluster.addTo(c.Flags())
	addAgentsFlag(c.Flags(), &o.namespace)
	c.Flags().StringVar(&o.hook, "hook", "",
		"name of the hook to give up, which must be the one that the Function waits for")
	c.Flags().BoolVar(&o.portGone, "port-gone", false,
		"affirm that the xPU serves no Port of the Function any more")
	c.Flags().BoolVar(&o.asItIs, "as-it-is", false,
		"let a quarantined Function go without another try: its next pod gets it as it is")
	c.MarkFlagsMutuallyExclusive("hook", "as-it-is")
	c.MarkFlagsMutuallyExclusive("port-gone", "as-it-is")

	return c
}

func (o *releaseOptions) run(c *cobra.Command, args []string) error {
	xpu, isXPU := strings.CutPrefix(args[0], "xpu/")
	switch {
	case isXPU && xpu == "":
		return fmt.Errorf("%q: must be xpu/NAME", args[0])
	case isXPU && len(args) == 2:
		return o.abandonFunction(c, xpu, args[1])
	case isXPU && (o.portGone || o.asItIs || o.hook != ""):
		return errors.New("--port-gone, --hook and --as-it-is: are for one Function; name it " +
			"after xpu/" + xpu)
	case isXPU:
		return o.abandon(c, xpu)
	case len(args) < 2:
		return fmt.Errorf("%q: must be xpu/NAME, or a node, with a Function after it", args[0])
	case o.portGone && o.hook == "":
		return errors.New("--port-gone: needs --hook=port; \"xpuctl dead-letters\" shows which " +
			"hook a Function waits for")
	}

	id, err := function.ParseID(args[1])
	if err != nil {
		return err
	}

	agents, err := newAgents(c.Context(), o.cluster, o.namespace)
	if err != nil {
		return err
	}

	wanted := nodestate.Release{Function: id, Hook: o.hook, PortGone: o.portGone, AsItIs: o.asItIs}
	outcome, err := agents.Release(c.Context(), args[0], wanted)
	if err != nil {
		return err
	}

	return terminal.Line(c.OutOrStdout(), "node %s: %s", args[0], outcome)
}

// abandonFunction marks a Function of an xPU as abandoned, or with --port-gone takes the mark back.
func (o *releaseOptions) abandonFunction(c *cobra.Command, name, text string) error {
	id, err := functionID(text)
	if err != nil {
		return err
	}

	if o.hook != "" || o.asItIs {
		return errors.New(
			"--hook and --as-it-is: are for a node's Function; name its node, not its XPU",
		)
	}

	api, err := o.cluster.client(c.Context())
	if err != nil {
		return err
	}

	var xpu v1alpha1.XPU
	if err := api.Get(c.Context(), types.NamespacedName{Name: name}, &xpu); err != nil {
		return err
	}

	before := xpu.DeepCopy()
	given := slices.DeleteFunc(slices.Clone(xpu.Spec.AbandonedFunctions), func(f string) bool {
		return f == id
	})
	outcome := "XPU %s: Function %s is not given up any more; pods get it again"
	if !o.portGone {
		given, outcome = append(given, id), "XPU %s: Function %s is given up; no pod gets it "+
			"until you say --port-gone"
	}

	xpu.Spec.AbandonedFunctions = given
	if err := api.Patch(c.Context(), &xpu,
		client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return err
	}

	return terminal.Line(c.OutOrStdout(), outcome, name, id)
}

// functionID returns the name of a Function in an XPU's spec.
func functionID(text string) (string, error) {
	id, err := function.ParseID(text)
	return id.String(), err
}

// abandon marks an xPU as abandoned.
func (o *releaseOptions) abandon(c *cobra.Command, name string) error {
	api, err := o.cluster.client(c.Context())
	if err != nil {
		return err
	}

	ctx := c.Context()
	var xpu v1alpha1.XPU
	if err := api.Get(ctx, types.NamespacedName{Name: name}, &xpu); err != nil {
		return err
	}

	before := xpu.DeepCopy()
	xpu.Spec.Abandon = true
	if err := api.Patch(ctx, &xpu, client.MergeFrom(before)); err != nil {
		return err
	}

	affected, err := portsOf(ctx, api, name)
	if err != nil {
		return err
	}

	return terminal.Line(c.OutOrStdout(),
		"XPU %s is abandoned; %d XPUPorts are of it, and go when their pods do", name, affected)
}

func portsOf(ctx context.Context, reader client.Reader, xpu string) (int, error) {
	var ports v1alpha1.XPUPortList
	if err := reader.List(ctx, &ports); err != nil {
		return 0, err
	}
	return len(slices.DeleteFunc(ports.Items, func(p v1alpha1.XPUPort) bool {
		return p.Spec.XPU != xpu
	})), nil
}
