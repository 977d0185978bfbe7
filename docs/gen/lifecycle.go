// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
)

const (
	tableBegin = "<!-- Made by docs/gen from pkg/node/lifecycle. Do not edit. -->\n"
	tableEnd   = "<!-- End of what is made. -->\n"
)

// lifecycleTable replaces the state table in a page.
func lifecycleTable(path string) error {
	page, err := os.ReadFile(path)
	if err != nil {
		return err
	}

	before, rest, ok := strings.Cut(string(page), tableBegin)
	_, after, ended := strings.Cut(rest, tableEnd)
	if !ok || !ended {
		return fmt.Errorf("%s: the lines that enclose the table are missing", path)
	}

	return os.WriteFile(path, []byte(before+tableBegin+stateTable()+tableEnd+after), 0o644)
}

// stateTable returns a table with a row for each event and owner of the Function. It refers to
// evidence by number, and lists the evidence below the table.
func stateTable() string {
	var out bytes.Buffer
	out.WriteString("\n| event | owner |")

	for _, phase := range lifecycle.Phases {
		fmt.Fprintf(&out, " %s |", cmp.Or(phase, "Free"))
	}

	out.WriteString("\n| --- | --- |" + strings.Repeat(" --- |", len(lifecycle.Phases)) + "\n")
	var evidence []lifecycle.Evidence
	number := func(e lifecycle.Evidence) int {
		if !slices.Contains(evidence, e) {
			evidence = append(evidence, e)
		}
		return slices.Index(evidence, e) + 1
	}

	for _, event := range lifecycle.Events {
		shown := event
		for _, owner := range lifecycle.Owners {
			rules, ok := lifecycle.Table[event][owner]
			if !ok {
				continue
			}

			fmt.Fprintf(&out, "| %s | %s |", shown, owner)
			shown = "" // in the rows that follow

			for _, phase := range lifecycle.Phases {
				switch rule := rules[phase]; {
				case rule.Step == "":
					out.WriteString(" |")
				case rule.If == "":
					fmt.Fprintf(&out, " %s |", rule.Step)
				default:
					fmt.Fprintf(&out, " %s if (%d), else %s |", rule.Step,
						number(rule.If), rule.Else)
				}
			}

			out.WriteString("\n")
		}
	}

	out.WriteString("\nEvidence:\n\n")
	for i, e := range evidence {
		fmt.Fprintf(&out, "%d. %s\n", i+1, e)
	}

	out.WriteString("\n")
	return out.String()
}
