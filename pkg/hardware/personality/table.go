// SPDX-License-Identifier: Apache-2.0

package personality

import (
	"cmp"
	"fmt"
	"strings"
)

// column is a column of the table of cards in docs/reference/hardware.md.
type column struct {
	title string
	cell  func(Personality) string
}

var columns = []column{
	{"card", func(p Personality) string { return p.Title }},
	{"personality", func(p Personality) string { return p.Name }},
	{"MAC", func(p Personality) string { return p.field("mac", "mac") }},
	{"VLAN", func(p Personality) string { return p.field("vlan", "vlan") }},
	{"QoS", func(p Personality) string { return p.field("vlan", "qos") }},
	{"802.1ad", func(p Personality) string { return p.field("vlan", "vlan.ad") }},
	{"trust", func(p Personality) string { return p.field("trust", "trust") }},
	{"spoof check", func(p Personality) string { return p.field("spoofchk", "spoofchk") }},
	{"minimum rate", func(p Personality) string { return p.field("min", "min") }},
	{"maximum rate", func(p Personality) string { return p.field("max", "max") }},
	{"link state", func(p Personality) string { return p.field("link", "link") }},
	{"VF resets", func(p Personality) string { return p.resets() }},
}

// Header returns the header of the table of cards, in Markdown.
func Header() string {
	titles, lines := make([]string, len(columns)), make([]string, len(columns))
	for i, c := range columns {
		titles[i], lines[i] = c.title, "---"
	}
	return row(titles) + row(lines)
}

// Row returns the card's row in the table of cards, in Markdown.
func (p Personality) Row() string {
	cells := make([]string, len(columns))
	for i, c := range columns {
		cells[i] = c.cell(p)
	}
	return row(cells)
}

func row(cells []string) string {
	escape := strings.NewReplacer("|", `\|`, "\n", " ")
	for i, cell := range cells {
		cells[i] = escape.Replace(cell)
	}
	return "| " + strings.Join(cells, " | ") + " |\n"
}

// Takes reports whether the drivers carry out and report a setting, and also the special value with
// the given knob.
func (p Personality) Takes(field, knob string) bool {
	return p.Value("get") == OK && p.Value(field) == OK && p.Value(knob) == OK
}

// field describes in a few words what the drivers do with a setting.
func (p Personality) field(field, knob string) string {
	answer := p.Value(field)
	if answer == OK {
		answer = p.Value(knob)
	}

	switch {
	case answer == Ignore:
		return "no effect"
	case answer != OK:
		return "refused (" + answer + ")"
	}

	var says []string
	if needs := p.Value(field + ".needs"); needs != "nothing" {
		known := map[string]string{"carrier": "needs a carrier", "up": "needs the PF to be up"}
		says = append(says, cmp.Or(known[needs], "needs "+needs+" Mbit/s"))
	}

	if zero := p.Value(field + ".zero"); zero == Ignore {
		says = append(says, "cannot be taken away")
	} else if zero != OK {
		says = append(says, "none is refused ("+zero+")")
	}

	if delay := p.Value(field + ".delay"); delay != "0" {
		says = append(says, "after "+delay+" ms")
	}

	if p.Value(field+".tell") == "unknown" {
		says = append(says, "not told")
	}

	return strings.Join(append([]string{"taken"}, says...), ", ")
}

// resets describes which settings reset a VF, and for how long.
func (p Personality) resets() string {
	var fields []string
	for _, field := range Fields {
		if ms := p.Value(field + ".reset"); ms != "0" {
			fields = append(fields, fmt.Sprintf("%s %s ms", field, ms))
		}
	}
	return cmp.Or(strings.Join(fields, ", "), "no")
}
