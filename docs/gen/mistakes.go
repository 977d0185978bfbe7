// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/opiproject/xpu-device-plugin/test/e2e/mistakes"
)

const mistakesHead = `# Mistakes, and what is said about them

<!-- Made by docs/gen from test/e2e/mistakes/mistakes.yaml. Do not edit. -->

Each row is a mistake that the end-to-end test makes on the demo's cluster, with the command that shows what is wrong, and what
it says there. "..." stands for names and numbers that differ. Where the command is ` + "`kubectl apply`" + `, the API server refuses the
objects. [My pod does not start](../how-to/debug.md) goes from symptoms to causes.
`

// mistakesPage returns the page of what people do wrong.
func mistakesPage() ([]byte, error) {
	sections, err := mistakes.All()
	if err != nil {
		return nil, err
	}

	var page bytes.Buffer
	page.WriteString(mistakesHead)
	for _, section := range sections {
		fmt.Fprintf(&page, "\n## %s\n\n| mistake | command | says | what to do |\n| --- | --- | --- | --- |\n",
			section.Title)
		for _, row := range section.Rows {
			says := make([]string, len(row.Says))
			for i, sentence := range row.Says {
				says[i] = codeCell(sentence)
			}
			fmt.Fprintf(&page, "| %s | %s | %s | %s |\n", row.Mistake, codeCell(row.Command()),
				strings.Join(says, ", "), row.Do)
		}
	}
	return page.Bytes(), nil
}

// codeCell returns code in a cell of a table.
func codeCell(code string) string { return "`" + strings.ReplaceAll(code, "|", `\|`) + "`" }
