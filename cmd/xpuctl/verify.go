// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/pkg/inspect"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// runVerify shows the comparison of the inventory with sriovnet. A difference is the answer no.
func (o *discoverOptions) runVerify(c *cobra.Command) error {
	if err := checkOutput(o.output, verifyForms...); err != nil {
		return fmt.Errorf("--verify: %w", err)
	}
	if filepath.Clean(o.root) != "/" {
		return fmt.Errorf("--root %s: sriovnet can read /sys only: run xpuctl discover --verify "+
			"on the host itself", o.root)
	}

	state, err := o.verified(c.Context())
	if err != nil {
		return err
	}
	if state.Verification == nil {
		return errors.New("xpu-agent does not compare its inventory with sriovnet: upgrade it")
	}

	if err := printVerification(c.OutOrStdout(), o.output, state); err != nil {
		return err
	}

	switch v := state.Verification; {
	case v.Different > 0:
		return answerNo(c)
	case v.Skipped != "":
		return fmt.Errorf("there is no result: %s", v.Skipped)
	}

	return nil
}

// verified has a remote agent, the local agent or this program compare, and returns a state with
// the result.
func (o *discoverOptions) verified(ctx context.Context) (*nodestate.State, error) {
	if o.node != "" {
		agents, err := newAgents(ctx, o.cluster, o.agents)
		if err != nil {
			return nil, err
		}
		return agents.Verify(ctx, o.node)
	}

	client := nodestate.Client{Socket: o.socket}
	if client.Runs() {
		return client.Verify(ctx)
	}

	return verifiedKernelState(ctx)
}

// printVerification prints the comparison in the state of a node.
func printVerification(to io.Writer, form string, state *nodestate.State) error {
	v := state.Verification
	if form != "text" {
		return printValue(to, form, v)
	}

	inventory := "what xpuctl reads"
	if state.Agent != "" {
		inventory = "the inventory of xpu-agent " + state.Agent
	}

	paint := terminal.NewPainter(to)
	differences := fmt.Sprintf("%d different", v.Different)
	if v.Different > 0 {
		differences = paint(terminal.Bad, differences)
	}

	_, err := fmt.Fprintf(to, "%s: %s compared with sriovnet, %s\n%d properties are the same, "+
		"%s, %d unknown\n", terminal.Escape(state.Node), terminal.Escape(inventory),
		v.Time.UTC().Format(time.DateTime+"Z"), v.Same, differences, v.Unknown)
	if err != nil {
		return err
	}

	for _, table := range []inspect.Table{differencesTable(v), unknownsTable(v)} {
		if len(table.Rows) == 0 {
			continue
		}
		if _, err := fmt.Fprintln(to); err != nil {
			return err
		}
		if err := table.Write(to, false); err != nil {
			return err
		}
	}

	if v.Different > 0 {
		_, err = fmt.Fprintln(to, "\nThe commands show which reader is right. Please report the "+
			"card, with what they print and an archive of xpuctl bundle.")
	}

	return err
}

func differencesTable(v *nodestate.Verification) inspect.Table {
	table := inspect.Table{Header: []string{"FUNCTION", "DIFFERENT", "INVENTORY", "SRIOVNET"}}
	for _, d := range v.Differences {
		table.Rows = append(table.Rows, inspect.Row{
			Cells: []string{d.Function.String(), d.Property, d.Inventory, d.Sriovnet},
			Notes: []string{"to see which is right: " + d.Look},
		})
	}

	if more := v.Different - len(v.Differences); more > 0 {
		last := &table.Rows[len(table.Rows)-1]
		last.Notes = append(last.Notes, fmt.Sprintf("%d more are not listed", more))
	}

	return table
}

func unknownsTable(v *nodestate.Verification) inspect.Table {
	table := inspect.Table{Header: []string{"UNKNOWN", "FUNCTIONS", "FIRST", "WHY"}}
	for _, u := range v.Unknowns {
		table.Rows = append(table.Rows, inspect.Row{
			Cells: []string{u.Property, fmt.Sprint(u.Functions), u.First.String(), u.Reason},
		})
	}
	return table
}
