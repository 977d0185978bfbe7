// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
)

const (
	propertiesBegin = "<!-- Made by docs/gen from pkg/kernel/netdev. Do not edit. -->\n"
	leftoversBegin  = "<!-- What a leftover means, made by docs/gen from pkg/kernel/netdev. " +
		"Do not edit. -->\n"
)

// propertyTables replaces the tables of the properties in a page.
func propertyTables(path string) error {
	page, err := os.ReadFile(path)
	if err != nil {
		return err
	}

	made, err := replace(string(page), propertiesBegin, propertyTable())
	if err == nil {
		made, err = replace(made, leftoversBegin, leftoverTable())
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}

	return os.WriteFile(path, []byte(made), 0o644)
}

// propertyTable has a row for each property, or for several that have all cells in common.
func propertyTable() string {
	rows := grouped(func(p netdev.Property) (cells []string) {
		var fields []string
		for _, field := range p.Fields {
			word := "`" + field + "`"
			// FieldVLAN is about the protocol too.
			allow := v1alpha1.PrivilegedField(strings.Replace(field, "vlanProtocol", "vlan", 1))
			if slices.Contains(v1alpha1.PrivilegedFields(), allow) {
				word += " (privileged)"
			}
			fields = append(fields, word)
		}

		release := p.Release
		switch {
		case release == "" && p.Move == netdev.Gone:
			release = "the kernel removes it"
		case release == "":
			release = "restored and read back"
		}
		check := p.Check
		if check == "" && p.IsChecked() {
			check = "compared"
		}
		return []string{
			string(p.Source), strings.Join(fields, ", "), string(p.Move), check, release,
		}
	})
	return "| property | of | set by | when it moves | by CNI's `CHECK` | on release |\n" +
		"| --- | --- | --- | --- | --- | --- |\n" + rows
}

// leftoverTable has a row for each case of each property. Properties whose only case is the same
// share a row.
func leftoverTable() string {
	var out strings.Builder
	out.WriteString("| property that stays | what it means for the next owner | then |\n" +
		"| --- | --- | --- |\n")

	done := map[string]bool{}
	for _, p := range netdev.Properties() {
		for _, left := range p.Leftovers {
			what := title(p) + " " + left.If
			switch {
			case len(p.Leftovers) == 1 && done[left.Means]:
				continue
			case len(p.Leftovers) == 1:
				done[left.Means] = true
				what = alike(left)
			case left.If == "":
				what = "any other " + title(p)
			}

			then := "let go, noted"
			if left.Leaks {
				then = "kept from others"
			}
			fmt.Fprintf(&out, "| %s | %s | %s |\n", what, left.Means, then)
		}
	}

	return out.String()
}

// alike returns the titles of the properties that only this case exists for.
func alike(left netdev.Leftover) string {
	var titles []string
	for _, p := range netdev.Properties() {
		if len(p.Leftovers) == 1 && p.Leftovers[0].Means == left.Means {
			titles = append(titles, title(p))
		}
	}
	return strings.Join(titles, ", ")
}

// grouped makes a table's rows. Neighbouring properties with equal cells share a row.
func grouped(cellsOf func(netdev.Property) []string) string {
	var out strings.Builder
	var names []string
	all := netdev.Properties()
	for i, p := range all {
		names = append(names, title(p))
		cells := cellsOf(p)
		if i+1 < len(all) && slices.Equal(cells, cellsOf(all[i+1])) {
			continue
		}
		fmt.Fprintf(&out, "| %s | %s |\n", strings.Join(names, ", "), strings.Join(cells, " | "))
		names = nil
	}
	return out.String()
}

// title returns the property's name in Markdown.
func title(p netdev.Property) string {
	isWords := p.Source == netdev.FromPod || p.Source == netdev.FromNetdev && p.Move == netdev.Kept &&
		p.Leftovers == nil
	if isWords {
		return cmp.Or(p.Title, p.Name)
	}
	return cmp.Or(p.Title, "`"+p.Name+"`")
}
