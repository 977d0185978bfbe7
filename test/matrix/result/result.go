// SPDX-License-Identifier: Apache-2.0

// Package result keeps what the matrix found: on which versions of Kubernetes, container runtimes and
// Multus the demo's story holds. docs/gen makes the table of docs/reference/versions.md of it.
package result

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"
	"sigs.k8s.io/yaml"
)

// What came of the story. The matrix ran nothing where the versions cannot be built.
const (
	Holds   = "holds"
	Fails   = "does not hold"
	Unbuilt = "cannot be built"
)

// A Result is what came of the story on one combination of versions.
type Result struct {
	Kubernetes string `json:"kubernetes"` // 1.37.1
	Runtime    string `json:"runtime"`    // containerd 1.7.24
	Multus     string `json:"multus"`     // 4.3.0
	Story      string `json:"story"`      // [Holds], [Fails] or [Unbuilt]
	// GatesOff are the feature gates that DevicePools may need and that are off, sorted.
	GatesOff []string `json:"gatesOff,omitempty"`
	// Commit is the project's, and Date the day of the run. Both are empty if that is not known.
	Commit string `json:"commit,omitempty"`
	Date   string `json:"date,omitempty"`
}

// key tells combinations of versions.
func (r Result) key() [3]string { return [3]string{r.Kubernetes, r.Runtime, r.Multus} }

// check returns an error if a result cannot be from a run.
func (r Result) check() error {
	if !slices.Contains([]string{Holds, Fails, Unbuilt}, r.Story) {
		return fmt.Errorf("story: is %q, must be %s, %s or %s", r.Story, Holds, Fails, Unbuilt)
	}
	if _, err := version.ParseSemantic(r.Kubernetes); err != nil {
		return fmt.Errorf("kubernetes: %w", err)
	}
	return nil
}

// Read returns the results in a file, which need not exist.
func Read(path string) (all []Result, err error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = yaml.UnmarshalStrict(text, &all)
	}
	for _, r := range all {
		err = errors.Join(err, r.check())
	}
	if err != nil {
		return nil, fmt.Errorf("results of the matrix in %s: %w", path, err)
	}
	return all, nil
}

// head begins the file.
const head = "# What scripts/matrix found. It replaces the entries of the versions that it runs.\n"

// Add writes a result into a file, in place of the last one of these versions.
func Add(path string, r Result) error {
	if err := r.check(); err != nil {
		return err
	}
	all, err := Read(path)
	if err != nil {
		return err
	}

	all = slices.DeleteFunc(all, func(old Result) bool { return old.key() == r.key() })
	all = append(all, r)
	slices.SortStableFunc(all, compare)
	text, err := yaml.Marshal(all)
	if err != nil {
		return err
	}

	return os.WriteFile(path, []byte(head+string(text)), 0o644)
}

// compare sorts results by the version of Kubernetes, then by runtime, and the newest Multus first.
func compare(a, b Result) int {
	order, _ := version.MustParseSemantic(a.Kubernetes).Compare(b.Kubernetes)
	return cmp.Or(order, cmp.Compare(a.Runtime, b.Runtime), cmp.Compare(b.Multus, a.Multus))
}

// Table returns the results as a table in Markdown.
func Table(all []Result) string {
	var out strings.Builder
	out.WriteString("| Kubernetes | container runtime | Multus | story | feature gates that are off | " +
		"run |\n| --- | --- | --- | --- | --- | --- |\n")

	gates := ""
	for _, r := range all {
		off := "-" // a story that failed may not have come to its pools
		if r.Story == Holds {
			off = "none that matter"
		}
		if len(r.GatesOff) > 0 {
			off = "`" + strings.Join(r.GatesOff, "`, `") + "`"
		}
		shown := off
		if len(r.GatesOff) > 0 && off == gates {
			shown = "the same"
		}
		gates = off

		run := "not noted"
		if r.Date != "" {
			run = r.Date + ", " + r.Commit
		}
		fmt.Fprintf(&out, "| %s | %s | %s | %s | %s | %s |\n", r.Kubernetes, r.Runtime, r.Multus, r.Story,
			shown, run)
	}

	return out.String()
}
