// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
)

// These lines begin the tables of hardware.md; tableEnd ends both tables.
const (
	featuresBegin = "<!-- Made by docs/gen from docs/gen/hardware.yaml and test/qemu/zoo. Do not " +
		"edit. -->\n"
	cardsBegin = "<!-- Made by docs/gen from test/qemu/zoo. Do not edit. -->\n"
)

// features is the table of hardware.md that shows what works on which card.
type features struct {
	Columns  []string  `yaml:"columns"`
	Sections []section `yaml:"sections"`
}

type section struct {
	Title string    `yaml:"title"`
	Rows  []feature `yaml:"rows"`
}

type feature struct {
	Feature string `yaml:"feature"`
	// Plays is a field of a VF, and the knob of personalities that decides about it. It is empty
	// for rows that do not depend on personalities.
	Plays []string `yaml:"plays"`
	// Played means that every personality of a column plays the row.
	Played bool     `yaml:"played"`
	Cells  []string `yaml:"cells"`
}

// hardwareTables replaces the tables in a page.
func hardwareTables(path, data string, zoo []personality.Personality) error {
	content, err := os.ReadFile(data)
	if err != nil {
		return err
	}

	var f features
	decoder := yaml.NewDecoder(bytes.NewReader(content))
	decoder.KnownFields(true)
	if err := decoder.Decode(&f); err != nil {
		return fmt.Errorf("%s: %w", data, err)
	}

	table, err := f.table(zoo)
	if err != nil {
		return fmt.Errorf("%s: %w", data, err)
	}

	page, err := os.ReadFile(path)
	if err != nil {
		return err
	}

	text, err := replace(string(page), featuresBegin, table)
	if err == nil {
		text, err = replace(text, cardsBegin, cardTable(zoo))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}

	return os.WriteFile(path, []byte(text), 0o644)
}

// replace replaces the text between the line begin and the next tableEnd.
func replace(page, begin, with string) (string, error) {
	before, rest, begun := strings.Cut(page, begin)
	_, after, ended := strings.Cut(rest, tableEnd)
	if !begun || !ended {
		return "", fmt.Errorf("the lines that enclose what follows %q are missing",
			strings.TrimSpace(begin))
	}
	return before + begin + "\n" + with + "\n" + tableEnd + after, nil
}

func (f features) table(zoo []personality.Personality) (string, error) {
	var out strings.Builder
	columns := len(f.Columns)
	fmt.Fprintf(&out, "| feature | %s |\n| ---%s |\n", strings.Join(f.Columns, " | "),
		strings.Repeat(" | ---", columns))

	for _, s := range f.Sections {
		fmt.Fprintf(&out, "| **%s** |%s\n", s.Title, strings.Repeat(" |", columns))
		for _, r := range s.Rows {
			if len(r.Cells) != columns || len(r.Plays) != 0 && len(r.Plays) != 2 {
				return "", fmt.Errorf("row %q: must have %d cells, and plays a field and a knob",
					r.Feature, columns)
			}

			fmt.Fprintf(&out, "| %s |", r.Feature)
			for i, cell := range r.Cells {
				fmt.Fprintf(&out, " %s |", r.cell(f.Columns[i], cell, zoo))
			}
			out.WriteString("\n")
		}
	}

	return out.String(), nil
}

// cell returns the cell of a row and column. If the cell was not tested on hardware, it has the
// result of the played personalities.
func (f feature) cell(column, cell string, zoo []personality.Personality) string {
	rest, documented := strings.CutPrefix(cell, "by documentation")
	if len(f.Plays) == 0 && !f.Played || !documented && cell != "not tested" {
		return cell
	}

	var taken, refused []string
	for _, p := range zoo {
		switch {
		case p.Column != column:
		case f.Played || p.Takes(f.Plays[0], f.Plays[1]):
			taken = append(taken, p.Name)
		default:
			refused = append(refused, p.Name)
		}
	}

	var says []string
	if len(taken) > 0 {
		says = append(says, "played: "+strings.Join(taken, ", "))
	}

	if len(refused) > 0 {
		says = append(says, "refused, played: "+strings.Join(refused, ", "))
	}
	if len(says) == 0 {
		return cell
	}

	if !documented {
		rest = ""
	}

	return strings.Join(says, "; ") + rest
}

// cardTable returns a table with a row for each personality, sorted by title.
func cardTable(zoo []personality.Personality) string {
	sorted := slices.SortedFunc(slices.Values(zoo), func(a, b personality.Personality) int {
		return strings.Compare(a.Title, b.Title)
	})
	out := personality.Header()
	for _, p := range sorted {
		out += p.Row()
	}
	return out
}

// deviations lists the deviations of the personalities, by card.
func deviations(zoo []personality.Personality) string {
	var out strings.Builder
	for _, p := range zoo {
		fmt.Fprintf(&out, "\n### %s\n\n%s; Linux %s.\n\n", p.Name, p.Title, p.Kernel)
		out.WriteString("| it | played | what is done about it | source |\n| --- | --- | --- | " +
			"--- |\n")

		for _, d := range p.Deviations {
			var knobs []string
			for _, s := range d.Play {
				knobs = append(knobs, "`"+s.Knob+"="+s.Value+"`")
			}

			played := strings.Join(knobs, " ")
			if played == "" {
				played = "no"
			}

			does := d.Answer
			if d.Quirk != "" {
				does = "quirk " + d.Quirk
			}

			fmt.Fprintf(&out, "| %s | %s | %s | %s |\n", d.Does, played, does, d.Source)
		}
	}

	return out.String()
}
