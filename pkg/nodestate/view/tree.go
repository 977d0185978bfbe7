// SPDX-License-Identifier: Apache-2.0

package view

import (
	"fmt"
	"io"
	"reflect"
	"strings"
	"time"

	"github.com/xlab/treeprint"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// TreeOptions configure [Tree].
type TreeOptions struct {
	// All shows every Function. Otherwise, consecutive Functions that differ only in their index
	// share a line.
	All bool
	// Paint colours a text for a condition; see conditions. Nil means no colours.
	Paint func(c string, text string) string
}

// minGroup is how many similar Functions are at least needed to share a line.
const minGroup = 4

// Tree writes cards, PFs, VFs and SFs, their owners, and their problems.
func Tree(to io.Writer, state *nodestate.State, options TreeOptions) error {
	if options.Paint == nil {
		options.Paint = func(_, text string) string { return text }
	}

	tree := treeprint.NewWithRoot(title(state))
	for _, c := range cards(state) {
		branch := tree.AddBranch(c.Title())
		for _, parent := range c.PFs {
			options.add(branch.AddBranch(options.line(parent.Function)), parent.Children)
		}
	}

	if len(state.Functions) == 0 {
		tree.AddNode("no network card")
	}

	_, err := io.WriteString(to, tree.String())
	return err
}

// title returns the node, the source and the time.
func title(state *nodestate.State) string {
	source := "as the kernel shows it, without xpu-agent"
	if state.Agent != "" {
		source = "as xpu-agent " + state.Agent + " sees it"
	}
	at := state.Time.UTC().Format(time.DateTime + "Z")
	return terminal.Escape(strings.TrimSpace(fmt.Sprintf("%s %s, %s", state.Node, source, at)))
}

func (o TreeOptions) add(branch treeprint.Tree, functions []nodestate.Function) {
	for len(functions) > 0 {
		n := 1
		for !o.All && n < len(functions) && isSimilar(functions[0], functions[n]) {
			n++
		}

		if n < minGroup {
			n = 1
		}

		line := o.line(functions[0])
		if n > 1 {
			line = o.lines(functions[:n])
		}

		leaf := branch.AddBranch(line)
		for _, trouble := range troubles(functions[0]) {
			leaf.AddNode(o.Paint(string(troubled), trouble))
		}

		functions = functions[n:]
	}
}

// isSimilar reports whether the Functions differ only in index, address and names. An allocated
// Function is similar to no other.
func isSimilar(a, b nodestate.Function) bool {
	if a.Attachment != nil || b.Attachment != nil || b.Index == 0 {
		return false
	}

	for _, f := range []*nodestate.Function{&a, &b} {
		f.ID, f.Index, f.Netdev, f.IOMMUGroup, f.RDMADevices = function.ID{}, 0, present(
			f.Netdev,
		), "", nil
		f.AuxDevice = present(f.AuxDevice)
	}

	return reflect.DeepEqual(a, b)
}

func present(name string) string {
	if name == "" {
		return ""
	}
	return "netdev"
}

func (o TreeOptions) line(f nodestate.Function) string {
	parts := []string{terminal.Escape(fmt.Sprintf("%s %s", f.ID, name(f)))}
	if f.Kind == function.PF {
		parts = append(parts, netdevOf(f)+altNames(f), driverOf(f), link(f))
		if f.DefaultRoute {
			parts = append(parts, "the node's own traffic goes over it")
		}
	} else {
		parts = append(parts, terminal.Escape(f.AuxDevice), netdevOf(f), driverOf(f))
	}

	parts = append(parts, o.use(f))
	return strings.Join(withoutEmpty(parts), ", ")
}

func (o TreeOptions) lines(functions []nodestate.Function) string {
	first, last := functions[0], functions[len(functions)-1]
	names := fmt.Sprintf("%s to %s %s-%d", first.ID, last.ID, name(first), last.Index)
	parts := []string{
		terminal.Escape(names), driverOf(first), fmt.Sprintf("%d alike", len(functions)),
		o.use(first),
	}
	return strings.Join(withoutEmpty(parts), ", ")
}

// use describes the owner of the Function, or the pool that offers it.
func (o TreeOptions) use(f nodestate.Function) string {
	parts := withoutEmpty([]string{poolOf(f)})
	c := conditionOf(f)
	switch text := owner(f); {
	case text != "":
		parts = append(parts, o.Paint(string(c), text))
	case c == free:
		parts = append(parts, o.Paint(string(c), "free"))
	case c == troubled:
		parts = append(parts, o.Paint(string(c), "not given to pods"))
	}

	return strings.Join(parts, ", ")
}

func netdevOf(f nodestate.Function) string {
	switch {
	case f.Netdev != "":
		return terminal.Escape(f.Netdev)
	case f.Potential:
		return "made when it is allocated"
	}
	return ""
}

// altNames returns the other names of a PF's netdev: " (also enp59s0f0np0)".
func altNames(f nodestate.Function) string {
	if f.Netdev == "" || len(f.AltNames) == 0 {
		return ""
	}
	return terminal.Escape(" (also " + strings.Join(f.AltNames, ", ") + ")")
}

func driverOf(f nodestate.Function) string {
	if f.Driver == "" && !f.Potential && !f.Gone && f.Class != "" {
		return "no driver"
	}
	return terminal.Escape(f.Driver)
}

func withoutEmpty(parts []string) []string {
	var out []string
	for _, part := range parts {
		if part != "" {
			out = append(out, part)
		}
	}
	return out
}
