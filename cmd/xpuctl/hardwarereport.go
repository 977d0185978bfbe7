// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// reportOptions are the options of xpuctl hardware-report.
type reportOptions struct {
	functions []string
	file      string
	socket    string
	journal   string
}

func hardwareReportCommand() *cobra.Command {
	o := &reportOptions{}
	c := &cobra.Command{
		Use:   "hardware-report [--functions ADDRESS,...]",
		Short: "Find out what the drivers of a card do, on VFs that nobody has",
		Long: `Finds out what a card's drivers refuse, delay, forget, reset or tell wrongly, and writes it as a
personality, which this project's simulated NIC can play, with the card's row for
docs/reference/hardware.md. Send both: this is how cards get tested that the project does not have.

Without --functions it says which VFs it could ask, and touches nothing. With it, each of these VFs in
turn is taken into a network namespace of its own. There its PF is asked for each property of a VF, one
after the other, and the VF for its MAC; then all is given back, and compared with what it was. PF,
eswitch, firmware, the number of VFs and all other Functions stay as they are. It takes some ten seconds
for a VF, and nothing is sent.

It refuses a VF that a pod has, or may be given at any time because a DevicePool offers it, that is up or
has an address on the host, or that has no netdev. It runs on the node, as root.`,
		Example: `  # Which VFs it could ask:
  sudo xpuctl hardware-report

  # Ask one, and write the personality to a file; its row of the table is printed:
  sudo xpuctl hardware-report --functions 0000:3b:02.7 --output-file card.yaml`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return o.run(c) },
	}

	f := c.Flags()
	f.StringSliceVar(&o.functions, "functions", nil,
		"PCI addresses of the VFs that may be touched, with commas between; all of one PF")
	f.StringVar(&o.file, "output-file", "-",
		`file that the personality is written to, "-" for standard output`)
	f.StringVar(&o.socket, "socket", nodestate.DefaultSocket,
		"where the agent of this host listens")
	f.StringVar(&o.journal, "journal", "/var/lib/xpu-agent/journal.db",
		"journal of the agent of this host; where it exists and no agent answers, nothing is "+
			"touched")

	return c
}

func (o *reportOptions) run(c *cobra.Command) error {
	state, err := o.state(c.Context())
	if err != nil {
		return err
	}
	if len(o.functions) == 0 {
		listVFs(c.ErrOrStderr(), state)
		return nil
	}

	var chosen []nodestate.Function
	for _, address := range o.functions {
		f, err := chooseVF(state, address)
		if err != nil {
			return fmt.Errorf("--functions %s: %w", address, err)
		}
		if len(chosen) > 0 && chosen[0].PF != f.PF {
			return fmt.Errorf("--functions %s: is of PF %s, and %s of %s: ask one PF at a time",
				address, f.PF, chosen[0].ID, chosen[0].PF)
		}
		chosen = append(chosen, f)
	}

	return o.report(c, func() (personality.Personality, error) {
		return o.probe(c, state, chosen)
	})
}

// report writes what probe finds. It opens the file first, because probes take minutes.
func (o *reportOptions) report(
	c *cobra.Command, probe func() (personality.Personality, error),
) error {
	file, err := openReport(o.file)
	if err != nil {
		return fmt.Errorf("--output-file: %w", err)
	}

	p, err := probe()
	if err == nil {
		err = o.write(c, file, p)
	}
	return file.end(err)
}

// reportFile is the file of a report. It stays as it was until the report is written, and is removed
// after a failure if it did not exist.
type reportFile struct {
	*os.File // nil for standard output
	isNew    bool
}

func openReport(name string) (reportFile, error) {
	if name == "-" {
		return reportFile{}, nil
	}
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if errors.Is(err, fs.ErrExist) {
		file, err = os.OpenFile(name, os.O_WRONLY, 0)
		return reportFile{file, false}, err
	}
	return reportFile{file, true}, err
}

// replace writes the content in place of the present one.
func (f reportFile) replace(content []byte) error {
	if info, err := f.Stat(); err != nil || info.Mode().IsRegular() {
		if err := errors.Join(err, f.Truncate(0)); err != nil {
			return err
		}
	}
	_, err := f.Write(content)
	return err
}

// end closes the file. err is the outcome of the report.
func (f reportFile) end(err error) error {
	if f.File == nil {
		return err
	}
	if err = errors.Join(err, f.Close()); err != nil && f.isNew {
		err = errors.Join(err, os.Remove(f.Name()))
	}
	return err
}

// listVFs lists which VFs could be probed, and why the others cannot.
func listVFs(to io.Writer, state *nodestate.State) {
	found := false
	for _, f := range state.Functions {
		if f.Kind != function.VF {
			continue
		}

		found = true
		if why := reasonNotFree(f); why != "" {
			terminal.Line(to, "%s would be refused: it %s", f.ID, why)
			continue
		}
		terminal.Line(to, "%s can be asked: --functions %s", f.ID, f.ID)
	}

	if !found {
		fmt.Fprintln(to,
			"This host has no VFs: write a number to sriov_numvfs of a PF that nobody uses.")
	}
}

// chooseVF returns the VF with the address, if it is unused.
func chooseVF(state *nodestate.State, address string) (nodestate.Function, error) {
	i := slices.IndexFunc(state.Functions, func(f nodestate.Function) bool {
		return f.ID.String() == address
	})
	if i < 0 {
		return nodestate.Function{}, errors.New("there is no such Function on this host")
	}

	f := state.Functions[i]
	if why := reasonNotFree(f); why != "" {
		return nodestate.Function{}, fmt.Errorf("it %s", why)
	}

	return f, nil
}

// reasonNotFree returns why a Function must not be touched, or "".
func reasonNotFree(f nodestate.Function) string {
	var problems []string
	for _, p := range f.Problems {
		problems = append(problems, p.Message)
	}

	switch {
	case f.Kind != function.VF:
		return "is no VF"
	case f.Gone || f.Potential:
		return "is not there"
	case f.Attachment != nil:
		pod := f.Attachment.Pod
		return fmt.Sprintf("is %s in pod %s/%s", f.Attachment.State, pod.Namespace, pod.Name)
	case f.Pool != "":
		return "belongs to DevicePool " + f.Pool +
			", which may give it to a pod at any time: take it from the pool first"
	case f.Netdev == "":
		return fmt.Sprintf(
			"has no netdev on the host (its driver is %q): bind it to its network driver first",
			f.Driver)
	case f.PFName == "":
		return "has a PF without a netdev"
	case f.DefaultRoute:
		return "carries the host's default route"
	case len(problems) > 0:
		return "has a problem: " + strings.Join(problems, "; ")
	}

	return inUseOnHost(f.Netdev)
}

// write writes the personality to the file, and prints its table row.
func (o *reportOptions) write(
	c *cobra.Command, file reportFile, p personality.Personality,
) error {
	content, err := p.Marshal()
	if err != nil {
		return err
	}
	if _, err := personality.Parse(content); err != nil {
		return fmt.Errorf("the report cannot be read again: %w", err)
	}

	said := c.ErrOrStderr()
	fmt.Fprintf(said, "\nRow of docs/reference/hardware.md:\n\n%s%s\n",
		personality.Header(), p.Row())
	if file.File == nil {
		_, err = terminal.Raw(c.OutOrStdout()).Write(content)
		return err
	}
	if err := file.replace(content); err != nil {
		return err
	}

	terminal.Line(said, "The personality is in %s. Add it to test/qemu/zoo as %s.yaml, or send it.",
		o.file, p.Name)
	return nil
}
