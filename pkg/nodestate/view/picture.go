// SPDX-License-Identifier: Apache-2.0

package view

import (
	"fmt"
	"io"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// Dimensions of the picture, in CSS pixels.
const (
	pictureWidth  = 900
	margin        = 16
	headHeight    = 56 // title and legend
	cardHead      = 30
	pfHead        = 44
	cell          = 20  // side of a Function's symbol, which has 16, and the gap to the next
	perRow        = 32  // symbols per row
	entryHeight   = 18  // a line about one Function
	maxLineLength = 125 // maximum characters in such a line
	maxTitle      = 105 // and in the bold title of a card
	gap           = 12
)

// picture is the data of the drawing.
type picture struct {
	Title         string
	Width, Height int
	Legend        []legend
	Cards         []cardBox
	// Functions is for the page's table.
	Functions []entry
}

type legend struct {
	X         int
	Condition condition
	Text      string
}

type cardBox struct {
	Title, Whole string
	Y, Height    int
	TitleY       int
	PFs          []pfBox
	InnerX, Wide int
}

type pfBox struct {
	Y, Height     int
	Title, Detail string
	TitleY        int
	DetailY       int
	Condition     condition
	Squares       []square
	Entries       []line
}

type square struct {
	X, Y      int
	Condition condition
	Title     string
}

type line struct {
	X, Y      int
	Condition condition
	Text      string
	Whole     string
}

// entry is a row of the page's table.
type entry struct {
	ID, Name, Netdev, Driver, Pool, Who string
	Condition                           condition
	Troubles                            []string
}

// SVG draws the node: a box for each card and PF, a symbol for each VF and SF in the shape and
// colour of its condition, and the owners.
func SVG(to io.Writer, state *nodestate.State) error {
	var m markup
	m.picture(draw(state))
	return m.writeTo(to)
}

// HTML writes a page with the picture and a table of all Functions. It refers to no other file.
func HTML(to io.Writer, state *nodestate.State) error {
	var m markup
	m.page(draw(state))
	return m.writeTo(to)
}

// conditions lists all conditions with their meaning and their shape, in the order of the legend.
// The shape is a path of SVG in a square with a side of 8, so that no condition is shown by colour
// alone.
var conditions = [...]struct {
	condition   condition
	text, shape string
}{
	{free, "free", "m.5 .5h7v7h-7z"},
	{used, "a pod has it", "m.5 .5h7v7h-7z"},
	{releasing, "on its way back", "m.5 7.5l3.5-7l3.5 7z"},
	{troubled, "kept from pods", "m1 1l6 6m0-6l-6 6"},
	{unoffered, "in no pool", "m2.5 2.5h3v3h-3z"},
}

// shapeOf returns the shape of a condition.
func shapeOf(c condition) string {
	for _, known := range conditions {
		if known.condition == c {
			return known.shape
		}
	}
	return ""
}

func draw(state *nodestate.State) picture {
	p := picture{Title: title(state), Width: pictureWidth}
	for i, c := range conditions {
		p.Legend = append(p.Legend, legend{X: margin + i*130, Condition: c.condition, Text: c.text})
	}

	y := headHeight
	for _, c := range cards(state) {
		box := cardBox{Title: shortened(c.Title(), maxTitle), Whole: c.Title(), Y: y, TitleY: y + 20, InnerX: margin + gap,
			Wide: pictureWidth - 2*(margin+gap)}
		inner := y + cardHead
		for _, parent := range c.PFs {
			b := drawPF(parent, inner)
			box.PFs = append(box.PFs, b)
			inner += b.Height + gap
		}

		box.Height = inner - y
		p.Cards = append(p.Cards, box)
		y += box.Height + gap

		for _, parent := range c.PFs {
			p.Functions = append(p.Functions, entryOf(parent.Function))
			for _, f := range parent.Children {
				p.Functions = append(p.Functions, entryOf(f))
			}
		}
	}

	p.Height = y + margin - gap
	return p
}

func drawPF(parent pf, y int) pfBox {
	box := pfBox{
		Y: y,
		Title: strings.Join(
			withoutEmpty([]string{
				parent.ID.String() + " PF", netdevOf(parent.Function), driverOf(parent.Function),
			}), ", ",
		),
		TitleY: y + 18, DetailY: y + 35, Condition: conditionOf(parent.Function),
		Detail: "not seen any more",
	}

	if parent.Here {
		box.Detail = strings.Join(withoutEmpty([]string{
			link(parent.Function), poolOf(parent.Function), owner(parent.Function),
		}), ", ")
		if parent.DefaultRoute {
			box.Detail += ", the node's own traffic goes over it"
		}
	}

	x, bottom := margin+2*gap, y+pfHead
	for i, f := range parent.Children {
		box.Squares = append(box.Squares, square{
			X: x + i%perRow*cell, Y: bottom + i/perRow*cell,
			Condition: conditionOf(f), Title: describe(f),
		})
	}

	bottom += (len(parent.Children) + perRow - 1) / perRow * cell
	for _, f := range append([]nodestate.Function{parent.Function}, parent.Children...) {
		if f.Kind != function.PF && f.Attachment != nil {
			bottom += entryHeight
			box.Entries = append(box.Entries,
				entryLine(x, bottom, conditionOf(f),
					fmt.Sprintf("%s %s: %s", f.ID, name(f), owner(f))))
		}
	}

	for _, trouble := range distinct(append([]nodestate.Function{parent.Function},
		parent.Children...)) {
		bottom += entryHeight
		box.Entries = append(box.Entries, entryLine(x, bottom, troubled, trouble))
	}

	box.Height = bottom + gap - y
	return box
}

// entryLine returns a line that fits into the picture. The full text is shown on hover.
func entryLine(x, y int, c condition, text string) line {
	return line{X: x, Y: y, Condition: c, Text: shortened(text, maxLineLength), Whole: text}
}

// shortened returns a text with at most n characters.
func shortened(text string, n int) string {
	if runes := []rune(text); len(runes) > n {
		return string(runes[:n-1]) + "…"
	}
	return text
}

// distinct returns the different troubles of the Functions, with how many have each.
func distinct(functions []nodestate.Function) []string {
	count := map[string]int{}
	var order []string
	for _, f := range functions {
		for _, trouble := range troubles(f) {
			if count[trouble]++; count[trouble] == 1 {
				order = append(order, trouble)
			}
		}
	}

	for i, trouble := range order {
		if n := count[trouble]; n > 1 {
			order[i] = fmt.Sprintf("%d Functions: %s", n, trouble)
		}
	}

	return order
}

func poolOf(f nodestate.Function) string {
	if f.Pool == "" {
		return ""
	}
	return terminal.Escape("pool " + f.Pool)
}

// describe returns the text that a square shows on hover.
func describe(f nodestate.Function) string {
	parts := []string{f.ID.String() + " " + name(f), netdevOf(f), driverOf(f), poolOf(f), owner(f)}
	return strings.Join(withoutEmpty(append(parts, troubles(f)...)), ", ")
}

func entryOf(f nodestate.Function) entry {
	return entry{
		ID: f.ID.String(), Name: name(f), Netdev: netdevOf(f), Driver: driverOf(f), Pool: f.Pool,
		Who:       owner(f),
		Condition: conditionOf(f), Troubles: troubles(f),
	}
}
