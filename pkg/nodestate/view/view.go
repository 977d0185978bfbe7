// SPDX-License-Identifier: Apache-2.0

// Package view shows the state of a node to people: as a text tree, and as a picture.
package view

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// card is the contents of one PCI slot.
type card struct {
	slot  string // address without the function's number, "0000:3b:00"
	PFs   []pf
	first nodestate.Function // the first PF
}

// pf is a PF with its VFs and SFs. If Here is false, the PF itself is not on the node's list.
type pf struct {
	nodestate.Function
	Here     bool
	Children []nodestate.Function // VFs by index, then SFs by number
}

// cards groups the Functions by card, in the order of their addresses.
func cards(state *nodestate.State) []card {
	byPF := map[pci.Address]*pf{}
	var order []pci.Address
	for _, f := range state.Functions {
		parent := byPF[f.PF]
		if parent == nil {
			parent = &pf{
				Function: nodestate.Function{
					ID: function.ID{Address: f.PF}, Kind: function.PF, PF: f.PF, PFName: f.PFName,
					NUMANode: -1,
				},
			}
			byPF[f.PF] = parent
			order = append(order, f.PF)
		}

		if f.Kind == function.PF {
			parent.Function, parent.Here = f, true
		} else {
			parent.Children = append(parent.Children, f)
		}
	}

	slices.Sort(order)
	var out []card
	for _, address := range order {
		parent := byPF[address]
		slices.SortFunc(parent.Children, func(a, b nodestate.Function) int {
			return cmp.Or(-cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Index, b.Index))
		})
		slot, _, _ := strings.Cut(string(address), ".")
		if len(out) == 0 || out[len(out)-1].slot != slot {
			out = append(out, card{slot: slot, first: parent.Function})
		}

		last := &out[len(out)-1]
		last.PFs = append(last.PFs, *parent)
	}

	return out
}

// Title returns a heading for the card.
func (c card) Title() string {
	parts := []string{"card " + c.slot}
	if c.first.Vendor != "" {
		id := c.first.Vendor + ":" + c.first.Device
		if named := withoutEmpty([]string{c.first.VendorName, c.first.DeviceName}); len(named) > 0 {
			id += " (" + strings.Join(named, " ") + ")"
		}
		parts = append(parts, id)
	}

	if c.first.Board != "" {
		parts = append(parts, c.first.Board)
	}

	if c.first.Serial != "" {
		parts = append(parts, "serial "+c.first.Serial)
	}

	if c.first.PCIeRoot != "" {
		parts = append(parts, "root "+c.first.PCIeRoot)
	}

	if len(c.first.DataDirectRoots) > 0 {
		parts = append(parts, "Data Direct root "+strings.Join(c.first.DataDirectRoots, " "))
	}

	if c.first.NUMANode >= 0 {
		parts = append(parts, fmt.Sprintf("NUMA node %d", c.first.NUMANode))
	}

	return terminal.Escape(strings.Join(parts, ", "))
}

// name returns the name of a Function within its card.
func name(f nodestate.Function) string {
	if f.Kind == function.PF {
		return string(f.Kind)
	}
	return fmt.Sprintf("%s %d", f.Kind, f.Index)
}

// link describes a PF's link and the number of its VFs.
func link(f nodestate.Function) string {
	parts := []string{"link down"}
	switch {
	case f.LinkUp:
		parts[0] = "link up"
	case f.AdminDown:
		parts[0] = "administratively down"
	}

	if f.TotalVFs > 0 {
		parts = append(parts, fmt.Sprintf("%d of %d VFs", f.NumVFs, f.TotalVFs))
	} else if f.NumVFs > 0 {
		parts = append(parts, fmt.Sprintf("%d VFs", f.NumVFs))
	}

	return strings.Join(parts, ", ")
}

// condition classifies the state of a Function, for its colour.
type condition string

const (
	free      condition = "free"      // available to pods
	used      condition = "used"      // allocated to a pod
	releasing condition = "releasing" // being released, including its hooks
	troubled  condition = "troubled"  // kept from pods by a problem
	unoffered condition = "unoffered" // in no pool
)

func conditionOf(f nodestate.Function) condition {
	switch a := f.Attachment; {
	case f.Gone, a != nil && (a.State == "Lost" || a.Quarantine != nil):
		return troubled
	case a != nil && (a.State == "Detaching" || a.State == "Releasing"):
		return releasing
	case a != nil:
		return used
	case len(f.Problems) > 0:
		return troubled
	case f.Pool != "":
		return free
	}
	return unoffered
}

// owner describes the owner of a Function, or returns "".
func owner(f nodestate.Function) string {
	a := f.Attachment
	if a == nil {
		return ""
	}

	parts := []string{a.State}
	if a.Quarantine != nil {
		parts[0] += ", quarantined,"
	}

	if a.Interface.Name != "" {
		parts = append(parts, a.Interface.Name)
	}
	if a.Interface.Bond != "" {
		parts = append(parts, "in bond "+a.Interface.Bond)
	}

	if a.Pod.Name != "" {
		parts = append(parts, "of pod "+a.Pod.Namespace+"/"+a.Pod.Name)
	}

	if a.Claim.Name != "" {
		parts = append(parts, "by claim "+a.Claim.Namespace+"/"+a.Claim.Name)
	}

	if a.Resource != "" {
		parts = append(parts, "by "+a.Resource)
	}

	if hook := a.Hook; hook != nil {
		waits := "waits for hook " + hook.Name
		if hook.Attempts > 0 {
			waits += fmt.Sprintf(", which failed %d times: %s", hook.Attempts, hook.Error)
		}
		parts = append(parts, waits)
	}

	return terminal.Escape(strings.Join(parts, " "))
}

// troubles returns the problems of a Function, each a sentence.
func troubles(f nodestate.Function) []string {
	var out []string
	if f.Gone {
		out = append(out, "the device is gone")
	}

	// For a Function in a pool, its problems include this.
	if f.HostUse != "" && f.Pool == "" && f.Kind != function.PF {
		out = append(out, terminal.Escape("the host uses it: netdev "+f.Netdev+" "+f.HostUse))
	}

	for _, p := range f.Problems {
		out = append(out, terminal.Escape(p.Message))
	}

	// Otherwise the problems say it.
	if a := f.Attachment; a != nil && a.Quarantine != nil && len(f.Problems) == 0 {
		out = append(out, terminal.Escape("quarantined: "+a.Quarantine.Message))
	}

	return out
}
