// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"go.yaml.in/yaml/v3"
)

// chartPage lists the values of the chart. The comments of values.yaml describe them.
func chartPage(values string) ([]byte, error) {
	text, err := os.ReadFile(values)
	if err != nil {
		return nil, err
	}

	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		return nil, fmt.Errorf("%s: %w", values, err)
	}

	var page bytes.Buffer
	page.WriteString(`# Values of the Helm chart

<!-- Made by docs/gen from deploy/chart/values.yaml. Do not edit. -->

What [the chart](../../deploy/chart) can be told, by ` + "`--set`" + ` or ` + "`--values`" + `. A schema refuses what is not here.
A value without a meaning is the field of Pods, DaemonSets or Deployments of that name.
`)

	root := document.Content[0]
	for i := 0; i < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		fmt.Fprintf(&page, "\n## %s\n", key.Value)

		if text := meaning(key); text != "" {
			fmt.Fprintf(&page, "\n%s\n", text)
		}

		if value.Kind != yaml.MappingNode || len(value.Content) == 0 {
			fmt.Fprintf(&page, "\nDefault: %s.\n", shown(value))
			continue
		}

		page.WriteString("\n| value | default | meaning |\n| --- | --- | --- |\n")
		rows(&page, key.Value, value)
	}

	return page.Bytes(), nil
}

// rows writes a row for each value below a mapping. A mapping whose entries have comments is a
// group of values; any other mapping is itself a value.
func rows(page *bytes.Buffer, path string, mapping *yaml.Node) {
	for i := 0; i < len(mapping.Content); i += 2 {
		key, value := mapping.Content[i], mapping.Content[i+1]
		name := path + "." + key.Value
		if key.Value == "hostPaths" {
			fmt.Fprintf(page, "| `%s` | | %s |\n", name,
				strings.ReplaceAll(meaning(key), "\n", " "))
			rows(page, name, value)
			continue
		}

		fmt.Fprintf(page, "| `%s` | %s | %s |\n", name, shown(value),
			strings.ReplaceAll(meaning(key), "\n", " "))
	}
}

// meaning returns the comment above a key. Indented lines list the possible values, and stay a
// list.
func meaning(key *yaml.Node) string {
	var lines []string
	for line := range strings.Lines(key.HeadComment) {
		line = strings.TrimPrefix(strings.TrimSuffix(line, "\n"), "#")
		line = strings.TrimPrefix(line, " ")
		if word, rest, ok := strings.Cut(strings.TrimSpace(line), "  "); ok &&
			strings.HasPrefix(line, "  ") {
			if len(lines) > 0 && !strings.HasPrefix(lines[len(lines)-1], "- ") {
				lines = append(lines, "")
			}
			line = fmt.Sprintf("- `%s`: %s", word, strings.TrimSpace(rest))
		}

		lines = append(lines, line)
	}

	return strings.Join(lines, "\n")
}

// shown returns a default in the notation of the command line: JSON, but strings without quotes.
func shown(value *yaml.Node) string {
	var decoded any
	if err := value.Decode(&decoded); err != nil {
		return ""
	}
	if text, ok := decoded.(string); ok && text != "" {
		return "`" + text + "`"
	}

	text, err := json.Marshal(decoded)
	if err != nil {
		return ""
	}

	return "`" + string(text) + "`"
}
