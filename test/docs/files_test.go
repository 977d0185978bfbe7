// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"regexp"
	"strings"
	"testing"
)

// filesPage lists the files of the project.
const filesPage = "docs/reference/files.md"

// run matches a path below /run in a document, in the chart or in a program.
var run = regexp.MustCompile("[`\" =](/(?:var/)?run/[a-zA-Z0-9_.<>*/-]+)")

// TestRunComesBack: the page says of everything that the project has below /run whether it comes
// back when /run was emptied, with a test that exists.
func TestRunComesBack(t *testing.T) {
	page := read(t, filesPage)
	_, rest, found := strings.Cut(page, "\n### When /run is emptied\n")
	if !found {
		t.Fatalf("%s does not say what comes back", filesPage)
	}

	var covered []string // beginnings of paths
	for line := range strings.Lines(rest) {
		cells := strings.Split(line, "|")
		if len(cells) != 5 || !strings.Contains(cells[1], "`/") {
			continue
		}
		for _, path := range run.FindAllStringSubmatch(cells[1], -1) {
			covered = append(covered, strings.TrimRight(path[1], "*"))
		}
		tests := namedTest.FindAllStringSubmatch(cells[3], -1)
		if len(tests) == 0 {
			t.Errorf("%s: names no test", cells[1])
		}
		for _, one := range tests {
			if !hasTest(t, one[1], one[2]) {
				t.Errorf("%s: %s has no test %s", cells[1], one[1], one[2])
			}
		}
	}

	sources := files(t, func(path string) bool {
		return path == filesPage || strings.HasPrefix(path, "deploy/chart/templates/") ||
			strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") &&
				(strings.HasPrefix(path, "pkg/node/") || strings.HasPrefix(path, "cni/") ||
					strings.HasPrefix(path, "cmd/xpu-"))
	})
	for _, source := range sources {
		for _, path := range run.FindAllStringSubmatch(read(t, source), -1) {
			if !begins(path[1], covered) {
				t.Errorf("%s: %s does not say whether %s comes back", source, filesPage, path[1])
			}
		}
	}
}

// begins reports whether a path is one of the others, below one or above one.
func begins(path string, others []string) bool {
	for _, other := range others {
		if strings.HasPrefix(path, other) || strings.HasPrefix(other, path) {
			return true
		}
	}
	return false
}
