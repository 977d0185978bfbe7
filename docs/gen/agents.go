// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

const agentsBegin = "<!-- Made by docs/gen from pkg/opi/dialects and pkg/opi/opitest. Do not " +
	"edit. -->\n"

// agentsTable replaces the table of features by dialect in a page.
func agentsTable(path string) error {
	page, err := os.ReadFile(path)
	if err != nil {
		return err
	}

	before, rest, ok := strings.Cut(string(page), agentsBegin)
	_, after, ended := strings.Cut(rest, tableEnd)
	if !ok || !ended {
		return fmt.Errorf("%s: the lines that enclose the table are missing", path)
	}

	return os.WriteFile(path, []byte(before+agentsBegin+featureTable()+tableEnd+after), 0o644)
}

// trait is a row of the table.
type trait struct {
	name  string
	value func(opi.Traits) string
}

func traits() []trait {
	yes := func(is bool) string {
		if is {
			return "yes"
		}
		return "no"
	}

	return []trait{
		{"reports its ports and networks", func(t opi.Traits) string { return yes(t.Verifies) }},
		{"has networks and VNIs", func(t opi.Traits) string { return yes(t.Networks) }},
		{"has ports with several, tagged networks", func(t opi.Traits) string {
			return yes(t.Trunks)
		}},
		{"makes gateways in the xPU", func(t opi.Traits) string {
			if t.Gateways {
				return "if it has Vrf and Svi"
			}
			return "no"
		}},
		{"knows a VF by the numbers of PF and VF", func(t opi.Traits) string {
			return yes(t.Numbered)
		}},
		{"needs the Function's permanent MAC address", func(t opi.Traits) string {
			return yes(t.HardwareMAC)
		}},
		{"is asked whether it answers by", func(t opi.Traits) string { return t.Alive }},
		{"may take for a call that changes something", func(t opi.Traits) string {
			return t.Timing.Change.String()
		}},
		{"may carry out a call without an answer for", func(t opi.Traits) string {
			return t.Timing.Late.String()
		}},
		{"gets at once at most", func(t opi.Traits) string {
			return fmt.Sprintf("%d calls", t.Timing.InFlight)
		}},
	}
}

// featureTable returns a table of the traits and the cases of the client's suite by dialect.
func featureTable() string {
	var out bytes.Buffer
	all := dialects.All()
	row := func(name string, cell func(opi.Traits) string) {
		fmt.Fprintf(&out, "| %s |", name)
		for _, d := range all {
			fmt.Fprintf(&out, " %s |", cell(d.Traits))
		}
		out.WriteString("\n")
	}

	out.WriteString("\n| the agent |")
	for _, d := range all {
		fmt.Fprintf(&out, " `%s` |", d.Name)
	}
	out.WriteString("\n| --- |" + strings.Repeat(" --- |", len(all)) + "\n")

	for _, t := range traits() {
		row(t.name, t.value)
	}
	for _, c := range opitest.ClientCases() {
		row("passes: "+c.Name, func(t opi.Traits) string {
			if c.Possible(t) {
				return "yes"
			}
			return "not possible"
		})
	}

	out.WriteString("\n")
	return out.String()
}
