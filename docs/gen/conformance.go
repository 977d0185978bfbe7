// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"fmt"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
	"github.com/opiproject/xpu-device-plugin/pkg/conformance/cases"
)

// conformancePage lists the cases of opi-conformance.
func conformancePage() []byte {
	all := cases.All(conformance.NewKinds())
	var page bytes.Buffer
	fmt.Fprintf(&page, `# Cases of opi-conformance

<!-- Made by docs/gen from pkg/conformance/cases. Do not edit. -->

%d cases, profile by profile. How to run them is in [Test an OPI agent](../how-to/test-an-opi-agent.md). What
opi-bridge makes of them, where bridges cannot filter VLANs, is in
[opi-bridge-conformance.json](opi-bridge-conformance.json), but for VRFs and SVIs. What it makes of all of them with a VLAN-aware
bridge is in [opi-bridge-conformance-vlan-aware.json](opi-bridge-conformance-vlan-aware.json).

A case checks one sentence. *must* and *should* are the sentence's own: an agent that does not do what it should *deviates*,
and conforms all the same. Parts in parentheses are not of the sentence, but what follows from it for OPI.
`, len(all))

	for _, profile := range conformance.Profiles() {
		fmt.Fprintf(&page, "\n## %s\n\n%s\n\n| case | level | source | sentence | if it does not hold |\n"+
			"| --- | --- | --- | --- | --- |\n", profile, profile.Describe())
		for _, c := range all {
			if c.Profile != profile {
				continue
			}
			source := c.Source
			if link := c.Link(); link != "" {
				source = fmt.Sprintf("[%s](%s)", c.Source, link)
			}
			fmt.Fprintf(&page, "| `%s` | %s | %s | %s | %s |\n", c.Name,
				cmp.Or(c.Level, conformance.Must), source, cell(c.Says), cell(c.Violation))
		}
	}

	return page.Bytes()
}

// cell escapes a text for a cell of a table.
func cell(text string) string {
	return strings.NewReplacer("|", `\|`, "*", `\*`, "{", `\{`, "}", `\}`, "_", `\_`,
		"<", "&lt;").Replace(text)
}
