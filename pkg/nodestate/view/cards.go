// SPDX-License-Identifier: Apache-2.0

package view

import (
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// Node is a node in the words of [Tree] and [SVG], for programs that show it in another way. No text
// of it can control a terminal.
type Node struct {
	Title string `json:"title"`
	Cards []Card `json:"cards"`
}

// Card is a network card.
type Card struct {
	Title string `json:"title"`
	PFs   []PF   `json:"pfs"`
}

// PF is a PF with its VFs and SFs.
type PF struct {
	Title  string `json:"title"`
	Detail string `json:"detail"`
	// Functions are the PF itself, its VFs by index, and its SFs by number.
	Functions []Function `json:"functions"`
}

// Function is a PF, VF or SF.
type Function struct {
	ID     string `json:"id"`
	Name   string `json:"name"` // "VF 3"
	Netdev string `json:"netdev,omitempty"`
	Driver string `json:"driver,omitempty"`
	Pool   string `json:"pool,omitempty"`
	Who    string `json:"who,omitempty"` // which pod has it, and how far it is
	// Condition is free, used, releasing, troubled or unoffered. [Legend] has their meaning.
	Condition string   `json:"condition"`
	Troubles  []string `json:"troubles,omitempty"`
}

// NewNode describes a node.
func NewNode(state *nodestate.State) Node {
	out := Node{Title: title(state), Cards: []Card{}}
	for _, c := range cards(state) {
		shown := Card{Title: c.Title()}
		for _, parent := range c.PFs {
			box := drawPF(parent, 0)
			pf := PF{Title: box.Title, Detail: box.Detail}
			for _, f := range append([]nodestate.Function{parent.Function}, parent.Children...) {
				pf.Functions = append(pf.Functions, functionOf(f))
			}
			shown.PFs = append(shown.PFs, pf)
		}
		out.Cards = append(out.Cards, shown)
	}
	return out
}

func functionOf(f nodestate.Function) Function {
	e := entryOf(f)
	return Function{
		ID: e.ID, Name: e.Name, Netdev: e.Netdev, Driver: e.Driver, Pool: e.Pool,
		Who: e.Who, Condition: string(e.Condition), Troubles: e.Troubles,
	}
}

// Symbol is how a condition of Functions is shown.
type Symbol struct {
	Condition string `json:"condition"`
	Text      string `json:"text"`  // what it means
	Shape     string `json:"shape"` // path of SVG in a square with a side of 8
}

// Legend returns the symbols in the order in which pictures show them.
func Legend() []Symbol {
	var out []Symbol
	for _, c := range conditions {
		out = append(out, Symbol{string(c.condition), c.text, c.shape})
	}
	return out
}
